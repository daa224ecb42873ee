"""Set bounds where products of weights cancel: their rounding is relative to the factors, and may be all there is."""

import math
from fractions import Fraction

import pytest
import torch

import lipscope
from lipscope.attention.variants import L2Attention, QKNormAttention, SigmoidAttention
from lipscope.bounds import registry
from lipscope.bounds.domain import ball
from lipscope.bounds.exponent import regimes
from lipscope.bounds.pairs import HeadPairs

K = torch.tensor([[1.2345678901234567], [1.7654321098765432]], dtype=torch.float64)
ONE = torch.ones(1, 1, dtype=torch.float64)
CLOSED = ("lower.pair", "lower.groups", "lower.meanfield")


def opposite(x):
    """A vector q of terms of size x, and kᵀq as it is; float64 may say 0."""
    q = torch.tensor([[x], [-x * float(K[0]) / float(K[1])]], dtype=torch.float64)
    return q, float(sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(K, q, strict=True)))


def shuffled(seed):
    """Queries whose sum is 0, in an order in which float64 may say something else."""
    terms = torch.tensor([2.0**60, *[-65.0] * 4, -(2.0**60), *[65.0] * 4], dtype=torch.float64)
    return terms[torch.randperm(10, generator=torch.Generator().manual_seed(seed))][:, None]


def still(n):
    """Rotary embeddings that turn nothing."""
    return lipscope.Rotary(torch.ones(n, 2, dtype=torch.float64), torch.zeros(n, 2, dtype=torch.float64))


def reached(A, V, n):
    """σ at one token −1 and n−1 tokens 1, to which moving the one does this."""
    p = 1 / (1 + (n - 1) * math.exp(2 * A)) if A < 300 else 0.0
    return math.sqrt(n - 1) * p * abs(V * (1 - (1 - p) * 2 * A))


@pytest.mark.parametrize("x", [1e17, 3e17, 7e17, 7.708694695486917e18])
@pytest.mark.parametrize("n", [2, 1000])
@pytest.mark.parametrize("unit", [2.0**-530, 2.0**-66, 1.0, 2.0**66, 2.0**500])
@pytest.mark.parametrize("rotary", [False, True])
def test_scores_that_cancel(x, n, unit, rotary):
    """On [−1, 1], at any scale of the values, with and without rotary embeddings."""
    q, A = opposite(x)
    options = {"rotary": still(n)} if rotary else {}
    layer = lipscope.Attention(math.copysign(1, -A) * q, K, unit * ONE, scale=1.0, **options)
    sigma = reached(-abs(A), unit, n)
    for bound in registry.applicable(layer, radius=1.0, n=n, side="upper"):
        assert bound.value >= sigma / (math.sqrt(n) if "max_i" in bound.norm else 1), bound


@pytest.mark.parametrize("unit", [2.0**-66, 1.0, 2.0**66])
@pytest.mark.parametrize("which", ["q_bias", "k_bias"])
def test_turned_biases_that_cancel(which, unit):
    """α = |τW_Kᵀb_Q| or β = |τW_Qᵀb_K| is all there is of the scores' gradients."""
    z, true = opposite(1e17)
    weights = {"q": 0 * K, "k": K} if which == "q_bias" else {"q": K, "k": 0 * K}
    layer = lipscope.Attention(v=ONE, scale=1.0, rotary=still(4), **weights, **{which: unit * z[:, 0]})
    found = registry.evaluate("block_inf.max_token", layer, radius=1.0, n=4)
    assert found.value >= 1 + unit * abs(true)


@pytest.mark.parametrize("scale", [1e-160, 1e-20, 1.0, 1e20, 1e160])
def test_turned_biases_keep_their_size_at_every_scale(scale):
    """‖W_Kᵀb_Q‖ = scale·√2, with values of 1/scale: the bound is that of scale 1."""
    one = torch.eye(2, dtype=torch.float64)
    layer = lipscope.Attention(
        0 * one, one, one / scale, scale=1.0, q_bias=scale * torch.ones(2, dtype=torch.float64), rotary=still(4)
    )
    found = registry.evaluate("block_inf.max_token", layer, radius=1.0, n=4)
    assert found.value * scale >= 1 + scale * math.sqrt(2) * (1 - 1e-15)
    assert found.value * scale <= (1 + scale * math.sqrt(2)) * (1 + 1e-9)


