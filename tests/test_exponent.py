"""The exponent E of a head on a set of tokens, and the bounds for every n that it sets."""

import math
from fractions import Fraction

import pytest
import torch

import lipscope
from lipscope.attention.norms import LayerNorm, RMSNorm
from lipscope.bounds import registry, sets
from lipscope.bounds.domain import ball, image, sphere
from lipscope.bounds.exponent import HeadOnSet, covering_exponent, regimes
from lipscope.bounds.pairs import lower_groups, lower_meanfield, lower_pair
from lipscope.studies.mean_field import MeanFieldAttention, Measure, local_constant

ATTRACTIVE = torch.eye(2, dtype=torch.float64)
SKEW = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)


def normal(G, *shape):
    return torch.randn(*shape, generator=G, dtype=torch.float64)


def plain_layer(A, V=None, **options):
    identity = torch.eye(len(A), dtype=torch.float64)
    return lipscope.Attention(A, identity, identity if V is None else V, scale=1.0, **options)


def domains(G, d):
    """A ball, a sphere, and ellipsoids that a LayerNorm and an RMSNorm put out, with and without ε."""
    gains, offsets = normal(G, d).abs() / math.sqrt(d) + 0.1, normal(G, d) / 4
    return [
        ball(1.3),
        sphere(1.3, d),
        image(RMSNorm(gains, eps=0.0)),
        image(RMSNorm(gains)),
        image(LayerNorm(gains, offsets, eps=0.0)),
        image(LayerNorm(gains, None)),
    ]


def random_layer(G, d, kind):
    A = normal(G, d, d)
    A = {"any": A, "attractive": A @ A.T / d, "repulsive": -A @ A.T / d, "skew": A - A.T, "low rank": A[:, :1] @ A[:1]}[kind]
    return plain_layer(A, normal(G, d, d), q_bias=normal(G, d) / 3 if kind == "any" else None)


def preference(layer, X):
    """(y − x)ᵀ(Ax + c) for all pairs of tokens: scores minus the own one."""
    q, k, _ = layer.project(X[None])
    scores = q[0, 0] @ k[0, 0].mT
    return scores - scores.diagonal()[:, None]


@pytest.mark.parametrize("kind", ["any", "attractive", "repulsive", "skew", "low rank"])
@pytest.mark.parametrize("d", [2, 3, 5])
def test_no_pair_of_tokens_prefers_more_than_the_exponent(d, kind):
    G = torch.Generator().manual_seed(d)
    layer = random_layer(G, d, kind)
    for domain in domains(G, d):
        head = HeadOnSet(layer, 0, domain)
        upper = head.largest()
        u, w = head.best
        for token in (u, w):
            assert torch.allclose(domain.tokens(domain.coordinates(token)), token, atol=1e-9)
        attained = float(preference(layer, torch.stack([w, u]))[0, 1])
        X = domain.tokens(domain.project(3 * normal(G, 400, d)))
        assert float(preference(layer, X).max()) <= upper + 1e-15
        assert attained <= upper * (1 + 1e-12) + 1e-15
        if kind != "any" and (domain.norm is None or domain.norm.bias is None) and not (domain.fixed and d == 2):
            assert attained >= upper * (1 - 1e-3) - 1e-9, (kind, domain)


