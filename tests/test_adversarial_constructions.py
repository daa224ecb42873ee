"""Constructed inputs: closed forms equal what a dense Jacobian says, predictions are kept, and the sets are respected."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
import lipscope
import reference
from lipscope.bounds import pairs
from lipscope.bounds.domain import ball, image
from lipscope.bounds.pairs import matrices
from lipscope.studies.worst_case import NAMES, construct, constructions, grouped_sigma
from lipscope.studies.worst_case.constructions import group_gain

ROTATION = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
IDENTITY = torch.eye(2, dtype=torch.float64)


def dense(layer, X, causal=False):
    """The oracle's Jacobian as (n, d_out, n, d)."""
    n, d = X.shape
    visible = torch.ones(n, n, dtype=torch.bool)
    J = reference.jacobian(lambda x: reference.attention(layer, x, visible.tril() if causal else visible), X)
    return J.reshape(n, -1, n, d)


def norm2(M):
    return float(torch.linalg.matrix_norm(M, 2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "extras"),
    [(1, 0, ""), (2, 0, "biases"), (4, 2, "softcap biases"), (2, 1, "sinks"), (2, 0, "no-out biases")],
)
@pytest.mark.parametrize(("n", "m"), [(2, 1), (6, 1), (6, 4)])
def test_closed_forms_equal_the_dense_jacobian(extras, heads, kv_heads, n, m):
    layer = cases.layer(heads=heads, kv_heads=kv_heads, extras=extras)
    u, w = 0.4 * cases.random(6, seed=1), 0.4 * cases.random(6, seed=2)
    X = pairs.tokens(u, w, n, m)
    J = dense(layer, X)
    assert grouped_sigma(layer, torch.stack([u, w]), [m, n - m]) == pytest.approx(
        norm2(J.flatten(2).flatten(0, 1)), rel=1e-8
    )
    for mask in ("full", "causal"):
        block = dense(layer, X, causal=mask == "causal")[m:, :, :m]
        gain = group_gain(layer.with_mask(mask), u, w, n, m)
        assert gain == pytest.approx(norm2(block.reshape(block.shape[0] * block.shape[1], -1)), rel=1e-8)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 30), st.floats(0.1, 2), st.booleans())
def test_closed_form_of_one_plain_head_is_that_of_bounds(seed, n, R, causal):
    layer = cases.layer(heads=1, d=3, dk=3, seed=seed).with_mask("causal" if causal else None)
    A, V = matrices(layer)
    u, w = pairs.best_pair(A, R)
    m = 1 + seed % (n - 1)
    formula = pairs.causal_groups if causal else pairs.two_groups
    assert group_gain(layer, u, w, n, m) == pytest.approx(formula(A, V, u, w, n, m), rel=1e-8)


def test_grouped_sigma_of_three_groups_and_of_a_million_tokens():
    layer = cases.layer(heads=2, extras="biases")
    X, counts = 0.5 * cases.random(3, 6, seed=4), [2, 1, 4]
    J = dense(layer, X.repeat_interleave(torch.tensor(counts), dim=0))
    assert grouped_sigma(layer, X, counts) == pytest.approx(norm2(J.flatten(2).flatten(0, 1)), rel=1e-8)
    # Doubling every count is the same measure, so the same constant of the mean-field map.
    million = grouped_sigma(layer, X, [10**6 * c for c in counts])
    assert grouped_sigma(layer, X, [2 * 10**6 * c for c in counts]) == pytest.approx(million, rel=1e-8)


def test_grouped_sigma_refuses_what_it_does_not_cover():
    layer = cases.layer(heads=2)
    X = cases.random(2, 6, seed=1)
    with pytest.raises(ValueError, match="grouped_sigma needs an unmasked layer"):
        grouped_sigma(layer.with_mask("causal"), X, [1, 2])
    with pytest.raises(ValueError, match="counts must give at least one copy"):
        grouped_sigma(layer, X, [0, 2])
    with pytest.raises(ValueError, match="counts must give at least one copy of each of the 2 tokens"):
        grouped_sigma(layer, X, [2])


