"""``lipscope meanfield`` prints, writes figures, and says in one line what is wrong."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from lipscope.cli.main import app
from lipscope.models.load import ZOO, ByteTokenizer, Entry, Loaded
from model_families import FAMILIES

runner = CliRunner()


@pytest.fixture
def weights(tmp_path: Path) -> str:
    path = tmp_path / "layer.safetensors"
    G = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(4, 4, generator=G) / 2 for name in ("q", "k", "v", "out")}, path)
    return str(path)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named models that load at once."""
    for family in ("gpt2", "bert", "llama"):

        def load(name: str, files: Sequence[Path], family: str = family) -> Loaded:
            model = FAMILIES[family]()
            model.resize_token_embeddings(256)
            return Loaded(model, ByteTokenizer(), name, ())

        monkeypatch.setitem(ZOO, f"tiny-{family}", Entry(f"tiny-{family}", "", "none", "none", load))


def test_table_json_and_figures(weights: str, tmp_path: Path) -> None:
    arguments = ["meanfield", weights, "--heads", "2", "--lengths", "4,8,12,16", "--repeats", "2", "--law", "ball:1"]
    out = tmp_path / "out"
    shown = runner.invoke(app, [*arguments, "--out", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "layer.safetensors: tokens from ball:1, mask full" in shown.output
    assert "refined" in shown.output
    assert (out / "plateau.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "plateau.html").read_text(encoding="utf-8")
    # Self-contained: the library is inside, and no script is loaded from elsewhere.
    assert "Plotly.react" in page
    assert "<script src=" not in page.replace(" charset", "")
    rows = list(csv.DictReader((out / "rows.csv").open()))
    study = json.loads((out / "study.json").read_text())
    assert len(rows) == len(study["rows"]) == 8
    printed = json.loads(runner.invoke(app, [*arguments, "--json"]).stdout)
    assert printed == study
    assert all(row["upper"] <= study["bound"] for row in study["rows"])
    head = json.loads(runner.invoke(app, [*arguments, "--json", "--head", "1", "--mask", "causal"]).stdout)
    assert head["layer"].endswith("head 1")
    assert head["mask"] == "causal"


@pytest.mark.parametrize(("family", "mask"), [("gpt2", "causal"), ("bert", "full")])
def test_layers_of_models(family: str, mask: str) -> None:
    arguments = ["meanfield", f"tiny-{family}", "--layer", "-1", "--lengths", "4,40", "--repeats", "1", "--json"]
    # These models know 32 positions; the study may be longer, since the layer itself does not count.
    found = json.loads(runner.invoke(app, [*arguments, "--n", "24"]).stdout)
    assert found["mask"] == mask
    assert found["layer"] == f"tiny-{family}, layer 1"
    assert "real tokens" in found["law"]
    gaussian = json.loads(runner.invoke(app, [*arguments, "--n", "24", "--law", "gaussian"]).stdout)
    assert gaussian["law"].startswith("gaussian:")
    assert gaussian["law_radius"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["WEIGHTS", "--law", "cube"], "unknown law 'cube'"),
        (["WEIGHTS", "--law", "tokens"], "--law tokens needs a model"),
        (["WEIGHTS", "--law", "ball:0"], "radius must be positive"),
        (["WEIGHTS", "--lengths", "x"], "lengths must look like"),
        (["WEIGHTS", "--repeats", "0"], "repeats must be at least 1"),
        (["WEIGHTS", "--repeats", "9" * 20], "repeats must be at most 100,000"),
        (["WEIGHTS", "--mask", "window:2"], "no mean-field meaning"),
        (["WEIGHTS", "--head", "7"], "head must lie between"),
        (["WEIGHTS", "--sink-length", "7"], "sink_length belongs to layers with sinks"),
        (["WEIGHTS", "--layer", "7"], "--layer belongs to a model"),
        (["nowhere.safetensors"], "no such file"),
        (["./nowhere"], "no directory"),
        (["tiny-llama", "--n", "16"], "has no mean-field form"),
        (["tiny-gpt2", "--layer", "9"], "layer must lie between 0 and 1"),
    ],
)
def test_one_clear_line(weights: str, arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["meanfield", *(weights if word == "WEIGHTS" else word for word in arguments)])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
