"""Certificates at one input, on a ball, and inside a result."""

import itertools
import math
import resource

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lipscope
from bound_cases import problem
from lipscope.bounds import certificates, certified_radius
from lipscope.bounds.ball import certify
from lipscope.bounds.certificates import certified_upper, local_bounds
from lipscope.bounds.spectral_upper import matrix_norm_upper, nonnegative_norms, sum_norms, top_eigenvalue

EXACT = 1 + 1e-9


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6))
def test_certificates_hold_for_the_layer_and_for_every_head(seed):
    case = problem(seed, n_max=16)
    for rung in ("fast", "tight"):
        assert case.sigma <= float(certified_upper(case.layer, case.X[None], rung=rung)[0]) * EXACT, case.label
    heads = lipscope.local_lipschitz(case.layer, case.X, scope="head", solver=lipscope.Dense()).estimate
    assert bool((heads <= certified_upper(case.layer, case.X[None], "head")[0] * EXACT).all()), case.label


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 30), st.sampled_from((0.0, 0.5, 0.95)))
def test_collatz_wielandt_is_above_and_close(seed, m, n, sparse):
    G = torch.Generator().manual_seed(seed)
    N = torch.rand(m, n, generator=G, dtype=torch.float64)
    N = N * (torch.rand(m, n, generator=G) >= sparse)
    exact, bound = float(torch.linalg.matrix_norm(N, 2)), float(nonnegative_norms(N[None])[0])
    assert exact <= bound * EXACT
    if sparse == 0.0:
        assert bound <= 1.001 * exact


def test_collatz_wielandt_survives_blocks_of_very_different_size():
    N = torch.block_diag(torch.ones(3, 3), 1e-200 * torch.ones(2, 2), torch.zeros(2, 2)).double()
    assert float(nonnegative_norms(N[None])[0]) == pytest.approx(3.0)
    assert float(nonnegative_norms(torch.zeros(1, 3, 3, dtype=torch.float64))[0]) == 0.0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 12), st.floats(-100, 100))
