"""The example that trains with a penalty: same start for all runs, tables and a figure at the end."""

from __future__ import annotations

import json
from dataclasses import asdict

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


def test_a_kept_run_with_other_settings_is_refused(tmp_path, monkeypatch):
    kept = {"settings": json.loads(json.dumps(asdict(SETTINGS))), "strength": 0.0, "text": "python-docs"}
    example.check_kept(kept, tmp_path, SETTINGS, 0.0, "python-docs")
    for name, run in (
        ("steps", kept | {"settings": kept["settings"] | {"steps": 3}}), ("strength", kept | {"strength": 1.0}),
        ("text", kept | {"text": "alice"}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"was trained with {name} = .*: remove it"):
            example.check_kept(run, tmp_path, SETTINGS, 0.0, "python-docs")
    (tmp_path / "none.json").write_text(json.dumps(kept))
    monkeypatch.setattr("sys.argv", ["train_smooth_gpt2.py", "--out", str(tmp_path), "--runs", "none"])
    with pytest.raises(ValueError, match=r"none\.json was trained with layers = 1, not 3"):
        example.main()
