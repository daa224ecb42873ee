"""Laws of the solvers: intervals contain the truth, scale does not matter, items are independent of their batch."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

import cases
import lipscope
from lipscope.spectral.basis import Basis, overlap_quantile, random_direction, scaled_norm
from lipscope.spectral.bidiagonalisation import Bidiagonalisation
from lipscope.spectral.operator import DenseOperator
from lipscope.spectral.result import Status
from lipscope.spectral.ritz import polynomial_upper_bound

SOLVERS = {
    "golub_kahan": lipscope.GolubKahan(rtol=1e-8),
    "dense": lipscope.Dense(),
}


class Diagonal(lipscope.Operator):
    """A diagonal map of many dimensions."""

    def __init__(self, gains: torch.Tensor) -> None:
        self.gains, self.batch, self.dtype, self.device = gains, 1, gains.dtype, gains.device
        self.input_shape = self.output_shape = tuple(gains.shape)

    def matvec(self, u):
        return self.gains * u

    def rmatvec(self, g):
        return self.gains * g

    def select(self, items):
        return self


def spectrum(values, M: int, N: int, seed: int) -> torch.Tensor:
    """A matrix M×N with the given singular values and random singular vectors."""
    left = torch.linalg.qr(cases.random(M, M, seed=seed)).Q
    right = torch.linalg.qr(cases.random(N, N, seed=seed + 1)).Q
    middle = torch.zeros(M, N, dtype=torch.float64)
    middle[: len(values), : len(values)] = torch.diag(torch.as_tensor(values, dtype=torch.float64))
    return left @ middle @ right.T


@settings(max_examples=60, deadline=None)
@given(
    M=st.integers(1, 40),
    N=st.integers(1, 40),
    batch=st.integers(1, 5),
    rank=st.integers(1, 40),
    magnitude=st.sampled_from([1e-12, 1.0, 1e9]),
    seed=st.integers(0, 10_000),
    rtol=st.sampled_from([1e-2, 1e-4, 1e-10]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_interval_contains_the_largest_singular_value(M, N, batch, rank, magnitude, seed, rtol, dtype):
    A = cases.random(batch, M, min(rank, N), seed=seed) @ cases.random(batch, min(rank, N), N, seed=seed + 1) * magnitude
    A = A.to(dtype)
    truth = torch.linalg.svdvals(A.double())[:, 0]
    for solver in (lipscope.GolubKahan(rtol=rtol), lipscope.Dense()):
        out = lipscope.spectral_norm(DenseOperator(A), solver)
        lower, estimate, upper = (torch.as_tensor(x, dtype=torch.float64) for x in (out.lower, out.estimate, out.upper))
        assert (lower <= estimate).all()
        assert (estimate <= upper).all()
        assert (lower <= truth).all()
        assert (truth <= upper).all()


class Spike(lipscope.Operator):
    """a·I + c·wwᵀ: two distinct singular values only, so a Krylov space is exhausted after two steps."""

    def __init__(self, w: torch.Tensor, c: float, a: float = 1.0) -> None:
        self.w, self.c, self.a, self.batch = w, c, a, len(w)
        self.input_shape = self.output_shape = tuple(w.shape[1:])
        self.dtype, self.device = w.dtype, w.device

    def matvec(self, u):
        return self.a * u + self.c * self.w * (u * self.w).sum(-1, keepdim=True)

    rmatvec = matvec

    def select(self, items):
        return Spike(self.w[items], self.c, self.a)


@pytest.mark.parametrize("delta", [0.05, 0.3])
def test_the_upper_bound_fails_as_often_as_it_says(delta):
    """One value above a flat rest is the worst case: after one step the bound fails when the overlap is below g.

    Then γ/√(1 − γ²) < g decides exactly, so the failure count over many maps follows a binomial law. Its rate is 0.9·δ:
    the rest is kept for recurrences that start afresh.
    """
    trials = 20_000
    tops = cases.random(trials, 100, seed=3)
    spikes = Spike(tops / tops.norm(dim=-1, keepdim=True), c=0.5, a=0.5)
    found = lipscope.spectral_norm(spikes, lipscope.GolubKahan(rtol=1e-9, max_steps=1, delta=delta))
    failures = int((found.upper < 1 - 1e-9).sum())
    assert binom.ppf(0.001, trials, 0.9 * delta) <= failures <= binom.ppf(0.999, trials, 0.9 * delta)


def test_the_upper_bound_tightens_with_the_steps():
    A = spectrum(np.linspace(1, 0.01, 80), 80, 80, seed=1)
    widths = []
    for steps in (5, 10, 20, 40, 80):
        solver = lipscope.GolubKahan(rtol=1e-14, interval=1e-10, max_steps=steps)
        out = lipscope.spectral_norm(DenseOperator(A), solver)
        widths.append(out.upper / out.lower - 1)
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 1e-10


def test_polynomial_upper_bound_of_one_step_is_its_closed_form():
    """k = 1: (t − α²) = αβ/g."""
    alpha, beta = torch.tensor([[2.0]], dtype=torch.float64), torch.tensor([[0.5]], dtype=torch.float64)
    overlap = torch.tensor([1e-3], dtype=torch.float64)
    upper = polynomial_upper_bound(alpha, alpha, beta, log_overlap=overlap.log(), floor=torch.zeros(1, dtype=torch.float64))
    assert float(upper) == pytest.approx(math.sqrt(4 + 1 / 1e-3), rel=1e-12)


def test_every_digit_of_a_seed_counts():
    like = torch.zeros(0, dtype=torch.float64)
    seeds = [5, 5 + 2**32, 5 + 2**33, 5 + 2**60, 5 + 2**64, -5]
    drawn = [random_direction(400, seed, like)[0] for seed in seeds]
    gram = torch.stack(drawn) @ torch.stack(drawn).mT
    torch.testing.assert_close(gram.diagonal(), torch.ones(len(seeds), dtype=torch.float64))
    assert float((gram - torch.eye(len(seeds))).abs().max()) < 0.25
    # Seeds of 32 bits are those of torch: stored results can be had again.
    usual = torch.randn(400, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    torch.testing.assert_close(drawn[0], usual / usual.norm())


@pytest.mark.parametrize("seed", range(20))
def test_polynomial_upper_bound_is_the_root_or_just_beyond_it(seed):
    """Against SciPy's bracketing root finder on the same equation."""
    generator = torch.Generator().manual_seed(seed)
    k = int(torch.randint(1, 40, (1,), generator=generator))
    alpha, beta = torch.rand(2, 1, k, dtype=torch.float64, generator=generator) ** 3
    overlap = 10 ** (-12 * torch.rand(1, dtype=torch.float64, generator=generator))
    matrix = np.diag(alpha[0].numpy()) + np.diag(beta[0, :-1].numpy(), 1)
    values = np.linalg.svd(matrix, compute_uv=False)
    known = {"log_overlap": overlap.log(), "floor": torch.zeros(1).double()}
    upper = float(polynomial_upper_bound(torch.from_numpy(values)[None], alpha, beta, **known))
    target = float(alpha.log().sum() + beta.log().sum() - overlap.log())

    def excess(x: float) -> float:
        return float(np.log((np.exp(x) + (1 - (values / values[0]) ** 2)) * values[0] ** 2).sum() - target)

    root = scipy.optimize.brentq(excess, -700, 80, xtol=1e-13)
    exact = values[0] * math.sqrt(1 + math.exp(root))
    assert exact * (1 - 1e-13) <= upper <= exact * (1 + 1e-11)


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 0.0])
@pytest.mark.parametrize("size", [7, 768, 98 * 768])
def test_norm_of_float32_rows_keeps_its_digits_at_every_scale(size, scale):
    x = scale * torch.randn(3, size, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(scaled_norm(x), x.double().norm(dim=-1), rtol=1e-7, atol=0)


@pytest.mark.parametrize("size", [1, 2, 3, 50, 10_000])
def test_overlap_quantile_against_sampling(size):
    g = overlap_quantile(size, 0.2)
    x = torch.randn(20_000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rest = torch.distributions.Chi2(max(size - 1, 1)).sample((20_000, 1)) * (size > 1)
    frequency = float(((x / (x.square() + rest).sqrt()).abs() < g).double().mean())
    assert frequency == pytest.approx(0.2 if size > 1 else 0.0, abs=0.02)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("factor", [1e-20, 1e-3, 1e15])
def test_scale_equivariance(name, factor):
    """σ(c·f) = c·σ(f), in the same number of steps: stopping is relative."""
    A = cases.random(2, 30, 25, seed=0)
    one = lipscope.spectral_norm(DenseOperator(A), SOLVERS[name])
    other = lipscope.spectral_norm(DenseOperator(factor * A), SOLVERS[name])
    torch.testing.assert_close(other.estimate, factor * one.estimate, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(other.upper, factor * one.upper, rtol=1e-9, atol=0.0)
    assert torch.equal(other.iterations, one.iterations)


def test_batch_equals_loop():
    """Each item gives the same answer in the same steps, alone, in any company, and whatever the memory limit."""
    easy = spectrum([5.0, 0.1, 0.1], 40, 50, seed=0)
    hard = spectrum(np.linspace(1, 0.9, 40), 40, 50, seed=2)
    A = torch.stack([easy, hard, 3 * easy, torch.zeros_like(easy), hard.flip(0)])
    solver = lipscope.GolubKahan(rtol=1e-7, k=2, vectors=True)
    together = lipscope.spectral_norm(DenseOperator(A), solver)
    assert len(set(together.iterations.tolist())) > 1, "the items should stop at different steps"
    in_turns = lipscope.spectral_norm(DenseOperator(A), lipscope.GolubKahan(rtol=1e-7, k=2, memory=1 << 15))
    torch.testing.assert_close(in_turns.estimate, together.estimate, rtol=1e-13, atol=0)
    for b in range(len(A)):
        alone = lipscope.spectral_norm(DenseOperator(A[b]), solver)
        assert alone.iterations == together.iterations[b]
        assert alone.estimate == pytest.approx(float(together.estimate[b]), rel=1e-13)
        assert alone.upper == pytest.approx(float(together.upper[b]), rel=1e-9)
        torch.testing.assert_close(alone.right, together.right[b], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("solver", [lipscope.GolubKahan(rtol=1e-10, k=4, vectors=True), lipscope.Dense(k=4, vectors=True)])
def test_top_triplets(solver):
    A = spectrum([7.0, 5.0, 5.0, 1.0, 0.5, 0.2], 30, 20, seed=0)
    out = lipscope.spectral_norm(DenseOperator(A[None].repeat(2, 1, 1)), solver)
    expected = torch.tensor([7.0, 5.0, 5.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(out.singular_values[1], expected, rtol=1e-9, atol=1e-9)
    for c in range(4):
        v, u, s = out.right[0, c], out.left[0, c], expected[c]
        torch.testing.assert_close(A @ v, s * u, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(A.T @ u, s * v, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out.right[0] @ out.right[0].T, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.mark.parametrize("name", SOLVERS)
def test_zero_rank_one_and_identity(name):
    solver = SOLVERS[name]
    zero = lipscope.spectral_norm(DenseOperator(torch.zeros(7, 9, dtype=torch.float64)), solver)
    assert (zero.lower, zero.estimate, zero.upper) == (0.0, 0.0, 0.0)
    rank_one = torch.outer(torch.arange(1.0, 8.0), torch.ones(9)).double()
    out = lipscope.spectral_norm(DenseOperator(rank_one), solver)
    assert out.estimate == pytest.approx(float(rank_one.norm()), rel=1e-12)
    out = lipscope.spectral_norm(DenseOperator(torch.eye(9, dtype=torch.float64)), solver)
    assert out.estimate == pytest.approx(1.0, rel=1e-12)


def test_interval_option_narrows_the_interval():
    A = spectrum(np.linspace(1, 0.01, 200), 200, 200, seed=1)
    loose = lipscope.spectral_norm(DenseOperator(A), lipscope.GolubKahan(rtol=1e-2, interval=None))
    tight = lipscope.spectral_norm(DenseOperator(A), lipscope.GolubKahan(rtol=1e-2, interval=1e-3))
    assert tight.upper / tight.lower - 1 <= 1.1e-3 < loose.upper / loose.lower - 1
    assert tight.lower <= 1 <= tight.upper


def test_a_hidden_top_vector_is_not_overlooked():
    """A start almost orthogonal to the top vector looks converged at the second value; the guard goes on."""
    size = 200
    A = torch.diag(torch.cat([torch.tensor([1.3, 1.0]), torch.linspace(0.3, 0.1, size - 2)]).double())
    start = torch.randn(1, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[0]
    # Turn the matrix so that the start of seed 0 has a tiny overlap with its top vector.
    top = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    top = top - (1 - 1e-5) * (top @ start) / (start @ start) * start
    Q = torch.linalg.qr(torch.cat([top[:, None], cases.random(size, size - 1, seed=2)], dim=1)).Q
    turned = DenseOperator(Q @ A @ Q.T)
    fooled = lipscope.spectral_norm(turned, lipscope.GolubKahan(rtol=1e-2, interval=None))
    careful = lipscope.spectral_norm(turned, lipscope.GolubKahan(rtol=1e-2))
    assert fooled.status is Status.ESTIMATED
    assert not fooled.converged
    assert fooled.estimate < 1.1
    assert fooled.upper >= 1.3, "the interval is honest even then"
    assert careful.estimate == pytest.approx(1.3, rel=1e-2)


def test_not_converged_says_so_and_stays_valid():
    A = spectrum(np.linspace(1, 0.999, 100), 100, 100, seed=1)
    out = lipscope.spectral_norm(DenseOperator(A), lipscope.GolubKahan(rtol=1e-12, max_steps=5))
    assert not out.converged
    assert out.status is Status.MAX_STEPS
    assert "max_steps" in out.message
    assert "did not converge" in str(out)
    assert out.lower <= 1 <= out.upper


def test_non_finite_products_are_refused():
    A = torch.full((3, 3), float("nan"))
    for solver in (lipscope.GolubKahan(), lipscope.Dense()):
        with pytest.raises(FloatingPointError):
            lipscope.spectral_norm(DenseOperator(A), solver)


@pytest.mark.parametrize(
    ("solver", "options"),
    [
        (solver, options)
        for solver, names in (
            (lipscope.GolubKahan, "rtol delta max_steps k interval"),
            (lipscope.Auto, "rtol delta max_steps k interval"),
            (lipscope.Dense, "k"),
        )
        for options in ({"rtol": 0}, {"rtol": 2}, {"delta": 0}, {"delta": 1}, {"max_steps": 0}, {"k": 0}, {"interval": 0})
        if next(iter(options)) in names.split()
    ],
)
def test_bad_options_are_refused_by_name(solver, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        solver(**options)


@pytest.mark.parametrize("solver", [*SOLVERS.values(), lipscope.Auto(), lipscope.GolubKahan(k=2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_with_few_digits_are_refused(solver, dtype):
    with pytest.raises(ValueError, match=r"products must be in float32 or float64, got torch\.b?float16"):
        lipscope.spectral_norm(DenseOperator(cases.random(6, 5, seed=0).to(dtype)), solver)


def test_fewer_steps_than_triplets_are_refused():
    with pytest.raises(ValueError, match="max_steps must be at least 1 and at least k = 5, got 3"):
        lipscope.GolubKahan(k=5, max_steps=3)


@pytest.mark.parametrize("solver", [lipscope.GolubKahan(), lipscope.Dense()], ids=str)
@pytest.mark.parametrize(
    ("dtype", "exponents"), [(torch.float32, (-36, -22, 18, 30)), (torch.float64, (-250, -160, 160, 250))]
)
def test_extreme_scales(solver, dtype, exponents):
    A = cases.random(30, 30, seed=0, dtype=dtype)
    for exponent in exponents:
        scaled = A * 10.0**exponent
        truth = float(torch.linalg.svdvals(scaled.double())[0])
        out = lipscope.spectral_norm(DenseOperator(scaled), solver)
        assert out.lower <= truth <= out.upper
        assert out.estimate == pytest.approx(truth, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("overlap", [1e-7, 2e-6, 1e-4])
def test_exhaustion_is_not_taken_for_certainty(dtype, overlap):
    """A start that misses the spike to rounding sees the identity; the bound and a fresh start still find 1.2."""
    size = 10_000
    start = torch.randn(1, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)[0]
    start /= start.norm()
    w = cases.random(size, seed=5)
    w = w - (w @ start) * start
    w = (w / w.norm()) * (1 - overlap**2) ** 0.5 + overlap * start
    out = lipscope.spectral_norm(Spike(w.to(dtype)[None], 0.2))
    assert out.lower <= 1.2 <= out.upper
    assert out.estimate == pytest.approx(1.2, rel=1e-4)


def test_repeated_values_are_found_when_the_space_is_exhausted():
    out = lipscope.spectral_norm(DenseOperator(3 * torch.eye(200)), lipscope.GolubKahan(k=3, vectors=True))
    assert out.singular_values.flatten().tolist() == pytest.approx([3.0, 3.0, 3.0], rel=1e-6)
    torch.testing.assert_close(out.right @ out.right.T, torch.eye(3), rtol=0, atol=1e-5)


def test_a_draw_that_is_almost_in_the_basis_is_made_again():
    """Two dimensions, a start that is the lesser singular vector, and a second one that is almost the same direction."""

    def draw(seed):
        return random_direction(2, seed, torch.zeros(0, dtype=torch.float64))[0]

    def between(seed):
        (a, b), (c, d) = draw(seed).tolist(), draw(seed + 1).tolist()
        return abs(a * d - b * c)

    seed = next(seed for seed in range(100_000) if between(seed) < 7e-4)
    v = draw(seed)
    A = 2 * torch.eye(2, dtype=torch.float64) - torch.outer(v, v)
    result = lipscope.spectral_norm(DenseOperator(A), lipscope.GolubKahan(seed=seed, interval=1e-12))
    assert result.estimate == pytest.approx(2)


def test_too_many_triplets_are_refused():
    for solver in (lipscope.GolubKahan(k=4), lipscope.Dense(k=4)):
        with pytest.raises(ValueError, match="k = 4"):
            lipscope.spectral_norm(DenseOperator(torch.eye(3)), solver)


def test_auto_is_exact_when_small_and_iterative_when_large():
    small = lipscope.spectral_norm(DenseOperator(torch.eye(5)))
    large = lipscope.spectral_norm(DenseOperator(cases.random(300, 300, seed=0)))
    assert (small.upper_kind, small.delta) == ("exact", None)
    assert (large.upper_kind, large.delta) == ("probabilistic", 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kept", [0, 8, 12])
@pytest.mark.parametrize("values", ["flat", "geometric", "pair", "low-rank", "slow"])
def test_little_memory(values, kept, dtype):
    """With room for few vectors the interval still holds, and the estimate and the worst direction are as accurate."""
    size = 200
    spectra = {
        "flat": torch.linspace(1, 0, size),
        "geometric": 0.97 ** torch.arange(size),
        "pair": torch.cat([torch.tensor([1.0, 0.99]), torch.linspace(0.5, 0, size - 2)]),
        "low-rank": torch.cat([torch.linspace(1, 0.9, 10), torch.zeros(size - 10)]),
        "slow": (1 + torch.arange(size)) ** -0.5,
    }
    left, right = (torch.linalg.qr(cases.random(size, size, seed=s)).Q for s in (1, 2))
    A = (left * spectra[values].double()) @ right.mT
    operator = DenseOperator(A.to(dtype))
    operator.input_shape = (20, 10)
    result = lipscope.spectral_norm(operator, lipscope.GolubKahan(memory=max(1, kept * size * 8)))
    assert result.lower <= 1 <= result.upper < 1.15
    assert abs(result.estimate - 1) < 2e-4
    whole = lipscope.spectral_norm(operator, lipscope.GolubKahan())
    # Where nobody asks for the worst direction, nothing is spent on it.
    alone = lipscope.spectral_norm(DenseOperator(A.to(dtype)), lipscope.GolubKahan(memory=max(1, kept * size * 8)))
    assert abs(alone.iterations - whole.iterations) <= 4
    assert alone.iterations <= result.iterations
    if values != "flat":
        expected = right[:, 0].reshape(20, 10).square().sum(-1)
        torch.testing.assert_close(result.token_energy.double(), expected, atol=0.05, rtol=0)


@pytest.mark.parametrize("shape", [(200,), (20, 10)])
def test_every_pair_of_products_is_counted(shape, monkeypatch):
    """Those that look for the worst direction afterwards too, and there are none where inputs have no tokens."""
    operator = DenseOperator(torch.diag(torch.linspace(1, 0, 200, dtype=torch.float64)))
    operator.input_shape, products, plain = shape, [], DenseOperator.matvec
    monkeypatch.setattr(DenseOperator, "matvec", lambda self, u: products.append(1) or plain(self, u))
    result = lipscope.spectral_norm(operator, lipscope.GolubKahan(memory=1))
    assert result.iterations == len(products)


def test_warm_starts():
    """A start from a nearby problem saves steps, and a misleading one costs neither validity nor many steps."""
    A = cases.random(3, 120, 120, seed=0)
    start = lipscope.GolubKahan(vectors=True).solve(DenseOperator(A)).right[:, 0]
    near = A + 1e-3 * cases.random(3, 120, 120, seed=1)
    _, values, right = torch.linalg.svd(near)
    solver = lipscope.GolubKahan(interval=None)
    cold = solver.solve(DenseOperator(near))
    warm = solver.solve(DenseOperator(near), start)
    misled = solver.solve(DenseOperator(near), right[:, -1])
    assert bool((warm.iterations < cold.iterations).all())
    for output in (cold, warm, misled):
        torch.testing.assert_close(output.estimate, values[:, 0], rtol=1e-4, atol=0)
        assert bool((output.upper >= values[:, 0]).all())
    assert bool((misled.iterations <= cold.iterations + 4).all())
    with pytest.raises(ValueError, match="start has shape"):
        solver.solve(DenseOperator(near), start[:2])


@pytest.mark.parametrize("size", [2, 16])
def test_the_upper_end_of_a_warm_start_fails_no_more_often_than_it_may(size):
    """One step from the top vector itself: in two dimensions mixing would cancel it too often."""
    delta, draws = 0.1, 800
    operator = DenseOperator(torch.diag(torch.tensor([1.0, *[0.5] * (size - 1)], dtype=torch.float64)))
    start = torch.eye(size, dtype=torch.float64)[:1]
    solvers = (lipscope.GolubKahan(max_steps=1, delta=delta, seed=seed) for seed in range(draws))
    misses = sum(float(solver.solve(operator, start).upper) < 1 - 1e-12 for solver in solvers)
    # The rest of δ is for recurrences that begin when a space is exhausted.
    assert misses <= binom.ppf(0.999, draws, 0.9 * delta)


def test_only_the_first_start_is_a_warm_one():
    """Starts multiply: what mixing took from the first counts once, however many follow when the space is exhausted."""
    operator = DenseOperator(torch.eye(20, dtype=torch.float64))
    r = random_direction(20, 0, operator)
    warm = torch.cat([-r[:, :10], r[:, 10:]], 1) - r
    runs = [Bidiagonalisation(lipscope.GolubKahan(max_steps=3, interval=1e-15), operator, start) for start in (None, warm)]
    mixed = float(runs[1].mixing)
    assert mixed > 1.2
    cold, other = (float(run.solve().upper) ** 2 - 1 for run in runs)
    assert [run.restarts.tolist() for run in runs] == [[3], [3]]
    # (t − 1)³ = (rounding)³ / g, and g is larger by what mixing adds.
    assert (cold / other) ** 3 == pytest.approx(mixed, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.0, 2.0, 12.0, 30.0])
def test_one_basis_serves_a_large_problem(decay, dtype):
    """Spaces that are not exhausted keep no left vectors, however ill-conditioned the map."""
    generator = torch.Generator().manual_seed(int(decay))
    size = 1100
    values = torch.logspace(0, -decay, size, dtype=torch.float64)
    left, right = (torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    operator = DenseOperator(((left * values) @ right.mT).to(dtype))
    result = lipscope.spectral_norm(operator, lipscope.GolubKahan(rtol=1e-6, interval=0.02, max_steps=400))
    gram = operator.to_dense()[0].double().numpy()
    exact = math.sqrt(scipy.linalg.eigvalsh(gram @ gram.T, subset_by_index=(size - 1, size - 1))[0])
    allowed = 50 * torch.finfo(dtype).eps
    assert result.lower <= exact * (1 + allowed)
    assert result.upper >= exact * (1 - allowed)
    assert result.estimate == pytest.approx(exact, rel=1e-4 if decay == 0.0 else max(2e-6, allowed))


@pytest.mark.parametrize("memory", [1 << 30, 10 * 1100 * 8])
@pytest.mark.parametrize("seed", [3, 18, 54])
def test_one_basis_ends_where_the_space_is_exhausted(seed, memory):
    """An interval narrower than rounding is asked of a map with two singular values: no noise is taken for a value."""
    size, few = 1100, torch.cat([torch.ones(15), torch.full((15,), 0.999)])
    left, right = (torch.linalg.qr(cases.random(size, 30, seed=seed + s)).Q for s in (0, 1))
    operator = DenseOperator(((left * few.double()) @ right.mT).float())
    result = lipscope.spectral_norm(operator, lipscope.GolubKahan(seed=seed, interval=1e-9, memory=memory))
    assert 0.9999 <= result.lower <= 1 + 1e-6
    assert 1 - 1e-6 <= result.upper <= 1.001


@pytest.fixture(scope="module")
def almost_isometric():
    """Uniform averages of orthogonal maps, tokens, and σ there in double precision."""
    q, k, v, out = (torch.linalg.qr(cases.random(32, 32, seed=s)).Q for s in range(4))
    layer = lipscope.Attention(1e-3 * q, 1e-3 * k, v, out, heads=4).to(torch.float32)
    X = cases.random(40, 32, seed=9).float()  # more dimensions than both bases are kept for
    exact = lipscope.local_lipschitz(layer, X, solver=lipscope.Dense(), certificate=False, dtype=torch.float64)
    return layer, X, exact.estimate


@pytest.mark.parametrize("options", [{}, {"k": 3}])
@pytest.mark.parametrize("seed", range(4))
def test_an_almost_isometric_layer(almost_isometric, seed, options):
    """Values that cluster at 1 above a null space."""
    layer, X, exact = almost_isometric
    solver = lipscope.GolubKahan(rtol=1e-6, interval=1e-4, seed=seed, **options)
    found = lipscope.local_lipschitz(layer, X, solver=solver, certificate=False)
    assert found.lower <= exact <= found.upper < exact * 1.0002
    assert found.converged
    assert found.iterations < 40


@pytest.mark.parametrize(
    ("size", "rank", "memory"), [(100, 50, 20 * 100 * 8), (1100, 1000, 1 << 30), (100, 100, 10 * 100 * 8)]
)
@pytest.mark.parametrize("spread", [1e-3, 1e-6, 1e-12])
def test_clusters_above_a_null_space(size, rank, memory, spread):
    values = torch.where(torch.arange(size) < rank, 1 - spread * torch.linspace(0, 1, size), 0.0).double()
    A = spectrum(values.tolist(), size, size, seed=3)
    for k in (1, 2):
        solver = lipscope.GolubKahan(rtol=1e-9, interval=1e-6, max_steps=60, memory=memory, k=k)
        result = lipscope.spectral_norm(DenseOperator(A), solver)
        assert result.lower <= 1 <= result.upper
        assert result.estimate > 1 - spread


@pytest.mark.parametrize("exponent", [-290, -170, -150, 0, 150, 160, 290])
@pytest.mark.parametrize("memory", [1, 40 * 100 * 8])
def test_any_scale_with_little_memory(exponent, memory):
    """The squares of very large and very small values are no numbers."""
    A = cases.random(100, 100, seed=1)
    exact = float(torch.linalg.svdvals(A)[0])
    result = lipscope.spectral_norm(DenseOperator(A * 10.0**exponent), lipscope.GolubKahan(memory=memory))
    assert result.converged
    assert result.lower / 10.0**exponent <= exact <= result.upper / 10.0**exponent
    assert result.estimate / 10.0**exponent == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("gap", [1e-3, 4e-3])
def test_what_is_let_go_counts_with_all_that_it_may_hide(gap):
    """Of many dimensions a small overlap with the top vector may look like rounding; the bound has to allow for it."""
    size, delta, seeds = 20_000, 0.1, 20
    gains = torch.arange(size).remainder(5).double().div(4).sqrt()
    gains[0] = math.sqrt(1 + gap)
    operator = Diagonal(gains.float())
    exact = float(gains.float().double().max())
    misses = sum(
        float(lipscope.GolubKahan(memory=1, delta=delta, seed=seed).solve(operator).upper) * (1 + operator.rounding_error)
        < exact
        for seed in range(seeds)
    )
    assert misses <= binom.ppf(0.999, seeds, delta)


def test_the_dense_solver_has_a_second_driver(monkeypatch):
    """The first one gives up on some matrices with many equal values."""
    A = cases.random(2, 7, 5, seed=4)
    expected = lipscope.Dense(k=2, vectors=True).solve(DenseOperator(A))

    def gives_up(*_, **__):
        raise torch.linalg.LinAlgError("failed to converge")

    monkeypatch.setattr(torch.linalg, "svd", gives_up)
    found = lipscope.Dense(k=2, vectors=True).solve(DenseOperator(A))
    torch.testing.assert_close(found.singular_values, expected.singular_values)
    torch.testing.assert_close(
        (found.left * found.right.sum(-1, True)).abs(), (expected.left * expected.right.sum(-1, True)).abs()
    )


class Vanishing(DenseOperator):
    """Maps beside terms of some size that cancel exactly, unless they overflow."""

    def __init__(self, matrices, size):
        super().__init__(matrices)
        self.matrices, self.size = matrices, size

    def matvec(self, u):
        return super().matvec(u) + (self.size * u - self.size * u)

    def rmatvec(self, g):
        return super().rmatvec(g) + (self.size * g - self.size * g)

    def select(self, items):
        return Vanishing(self.matrices[items], self.size)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    ("dtype", "exponents"),
    [(torch.float32, (8.5, 8.75, 23.5, 31.25, 35)), (torch.float64, (7.25, 7.5, 157.75, 158, 303.75))],
)
def test_factors_are_reduced_whenever_a_product_overflows(k, dtype, exponents):
    A = cases.random(3, 40, 40, seed=0, dtype=dtype)
    A[0] = 0
    plain = lipscope.GolubKahan(k=k).solve(DenseOperator(A))
    for exponent in exponents:
        found = lipscope.GolubKahan(k=k).solve(Vanishing(A, 10.0**exponent))
        assert found.estimate[0] == found.upper[0] == found.residual[0] == 0
        torch.testing.assert_close(found.estimate[1:], plain.estimate[1:], rtol=1e-4, atol=0)
        assert bool(torch.isfinite(found.residual).all())


@pytest.mark.parametrize("number", [np.int64(2**40), np.int64(-5), np.uint8(255), np.int32(3)], ids=repr)
def test_integers_of_numpy_are_integers(number):
    """Not only where they come in by a public name."""

    @dataclass(frozen=True)
    class Own(lipscope.GolubKahan):
        pass

    operator = DenseOperator(torch.diag(torch.linspace(1, 0.1, 100, dtype=torch.float64)))
    found = Own(seed=number, k=np.uint8(2), max_steps=np.uint8(90), memory=np.uint16(60_000)).solve(operator)
    expected = lipscope.GolubKahan(seed=int(number), k=2, max_steps=90, memory=60_000).solve(operator)
    assert torch.equal(found.upper, expected.upper)
    assert torch.equal(found.singular_values, expected.singular_values)
    for options in ({"k": 2.0}, {"seed": 1.5}, {"seed": True}, {"max_steps": 30.5}):
        with pytest.raises(TypeError, match=f"{next(iter(options))} must be an integer"):
            Own(**options)


def test_a_start_opposite_to_the_random_one():
    operator = DenseOperator(torch.full((1, 5, 1), 3.0))
    for start in (torch.ones(1, 1), -torch.ones(1, 1)):
        found = lipscope.GolubKahan().solve(operator, start)
        assert float(found.estimate) == pytest.approx(3 * math.sqrt(5), rel=1e-6)
        assert float(found.upper) >= float(found.estimate)


def test_nothing_of_released_bases_is_held():
    operator = DenseOperator(cases.random(300, 300, seed=2))
    run = Bidiagonalisation(lipscope.GolubKahan(memory=16 * 300 * 8), operator)
    assert int(run.solve().iterations) > 16
    for vector in (run.before, run.V.last):
        assert vector.untyped_storage().nbytes() == vector.nbytes


def test_letting_items_go_copies_a_block_at_a_time():
    basis = Basis(4, 50, torch.zeros(0, dtype=torch.float64), capacity=64)
    vectors = cases.random(40, 4, 50, seed=1)
    for x in vectors:
        basis.append(x)
    assert all(block.shape[1] <= 8 for block in basis.blocks)
    basis.keep(torch.tensor([1, 3]))
    stored = torch.cat(basis.stored(), 1)
    assert torch.equal(stored, vectors[:, [1, 3]].transpose(0, 1))
    assert torch.equal(basis.last, vectors[-1, [1, 3]])


@pytest.mark.parametrize("options", [{}, {"vectors": True}, {"k": 2}, {"k": 5, "vectors": True}])
@pytest.mark.parametrize("batch", [1, 3])
def test_bases_stay_within_their_memory(batch, options, monkeypatch):
    """Also while the top vector is found after part of the basis was let go, and while several values are."""
    size, vectors = 300, 16
    living, most = weakref.WeakSet(), 0

    def append(basis, x, plain=Basis.append):
        nonlocal most
        plain(basis, x)
        living.add(basis)
        most = max(most, sum(block.nbytes for other in living for block in other.blocks))

    monkeypatch.setattr(Basis, "CHUNK", 4)
    monkeypatch.setattr(Basis, "append", append)
    left, right = (torch.linalg.qr(cases.random(batch, size, size, seed=s)).Q for s in (1, 2))
    values = torch.cat([torch.tensor([1.0, 0.98]), torch.linspace(0.97, 0, size - 2)]).double()
    memory = vectors * size * 8 * batch
    operator = DenseOperator((left * values) @ right.mT)
    # Rows of a batch stop at different steps.
    result = lipscope.GolubKahan(memory=memory, rtol=1e-6, interval=None, **options).solve(operator)
    torch.testing.assert_close(result.estimate, torch.ones(batch, dtype=torch.float64), rtol=1e-5, atol=0)
    assert int(result.iterations.max()) > vectors
    assert memory / 2 < most <= memory