NORMS = {
    "layernorm": lipscope.LayerNorm(cases.random(6, seed=9).abs() + 0.1, 0.3 * cases.random(6, seed=8)),
    "layernorm, eps 0": lipscope.LayerNorm(cases.random(6, seed=9), eps=0.0),
    "rmsnorm": lipscope.RMSNorm(cases.random(6, seed=9).abs()),
}


@pytest.mark.parametrize(
    ("where", "heads", "kv_heads", "extras"),
    [("ball", 1, 0, ""), ("ball", 4, 2, "biases"), ("ball", 2, 0, "biases softcap sinks"), ("layernorm", 2, 0, "biases"),
     ("layernorm, eps 0", 4, 2, ""), ("rmsnorm", 1, 0, "biases")],
)  # fmt: skip
@pytest.mark.parametrize("mask", ["full", "causal", "window:3"])
def test_constructions_keep_their_promise_inside_the_set(where, heads, kv_heads, extras, mask):
    layer = cases.layer(heads=heads, kv_heads=kv_heads, extras=extras).with_mask(mask)
    domain = ball(1.3) if where == "ball" else image(NORMS[where])
    given_set = {"radius": 1.3} if where == "ball" else {"norm": NORMS[where]}
    found = construct(layer, 9, **given_set, solver=lipscope.Dense())
    assert tuple(c.name for c in found) == NAMES
    for c in found:
        assert (c.predicted is None) == (mask == "window:3")
        assert c.predicted is None or c.predicted <= c.sigma.upper
        assert float((domain.tokens(domain.coordinates(c.tokens)) - c.tokens).norm()) < 1e-10
        assert float(c.tokens.norm(dim=-1).max()) <= domain.radius * (1 + 1e-9)
        assert {"name", "head", "m", "predicted", "lower", "upper"} <= c.to_row().keys()
    groups = next(c for c in found if c.name == "groups")
    assert all(groups.sigma.estimate >= c.sigma.estimate * (1 - 1e-3) for c in found if c.name != "meanfield")


def test_image_of_a_normalisation_is_where_its_outputs_lie():
    for norm in NORMS.values():
        Y = norm(3 * cases.random(20, 6, seed=1))
        domain = image(norm)
        assert float((domain.tokens(domain.coordinates(Y)) - Y).abs().max()) < 1e-12
        far = domain.tokens(domain.project(100 * cases.random(20, 6, seed=2)))
        # A point of the surface is the image of a large token: the normalisation gives it back.
        z = domain.coordinates(far)
        assert float((norm(1e6 * z) - far).abs().max()) < 1e-9


def test_the_two_cases_of_the_paper_and_the_mean_field_limit():
    layer = lipscope.Attention(torch.diag(torch.tensor([2.0, -0.5], dtype=torch.float64)), IDENTITY, IDENTITY, scale=1.0)
    found = {c.name: c for c in construct(layer, 5, radius=1.0, solver=lipscope.Dense())}
    assert found["proposition34.max"].tokens.abs().tolist() == [[1.0, 0.0], *[[0.5, 0.0]] * 4]
    p = 1 / (1 + 4 * math.exp(-2.0 / 4))
    assert found["proposition34.max"].predicted == pytest.approx(2 * p * (1 + (1 - p) * 0.5 * 1.0))
    assert found["proposition34.min"].tokens.abs().tolist() == [[0.0, 1.0]] * 5
    p = 1 / (1 + 4 * math.exp(-2 * 0.5))
    assert found["proposition34.min"].predicted == pytest.approx(2 * p * (1 + (1 - p) * 2 * 0.5))
    limit = found["meanfield"].limit
    q = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    assert limit == pytest.approx(math.exp(0.5) * float(((q * (1 - q)).sqrt() * (1 + q)).max()), rel=1e-6)
    # One Dirac, or a pair along the other eigenvector, may do better.
    assert limit <= pairs.lower_meanfield(layer, 1.0).value
    # At n = 300 the best m differs from the best share of mass by at most one token in 600; the limit itself is the best
    # of a grid of shares with steps of 1.2 %, hence low by a relative 1e-5 at most.
    long = construct(layer, 300, radius=1.0, names=["meanfield"])[0]
    assert limit * 0.9999 <= long.predicted <= limit * (1 + 1e-5)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_best_group_size_is_the_best(mask):
    layer = lipscope.Attention(-2 * IDENTITY, IDENTITY, IDENTITY, scale=1.0, mask=mask)
    n = 150
    c = construct(layer, n, radius=0.8, names=["groups"])[0]
    gains = [group_gain(layer, c.tokens[0], c.tokens[-1], n, m) for m in range(1, n)]
    assert c.predicted == pytest.approx(max(gains), rel=1e-6)


