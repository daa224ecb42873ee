"""Plans: what they say, what they refuse before anything runs, and the keys of their tasks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import lipscope
from lipscope.cli.main import app
from lipscope.models.memory import batch_size, plan_layers
from lipscope.runs import Plan, expand, run_plan
from lipscope.runs.plan import Block, ModelChoice
from lipscope.runs.registry import QUANTITIES, Trust, quantity_path
from lipscope.runs.store import Store
from lipscope.runs.sweep import dry_run
from lipscope.runs.work import model_fingerprint, run_job
from lipscope.studies.mean_field.attention import model_layer
from sweep_cases import LOADER, plan_of, save_models, with_bytes


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sweep")
    save_models(directory)
    return directory


def test_blocks_start_from_the_top_of_the_file() -> None:
    plan = Plan.from_toml(
        'threads = 2\nmodels = ["a"]\ntexts = "t"\nlengths = "8:32:log"\n[[block]]\n[[block]]\nscopes = ["head"]\n'
        'heads = [1]\nmodels = [{name = "b", part = "encoder"}]\noptions = {radius = 2.5}\n'
    )
    first, second = plan.blocks
    assert (plan.threads, first.lengths, first.texts) == (2, (8, 11, 16, 23, 32), ("t",))
    assert first.models == (ModelChoice("a"),)
    assert second.models == (ModelChoice("b", part="encoder"),)
    assert (second.heads, second.options, second.lengths) == ((1,), {"radius": 2.5}, first.lengths)


def test_a_python_plan_is_written_as_toml_that_reads_back() -> None:
    plan = Plan(
        (Block(models=[ModelChoice('we"ird\\name', loader=LOADER), "b"], texts=["ü\t.txt"], layers=[0, -1], interval=0,
               options={"a key": [1, 2.5, True], "x": {"y": "z"}}), Block(models="c", dtype="float64", rtol=1e-7)),
        threads=3,
    )  # fmt: skip
    assert Plan.from_toml(plan.text, trust=Trust(modules=("sweep_cases",))) == plan
    assert plan.blocks[0].solver["interval"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = [", "not valid TOML"),
        ('models = ["a"]\nlenghts = [3]', "unknown setting 'lenghts'; a plan has: threads, models, texts"),
        ('models = ["a"]\nscopes = ["mlp"]', "unknown scope 'mlp'"),
        ('models = ["a"]\nkind = "adverse"', "unknown kind 'adverse'; known: text, packed"),
        ('models = ["a"]\nkind = "no.such:Kind"', "cannot be imported"),
        ('models = ["a"]\nquantities = ["entropy2"]', "unknown quantity 'entropy2'"),
        ('models = ["a"]\nheads = [1]', "heads are measured at scope 'head'"),
        ('models = ["a"]\nlengths = "8-16"', "lengths must look like"),
        ('models = ["a"]\nlengths = [0]', "lengths must be positive"),
        ('models = ["a"]\ninputs = 0', "inputs must be a whole number of at least 1"),
        ('models = ["a"]\ninputs = true', "inputs must be a whole number"),
        ('models = ["a"]\nlayers = "first"', "layers must be 'all'"),
        ('models = ["a"]\ndtype = "bfloat16"', "dtype must be float32 or float64"),
        ('models = ["a"]\nrtol = "small"', "rtol must be a number"),
        ('models = [{part = "encoder"}]', "a model is a name, or a table with name"),
        ('texts = ["a"]', "at least one model"),
        ('models = ["a"]\nthreads = 0', "threads must be"),
        ('models = ["a"]\n[[block]]\n[[block]]\nscopes = ["x"]', "block 2: unknown scope"),
        ('models = ["a"]\nrtol = 2.0', "rtol must lie strictly between 0 and 1, got 2.0"),
        ('models = ["a"]\nrtol = 0', "rtol must lie strictly between 0 and 1"),
        ('models = ["a"]\nrtol = -1', "rtol must be finite and not negative, got -1"),
        ('models = ["a"]\nrtol = nan', "rtol must be finite"),
        ('models = ["a"]\ndelta = 3', "delta must be at least 1e-30 and less than 1"),
        ('models = ["a"]\ndelta = 0', "delta must be at least 1e-30"),
        (f'models = ["a"]\nseed = {2**70}', f"seed must be at most {2**63 - 1}"),
        ('models = ["a"]\nthreads = 1000000', "threads must be at most 4096"),
        ('models = ["a"]\noptions = {a = 2020-01-01}', "options.a must be a number, string"),
        ('models = ["a"]\noptions = {a = [1, {b = inf}]}', r"options.a\[1\].b must be finite"),
        ('models = ["a"]\nkind = "os:getcwd"', "kind 'os:getcwd' must be a class .* lacks expand, record, measure"),
        ('models = ["a"]\nquantities = ["os:getcwd"]', "quantity 'os:getcwd' must be a function of one argument"),
        ('models = ["a"]\nquantities = ["os:sep"]', "quantity 'os:sep' must be a function"),
        ('models = [{name = "a", allow_pickle = "yes"}]', "allow_pickle of model 'a' must be true or false, got 'yes'"),
        ('models = [{name = "a", part = 1}]', "part of model 'a' must be a string"),
        ("block = 3", r"written as \[\[block\]\]"),
    ],
)
def test_bad_plans_are_refused_with_the_setting(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_toml(text, trust=Trust(modules=("os", "no")))


PAYLOAD = """import pathlib
pathlib.Path(__file__).with_suffix(".ran").touch()
class Kind:
    expand = record = measure = coordinates = effort = None
