"""Several leading singular values: repeated ones count as often as they occur, with or without room for whole bases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cases
import lipscope
from lipscope.spectral.bidiagonalisation import Bidiagonalisation
from lipscope.spectral.operator import DenseOperator
from lipscope.spectral.result import Status
from test_solvers import spectrum

LITTLE = 1 << 12  # bytes: bases of a few vectors


def check_triplets(A: torch.Tensor, solver: lipscope.GolubKahan, accuracy: float = 1e-6) -> None:
    """Against NumPy's SVD: values, orthonormal vectors, and both products."""
    out, k = lipscope.spectral_norm(DenseOperator(A), solver), solver.k
    exact, values = np.linalg.svd(A.numpy(), compute_uv=False)[:k], out.singular_values.flatten()
    np.testing.assert_allclose(values.numpy(), exact, rtol=accuracy)
    for vectors in (out.right, out.left):
        torch.testing.assert_close(vectors @ vectors.T, torch.eye(k, dtype=A.dtype), rtol=0, atol=accuracy)
    off = 10 * accuracy * exact[0]
    torch.testing.assert_close(A @ out.right.T, out.left.T * values, rtol=0, atol=off)
    torch.testing.assert_close(A.T @ out.left.T, out.right.T * values, rtol=0, atol=off)
    # Where a copy of the last value is left over, nothing but the residual tells how far off the values are.
    all_shown = np.linalg.svd(A.numpy(), compute_uv=False)[k] < (1 - solver.rtol) * exact[-1]
    assert out.converged or (not all_shown and out.status is Status.ESTIMATED)
    assert out.lower <= exact[0] <= out.upper


@pytest.mark.parametrize("memory", [1 << 30, LITTLE])
@pytest.mark.parametrize(
    "values",
    [
        [5.0, 5.0, 5.0, 5.0, 5.0, 1.0],
        [5.0, 4.0, 4.0, 4.0, 3.0, 3.0],
        [5.0, 4.0, 3.0, 3.0, 2.0, 1.0],
        [5.0, 5.0 - 1e-7, 4.0, 4.0 - 1e-9, 4.0 - 2e-9, 1.0],
        [6.0, 5.0, 4.0, 3.0, 2.0, 1.0],
    ],
)
def test_repeated_values_are_counted(values, memory):
    A = spectrum([*values, *np.linspace(0.9, 0.1, 40)], 70, 60, seed=1)
    check_triplets(A, lipscope.GolubKahan(rtol=1e-10, k=4, vectors=True, memory=memory))


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.sampled_from([3.0, 2.5, 2.0, 1.0]), min_size=6, max_size=12),
    k=st.integers(2, 6),
    shape=st.sampled_from([(14, 20), (20, 14), (30, 30)]),
    seed=st.integers(0, 10),
)
def test_any_pattern_of_copies(values, k, shape, seed):
    A = spectrum(sorted(values, reverse=True), *shape, seed=seed)
    check_triplets(A, lipscope.GolubKahan(rtol=1e-10, k=k, vectors=True))


def test_items_of_a_batch_have_copies_of_their_own():
    spectra = [[4.0, 4.0, 4.0, 1.0], [4.0, 3.0, 2.0, 1.0], [4.0, 3.0, 3.0, 1.0], [2.0, 2.0, 1.0, 1.0]]
    A = torch.stack([spectrum(values, 40, 30, seed=s) for s, values in enumerate(spectra)])
    out = lipscope.spectral_norm(DenseOperator(A), lipscope.GolubKahan(rtol=1e-9, k=3))
    expected = torch.tensor([values[:3] for values in spectra], dtype=torch.float64)
    torch.testing.assert_close(out.singular_values, expected, rtol=1e-7, atol=0)
    assert out.right is None
    assert out.converged.all()


