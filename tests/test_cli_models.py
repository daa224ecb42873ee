"""The commands for models and texts."""

from __future__ import annotations

import csv
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lipscope
from lipscope.cli.main import app
from lipscope.cli.measure import logit_cells
from lipscope.cli.terminal import progress_bar
from lipscope.models.checkpoints import Loaded
from lipscope.models.load import ZOO, ByteTokenizer, Entry
from lipscope.models.tokens import token_view
from lipscope.report.summary import masks_of
from lipscope.runs.kinds import Text
from lipscope.runs.run import Run
from model_families import FAMILIES

runner = CliRunner()


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A named model that loads at once."""

    def load(name: str, files: object) -> Loaded:
        model = FAMILIES["gpt2"]()
        model.resize_token_embeddings(256)
        return Loaded(model, ByteTokenizer(), name, ("random weights",))

    monkeypatch.setitem(ZOO, "tiny", Entry("tiny", "two layers", "none", "none", load))


SCAN = ["scan", "tiny", "--text", "python-docs", "--layers", "0,-1", "--lengths", "6,8,10", "--inputs", "2"]


def test_lists() -> None:
    models = runner.invoke(app, ["models"])
    assert models.exit_code == 0
    assert "gpt2-random" in models.output
    corpora = runner.invoke(app, ["corpora"])
    assert "python-docs" in corpora.output


def test_scan_prints_writes_and_agrees(tmp_path: Path) -> None:
    result = runner.invoke(app, [*SCAN, "--out", str(tmp_path), "--csv"])
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(io.StringIO((tmp_path / "rows.csv").read_text())))
    assert len(rows) == 2 * 3 * 2
    assert json.loads((tmp_path / "rows.json").read_text())[0]["model"] == "tiny"
    assert (tmp_path / "fits.csv").read_text().count("\n") == 3
    assert {row["notes"] for row in rows} == {"random weights"}
    table = runner.invoke(app, SCAN)
    assert "random weights" in table.output
    assert "causal" in table.output


# After five of six tasks one layer has the three lengths that a fit takes, and the other has two.
@pytest.mark.parametrize("done", [3, 5])
@pytest.mark.parametrize("how", [KeyboardInterrupt(), ArithmeticError("nine is not a good number")])
def test_a_scan_that_is_stopped_shows_and_keeps_what_it_has_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: BaseException, done: int
) -> None:
    whole = json.loads(runner.invoke(app, [*SCAN, "--json"]).output)
    measure, calls = Text.measure, itertools.count()

    def stopped(*arguments: Any) -> list[dict[str, Any]]:
        if next(calls) == done:
            raise how
        return measure(*arguments)

    monkeypatch.setattr(Text, "measure", stopped)
    first = runner.invoke(app, [*SCAN, "--out", str(tmp_path)])
    assert first.exit_code == (130 if isinstance(how, KeyboardInterrupt) else 2)
    assert "σ of tiny on python-docs" in first.stdout
    assert f"{str(how) or 'interrupted'}; what is shown was measured before. Run the same command again" in first.stderr
    assert json.loads((tmp_path / "run.json").read_text())["about"]["stopped"] == (str(how) or "interrupted")
    for file in ("rows.json", "rows.csv"):
        (tmp_path / file).unlink()  # as after a kill: the store has them
    assert len(Run.read(tmp_path)) == 2 * done
    again = runner.invoke(app, [*SCAN, "--out", str(tmp_path), "--json"])
    assert next(calls) == done + 1 + (6 - done)  # the task that failed, and those after it
    timeless = [[row | {"seconds": 0} for row in rows] for rows in (json.loads(again.stdout), whole)]
    assert timeless[0] == timeless[1]
    assert "stopped" not in json.loads((tmp_path / "run.json").read_text())["about"]
    monkeypatch.setattr(Text, "measure", lambda *_: pytest.fail("nothing is measured twice"))
    assert runner.invoke(app, [*SCAN, "--out", str(tmp_path)]).exit_code == 0


def test_what_cannot_be_written_is_said_before_the_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lipscope.cli.measure.load_model", lambda *_: pytest.fail("it was loaded"))
    (tmp_path / "file").touch()
    for place, message in ((tmp_path / "file", "file' cannot be used: it is not a directory"),
                           (Path("/proc/x"), "'/proc/x' cannot be used: No such file or directory")):  # fmt: skip
        result = runner.invoke(app, [*SCAN, "--out", str(place)])
        assert result.exit_code == 2
        assert message in result.stderr


def test_heads_that_say_nothing_leave_the_table_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, files: object) -> Loaded:
        model = FAMILIES["gpt2"]()
        model.resize_token_embeddings(256)
        model.get_submodule("h.1.attn.c_attn").weight.data[:, -16:] = 0.0  # no values in layer 1: σ is 0
        return Loaded(model, ByteTokenizer(), name)

    monkeypatch.setitem(ZOO, "tiny", Entry("tiny", "two layers", "none", "none", load))
    result = runner.invoke(app, [*SCAN, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert len((tmp_path / "fits.csv").read_text().splitlines()) == 2  # the names, and layer 0
    assert {row["estimate"] > 0 for row in Run.read(tmp_path).rows if row["layer"] == 1} == {False}


def test_ctrl_c_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lipscope.cli.show.load_model", interrupted)
    result = runner.invoke(app, ["describe", "tiny"])
    assert (result.exit_code, result.stderr) == (130, "lipscope: interrupted\n")


def test_the_table_is_printed_whatever_becomes_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "rows.csv")

    monkeypatch.setattr("lipscope.runs.files.write_run", full)
    result = runner.invoke(app, [*SCAN, "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "σ of tiny on python-docs" in result.stdout
    assert "'rows.csv' cannot be used: No space left on device" in result.stderr


def test_progress_in_a_pipe_is_a_line_now_and_then_and_quiet_is_quiet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lipscope.cli.terminal.SECONDS_BETWEEN_LINES", 0.0)
    told = runner.invoke(app, [*SCAN, "--out", str(tmp_path)])
    assert "n = 6, layer 1: 33% done after" in told.stderr
    assert " left" in told.stderr
    quiet = runner.invoke(app, [*SCAN, "--quiet", "--out", str(tmp_path / "other")])
    assert (quiet.stderr, quiet.stdout) == ("", told.stdout)


def test_the_time_left_is_told_by_what_was_done_since_the_first_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A minute of looking at models, and half of the work kept from before, say nothing about the rate."""
    now = iter([0.0, 60.0, 70.0])
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with progress_bar() as show:
        show(50, 100, "resumed")
        show(60, 100, "task")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["resumed: 50% done after 60 s", "task: 60% done after 70 s, about 40 s left"]