def test_exponents_in_closed_form():
    R = 1.7
    for A, expected in ((2.0 * ATTRACTIVE, R**2 / 2), (-ATTRACTIVE, 2 * R**2), (SKEW, R**2)):
        assert HeadOnSet(plain_layer(A), 0, ball(R)).largest() == pytest.approx(expected, rel=1e-5)
    for low, high in ((0.2, 1.0), (0.0, 1.0), (-0.3, 1.0), (0.9, 1.0)):
        A = torch.diag(torch.tensor([low, (low + high) / 2, high], dtype=torch.float64))
        expected = R**2 * (high - low) ** 2 / (4 * (high + low))
        assert HeadOnSet(plain_layer(A), 0, sphere(R, 3)).largest() == pytest.approx(expected, rel=1e-4)
    assert HeadOnSet(plain_layer(2.0 * ATTRACTIVE), 0, sphere(R, 2)).largest() <= 1e-4
    # A head that does not see everything: the sphere is no better than the ball.
    seen = lipscope.Attention(torch.eye(4, dtype=torch.float64)[:1], torch.eye(4, dtype=torch.float64)[:1], scale=1.0,
                              v=torch.eye(4, dtype=torch.float64))  # fmt: skip
    assert HeadOnSet(seen, 0, sphere(R, 4)).largest() == pytest.approx(R**2 / 4, rel=1e-5)
    u, w = HeadOnSet(seen, 0, sphere(R, 4)).best
    assert float(u.norm()) == pytest.approx(R)
    assert float(w.norm()) == pytest.approx(R)
    assert float(preference(seen, torch.stack([w, u]))[0, 1]) == pytest.approx(R**2 / 4, rel=1e-6)


def column_sum(layer, X, log_weights, causal):
    """log max_j Σ_i w_iP_ij/w_j; under the causal mask the logarithm of ‖P‖₂²/4 for equal weights."""
    q, k, _ = layer.project(X[None])
    scores = q[0, 0] @ k[0, 0].mT
    if causal:
        hidden = ~torch.ones(len(X), len(X), dtype=torch.bool).tril()
        P = torch.softmax(scores.masked_fill(hidden, -math.inf), -1)
        return 2 * torch.log(torch.linalg.matrix_norm(P, 2) / 2)
    logs = torch.log_softmax(scores + log_weights, -1)
    return torch.logsumexp(logs + log_weights[:, None], 0).sub(log_weights).max()


@pytest.mark.parametrize("kind", ["any", "attractive", "repulsive", "skew", "low rank"])
def test_no_column_sum_exceeds_the_covering(kind):
    """Random clouds with weights over many orders of magnitude, then ascent over tokens and weights."""
    G, closest = torch.Generator().manual_seed(7), -math.inf
    for trial in range(6):
        d = 1 + trial % 3
        layer = random_layer(G, max(d, 2) if kind == "low rank" else d, kind)
        for domain in domains(G, layer.width)[trial % 2 :: 2]:
            bound = HeadOnSet(layer, 0, domain).log_column()
            for causal in (False, True):
                Z, logs = normal(G, 10, layer.width).mul(2).requires_grad_(), normal(G, 10).mul(3).requires_grad_()
                optimiser = torch.optim.Adam([Z, logs], lr=0.2)
                for _ in range(12):
                    found = column_sum(layer, domain.tokens(domain.project(Z)), logs - torch.logsumexp(logs, 0), causal)
                    assert found.item() <= bound + 1e-9
                    closest = max(closest, found.item() - bound)
                    optimiser.zero_grad()
                    (-found).backward()
                    optimiser.step()
    assert closest > -12


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("kind", ["any", "attractive", "skew", "low rank"])
def test_sigma_of_weighted_clouds_stays_below(kind, mask):
    G = torch.Generator().manual_seed(3)
    for trial in range(6):
        d = 2 + trial % 2
        layer = random_layer(G, d, kind)
        layer = lipscope.Attention(layer.q, layer.k, layer.v, scale=1.0, q_bias=layer.q_bias, mask=mask)
        domain = domains(G, d)[trial]
        n = 6
        X = domain.tokens(domain.project(3 * normal(G, n, d)))
        weights = torch.softmax(4 * normal(G, n), 0)
        mu = Measure(X, weights, None if mask is None else torch.arange(1, n + 1) / n)
        sigma = local_constant(MeanFieldAttention(layer), mu).estimate
        assert sigma <= covering_exponent(layer, 1.0, domain=domain).value * (1 + 1e-9)
        many = lipscope.local_lipschitz(layer, X, solver=lipscope.Dense()).estimate
        assert many <= covering_exponent(layer, 1.0, n, domain=domain).value * (1 + 1e-9)