@pytest.mark.parametrize("unit", [2.0**-500, 2.0**-66, 1.0, 2.0**66, 2.0**400])
@pytest.mark.parametrize("kind", ["qk-norm", "l2"])
def test_values_of_variants_that_cancel(kind, unit):
    """Equal tokens share attention evenly: σ = |W_OW_V|, of which float64 keeps nothing."""
    out, V = opposite(7.708694695486917e18)
    # One feature of size 1, so that L2 attention has t = 1 and W_V A = W_V.
    if kind == "qk-norm":
        layer = QKNormAttention(q=0 * ONE, k=ONE, v=K, out=unit * out.mT)
    else:
        layer = L2Attention(q=ONE, v=K, out=unit * out.mT)
    found = registry.evaluate("bounded_scores.softmax", layer, radius=1.0, n=3)
    assert found.value >= unit * abs(V) > 1000 * unit


def test_sigmoid_scores_that_cancel():
    """P = sigmoid(−|A|x_ix_j) is 0 or 1 where float64 says ½."""
    q, A = opposite(7.708694695486917e18)
    X = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    layer = SigmoidAttention(q=q, k=K, v=ONE, scale=1.0, shift=-40.0)
    found = registry.evaluate("ramapuram2024.local", layer, x=X)
    # Row i gives the token of the sign that A favours the weight 1.
    assert abs(A) > 100
    assert found.value >= 1


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("unit", [2.0**-530, 2.0**-66, 1.0, 2.0**66, 2.0**500])
def test_lower_bounds_where_scores_cancel(mask, unit):
    """A = 0 averages evenly: σ of 1000 tokens is |V|, and below 2|V| under the causal mask; more orders at scale 1."""
    for seed in range(0, 40, 2 if unit == 1 else 10):
        layer = lipscope.Attention(shuffled(seed), torch.ones_like(shuffled(seed)), unit * ONE, scale=1.0, mask=mask)
        most = (1 if mask == "full" else 2) * unit
        for name in CLOSED:
            bound = registry.evaluate(name, layer, radius=1.0, n=1000)
            assert bound.value <= most * (1 + 1e-12), (seed, bound)
        (regime,) = regimes(layer, ball(1.0))
        assert regime.exponent == 0
        pairs = HeadPairs(layer, 0, ball(1.0))
        assert pairs.gain(pairs.best, 1000, 1) <= most


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_lower_bounds_where_values_cancel(mask):
    """W_OW_V = 0 puts out nothing, whatever float64 makes of it."""
    for seed in range(40):
        out = shuffled(seed).mT
        layer = lipscope.Attention(-ONE, ONE, torch.ones_like(out.mT), out=out, scale=1.0, mask=mask)
        for name in CLOSED:
            assert registry.evaluate(name, layer, radius=1.0, n=8).value == 0, (seed, name)


@pytest.mark.parametrize("scale", [1e-160, 1e-20, 1.0, 1e20, 1e160])
@pytest.mark.parametrize("radius", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_lower_bounds_lose_last_digits_only(scale, radius, mask):
    """Where nothing cancels the allowance is small, at every scale of tokens and values."""
    A = torch.tensor([[-1.0, 0.3], [0.2, 0.5]], dtype=torch.float64)
    one = torch.eye(2, dtype=torch.float64)

    def values(scale, radius):
        layer = lipscope.Attention(A / radius, one / radius, scale * one, scale=1.0, mask=mask)
        found = registry.applicable(layer, radius=2.0 * radius, n=50, side="lower")
        return {bound.name: bound.value / scale for bound in found}

    plain = values(1.0, 1.0)
    assert values(scale, radius) == pytest.approx(plain, rel=1e-9)
    assert plain["lower.groups"] > 2


def test_a_limit_is_not_offered_where_scores_cancel():
    """Queries that are 0, and not as float64 says: attention stays even, however large the tokens."""
    X = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)[:, None].expand(3, 10)
    for seed in range(8):
        layer = lipscope.Attention(shuffled(seed).mT, X[:1] / 10, torch.eye(10, dtype=torch.float64), scale=1.0)
        assert "large_radius.limit" not in {bound.name for bound in registry.applicable(layer, x=X)}
