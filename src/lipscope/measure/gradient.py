"""The exact gradient of σ in the tokens.

Where σ is simple, dσ = ⟨u, dJ v⟩ with the top singular pair (u, v) held fixed; in general ⟨u, J(X)v⟩ ≤ σ(X) for all unit
u, v, so an input at which this bilinear form is larger has a larger σ, clusters of singular values or not.

For one head write g for u seen by the head, dq, dk, dv for the projections of v (they do not depend on X), and

    dS = dq Kᵀ + Q dkᵀ    T = W∘dS    t = rowsum(T)    gP = g Vᵀ    r = rowsum(P∘gP) = ⟨g, O⟩    H = g dvᵀ
    φ = ⟨u, J v⟩ = Σ W∘dS∘(gP − r) + Σ P∘H            W = P, times the slope of the soft-cap

Differentiating φ by hand, with C = (slope)∘dS∘(gP − r) + H − t·gP the derivative in P:

    ∂φ/∂S = P∘(C − rowsum(P∘C))        (soft-cap: times the slope, plus P∘dS∘(gP − r) times the slope's derivative)
    ∂φ/∂Q = ∂φ/∂S·K + gS·dk    ∂φ/∂K = ∂φ/∂Sᵀ·Q + gSᵀ·dq    ∂φ/∂V = (T − t·P)ᵀ g        gS = W∘(gP − r)

Nine products of n×n size, against eight for one pair J·v, Jᵀ·u.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.attention.core import Linearisation, Triple, group_queries, ungroup_queries
from lipscope.attention.operators import AttentionOperator
from lipscope.attention.scores import tanh_slope
from lipscope.attention.variants import Variant, VariantProjections


def sigma_gradient(operator: AttentionOperator, left: Tensor, right: Tensor) -> Tensor:
    """The gradient ∂⟨u, J(X)v⟩/∂X (B, n, d) at an operator's inputs, for unit u = ``left`` (B, n·d_out) and v (B, n·d).

    That of a variant comes from differentiating ⟨∂⟨u, f(X)⟩/∂X, v⟩ once more.
    """
    layer, core, B, n = operator.layer, operator.core, operator.batch, operator.input_shape[0]
    if isinstance(layer, Variant):
        with torch.enable_grad():
            assert isinstance(operator.projections, VariantProjections)
            X = operator.projections.X.detach().clone().requires_grad_()
            (gradient,) = torch.autograd.grad(layer.bilinear(X, left, right).sum(), X)
        return gradient
    if not isinstance(core, Linearisation):
        raise TypeError("the gradient needs the n×n matrices: make the operator with tiled=False")
    # Biases move with nothing.
    dq, dk, dv = layer.project(right.reshape(B, n, layer.width), biases=False)
    g = layer.split_output(left.reshape(B, n, layer.output_width))
    gq, gk, gv = core_gradient(core, layer.softcap, g, group_queries(dq, layer.kv_heads), dk, dv)
    X = torch.zeros(B, n, layer.width, dtype=left.dtype, device=left.device, requires_grad=True)
    with torch.enable_grad():
        projected = layer.project(X, biases=False)
        (gradient,) = torch.autograd.grad(projected, X, (ungroup_queries(gq, layer.heads), gk, gv))
    return gradient


def core_gradient(core: Linearisation, softcap: float | None, g: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> Triple:
    """Gradients of ⟨g, DO·(dq, dk, dv)⟩ in the scaled queries (grouped), keys and values, for fixed g, dq, dk, dv."""
    q, k, v, P, W = core.q, core.k, core.v, core.P, core.W
    dS = dq @ k.mT + q @ dk.mT
    T = W * dS
    t = T.sum(-1, keepdim=True)
    gP = g @ v.mT
    inner_o = (g * core.o).sum(-1, keepdim=True)
    about = gP - inner_o
    gS = W * about
    moved = dS * about
    inner = None if softcap is None else q @ k.mT / softcap
    slope = None if inner is None else tanh_slope(inner)
    C = g @ dv.mT + (moved if slope is None else moved * slope)
    PC = P * C.addcmul_(t, gP, value=-1)
    # Values may be given as v − c; a sink of share π then counts with −c, and π⟨g, c⟩ is what o lacks.
    lacking = (P * gP).sum(-1, keepdim=True) - inner_o
    gRaw = PC.addcmul_(P, PC.sum(-1, keepdim=True).addcmul_(t, lacking), value=-1)
    if inner is not None and slope is not None and softcap is not None:
        gRaw = slope * (gRaw - P * moved * (2 / softcap) * torch.tanh(inner))
    gq = gRaw @ k + gS @ dk
    gk = gRaw.mT @ q + gS.mT @ dq
    gv = (T - t * P).mT @ g
    return gq, gk, gv
