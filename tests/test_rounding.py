"""Ends of intervals and certificates hold where offsets cancel and scales are extreme: against σ in a hundred digits."""

import math
from dataclasses import replace

import pytest
import torch
from mpmath import mpf

import lipscope
import rounding_cases
from lipscope.attention.norms import LayerNorm
from lipscope.attention.tiled import Tiling, using_tiling
from lipscope.spectral.solvers import Auto, Dense, GolubKahan

TILES = Tiling(tile=(2, 2), dense=-1, keep=0)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def small(dtype=torch.float64, seed=0, **options):
    """Two heads of width 2 on tokens of width 3."""
    q, k, v, out = (normal(4, 3, seed=seed + s) for s in range(4))
    tensors = {name: t.to(dtype) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    return lipscope.Attention(*(t.to(dtype) for t in (q, k, v)), out=out.mT.to(dtype), heads=2, **tensors)


def measured(case, solver=None, **options):
    return lipscope.local_lipschitz(case.layer, case.X, scope=case.scope, norm=case.norm, solver=solver, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_intervals_hold_whatever_cancels(dtype):
    """Random masks, biases, sinks, soft-caps, rotations, norms, offsets and scales; dense, iterative and in tiles."""
    refused = 0
    for seed in range(30):
        case = rounding_cases.draw(seed, dtype)
        truth = rounding_cases.true_sigma(case.layer, case.X, case.norm)
        try:
            found = [measured(case, solver, certificate=False) for solver in (Auto(), GolubKahan())]
            with using_tiling(TILES):
                found.append(measured(case, Dense(), certificate=False))
        except FloatingPointError:
            refused += 1
            continue
        for one in found:
            assert mpf(one.lower) <= truth <= mpf(one.upper), (case.about, one.solver)
    assert refused <= 3


@pytest.mark.parametrize(
    ("offset", "dtype"), [(1e8, torch.float64), (1e16, torch.float64), (1e3, torch.float32), (1e6, torch.float32)], ids=str
)
def test_what_all_values_and_all_keys_share_is_left_out(offset, dtype):
    """Without sinks J does not depend on b_V, without soft-cap and rotations on b_K: not one digit of σ does."""
    X = normal(5, 3, seed=9, dtype=dtype)
    plain = small(dtype)
    shifted = replace(plain, v_bias=(offset * normal(4, seed=5)).to(dtype), k_bias=(offset * normal(4, seed=6)).to(dtype))
    assert lipscope.local_lipschitz(shifted, X).estimate == lipscope.local_lipschitz(plain, X).estimate
    assert torch.equal(lipscope.influence(shifted, X), lipscope.influence(plain, X))


def test_an_offset_of_all_tokens_costs_no_digits_of_values():
    """x_j = c + small: with W_Q = 0 attention averages and σ = ‖W_V‖/√n·…, and value differences are those of the tokens."""
    q, k, v = normal(3, 2, 2, seed=3)
    X = torch.tensor([[1.0, 2.0], [1.5, 2.5], [1.25, 3.0]], dtype=torch.float64) + 2.0**40
    layer = lipscope.Attention(q * 2.0**-40, k, v)
    found = lipscope.local_lipschitz(layer, X)
    truth = rounding_cases.true_sigma(layer, X)
    assert mpf(found.lower) <= truth <= mpf(found.upper)
    assert found.upper / found.lower < 1 + 1e-12


def test_a_saturated_sink_leaves_its_share_of_the_value_bias():
    """With a sink v_j − o_i = (v_j − v_m) − … + π b: π = 1 − ΣP has no digits as a difference when it is small."""
    layer = small(sinks=torch.tensor([-40.0, -38.0]), v_bias=normal(4, seed=5))
    layer = replace(layer, v=1e-20 * layer.v)
    X = normal(4, 3, seed=8)
    for tiling in (None, TILES):
        with using_tiling(tiling or Tiling()):
            found = lipscope.local_lipschitz(layer, X)
        truth = rounding_cases.true_sigma(layer, X)
        assert mpf(found.lower) <= truth <= mpf(found.upper)
        assert found.upper / found.lower < 1 + 1e-12


@pytest.mark.parametrize("offset", [1e3, 1e5])
def test_layer_norm_of_tokens_far_from_zero(offset):
    """The mean of entries around 1,000 is off by 1e-4 of their spread in float32; taken away twice it leaves all digits."""
    for seed in range(5):
        layer, norm = (
            small(torch.float32, seed),
            LayerNorm(normal(3, seed=seed + 7).float(), 100 * normal(3, seed=seed).float()),
        )
        X = (normal(4, 3, seed=seed) + offset).float()
        found = lipscope.local_lipschitz(layer, X, scope="norm+attention", norm=norm, certificate=False)
        truth = rounding_cases.true_sigma(layer, X, norm)
        assert mpf(found.lower) <= truth <= mpf(found.upper)
        assert abs(found.estimate / float(truth) - 1) < 1e-4


def test_a_norm_that_takes_everything_out_leaves_an_interval_from_zero():
    """Tokens of width 2 behind LayerNorm hardly move their output: J is rounding error, and the interval says so."""
    layer = lipscope.Attention(*normal(3, 2, 2, seed=1))
    norm, X = LayerNorm(torch.ones(2, dtype=torch.float64), eps=0.0), normal(4, 2, seed=2)
    found = lipscope.local_lipschitz(layer, X, scope="norm+attention", norm=norm)
    assert found.lower == 0 <= rounding_cases.true_sigma(layer, X, norm) <= found.upper < 1e-12


def test_norms_survive_any_scale_of_tokens():
    for dtype, scale in ((torch.float32, 1e-25), (torch.float32, 1e30), (torch.float64, 1e-170), (torch.float64, 1e200)):
        X, norm = (scale * normal(3, 4, seed=2)).to(dtype), LayerNorm(torch.ones(4, dtype=dtype), eps=0.0)
        expected = LayerNorm(torch.ones(4, dtype=torch.float64), eps=0.0)(normal(3, 4, seed=2))
        assert torch.allclose(norm(X).double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-12)
        assert math.isfinite(float(norm.linearise(X).s.sum()))
