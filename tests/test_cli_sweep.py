"""The commands ``sweep`` and ``export``."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lipscope.cli.main import app
from lipscope.models.load import ZOO, ByteTokenizer, Entry, Loaded
from lipscope.runs import Store
from lipscope.runs.store import StoreLock
from model_families import FAMILIES

runner = CliRunner()


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A named model that loads at once."""

    def load(name: str, files: Sequence[Path]) -> Loaded:
        model = FAMILIES["gpt2"]()
        model.resize_token_embeddings(256, mean_resizing=False)
        # Resizing draws the new rows at random, and a model must be the same every time.
        torch.manual_seed(3)
        torch.nn.init.normal_(model.wte.weight)
        return Loaded(model, ByteTokenizer(), name, ("random weights",))

    monkeypatch.setitem(ZOO, "tiny", Entry("tiny", "two layers", "none", "none", load))
    monkeypatch.chdir(tmp_path)


FLAGS = ["--model", "tiny", "--text", "python-docs", "--layers", "0,-1", "--lengths", "6,8", "--inputs", "2"]


def test_sweep_resumes_and_exports() -> None:
    first = runner.invoke(app, ["sweep", *FLAGS, "--scope", "attention", "--scope", "head", "--store", "run.db"])
    assert first.exit_code == 0, first.output
    assert "measured now       8" in first.output
    again = runner.invoke(app, ["sweep", *FLAGS, "--scope", "attention", "--scope", "head", "--store", "run.db"])
    assert "kept from before   8" in again.output
    printed = runner.invoke(app, ["export", "run.db"])
    rows = list(csv.DictReader(io.StringIO(printed.stdout)))
    assert len(rows) == 2 * 2 * 2 * (1 + 4)
    assert {row["notes"] for row in rows} == {"random weights"}
    written = runner.invoke(app, ["export", "run.db", "--format", "json", "--out", "rows.json"])
    assert written.exit_code == 0
    assert len(json.loads(Path("rows.json").read_text())) == 40
    # The plan that the options made is in the store, and is a plan.
    with Store("run.db") as store:
        Path("plan.toml").write_text(store.plan() or "", encoding="utf-8")
    by_file = runner.invoke(app, ["sweep", "plan.toml", "--store", "run.db"])
    assert "kept from before   8" in by_file.output
    fresh = runner.invoke(app, ["sweep", "plan.toml"])
    assert Path("plan.db").exists()
    assert _digest(fresh.output) == _digest(first.output)


def _digest(output: str) -> str:
    (line,) = [line for line in output.splitlines() if "table digest" in line]
    return line.split()[-1]


def test_dry_run_prints_counts_and_writes_nothing() -> None:
    result = runner.invoke(app, ["sweep", *FLAGS, "--dry-run", "--workers", "2"])
    assert result.exit_code == 0, result.output
    assert "4 tasks in 2 jobs" in result.output
    assert "Left: 4 tasks, 8 rows; about" in result.output
    assert "GiB of memory" in result.output
    assert list(Path().iterdir()) == []


def test_limited_memory_is_announced_as_by_a_scan() -> None:
    flags = [*FLAGS, "--memory", "1GiB", "--certificate", "none"]
    swept = runner.invoke(app, ["sweep", *flags])
    assert swept.exit_code == 0, swept.output
    scanned = runner.invoke(app, ["scan", "tiny", *flags[2:]])
    assert "n = 8: expected peak" in swept.stderr
    assert swept.stderr.splitlines()[0] == scanned.stderr.splitlines()[0]


def test_a_termination_request_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    save = Store.save

    def save_and_stop(self: Store, *arguments: object) -> None:
        save(self, *arguments)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Store, "save", save_and_stop)
    stopped = runner.invoke(app, ["sweep", *FLAGS, "--store", "run.db"])
    assert stopped.exit_code != 0
    assert "every finished task is kept in run.db" in stopped.stderr
    monkeypatch.setattr(Store, "save", save)
    rest = runner.invoke(app, ["sweep", *FLAGS, "--store", "run.db"])
    assert "kept from before   1" in rest.output
    assert "measured now       3" in rest.output
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_failures_show_in_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ArithmeticError("no luck")

    monkeypatch.setattr("lipscope.runs.kinds.measured_rows", fail)
    result = runner.invoke(app, ["sweep", *FLAGS, "--store", "run.db"])
    assert result.exit_code == 1
    assert "4 failed, the first at tiny, layer 0, scope attention, n = 6: ArithmeticError: no luck" in result.output
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep"], "give a plan file, or at least one --model and one --text"),
        (["sweep", "nowhere.toml"], "there is no plan 'nowhere.toml'"),
        (["sweep", "bad.toml"], "bad.toml: unknown setting 'modles'"),
        (["sweep", "good.toml", "--inputs", "3"], "leave out --inputs"),
        (["sweep", "good.toml", "--store", "nowhere/run.db"], "no directory 'nowhere' for the store"),
        (["sweep", *FLAGS, "--layers", "x"], "--layers must be"),
        (["sweep", *FLAGS, "--layers", "7"], "layer must lie between 0 and 1"),
        (["sweep", *FLAGS, "--lengths", "64"], "more than the 32 positions"),
        (["sweep", *FLAGS, "--model", "./x"], "no directory './x'"),
        (["sweep", *FLAGS, "--scope", "mlp"], "unknown scope"),
        (["sweep", *FLAGS, "--workers", "0"], "workers must be at least 1"),
        (["sweep", *FLAGS, "--workers", "99999"], "four for each core of this machine; got 99999"),
        (["sweep", *FLAGS, "--workers", "99999", "--dry-run"], "four for each core of this machine; got 99999"),
        (["sweep", *FLAGS, "--workers", "2", "--scheduler", "tcp://127.0.0.1:1"], "exclude each other"),
        (["sweep", *FLAGS, "--store", "locked.db"], "is being written by another process"),
        (["sweep", *FLAGS, "--store", "bad.toml"], "bad.toml is not a lipscope store"),
        (["export", "nowhere.db"], "there is no store 'nowhere.db'"),
        (["export", "bad.toml"], "bad.toml is not a lipscope store"),
    ],
)
def test_one_clear_line(arguments: list[str], message: str) -> None:
    Path("bad.toml").write_text('modles = ["tiny"]\n')
    Path("good.toml").write_text('models = ["tiny"]\ntexts = ["python-docs"]\nlengths = [6]\ninputs = 1\n')
    lock = StoreLock(Path("locked.db"))
    result = runner.invoke(app, arguments)
    lock.release()
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