def test_schatten_bound_is_above_and_close(seed, m, n, size):
    M = torch.randn(4, m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 10**size
    exact, bound = torch.linalg.matrix_norm(M, 2), matrix_norm_upper(M)
    assert bool((exact <= bound * EXACT).all())
    assert bool((bound <= exact * min(m, n) ** (1 / 64) * EXACT).all())
    S = M[:, :, :m] @ M[:, :, :m].mT
    exact, bound = torch.linalg.matrix_norm(S, 2), matrix_norm_upper(S, symmetric=True)
    assert bool((exact <= bound * EXACT).all())


@pytest.mark.parametrize("m", [1, 40, 97, 200])
@pytest.mark.parametrize("unit", [1e-150, 1.0, 1e150])
@pytest.mark.parametrize("spectrum", ["flat", "cluster", "steep", "zero", "hidden"])
def test_the_largest_eigenvalue_is_bounded_closely_from_above(m, unit, spectrum):
    """Also where Lanczos steps see little of it: values that lie close together, and one in a block of its own."""
    G = torch.Generator().manual_seed(m)
    Q = torch.linalg.qr(torch.randn(m, m, generator=G, dtype=torch.float64)).Q
    i = torch.arange(m, dtype=torch.float64)
    values = {"flat": 1 + 0 * i, "cluster": 1 - 1e-4 * i / m, "steep": 0.5**i, "zero": 0 * i, "hidden": 1 - i / m}[spectrum]
    S = torch.diag(values) if spectrum == "hidden" else (Q * values) @ Q.mT
    found = top_eigenvalue((S + S.mT) / 2 * unit) / unit
    assert float(values.max()) * (1 - 1e-12) <= found <= float(values.max()) * (1 + 2e-6) + 1e-12


def bert_like(heads=4, d=32, n=24, dtype=torch.float32, mask=None):
    G = torch.Generator().manual_seed(0)
    W = [torch.randn(d, d, generator=G) / math.sqrt(d) for _ in range(4)]
    layer = lipscope.Attention(*W, heads=heads, mask=mask).to(dtype)
    return layer, torch.randn(3, n, d, generator=G, dtype=dtype)


def test_a_result_reports_the_least_upper_end_with_its_kind():
    layer, X = bert_like(heads=1)
    X = X * torch.tensor([1e-3, 1.0, 3.0])[:, None, None]
    result = lipscope.local_lipschitz(layer, X, certificate=True)
    plain = lipscope.local_lipschitz(layer, X, certificate=False)
    assert plain.certified is None
    assert plain.upper_kind == ("probabilistic",) * 3
    certified = certified_upper(layer, X)
    assert torch.equal(result.certified, certified)
    assert bool((result.upper <= torch.minimum(plain.upper, certified) * (1 + 1e-5)).all())
    assert bool((result.lower <= result.upper).all())
    assert bool((result.estimate <= result.upper).all())
    for item, (row, kind) in enumerate(zip(result.to_rows(), result.upper_kind, strict=True)):
        assert row["upper_kind"] == kind == ("certified" if certified[item] < plain.upper[item] else "probabilistic")
        assert (row["delta"] is None) == (kind == "certified")
        assert row["certified"] == pytest.approx(float(certified[item]))
    assert "certified" in result.upper_kind
    assert "certified" in str(result)


def test_kinds_follow_the_shape_of_the_batch():
    layer, X = bert_like()
    heads = lipscope.local_lipschitz(layer, X, scope="head", certificate=True)
    assert heads.certified.shape == (3, 4)
    assert [len(kinds) for kinds in heads.upper_kind] == [4, 4, 4]
    one = lipscope.local_lipschitz(layer, X[0], certificate=True)
    assert isinstance(one.upper_kind, str)
    assert isinstance(one.certified, float)
    exact = lipscope.local_lipschitz(layer, X[0], solver=lipscope.Dense())
    assert (exact.upper_kind, exact.certified) == ("exact", None)


def test_certificates_do_not_depend_on_the_batch_or_on_unused_masks():
    layer, X = bert_like(dtype=torch.float64, mask="causal")
    together = certified_upper(layer, X)
    alone = torch.cat([certified_upper(layer, x[None]) for x in X])
    assert torch.allclose(together, alone, rtol=1e-12)
    pads = certified_upper(layer.with_mask("causal&pad-right:0,3,5"), X)
    shorter = certified_upper(layer, X[1:2, :-3])
    assert float(pads[1]) == pytest.approx(float(shorter[0]), rel=1e-6)


def test_a_certificate_needs_a_layer_and_a_known_scope():
    with pytest.raises(ValueError, match="needs an Attention layer"):
        lipscope.local_lipschitz(torch.tanh, torch.ones(3, 3), certificate=True)
    layer, X = bert_like()
    with pytest.raises(ValueError, match="attention, head"):
        certified_upper(layer, X, "block")


def test_scores_beyond_float64_give_no_certificate():
    one = torch.ones(1, 1, dtype=torch.float64)
    layer = lipscope.Attention(one, one, one)
    assert math.isinf(float(certified_upper(layer, 1e8 * torch.tensor([[[1.0], [2.0]]], dtype=torch.float64))[0]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from((0.0, 1e-3, 0.05, 0.5, 3.0)), st.integers(0, 10**6))
def test_ball_certificates_hold_everywhere_in_the_ball(seed, radius, direction):
    case = problem(seed, n_max=8)
    L = certify(case.layer, case.X, radius=radius).value
    G = torch.Generator().manual_seed(direction)
    for share in (0.3, 1.0, 1.0):
        E = torch.randn(case.X.shape, generator=G, dtype=torch.float64)
        if share == 1.0:
            E[torch.randint(len(E), (), generator=G)] *= 10
        X = case.X + share * radius * E / E.norm()
        sigma = lipscope.local_lipschitz(case.layer, X, solver=lipscope.Dense()).estimate
        assert sigma <= L * EXACT, case.label


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_ball_certificates_grow_with_the_radius(seed):
    case = problem(seed, n_max=8)
    values = [certify(case.layer, case.X, radius=r).value for r in (0.0, 1e-4, 1e-2, 0.1, 0.3, 1.0, 10.0, 1e3)]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(values))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(("full", "causal")), st.sampled_from((0.0, 1e-3, 0.3)))
def test_certificates_of_rotary_layers(seed, mask, radius):
    """For the layer, for every head, and everywhere in a ball, also along the direction in which the output moves most."""
    case = problem(seed, n_max=8, mask=mask, always=frozenset({"rotary"}))
    for rung in ("fast", "tight"):
        assert case.sigma <= float(certified_upper(case.layer, case.X[None], rung=rung)[0]) * EXACT, case.label
    heads = lipscope.local_lipschitz(case.layer, case.X, scope="head", solver=lipscope.Dense()).estimate
    assert bool((heads <= certified_upper(case.layer, case.X[None], "head")[0] * EXACT).all()), case.label
    L = certify(case.layer, case.X, radius=radius).value
    G = torch.Generator().manual_seed(seed)
    J = torch.autograd.functional.jacobian(case.layer, case.X).reshape(-1, case.X.numel())
    steepest = torch.linalg.svd(J).Vh[0].reshape(case.X.shape)
    for E in (steepest, -steepest, torch.randn(case.X.shape, generator=G, dtype=torch.float64)):
        sigma = lipscope.local_lipschitz(case.layer, case.X + radius * E / E.norm(), solver=lipscope.Dense()).estimate
        assert sigma <= L * EXACT, case.label