def test_no_real_eigenvalue_falls_back_to_the_general_pair_and_says_so():
    layer = lipscope.Attention(ROTATION, IDENTITY, IDENTITY, scale=1.0)
    found = {c.name: c for c in construct(layer, 6, radius=1.0)}
    assert "no positive real eigenvalue" in found["proposition34.max"].note
    assert "no negative real eigenvalue: the general pair" in found["proposition34.min"].note
    assert found["proposition34.max"].tokens.equal(found["pair"].tokens)
    assert found["pair"].note == ""
    assert found["meanfield"].limit == pytest.approx(pairs.lower_meanfield(layer, 1.0).value, rel=1e-4)


def test_the_head_with_the_largest_sigma_of_the_layer_is_chosen():
    layer = cases.layer(heads=4, kv_heads=2, extras="biases")
    best = construct(layer, 6, radius=1.0, names=["pair"], solver=lipscope.Dense())[0]
    each = [construct(layer, 6, radius=1.0, names=["pair"], head=h, solver=lipscope.Dense())[0] for h in range(4)]
    assert best.sigma.estimate == pytest.approx(max(c.sigma.estimate for c in each))
    assert each[best.head].sigma.estimate == pytest.approx(best.sigma.estimate)
    # The whole layer was measured, through W_O, not the head alone.
    J = dense(layer, best.tokens)
    assert best.sigma.estimate == pytest.approx(norm2(J.flatten(2).flatten(0, 1)), rel=1e-8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 1, "radius": 1.0}, "n must be an integer of at least 2"),
        ({"n": 2.5, "radius": 1.0}, "n must be an integer, got 2.5"),
        ({"n": 4, "radius": 0.0}, "radius must be positive and finite, got 0"),
        ({"n": 4, "radius": -1.0}, "radius must be positive and finite, got -1"),
        ({"n": 4, "radius": math.nan}, "radius must be positive and finite, got nan"),
        ({"n": 4}, "give either radius"),
        ({"n": 4, "radius": 1.0, "norm": NORMS["rmsnorm"]}, "give either radius"),
        ({"n": 4, "norm": lipscope.RMSNorm(torch.ones(3))}, "norm has width 3, but the layer takes tokens of width 6"),
        (
            {"n": 4, "radius": 1.0, "names": ["triple"]},
            "unknown construction 'triple'; constructions are",
        ),
        ({"n": 4, "radius": 1.0, "head": 7}, "head must lie between 0 and 1, got 7"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        construct(cases.layer(), **arguments)


def test_no_start_vector_ranks_heads_by_a_value_below_the_largest(monkeypatch):
    """A start vector that hardly sees the largest singular value: 27.1 where σ is 40.9, so that another head was chosen."""
    at = lipscope.load("gpt2-mini").record(input_ids=torch.arange(16))[2]
    ranking = dataclasses.replace(constructions.RANKING, seed=0)
    monkeypatch.setattr(constructions, "RANKING", ranking)
    (pair,) = construct(at.weights().for_input(0), 16, norm=at.norm, names=["pair"])
    assert pair.sigma.lower > 40


def test_a_layer_made_for_another_length_is_refused():
    layer = cases.layer(extras="score-bias")
    with pytest.raises(ValueError, match="bias is for n = 5 tokens but the input has n = 6"):
        construct(layer, 6, radius=1.0)
    assert all(c.predicted is None for c in construct(layer, 5, radius=1.0))
    with pytest.raises(TypeError, match="norm must be a LayerNorm, an RMSNorm or None, got Linear"):
        construct(layer, 5, norm=torch.nn.Linear(6, 6))
