"""Hostile spectra: a sample of checks/spectra.py, what exhausted spaces take, chances of several starts, and any scale."""

from __future__ import annotations

import math

import pytest
import torch

import cases
import lipscope
import spectra
from lipscope.spectral.basis import log_overlap, overlap_quantile
from lipscope.spectral.operator import DenseOperator
from lipscope.spectral.result import Status


@pytest.mark.parametrize(
    "number",
    [
        1000085,  # a ladder: the interval was guarded, and the value further than rtol from σ
        1000062,  # a plateau without a guard: off by 3,000 rtol
        1000076,  # several values of a plateau: found mixed with each other
        2000041,  # a product that vanishes to rounding: the interval lay below σ
        1000033,  # 3e-41 in float32: the interval lay above σ
        1000148,  # the same with a cluster
    ],
)
def test_what_went_wrong_once(number):
    outcome = spectra.Outcome()
    spectra.judge(spectra.case(number), outcome)
    assert outcome.items == spectra.BATCH
    assert not outcome.violations + outcome.errors + outcome.wrong


def test_a_sample_of_the_attack():
    outcome = spectra.attack(items=160, seed=11, seconds=60)
    assert outcome.items == 160
    assert outcome.ok, str(outcome)
    assert outcome.statuses["converged"] > 100


def test_the_attack_sees_what_is_wrong(monkeypatch):
    """An upper end that is too low, and a value called converged that is not."""
    solve = lipscope.GolubKahan.solve

    def careless(solver, operator, start=None):
        found = solve(solver, operator, start)
        found.singular_values *= 0.5
        found.upper *= 0.5
        return found

    monkeypatch.setattr(lipscope.GolubKahan, "solve", careless)
    outcome = spectra.attack(items=16, seed=11, seconds=60)
    assert outcome.violations
    assert outcome.wrong
    assert not outcome.ok


@pytest.mark.parametrize("values", [[1.0], [1.0, 0.5]])
@pytest.mark.parametrize("options", [{}, {"k": 3, "rtol": 1e-6}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exhausted_spaces_take_few_starts(values, options, dtype):
    """Few distinct values: every start sees each of them once, and several starts together leave no room for another."""
    size = 450
    A = torch.diag(torch.tensor(values, dtype=dtype).repeat(size // len(values)))
    out = lipscope.spectral_norm(DenseOperator(A), lipscope.GolubKahan(**options))
    assert out.lower <= 1 <= out.upper <= 1.1
    assert out.status in (Status.CONVERGED, Status.ESTIMATED)
    assert out.iterations < 120


@pytest.mark.parametrize("interval", [1e-9, 1e-15])
def test_an_interval_beyond_rounding_does_not_take_the_whole_space(interval):
    out = lipscope.spectral_norm(DenseOperator(torch.eye(450)), lipscope.GolubKahan(interval=interval, max_steps=2000))
    assert out.iterations < 100
    assert out.lower <= 1 <= out.upper < 1.01


@pytest.mark.parametrize("starts", [1, 2, 5])
@pytest.mark.parametrize("size", [2, 3, 60])
def test_the_chance_of_several_small_overlaps(size, starts):
    """Sampled: the product of overlaps falls below g no more often than their part of delta."""
    delta, trials = 0.5, 40_000
    z = torch.randn(trials, starts, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    product = (z[..., 0].abs() / z.norm(dim=-1)).log().sum(-1)
    part = delta * (0.9 if starts == 1 else 0.1 / (starts * (starts - 1)))
    share = float((product < log_overlap(size, delta, starts)).double().mean())
    assert share <= part + 4 * math.sqrt(part / trials)
    if starts == 1:
        assert log_overlap(size, delta, 1) == pytest.approx(math.log(overlap_quantile(size, 0.9 * delta)), rel=1e-9)
        assert share >= part - 4 * math.sqrt(part / trials)


def test_any_number_of_starts_shares_the_chance():
    """No power of two overflows: the parts of thousands of starts are numbers, and together no more than the whole."""
    levels = [log_overlap(100, 1e-6, starts) for starts in (1, 2, 1023, 1024, 5000)]
    assert all(math.isfinite(level) for level in levels)
    assert levels == sorted(levels, reverse=True)
    assert 0.9 + sum(0.1 / (starts * (starts - 1)) for starts in range(2, 100_000)) <= 1


@pytest.mark.parametrize(
    "solver",
    [lipscope.GolubKahan(), lipscope.GolubKahan(k=2), lipscope.Dense()],
    ids=lambda solver: type(solver).__name__,
)
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 1e-40),
        (torch.float32, 1e-43),
        (torch.float32, 1e38),
        (torch.float64, 1e-310),
        (torch.float64, 1e-319),
        (torch.float64, 1e306),
    ],
)
def test_scales_at_the_ends_of_a_dtype(solver, dtype, scale):
    """Sub-normal entries, and sums of entries that are no numbers of the dtype."""
    A = (cases.random(2, 40, 30, seed=0).clamp(-2, 2) * scale).to(dtype)
    size = A.double().abs().amax()
    truth = torch.linalg.svdvals(A.double() / size)[:, 0]
    out = lipscope.spectral_norm(DenseOperator(A), solver)
    assert (out.lower <= truth * size).all()
    assert (truth * size <= out.upper).all()
    torch.testing.assert_close(out.estimate / size, truth, rtol=1e-3, atol=0)


def test_items_of_a_batch_have_scales_of_their_own():
    A = cases.random(1, 20, 20, seed=3).float() * torch.tensor([1.0, 1e-42, 0.0, 1e37])[:, None, None]
    for solver in (lipscope.GolubKahan(vectors=True), lipscope.Dense(vectors=True)):
        out = lipscope.spectral_norm(DenseOperator(A), solver)
        truth = torch.linalg.svdvals(A.double())[:, 0]
        assert ((out.lower <= truth) & (truth <= out.upper)).all()
        torch.testing.assert_close(out.estimate, truth, rtol=1e-4, atol=0)
        torch.testing.assert_close(out.right[[0, 1, 3]].norm(dim=-1), torch.ones(3, 1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("solver", [lipscope.GolubKahan(), lipscope.Dense()], ids=lambda solver: type(solver).__name__)
def test_a_value_beyond_float64_is_refused(solver):
    A = torch.full((30, 30), 1e308, dtype=torch.float64)
    with pytest.raises(FloatingPointError, match="beyond the largest number"):
        lipscope.spectral_norm(DenseOperator(A), solver)
