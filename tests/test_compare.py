"""The comparison of attention variants: same tokens for all, bounds above σ, growth that is known, and its command."""

from __future__ import annotations

import csv
import dataclasses
import io
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lipscope
from lipscope.attention.variants import VARIANTS, variant
from lipscope.cli.main import app
from lipscope.runs.fit import fit_growth
from lipscope.studies.variants import compare, extras, growth, random_layer, sphere_tokens

SMALL = {"n": 6, "lengths": [4, 8, 16], "inputs": 2}


@pytest.fixture(scope="module")
def found():
    return compare(random_layer(6, heads=2), search=2, **SMALL)


def test_every_kind_is_measured_on_the_same_tokens(found):
    assert tuple(kind.name for kind in found.kinds) == VARIANTS
    X = sphere_tokens(6, 6, 6**0.5, 2)
    torch.testing.assert_close(X.norm(dim=-1), torch.full((2, 6), 6**0.5, dtype=torch.float64))
    for kind in found.kinds:
        layer = variant(kind.name, random_layer(6, heads=2))
        truth = [torch.linalg.matrix_norm(torch.autograd.functional.jacobian(layer, x).reshape(36, 36), 2) for x in X]
        torch.testing.assert_close(kind.sigma.estimate, torch.stack(truth), rtol=1e-6, atol=0)
        row = kind.summary()
        assert row["lower"] <= row["sigma"] <= row["upper"]
        assert row["worst_found"] >= float(kind.sigma.estimate.max()) * (1 - 1e-6)
        assert row["worst_found"] <= row["bound"]


def test_shorter_inputs_are_beginnings_of_longer_ones():
    assert torch.equal(sphere_tokens(4, 3, 2.0, 3, seed=1), sphere_tokens(9, 3, 2.0, 3, seed=1)[:, :4])


def test_growth_of_the_worst_case_is_known():
    """Given (−e, e, …, e) tokens σ of dot products grows like √n, and that of Sinkhorn attention does not."""
    W = torch.eye(2, dtype=torch.float64)
    X = torch.zeros(1, 64, 2, dtype=torch.float64)
    X[..., 0] = 1.0
    X[:, 0, 0] = -1.0
    layer = lipscope.Attention(-W, W, W, scale=6.0)
    study = compare(layer, n=8, tokens=X, lengths=[8, 16, 32, 64], search=0, names=("dot-product", "sinkhorn"))
    assert study.radius == 1.0
    assert study["dot-product"].growth_n.alpha == pytest.approx(0.5, abs=0.05)
    assert study["sinkhorn"].growth_n.alpha < 0.05


@pytest.mark.parametrize("inputs", [2, 4, 12])
def test_the_interval_of_an_exponent_covers_it_as_often_as_it_says(inputs):
    """The same inputs at every length: each has a size and an exponent of its own, and what one length adds stays."""
    noise = torch.Generator().manual_seed(inputs)
    lengths = torch.tensor([8.0, 16, 32, 64, 128], dtype=torch.float64)
    hits, repeats = 0, 300
    for _ in range(repeats):
        size, exponent, steps = (torch.randn(inputs, m, generator=noise, dtype=torch.float64) for m in (1, 1, 5))
        log_sigma = 0.3 * size + (0.4 + 0.05 * exponent) * lengths.log() + 0.05 * steps.cumsum(1)
        fit = growth(dict(zip(lengths.tolist(), log_sigma.exp().T, strict=True)))
        slopes = [np.polyfit(lengths.log(), one, 1)[0] for one in log_sigma]
        assert fit.alpha == pytest.approx(np.mean(slopes), rel=1e-9)
        hits += fit.alpha_low <= 0.4 <= fit.alpha_high
    # 95 % of 300 is 285; three standard deviations are 11.
    assert 274 <= hits <= 296


def test_inputs_of_a_fit_must_be_comparable():
    with pytest.raises(ValueError, match="at least two of them, got 1"):
        fit_growth([8, 16, 32], [1, 2, 3], inputs=[0, 0, 0])
    with pytest.raises(ValueError, match="at the same lengths"):
        fit_growth([8, 16, 32, 8, 16, 64], [1, 2, 3, 1, 2, 3], inputs=[0, 0, 0, 1, 1, 1])


def test_cosine_attention_sees_directions_only():
    study = compare(random_layer(6), search=0, names=("cosine",), options={"cosine": {"eps": 1e-12}}, **SMALL)
    assert study["cosine"].growth_radius.alpha == pytest.approx(-1, abs=1e-6)


