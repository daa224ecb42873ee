"""Attention variants: their maps against formulas written out, their Jacobians against autograd, their refusals."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import cases
import lipscope
import reference
from lipscope.attention.operators import AttentionOperator
from lipscope.attention.sinkhorn import potential
from lipscope.attention.variants import (
    VARIANTS,
    CosineAttention,
    L2Attention,
    SigmoidAttention,
    SinkhornAttention,
    family,
    variant,
)
from lipscope.measure.gradient import sigma_gradient

OWN = VARIANTS[3:]


def layers(mask="full", **options):
    plain = cases.layer(heads=2, sharp=2.0, **options).with_mask(mask)
    return {name: layer for name, layer in family(plain).items() if name in OWN}


def written_out(layer, X):
    """One input (n, d), pair by pair, from the definitions in the papers."""
    n, outputs = X.shape[0], []
    dk = layer.q.shape[0] // layer.heads
    seen = layer.visible(n)
    seen = torch.ones(n, n, dtype=torch.bool) if seen is None else seen[0, 0]

    def unit(z, eps):
        return z / (z.square().sum() + eps).sqrt()

    for h in range(layer.heads):
        WQ, WV = layer.q.chunk(layer.heads)[h], layer.v.chunk(layer.heads)[h]
        WK = getattr(layer, "k", layer.q).chunk(layer.heads)[h]
        q, k, v = [WQ @ x for x in X], [WK @ x for x in X], [WV @ x for x in X]
        if layer.kind == "l2":
            scores = [[-(q[i] - q[j]).square().sum() / math.sqrt(dk) for j in range(n)] for i in range(n)]
            v = [WV @ (WQ.T @ WQ / math.sqrt(dk)) @ x for x in X]
        elif layer.kind in ("cosine", "qk-norm"):
            tau = layer.tau if layer.kind == "cosine" else math.sqrt(dk)
            scores = [[tau * unit(q[i], layer.eps) @ unit(k[j], layer.eps) for j in range(n)] for i in range(n)]
            v = [layer.nu * unit(z, layer.eps) for z in v] if layer.kind == "cosine" else v
        else:
            scores = [[q[i] @ k[j] / math.sqrt(dk) for j in range(n)] for i in range(n)]
        S = torch.stack([torch.stack(row) for row in scores]).masked_fill(~seen, -math.inf)
        if layer.kind == "sigmoid":
            P = 1 / (1 + n * torch.exp(-S))
        elif layer.kind == "sinkhorn":
            P = S.exp()
            for _ in range(3000):
                P = P / P.sum(0, keepdim=True)
                P = P / P.sum(1, keepdim=True)
        else:
            P = torch.softmax(S, dim=1)
        outputs.append(P @ torch.stack(v))
    joined = torch.cat(outputs, dim=1)
    return joined if layer.out is None else joined @ layer.out.T


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("name", OWN)
def test_the_map_is_the_one_of_the_paper(name, mask):
    X = 0.7 * cases.random(5, 6, seed=2)
    if name == "sinkhorn" and mask == "causal":
        assert "sinkhorn" not in layers(mask)
        return
    layer = layers(mask)[name]
    torch.testing.assert_close(layer(X), written_out(layer, X), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(layer(torch.stack([X, 2 * X]))[1], layer(2 * X))


@pytest.mark.parametrize("extras", ["", "no-out"])
@pytest.mark.parametrize("mask", ["full", "causal", "window:2:both"])
@pytest.mark.parametrize("name", OWN)
def test_jacobians(name, mask, extras):
    """J·u, Jᵀ·g and selection against the dense Jacobian of the plain-torch map."""
    if name not in layers(mask, extras=extras):
        return
    layer, X = layers(mask, extras=extras)[name], cases.random(3, 5, 6, seed=2)
    operator = AttentionOperator.at(layer, X)
    dense = torch.stack([reference.jacobian(layer, x) for x in X])
    size = float(dense.abs().max())
    u, g = cases.random(3, operator.shape[1], seed=3), cases.random(3, operator.shape[0], seed=4)
    torch.testing.assert_close(operator.matvec(u), torch.einsum("bmn,bn->bm", dense, u), rtol=1e-9, atol=1e-10 * size)
    torch.testing.assert_close(operator.rmatvec(g), torch.einsum("bmn,bm->bn", dense, g), rtol=1e-9, atol=1e-10 * size)
    torch.testing.assert_close(operator.to_dense(), dense, rtol=1e-9, atol=1e-10 * size)
    items = torch.tensor([2, 0, 0])
    torch.testing.assert_close(operator.select(items).matvec(u[items]), operator.matvec(u)[items], rtol=1e-12, atol=1e-12)
    measured = lipscope.local_lipschitz(layer, X)
    assert measured.scope == "attention"
    torch.testing.assert_close(measured.estimate, torch.linalg.matrix_norm(dense, 2), rtol=1e-6, atol=0)
    in_single = lipscope.local_lipschitz(layer, X.float(), dtype=torch.float32)
    assert (in_single.lower <= torch.linalg.matrix_norm(dense, 2) * (1 + 1e-6)).all()
    torch.testing.assert_close(in_single.estimate, measured.estimate.to(in_single.estimate), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", OWN)
def test_gradient_of_sigma(name):
    layer, X = layers()[name], cases.random(2, 4, 6, seed=5)
    operator = AttentionOperator.at(layer, X)
    U, _, Vh = torch.linalg.svd(operator.to_dense(), full_matrices=False)
    gradient = sigma_gradient(operator, U[..., 0], Vh[:, 0])
    direction = cases.random(2, 4, 6, seed=6)
    step = 1e-5
    values = [torch.linalg.matrix_norm(AttentionOperator.at(layer, X + s * step * direction).to_dense(), 2) for s in (1, -1)]
    torch.testing.assert_close(
        (gradient * direction).sum((1, 2)), (values[0] - values[1]) / (2 * step), rtol=1e-5, atol=1e-6
    )


def test_dot_products_of_a_family_are_attention():
    plain = cases.layer(heads=4, kv_heads=2, dk=3)
    found = family(plain)
    assert tuple(found) == VARIANTS
    X = cases.random(5, 6, seed=2)
    torch.testing.assert_close(found["dot-product"](X), plain(X))
    assert found["1/d-scaled"].tau == pytest.approx(1 / 3)
    assert found["soft-capped"].softcap == 50.0


@pytest.mark.parametrize("name", VARIANTS)
def test_a_scale_inside_the_queries_makes_no_difference(name):
    """Layers of models come with τ inside W_Q and scale 1; they are the same layers."""
    plain, X = cases.layer(heads=2, dk=3), cases.random(5, 6, seed=2)
    folded = dataclasses.replace(plain, q=plain.q / math.sqrt(3), scale=1.0)
    torch.testing.assert_close(variant(name, folded)(X), variant(name, plain)(X))


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e3])
def test_sinkhorn_is_doubly_stochastic(scale):
    scores = scale * cases.random(3, 2, 12, 12, seed=8)
    P = torch.softmax(scores + potential(scores), -1)
    torch.testing.assert_close(P.sum(-2), torch.ones_like(P.sum(-2)), rtol=0, atol=1e-9)


def test_refusals():
    W, X = torch.eye(2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="mask causal does not fit sinkhorn attention"):
        SinkhornAttention(q=W, k=W, v=W, mask="causal")
    with pytest.raises(ValueError, match="eps must be positive"):
        CosineAttention(q=W, k=W, v=W, eps=0.0)
    with pytest.raises(ValueError, match="q takes width 2"):
        L2Attention(q=W, v=torch.ones(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="no attention 'linear'"):
        variant("linear", lipscope.Attention(W, W, W))
    for kind in (SigmoidAttention, CosineAttention):
        with pytest.raises(ValueError, match=r"adds to scores, and .* takes masks that hide or show only"):
            lipscope.local_lipschitz(kind(q=W, k=W, v=W, mask=torch.eye(3)), X)
    hidden = torch.zeros(3, 3).masked_fill(torch.ones(3, 3).triu(1) > 0, -math.inf)
    as_numbers, as_word = (CosineAttention(q=W, k=W, v=W, mask=mask) for mask in (hidden, "causal"))
    assert torch.equal(as_numbers(X), as_word(X))
    layer = SigmoidAttention(q=W, k=W, v=W)
    with pytest.raises(ValueError, match="scope 'attention' only"):
        lipscope.local_lipschitz(layer, X, scope="head")
    with pytest.raises(ValueError, match="width 3, but the layer takes width 2"):
        lipscope.local_lipschitz(layer, torch.ones(3, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="certificate needs an Attention"):
        lipscope.local_lipschitz(layer, X, certificate=True)
    with pytest.raises(FloatingPointError, match="leave no correct digits"):
        lipscope.local_lipschitz(layer, 1e200 * X)
    assert dataclasses.replace(layer, shift=-1.0).shift_at(7) == -1.0
