"""Verified upper ends: never below σ, close to it, refused where σ is not below what is claimed."""

import itertools
import math

import pytest
import torch
from mpmath import mpf
from safetensors.torch import save_file
from typer.testing import CliRunner

import lipscope
from bound_cases import jacobian, problem
from lipscope.bounds import certified_radius, verified
from lipscope.bounds.verified import Cost, Gram, Triangle, verified_upper
from lipscope.cli.main import app
from rounding_cases import draw, true_sigma

DTYPES = (torch.float64, torch.float32)


@pytest.fixture(params=DTYPES, ids=("float64", "float32"))
def factorised(request, monkeypatch):
    """The dtype of the factorisation, which otherwise depends on the size of the matrix."""
    monkeypatch.setattr(verified, "WIDE", 10**9 if request.param == torch.float64 else 0)
    return request.param


def least_proved(gram, sigma, dtype):
    """The least bound that is proved for candidates below, at and just above σ: where a factorisation just succeeds."""
    steps = (-1e-2, -1e-4, -1e-6, -1e-8, 0.0, 1e-8, 1e-6, 1e-4)
    return min(gram.prove(sigma * (1 + step), dtype) for step in steps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 3, 1024])
def test_where_the_factorisation_just_succeeds_the_bound_still_holds(dtype, block, monkeypatch):
    monkeypatch.setattr(verified, "BLOCK", block)
    assert push(range(block, 8 + block), dtype) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_where_it_just_succeeds_over_thousands_of_cases(dtype):
    assert push(range(5000), dtype) >= 4500


def push(seeds, dtype):
    """Push the candidate to where the factorisation just succeeds; how many cases there were."""
    count = 0
    for seed in seeds:
        case = problem(seed, n_max=6)
        sigma = case.sigma
        if sigma > 1e-100:
            count += 1
            gram = Gram.at(case.layer.to(torch.float64), case.X.double())
            found = least_proved(gram, sigma, dtype)
            assert sigma <= found * (1 + 1e-13), case.label
            close = 1.1e-4 if dtype == torch.float64 else 1e-3
            errors = gram.jacobian_error + gram.gram_error / sigma
            assert found <= sigma * (1 + close) + 1.01 * errors, case.label
    return count


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_defect_of_any_matrix_covers_its_least_eigenvalue(dtype):
    generator = torch.Generator().manual_seed(0)
    shifts = (-1e-2, -1e-7, 0.0, 1e-7, 1e-3)
    for size, block, rank, shift in itertools.product((1, 7, 40), (1, 4, 16, 64), (1, 3, 40), shifts):
        R = torch.randn(size, min(rank, size), generator=generator, dtype=torch.float64)
        G = R @ R.mT / torch.linalg.matrix_norm(R, 2) ** 2
        c = float(torch.tensor(1.0 + shift, dtype=dtype))
        triangle = Triangle(size, block, c, dtype, G.device)
        for i in range(size):
            triangle.subtract(i, (G[i : i + 1] / 2).to(dtype))
        stored = torch.zeros(size, size, dtype=torch.float64)
        for k, row in enumerate(triangle.rows):
            stored[k * block : k * block + len(row), : row.shape[1]] = row.double()
        stored = stored.tril() + stored.tril(-1).mT
        eta = triangle.defect(float(G.norm()) / 2)
        assert -float(torch.linalg.eigvalsh(stored)[0]) <= eta + 1e-14
        assert math.isinf(eta) == (shift < -1e-6) or abs(shift) <= 1e-6


def test_the_gram_matrix_is_that_of_the_jacobian():
    for seed in range(40):
        case = problem(seed, n_max=6)
        gram = Gram.at(case.layer.to(torch.float64), case.X.double())
        T = torch.cat([gram.strip(i) for i in range(len(case.X))])
        J = jacobian(case.layer, case.X).reshape(len(T), -1)
        error = float((T + T.mT - J @ J.mT).norm())
        assert error <= 1e-12 * float(J.square().sum()) + 1e-300, case.label


