"""Every study writes rows that ``lipscope report`` makes a page of."""

from __future__ import annotations

import csv
import json

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from lipscope.cli.main import app

LAYER = "layer.safetensors"
COMMANDS = {
    "attack": ["attack", LAYER, "--radius", "2", "--lengths", "2,3,4"],
    "ascent": ["attack", LAYER, "--radius", "2", "--lengths", "3", "--method", "ascend", "--restarts", "4", "--steps", "3"],
    "words": ["attack", "gpt2-mini", "--method", "tokens", "--say", "the white rabbit", "--candidates", "2"],
    "compare": ["compare-attention", LAYER, "--n", "4", "--lengths", "3,4,5", "--inputs", "2", "--search", "0",
                "--kinds", "dot-product,l2"],
    "meanfield": ["meanfield", LAYER, "--law", "ball:1.5", "--lengths", "4,8", "--repeats", "2"],
    "model": ["meanfield", "gpt2-mini", "--layer", "1", "--lengths", "4,8", "--repeats", "1"],
}  # fmt: skip


@pytest.fixture
def here(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(4, 4, generator=generator) for name in ("q", "k", "v", "out")}, tmp_path / LAYER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("study", COMMANDS)
def test_report_reads_what_a_study_writes(study, here):
    run(*COMMANDS[study], "--out", "found")
    run("report", "found", "--out", "page.html")
    rows = json.loads((here / "found/rows.json").read_text())
    with (here / "found/rows.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)
    model = "gpt2-mini" if "gpt2-mini" in COMMANDS[study] else LAYER
    for row in rows:
        assert row["model"] == model
        assert row["layer"] == (1 if study == "model" else 0)
        assert row["lower"] <= row["estimate"] <= row["upper"]
    page = (here / "page.html").read_text()
    assert model in page
    for kind in {row["kind"] for row in rows}:
        assert kind in page
