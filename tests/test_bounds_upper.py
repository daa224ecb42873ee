"""No counter-example: σ ≤ every upper bound of the table, for inputs made to be bad."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lipscope
from bound_cases import jacobian, problem
from lipscope.bounds import block_inf, castin2024, kim2021, newhouse2025, refined, registry
from lipscope.bounds.certificates import local_bounds
from lipscope.bounds.constants import Constants, rotary_interaction

# Rounding of two float64 computations, relative.
EXACT = 1 + 1e-9


def check(case) -> None:
    """Every bound of the table that applies, at one problem."""
    sigma = case.sigma
    layer, n = case.layer, case.X.shape[0]
    bounds = local_bounds(layer, case.X)
    for name, entry in registry.TABLE.items():
        if entry.side == "upper" and registry.supports(name, layer) and not name.startswith("certificates"):
            bounds.append(registry.evaluate(name, layer, x=case.X, radius=case.radius, n=n))
    for bound in bounds:
        if bound.norm == "Frobenius" and bound.kind != "limit":
            assert sigma <= bound.value * EXACT, f"{bound} is below σ = {sigma!r} at {case.label}"


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_no_counter_example_among_drawn_cases(seed):
    check(problem(seed))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(("full", "causal")), st.sampled_from(("constructed", "ascended", "clustered")))
def test_no_counter_example_among_adversarial_plain_heads(seed, mask, kind):
    check(problem(seed, n_max=16, plain=True, mask=mask, kind=kind))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_ten_thousand_cases(block):
    for seed in range(10**7 + 500 * block, 10**7 + 500 * (block + 1)):
        check(problem(seed))


def largest_in_max_norm(J, steps=30):
    """A lower estimate of the operator norm for max_i‖x_i‖: for each output token, the best direction of every input."""
    best = 0.0
    for i in range(len(J)):
        y = torch.ones(J.shape[1], dtype=J.dtype)
        for _ in range(steps):
            back = torch.einsum("ojd,o->jd", J[i], y)
            e = back / back.norm(dim=-1, keepdim=True).clamp_min(1e-300)
            y = torch.einsum("ojd,jd->o", J[i], e)
        best = max(best, float(y.norm()))
    return best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_bounds_in_the_max_norm(seed):
    case = problem(seed, n_max=8)
    layer = case.layer
    measured = largest_in_max_norm(jacobian(layer, case.X).reshape(len(case.X), -1, len(case.X), layer.width))
    assert measured <= block_inf.max_token(layer, case.radius).value * EXACT, case.label
    if registry.supports("newhouse2025.attention", layer):
        rms = measured * math.sqrt(layer.width / layer.output_width)
        assert rms <= newhouse2025.attention(layer, case.radius).value * EXACT, case.label


def test_newhouse_is_block_inf_with_norms_multiplied_out():
    W = torch.diag(torch.tensor([1.0, 0.5], dtype=torch.float64))
    layer = lipscope.Attention(W, W, W, W, scale=0.5)
    assert newhouse2025.attention(layer, 1.5).value == pytest.approx(block_inf.max_token(layer, 1.5).value)
    assert newhouse2025.attention(layer, 1.5, scale=1.0).value == pytest.approx(block_inf.max_token(layer, 1.5).value / 3)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 7), st.floats(-1, 1))
def test_l2_attention_bound(seed, heads, n, size):
    G = torch.Generator().manual_seed(seed)
    d, dh = 2 * heads, 2
    q = [torch.randn(dh, d, generator=G, dtype=torch.float64) * 10**size for _ in range(heads)]
    v = [torch.randn(dh, d, generator=G, dtype=torch.float64) for _ in range(heads)]
    out = torch.randn(d, heads * dh, generator=G, dtype=torch.float64)
    root = math.sqrt(d / heads)

    def attention(X):
        parts = []
        for Q, V in zip(q, v, strict=True):
            Z = X @ Q.mT
            P = torch.softmax(-(Z[:, None] - Z[None]).square().sum(-1) / root, dim=-1)
            parts.append(P @ X @ (Q.mT @ Q / root) @ V.mT)
        return torch.cat(parts, dim=-1) @ out.mT

    X = torch.randn(n, d, generator=G, dtype=torch.float64)
    J = torch.autograd.functional.jacobian(attention, X).reshape(n * d, n * d)
    assert float(torch.linalg.matrix_norm(J, 2)) <= kim2021.l2mha(q, v, out, n).value * EXACT


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 8), st.booleans(), st.floats(-1.5, 0.7))
def test_rotary_set_bounds(seed, n, causal, size):
    G = torch.Generator().manual_seed(seed)
    d, dk = 3, 4
    q, k = (torch.randn(dk, d, generator=G, dtype=torch.float64) * 10 ** (size / 2) for _ in range(2))
    v = torch.randn(2, d, generator=G, dtype=torch.float64)
    angles = torch.tensor([1.0, 0.3], dtype=torch.float64)

    def rotate(t):
        phase = torch.arange(n, dtype=torch.float64)[:, None] * angles
        first, second = t[:, :2], t[:, 2:]
        return torch.cat([first * phase.cos() - second * phase.sin(), first * phase.sin() + second * phase.cos()], -1)

    def attention(X):
        S = rotate(X @ q.mT) @ rotate(X @ k.mT).mT / 2
        if causal:
            S = S.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -math.inf)
        return torch.softmax(S, -1) @ X @ v.mT

    X = torch.randn(n, d, generator=G, dtype=torch.float64)
    X = X / X.norm(dim=-1, keepdim=True)
    sigma = float(torch.linalg.matrix_norm(torch.autograd.functional.jacobian(attention, X).reshape(2 * n, n * d), 2))
    norm = rotary_interaction(q, k, angles, n, 0.5)
    assert norm <= 0.5 * float(torch.linalg.matrix_norm(q, 2) * torch.linalg.matrix_norm(k, 2)) * EXACT
    constants = Constants.of(lipscope.Attention(q, k, v)).with_rotary((norm,))
    bound = refined.masked(constants, 1.0, n) if causal else refined.unmasked(constants, 1.0, n)
    assert sigma <= bound.value * EXACT
    assert sigma <= castin2024.general(constants, 1.0, n).value * EXACT


def test_an_unsupported_combination_names_the_supported_ones():
    W = torch.eye(2)
    with pytest.raises(ValueError, match=r"refined\.unmasked does not hold for mask causal.*refined\.masked"):
        registry.evaluate("refined.unmasked", lipscope.Attention(W, W, W, mask="causal"), radius=1.0, n=3)
    with pytest.raises(ValueError, match="L2 attention only"):
        registry.require("kim2021.l2mha", lipscope.Attention(W, W, W))
    with pytest.raises(ValueError, match="unknown bound"):
        registry.require("nonsense", lipscope.Attention(W, W, W))
    with pytest.raises(ValueError, match="needs radius, n"):
        registry.evaluate("castin2024.general", lipscope.Attention(W, W, W), radius=1.0)