def test_tokens_that_see_only_themselves_share_every_value():
    """J is block-diagonal with the same block for every token, so σ occurs n times."""
    layer = cases.layer(heads=2, d=24, dk=8, dv=8, d_out=24).with_mask("window:1")
    X = cases.random(1, 40, 24, seed=0).to(layer.dtype)
    solvers = (lipscope.GolubKahan(k=3, rtol=1e-6), lipscope.Dense(k=3))
    found, dense = (lipscope.local_lipschitz(layer, X, certificate=False, solver=solver) for solver in solvers)
    torch.testing.assert_close(found.singular_values, dense.singular_values, rtol=1e-5, atol=0)
    assert float(dense.singular_values[0, 0]) == pytest.approx(float(dense.singular_values[0, 2]), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory", [1 << 30, 40 * 14 * 8, LITTLE])
@pytest.mark.parametrize(
    "values", [[3.0, 2.0, 2.0, 1.0, 1.0], [1.0] * 5, [2.0, 2.0, 1.0, 1.0, 0.5], [3.0, 3.0, 1.0, 0.0, 0.0]]
)
def test_all_values_of_wide_and_tall_maps(values, memory, dtype):
    """Of a wide one many directions are ignored, which must not pass for the rest of its values."""
    A = spectrum(values, 5, 9, seed=2).to(dtype)
    for matrix in (A, A.T):
        out = lipscope.spectral_norm(DenseOperator(matrix), lipscope.GolubKahan(rtol=1e-6, k=5, vectors=True, memory=memory))
        expected = torch.tensor(values, dtype=torch.float64)
        torch.testing.assert_close(out.singular_values.flatten(), expected, rtol=1e-5, atol=1e-5)
        for vectors in (out.right, out.left):
            torch.testing.assert_close(vectors @ vectors.T, torch.eye(5, dtype=dtype), rtol=0, atol=1e-4)
        torch.testing.assert_close(matrix @ out.right.T, out.left.T * expected.to(dtype), rtol=0, atol=1e-3)


def test_small_values_do_not_suffer_from_the_vectors_of_large_ones():
    """What is taken out of one side alone leaves the error of its vectors times the largest value."""
    A = spectrum([1e5, 5e4, 1e3, 10.0, 1.0, 0.1], 60, 50, seed=4)
    out = lipscope.spectral_norm(DenseOperator(A), lipscope.GolubKahan(rtol=1e-4, k=5, memory=6 * 110 * 8))
    expected = torch.tensor([1e5, 5e4, 1e3, 10.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(out.singular_values.flatten(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_vector_belongs_to_the_value_when_no_part_of_it_was_kept(seed, dtype):
    """Few distinct values exhaust many recurrences, and the top vector may lie in one that was not kept."""
    values = [3.0] * 8 + [2.5] * 7 + [2.0] * 8 + [1.0] * 7
    A = spectrum(values, 30, 30, seed=seed).to(dtype)
    out = lipscope.spectral_norm(DenseOperator(A), lipscope.GolubKahan(vectors=True, memory=720, seed=seed))
    gain = float((A @ out.right.flatten()).norm())
    assert gain == pytest.approx(3.0, rel=1e-3)
    assert float(out.left.flatten() @ A @ out.right.flatten()) == pytest.approx(3.0, rel=1e-3)


def test_as_many_values_as_there_are_and_more_than_the_rank():
    A = spectrum([2.0, 2.0, 1.0], 7, 5, seed=3)
    for k in (3, 5):
        out = lipscope.spectral_norm(DenseOperator(A), lipscope.GolubKahan(k=k, rtol=1e-9))
        expected = torch.tensor([2.0, 2.0, 1.0, 0.0, 0.0], dtype=torch.float64)[:k]
        torch.testing.assert_close(out.singular_values.flatten(), expected, rtol=1e-8, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("memory", [1 << 30, 30_000])
@pytest.mark.parametrize("k", [4, 6, 20])
def test_values_at_the_level_of_rounding_leave_the_others_alone(k, memory, dtype):
    """Vectors of vanishing values may repeat a direction, which a projection must not take out twice."""
    A = torch.zeros(200, 150, dtype=dtype)
    A[0, 0], A[1, 1], A[2, 2] = 5, 4, 3
    decay = torch.diag(torch.tensor([0.03**j for j in range(150)], dtype=dtype))
    for matrix in (A, decay):
        out = lipscope.spectral_norm(DenseOperator(matrix), lipscope.GolubKahan(k=k, memory=memory))
        exact = torch.linalg.svdvals(matrix.double())[:k]
        off = 1e-5 if dtype == torch.float32 else 1e-12
        torch.testing.assert_close(out.singular_values.flatten(), exact, rtol=1e-4, atol=off * float(exact[0]))
        assert out.lower <= float(exact[0]) <= out.upper


@pytest.mark.parametrize("vectors", [1, 4, 12])
def test_little_memory_gives_right_values_or_says_so(vectors):
    A = cases.random(300, 300, seed=0)
    solver = lipscope.GolubKahan(k=2, vectors=True, memory=vectors * 600 * 8, max_steps=600)
    out, exact = lipscope.spectral_norm(DenseOperator(A), solver), torch.linalg.svdvals(A)[:2]
    torch.testing.assert_close(out.singular_values.flatten(), exact, rtol=1e-4, atol=0)
    gains = (A @ out.right.T).norm(dim=0) / exact - 1
    assert float(gains.abs().max()) < 1e-4 or not out.converged


def test_vectors_of_a_problem_without_room_for_whole_bases():
    A = spectrum(np.linspace(3, 0.1, 50), 80, 60, seed=5)
    check_triplets(A, lipscope.GolubKahan(rtol=1e-8, k=1, vectors=True, memory=LITTLE, max_steps=2000), accuracy=1e-3)


def test_two_solves_share_the_chance_to_fail_and_no_start_serves_twice(monkeypatch):
    """Bases of 12 pairs do not suffice, and the largest value is looked for again; then the next ones."""
    starts, deltas, plain = [], [], Bidiagonalisation.__init__

    def watched(self, config, operator, start=None, **options):
        if not options.get("pure"):
            starts.append(range(config.seed, config.seed + config.max_steps + 1))
            deltas.append(config.delta)
        plain(self, config, operator, start, **options)

    monkeypatch.setattr(Bidiagonalisation, "__init__", watched)
    A = torch.diag(torch.linspace(1, 0, 200, dtype=torch.float64))
    out = lipscope.spectral_norm(DenseOperator(A), lipscope.GolubKahan(k=2, memory=13 * 400 * 8))
    assert len(deltas) > 2
    assert deltas[:2] == [0.5e-6, 0.5e-6]
    assert out.delta == 1e-6
    assert len(set().union(*starts)) == sum(map(len, starts))