def test_it_holds_in_a_hundred_digits_where_digits_are_lost(factorised):
    """Offsets that cancel, scores in the hundreds, norms of 1e±20, sinks, n = 1, d = 1; single heads too."""
    finite = 0
    for seed in range(24):
        case = draw(seed, torch.float64 if seed % 2 else torch.float32)
        if case.norm is None:
            for h in (None, *range(case.layer.heads if case.layer.heads > 1 else 0)):
                found = verified_upper(case.layer, case.X[None], "attention" if h is None else "head").flatten()[h or 0]
                assert true_sigma(case.layer, case.X, head=h) <= mpf(float(found)), case.about
                finite += math.isfinite(found)
    assert finite >= 25


def nearly_one_hot(scale):
    """Scores in the hundreds: rows that attend to one token but for e^−scale."""
    X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    W = torch.eye(3, dtype=torch.float64)
    return lipscope.Attention(scale * W, W, W, out=W), X


@pytest.mark.parametrize(
    "make",
    [
        lambda: nearly_one_hot(30.0),
        lambda: nearly_one_hot(300.0),
        lambda: (nearly_one_hot(3.0)[0], torch.ones(5, 3, dtype=torch.float64)),
        lambda: (nearly_one_hot(3.0)[0], torch.cat([torch.ones(4, 3), 1 + 1e-9 * torch.ones(3, 3)]).double()),
        lambda: (nearly_one_hot(1e-40)[0], 1e20 * nearly_one_hot(1.0)[1]),
        lambda: (nearly_one_hot(1e40)[0], 1e-20 * nearly_one_hot(1.0)[1]),
    ],
)
def test_it_is_close_on_inputs_built_to_be_hard(make, factorised):
    layer, X = make()
    sigma, found = true_sigma(layer, X), float(verified_upper(layer, X[None])[0])
    assert sigma <= mpf(found) <= sigma * 1.003


def test_a_number_below_sigma_is_refused_and_a_poor_estimate_only_costs_time(factorised):
    case = problem(11, n_max=6)
    gram = Gram.at(case.layer.to(torch.float64), case.X.double())
    for below in (1e-3, 0.1, 0.5, 0.9, 0.9999):
        assert gram.prove(below * case.sigma, factorised) == math.inf
    for estimate in (0.0, 1e-3, 0.9, 1.0, 5.0):
        found = verified_upper(case.layer, case.X[None], estimate=torch.tensor([estimate * case.sigma]))
        assert case.sigma <= float(found[0]) <= 10 * case.sigma


def test_inputs_and_heads_have_bounds_of_their_own():
    G = torch.Generator().manual_seed(0)
    W = [torch.randn(8, 6, generator=G), torch.randn(4, 6, generator=G), torch.randn(4, 6, generator=G)]
    layer = lipscope.Attention(*W, out=torch.randn(6, 8, generator=G), heads=4, kv_heads=2, mask="causal")
    X, done = torch.randn(3, 5, 6, generator=G), []
    for scope, shape in (("attention", (3,)), ("head", (3, 4))):
        measured = lipscope.local_lipschitz(layer, X, scope=scope, dtype=torch.float64)
        found = verified_upper(layer, X, scope, progress=done.append)
        assert found.shape == shape
        assert bool((found / measured.estimate - 1.002).abs().max() < 1e-6)
        assert done == sorted(done)
        assert done[-1] == pytest.approx(1.0)
        done.clear()