@pytest.mark.parametrize("A", [ATTRACTIVE, -ATTRACTIVE, SKEW, torch.diag(torch.tensor([1.0, 0.0])).double()], ids=str)
def test_the_exponent_is_sharp_for_every_kind_of_head(A):
    """Two Diracs attain the lower bound; between it and the upper one is a polynomial in R, not an exponential."""
    for mask in (None, "causal"):
        layer = plain_layer(A, mask=mask)
        gaps = []
        for R in (2.0, 6.0, 18.0):
            upper, lower = covering_exponent(layer, R).value, lower_meanfield(layer, R).value
            assert lower <= upper <= (sets.refined_masked if mask else sets.refined_unmasked)(layer, R).value * (1 + 1e-12)
            E = HeadOnSet(layer, 0, ball(R)).largest()
            assert math.log(lower) >= E / 2 + math.log(0.5 * (1 + E / 2)) - 1e-4
            gaps.append(math.log(upper / lower))
        # The gap grows as a multiple of log R, while E/2 grew 81-fold.
        assert gaps[-1] - gaps[0] <= 6 * math.log(9)
    u, w = HeadOnSet(plain_layer(A), 0, ball(2.0)).best
    E = float((u - w) @ A @ w)
    light = 1 / (1 + math.exp(E))
    sigma = local_constant(MeanFieldAttention(plain_layer(A)), Measure(torch.stack([u, w]), [light, 1 - light])).lower
    assert sigma >= 0.5 * (1 + E / 2) * math.exp(E / 2) * (1 - 1e-9)
    assert {"lower.meanfield", "covering.exponent"} <= {
        b.name for b in registry.table(plain_layer(A), radius=2.0, n=50).bounds
    }


def test_on_the_sphere_an_isotropic_attractive_head_grows_as_the_square_of_the_radius():
    """A = γI and ‖x‖ = R: the column sums are at most 7.07^d whatever R, and σ linear in a = γR²; clouds do not break it."""
    G = torch.Generator().manual_seed(0)
    for d in (2, 3):
        layer = plain_layer(torch.eye(d, dtype=torch.float64))
        for R in (3.0, 30.0, 300.0):
            value = covering_exponent(layer, R, domain=sphere(R, d)).value
            assert value <= (7.07 ** (d / 2) * math.hypot(1, R**2) + R**2) * (1 + 1e-9)
            X = normal(G, 200, d)
            mu = Measure(R * X / X.norm(dim=-1, keepdim=True), torch.softmax(4 * normal(G, 200), 0))
            assert local_constant(MeanFieldAttention(layer), mu).estimate <= value
        assert covering_exponent(layer, 30.0).value > 1e40  # the ball
        repulsive = plain_layer(-torch.eye(d, dtype=torch.float64))
        assert lower_meanfield(repulsive, 5.0, domain=sphere(5.0, d)).value > math.exp(25.0)


@pytest.mark.parametrize("mask", [None, "causal"])
@pytest.mark.parametrize("A", [ATTRACTIVE, -0.5 * ATTRACTIVE, SKEW], ids=["attractive", "repulsive", "skew"])
def test_the_borders_between_the_regimes(A, mask):
    """Up to the first border one token moves the others by half of √(n−1); from the second on the bound stays."""
    layer = plain_layer(A, mask=mask)
    (found,) = regimes(layer, ball(4.0))
    assert found.exponent <= found.largest <= found.exponent * (1 + 1e-4)
    assert found.log_growth < found.log_plateau + 1e-6  # the borders meet for repulsive heads
    border = int(math.exp(min(found.log_growth, found.log_plateau)))
    assert found.at(border) == "√n growth" != found.at(border + 2)
    for n in (2, 10, min(border, 50_000)):
        assert lower_pair(layer, 4.0, n).value >= 0.5 * math.sqrt(n - 1) * (1 - 1e-9)
    flat = int(math.exp(found.log_plateau)) + 3
    assert found.at(flat) == "plateau"
    assert covering_exponent(layer, 4.0).value <= 7 * covering_exponent(layer, 4.0, flat).value
    assert lower_groups(layer, 4.0, 3000).value <= covering_exponent(layer, 4.0, 3000).value


