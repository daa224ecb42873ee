"""W_2 ratios of pairs, the search for large ones, and the study of n → ∞."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import cases
import lipscope
from lipscope.bounds.pairs import PlainHead, lower_groups, lower_meanfield
from lipscope.bounds.sets import refined_masked, refined_unmasked
from lipscope.runs.fit import RATES, fit_plateau
from lipscope.studies.mean_field import (
    Ball,
    Empirical,
    Gaussian,
    MeanFieldAttention,
    Measure,
    Sphere,
    convergence_study,
    local_constant,
    wasserstein,
)
from lipscope.studies.mean_field.study import set_bound
from lipscope.studies.mean_field.transport import optimal_plan
from measure_pairs import ascend, empirical_constant, pair_ratio, transport_cost, two_diracs

IDENTITY = torch.eye(2, dtype=torch.float64)
REPULSIVE = torch.diag(torch.tensor([-1.0, 0.5], dtype=torch.float64))


def repulsive(mask="full"):
    return MeanFieldAttention(lipscope.Attention(REPULSIVE, IDENTITY, IDENTITY, scale=1.0, mask=mask))


def pick(G, low, high):
    return int(torch.randint(low, high, (), generator=G))


def random_layer(G):
    """One or two heads; sometimes with a query bias or a soft-cap; masked or not."""

    def normal(*shape):
        return torch.randn(*shape, generator=G, dtype=torch.float64)

    d, heads, causal = pick(G, 1, 4), pick(G, 1, 3), pick(G, 0, 2) == 1
    extras = {"q_bias": normal(heads * 2)} if pick(G, 0, 4) == 0 else {}
    extras |= {"softcap": 2.0} if pick(G, 0, 4) == 0 else {}
    sharp = 10 ** (float(torch.rand((), generator=G)) * 2 - 1.5)
    weights = (sharp * normal(heads * 2, d), normal(heads * 2, d), normal(heads * 2, d), normal(3, heads * 2))
    return MeanFieldAttention(lipscope.Attention(*weights, heads, mask="causal" if causal else "full", **extras))


def random_pair(F, G):
    """Two weighted measures, near or far, with independent numbers of atoms where the mask allows it."""
    d, n = F.layer.width, pick(G, 1, 9)
    X = torch.randn(n, d, generator=G, dtype=torch.float64)
    weights = torch.rand(n, generator=G, dtype=torch.float64) ** 3 + 1e-3
    step = 10 ** (-4 * float(torch.rand((), generator=G)))
    mu = Measure(X, weights / weights.sum())
    if F.causal:
        mu = Measure(X, mu.weights, torch.randint(1, 5, (n,), generator=G) / 4)
    elif pick(G, 0, 2):
        return mu, Measure(torch.randn(pick(G, 1, 9), d, generator=G, dtype=torch.float64))
    parts = mu.split(pick(G, 1, 3))
    return mu, parts.push(parts.points + step * torch.randn(parts.points.shape, generator=G, dtype=torch.float64))


@pytest.mark.parametrize("layers", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_ratios_of_random_pairs_stay_below_the_set_bound(layers):
    """Ten pairs on every layer."""
    largest = {True: 0.0, False: 0.0}
    for seed in range(layers):
        G = torch.Generator().manual_seed(seed)
        F = random_layer(G)
        for _ in range(10):
            mu, nu = random_pair(F, G)
            found, bound = pair_ratio(F, mu, nu), set_bound(F, max(mu.radius, nu.radius))
            assert found.ratio <= bound * (1 + 1e-9), seed
            largest[F.causal] = max(largest[F.causal], found.ratio / bound)
    # The pairs come close enough to the bound for the test to mean something.
    assert min(largest.values()) > 0.3, largest


def test_ratios_are_output_over_input():
    F = repulsive()
    mu, nu = Measure(cases.random(4, 2, seed=1)), Measure(cases.random(6, 2, seed=2))
    found = pair_ratio(F, mu, nu)
    assert found.ratio == found.output / found.input
    assert found.input == wasserstein(mu, nu)
    assert found.output == wasserstein(F(mu), F(nu))
    assert found.to_row()["atoms_nu"] == 6
    with pytest.raises(ValueError, match="same measure"):
        pair_ratio(F, mu, mu.split())
    # Weights that do not add up in floating point leave a distance of rounding, and a ratio of noise.
    for seed in range(5):
        weights = torch.rand(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        uneven = Measure(cases.random(7, 2, seed=seed), weights / weights.sum())
        with pytest.raises(ValueError, match=r"same measure|resolve no distance below"):
            pair_ratio(F, uneven, uneven.split(3))
        positions = torch.tensor([1, 1, 1, 2, 2, 2, 2], dtype=torch.float64) / 2
        placed = Measure(uneven.points, uneven.weights, positions)
        with pytest.raises(ValueError, match=r"same measure|resolve no distance below"):
            pair_ratio(repulsive("causal"), placed, placed.split(3))
        # The same weights are matched exactly: a step far below √eps keeps its ratio, the derivative in that direction.
        step = cases.random(7, 2, seed=seed + 50)
        close, closer = (pair_ratio(F, uneven, uneven.push(uneven.points + t * step)).ratio for t in (1e-6, 1e-9))
        assert closer == pytest.approx(close, rel=1e-4)
    with pytest.raises(ValueError, match="different laws of positions"):
        pair_ratio(repulsive("causal"), *(Measure.from_tokens(torch.zeros(n, 2), ordered=True) for n in (2, 3)))


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_gradient_of_the_ratio_is_that_of_finite_differences(mask):
    """Both plans held fixed give the gradient of the exact ratio, since plans are locally constant."""
    F = repulsive(mask)
    if mask == "full":
        mu, nu = Measure(cases.random(3, 2, seed=1)), Measure(cases.random(4, 2, seed=2))
    else:
        mu = Measure.from_tokens(cases.random(3, 2, seed=1), ordered=True)
        nu = mu.split().push(cases.random(6, 2, seed=2))
    X = mu.points.clone().requires_grad_()
    out = F.finite(mu)(X)
    before = transport_cost(optimal_plan(mu, nu), X, nu.points)
    after = transport_cost(optimal_plan(F(mu), F(nu)), out, F(nu).points)
    (gradient,) = torch.autograd.grad((after / before).sqrt(), X)
    direction = cases.random(3, 2, seed=3)
    step = 1e-6
    ends = [pair_ratio(F, mu.push(mu.points + s * step * direction), nu).ratio for s in (1, -1)]
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(float((gradient * direction).sum()), rel=1e-5)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_search_finds_what_is_known_and_stays_below_the_bound(mask):
    F, R = repulsive(mask), 1.0
    found = empirical_constant(F, n=5, radius=R, restarts=1, steps=12, seed=1)
    family = refined_masked if mask == "causal" else refined_unmasked
    assert found.upper == set_bound(F, R) == family(F.layer, R).value
    assert [pair.ratio for pair in found.pairs] == sorted((pair.ratio for pair in found.pairs), reverse=True)
    for pair in found.pairs:
        assert pair.ratio <= found.upper
        assert max(pair.mu.radius, pair.nu.radius) <= R * (1 + 1e-12)
        # What is reported is what exact transport says of the reported pair.
        assert pair.ratio == pair_ratio(F, pair.mu, pair.nu).ratio
        assert pair.ratio >= max(pair.history[:1], default=0.0) * (1 - 1e-9)
    changes = {pair.change for pair in found.pairs}
    if mask == "full":
        assert changes == {"move", "insert", "delete", "duplicate", "split"}
        assert any(pair.mu.size != pair.nu.size for pair in found.pairs)
        # Not below the two-Dirac constant, of which the search starts with an infinitesimal pair.
        assert found.best.ratio >= lower_meanfield(PlainHead(REPULSIVE, IDENTITY), R).value
    else:
        assert changes == {"move", "split"}
        groups = Measure.from_tokens(lower_groups(PlainHead(REPULSIVE, IDENTITY, True), R, 5).tokens, ordered=True)
        assert found.best.ratio >= 0.99 * local_constant(F, groups).estimate
    again = empirical_constant(F, n=5, radius=R, restarts=1, steps=12, seed=1)
    assert again.best.ratio == found.best.ratio
    assert "at least" in str(found)


def test_ascent_ascends():
    F = repulsive()
    mu, nu = Measure(Ball(2, 1.5).sample(5, 1)), Measure(Ball(2, 1.5).sample(7, 2))
    start, found = pair_ratio(F, mu, nu).ratio, ascend(F, mu, nu, 1.5, steps=30)
    assert found.ratio > 1.2 * start
    assert found.history[0] == pytest.approx(start, rel=1e-12)
    assert found.ratio == pytest.approx(max(found.history), rel=1e-9)


def test_two_diracs_attain_the_mean_field_lower_bound():
    for R in (0.5, 1.0, 2.0):
        mu = two_diracs(repulsive(), R)
        assert local_constant(repulsive(), mu).lower >= lower_meanfield(PlainHead(REPULSIVE, IDENTITY), R).value * (1 - 1e-3)
    with pytest.raises(ValueError, match="unmasked layers"):
        two_diracs(repulsive("causal"), 1.0)
    layer = cases.layer(extras="biases softcap", heads=2)
    assert two_diracs(MeanFieldAttention(layer), 1.0).size == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radius": 0.0}, "radius must be positive"),
        ({"radius": -1.0}, "radius must be positive"),
        ({"radius": math.inf}, "radius must be positive"),
        ({"n": 0}, "n must be at least 1"),
        ({"restarts": 0}, "restarts must be at least 1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"starts": (Measure([[9.0, 0.0]]),)}, "outside the ball"),
    ],
)
def test_search_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        empirical_constant(repulsive(), **({"n": 3, "radius": 1.0} | options))


def test_study_of_a_confined_law_settles_below_the_bound():
    F, law = repulsive(), Sphere(2, 1.0)
    study = convergence_study(F, law, [8, 16, 32, 64, 128], repeats=4, transport_up_to=32, seed=3)
    assert study.bound == refined_unmasked(F.layer, 1.0).value
    for row in study.rows:
        assert row.lower <= row.sigma <= row.upper <= study.bound
        assert (row.ratio is None) == (row.insertion is None) == (row.n > 32)
        assert row.ratio is None or max(row.ratio, row.insertion) <= study.bound
    X = law.sample(2 * 8 + 1, 3 + 1_000_003 + 16)[:8]
    sigma = lipscope.local_lipschitz(F.layer, X, solver=lipscope.Dense()).estimate
    assert study.rows[0].sigma == pytest.approx(sigma, rel=1e-13)
    fit = study.plateau()
    assert fit.is_visible
    assert fit.level_low <= fit.level <= fit.level_high < study.bound
    # The limit itself: a much longer cloud.
    limit = local_constant(F, Measure(law.sample(1500, 9))).estimate
    assert fit.level == pytest.approx(limit, rel=0.1)
    assert "can exceed the refined constant" in study.verdict()
    assert json.loads(json.dumps(study.to_dict(), allow_nan=False))["law"] == "sphere:1"


def test_study_of_a_gaussian_says_that_no_constant_holds():
    study = convergence_study(repulsive("causal"), Gaussian(2, 1.5), [8, 32, 128, 512], repeats=3, transport_up_to=8)
    assert math.isinf(study.bound)
    assert "not confined to a ball" in study.verdict()
    sigma, radius = study.medians("sigma"), study.medians("radius")
    assert sigma[-1] > 2 * sigma[0]
    assert radius[-1] > 1.3 * radius[0]
    assert study.growth().alpha_low > 0.1
    assert all(row.insertion is None for row in study.rows)
    assert study.to_dict()["bound"] is None
    assert "no bound of ours holds for every n" in str(study)


def test_study_refuses():
    for lengths, options, message in (
        ([], {}, "lengths must be positive"),
        ([0], {}, "lengths must be positive"),
        ([4], {"repeats": 0}, "repeats must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            convergence_study(repulsive(), Ball(2, 1.0), lengths, **options)
    with pytest.raises(ValueError, match=r"R\^3, but the layer takes width 2"):
        convergence_study(repulsive(), Ball(3, 1.0), [4])


def test_study_of_a_law_with_one_atom():
    """Samples that coincide have no ratio, and that is no error."""
    study = convergence_study(repulsive(), Empirical(torch.ones(1, 2)), [2, 3], repeats=1)
    assert [row.ratio for row in study.rows] == [row.insertion for row in study.rows] == [None, None]


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_study_of_a_law_with_two_atoms(mask):
    """Short samples of two atoms are often the same measure in another order: distance 0, no ratio, no error."""
    tokens = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    study = convergence_study(repulsive(mask), Empirical(tokens), [2, 3, 4, 5], repeats=4)
    assert all((row.ratio is None) == (row.distance == 0) for row in study.rows)
    law_seed = 1_000_003
    for row in study.rows:
        X, Y, _ = Empirical(tokens).sample(2 * row.n + 1, law_seed * (row.repeat + 1) + 2 * row.n).split([row.n, row.n, 1])
        same = torch.equal(X, Y) if mask == "causal" else torch.equal(X.sum(0), Y.sum(0))
        assert (row.ratio is None) == same
    if mask == "full":
        # The same counts in another order: what an elementwise comparison does not see.
        assert 1 < sum(row.ratio is None for row in study.rows) < len(study.rows)


def test_plateau_fit_recovers_what_was_put_in():
    generator = torch.Generator().manual_seed(0)
    n = [m for m in (8, 16, 32, 64, 128, 256, 512) for _ in range(8)]
    noise = 0.01 * torch.randn(len(n), generator=generator).double()
    fit = fit_plateau(n, [2 - 3 * m**-0.7 + e for m, e in zip(n, noise.tolist(), strict=True)])
    assert fit.level_low <= 2 <= fit.level_high
    assert fit.rate_low <= 0.7 <= fit.rate_high
    assert fit.rate_is_determined
    assert fit.at(64) == pytest.approx(2 - 3 * 64**-0.7, abs=0.02)
    flat = fit_plateau(n, [2 + e for e in noise.tolist()])
    assert flat.is_constant
    assert flat.level_low <= 2 <= flat.level_high
    assert "no trend" in str(flat)
    growing = fit_plateau(n, [m**0.5 for m in n])
    assert not growing.is_visible
    assert "no plateau" in str(growing)
    # The estimate alone is clear of the slow end, its interval is not: growth without end fits these draws as well.
    unclear = fit_plateau(n, [2 - 3 * m**-0.3 + 50 * e for m, e in zip(n, noise.tolist(), strict=True)])
    assert unclear.rate > RATES[0] * 1.1
    assert unclear.rate_low == pytest.approx(RATES[0])
    assert not unclear.is_visible
    assert str(unclear).startswith("no plateau can be told from steady drift")
    with pytest.raises(ValueError, match="four different lengths"):
        fit_plateau([1, 2, 3], [1, 1, 1])


def gaussian_quadrature(std, nodes):
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    return Measure(std * torch.from_numpy(x)[:, None], torch.from_numpy(w / w.sum()))


def test_gaussian_laws_have_a_finite_constant_up_to_the_threshold():
    """For A = −1 the derivative at N(0, s²) is bounded on L² exactly when s² < 1/√2, s < 0.841."""
    one = torch.ones(1, 1, dtype=torch.float64)
    F = MeanFieldAttention(lipscope.Attention(-one, one, one, scale=1.0))

    def sigma(std, nodes):
        return local_constant(F, gaussian_quadrature(std, nodes)).estimate

    assert sigma(0.5, 20) == pytest.approx(sigma(0.5, 40), rel=1e-9)
    assert sigma(0.75, 40) == pytest.approx(sigma(0.75, 60), rel=1e-3)
    assert sigma(0.9, 40) > 3 * sigma(0.9, 20)
    assert sigma(1.5, 40) > 1e6
    # Random tokens find the constant of their law below the threshold.
    drawn = local_constant(F, Measure(Gaussian(1, 0.5).sample(1500, 2)))
    assert drawn.estimate == pytest.approx(sigma(0.5, 40), rel=0.02)