def quantity(at): ...
def loader(name, dtype): ...
"""


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('models = [{name = "PAYLOAD", loader = "runpy:run_path"}]', "loader 'runpy:run_path' is code"),
        ('models = [{name = "gpt2-mini", loader = "payload:loader"}]', "loader 'payload:loader' is code"),
        ('models = "gpt2-mini"\nkind = "payload:Kind"', "kind 'payload:Kind' is code"),
        ('models = "gpt2-mini"\nquantities = ["payload:quantity"]', "quantity 'payload:quantity' is code"),
        ('models = "gpt2-mini"\nquantities = "payload:quantity"', "quantity 'payload:quantity' is code"),
        ('models = [{name = "MODEL", trust_remote_code = true}]', "wants trust_remote_code for model"),
        ('models = [{name = "MODEL", allow_pickle = true}]', "wants allow_pickle for model"),
    ],
)
def test_a_plan_file_runs_no_code(
    setting: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither by what it names, nor by what it wants to allow; a dry run loads models too."""
    (tmp_path / "payload.py").write_text(PAYLOAD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "evil.py").write_text(f"open({str(tmp_path / 'payload.ran')!r}, 'w')\nclass Evil: ...\n")
    automap = {"AutoConfig": "evil.Evil", "AutoModel": "evil.Evil", "AutoTokenizer": "evil.Evil"}
    (model / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": automap}))
    save_file({"x": torch.zeros(1)}, model / "model.safetensors")
    text = setting.replace("PAYLOAD", str(tmp_path / "payload.py")).replace("MODEL", str(model))
    (tmp_path / "plan.toml").write_text(f'texts = ["python-docs"]\nlengths = [4]\ninputs = 1\n{text}\n')
    for extra in (["--dry-run"], []):
        done = CliRunner().invoke(app, ["sweep", "plan.toml", *extra])
        assert done.exit_code == 2
        assert message in done.output
    assert not (tmp_path / "payload.ran").exists()
    assert "Do you wish to run" not in capfd.readouterr().out


def test_who_reads_a_plan_may_trust_it() -> None:
    text = (
        'models = [{name = "a", allow_pickle = true, loader = "sweep_cases:with_bytes"}, "b"]\nkind = "sweep_cases:SlowText"'
    )
    with pytest.raises(ValueError, match="--trust-module sweep_cases"):
        Plan.from_toml(text)
    with pytest.raises(ValueError, match="--allow-pickle"):
        Plan.from_toml(text, trust=Trust(modules=("sweep_cases",)))
    with pytest.raises(ValueError, match="is code"):
        Plan.from_toml(text, trust=Trust(modules=("sweep",), allow_pickle=True))
    plan = Plan.from_toml(text, trust=Trust(modules=("sweep_cases",), allow_pickle=True))
    assert [(model.allow_pickle, model.trust_remote_code) for model in plan.blocks[0].models] == [(True, False)] * 2
    # What lipscope itself registers needs no trust, by its name or by its path.
    for loader in ("causal-bert", "lipscope.studies.paper.cast:causal_bert"):
        (model,) = Plan.from_toml(f'models = [{{name = "bert-random", loader = "{loader}"}}]').blocks[0].models
        assert model.loader == "lipscope.studies.paper.cast:causal_bert"


def test_installed_packages_declare_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    about = tmp_path / "extras-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: extras\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[lipscope.quantities]\nlargest = sweep_cases:largest_token\n")
    plan = Plan.from_toml('models = "a"\nquantities = ["largest"]')
    assert plan.blocks[0].quantities == ("largest",)
    assert quantity_path("largest") == "sweep_cases:largest_token"
    with pytest.raises(ValueError, match="unknown quantity 'smallest'; known: largest"):
        Plan.from_toml('models = "a"\nquantities = ["smallest"]')


