"""‖J‖_F in closed form equals that of dense Jacobians which another program computes, for every mask and variant."""

from __future__ import annotations

import pytest
import torch

import cases
import lipscope
import reference
from lipscope.bounds.blocks import Blocks, frobenius


def dense(layer: lipscope.Attention, X: torch.Tensor, visible: torch.Tensor, additive: object, item: int) -> torch.Tensor:
    return reference.jacobian(lambda x: reference.attention(layer, x, visible, additive, item), X)


@pytest.mark.parametrize("mask", cases.masks())
@pytest.mark.parametrize("extras", cases.EXTRAS)
def test_frobenius_norms_equal_dense_ones(mask: str, extras: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared keys, all rows at once and in strips, query parts from n×n matrices and from covariances."""
    subject = cases.layer(extras=cases.EXTRAS[extras], kv_heads=1 + len(mask) % 2)
    given, visible, additive = cases.masks()[mask]
    b = len(extras) % cases.BATCH
    x = cases.random(cases.BATCH, cases.N_TOKENS, cases.WIDTH, seed=50)[b]
    one = subject.with_mask(given).for_input(b)
    J = dense(subject, x, visible[b], additive[b] if isinstance(additive, torch.Tensor) else additive, b)
    for short in {False, one.rotary is None}:
        monkeypatch.setattr(Blocks, "short", short)
        for height in (None, 2):
            value, error = frobenius(Blocks(one, x, height=height))
            assert value == pytest.approx(float(J.norm()), rel=1e-9)
            assert error <= 1e-5 * value


@pytest.mark.parametrize("extras", cases.EXTRAS)
def test_sizes_of_blocks_are_above_dense_ones_and_close(extras: str) -> None:
    """Also those of the diagonal, with all three parts, in strips that hold some of the columns."""
    subject = cases.layer(extras=cases.EXTRAS[extras]).with_mask("causal").for_input(0)
    x = cases.random(cases.N_TOKENS, cases.WIDTH, seed=8)
    J = torch.autograd.functional.jacobian(subject, x)
    sizes = torch.linalg.matrix_norm(J.transpose(1, 2))
    for height in (None, 2):
        for strip in Blocks(subject, x, height=height).strips():
            found = strip.part_sizes[0].clone()
            strip.own(found).copy_(strip.own_size)
            expected = sizes[strip.rows, strip.columns]
            assert bool((expected <= found * (1 + 1e-12)).all())
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("extras", ["everything", "rotary", "biases"])
@pytest.mark.parametrize("kind", [lipscope.LayerNorm, lipscope.RMSNorm])
def test_frobenius_norms_behind_a_normalisation(extras: str, kind: type) -> None:
    subject, U = cases.layer(extras=cases.EXTRAS[extras]), cases.random(cases.N_TOKENS, cases.WIDTH, seed=3)
    gains = cases.random(cases.WIDTH, seed=4)
    norm = kind(gains, cases.random(cases.WIDTH, seed=5)) if kind is lipscope.LayerNorm else kind(gains)
    J = reference.jacobian(lambda u: reference.attention(subject, norm(u), torch.ones(2, 5, 5, dtype=torch.bool)), U)
    at = norm.linearise(U[None])
    value, _ = frobenius(Blocks(subject, (at.g * at.z)[0], offset=norm.offset(U), height=2), at)
    assert value == pytest.approx(float(J.norm()), rel=1e-9)


@pytest.mark.parametrize("scope", ["attention", "head", "norm+attention"])
def test_a_result_says_how_large_and_how_flat_the_jacobian_is(scope: str) -> None:
    layer, X = cases.layer(extras="biases", n=7), cases.random(2, 7, cases.WIDTH, seed=6)
    norm = lipscope.LayerNorm(cases.random(cases.WIDTH, seed=7)) if scope == "norm+attention" else None
    J = layer.operator(X, scope, norm).to_dense()
    for solver in (lipscope.Dense(), lipscope.GolubKahan()):
        found = lipscope.local_lipschitz(layer, X, scope=scope, norm=norm, solver=solver)
        size = torch.linalg.matrix_norm(J).reshape(found.typical.shape)
        torch.testing.assert_close(found.typical, size / (7 * cases.WIDTH) ** 0.5, rtol=1e-9, atol=0)
        torch.testing.assert_close(found.stable_rank, (size / found.estimate).square(), rtol=1e-9, atol=0)
        assert {"typical", "stable_rank"} <= set(found.to_rows()[0])
    plain = lipscope.local_lipschitz(layer, X, scope=scope, norm=norm, certificate=False)
    assert plain.typical is plain.stable_rank is None