def test_describe_says_what_can_be_measured_and_what_it_takes() -> None:
    said = runner.invoke(app, ["describe", "tiny"])
    assert said.exit_code == 0, said.output
    for words in ("layer 1: h.1, 4 heads, mask causal, pre-norm", "norm+attention: yes", "σ of all 2 layers", " MiB "):
        assert words in said.output


def test_a_table_for_those_whose_logits_explode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    rows = json.loads(runner.invoke(app, [*SCAN, "--per-head", "--json"]).output)
    at = [row for row in rows if row["n"] == 10]
    worst = max(at, key=lambda row: row["max_logit"])
    said = runner.invoke(app, [*SCAN, "--per-head", "--sort", "max-logit"]).output
    first = next(line.split() for line in said.splitlines() if line.split()[:1] in (["0"], ["1"]))
    assert first[:2] == [str(worst["layer"]), str(worst["head"])]
    assert float(first[8]) == pytest.approx(worst["max_logit"], rel=1e-3)
    assert "largest logit first" in said
    logits = {"layer": 0, "max_logit": 101.0}
    handle = lipscope.load("tiny")
    assert logit_cells(handle, logits) == ["101", "QK-norm, soft-cap, QK-clip"]
    assert logit_cells(handle, logits | {"max_logit": 8.6})[1] == "QK-norm"
    assert logit_cells(handle, logits | {"max_logit": 1.0})[1] == "none"


def test_masks_that_alternate_and_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"layer": layer, "mask": mask} for layer, mask in ((0, "causal"), (1, "window:4"), (2, "causal"), (0, "causal"))]
    assert masks_of(rows) == "causal (layers 0, 2), window:4 (layer 1)"
    assert masks_of(rows[:1]) == "causal"
    said = runner.invoke(app, ["scan", "tiny", "--scope", "model", "--lengths", "6", "--inputs", "1"]).output
    assert "scope model" in said
    assert "layer" not in said.partition("scope model")[2].splitlines()[3]


