"""Bounds against each other, against closed forms, and as functions of their parameters."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lipscope
from lipscope.bounds import pairs, sets, softmax_jacobian
from lipscope.bounds.constants import Constants, HeadConstants

positive = st.floats(0.0, 30.0)
lengths = st.integers(1, 5000)


@given(st.floats(1e-3, 10), positive, st.floats(0, 3), lengths)
def test_refined_is_below_the_paper(V, A, R, n):
    layer = Constants.of_norms(V, A)
    general, meanfield = sets.castin2024_general(layer, R, n).value, sets.castin2024_meanfield(layer, R).value
    assert sets.refined_unmasked(layer, R, n).value <= min(general, meanfield) * (1 + 1e-12)
    assert sets.refined_unmasked(layer, R).value <= meanfield * (1 + 1e-12)
    assert sets.refined_masked(layer, R, n).value <= general * (1 + 1e-12)


@given(positive, st.floats(0.01, 3), st.floats(1.0, 1.5), st.integers(1, 300), st.integers(0, 50))
def test_set_bounds_grow_with_radius_and_length(A, R, factor, n, more):
    layer = Constants.of_norms(1.0, A)
    for bound in (sets.castin2024_general, sets.refined_unmasked, sets.refined_masked, sets.refined_visibility):
        value = bound(layer, R, n).value
        assert value <= bound(layer, R * factor, n).value * (1 + 1e-9)
        assert value <= bound(layer, R, n + more).value * (1 + 1e-9)
    assert sets.castin2024_meanfield(layer, R).value <= sets.castin2024_meanfield(layer, R * factor).value * (1 + 1e-12)


@given(positive, st.floats(0.01, 3), st.integers(1, 60))
def test_refined_has_the_closed_forms_of_its_docstring(A, R, n):
    a = A * R**2
    layer = Constants.of_norms(1.0, A)
    harmonic = sum(1 / i for i in range(1, n + 1))
    ours = sets.refined_unmasked(layer, R, n).value
    assert ours <= (math.hypot(1, a) * min(math.sqrt(n), sets.exp(a)) + a) * (1 + 1e-12)
    masked = sets.refined_masked(layer, R, n).value
    first = math.hypot(1, a) * min(math.sqrt(n), sets.exp(a) * math.sqrt(harmonic))
    assert masked <= (min(first, (2 + 2 ** (5 / 3) * a) * sets.exp(a)) + a) * (1 + 1e-12)
    assert sets.refined_visibility(layer, R, n).value == pytest.approx(ours, rel=1e-12)
    # The form that looks at the mask knows the causal one as well, both with and without n.
    same_column = math.hypot(1, a) * math.sqrt(sum(1 / (1 + i * math.exp(-2 * a)) for i in range(n)))
    exact = min(same_column, (2 + 2 ** (5 / 3) * a) * sets.exp(a)) + a
    assert sets.refined_visibility(layer, R, n, "causal").value == pytest.approx(exact, rel=1e-12)
    assert sets.refined_masked(layer, R, n).value == pytest.approx(exact, rel=1e-11)


def test_infinite_length_is_the_limit():
    layer = Constants.of_norms(2.0, 0.5)
    assert sets.refined_unmasked(layer, 1.0, 10**9).value == pytest.approx(sets.refined_unmasked(layer, 1.0).value, rel=1e-6)
    assert sets.refined_unmasked(layer, 1.0).value == pytest.approx(2 * (math.hypot(1, 0.5) * math.exp(0.5) + 0.5))
    assert sets.refined_masked(layer, 1.0, 10**7).value <= sets.refined_masked(layer, 1.0).value
    assert math.isinf(sets.castin2024_meanfield(Constants.of_norms(1.0, 1e6), 1.0).value)


def exact_column_sum(n, h):
    """Σ_{i<n} 1/(1 + iq), q = e^{−2h}, by the digamma function with more digits than q has zeros."""
    with mpmath.workdps(60 + int(2 * h)):
        q = mpmath.exp(-2 * mpmath.mpf(h))
        return (mpmath.digamma(n + 1 / q) - mpmath.digamma(1 / q)) / q


@pytest.mark.parametrize(
    "h", [0.0, 0.3, 2.0, 4.0, 5.7, 8.0, 11.5, 14.0, 17.0, 18.4, 20.0, 25.0, 30.0, 40.0, 345.0, 372.5, 700.0, 1e4]
)
def test_the_causal_column_sum_keeps_its_digits_at_every_length(h):
    """From above, and exact to a few digits of the last place, from no decay at all to q = e^{−2h} = 0 in floating point."""
    for n in (1, 2, 99_999, 100_000, 100_001, 150_000, 10**6, 3 * 10**8, 10**12):
        exact = exact_column_sum(n, h) if h <= 700 else n
        assert 0 <= sets.causal_column_sum(n, h) / exact - 1 <= 5e-12, (n, h)


@pytest.mark.parametrize("n", [10**5, 10**6, 4 * 10**6])
def test_long_causal_inputs_reach_the_square_root_of_n(n):
    """Where one key outweighs all others in every row, a column of P is all ones: σ = √n, or more with A ≠ 0."""
    range_80 = HeadConstants(value=1.0, interaction=0.0, score_range=80.0)
    column = math.sqrt(float((1 / (1 + math.exp(-80) * torch.arange(n, dtype=torch.float64))).square().sum()))
    assert column == pytest.approx(math.sqrt(n))
    assert column <= sets.refined_masked(Constants((range_80,), (range_80,)), 1.0, n).value <= column * (1 + 1e-9)
    one = torch.ones(1, 1, dtype=torch.float64)
    worst = pairs.causal_groups(-30 * one, one, -one[0], one[0], n)
    assert worst >= 0.9 * math.sqrt(n)
    assert worst <= sets.refined_masked(Constants.of_norms(1.0, 30.0), 1.0, n).value


def test_a_head_without_values_has_the_constant_zero():
    """Also where e^{2h} overflows and for every n at once: 0·∞ is 0 here."""
    silent = Constants.of_norms(0.0, 800.0)
    for bound in (sets.castin2024_meanfield, sets.refined_unmasked, sets.refined_masked):
        assert bound(silent, 1.0).value == 0.0


def uniform(V, mask=None):
    return lipscope.Attention(torch.zeros_like(V), V, V, mask=mask)


def test_uniform_averaging_has_the_norm_of_its_values():
    V = torch.tensor([[2.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    exact = float(torch.linalg.matrix_norm(V, 2))
    X = torch.randn(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = lipscope.local_lipschitz(uniform(V), X, solver=lipscope.GolubKahan(), certificate=True)
    assert result.estimate == pytest.approx(exact)
    assert result.certified == pytest.approx(exact, rel=1e-9)
    assert sets.refined_unmasked(uniform(V), 5.0, 7).value == pytest.approx(exact)


@pytest.mark.parametrize(("n", "norm"), [(2, 1.144), (10, 1.410), (100, 1.630)])
def test_causal_averaging_is_the_cesaro_matrix(n, norm):
    V = torch.ones(1, 1, dtype=torch.float64)
    X = torch.randn(n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = lipscope.local_lipschitz(uniform(V, "causal"), X, solver=lipscope.Dense(), certificate=True)
    assert result.estimate == pytest.approx(norm, abs=5e-4)
    # The block-norm certificate is exact here: blocks are numbers.
    assert result.certified == pytest.approx(result.estimate, rel=1e-5)
    assert result.estimate <= sets.refined_masked(uniform(V, "causal"), 1.0, n).value <= 2 + 1e-9


@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(-2, 2))
@settings(deadline=None)
def test_two_tokens_on_a_line(x, y, A):
    """f₁ = y + p(x − y), p = 1/(1 + e^{−Ax(x−y)}), and its mirror image: the Jacobian by hand."""

    def row(x, y):
        p = 1 / (1 + math.exp(-A * x * (x - y)))
        slope = p * (1 - p) * (x - y) * A
        return p + slope * (2 * x - y), (1 - p) - slope * x

    first, mirrored = row(x, y), row(y, x)
    J = torch.tensor([first, mirrored[::-1]], dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    result = lipscope.local_lipschitz(
        lipscope.Attention(A * one, one, one), torch.tensor([[x], [y]], dtype=torch.float64), certificate=True
    )
    sigma = float(torch.linalg.matrix_norm(J, 2))
    assert result.estimate == pytest.approx(sigma, rel=1e-9, abs=1e-12)
    assert sigma <= result.certified * (1 + 1e-9)


@given(st.integers(0, 10**6), st.integers(1, 12), st.floats(-2, 2), st.booleans(), st.booleans())
def test_softmax_jacobian_norm(seed, n, sharp, ties, sink):
    s = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10**sharp
    if ties:
        s = s.round()
    p = torch.softmax(s, 0) * (0.7 if sink else 1.0)
    exact = float(torch.linalg.eigvalsh(torch.diag(p) - torch.outer(p, p))[-1])
    ours, g1 = float(softmax_jacobian.largest_eigenvalue(p)), float(softmax_jacobian.g1(p))
    assert ours == pytest.approx(exact, rel=1e-9, abs=1e-13)
    assert ours <= g1 + 1e-12
    assert g1 <= 0.5 + 1e-12


@pytest.mark.parametrize("a", [0.001, 0.01, 0.1, 0.3, 1.0, 2.0, 4.0, 8.0, 20.0])
def test_mean_field_bounds_match_within_a_factor_two(a):
    """Symmetric A with γ_min = −‖A‖ and V = I: upper and lower mean-field constants differ by less than a factor 2."""
    A = torch.diag(torch.tensor([-a, a / 3], dtype=torch.float64))
    low = pairs.lower_meanfield(pairs.PlainHead(A, torch.eye(2, dtype=torch.float64)), 1.0).value
    high = sets.refined_unmasked(Constants.of_norms(1.0, a), 1.0).value
    assert 1 <= high / low <= 2
    # The two Diracs alone, without the one that gives ‖V‖, are within 2 as well, and no closer than 1.37.
    e = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert 1.37 <= high / pairs.PlainHead(A, torch.eye(2, dtype=torch.float64)).limit(-e, e) <= 2.0001
