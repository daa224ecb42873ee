"""One meaning per option, one rule for what a command is about, and commands in groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import make_reference
from lipscope.cli.main import PANELS, app

runner = CliRunner()
# Several heads may be chosen where several are measured; a weights file has only the first two scopes; half precision is
# checked, and never measured in.
TWO_FORMS = {
    "--head": {"*integer*", "*text*"},
    "--scope": {"*text*", "`attention`, `head`"},
    "--dtype": {"`float32`, `float64`", "`float32`, `float64`, `bfloat16`, `float16`"},
}
SMALL = {
    "bounds": ["--radius", "1", "--n", "4"],
    "attack": ["--radius", "1", "--lengths", "4"],
    "compare-attention": ["--n", "4", "--lengths", "4,6,8", "--inputs", "1", "--search", "0", "--kinds", "dot-product"],
    "meanfield": ["--lengths", "4,6", "--repeats", "1", "--transport-up-to", "0"],
}


def test_an_option_takes_the_same_in_every_command() -> None:
    values: dict[str, set[str]] = {}
    for command in make_reference.registered().values():
        for parameter in make_reference.parameters(command):
            if parameter.option:
                values.setdefault(" / ".join(parameter.names), set()).add(parameter.value)
    assert {name: found for name, found in values.items() if len(found) > 1} == TWO_FORMS
    spelled = [name for names in values for name in names.split(" / ")]
    assert len(spelled) == len(set(spelled)), "an option has a negative form in one command and none in another"


def test_help_lists_the_commands_in_groups() -> None:
    shown = runner.invoke(app, ["--help"], env={"COLUMNS": "100"}).output
    places = [shown.index(f"─ {panel} ─") for panel in PANELS]
    assert list(PANELS) == ["Measure", "Bound", "Show", "Change", "Know"]
    assert places == sorted(places)


def test_commands_are_functions_that_can_be_called_from_python(capsys: pytest.CaptureFixture[str]) -> None:
    from lipscope.cli.bounds import bounds
    from lipscope.cli.options import Target
    from lipscope.cli.show import corpora

    corpora()
    assert "python-docs" in capsys.readouterr().out
    bounds("random", radius=1.0, n=4)
    assert "refined.unmasked" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--width belongs to random weights"):
        bounds("layer.safetensors", target=Target(width=3))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(4, 4, generator=generator) / 2 for name in ("q", "k", "v", "out")}, tmp_path / "layer")
    return tmp_path / "layer"


@pytest.mark.parametrize("command", SMALL)
def test_a_weights_file_needs_no_suffix(command: str, weights: Path) -> None:
    done = runner.invoke(app, [command, str(weights), *SMALL[command], "--heads", "2", "--mask", "causal"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("command", SMALL)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["WEIGHTS", "--layer", "1", "--part", "encoder"], "--layer, --part belong to a model, but"),
        (["WEIGHTS", "--text", "alice"], "--text belongs to a model, but"),
        (["WEIGHTS", "--width", "8"], "--width belongs to random weights, but"),
        (["random", "--layer", "0"], "--layer belongs to a model, but random weights are those of one layer"),
        (["random", "--transposed"], "--transposed belongs to a weights file, but random weights have no file"),
        (["gpt2-mini", "--heads", "2"], "--heads belongs to a weights file, but gpt2-mini is a model"),
        (["nowhere.safetensors"], "no such file"),
    ],
)
def test_what_belongs_to_another_source_is_refused(command: str, arguments: list[str], message: str, weights: Path) -> None:
    given = [str(weights) if word == "WEIGHTS" else word for word in arguments]
    refused = runner.invoke(app, [command, *given, *SMALL[command]])
    assert refused.exit_code == 2
    assert message in refused.stderr


def test_words_and_a_text_exclude_each_other() -> None:
    for command in ("tokens", "bounds"):
        refused = runner.invoke(app, [command, "gpt2-mini", "--say", "to be", "--text", "alice", "--n", "4"])
        assert "--text, --n belong to a text, but --say gives the words themselves" in refused.stderr
