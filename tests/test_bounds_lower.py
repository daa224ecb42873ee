"""Lower bounds are attained: σ at the constructed tokens is at least what they promise, inside the ball."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lipscope
from lipscope.bounds import table
from lipscope.bounds.constants import Constants
from lipscope.bounds.pairs import (
    PlainHead,
    best_pair,
    lower_groups,
    lower_meanfield,
    lower_measured,
    lower_pair,
    lower_proposition34,
)
from lipscope.bounds.sets import refined_masked, refined_unmasked


def head(seed, d, symmetric):
    G = torch.Generator().manual_seed(seed)
    A = torch.randn(d, d, generator=G, dtype=torch.float64)
    if symmetric:
        A = (A + A.mT) / 2
    return A, torch.randn(d, d, generator=G, dtype=torch.float64)


def layer_of(A, V, mask=None):
    """A = τW_KᵀW_Q with W_K = I and τ = 1."""
    return lipscope.Attention(A, torch.eye(len(A), dtype=torch.float64), V, scale=1.0, mask=mask)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 40), st.floats(0.1, 3), st.booleans(), st.booleans())
def test_constructions_attain_their_value(seed, d, n, R, symmetric, causal):
    A, V = head(seed, d, symmetric)
    layer = layer_of(A, V, "causal" if causal else None)
    bounds = [f(layer, R, n) for f in (lower_pair, lower_groups, lower_proposition34)]
    for bound in filter(None, bounds):
        sigma = lipscope.local_lipschitz(layer, bound.tokens, solver=lipscope.Dense()).estimate
        assert bound.value <= sigma * (1 + 1e-9), bound
        assert float(bound.tokens.norm(dim=-1).max()) <= R * (1 + 1e-9)
        assert bound.side == "lower"
        assert bound.tokens.shape == (n, d)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.floats(0.1, 2.5))
def test_pair_has_more_energy_than_both_cases_of_the_paper(seed, d, R):
    A, _ = head(seed, d, True)
    u, w = best_pair(A, R)
    E = float((u - w) @ A @ w)
    values = torch.linalg.eigvalsh(A)
    paper = max(float(values[-1]) * R**2 / 4, -2 * float(values[0]) * R**2)
    assert paper * (1 - 1e-3) <= E


def test_the_two_cases_of_the_paper():
    A, V = torch.diag(torch.tensor([2.0, -0.1], dtype=torch.float64)), torch.eye(2, dtype=torch.float64)
    first = lower_proposition34(PlainHead(A, V), 2.0, 5)
    assert first.tokens.abs().tolist() == [[2.0, 0.0], *[[1.0, 0.0]] * 4]
    p = 1 / (1 + 4 * math.exp(-2.0 * 4 / 4))
    assert first.value == pytest.approx(2 * p * (1 + (1 - p) * 1.0 * 2.0))
    second = lower_proposition34(PlainHead(-A, V), 1.0, 5)
    assert float((second.tokens[0] + second.tokens[1]).norm()) == 0
    p = 1 / (1 + 4 * math.exp(-2 * 2.0))
    assert second.value == pytest.approx(2 * p * (1 + (1 - p) * 4.0))
    rotation = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    assert lower_proposition34(PlainHead(rotation, V), 1.0, 5) is None


def test_groups_do_not_decay_and_tend_to_the_mean_field_value():
    A, V = torch.tensor([[-1.5]], dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    head = PlainHead(A, V)
    values = [lower_groups(head, 1.0, n).value for n in (4, 16, 64, 256, 1024, 4096)]
    assert all(a <= b * (1 + 1e-2) for a, b in itertools.pairwise(values))
    limit = lower_meanfield(head, 1.0).value
    assert values[-1] <= limit * (1 + 1e-9)
    assert values[-1] >= 0.98 * limit
    pairs = [lower_pair(head, 1.0, n).value for n in (16, 4096)]
    assert pairs[1] < pairs[0]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(2, 200), st.floats(0.1, 2), st.booleans())
def test_lower_bounds_stay_below_upper_bounds(seed, d, n, R, causal):
    A, V = head(seed, d, False)
    constants = Constants.of(layer_of(A, V))
    upper = (refined_masked if causal else refined_unmasked)(constants, R, n).value
    assert lower_groups(PlainHead(A, V, causal), R, n).value <= upper * (1 + 1e-9)
    limit = lower_meanfield(PlainHead(A, V), R)
    if limit is not None:
        assert limit.value <= refined_unmasked(constants, R).value * (1 + 1e-9)


def test_measured_constructions_serve_any_layer():
    G = torch.Generator().manual_seed(0)
    W = [torch.randn(4, 4, generator=G, dtype=torch.float64) for _ in range(4)]
    layer = lipscope.Attention(*W, heads=2, mask="window:3", softcap=2.0)
    bound = lower_measured(layer, 1.5, 6)
    assert bound.value == pytest.approx(lipscope.local_lipschitz(layer, bound.tokens).estimate, rel=1e-6)


def test_table_is_sorted_and_complete():
    G = torch.Generator().manual_seed(0)
    W = [torch.randn(3, 3, generator=G, dtype=torch.float64) for _ in range(3)]
    X = torch.randn(6, 3, generator=G, dtype=torch.float64)
    found = table(lipscope.Attention(*W, mask="causal"), X)
    upper = [b for b in found.bounds if found.ratio(b) is not None]
    assert [b.value for b in upper] == sorted(b.value for b in upper)
    assert all(found.ratio(b) >= 1 - 1e-9 for b in upper)
    names = {b.name for b in found.bounds}
    wanted = {"certificates.parts", "certificates.row_gram", "refined.masked", "castin2024.general", "lower.groups"}
    assert wanted <= names
    assert "refined.unmasked" not in names
    assert "measured σ" in str(found)
    assert {"name", "value", "ratio", "sigma"} <= found.to_rows()[0].keys()
    with pytest.raises(KeyError, match=r"castin2024\.general"):
        found["refined.unmasked"]
    with pytest.raises(ValueError, match="more than radius"):
        table(lipscope.Attention(*W), X, radius=1e-3)
    with pytest.raises(ValueError, match="give tokens X"):
        table(lipscope.Attention(*W), radius=1.0)


def test_groups_level_off_and_need_not_grow():
    """Without a mask the gain depends on the shares alone, and the best whole m may be worse at one n than at the last."""
    one = torch.ones(1, 1, dtype=torch.float64)
    head = PlainHead(-0.5 * one, one)
    for n, m, k in ((7, 2, 3), (9, 4, 10)):
        assert head.gain(-one[0], one[0], k * n, k * m) == pytest.approx(head.gain(-one[0], one[0], n, m), rel=1e-12)
    values = [lower_groups(head, 1.0, n).value for n in (*range(2, 12), 40, 64, 97, 150)]
    assert min(after / before for before, after in itertools.pairwise(values[:10])) == pytest.approx(0.9874, abs=1e-4)
    assert max(values) <= 1.01 * min(values[-4:])


def test_sharp_heads_stay_in_the_range_of_floats() -> None:
    """Scores of 1e4 made e^E·SᵀS infinite, and the whole table of bounds was lost."""
    torch.manual_seed(0)
    weights = [torch.randn(3, 3, dtype=torch.float64) for _ in range(3)]
    layer = lipscope.Attention(300 * weights[0], weights[1], weights[2], mask="causal")
    found = lipscope.bounds.table(layer, radius=10.0, n=6)
    (value,) = [bound.value for bound in found.bounds if bound.name == "lower.meanfield"]
    assert 1e100 < value < math.inf


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, math.inf])
def test_a_head_without_values_moves_nothing(p, causal):
    """Under the causal mask the factor p/(p−1) is infinite for p = 1: 0·∞ is 0 here."""
    A = torch.tensor([[-1.5]], dtype=torch.float64)
    assert lower_meanfield(PlainHead(A, 0 * A, causal), 1.0, p=p).value == 0
    assert lower_meanfield(PlainHead(A, A, causal), 1.0, p=p).value > 1