@pytest.mark.parametrize(
    "options",
    [
        {"sinks": torch.tensor([60.0], dtype=torch.float64)},
        {"softcap": 5.0},
        {"bias": torch.zeros(1, 8, 8, dtype=torch.float64)},
        {"rotary": lipscope.Rotary.from_base(2, n=8, dtype=torch.float64)},
        {"mask": "window:1"},
        {"mask": "prefix:2"},
    ],
    ids=["sinks", "soft-cap", "additive", "rotary", "window", "prefix"],
)
def test_regimes_are_refused_where_they_are_not_proved(options):
    """A sink may take all attention and a window of one token has nothing to grow: neither has √n growth."""
    with pytest.raises(ValueError, match="regimes hold for full and causal masks without sinks"):
        regimes(plain_layer(-ATTRACTIVE, **options), ball(3.0))


def test_uniform_attention_is_on_its_plateau_at_any_length():
    (found,) = regimes(plain_layer(0 * ATTRACTIVE), ball(3.0))
    assert found.log_plateau == 0
    assert [found.at(n) for n in (1, 2, 3, 1000)] == ["plateau"] * 4


@pytest.mark.parametrize("x", [1e17, 3e17, 7e17])
def test_products_of_weights_that_cancel_are_allowed_for(x):
    """A = k₁q₁ + k₂q₂ with terms of 1e17, of which float64 keeps no digit; on [−1, 1] the exponent is 2|A| if A < 0."""
    k = torch.tensor([[1.2345678901234567], [1.7654321098765432]], dtype=torch.float64)
    q = torch.tensor([[x], [-x * float(k[0]) / float(k[1])]], dtype=torch.float64)
    true = abs(float(sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(k, q, strict=True))))
    assert true > 1
    for sign in (1, -1):
        layer = lipscope.Attention(sign * q, k, torch.eye(2, 1, dtype=torch.float64), scale=1.0)
        assert regimes(layer, ball(1.0))[0].largest >= 2 * true


def test_a_head_without_values_does_not_grow_and_one_that_hides_the_pair_does():
    """V = 0 puts out nothing at any length; V(u − w) = 0 leaves ½√(n−1)·‖V‖."""
    A = torch.diag(torch.tensor([-2.0, 0.0], dtype=torch.float64))
    (nothing,) = regimes(plain_layer(A, 0 * A), ball(2.0))
    assert [nothing.at(n) for n in (2, 100)] == ["plateau"] * 2
    hidden = torch.diag(torch.tensor([0.0, 1.0], dtype=torch.float64))
    for mask in ("full", "causal"):
        layer = plain_layer(A, hidden, mask=mask)
        (found,) = regimes(layer, ball(2.0))
        assert found.at(100) == "√n growth"
        assert lower_pair(layer, 2.0, 100).value >= math.sqrt(99) / 2


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (lower_meanfield, {"softcap": 0.1}),
        (lower_meanfield, {"heads": 2}),
        (covering_exponent, {"softcap": 0.1}),
        (covering_exponent, {"bias": torch.zeros(1, 8, 8, dtype=torch.float64)}),
        (covering_exponent, {"rotary": lipscope.Rotary.from_base(2, n=8, dtype=torch.float64)}),
        (covering_exponent, {"mask": "window:2"}),
        (sets.refined_unmasked, {"mask": "causal"}),
        (sets.refined_masked, {}),
        (sets.castin2024_meanfield, {"mask": "causal"}),
    ],
)
def test_bounds_with_further_arguments_refuse_what_they_are_not_proved_for(call, options):
    with pytest.raises(ValueError, match="does not hold for mask"):
        call(plain_layer(-ATTRACTIVE, **options), 2.0)


def test_a_supremum_over_n_is_told_apart_from_bounds_for_n():
    """At n = 4 the least upper bound is 7.1, which more tokens exceed."""
    found = registry.table(plain_layer(-ATTRACTIVE), radius=1.5, n=4)
    assert found["lower.meanfield"].kind == "sup n"
    kinds = {bound.kind for bound in found.bounds if bound.side == "lower" and bound.value > found["refined.unmasked"].value}
    assert kinds == {"sup n"}
