"""Jacobians of attention layers behind the operator protocol.

``AttentionOperator``: J = W_O · J_core · D, one item per input, with D the derivative of queries, keys and values in the
tokens: D = R·[τW_Q; W_K; W_V] for an ``Attention``, R the rotations of rotary embeddings if any; closed forms for variants.

``HeadOperator``: one item per (input, head), before W_O. J_head depends on a token only through its 3·dh projections, so
with the thin QR [τW_Q; W_K; W_V]_hᵀ = U R (d × r, r ≤ 3·dh) the iteration runs on (n, r) coordinates instead of (n, d): U
has orthonormal columns, hence the same singular values, and right singular vectors lift by U. Rotations come after the
projection, so they change nothing of this.

``NormAttentionOperator``: the Jacobian of u ↦ attention(Norm(u)), J = J_attention(Norm(u)) · D Norm(u).

``BlockOperator``: the n×n blocks ∂out_i/∂x_j, each a small linear map,

    ∂out_i/∂x_j = Σ_h W_O^h [ P_ij W_V + W_ij (v_j − o_i)(W_Kᵀ q_i)ᵀ + δ_ij B_i W_Q ],   B_i = Σ_l W_il (v_l − o_i) k_lᵀ

with τ inside q and W_Q, and W = P times the slope of the soft-cap. With rotary embeddings q and k are rotated already, and
R_jᵀq_i and B_iR_i take the places of q_i and B_i. Blocks never need more than products with the projections, so all pairs
(i, j) are solved together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipscope.attention.core import Linearisation, Triple, group_queries, typical_norm, ungroup_queries
from lipscope.attention.norms import Normalisation, NormLinearisation
from lipscope.attention.rotary import Rotation
from lipscope.attention.tiled import AnyLinearisation
from lipscope.attention.validation import rows_of
from lipscope.spectral.operator import DerivedOperator, Operator

if TYPE_CHECKING:
    from lipscope.attention.layer import Attention
    from lipscope.attention.variants import Variant, VariantProjections


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class _CoreOperator(Operator):
    """What the operators below have in common: the attention core at one point."""

    core: AnyLinearisation  # the n×n part
    width: int  # token dimension d, for the rounding allowance
    batch: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    # Norms of the mean part of J and of its parts by way of scores, as if nothing in them cancelled, (batch, 2)
    parts: Tensor | None = None

    def __post_init__(self) -> None:
        if not self.rounding_error <= 0.1:
            wide = torch.finfo(self.dtype).eps < 1e-10
            raise FloatingPointError(
                f"scores of size {self.core.score_size:.1e} leave no correct digits in {self.core.dtype}: "
                + ("rescale the tokens or the weights" if wide else "compute in float64 (dtype=torch.float64)")
            )

    @property
    def rounding_error(self) -> float:
        """Allowance that grows with the scores, whose rounding the exponential makes a relative error: eps·(√d + scores)."""
        return torch.finfo(self.core.dtype).eps * float(16 + 4 * self.width**0.5 + 2 * self.core.score_size)

    @property
    def rounding_floor(self) -> Tensor | float:
        """Allowance for what cancels inside J: the error of P in its mean part, that of products in the others."""
        if self.parts is None:
            return 0.0
        weights = self.parts.new_tensor([2 + self.core.score_size, 2.0])
        return torch.finfo(self.core.dtype).eps * (self.parts @ weights)

    def to_dense(self) -> Tensor:
        """The matrices, each from products with blocks of basis vectors: the item is repeated once per vector."""
        M, N = self.shape
        block = max(1, _DENSE_BLOCK // (M + N + self.core.scratch))
        parts = torch.eye(N, dtype=self.dtype, device=self.device).split(block)

        def columns(item: int, part: Tensor) -> Tensor:
            return self.select(torch.full((part.shape[0],), item, device=self.device)).matvec(part)

        return torch.stack([torch.cat([columns(item, part) for part in parts]).mT for item in range(self.batch)])


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class AttentionOperator(_CoreOperator):
    """Input Jacobian of a whole layer (all heads and W_O, no residual) at tokens of shape (B, n, d)."""

    layer: Attention | Variant
    projections: LayerProjections | VariantProjections

    @classmethod
    def at(
        cls, layer: Attention | Variant, X: Tensor, *, tiled: bool | None = None, offset: Tensor | None = None
    ) -> AttentionOperator:
        """Linearise at tokens X (B, n, d), to all of which ``offset`` is to be added.

        ``tiled`` works without n×n matrices, by default when these would be large.
        """
        projections, core, parts = layer.jacobian_parts(X, tiled=tiled, offset=offset)
        check_finite(core)
        B, n, d = X.shape
        if parts is not None and layer.out is not None:
            blocks = layer.out.detach().reshape(layer.out.shape[0], layer.heads, -1)
            squares = torch.linalg.vector_norm(blocks, dim=(0, 2)).double().square()
            parts = parts * typical_norm(squares, layer.out.shape[0], layer.out.shape[1] // layer.heads)[:, None]
        return cls(
            layer=layer,
            projections=projections,
            core=core,
            width=d,
            batch=B,
            input_shape=(n, d),
            output_shape=(n, layer.output_width),
            dtype=layer.dtype,
            device=layer.device,
            parts=None if parts is None else torch.linalg.vector_norm(parts, dim=1),
        )

    @torch.no_grad()
    def matvec(self, u: Tensor) -> Tensor:
        moved = self.projections.jvp(u.reshape(self.batch, *self.input_shape))
        return self.layer.merge_heads(self.core.jvp(*moved)).flatten(1)

    @torch.no_grad()
    def rmatvec(self, g: Tensor) -> Tensor:
        heads = self.layer.split_output(g.reshape(self.batch, *self.output_shape))
        return self.projections.vjp(self.core.vjp(heads)).flatten(1)

    def select(self, items: Tensor) -> AttentionOperator:
        core, projections = self.core.select(items), self.projections.select(items)
        return rows_of(self, items, "parts", core=core, projections=projections, batch=int(items.numel()))


@dataclass(frozen=True, eq=False)
class LayerProjections:
    """The projections of an ``Attention``: one product with its stacked weights, then rotations."""

    layer: Attention
    rotation: Rotation | None

    def jvp(self, U: Tensor) -> Triple:
        """Scaled queries (B, Hkv, G·n, dk), keys and values for perturbations (B, n, d) of the tokens."""
        layer = self.layer
        projected = U.reshape(-1, layer.width) @ layer.qkv.mT
        dq, dk, dv = layer.split_heads(projected.reshape(*U.shape[:2], -1))
        if self.rotation is not None:
            dq, dk = self.rotation.apply(dq), self.rotation.apply(dk)
        return group_queries(dq, layer.kv_heads), dk, dv

    def vjp(self, cotangents: Triple) -> Tensor:
        """The transpose: (B, n, d)."""
        B, n = cotangents[1].shape[0], cotangents[1].shape[2]
        parts = [t.reshape(B, -1, n, t.shape[-1]) for t in cotangents]
        if self.rotation is not None:
            parts[:2] = [self.rotation.transpose(t) for t in parts[:2]]
        # Side by side in one tensor, each written once.
        weights = self.layer.qkv
        merged = parts[0].new_empty(B, n, weights.shape[0])
        for part, t in zip(merged.split([t.shape[1] * t.shape[3] for t in parts], dim=-1), parts, strict=True):
            part.unflatten(-1, (t.shape[1], t.shape[3])).copy_(t.transpose(1, 2))
        return (merged.flatten(0, 1) @ weights).reshape(B, n, -1)

    def select(self, items: Tensor) -> LayerProjections:
        """Keep the listed batch items."""
        return self if self.rotation is None else replace(self, rotation=self.rotation.select(items))


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class HeadOperator(_CoreOperator):
    """Input Jacobians x ↦ o^h of every single head, before W_O, in reduced coordinates; items ordered (input, head)."""

    weights: Tensor  # projections in the reduced coordinates, Rᵀ of every item, (items, 2·dk + dv, r)
    sizes: list[int]  # dk, dk and dv
    basis: Tensor  # U of every head, (H, d, r)
    head_of_item: Tensor  # which head an item is, (items,)
    rotation: Rotation | None  # rotations of rotary embeddings by item, or None

    @classmethod
    def at(cls, layer: Attention, X: Tensor, *, tiled: bool | None = None) -> HeadOperator:
        """Linearise at tokens X (B, n, d); see ``AttentionOperator.at``."""
        projections, core, parts = layer.jacobian_parts(X, tiled=tiled)
        check_finite(core)
        (B, n, d), heads = X.shape, layer.heads
        shown = [t.repeat_interleave(heads // len(t), dim=0) for t in layer.qkv_by_head]
        basis, triangle = torch.linalg.qr(torch.cat(shown, dim=1).mT)
        head_of_item = torch.arange(heads, device=layer.device).repeat(B)
        inputs = torch.arange(B, device=X.device).repeat_interleave(heads)
        weights = triangle.mT.contiguous()[head_of_item]
        return cls(
            core=core.per_head(heads),
            weights=weights,
            sizes=[layer.head_width, layer.head_width, layer.value_width],
            basis=basis,
            head_of_item=head_of_item,
            rotation=None if projections.rotation is None else projections.rotation.select(inputs),
            width=d,
            batch=B * heads,
            input_shape=(n, weights.shape[-1]),
            output_shape=(n, layer.value_width),
            dtype=layer.dtype,
            device=layer.device,
            parts=parts.flatten(0, 1),
        )

    def matvec(self, u: Tensor) -> Tensor:
        projected = torch.bmm(u.reshape(self.batch, *self.input_shape), self.weights.mT)
        dq, dk, dv = (t[:, None] for t in projected.split(self.sizes, dim=-1))
        if self.rotation is not None:
            dq, dk = self.rotation.apply(dq), self.rotation.apply(dk)
        return self.core.jvp(dq, dk, dv).flatten(1)

    def rmatvec(self, g: Tensor) -> Tensor:
        gq, gk, gv = self.core.vjp(g.reshape(self.batch, 1, *self.output_shape))
        if self.rotation is not None:
            gq, gk = self.rotation.transpose(gq), self.rotation.transpose(gk)
        return torch.bmm(torch.cat([gq[:, 0], gk[:, 0], gv[:, 0]], dim=-1), self.weights).flatten(1)

    def select(self, items: Tensor) -> HeadOperator:
        core, rotation = self.core.select(items), None if self.rotation is None else self.rotation.select(items)
        changes = {"core": core, "rotation": rotation, "batch": int(items.numel())}
        return rows_of(self, items, "weights", "head_of_item", "parts", **changes)

    def lift_right(self, right: Tensor) -> Tensor:
        """Directions in token space (items, n, d)."""
        return torch.bmm(right.reshape(self.batch, *self.input_shape), self.basis[self.head_of_item].mT)


class NormAttentionOperator(DerivedOperator):
    """Input Jacobian of a pre-norm attention layer, without residual: that of attention behind that of the normalisation."""

    base: AttentionOperator

    def __init__(self, attention: AttentionOperator, norm: NormLinearisation) -> None:
        super().__init__(attention)
        self.norm = norm

    @classmethod
    def at(cls, layer: Attention, norm: Normalisation, X: Tensor) -> NormAttentionOperator:
        """Linearise at tokens X (B, n, d) before the normalisation."""
        at = norm.linearise(X)
        # The offset β is common to all tokens, and enters where it does not cancel.
        return cls(AttentionOperator.at(layer, at.g * at.z, offset=norm.offset(X)), at)

    @property
    def rounding_error(self) -> float:
        """See ``AttentionOperator.rounding_error``; the normalisation is one more product."""
        return 2 * self.base.rounding_error

    @property
    def rounding_floor(self) -> Tensor | float:
        """See ``AttentionOperator.rounding_floor``; what the normalisation takes out of a token cancels in its product."""
        parts = self.base.parts
        assert parts is not None
        gain = (self.norm.g.abs().max() / self.norm.s.amin((1, 2))).double()
        return gain * (2 * self.base.rounding_floor + 8 * torch.finfo(self.dtype).eps * parts.sum(-1))

    def matvec(self, u: Tensor) -> Tensor:
        return self.base.matvec(self.norm.jvp(u.reshape(self.batch, *self.input_shape)).flatten(1))

    def rmatvec(self, g: Tensor) -> Tensor:
        return self.norm.vjp(self.base.rmatvec(g).reshape(self.batch, *self.input_shape)).flatten(1)

    def select(self, items: Tensor) -> NormAttentionOperator:
        return NormAttentionOperator(self.base.select(items), self.norm.select(items))


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class BlockOperator(_CoreOperator):
    """Blocks (rows[p], columns[p]) of one input's Jacobian; either all on the diagonal or all off it."""

    layer: Attention
    weights: Tensor  # the stacked projections, in the coordinates of their span where these are fewer, (·, r)
    q: Tensor  # W_K-side vectors R_jᵀq_i of every pair, (pairs, H, dk)
    P: Tensor  # P_ij, (pairs, H, 1)
    difference: Tensor  # W_ij (v_j − o_i), (pairs, H, dv)
    B: Tensor | None  # B_iR_i, (pairs, H, dv, dk), or None off the diagonal

    @classmethod
    def at(cls, layer: Attention, core: Linearisation, rows: Tensor, columns: Tensor, *, diagonal: bool) -> BlockOperator:
        """The blocks of the Jacobian at the one input at which ``core`` was linearised."""
        q, P, W, o = (ungroup_queries(t, layer.heads)[0] for t in (core.q, core.P, core.W, core.o))
        k, v = (t[0].repeat_interleave(layer.heads // layer.kv_heads, dim=0) for t in (core.k, core.v))
        weights = layer.qkv
        if weights.shape[0] < layer.width:
            # The blocks see a token only through its projections: work in the coordinates of their span.
            weights = torch.linalg.qr(layer.qkv.mT).R.mT.contiguous()
        # Everything per pair first: (pairs, H, ·).
        queries = q[:, rows].transpose(0, 1)
        B = None
        if diagonal:
            moment = W @ (k[:, :, None, :] * v[..., None]).flatten(2)
            mean = (W @ k)[:, :, None, :] * o[..., None]
            B = (moment.reshape(mean.shape) - mean)[:, rows].transpose(0, 1)
        rotation = layer.rotation(q.shape[1], 1)
        if rotation is not None:
            queries = rotation.tokens(columns).transpose(queries)
            # B_iR_i rotates the rows of B_i by R_iᵀ; the extra dimension is that of the values.
            B = None if B is None else rotation.tokens(rows).unsqueeze().transpose(B)
        return cls(
            layer=layer,
            core=core,
            weights=weights,
            q=queries,
            P=P[:, rows, columns].T[:, :, None],
            difference=(W[:, rows, columns, None] * (v[:, columns] - o[:, rows])).transpose(0, 1),
            B=B,
            width=layer.width,
            batch=int(rows.numel()),
            input_shape=(weights.shape[1],),
            output_shape=(layer.output_width,),
            dtype=layer.dtype,
            device=layer.device,
        )

    def matvec(self, u: Tensor) -> Tensor:
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
        return rows_of(self, items, "q", "P", "difference", "B", batch=int(items.numel()))


# Entries of scratch memory that one block of columns may take when a Jacobian is formed.
_DENSE_BLOCK = 1 << 22


def check_finite(core: AnyLinearisation) -> None:
    """Refuse a linearisation that overflowed."""
    for name, tensor in core.finite().items():
        if not bool(torch.isfinite(tensor).all()):
            raise FloatingPointError(
                f"the attention {name} overflow in {core.dtype} at this input: the tokens or the weights are too large. "
                "Compute in float64, or rescale the input."
            )
