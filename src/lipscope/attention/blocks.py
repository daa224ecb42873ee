"""The n×n blocks ∂out_i/∂x_j of an attention Jacobian, each a small linear map behind the operator protocol.

    ∂out_i/∂x_j = Σ_h W_O^h [ P_ij W_V + W_ij (v_j − o_i)(W_Kᵀ q_i)ᵀ + δ_ij B_i W_Q ],   B_i = Σ_l W_il (v_l − o_i) k_lᵀ

with τ inside q and W_Q, and W = P times the slope of the soft-cap. With rotary embeddings q and k are turned already, and
R_jᵀq_i and B_iR_i take the places of q_i and B_i. Blocks never need more than products with the
projections, so all pairs (i, j) are solved together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.attention.core import Linearisation, ungroup_queries
from lipscope.attention.layer import Attention
from lipscope.attention.operator import rounding_allowance
from lipscope.spectral.operator import Operator


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
        turn = layer.turn(q.shape[1], 1)
        if turn is not None:
            self.q = turn.tokens(columns).transpose(self.q)
            # B_iR_i turns the rows of B_i by R_iᵀ; the extra dimension is that of the values.
            self.B = None if self.B is None else turn.tokens(rows).unsqueeze().transpose(self.B)
        self.batch = int(rows.numel())
        self.input_shape, self.output_shape = (self.weights.shape[1],), (layer.output_width,)
        self.dtype, self.device = layer.dtype, layer.device
        self._rounding = rounding_allowance(core, layer.width)

    @property
    def rounding(self) -> float:
        """See ``AttentionOperator.rounding``."""
        return self._rounding

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
