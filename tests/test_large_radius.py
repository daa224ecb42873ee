"""The limit of σ(rX) as r → ∞."""

import re

import pytest
import torch

import lipscope
from lipscope.bounds import evaluate, table


@pytest.mark.parametrize("mask", [None, "causal", "window:2"])
@pytest.mark.parametrize("seed", range(4))
def test_sigma_tends_to_the_limit(mask, seed):
    G = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(3, 3, generator=G, dtype=torch.float64) for _ in range(3))
    layer = lipscope.Attention(q, k, v, q_bias=torch.ones(3, dtype=torch.float64), mask=mask)
    X = torch.randn(6, 3, generator=G, dtype=torch.float64)
    sigma = lipscope.local_lipschitz(layer, 1e3 * X, solver=lipscope.Dense()).estimate
    assert evaluate("large_radius.limit", layer, x=X).value == pytest.approx(sigma, rel=1e-6)


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("seed", range(4))
def test_several_heads_have_a_bound_of_the_limit_and_say_so(mask, seed):
    """The heads choose different tokens and act in different directions: the limit is less than the sum of theirs."""
    G = torch.Generator().manual_seed(seed)
    q, k, v, out = (torch.randn(8, 8, generator=G, dtype=torch.float64) for _ in range(4))
    layer = lipscope.Attention(q, k, v, out, heads=4, kv_heads=4, mask=mask)
    X = torch.randn(6, 8, generator=G, dtype=torch.float64)
    limit = lipscope.local_lipschitz(layer, 1e3 * X, solver=lipscope.Dense()).estimate
    found = evaluate("large_radius.limit", layer, x=X)
    assert limit < 0.95 * found.value
    assert found.sign == "≤"
    assert found.to_row()["sign"] == "≤"
    assert "the limit of σ(rX)" in found.holds_for
    assert re.search(r"large_radius\.limit +limit ≤ ", str(table(layer, X)))
    alone = evaluate("large_radius.limit", layer.head(2), x=X)
    assert alone.sign == "→"


@pytest.mark.parametrize("zero", ["q", "k"])
def test_without_scores_there_is_no_choice(zero):
    """W_Q = 0: attention averages, σ = ‖W_V‖ for every r, while a count of first places would say √6."""
    W = torch.eye(3, dtype=torch.float64)
    layer = lipscope.Attention(**({"q": W, "k": W, "v": W} | {zero: 0 * W}))
    X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert lipscope.local_lipschitz(layer, 1e3 * X, solver=lipscope.Dense()).estimate == pytest.approx(1.0)
    assert "large_radius.limit" not in str(table(layer, X))
    with pytest.raises(ValueError, match="says nothing"):
        evaluate("large_radius.limit", layer, x=X)
    # One token has no choice to make.
    assert evaluate("large_radius.limit", layer, x=X[:1]).value == pytest.approx(1.0)


def test_equal_tokens_decide_nothing():
    layer = lipscope.Attention(*torch.randn(3, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    X = torch.randn(1, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64).repeat(4, 1)
    with pytest.raises(ValueError, match="says nothing"):
        evaluate("large_radius.limit", layer, x=X)
