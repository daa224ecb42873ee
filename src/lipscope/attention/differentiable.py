"""An ``Attention`` as a function of tokens and weights, by plain torch operations that keep their graph.

    φ(X, W) = ⟨u, J(X; W) v⟩,   J v = W_O( T V + P dV − rowsum(T)·O ),   T = W∘(dQ Kᵀ + Q dKᵀ)

At fixed u and v this is a torch expression of the tokens, of W_Q, W_K, W_V, W_O and of the biases. ``Attention`` itself and
its operators detach the weights and share what they can between products; nothing here is cached.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from lipscope.attention.core import Triple
from lipscope.attention.masks import Mask
from lipscope.attention.scores import ScoreRule

if TYPE_CHECKING:
    from lipscope.attention.layer import Attention


def bilinear(layer: Attention, X: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The form ⟨u, J(X) v⟩ of every input, (B,), for u (B, n, d_out) and v (B, n, d)."""
    with torch.enable_grad():
        q, k, v = projections(layer, X)
        dq, dk, dv = projections(layer, right, biases=False)
        P, W = _score_rule(layer, X.shape[1], X.shape[0]).probabilities(q @ k.mT)
        T = W * (dq @ k.mT + q @ dk.mT)
        moved = T @ v + P @ dv - T.sum(-1, keepdim=True) * (P @ v)
        joined = moved.transpose(1, 2).flatten(2)
        outputs = joined if layer.out is None else joined @ layer.out.mT
        return (outputs * left).flatten(1).sum(-1)


def scores_and_weights(layer: Attention, X: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Raw scores and probabilities (B, H, n, n) of tokens (B, n, d), and where query i sees key j."""
    q, k, _ = projections(layer, X)
    rule = _score_rule(layer, X.shape[1], X.shape[0])
    raw = q @ k.mT
    return raw, rule.probabilities(raw)[0], rule.allowed


def projections(layer: Attention, X: Tensor, *, biases: bool = True) -> Triple:
    """Scaled queries (B, H, n, dk), keys and values of tokens (B, n, d), one key head per query head."""

    def project(weight: Tensor, bias: Tensor | None, heads: int, factor: float) -> Tensor:
        z = X @ weight.mT
        if biases and bias is not None:
            z = z + bias
        z = factor * z.reshape(*X.shape[:2], heads, -1).transpose(1, 2)
        return z.repeat_interleave(layer.heads // heads, dim=1)

    q = project(layer.q, layer.q_bias, layer.heads, layer.tau)
    k = project(layer.k, layer.k_bias, layer.kv_heads, 1.0)
    v = project(layer.v, layer.v_bias, layer.kv_heads, 1.0)
    rotation = layer.rotation(X.shape[1], X.shape[0])
    return (q, k, v) if rotation is None else (rotation.apply(q), rotation.apply(k), v)


def _score_rule(layer: Attention, n: int, batch: int) -> ScoreRule:
    """The rule of the scores with the layer's own sinks and additive bias, not copies without a graph."""
    rule = layer.score_rule(n, batch)
    additive = rule.additive
    if layer.bias is not None:
        masked = cast(Mask, layer.mask).additive(n)
        additive = layer.bias if masked is None else layer.bias + masked.to(layer.bias)
        additive = additive.to(dtype=layer.dtype, device=layer.device)
    return dataclasses.replace(rule, additive=additive, sinks=layer.sinks)