def test_options_have_names() -> None:
    with pytest.raises(ValueError, match="names in options must be strings, got 1"):
        Block(models="a", options={1: 2})
    assert Block(models="a", seed=2**63 - 1, interval=0, kind="sweep_cases:Fragile").solver["seed"] == 2**63 - 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": [2]}, "layer must lie between 0 and 1"),
        ({"heads": [4]}, "head must lie between 0 and 3"),
        ({"lengths": [6, 33]}, "33 tokens are more than the 32 positions of tiny-bert"),
        ({"scopes": ["norm+attention"]}, "no normalisation before attention"),
        ({"texts": ["no-such-text"]}, "neither a corpus, nor a file"),
        ({"texts": []}, "needs texts"),
        ({"inputs": 500}, "the text has 1500 tokens"),
        ({"models": ["./no-such-model"]}, "no directory './no-such-model'"),
        ({"quantities": ["sweep_cases:largest_token"], "kind": "packed"}, "measures no further quantities"),
    ],
)
def test_what_a_model_does_not_have_is_refused_before_anything_runs(
    place: Path, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run_plan(plan_of(place, **settings), tmp_path / "run.db")
    assert list(tmp_path.iterdir()) == []


def test_one_content_under_two_names_and_two_under_one(place: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.txt").write_text((place / "text.txt").read_text())
    with pytest.raises(ValueError, match=r"have the same content"):
        expand(plan_of(place, texts=[str(place / "text.txt"), str(tmp_path / "copy.txt")]))
    with_bytes(str(place / "tiny-gpt2"), None).model.save_pretrained(tmp_path / "tiny-bert")
    twins = [ModelChoice(str(where / "tiny-bert"), loader=LOADER) for where in (place, tmp_path)]
    with pytest.raises(ValueError, match="two models are called 'tiny-bert'"):
        expand(plan_of(place, models=twins))


def test_keys_are_made_of_content(place: Path, tmp_path: Path) -> None:
    def keys(**settings: Any) -> set[str]:
        return {task.key for task in expand(plan_of(place, **settings)).tasks}

    base = keys()
    assert len(base) == 32
    assert keys() == base
    # The same files elsewhere are the same measurements; a new seed, accuracy, dtype or batch is another one.
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("tiny-bert", "tiny-gpt2", "text.txt"):
        (place / name).rename(moved / name)
    try:
        assert {task.key for task in expand(plan_of(moved)).tasks} == base
    finally:
        for name in ("tiny-bert", "tiny-gpt2", "text.txt"):
            (moved / name).rename(place / name)
    for change in (
        {"seed": 1},
        {"rtol": 1e-4},
        {"dtype": "float64"},
        {"options": {"x": 1}},
        {"quantities": ["sweep_cases:clashing"]},
    ):
        assert not keys(**change) & base, change
    # A plan that asks for less asks for some of the same; a measurement that two blocks ask for is listed once.
    assert keys(layers=[0]) < base
    assert keys(scopes=["head"]) < base
    block = plan_of(place).blocks[0]
    assert len(expand(Plan((block, block))).tasks) == 32


def test_the_fingerprint_sees_every_weight(place: Path) -> None:
    handle = with_bytes(str(place / "tiny-gpt2"), None)
    before = model_fingerprint(handle)
    assert before == model_fingerprint(with_bytes(str(place / "tiny-gpt2"), None))
    with torch.no_grad():
        handle.model.h[1].mlp.c_fc.bias[3] += 1e-6
    assert model_fingerprint(handle) != before


def test_a_changed_model_is_noticed_by_the_worker(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = expand(plan_of(place, layers=[0], scopes=["attention"], lengths=[6])).jobs[0]
    (outcome,) = run_job(job)
    assert outcome.error is None
    (outcome,) = run_job(replace(job, fingerprint="0" * 32))
    assert "is not the one that the plan was made with" in str(outcome.error)


def test_rows_are_those_of_a_scan(place: Path, tmp_path: Path) -> None:
    plan = plan_of(place, scopes=["attention"], seed=3)
    run_plan(plan, tmp_path / "run.db")
    with Store(tmp_path / "run.db") as store:
        rows = store.rows()
    assert len(rows) == 2 * 2 * 3 * 4
    for family in ("bert", "gpt2"):
        scan = lipscope.scan(
            with_bytes(str(place / f"tiny-{family}"), None), place / "text.txt", lengths=[6, 9, 24], inputs=4, seed=3,
            batch_tokens=60, solver=lipscope.Auto(**plan.blocks[0].solver),
        )  # fmt: skip
        mine = {(r["layer"], r["n"], r["input"]): r for r in rows if r["model"] == f"tiny-{family}"}
        for row in scan.rows:
            same = mine[row["layer"], row["n"], row["input"]]
            assert {name: same[name] for name in row if name != "seconds"} == {
                k: v for k, v in row.items() if k != "seconds"
            }


@pytest.mark.parametrize("kind", ["text", "packed"])
def test_all_commands_read_the_same_inputs_of_a_long_text(place: Path, tmp_path: Path, kind: str) -> None:
    """More than a million letters: all take the same excerpt, and a seed draws the same inputs from it."""
    text = tmp_path / "long.txt"
    words = [f"{(7 * i * i + i // 5) % 99991:x}" for i in range(300_000)]
    text.write_text("\n\n".join(" ".join(words[i : i + 5]) for i in range(0, len(words), 5)), encoding="utf-8")
    assert text.stat().st_size > 1_000_000
    settings = {"lengths": [8], "inputs": 2, "layers": [0]}
    handle = with_bytes(str(place / "tiny-gpt2"), None)
    gpt2 = ModelChoice(str(place / "tiny-gpt2"), loader=LOADER)
    plan = plan_of(place, models=[gpt2], texts=[str(text)], kind=kind, scopes=["attention"], **settings)
    run_plan(plan, tmp_path / "run.db")
    with Store(tmp_path / "run.db") as store:
        swept = {(row["input"], row["document"]): row["estimate"] for row in store.rows()}
    scan = lipscope.scan(handle, text, pack=kind == "packed", solver=lipscope.Auto(**plan.blocks[0].solver), **settings)
    assert {(row["input"], row["document"]): row["estimate"] for row in scan.rows} == swept
    if kind == "text":
        layer, tokens = model_layer(handle, 0, str(text), n=8, inputs=2)
        studied = lipscope.local_lipschitz(layer, tokens.reshape(2, 8, -1)).estimate
        assert studied.tolist() == pytest.approx([swept[0, None], swept[1, None]], rel=1e-3)


def test_packed_documents_and_quantities(place: Path, tmp_path: Path) -> None:
    (tmp_path / "documents.txt").write_text("\n\n".join(["one two three", "four five", "six seven eight nine"] * 8))
    packed = {"kind": "packed", "texts": [str(tmp_path / "documents.txt")], "scopes": ["attention"], "lengths": [24]}
    run_plan(plan_of(place, **packed, inputs=2, layers=[1]), tmp_path / "packed.db")
    with Store(tmp_path / "packed.db") as store:
        rows = store.rows()
    for model in ("tiny-bert", "tiny-gpt2"):
        for which in (0, 1):
            chunk = [r for r in rows if (r["model"], r["input"]) == (model, which)]
            alone = [r["estimate"] for r in chunk if r["document"] is not None]
            (together,) = (r["estimate"] for r in chunk if r["document"] is None)
            assert len(alone) >= 2
            assert together == pytest.approx(max(alone), rel=1e-3)
    QUANTITIES["largest"] = "sweep_cases:largest_token"
    try:
        summary = run_plan(plan_of(place, quantities=["largest"], lengths=[6]), tmp_path / "quantity.db")
    finally:
        del QUANTITIES["largest"]
    assert summary.failed == 0
    with Store(tmp_path / "quantity.db") as store:
        assert all(r["twice"] == 2 * r["largest"] == 2 * r["radius_max"] for r in store.rows())
    summary = run_plan(plan_of(place, quantities=["sweep_cases:clashing"], lengths=[6], layers=[0]), tmp_path / "clash.db")
    assert summary.failed == summary.tasks > 0
    assert "would overwrite estimate" in summary.failures[0]["error"]


def test_order_and_company_change_no_bit(place: Path) -> None:
    expansion = expand(plan_of(place))

    def bits(jobs: Any) -> dict[str, Any]:
        outcomes = [outcome for job in jobs for outcome in run_job(job)]
        assert all(outcome.error is None for outcome in outcomes)
        return {key: {k: v for k, v in row.items() if k != "seconds"} for outcome in outcomes for key, row in outcome.rows}

    whole = bits(expansion.jobs)
    alone = [
        type(job)(**{**vars(job), "tasks": (task,)}) for job in reversed(expansion.jobs) for task in reversed(job.tasks)
    ]
    torch.manual_seed(7)
    assert bits(alone) == whole
    assert len(whole) == 240


def test_dry_run_counts_and_estimates(place: Path, tmp_path: Path) -> None:
    expansion, left = dry_run(plan_of(place), tmp_path / "run.db")
    assert (len(expansion.tasks), left.tasks, left.rows) == (32, 32, 240)
    assert not (tmp_path / "run.db").exists()
    summary = run_plan(plan_of(place, layers=[0]), tmp_path / "run.db")
    # What else the machine does changes both; the estimate must be of the right size.
    assert 1 / 6 < (left.seconds / 2) / summary.seconds < 6
    _, rest = dry_run(plan_of(place), tmp_path / "run.db")
    assert rest.tasks == 16
    _, halves = dry_run(plan_of(place), tmp_path / "run.db", workers=2)
    assert halves.seconds == pytest.approx(rest.seconds / 2, rel=0.2)
    assert halves.bytes == 2 * rest.bytes > 2**28


def test_a_sweep_plans_the_memory_of_a_scan(place: Path, tmp_path: Path) -> None:
    """One number for both, in every scope; the estimate of a sweep is that of its largest pass."""
    for scope in ("attention", "head", "block", "model"):
        gpt2 = ModelChoice(str(place / "tiny-gpt2"), loader=LOADER)
        _, left = dry_run(
            plan_of(place, models=[gpt2], scopes=[scope], lengths=[6, 24], batch_tokens=60), tmp_path / "run.db"
        )
        handle = with_bytes(str(place / "tiny-gpt2"), None)
        scans = [plan_layers(handle, n, handle.check_layers(None, scope), inputs=batch_size(n, 4, 60), scope=scope).total
                 for n in (6, 24)]  # fmt: skip
        assert left.planned == max(scans)
