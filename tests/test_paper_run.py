"""The paper's experiments on tiny models: what is measured, against dense Jacobians, and the command."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lipscope.bounds.domain import ball
from lipscope.bounds.exponent import regimes
from lipscope.bounds.pairs import proposition34_case, real_eigenvalues, strongest_head
from lipscope.cli.main import app
from lipscope.models.selftest import check_map
from lipscope.report import Chart, draw
from lipscope.runs import Store, expand
from lipscope.runs.work import loaded_model
from lipscope.studies.paper.cast import causal_bert, find_cast, masked, weights_of
from lipscope.studies.paper.differences import VARIANTS, plain_forward, power_loop, textbook_seconds
from lipscope.studies.paper.plan import FULL, MODES, paper_plan
from paper_cases import TINY, tiny_zoo

runner = CliRunner()


def _only_the_first(chart: Chart, *paths: Path) -> list[Path]:
    if chart.name == "growth-random":
        return draw(chart, *paths)
    paths[0].write_bytes(b"")
    return []


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_zoo(monkeypatch)
    monkeypatch.setitem(MODES, "quick", TINY)
    monkeypatch.setattr("lipscope.studies.paper.plan.paper_text", lambda: "python-docs")
    monkeypatch.setattr("lipscope.studies.paper.run.paper_text", lambda: "python-docs")
    # Drawing has its own test; here one figure shows that it is called.
    monkeypatch.setattr("lipscope.studies.paper.run.draw", _only_the_first)


def test_full_settings_are_those_of_the_paper() -> None:
    assert FULL.lengths == tuple(range(2, 100, 2))
    assert FULL.inputs == 10
    assert FULL.long_lengths[-1] == 502
    assert FULL.adversarial_lengths == (2, 7, 12, 17, 22, 27, 32, 37, 42, 47, 52, 57, 62, 67, 72, 77, 82, 87, 92, 97)
    assert FULL.radii == (15.5, 21.5, 100.0, 10.0)


def test_settings_expand_to_the_right_points() -> None:
    tasks = expand(paper_plan(TINY, find_cast())).tasks

    def points(experiment: str, model: str) -> set[tuple[Any, ...]]:
        mine = [t for t in tasks if t.identity["options"]["experiment"] == experiment and t.labels["model"] == model]
        return {(t.identity["layer"], t.identity["scope"], t.identity["n"]) for t in mine}

    whole = {(layer, "attention", n) for layer in (0, 1) for n in TINY.lengths}
    for model in ("bert-random", "bert-random-causal", "gpt2-random", "smollm2-135m"):
        assert points("growth", model) == whole
    assert points("long range", "bert-random") == {(0, "attention", 12), (1, "attention", 12)}
    assert points("long range", "gpt2-random") == set()
    scopes = {scope for _, scope, _ in points("layernorm", "gpt2-random")}
    assert scopes == {"attention", "norm+attention", "attention+residual"}
    assert {scope for _, scope, _ in points("layernorm", "bert-random")} == {"attention", "attention+residual"}
    variants = {t.identity["variant"] for t in tasks if t.identity["options"]["experiment"] == "differences"}
    assert variants == set(VARIANTS)
    placed = [t for t in tasks if "radius" in t.identity]
    attacked = {
        (t.labels["model"], t.identity["radius"], t.identity["n"])
        for t in placed
        if t.identity["options"]["experiment"] == "adversarial"
    }
    wanted = {(m, r, n) for m in ("bert-random", "gpt2-random") for r in (1.0,) for n in (2, 4, 7)}
    assert attacked == wanted
    # Where growth ends: a radius per layer, at which √n growth is proved up to about the number asked for.
    choices = {member.name: member.choice for member in find_cast().members}
    for task in (t for t in placed if t.identity["options"]["experiment"] == "border"):
        handle = loaded_model(choices[task.labels["model"]], None).handle
        head = weights_of(handle, task.identity["layer"]).head(task.identity["heads"][0])
        (regime,) = regimes(head, ball(task.identity["radius"]))
        assert math.exp(regime.exponent) == pytest.approx(TINY.border, rel=0.1)


def test_growth_is_measured_on_the_second_text_where_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def texts(experiment: str) -> set[tuple[str, int]]:
        tasks = expand(paper_plan(TINY, find_cast())).tasks
        mine = [task for task in tasks if task.identity["options"]["experiment"] == experiment]
        return {(task.labels["text"], task.identity["n"]) for task in mine}

    assert texts("growth, second text") == set()
    first = texts("growth")
    (tmp_path / "ag_news").mkdir()
    (tmp_path / "ag_news" / "test.csv").write_text('"3","News","Wall St. falls while oil rises again."\n' * 40)
    monkeypatch.setenv("LIPSCOPE_ORIGINALS", str(tmp_path))
    assert texts("growth, second text") == {("ag_news", n) for n in TINY.lengths}
    assert texts("growth") == first == {("python-docs", n) for n in TINY.lengths}


def test_causal_bert_leaks_nothing_and_keeps_its_weights() -> None:
    free = loaded_model(find_cast().members[0].choice, None).handle
    causal = causal_bert("bert-random", torch.float64)
    assert causal.name == "bert-random-causal"
    for name, tensor in causal.model.state_dict().items():
        assert torch.equal(tensor, free.model.state_dict()[name])
    inputs = causal.token_inputs(input_ids=torch.arange(8)[None])
    recording = causal.record(inputs)
    for layer in causal.layers:
        assert layer.mask == "causal"
        x = recording[layer.index].tokens()
        check_map(recording[layer.index].map(), x, layer)
        J = recording[layer.index].operator().to_dense()[0].reshape(8, -1, 8, x.shape[-1])
        for i in range(8):
            assert float(J[i, :, i + 1 :].abs().max() if i < 7 else 0.0) == 0.0
    from lipscope.models.load import load_named

    with pytest.raises(ValueError, match="no causal form"):
        masked(load_named("gpt2-random"))


def test_cast_uses_a_directory_and_names_stand_ins(tmp_path: Path) -> None:
    from lipscope.models.load import load_named

    cast = find_cast()
    assert [(m.name, m.stands_for) for m in cast.members[3:]] == [("smollm2-135m", "gpt2")]
    assert cast.absent == ("bert-base-uncased is not on this machine, and nothing that could stand in for it is installed",)
    load_named("gpt2-random").model.save_pretrained(tmp_path / "own-gpt2")
    own = find_cast(gpt2=str(tmp_path / "own-gpt2"))
    assert (own.members[-1].name, own.members[-1].stands_for) == ("own-gpt2", None)
    with pytest.raises(FileNotFoundError):
        find_cast(bert=str(tmp_path / "nowhere"))


def test_plain_torch_is_the_layer() -> None:
    handle = loaded_model(find_cast().members[2].choice, "float64").handle
    layer = weights_of(handle, 1)
    assert layer is not None
    X = torch.randn(7, layer.width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(plain_forward(layer)(X), layer(X))
    J = torch.func.jacrev(plain_forward(layer))(X).reshape(X.numel(), X.numel())
    truth = float(torch.linalg.matrix_norm(J, 2))
    assert power_loop(plain_forward(layer), X, rtol=1e-10, steps=2000)[0] == pytest.approx(truth, rel=1e-6)
    dropped = plain_forward(layer, dropout=0.5, seed=1)
    assert torch.equal(dropped(X), dropped(X))
    assert not torch.allclose(dropped(X), layer(X))
    sampled = textbook_seconds([(layer, X)], [(7, layer.width)] * 10)
    assert sampled["seconds"] == pytest.approx(10 * sampled["sample_seconds"])


def test_eigenvalues_and_the_papers_case() -> None:
    handle = loaded_model(find_cast().members[2].choice, "float64").handle
    layer = weights_of(handle, 0)
    assert layer is not None
    for h in range(layer.heads):
        head = layer.head(h)
        A = head.tau * head.k.mT @ head.q
        every = torch.linalg.eigvals(A)
        real = every.real[(every.imag.abs() < 1e-9) & (every.abs() > 1e-9)]
        assert sorted(real_eigenvalues(head)) == pytest.approx(sorted(real.tolist()), rel=1e-7)
        high, low = max(0.0, float(real.max())), min(0.0, float(real.min()))
        assert proposition34_case(real_eigenvalues(head)) == ("max" if high > -8 * low else "min")
    assert 0 <= strongest_head(layer) < layer.heads


def test_the_command_measures_resumes_and_writes(tmp_path: Path) -> None:
    first = runner.invoke(app, ["paper", "--quick", "--workers", "1", "--out", str(tmp_path / "out")])
    assert first.exit_code == 0, first.output
    # Two times of the same work, neither of them that of all tasks.
    told = r"The \d+ values of σ on real text took .* the textbook loop would need about"
    assert re.search(told, " ".join(first.output.split()))
    for name in ("FINDINGS.md", "findings.html", "reproduction.md", "FINDINGS.csv", "figures/growth-random.png"):
        assert (tmp_path / "out" / name).stat().st_size > 0
    with Store(tmp_path / "out" / "RUN.db") as store:
        rows = store.rows()
    _check_rows(rows)
    page = (tmp_path / "out" / "FINDINGS.md").read_text(encoding="utf-8")
    again = runner.invoke(app, ["paper", "--quick", "--workers", "1", "--out", str(tmp_path / "out")])
    assert again.exit_code == 0, again.output
    assert "0 tasks measured now" in again.output
    assert (tmp_path / "out" / "FINDINGS.md").read_text(encoding="utf-8") == page


def _check_rows(rows: list[dict[str, Any]]) -> None:
    """σ and the companion estimator of every short input against a dense Jacobian, and each difference has its rows."""
    cast = find_cast()
    growth = [row for row in rows if row["experiment"] == "growth" and row["n"] == 8 and row["input"] == 0]
    assert len(growth) == 2 * len(cast.members)
    plan = paper_plan(TINY, cast)
    jobs = [job for job in expand(plan).jobs if job.tasks[0].identity["options"]["experiment"] == "growth"]
    for row in growth:
        (member,) = [m for m in cast.members if m.name == row["model"]]
        handle = loaded_model(member.choice, None).handle
        (job,) = [j for j in jobs if j.tasks[0].labels["model"] == member.name and j.tasks[0].identity["n"] == 8]
        recording = handle.record(handle.token_inputs(input_ids=torch.tensor(job.payload["ids"])))
        function, X = recording[row["layer"]].map(), recording[row["layer"]].tokens()
        J = torch.autograd.functional.jacobian(lambda x, f=function, X=X: f(torch.cat([x, X[1:]]))[0], X[:1])
        J = J.reshape(J[:, :, 0, 0, 0].numel() if J.ndim == 5 else -1, X[0].numel())
        assert row["estimate"] == pytest.approx(float(torch.linalg.matrix_norm(J, 2)), rel=2e-3)
        f = function(X)[0].flatten()
        assert row["companion"] == pytest.approx(float((J.mT @ f).norm().sqrt()), rel=1e-6)
        if row.get("certified") is not None:
            assert row["certified"] >= row["lower"]
    for variant in VARIANTS:
        ratios = [row["value"] / row["reference"] for row in rows if row.get("variant") == variant]
        assert ratios, variant
        if variant != "absolute tolerance":  # σ of these weights is so large that the tolerance is a fine one
            assert any(abs(ratio - 1) > 1e-6 for ratio in ratios), variant


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for flags, message in (
        (["--out", str(tmp_path / "file")], "must be a directory"),
        (["--out", str(tmp_path / "o"), "--workers", "0"], "workers must be at least 1"),
        (["--out", str(tmp_path / "o"), "--bert", "/no/such/model"], "no directory"),
        (["--out", str(tmp_path / "o"), "--threads", "0"], "threads"),
    ):
        result = runner.invoke(app, ["paper", *flags])
        assert result.exit_code == 2
        assert message in result.output
        assert len(result.output.strip().splitlines()) == 1