def test_a_causal_mask_leaves_sinkhorn_out():
    study = compare(random_layer(4, mask="causal"), search=0, names=("l2", "sinkhorn"), **SMALL)
    assert study.left_out == ("sinkhorn",)
    assert study.mask == "causal"
    with pytest.raises(KeyError, match="no attention 'sinkhorn'"):
        study["sinkhorn"]


def test_what_is_left_out_is_named():
    """A layer is stripped of what does not belong to a kind of attention, and the table says of what."""
    plain = random_layer(4, heads=2)
    bare = compare(plain, search=0, names=("dot-product",), **SMALL)
    assert bare.without == ()
    rich = dataclasses.replace(
        plain, q_bias=torch.zeros(4).double(), v_bias=torch.ones(4).double(), softcap=5.0, sinks=torch.ones(2).double()
    )
    study = compare(rich, search=0, names=("dot-product",), **SMALL)
    assert study.without == ("biases", "sinks", "soft-cap")
    assert torch.equal(study["dot-product"].sigma.estimate, bare["dot-product"].sigma.estimate)
    # Biases of zero are none.
    assert extras(dataclasses.replace(plain, q_bias=torch.zeros(4).double())) == ()


def test_refusals():
    layer = random_layer(4)
    with pytest.raises(ValueError, match="tokens must be at least 16 of width 4"):
        compare(layer, tokens=torch.ones(1, 8, 4), search=0, **SMALL)
    with pytest.raises(ValueError, match="radius must be positive"):
        compare(layer, radius=-1.0, search=0, **SMALL)
    with pytest.raises(ValueError, match="no attention 'linear'"):
        compare(layer, names=("linear",), search=0, **SMALL)


ARGUMENTS = ["compare-attention", "--n", "4", "--lengths", "4,6,8", "--inputs", "2", "--search", "0", "--width", "4"]


def test_command(tmp_path):
    done = CliRunner().invoke(app, [*ARGUMENTS, "--json", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert {"comparison.json", "comparison.png", "rows.csv", "rows.json"} == {path.name for path in tmp_path.iterdir()}
    study = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["attention"] for row in study["rows"]] == list(VARIANTS)
    assert study["details"]["cosine"]["bounds"][0]["name"] == "bounded_scores.softmax"
    printed = CliRunner().invoke(app, [*ARGUMENTS, "--csv", "--kinds", "dot-product,cosine"])
    rows = list(csv.DictReader(io.StringIO(printed.stdout)))
    assert [row["attention"] for row in rows] == ["dot-product", "cosine"]
    assert float(rows[0]["sigma"]) == study["rows"][0]["sigma"]
    table = CliRunner().invoke(app, [*ARGUMENTS, "--kinds", "l2, sigmoid", "--mask", "causal"], env={"COLUMNS": "160"})
    assert "exponent in R" in table.stdout
    assert "without" not in table.stdout
    assert "sinkhorn" not in table.stdout


def test_command_on_a_model():
    arguments = ["compare-attention", "gpt2-mini", "--layer", "1", "--text", "alice", "--n", "6", "--lengths", "6,8,12"]
    done = CliRunner().invoke(app, [*arguments, "--inputs", "2", "--search", "0", "--kinds", "cosine,sinkhorn", "--json"])
    assert done.exit_code == 0, done.output
    study = json.loads(done.stdout)
    assert study["mask"] == "causal"
    assert study["weights"] == "gpt2-mini, layer 1"
    assert study["left_out"] == ["sinkhorn"]
    refused = CliRunner().invoke(app, ["compare-attention", "random", "--layer", "1"])
    assert refused.exit_code == 2
    assert "--layer belongs to a model" in refused.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radii": [0.0, 1.0, 2.0]}, "radii must be positive and finite, got 0"),
        ({"radii": [-1.0, 1.0, 2.0]}, "radii must be positive and finite, got -1"),
        ({"lengths": [0, 4, 8]}, "lengths must be positive and finite, got 0"),
        ({"names": ["sinkhorn"]}, "names must hold a kind of attention that takes mask causal, got sinkhorn"),
        ({"names": []}, "names must hold a kind of attention that takes mask causal, got none"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        compare(random_layer(4, mask="causal"), n=3, inputs=2, search=0, **options)