def test_tokens_as_json_and_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text of some letters, and a few more of them to read " * 3)
    asked = ["tokens", "tiny", "--text", str(tmp_path / "text.txt"), "--n", "8", "--layer", "1"]
    said = runner.invoke(app, [*asked, "--json", "--out", str(tmp_path / "view.json")])
    view = json.loads(said.stdout)
    assert (view["model"], view["layer"], len(view["tokens"]), len(view["influence"])) == ("tiny", 1, 8, 8)
    assert json.loads((tmp_path / "view.json").read_text()) == view


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scan", "./nowhere"], "no directory './nowhere'"),
        (["scan", "gpt2-mini", "--text", "nothing.txt"], "'nothing.txt' is neither a corpus"),
        (["scan", "gpt2-mini", "--layers", "9"], "layer must lie between 0 and 3, got 9"),
        (["tokens", "gpt2-mini", "--layer", "-5"], "layer must lie between 0 and 3, got -5"),
        (["scan", str(Path(__file__).parent)], "holds no config.json, so it is not a saved transformers model"),
        (["scan", "gpt2-mini", "--top", "-1"], "top must be at least 1, got -1"),
        (["bounds", "/no/model"], "no directory '/no/model'"),
        (["smooth", "gpt2-mini", "--target", "-1"], "--target must be positive"),
        (["sweep", "--model", "~/nowhere", "--text", "alice"], "no directory '~/nowhere'"),
        (["scan", "gpt2-mini", "--scope", "mlp"], "unknown scope 'mlp'"),
        (["scan", "gpt2-mini", "--out", __file__], "cannot be used: it is not a directory"),
        (["compare-attention", "gpt2-mini", "--layer", "9"], "layer must lie between 0 and 3, got 9"),
        (["meanfield", "gpt2-mini", "--text", "nothing.txt"], "'nothing.txt' is neither a corpus"),
        (["sensitivity", "gpt2-mini", "--text", "nothing.txt"], "'nothing.txt' is neither a corpus"),
        (["check", "./nowhere"], "no directory './nowhere'"),
        (["plan", "./nowhere"], "no directory './nowhere'"),
    ],
)
def test_a_mistake_is_answered_before_torch_is_imported(arguments: list[str], message: str) -> None:
    code = (
        "import sys\nfrom lipscope.cli.main import main\nsys.argv = ['lipscope', *sys.argv[1:]]\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == "False\n"


@pytest.mark.parametrize("command", ["report", "view"])
def test_a_run_that_is_not_there_is_answered_before_numbers_are_imported(command: str) -> None:
    code = (
        "import sys\nfrom lipscope.cli.main import main\nsys.argv = ['lipscope', *sys.argv[1:]]\n"
        "try:\n    main()\nfinally:\n    print('scipy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, command, "nowhere"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "there is no run 'nowhere'" in done.stderr


def test_a_growth_that_cannot_be_told_has_no_exponent() -> None:
    def said(lengths: str) -> str:
        return runner.invoke(app, ["scan", "tiny", "--layers", "0", "--lengths", lengths, "--inputs", "1"]).stdout

    assert "too few" in said("8,9,10")
    assert " … " not in said("8,9,10")
    assert " … " in said("8,12,16,24,32")


def test_a_mistake_leaves_no_directory(tmp_path: Path) -> None:
    said = runner.invoke(app, ["scan", "gpt2-mini", "--layers", "9", "--out", str(tmp_path / "rows")])
    assert said.exit_code == 2
    assert not (tmp_path / "rows").exists()


def test_short_help() -> None:
    assert runner.invoke(app, ["scan", "-h"]).output == runner.invoke(app, ["scan", "--help"]).output
    assert "--show-completion" in runner.invoke(app, ["-h"]).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scan", "tiny", "--layers", "x"], "--layers must be"),
        (["scan", "tiny", "--layers", "40", "--lengths", "8"], "layer must lie between 0 and 1"),
        (["scan", "tiny", "--lengths", "5000"], "32 positions"),
        (["scan", "tiny", "--text", "nowhere.txt", "--lengths", "8"], "neither a corpus"),
        (["scan", "tiny", "--scope", "mlp", "--lengths", "8"], "unknown scope"),
        (["scan", "./nowhere"], "no directory"),
        (["tokens", "tiny", "--say", " "], "text is empty"),
    ],
)
def test_one_clear_line(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_token_view_is_the_block_norms(family: str) -> None:
    model = FAMILIES[family]()
    model.resize_token_embeddings(256)
    handle = lipscope.load(model, ByteTokenizer())
    view = token_view(handle, "hello", 1)
    recording = handle.record(handle.token_inputs(text="hello"))
    J = recording[1].operator("attention", analytic=False).to_dense()[0]
    blocks = J.reshape(5, 16, 5, 16).transpose(1, 2)
    torch.testing.assert_close(view.influence, torch.linalg.svdvals(blocks)[..., 0], rtol=1e-3, atol=1e-9)
    assert view.tokens == list("hello")
    assert float(view.energy.sum()) == pytest.approx(1)
    i, j, value = view.strongest_pairs(1)[0]
    assert i != j
    assert value == float(view.influence[i, j])
    assert "h" in runner.invoke(app, ["tokens", "tiny", "--say", "hi", "--layer", "-1"]).output