def test_certificates_of_several_sharp_heads_are_close(monkeypatch):
    """Heads enter by how much their ranges overlap, and by their few large directions."""
    monkeypatch.setattr(certificates, "CHEAP", 0)
    layer, X = bert_like(heads=8, d=64, n=24, dtype=torch.float64)
    for sharpness, fast, tight in ((0.3, 1.4, 1.2), (1.0, 4.5, 2.3), (2.0, 3.5, 2.0)):
        solver = lipscope.GolubKahan(rtol=1e-8)
        sigma = lipscope.local_lipschitz(layer, sharpness * X[0], solver=solver, certificate=False).estimate
        for rung, limit in (("fast", fast), ("tight", tight)):
            assert sigma <= float(certified_upper(layer, sharpness * X[:1], rung=rung)[0]) <= limit * sigma
    assert {bound.name for bound in local_bounds(layer, X[0])} == {"certificates.parts", "certificates.row_gram"}


@pytest.mark.parametrize(("mask", "heads", "limits"), [(None, 1.86, (1.92, 3.32)), ("causal", 1.67, (2.75, 4.28))])
def test_certificates_of_random_layers_of_the_size_of_gpt2_are_close(mask, heads, limits):
    """Frobenius norms of blocks alone give 5 to 12 times σ here, and rounding counted by them 7 % more of single heads."""
    for size, limit in zip((0.02, 0.03), limits, strict=True):
        G = torch.Generator().manual_seed(0)
        W = [size * torch.randn(768, 768, generator=G) for _ in range(4)]
        layer = lipscope.Attention(*W, heads=12, mask=mask)
        X = torch.randn(1, 98, 768, generator=torch.Generator().manual_seed(1))
        sigma = float(lipscope.local_lipschitz(layer, X, certificate=False).estimate)
        assert sigma <= float(certified_upper(layer, X)) <= limit * sigma
    one = layer.head(0)
    sigma = float(lipscope.local_lipschitz(one, X, certificate=False).estimate)
    assert sigma <= float(certified_upper(one, X)) <= heads * sigma


@pytest.mark.parametrize(("width", "limit"), [(96, 1.5), (208, 1.65)])
@pytest.mark.parametrize("out", [1.0, 0.5, 2.0])
def test_row_grams_of_wide_layers_are_above_and_close(width, limit, out):
    """Several panels of the triangle of W_O, which may be wide or tall, and norms by squares or by a factorisation."""
    G = torch.Generator().manual_seed(width)
    q, k, v = (torch.randn(width, width, generator=G, dtype=torch.float64) / math.sqrt(width) for _ in range(3))
    W_O = torch.randn(int(out * width), width, generator=G, dtype=torch.float64) / math.sqrt(width)
    layer, X = (
        lipscope.Attention(q, k, v, W_O, heads=4, mask="causal"),
        torch.randn(1, 4, width, generator=G, dtype=torch.float64),
    )
    sigma = float(lipscope.local_lipschitz(layer, X, solver=lipscope.Dense()).estimate)
    tight = float(certified_upper(layer, X, rung="tight"))
    assert sigma <= tight <= limit * sigma
    assert tight <= float(certified_upper(layer, X))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 9), st.sampled_from((-60, 0, 60)))
def test_sums_over_heads_are_bounded_by_their_factors(seed, heads, width, size):
    """Valid for any factors, also for matrices of full rank and of extreme size."""
    G = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=G, dtype=torch.float64)

    n, d, rank = 3, 5, min(width, 1 + seed % 3)
    left, right = normal(heads, d, width), normal(heads, d, width)
    C = normal(heads, n, width, rank) @ normal(heads, n, rank, width) * 10.0**size
    C = C + 1e-3 * 10.0**size * normal(heads, n, width, width) * (seed % 2)
    norms = [float(torch.linalg.matrix_norm(W.transpose(0, 1).flatten(1), 2)) * EXACT for W in (left, right)]
    for other, middle, norm in ((right, C, norms[0] * norms[1]), (left, C @ C.mT, norms[0] ** 2)):
        truth = torch.linalg.matrix_norm(torch.einsum("hdm,hnmk,hek->nde", left, middle, other), 2)
        found = sum_norms(left, middle, other, norm)
        assert bool((truth <= found * EXACT).all())
        assert bool((found <= 3 * norm * torch.linalg.matrix_norm(middle, 2).amax(0)).all())


