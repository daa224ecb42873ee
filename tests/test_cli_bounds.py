"""``lipscope bounds`` prints a table, or rows as JSON, and one clear line when something is wrong."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from lipscope.cli.main import app


@pytest.fixture
def files(tmp_path):
    G = torch.Generator().manual_seed(0)
    weights, tokens = tmp_path / "weights.safetensors", tmp_path / "tokens.safetensors"
    save_file({name: torch.randn(4, 4, generator=G) for name in ("q", "k", "v", "out")}, weights)
    save_file({"tokens": torch.randn(5, 4, generator=G)}, tokens)
    return str(weights), str(tokens)


def test_table_and_json(files):
    weights, tokens = files
    shown = CliRunner().invoke(app, ["bounds", weights, "--tokens", tokens, "--mask", "causal", "--heads", "2"])
    assert shown.exit_code == 0, shown.output
    assert "castin2024.general" in shown.output
    result = CliRunner().invoke(app, ["bounds", weights, "--radius", "1", "--n", "10", "--json"])
    rows = {row["name"]: row for row in json.loads(result.output)}
    assert rows["refined.unmasked"]["value"] <= rows["castin2024.general"]["value"]
    assert rows["lower.groups"]["side"] == "lower"
    assert rows["refined.unmasked"]["sigma"] is None


def test_one_clear_line(files):
    result = CliRunner().invoke(app, ["bounds", files[0]])
    assert result.exit_code == 2
    assert "give tokens X" in result.output


def test_regimes(files):
    shown = CliRunner().invoke(app, ["bounds", files[0], "--heads", "2", "--radius", "2", "--n", "5", "--regimes"])
    assert shown.exit_code == 0, shown.output
    assert "√n growth up to n" in shown.output
    result = CliRunner().invoke(app, ["bounds", files[0], "--radius", "2", "--n", "5", "--regimes", "--json"])
    (row,) = json.loads(result.output)
    assert row["exponent"] <= row["largest"]
    assert row["regime"] in ("√n growth", "between", "plateau")
    refused = CliRunner().invoke(app, ["bounds", files[0], "--mask", "window:3", "--radius", "2", "--regimes"])
    assert refused.exit_code == 2
    assert "regimes hold for full and causal masks" in refused.output


def test_the_map_of_a_head_is_drawn(files, tmp_path):
    asked = [
        "bounds",
        files[0],
        "--heads",
        "2",
        "--radius",
        "0.5",
        "--regimes",
        "--head",
        "1",
        "--out",
        str(tmp_path / "map"),
    ]
    shown = CliRunner().invoke(app, asked)
    assert shown.exit_code == 0, shown.output
    found = json.loads((tmp_path / "map" / "regimes.json").read_text())
    radii = [border["radius"] for border in found["borders"]]
    assert radii == sorted(radii)
    assert all(at["lower"] <= at["upper"] for at in found["bounds"])
    rows = json.loads((tmp_path / "map" / "rows.json").read_text())
    assert {row["head"] for row in rows} == {1}
    # Every σ that was reached lies below the bound that the map draws for its length.
    allowed = {at["n"]: at["upper"] for at in found["bounds"]}
    assert all(row["lower"] <= allowed[row["n"]] for row in rows if row["n"] in allowed)
    assert (tmp_path / "map" / "regimes.png").stat().st_size > 200
    refused = CliRunner().invoke(app, ["bounds", files[0], "--radius", "2", "--n", "5", "--out", str(tmp_path / "no")])
    assert "--out belongs to --regimes" in refused.output


def test_borders_of_a_model_are_rounded_to_the_safe_side_at_a_length_it_has():
    """Growth is claimed up to no more, a level bound from no less than what was computed; gpt2-mini has 512 positions."""
    asked = ["bounds", "gpt2-mini", "--layer", "0", "--regimes"]
    rows = json.loads(CliRunner().invoke(app, [*asked, "--json"]).output)
    shown = re.findall(r"10\^([\d.]+) +10\^([\d.]+)", CliRunner().invoke(app, asked).output)
    assert {row["n"] for row in rows} == {512}
    for row, (growth, level) in zip(rows, shown, strict=True):
        assert float(growth) <= row["log_growth"] / math.log(10)
        assert float(level) >= row["log_plateau"] / math.log(10)


def test_a_supremum_over_n_is_said_to_be_one(files):
    shown = CliRunner().invoke(app, ["bounds", files[0], "--radius", "1", "--n", "4"]).output
    assert "sup n: the supremum over all numbers of tokens" in shown
