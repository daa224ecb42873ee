"""The Jacobian of an attention layer behind the operator protocol, at scopes ``attention`` and ``head``.

``attention``: J = W_O · J_core · R · [τW_Q; W_K; W_V], one item per input, R the rotations of rotary embeddings if any.

``head``: one item per (input, head). J_head depends on a token only through its 3·dh projections, so with the thin QR
[τW_Q; W_K; W_V]_hᵀ = U R (d × r, r ≤ 3·dh) the iteration runs on (n, r) coordinates instead of (n, d): U has
orthonormal columns, hence the same singular values, and right singular vectors lift by U. Rotations come after the
projection, so they change nothing of this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipscope.attention.core import group_queries
from lipscope.attention.layer import Attention
from lipscope.attention.tiled import AnyLinearisation, prefers_tiles
from lipscope.spectral.operator import Operator

if TYPE_CHECKING:
    from lipscope.attention.variants.layer import Core


class AttentionOperator(Operator):
    """Input Jacobian of the whole layer (all heads and W_O, no residual) at tokens X of shape (B, n, d)."""

    def __init__(self, layer: Attention, X: Tensor, *, tiled: bool | None = None) -> None:
        core, n = linearise_for_products(layer, X, tiled), X.shape[1]
        self.layer, self.core, self.n = layer, core, n
        self.turn = layer.turn(n, X.shape[0])
        self.batch = X.shape[0]
        self.input_shape, self.output_shape = (n, layer.width), (n, layer.output_width)
        self.dtype, self.device = layer.dtype, layer.device
        self._rounding = rounding_allowance(core, layer.width)

    @property
    def rounding(self) -> float:
        """Allowance that grows with the scores, whose rounding the exponential turns into relative error."""
        return self._rounding

    def matvec(self, u: Tensor) -> Tensor:
        """J·u for u of shape (B, n·d)."""
        layer = self.layer
        projected = u.reshape(-1, layer.width) @ layer.qkv.mT
        dq, dk, dv = layer.split_heads(projected.reshape(self.batch, self.n, -1))
        if self.turn is not None:
            dq, dk = self.turn.apply(dq), self.turn.apply(dk)
        return layer.merge_heads(self.core.jvp(group_queries(dq, layer.kv_heads), dk, dv)).flatten(1)

    def rmatvec(self, g: Tensor) -> Tensor:
        """Jᵀ·g for g of shape (B, n·d_out)."""
        layer = self.layer
        tokens = g.reshape(-1, layer.output_width)
        joined = tokens if layer.out is None else tokens @ layer.out.detach()
        split = joined.reshape(self.batch, self.n, layer.heads, -1).transpose(1, 2)
        cotangents = [
            t.reshape(self.batch, -1, self.n, t.shape[-1]) for t in self.core.vjp(group_queries(split, layer.kv_heads))
        ]
        if self.turn is not None:
            cotangents[:2] = [self.turn.transpose(t) for t in cotangents[:2]]
        # Side by side in one tensor, each written once.
        merged = g.new_empty(self.batch, self.n, layer.qkv.shape[0])
        for part, t in zip(merged.split([t.shape[1] * t.shape[3] for t in cotangents], dim=-1), cotangents, strict=True):
            part.unflatten(-1, (t.shape[1], t.shape[3])).copy_(t.transpose(1, 2))
        return (merged.flatten(0, 1) @ layer.qkv).reshape(self.batch, -1)

    def select(self, items: Tensor) -> AttentionOperator:
        """Keep the listed inputs."""
        kept = object.__new__(AttentionOperator)
        kept.__dict__.update(self.__dict__)
        kept.core, kept.batch = self.core.select(items), int(items.numel())
        kept.turn = None if self.turn is None else self.turn.select(items)
        return kept

    def to_dense(self) -> Tensor:
        """The Jacobians ``(B, n·d_out, n·d)``, one batched product per input."""
        return dense_by_repetition(self)


class HeadOperator(Operator):
    """Input Jacobians x ↦ o^h of every single head, before W_O, in reduced coordinates; items ordered (input, head)."""

    def __init__(self, layer: Attention, X: Tensor, *, tiled: bool | None = None) -> None:
        core = linearise_for_products(layer, X, tiled)
        B, n, _ = X.shape
        self.core = core.per_head(layer.heads)
        self._set_weights(layer, B)
        turn, inputs = layer.turn(n, B), torch.arange(B, device=X.device)
        self.turn = None if turn is None else turn.select(inputs.repeat_interleave(layer.heads))
        self.batch, self.n = B * layer.heads, n
        self.input_shape, self.output_shape = (n, self.weights.shape[-1]), (n, layer.value_width)
        self.dtype, self.device = layer.dtype, layer.device
        self._rounding = rounding_allowance(core, layer.width)

    def _set_weights(self, layer: Attention, inputs: int) -> None:
        """Per head: the orthonormal basis U (d × r) and the projections in that basis, Rᵀ (2·dk + dv, r)."""
        q, k, v = (
            t.reshape(heads, -1, layer.width).repeat_interleave(layer.heads // heads, dim=0)
            for t, heads in zip(
                layer.qkv.split([layer.q.shape[0], layer.k.shape[0], layer.v.shape[0]]),
                (layer.heads, layer.kv_heads, layer.kv_heads),
                strict=True,
            )
        )
        self.sizes = [layer.head_width, layer.head_width, layer.value_width]
        basis, triangle = torch.linalg.qr(torch.cat([q, k, v], dim=1).mT)
        self.basis = basis
        self.head_of_item = torch.arange(layer.heads, device=layer.device).repeat(inputs)
        self.weights = triangle.mT.contiguous()[self.head_of_item]

    @property
    def rounding(self) -> float:
        """See ``AttentionOperator.rounding``."""
        return self._rounding

    def matvec(self, u: Tensor) -> Tensor:
        """J·u in reduced coordinates."""
        projected = torch.bmm(u.reshape(self.batch, *self.input_shape), self.weights.mT)
        dq, dk, dv = (t[:, None] for t in projected.split(self.sizes, dim=-1))
        if self.turn is not None:
            dq, dk = self.turn.apply(dq), self.turn.apply(dk)
        return self.core.jvp(dq, dk, dv).flatten(1)

    def rmatvec(self, g: Tensor) -> Tensor:
        """Jᵀ·g in reduced coordinates."""
        gq, gk, gv = self.core.vjp(g.reshape(self.batch, 1, *self.output_shape))
        if self.turn is not None:
            gq, gk = self.turn.transpose(gq), self.turn.transpose(gk)
        return torch.bmm(torch.cat([gq[:, 0], gk[:, 0], gv[:, 0]], dim=-1), self.weights).flatten(1)

    def select(self, items: Tensor) -> HeadOperator:
        """Keep the listed (input, head) pairs."""
        kept = object.__new__(HeadOperator)
        kept.__dict__.update(self.__dict__)
        kept.core, kept.batch = self.core.select(items), int(items.numel())
        kept.weights, kept.head_of_item = self.weights[items], self.head_of_item[items]
        kept.turn = None if self.turn is None else self.turn.select(items)
        return kept

    def lift_right(self, right: Tensor) -> Tensor:
        """Directions in token space (items, n, d)."""
        return torch.bmm(right.reshape(self.batch, *self.input_shape), self.basis[self.head_of_item].mT)

    def to_dense(self) -> Tensor:
        """The Jacobians in reduced coordinates."""
        return dense_by_repetition(self)


def linearise_for_products(layer: Attention, X: Tensor, tiled: bool | None = None) -> AnyLinearisation:
    """The core at X as the operators use it: finite, and with centred values where that changes nothing.

    Args:
        layer: the layer.
        X: tokens (B, n, d).
        tiled: without n×n matrices; by default when these would be large.
    """
    B, n, _ = X.shape
    if tiled is None:
        tiled = prefers_tiles(layer.score_rule(n, B, tiled=True), B * layer.heads, n, n, X)
    centred = layer.sinks is None
    if tiled:
        tiles = layer.linearise_tiled(X, centred=centred)
        check_finite(tiles)
        return tiles
    core = layer.linearise(X)
    check_finite(core)
    return core.with_centred_values() if centred else core


def check_finite(core: AnyLinearisation | Core) -> None:
    """Refuse a linearisation that overflowed."""
    for name, tensor in core.finite().items():
        if not bool(torch.isfinite(tensor).all()):
            raise FloatingPointError(
                f"the attention {name} overflow in {core.dtype} at this input: the tokens or the weights are too large. "
                "Compute in float64, or rescale the input."
            )


def rounding_allowance(core: AnyLinearisation | Core, width: int) -> float:
    """Relative error allowed for the products: eps times (√d for the inner products + the size of the scores)."""
    eps = torch.finfo(core.dtype).eps
    allowance = eps * float(16 + 4 * width**0.5 + 2 * core.score_size)
    if allowance > 0.1:
        raise FloatingPointError(
            f"scores of size {core.score_size:.1e} leave no correct digits in {core.dtype}: "
            + ("rescale the tokens or the weights" if eps < 1e-10 else "compute in float64 (dtype=torch.float64)")
        )
    return allowance


def dense_by_repetition(operator: AttentionOperator | HeadOperator) -> Tensor:
    """J of every item, each from products with blocks of basis vectors: the item is repeated once per vector."""
    M, N = operator.shape
    identity = torch.eye(N, dtype=operator.dtype, device=operator.device)
    block = max(1, _DENSE_BLOCK // (M + N + operator.core.scratch))
    items = []
    for item in range(operator.batch):
        columns = []
        for part in identity.split(block):
            index = torch.full((part.shape[0],), item, device=operator.device)
            columns.append(operator.select(index).matvec(part))
        items.append(torch.cat(columns).mT)
    return torch.stack(items)


# Entries of scratch memory that one block of columns may take when a Jacobian is formed.
_DENSE_BLOCK = 1 << 22
