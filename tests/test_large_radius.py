"""The limit of σ(rX) as r → ∞."""

import pytest
import torch

import lipscope
from lipscope.bounds import evaluate


@pytest.mark.parametrize("mask", [None, "causal", "window:2"])
@pytest.mark.parametrize("seed", range(4))
def test_sigma_tends_to_the_limit(mask, seed):
    G = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(3, 3, generator=G, dtype=torch.float64) for _ in range(3))
    layer = lipscope.Attention(q, k, v, q_bias=torch.ones(3, dtype=torch.float64), mask=mask)
    X = torch.randn(6, 3, generator=G, dtype=torch.float64)
    sigma = lipscope.local_lipschitz(layer, 1e3 * X, solver=lipscope.Dense()).estimate
    assert evaluate("large_radius.limit", layer, x=X).value == pytest.approx(sigma, rel=1e-6)
