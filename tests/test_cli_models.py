"""The commands for models and texts."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lipscope
from lipscope.cli.main import app
from lipscope.models.checkpoints import Loaded
from lipscope.models.load import ZOO, ByteTokenizer, Entry
from lipscope.models.tokens import token_view
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
