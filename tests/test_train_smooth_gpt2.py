"""The example that trains with a penalty: same start for all runs, tables and a figure at the end."""

from __future__ import annotations

import json

import pytest
import torch

import train_smooth_gpt2 as example
from lipscope.models.corpora import read_text

SETTINGS = example.Settings(
    layers=1, width=16, heads=2, positions=16, vocabulary=300, windows=2, steps=4, warmup=1, penalty_tokens=8,
    penalty_steps=3, lengths=(4, 8, 16), inputs=2, log_every=2,
)  # fmt: skip


def test_runs_tables_and_figure(tmp_path):
    torch.manual_seed(0)
    data = example.prepare(SETTINGS, [read_text("python-docs")[0] * 20])
    assert set(data.chunks) == {4, 8, 16}
    runs = [example.train(SETTINGS, data, kind, weight) for kind, weight in (("none", 0.0), ("spectral", 5.0))]
    runs = json.loads(json.dumps(runs))
    again = example.train(SETTINGS, data, "spectral", 0.0)
    # Without weight the penalty changes nothing: same start, same tokens, same steps.
    assert again["log"] == runs[0]["log"]
    assert again["held_out_loss"] == pytest.approx(runs[0]["held_out_loss"], abs=1e-6)
    sigma = [run["layers"][0]["sigma"]["16"]["sigma"] for run in runs]
    assert sigma[1] < sigma[0]
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- tables -->\nold\n<!-- /tables -->\nafter\n")
    example.fill(page, example.tables(runs))
    text = page.read_text()
    assert "old" not in text
    assert f"| spectral | 0 | {sigma[1]:.3g} [" in text
    assert text.endswith("<!-- /tables -->\nafter\n")
    example.draw(runs, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().startswith("<?xml")