def test_rungs_reach_a_result(monkeypatch):
    """Row Grams of small layers are part of every certificate, unless they are taken for dear."""
    monkeypatch.setattr(certificates, "CHEAP", 0)
    layer, X = bert_like()
    fast, tight = (lipscope.local_lipschitz(layer, X[0], certificate=rung).certified for rung in ("fast", "tight"))
    assert fast == lipscope.local_lipschitz(layer, X[0], certificate=True).certified
    assert tight < fast
    with pytest.raises(ValueError, match="certificate must be true, false or one of fast, tight, verified"):
        lipscope.measure.sigma.local_lipschitz(layer, X[0], certificate="exact")


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_ball_certificates_tend_to_the_local_one(seed):
    case = problem(seed, n_max=8, always=frozenset({"rotary"}) if seed % 2 else frozenset())
    if case.layer.softcap is not None:
        return
    local = float(certified_upper(case.layer, case.X[None])[0])
    tiny = 1e-9 * case.radius / max(1.0, *(abs(t).max().item() for t in (case.layer.q, case.layer.k))) ** 2
    assert certify(case.layer, case.X, radius=tiny).value <= local * (1 + 1e-3) + 1e-9, case.label


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from((1e-3, 0.1, 1.0)), st.integers(0, 10**6))
def test_within_the_certified_radius_the_output_moves_less(seed, moves, direction):
    case = problem(seed, n_max=8)
    radius = certified_radius(case.layer, case.X, moves=moves)
    assert radius > 0
    if math.isfinite(radius):
        assert radius * certify(case.layer, case.X, radius=radius).value <= moves * EXACT
        E = torch.randn(case.X.shape, generator=torch.Generator().manual_seed(direction), dtype=torch.float64)
        distance = float((case.layer(case.X + radius * E / E.norm()) - case.layer(case.X)).norm())
        assert distance <= moves * EXACT


def test_ball_certificates_refuse_bad_arguments():
    layer, X = bert_like()
    with pytest.raises(ValueError, match="negative"):
        certify(layer, X[0], radius=-1.0)
    with pytest.raises(ValueError, match="shape"):
        certify(layer, X, radius=1.0)
    with pytest.raises(ValueError, match="positive"):
        certified_radius(layer, X[0], moves=0.0)


@pytest.mark.slow
def test_two_thousand_tokens_in_two_gibibytes():
    G = torch.Generator().manual_seed(0)
    W = [torch.randn(768, 768, generator=G) * 0.02 for _ in range(4)]
    layer = lipscope.Attention(*W, heads=12, mask="causal")
    X = torch.randn(1, 2048, 768, generator=G)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert math.isfinite(float(certified_upper(layer, X)[0]))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 * 1024**2


@pytest.mark.parametrize(("n", "height"), [(2, 1), (8, 1), (8, 4), (64, 8)])
def test_strips_that_hold_different_columns_keep_the_bound(n: int, height: int) -> None:
    # Everybody attends to the first token: columns that a strip does not hold count in full.
    x = torch.eye(2, dtype=torch.float64)[[0] + [1] * (n - 1)]
    bias, k, v = (torch.tensor(t, dtype=torch.float64) for t in ([50.0], [[1.0, 0.0]], [[0.6, 0.8]]))
    layer = lipscope.Attention(torch.zeros(1, 2, dtype=torch.float64), k, v, q_bias=bias, scale=1.0, mask="causal")
    sigma = float(torch.linalg.matrix_norm(layer.operator(x[None], "attention").to_dense()[0], 2))
    assert float(certified_upper(layer, x[None], height=height)) >= sigma * (1 - 1e-12)


@pytest.mark.parametrize("sink", [150.0, 200.0, 300.0])
def test_single_precision_keeps_the_norms_of_tiny_rows(sink: float) -> None:
    one = torch.eye(72, dtype=torch.float64)
    layer = lipscope.Attention(0 * one, one, one, sinks=torch.tensor([sink], dtype=torch.float64))
    x = torch.randn(1, 2, 72, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float(certified_upper(layer, x)) >= 2 * math.exp(-sink) * (1 - 1e-9)  # P is constant
