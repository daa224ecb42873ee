"""The Jacobian of an attention layer behind the operator protocol, at scopes ``attention`` and ``head``.

``attention``: J = W_O · J_core · R · [τW_Q; W_K; W_V], one item per input, R the rotations of rotary embeddings if any.

``head``: one item per (input, head). J_head depends on a token only through its 3·dh projections, so with the thin QR
[τW_Q; W_K; W_V]_hᵀ = U R (d × r, r ≤ 3·dh) the iteration runs on (n, r) coordinates instead of (n, d): U has
orthonormal columns, hence the same singular values, and right singular vectors lift by U. Rotations come after the
projection, so they change nothing of this.

Scope ``norm+attention``: the Jacobian of u ↦ attention(Norm(u)), J = J_attention(Norm(u)) · D Norm(u).

The n×n blocks ∂out_i/∂x_j of an attention Jacobian, each a small linear map behind the operator protocol.

    ∂out_i/∂x_j = Σ_h W_O^h [ P_ij W_V + W_ij (v_j − o_i)(W_Kᵀ q_i)ᵀ + δ_ij B_i W_Q ],   B_i = Σ_l W_il (v_l − o_i) k_lᵀ

with τ inside q and W_Q, and W = P times the slope of the soft-cap. With rotary embeddings q and k are rotated already, and
R_jᵀq_i and B_iR_i take the places of q_i and B_i. Blocks never need more than products with the
projections, so all pairs (i, j) are solved together.

The Jacobian of a variant: token-wise derivatives of the features around the n×n core, all in closed form.

J·u = W_O · DO(Dq̃·u, Dk̃·u, Dṽ·u)        Jᵀ·g = Dq̃ᵀ gq + Dk̃ᵀ gk + Dṽᵀ gv,   (gq, gk, gv) = DOᵀ(W_Oᵀ g)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipscope.attention.core import Linearisation, group_queries, ungroup_queries
from lipscope.attention.norms import Normalisation, NormLinearisation
from lipscope.attention.tiled import AnyLinearisation, prefers_tiles
from lipscope.spectral.operator import Operator

if TYPE_CHECKING:
    from lipscope.attention.layer import Attention
    from lipscope.attention.variants import Core, Variant


class AttentionOperator(Operator):
    """Input Jacobian of the whole layer (all heads and W_O, no residual) at tokens X of shape (B, n, d)."""

    def __init__(self, layer: Attention, X: Tensor, *, tiled: bool | None = None) -> None:
        core, n = linearise_for_products(layer, X, tiled), X.shape[1]
        self.layer, self.core, self.n = layer, core, n
        self.rotation = layer.rotation(n, X.shape[0])
        self.batch = X.shape[0]
        self.input_shape, self.output_shape = (n, layer.width), (n, layer.output_width)
        self.dtype, self.device = layer.dtype, layer.device
        self._rounding_error = rounding_allowance(core, layer.width)

    @property
    def rounding_error(self) -> float:
        """Allowance that grows with the scores, whose rounding the exponential turns into relative error."""
        return self._rounding_error

    def matvec(self, u: Tensor) -> Tensor:
        """J·u for u of shape (B, n·d)."""
        layer = self.layer
        projected = u.reshape(-1, layer.width) @ layer.qkv.mT
        dq, dk, dv = layer.split_heads(projected.reshape(self.batch, self.n, -1))
        if self.rotation is not None:
            dq, dk = self.rotation.apply(dq), self.rotation.apply(dk)
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
        if self.rotation is not None:
            cotangents[:2] = [self.rotation.transpose(t) for t in cotangents[:2]]
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
        kept.rotation = None if self.rotation is None else self.rotation.select(items)
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
        rotation, inputs = layer.rotation(n, B), torch.arange(B, device=X.device)
        self.rotation = None if rotation is None else rotation.select(inputs.repeat_interleave(layer.heads))
        self.batch, self.n = B * layer.heads, n
        self.input_shape, self.output_shape = (n, self.weights.shape[-1]), (n, layer.value_width)
        self.dtype, self.device = layer.dtype, layer.device
        self._rounding_error = rounding_allowance(core, layer.width)

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
    def rounding_error(self) -> float:
        """See ``AttentionOperator.rounding_error``."""
        return self._rounding_error

    def matvec(self, u: Tensor) -> Tensor:
        """J·u in reduced coordinates."""
        projected = torch.bmm(u.reshape(self.batch, *self.input_shape), self.weights.mT)
        dq, dk, dv = (t[:, None] for t in projected.split(self.sizes, dim=-1))
        if self.rotation is not None:
            dq, dk = self.rotation.apply(dq), self.rotation.apply(dk)
        return self.core.jvp(dq, dk, dv).flatten(1)

    def rmatvec(self, g: Tensor) -> Tensor:
        """Jᵀ·g in reduced coordinates."""
        gq, gk, gv = self.core.vjp(g.reshape(self.batch, 1, *self.output_shape))
        if self.rotation is not None:
            gq, gk = self.rotation.transpose(gq), self.rotation.transpose(gk)
        return torch.bmm(torch.cat([gq[:, 0], gk[:, 0], gv[:, 0]], dim=-1), self.weights).flatten(1)

    def select(self, items: Tensor) -> HeadOperator:
        """Keep the listed (input, head) pairs."""
        kept = object.__new__(HeadOperator)
        kept.__dict__.update(self.__dict__)
        kept.core, kept.batch = self.core.select(items), int(items.numel())
        kept.weights, kept.head_of_item = self.weights[items], self.head_of_item[items]
        kept.rotation = None if self.rotation is None else self.rotation.select(items)
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


class NormAttentionOperator(Operator):
    """Input Jacobian of a pre-norm attention layer, without residual, at tokens u of shape (B, n, d)."""

    def __init__(self, layer: Attention, norm: Normalisation, X: Tensor) -> None:
        self._setup(AttentionOperator(layer, norm(X)), norm.linearise(X))

    def _setup(self, attention: AttentionOperator, norm: NormLinearisation) -> None:
        self.attention, self.norm = attention, norm
        self.batch = attention.batch
        self.input_shape, self.output_shape = attention.input_shape, attention.output_shape
        self.dtype, self.device = attention.dtype, attention.device

    @property
    def rounding_error(self) -> float:
        """See ``AttentionOperator.rounding_error``; the normalisation is one more product."""
        return 2 * self.attention.rounding_error

    def matvec(self, u: Tensor) -> Tensor:
        """J·u for u of shape (B, n·d)."""
        return self.attention.matvec(self.norm.jvp(u.reshape(self.batch, *self.input_shape)).flatten(1))

    def rmatvec(self, g: Tensor) -> Tensor:
        """Jᵀ·g for g of shape (B, n·d_out)."""
        return self.norm.vjp(self.attention.rmatvec(g).reshape(self.batch, *self.input_shape)).flatten(1)

    def select(self, items: Tensor) -> NormAttentionOperator:
        """Keep the listed inputs."""
        kept = object.__new__(NormAttentionOperator)
        kept._setup(self.attention.select(items), self.norm.select(items))
        return kept


class BlockOperator(Operator):
    """Blocks (rows[p], columns[p]) of one input's Jacobian; either all on the diagonal or all off it."""

    def __init__(self, layer: Attention, core: Linearisation, rows: Tensor, columns: Tensor, *, diagonal: bool) -> None:
        q, P, W, o = (ungroup_queries(t, layer.heads)[0] for t in (core.q, core.P, core.W, core.o))
        k, v = (t[0].repeat_interleave(layer.heads // layer.kv_heads, dim=0) for t in (core.k, core.v))
        self.layer = layer
        self.weights = layer.qkv
        if self.weights.shape[0] < layer.width:
            # The blocks see a token only through its projections: work in the coordinates of their span.
            self.weights = torch.linalg.qr(layer.qkv.mT).R.mT.contiguous()
        # Everything per pair first: (pairs, H, ·).
        self.q = q[:, rows].transpose(0, 1)
        self.P = P[:, rows, columns].T[:, :, None]
        self.difference = (W[:, rows, columns, None] * (v[:, columns] - o[:, rows])).transpose(0, 1)
        self.B = None
        if diagonal:
            moment = W @ (k[:, :, None, :] * v[..., None]).flatten(2)
            mean = (W @ k)[:, :, None, :] * o[..., None]
            self.B = (moment.reshape(mean.shape) - mean)[:, rows].transpose(0, 1)
        rotation = layer.rotation(q.shape[1], 1)
        if rotation is not None:
            self.q = rotation.tokens(columns).transpose(self.q)
            # B_iR_i turns the rows of B_i by R_iᵀ; the extra dimension is that of the values.
            self.B = None if self.B is None else rotation.tokens(rows).unsqueeze().transpose(self.B)
        self.batch = int(rows.numel())
        self.input_shape, self.output_shape = (self.weights.shape[1],), (layer.output_width,)
        self.dtype, self.device = layer.dtype, layer.device
        self._rounding_error = rounding_allowance(core, layer.width)

    @property
    def rounding_error(self) -> float:
        """See ``AttentionOperator.rounding_error``."""
        return self._rounding_error

    def matvec(self, u: Tensor) -> Tensor:
        """Apply every block to its own vector."""
        layer = self.layer
        dq, dk, dv = (t[:, :, 0] for t in layer.split_heads((u @ self.weights.mT)[:, None]))
        group = layer.heads // layer.kv_heads
        dk, dv = dk.repeat_interleave(group, dim=1), dv.repeat_interleave(group, dim=1)
        o = self.P * dv + self.difference * (self.q * dk).sum(-1, keepdim=True)
        if self.B is not None:
            o = o + (self.B @ dq[..., None])[..., 0]
        joined = o.flatten(1)
        return joined if layer.out is None else joined @ layer.out.detach().mT

    def rmatvec(self, g: Tensor) -> Tensor:
        """Apply every transposed block."""
        layer = self.layer
        joined = g if layer.out is None else g @ layer.out.detach()
        split = joined.reshape(self.batch, layer.heads, -1)
        gk = self.q * (self.difference * split).sum(-1, keepdim=True)
        gv = self.P * split
        gq = torch.zeros_like(self.q) if self.B is None else (self.B.mT @ split[..., None])[..., 0]
        shape = (self.batch, layer.kv_heads, layer.heads // layer.kv_heads, -1)
        gk, gv = gk.reshape(shape).sum(2), gv.reshape(shape).sum(2)
        return torch.cat([gq.flatten(1), gk.flatten(1), gv.flatten(1)], dim=-1) @ self.weights

    def select(self, items: Tensor) -> BlockOperator:
        """Keep the listed blocks."""
        kept = object.__new__(BlockOperator)
        kept.__dict__.update(self.__dict__)
        kept.batch = int(items.numel())
        kept.q, kept.P, kept.difference = self.q[items], self.P[items], self.difference[items]
        kept.B = None if self.B is None else self.B[items]
        return kept


class VariantOperator(Operator):
    """Input Jacobian of a variant (all heads and W_O) at tokens X of shape (B, n, d)."""

    def __init__(self, layer: Variant, X: Tensor) -> None:
        if X.shape[-1] != layer.width:
            raise ValueError(f"X has tokens of width {X.shape[-1]}, but the layer takes width {layer.width}")
        with torch.no_grad():
            self.features = layer.features(X)
            self.core = layer.linearise(*(feature.value for feature in self.features))
        check_finite(self.core)
        self.layer, self.X = layer, X
        self.batch, self.n = X.shape[0], X.shape[1]
        self.input_shape, self.output_shape = (self.n, layer.width), (self.n, layer.output_width)
        self.dtype, self.device = layer.dtype, layer.device
        self._rounding_error = rounding_allowance(self.core, layer.width)

    @property
    def rounding_error(self) -> float:
        """Allowance that grows with the scores, whose rounding the exponential turns into relative error."""
        return self._rounding_error

    def matvec(self, u: Tensor) -> Tensor:
        """J·u for u of shape (B, n·d)."""
        with torch.no_grad():
            U = u.reshape(self.batch, self.n, self.layer.width)
            q, k, v = self.features
            return self.layer.merge_heads(self.core.jvp(q.jvp(U), k.jvp(U), v.jvp(U))).flatten(1)

    def rmatvec(self, g: Tensor) -> Tensor:
        """Jᵀ·g for g of shape (B, n·d_out)."""
        with torch.no_grad():
            tokens = g.reshape(self.batch, self.n, self.layer.output_width)
            joined = tokens if self.layer.out is None else tokens @ self.layer.out
            split = joined.reshape(self.batch, self.n, self.layer.heads, -1).transpose(1, 2).contiguous()
            parts = zip(self.features, self.core.vjp(split), strict=True)
            return torch.stack([feature.vjp(cotangent) for feature, cotangent in parts]).sum(0).flatten(1)

    def select(self, items: Tensor) -> VariantOperator:
        """Keep the listed inputs."""
        kept = object.__new__(VariantOperator)
        kept.__dict__.update(self.__dict__)
        q, k, v = self.features
        kept.features = (q.select(items), k.select(items), v.select(items))
        kept.core, kept.X, kept.batch = self.core.select(items), self.X[items], int(items.numel())
        return kept