def test_a_result_says_that_its_upper_end_is_verified():
    G = torch.Generator().manual_seed(0)
    layer = lipscope.Attention(*(torch.randn(24, 24, generator=G) / 5 for _ in range(4)), heads=3, mask="causal")
    X, done = torch.randn(2, 9, 24, generator=G), []
    for scope in ("attention", "head"):
        result = lipscope.local_lipschitz(
            layer, X, scope=scope, solver=lipscope.GolubKahan(), certificate="verified", progress=done.append
        )
        assert {row["upper_kind"] for row in result.to_rows()} == {"verified"}
        assert bool((result.certified <= 1.003 * result.lower).all())
        assert torch.equal(result.upper, result.certified)
        assert done[-1] == pytest.approx(1.0)
    assert "upper end verified" in str(result)
    row = (
        lipscope.load("gpt2-mini")
        .record(text="Down the rabbit hole")
        .rows(scope="head", heads=[3], certificate="verified")[0]
    )
    assert row["upper_kind"] == "verified"
    assert row["upper"] <= 1.003 * row["lower"]
    exact = lipscope.local_lipschitz(layer, X[0, :3], certificate="verified")
    assert exact.status == "exact"
    assert exact.upper_kind == "verified"
    norm = lipscope.LayerNorm(torch.ones(24))
    with pytest.raises(ValueError, match=r"no verified bound for scope 'norm\+attention'"):
        lipscope.local_lipschitz(layer, X, scope="norm+attention", norm=norm, certificate="verified")


def test_the_command_says_what_it_takes_before_it_begins(tmp_path):
    G = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(8, 8, generator=G) / 3 for name in "qkv"}, tmp_path / "weights.safetensors")
    save_file({"X": torch.randn(20, 8, generator=G)}, tmp_path / "tokens.safetensors")
    command = ["measure", str(tmp_path / "weights.safetensors"), "--tokens", str(tmp_path / "tokens.safetensors")]
    done = CliRunner().invoke(app, [*command, "--certificate", "verified"])
    assert done.exit_code == 0
    assert "n = 20: to verify one σ takes a matrix of 160² in float64, about" in done.stderr
    assert "upper is verified, its rounding included" in done.stdout
    refused = CliRunner().invoke(app, [*command, "--certificate", "verified", "--memory", "1MiB"])
    assert refused.exit_code == 2
    assert "verifying σ takes a matrix of 160² in float64" in refused.stderr


def test_what_does_not_fit_is_refused_in_one_line():
    W = torch.eye(768)
    layer = lipscope.Attention(W, W, W, out=W, heads=12)
    assert Cost.of(layer, 16).dtype == torch.float64
    assert Cost.of(layer, 32).dtype == torch.float32
    assert Cost.of(layer, 32).bytes < 4 << 30
    said = r"a matrix of 98304² in float32, about .* and .*, but memory is limited to 8 GiB: take fewer tokens$"
    with pytest.raises(MemoryError, match=said) as error:
        verified_upper(layer, torch.zeros(1, 128, 768))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="no verified bound for scope 'block'"):
        verified_upper(layer, torch.zeros(1, 2, 768), "block")


def test_a_ball_with_a_verified_centre_is_sound_and_shrinks_to_it():
    G = torch.Generator().manual_seed(0)
    layer = lipscope.Attention(*(torch.randn(12, 12, generator=G).double() / 3 for _ in range(4)), heads=3, mask="causal")
    X = torch.randn(7, 12, generator=G).double()
    sigma = lipscope.local_lipschitz(layer, X).estimate
    for radius in (0.0, 1e-4, 1e-2, 0.3):
        before, after = (lipscope.certify(layer, X, radius=radius, verified=v).value for v in (False, True))
        E = torch.randn(20, 7, 12, generator=G).double()
        near = X + radius * E / E.norm(dim=(1, 2), keepdim=True)
        assert float(lipscope.local_lipschitz(layer, near, certificate=False).estimate.max()) <= after * (1 + 1e-12)
        assert after <= before
    assert (
        lipscope.certify(layer, X, radius=0.0, verified=True).value
        <= 1.0021 * sigma
        < lipscope.certify(layer, X, radius=0.0).value
    )
    one, other = (certified_radius(layer, X, moves=1e-3, verified=v) for v in (False, True))
    assert one < other


def test_products_in_fewer_digits_than_float32_are_never_used(monkeypatch):
    W = torch.eye(768)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    assert Cost.of(lipscope.Attention(W, W, W), 32).dtype == torch.float64
