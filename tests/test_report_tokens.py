"""Token views: of a head against its dense Jacobian, written by a scan, and measured again for a store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lipscope
from lipscope.cli.main import app
from lipscope.models.checkpoints import Loaded
from lipscope.models.load import ZOO, ByteTokenizer, Entry
from lipscope.models.tokens import token_view
from lipscope.report.token_views import measure_views
from lipscope.runs.plan import Plan
from lipscope.runs.run import load_run
from lipscope.runs.sweep import run_plan
from lipscope.runs.work import forget_models
from lipscope.runs.worst_tokens import LONGEST, worst_inputs
from model_families import FAMILIES
from report_cases import make_rows
from sweep_cases import TEXT, plan_of, save_models

runner = CliRunner()


def load_tiny(name: str, files: object = None) -> Loaded:
    model = FAMILIES["gpt2"]()
    model.resize_token_embeddings(256, mean_resizing=False)
    torch.manual_seed(2)
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    return Loaded(model, ByteTokenizer(), name, ("random weights",))


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ZOO, "tiny", Entry("tiny", "two layers", "none", "none", load_tiny))


@pytest.mark.parametrize("family", ["bert", "llama", "bloom"])
def test_the_view_of_a_head_is_that_of_its_dense_jacobian(family: str) -> None:
    model = FAMILIES[family]()
    model.resize_token_embeddings(256)
    handle = lipscope.load(model, ByteTokenizer())
    recording = handle.record(handle.token_inputs(text="hello"))
    whole = recording[1].operator("head", analytic=False).to_dense()[0]
    heads, n, d = handle.layer(1).heads, 5, 16
    for head in range(heads):
        view = token_view(handle, "hello", 1, head=head)
        # Rows of the output of all heads that belong to this one.
        J = whole.reshape(n, heads, -1, n * d)[:, head].reshape(-1, n * d)
        values = torch.linalg.svdvals(J)
        torch.testing.assert_close(
            view.result.singular_values.to(values), values[: len(view.result.singular_values)], rtol=1e-3, atol=1e-9
        )
        blocks = J.reshape(n, -1, n, d).transpose(1, 2)
        torch.testing.assert_close(view.influence.to(J), torch.linalg.svdvals(blocks)[..., 0], rtol=1e-3, atol=1e-9)
        right = torch.linalg.svd(J)[2][0].reshape(n, d)
        torch.testing.assert_close(view.energy.to(J), right.square().sum(-1), rtol=1e-2, atol=1e-4)
        assert view.result.lower <= values[0] <= view.result.upper
        assert (view.layer, view.head, view.result.scope) == (1, head, "head")


def test_scope_head_needs_a_head() -> None:
    handle = lipscope.load(load_tiny("tiny").model, ByteTokenizer())
    with pytest.raises(ValueError, match="needs the index of a head"):
        token_view(handle, "hello", 0, scope="head")
    with pytest.raises(ValueError, match="head must lie between"):
        token_view(handle, "hello", 0, head=99)


def test_the_worst_input_of_the_worst_places_is_looked_at() -> None:
    rows = make_rows(layers=3, heads=2, lengths=(8, 32, 2 * LONGEST), inputs=3)
    found = worst_inputs(rows, 2)
    assert [(row["layer"], row["head"], row["n"]) for row in found] == [(2, 1, 32), (2, 0, 32)]
    for row in found:
        rivals = [r for r in rows if (r["layer"], r["head"], r["n"]) == (row["layer"], row["head"], row["n"])]
        assert row["estimate"] == max(r["estimate"] for r in rivals)
    long = [r for r in rows if r["n"] > LONGEST]
    assert worst_inputs(long, 1)[0]["n"] == 2 * LONGEST


def test_a_scan_keeps_its_story_and_its_views(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "out"
    scan = [
        "scan",
        "tiny",
        "--text",
        str(tmp_path / "text.txt"),
        "--per-head",
        "--lengths",
        "6,8,10",
        "--inputs",
        "2",
        "--seed",
        "5",
    ]
    done = runner.invoke(app, [*scan, "--views", "2", "--out", str(out)])
    assert done.exit_code == 0, done.output
    run = load_run(out)
    assert run.story.seeds == (5,)
    assert run.story.environments[0]["versions"]["lipscope"] == lipscope.__version__
    assert run.story.command is not None
    assert run.story.command.startswith(f"lipscope scan tiny --text {tmp_path / 'text.txt'}")
    assert "--seed 5" in run.story.command
    views = json.loads((out / "tokens.json").read_text())
    assert len(views) == 2
    for view in views:
        # The view looks at the very input that the row was measured on.
        (row,) = [r for r in run.rows if all(r[name] == view[name] for name in ("layer", "head", "n", "input"))]
        assert view["estimate"] == pytest.approx(row["estimate"], rel=2e-3)
        assert "".join(view["tokens"]) in TEXT
        assert sum(view["energy"]) == pytest.approx(1, abs=1e-4)
    # The command that it names makes the same rows again.
    again = runner.invoke(app, [*run.story.command.replace(str(out), str(tmp_path / "again")).split()[1:]])
    assert again.exit_code == 0, again.output
    times = {"seconds"}
    rows = [json.loads((place / "rows.json").read_text()) for place in (out, tmp_path / "again")]
    assert [{k: v for k, v in r.items() if k not in times} for r in rows[0]] == [
        {k: v for k, v in r.items() if k not in times} for r in rows[1]
    ]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    plan = Plan.of(
        models=["tiny"], texts=[str(tmp_path / "text.txt")], scopes=["attention", "block"], lengths=[6, 9], inputs=2
    )
    run_plan(plan, tmp_path / "run.db")
    return tmp_path / "run.db"


def test_the_inputs_of_a_sweep_are_found_again(store: Path) -> None:
    run = load_run(store)
    said: list[str] = []
    views = measure_views(run, 2, say=said.append)
    assert len(views) == 2
    for view in views:
        (row,) = [r for r in run.rows if all(r[name] == view[name] for name in ("layer", "scope", "n", "input"))]
        assert view["estimate"] == pytest.approx(row["estimate"], rel=2e-3)
        assert "".join(view["tokens"]) in TEXT
    assert any("scope block are left out, as they take long" in line for line in said)
    assert len(measure_views(run, 1, every_scope=True)) == 2


def test_another_model_or_text_is_noticed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = load_run(store)

    def other(name: str, files: object = None) -> Loaded:
        found = load_tiny(name)
        with torch.no_grad():
            found.model.get_input_embeddings().weight.mul_(2)
        return found

    said: list[str] = []
    monkeypatch.setitem(ZOO, "tiny", Entry("tiny", "two layers", "none", "none", other))
    forget_models()
    assert measure_views(run, 1, say=said.append) == []
    assert "is not the one that was measured" in said[0]
    monkeypatch.setitem(ZOO, "tiny", Entry("tiny", "two layers", "none", "none", load_tiny))
    forget_models()
    (store.parent / "text.txt").write_text(TEXT[::-1])
    assert measure_views(run, 1, say=said.append) == []
    assert "text.txt' here is not the one that was measured" in said[-2]


def test_a_store_of_someone_else_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_models(tmp_path)
    run_plan(plan_of(tmp_path, scopes=["attention"], lengths=[6], inputs=1), tmp_path / "run.db")
    run = load_run(tmp_path / "run.db")
    assert "sweep_cases:with_bytes" in (run.story.plan or "")
    called: list[Any] = []
    monkeypatch.setattr("sweep_cases.with_bytes", lambda *given: called.append(given))
    said: list[str] = []
    assert measure_views(run, 1, every_scope=True, say=said.append) == []
    assert called == []
    assert "needs more trust than a report gives" in said[0]


def test_the_report_of_a_store(store: Path, tmp_path: Path) -> None:
    done = runner.invoke(app, ["report", str(store), "--out", str(tmp_path / "report.html")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Token view" in page
    assert page.count('class="panel view"') == 3 - 1  # two layers at scope attention
    assert "lipscope sweep plan.toml --store run.db" in page
    assert "scopes = [&#34;attention&#34;, &#34;block&#34;]" in page
    assert runner.invoke(app, ["report", str(store), "--views", "-1"]).exit_code == 2
