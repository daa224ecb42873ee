"""No counter-example: σ ≤ every upper bound of the table, for inputs made to be bad."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lipscope
import reference
from bound_cases import jacobian, problem
from lipscope.attention.variants import L2Attention
from lipscope.bounds import registry
from lipscope.bounds.bound import ENTRIES, Bound
from lipscope.bounds.bound import bound as register
from lipscope.bounds.constants import rotated_norms
from lipscope.bounds.sets import block_inf_max_token, newhouse2025_attention

# Rounding of two float64 computations, relative.
EXACT = 1 + 1e-9


def check(case) -> None:
    """Every bound of the table that applies, at one problem."""
    sigma = case.sigma
    layer, n = case.layer, case.X.shape[0]
    for bound in registry.applicable(layer, x=case.X, radius=case.radius, n=n, side="upper"):
        if bound.norm == "Frobenius" and bound.kind != "limit":
            assert sigma <= bound.value * EXACT, f"{bound} is below σ = {sigma!r} at {case.label}"


@settings(max_examples=100, deadline=None)
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


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("mask", ["full", "causal", "window:2"])
def test_what_the_grid_ticks_can_be_evaluated(heads, mask):
    """Of a layer in general position every bound that is said to hold for it has a value."""
    q, k, v = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(heads), dtype=torch.float64)
    layer = lipscope.Attention(q, -q if heads == 1 else k, v, heads=heads, mask=mask)
    X = torch.randn(5, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    for name in registry.names(layer):
        assert math.isfinite(registry.evaluate(name, layer, x=X).value), name


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
    assert measured <= block_inf_max_token(layer, case.radius).value * EXACT, case.label
    if "newhouse2025.attention" in registry.names(layer):
        rms = measured * math.sqrt(layer.width / layer.output_width)
        assert rms <= newhouse2025_attention(layer, case.radius).value * EXACT, case.label


def test_newhouse_is_block_inf_with_norms_multiplied_out():
    W = torch.diag(torch.tensor([1.0, 0.5], dtype=torch.float64))
    layer = lipscope.Attention(W, W, W, W, scale=0.5)
    assert newhouse2025_attention(layer, 1.5).value == pytest.approx(block_inf_max_token(layer, 1.5).value)
    assert newhouse2025_attention(layer, 1.5, scale=1.0).value == pytest.approx(block_inf_max_token(layer, 1.5).value / 3)


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
    layer = L2Attention(q=torch.cat(q), v=torch.cat(v), out=out, heads=heads)
    assert float(torch.linalg.matrix_norm(J, 2)) <= registry.evaluate("kim2021.l2mha", layer, n=n).value * EXACT


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6))
def test_no_counter_example_among_rotary_layers(seed):
    check(problem(seed, n_max=16, always=frozenset({"rotary"})))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_no_counter_example_among_rotary_layers_with_all_biases(seed):
    """A turned key bias does not cancel: it is in the gradients and in the range of the scores."""
    check(problem(seed, n_max=16, always=frozenset({"rotary", "query_bias", "key_bias"})))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_the_largest_interaction_is_above_all_pairs_and_close(seed):
    case = problem(seed, n_max=8, always=frozenset({"rotary"}))
    layer, n = case.layer, len(case.X)
    for h, norms in enumerate(rotated_norms(layer, n)):
        single = layer.head(h)
        R = reference.rotations(layer.rotary, n, layer.head_width)
        pairs = [(i, j) for i in range(n) for j in range(n if not isinstance(layer.mask, lipscope.masks.Causal) else i + 1)]
        A = torch.stack([single.tau * single.k.mT @ R[j].mT @ R[i] @ single.q for i, j in pairs])
        truth = float(torch.linalg.matrix_norm(A, 2).max())
        assert truth <= norms.interaction * EXACT
        assert norms.interaction <= 1.03 * truth + 1e-12
        if single.k_bias is not None:
            b = torch.stack([single.tau * single.q.mT @ R[i].mT @ R[j] @ single.k_bias for i in range(n) for j in range(n)])
            assert float(b.norm(dim=-1).max()) == pytest.approx(norms.key_bias, rel=1e-9)


def test_long_or_irregular_tables_fall_back_to_the_product_of_norms():
    G = torch.Generator().manual_seed(0)
    W = [torch.randn(4, 4, generator=G, dtype=torch.float64) for _ in range(3)]
    product = 0.5 * float(torch.linalg.matrix_norm(W[0], 2) * torch.linalg.matrix_norm(W[1], 2))
    scattered = torch.randint(0, 10**6, (2000,), generator=G)
    for positions in (torch.arange(2000), scattered):
        table = lipscope.Rotary.from_base(4, positions=positions, dtype=torch.float64)
        (norms,) = rotated_norms(lipscope.Attention(*W, rotary=table))
        assert norms.interaction == pytest.approx(product)


def test_the_table_of_a_rotary_layer():
    case = problem(11, n_max=8, always=frozenset({"rotary", "key_bias"}))
    found = lipscope.bounds.table(case.layer, case.X)
    upper = [b for b in found.bounds if b.side == "upper" and b.kind != "limit" and b.norm == "Frobenius"]
    assert {"castin2024.general", "refined.visibility", "certificates.row_gram", "yudin2025.improved"} <= {
        b.name for b in upper
    }
    assert min(b.value for b in upper) >= float(found.sigma.lower)
    with pytest.raises(ValueError, match="rotary"):
        registry.evaluate("yudin2025.published", case.layer, x=case.X)


def test_an_unsupported_combination_names_the_supported_ones():
    W = torch.eye(2)
    with pytest.raises(ValueError, match=r"refined\.unmasked does not hold for mask causal.*refined\.masked"):
        registry.evaluate("refined.unmasked", lipscope.Attention(W, W, W, mask="causal"), radius=1.0, n=3)
    with pytest.raises(ValueError, match="l2 attention only"):
        registry.require("kim2021.l2mha", lipscope.Attention(W, W, W))
    with pytest.raises(ValueError, match="unknown bound"):
        registry.require("nonsense", lipscope.Attention(W, W, W))
    with pytest.raises(ValueError, match="needs radius, n"):
        registry.evaluate("castin2024.general", lipscope.Attention(W, W, W), radius=1.0)


def test_a_decorated_function_is_a_bound():
    """It is listed, evaluated, put into tables and refused like the others, without another line."""
    known = dict(ENTRIES)
    try:

        @register("test.twice", needs="radius, n", masks="causal", without="softcap")
        def twice(layer, radius, n):
            return Bound("test.twice", 2 * radius * n, "set", "all", "a test")

        W = torch.eye(2, dtype=torch.float64)
        causal, full = (lipscope.Attention(W, W, W, mask=mask) for mask in ("causal", None))
        assert lipscope.bounds.evaluate("test.twice", causal, radius=2.0, n=3).value == 12
        assert lipscope.bounds.table(causal, radius=2.0, n=3)["test.twice"].value == 12
        assert registry.least("test", causal, 2.0, 3) == 12
        assert "test.twice" not in lipscope.bounds.names(full)
        with pytest.raises(ValueError, match=r"test\.twice does not hold for mask full"):
            lipscope.bounds.evaluate("test.twice", full, radius=2.0, n=3)
        with pytest.raises(ValueError, match="'sinkholes' is none of"):
            register("test.wrong", needs="n", without="sinkholes")(twice)
    finally:
        ENTRIES.clear()
        ENTRIES.update(known)
