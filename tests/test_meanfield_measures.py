"""Measures, laws and transport: bad input, exactness, and the laws of a metric."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from lipscope.studies.mean_field import Ball, Empirical, Gaussian, GaussianMixture, Measure, Sphere, transport, wasserstein
from lipscope.studies.mean_field.measures import parse_law
from lipscope.studies.mean_field.transport import optimal_plan


def cloud(n, d, seed, uniform=False):
    G = torch.Generator().manual_seed(seed)
    points = torch.randn(n, d, generator=G, dtype=torch.float64)
    weights = torch.rand(n, generator=G, dtype=torch.float64) + 0.1
    return Measure(points, None if uniform else weights / weights.sum())


def by_linear_programming(mu, nu, p):
    """The transport problem itself, handed to SciPy."""
    n, m = mu.size, nu.size
    cost = torch.cdist(mu.points, nu.points).numpy() ** p
    rows = np.kron(np.eye(n), np.ones(m))
    columns = np.kron(np.ones(n), np.eye(m))
    found = linprog(
        cost.ravel(), A_eq=np.vstack([rows, columns]), b_eq=np.concatenate([mu.weights, nu.weights]), method="highs"
    )
    return found.fun ** (1 / p)


@pytest.mark.parametrize("p", [1, 1.5, 2, 3])
@pytest.mark.parametrize("d", [1, 2, 5])
@pytest.mark.parametrize("uniform", [True, False])
def test_wasserstein_is_the_linear_programme(p, d, uniform):
    mu, nu = cloud(6, d, 1, uniform), cloud(9, d, 2, uniform)
    assert wasserstein(mu, nu, p) == pytest.approx(by_linear_programming(mu, nu, p), rel=1e-7)
    found = optimal_plan(mu, nu, p)
    plan = found.mass.new_zeros(6, 9).index_put_((found.source, found.target), found.mass, accumulate=True)
    torch.testing.assert_close(plan.sum(1), mu.weights, rtol=0, atol=1e-14)
    torch.testing.assert_close(plan.sum(0), nu.weights, rtol=0, atol=1e-14)
    assert bool((plan >= 0).all())


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("uniform", [True, False])
def test_lazy_costs_give_the_same_distance(p, uniform, monkeypatch):
    mu, nu = cloud(40, 3, 1, uniform), cloud(33, 3, 2, uniform)
    dense = wasserstein(mu, nu, p)
    monkeypatch.setattr(transport, "LAZY_ABOVE", 0)
    assert wasserstein(mu, nu, p) == pytest.approx(dense, rel=1e-13)


@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("far", [0.0, 1e6])
def test_no_cancellation(d, far):
    """A shift by 2⁻²⁰ of a cloud at distance 1e6 is seen to eight digits; ‖x‖² alone carries an error of 1e-4."""
    mu = Measure(cloud(20, d, 3).points + far, cloud(20, d, 3).weights)
    assert wasserstein(mu, mu) == 0.0
    assert wasserstein(mu, mu.push(mu.points.flip(0)).push(mu.points)) == 0.0
    step = 2.0**-20
    assert wasserstein(mu, mu.push(mu.points + step)) == pytest.approx(step * math.sqrt(d), rel=1e-8)


def test_uniform_clouds_have_no_rounding_in_their_masses():
    """1/3 + 1/3 + 1/3 against 1/7 + …: with rounded masses W_2 would be off by 1e-8 times the diameter."""
    X = torch.tensor([[0.0, 0.0], [1e9, 0.0], [0.0, 1e9]], dtype=torch.float64)
    mu = Measure(X)
    for parts in (2, 7, 49):
        assert wasserstein(mu, mu.split(parts)) == 0.0
    line = Measure(X[:, :1])
    assert wasserstein(line, line.split(7)) == 0.0


def test_huge_and_tiny_distances():
    for scale in (1e-200, 1e200):
        mu, nu = Measure([[0.0, 0.0], [scale, 0.0]]), Measure([[0.0, scale], [scale, scale]])
        assert wasserstein(mu, nu) == pytest.approx(scale, rel=1e-12)


def test_weight_zero_takes_no_part():
    mu = Measure([[0.0], [1.0], [1e6]], [0.5, 0.5, 0.0])
    assert wasserstein(mu, mu.support()) == 0.0
    assert mu.radius == 1.0


clouds = st.integers(0, 10_000)


def positioned(seed, theta_seed):
    """A random measure whose law of positions follows ``theta_seed`` alone."""
    G = torch.Generator().manual_seed(theta_seed)
    count = int(torch.randint(1, 5, (), generator=G))
    places = torch.rand(count, generator=G, dtype=torch.float64)
    mass = torch.rand(count, generator=G, dtype=torch.float64) + 0.1
    mass = mass / mass.sum()
    G = torch.Generator().manual_seed(seed)
    positions, points, weights = [], [], []
    for s, m in zip(places, mass, strict=True):
        k = int(torch.randint(1, 4, (), generator=G))
        share = torch.rand(k, generator=G, dtype=torch.float64) + 0.1
        positions += [s.expand(k)]
        weights += [m * share / share.sum()]
        points += [torch.randn(k, 2, generator=G, dtype=torch.float64)]
    return Measure(torch.cat(points), torch.cat(weights), torch.cat(positions))


@pytest.mark.parametrize("p", [1, 1.3, 2, 2.5, 4])
@pytest.mark.parametrize("seed", range(4))
def test_conditional_distance_is_one_linear_programme(p, seed):
    """Mass may only move between atoms at one position: all positions together, handed to SciPy."""
    mu, nu = positioned(seed, seed + 7), positioned(seed + 50, seed + 7)
    i, j = (mu.positions[:, None] == nu.positions[None]).nonzero().T
    rows, columns = (np.eye(size)[:, index] for size, index in ((mu.size, i), (nu.size, j)))
    cost = (mu.points[i] - nu.points[j]).norm(dim=-1).numpy() ** p
    found = linprog(cost, A_eq=np.vstack([rows, columns]), b_eq=np.concatenate([mu.weights, nu.weights]), method="highs")
    assert wasserstein(mu, nu, p) == pytest.approx(found.fun ** (1 / p), rel=1e-7)


@settings(max_examples=60, deadline=None)
@given(theta=st.integers(0, 500), seeds=st.tuples(clouds, clouds, clouds), p=st.sampled_from([1.0, 1.7, 2.0, 3.0]))
def test_conditional_distance_is_a_metric(theta, seeds, p):
    x, y, z = (positioned(seed, theta) for seed in seeds)
    d = wasserstein
    assert d(x, x, p) == 0.0
    assert d(x, y, p) == pytest.approx(d(y, x, p), rel=1e-12)
    assert d(x, z, p) <= (d(x, y, p) + d(y, z, p)) * (1 + 1e-12)
    # Masses are known to 1e-16, so W_p of equal measures written differently is known to that power 1/p.
    rewritten = x.split(2).merge()
    assert d(x, rewritten, p) <= (1e-14) ** (1 / p) * 10
    assert seeds[0] == seeds[1] or d(x, y, p) > 1e-3
    # Forgetting that positions must stay can only make transport cheaper.
    assert wasserstein(x.space_marginal(), y.space_marginal(), p) <= d(x, y, p) * (1 + 1e-9)
    # Other laws of positions are infinitely far away.
    other = positioned(seeds[1], theta + 1)
    assert d(x, other, p) == math.inf


@settings(max_examples=40, deadline=None)
@given(seeds=st.tuples(clouds, clouds, clouds), d=st.integers(1, 3), p=st.sampled_from([1.0, 2.0, 2.5]))
def test_wasserstein_is_a_metric(seeds, d, p):
    x, y, z = (cloud(2 + seed % 5, d, seed, uniform=seed % 2 == 0) for seed in seeds)
    assert wasserstein(x, x, p) == 0.0
    assert wasserstein(x, y, p) == pytest.approx(wasserstein(y, x, p), rel=1e-12, abs=1e-14)
    assert wasserstein(x, z, p) <= (wasserstein(x, y, p) + wasserstein(y, z, p)) * (1 + 1e-12)


def test_conditional_distance_by_hand():
    """Two positions of mass ½: (½·3² + ½·(½·1² + ½·1²))^½."""
    mu = Measure([[0.0], [0.0], [2.0]], [0.5, 0.25, 0.25], [0.5, 1.0, 1.0])
    nu = Measure([[1.0], [3.0]], [0.5, 0.5], [1.0, 0.5])
    assert wasserstein(mu, nu) == pytest.approx(math.sqrt(0.5 * 9 + 0.5 * 1), rel=1e-15)
    assert wasserstein(mu, nu, 1) == pytest.approx(0.5 * 3 + 0.5 * 1, rel=1e-15)


def test_sequences_of_one_length_are_compared_token_by_token():
    X, Y = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    d = wasserstein(Measure.from_tokens(X, ordered=True), Measure.from_tokens(Y, ordered=True))
    assert d == pytest.approx(float((X - Y).norm()) / math.sqrt(7), rel=1e-14)


def test_marginals_that_differ():
    X = torch.zeros(3, 2)
    mu = Measure.from_tokens(X, ordered=True)
    heavier = Measure(X, [0.5, 0.25, 0.25], mu.positions)
    moved = Measure(X, positions=[0.1, 2 / 3, 1.0])
    for nu in (heavier, moved, Measure.from_tokens(X[:2], ordered=True)):
        assert wasserstein(mu, nu) == math.inf
        with pytest.raises(ValueError, match="different laws of positions"):
            optimal_plan(mu, nu)
    # Rounding of the positions is not a difference.
    assert wasserstein(mu, Measure(X, positions=torch.linspace(1 / 3, 1, 3, dtype=torch.float64))) == 0.0
    ghost = Measure([[0.0, 0.0]] * 4, [1 / 3, 1 / 3, 1 / 3, 0.0], [*mu.positions.tolist(), 0.2])
    assert wasserstein(mu, ghost) == 0.0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Measure(torch.zeros(0, 3)), "points is empty"),
        (lambda: Measure(torch.zeros(3)), r"points must have shape \(n, d\)"),
        (lambda: Measure([[math.nan]]), "NaN"),
        (lambda: Measure(torch.zeros(1, 1, dtype=torch.complex64)), "real numbers"),
        (lambda: Measure([[0.0], [1.0]], [1.5, -0.5]), r"negative, but weights\[1\] = -0.5"),
        (lambda: Measure([[0.0], [1.0]], [0.5, 0.6]), "their sum is 1.1"),
        (lambda: Measure([[0.0], [1.0]], [1.0]), r"weights has shape \(1,\)"),
        (lambda: Measure([[0.0]], [math.inf]), "weights holds NaN or infinite"),
        (lambda: Measure([[0.0]]).split(0), "parts must be at least 1"),
        (lambda: Measure([[0.0]]).split(2, atoms=[1]), "atoms must lie between 0 and 0"),
        (lambda: Measure([[0.0]]).sample(0), "size must be at least 1"),
        (lambda: Measure([[0.0], [1.0]], positions=[0.5]), r"positions has shape \(1,\)"),
        (lambda: Measure([[0.0], [1.0]], positions=[0.5, 1.5]), r"positions must lie in \[0, 1\]"),
        (lambda: Measure([[0.0]], positions=[math.nan]), r"positions must lie in \[0, 1\]"),
        (lambda: wasserstein(Measure([[0.0]]), Measure([[0.0, 1.0]])), "different dimensions, 1 and 2"),
        (lambda: wasserstein(Measure([[0.0]]), Measure([[0.0]]), p=0.5), "p must be at least 1"),
        (lambda: wasserstein(Measure([[0.0]]), Measure([[0.0]]), p=math.nan), "p must be at least 1"),
        (lambda: wasserstein(Measure([[0.0]], positions=[0.5]), Measure([[0.0]], positions=[0.4]), p=0.9),
         "p must be at least 1"),
        (lambda: Ball(2, 0.0), "radius must be positive"),
        (lambda: Gaussian(2, -1.0), "std must be positive"),
        (lambda: Sphere(0, 1.0), "dimension must be at least 1"),
        (lambda: Ball(2, 1.0).sample(0), "size must be at least 1"),
        (lambda: wasserstein(Measure([[0.0]]), Measure([[0.0]]), p=math.inf), "p must be at least 1 and finite, got inf$"),
        (lambda: parse_law("mixture:1e9:1:1", 2), "at most 100000 clusters, got 1e"),
        (lambda: parse_law("mixture:inf:1:1", 2), "at most 100000 clusters, got inf"),
        (lambda: parse_law("cube:1", 2), "unknown law 'cube:1'"),
        (lambda: parse_law("ball", 2), "unknown law 'ball'"),
        (lambda: parse_law("ball:x", 2), "unknown law"),
        (lambda: GaussianMixture(torch.zeros(1, 1), (-1.0,), torch.ones(1)), "std must be non-negative"),
        (lambda: GaussianMixture(torch.zeros(1, 1), (1.0, 2.0), torch.ones(1)), "1 means need as many stds"),
        (lambda: Measure([[0.0]]).position_marginal(), "has no positions"),
    ],
)  # fmt: skip
def test_bad_input(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_no_distance_between_different_kinds():
    with pytest.raises(TypeError, match="with positions and one without"):
        wasserstein(Measure([[0.0]]), Measure([[0.0]], positions=[1.0]))


def test_constructors_and_sampling():
    mu = Measure([[0.0], [1.0], [5.0]], [0.125, 0.125, 0.75])
    sample = mu.sample(20_000, seed=1)
    assert torch.equal(sample.points, mu.sample(20_000, seed=1).points)
    assert not torch.equal(sample.points, mu.sample(20_000, seed=2).points)
    # Three standard deviations of a share of 20,000 draws.
    assert float((sample.points == 5).double().mean()) == pytest.approx(0.75, abs=3 * math.sqrt(0.75 * 0.25 / 20_000))
    assert wasserstein(sample, mu, 1) < 0.06
    centres, shares = torch.tensor([[-3.0, 0.0], [3.0, 0.0]]).double(), torch.tensor([0.25, 0.75]).double()
    mixture = GaussianMixture(centres, (0.0, 0.5), shares).sample(4000, seed=3)
    left = mixture[:, 0] == -3
    assert float(left.double().mean()) == pytest.approx(0.25, abs=0.03)
    assert float(mixture[~left].std(0).mean()) == pytest.approx(0.5, rel=0.05)
    positioned_sample = Measure.from_tokens([[0.0], [1.0], [2.0]], ordered=True).sample(50, seed=0)
    torch.testing.assert_close(positioned_sample.positions * 3 - 1, positioned_sample.points[:, 0])


def test_laws_are_what_they_say():
    for law in (Ball(3, 2.0), Sphere(3, 2.0), Empirical(torch.randn(9, 3)), parse_law("mixture:3:2:0.1", 3)):
        X = law.sample(4000, seed=1)
        assert X.shape == (4000, 3)
        assert torch.equal(X, law.sample(4000, seed=1))
        assert float(X.norm(dim=-1).max()) <= law.radius * (1 + 1e-12)
    # In the ball of radius R the norm to the power d is uniform: mean norm R·d/(d+1), spread below R/2 for one draw.
    norms = Ball(3, 2.0).sample(4000, seed=1).norm(dim=-1)
    assert float(norms.mean()) == pytest.approx(1.5, abs=3 / math.sqrt(4000))
    assert Sphere(3, 2.0).sample(5).norm(dim=-1).tolist() == pytest.approx([2.0] * 5)
    assert Gaussian(3, 1.0).radius == parse_law("mixture:3:2:0.1", 3).radius == math.inf
    assert GaussianMixture(torch.eye(2, dtype=torch.float64), (0.0, 0.0), torch.tensor([0.5, 0.5])).radius == 1.0
