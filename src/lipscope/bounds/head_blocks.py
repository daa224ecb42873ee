"""The blocks of every head by itself, behind its block of W_O or alone: norms of blocks, and what balls are made of.

Every number is an upper bound of what it stands for, its own rounding included; see ``head_rounding``.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipscope.bounds.head_rounding import ROUNDS
from lipscope.bounds.spectral_upper import matrix_norm_upper
from lipscope.bounds.weights import HeadWeights

if TYPE_CHECKING:
    from lipscope.bounds.blocks import Strip

# Multiplications up to which block norms of a head are computed from the blocks themselves.
SMALL = 1 << 22
_TINY = 1e-300


class HeadBlocks:
    """The heads of a strip, each followed by its block of W_O (``image``) or alone (``plain``): arrays are (H, r, c)."""

    def __init__(self, strip: Strip, heads: tuple[HeadWeights, ...]) -> None:
        self.strip, self.at, self.heads = strip, strip.at, heads
        self.R_O = None if heads[0].R_O is None else self.stacked("R_O")
        columns = [(w.out, w.value, w.value_error, w.out_size, *w.sizes) for w in heads]
        self.out, self.value, self.value_off, self.out_size, *self.sizes = strip.P.new_tensor(columns).T[:, :, None, None]
        self.margin, self.unit, self.query, self.key, size, self.shift = self.at.rounded
        # What rounding may do to ‖v_j − o_i‖ behind W_O, and to ‖a_ij‖.
        share = 0.0 if strip.sink_share is None else strip.sink_share
        self.value_error = 2 * self.unit * self.out * (size + share * self.shift)
        self.gradient_error = 2 * self.unit * self.query * self.sizes[1]
        self.v, self.o = self.through(strip.v), self.through(strip.o)

    def through(self, t: Tensor) -> Tensor:
        """Values through W_O."""
        return t if self.R_O is None else t @ self.R_O.mT

    def stacked(self, name: str) -> Tensor:
        """A matrix of every head."""
        return torch.stack([getattr(w, name) for w in self.heads])

    @cached_property
    def a(self) -> Tensor:
        """‖a_ij‖, a_ij = W_KᵀR_jᵀq_i with τ inside q: (H, r, 1), or (H, r, c) with rotary embeddings."""
        images = self.strip.a @ self.stacked("R_K")[:, None].mT
        norms: Tensor = torch.linalg.vector_norm(images, dim=-1) + self.gradient_error
        return norms

    @cached_property
    def gradients(self) -> Tensor:
        """W_O W_V a_ij, (H, r, c, ·), or (H, r, 1, ·) without rotations."""
        return self.strip.a @ self.stacked("VK")[:, None].mT

    @cached_property
    def norms(self) -> tuple[Tensor, Tensor]:
        """‖W_O(v_j − o_i)‖ and P_ij‖W_O W_V + s_ij W_O(v_j − o_i)a_ijᵀ‖ for all pairs, s the slope of the soft-cap."""
        v, o, margin, strip = self.v, self.o, self.margin, self.strip
        size = v.square().sum(-1)[:, None] + o.square().sum(-1)[..., None]
        delta2 = torch.baddbmm(size, o, v.mT, alpha=-2).clamp_min_(0) + margin * size
        G = self.gradients
        g2 = torch.linalg.vector_norm(G, dim=-1).square()
        if self.at.rotation is None:
            inner = G[:, :, 0] @ v.mT - (G[:, :, 0] * o).sum(-1, keepdim=True)
        else:
            inner = (G * v[:, None]).sum(-1) - (G @ o[..., None])[..., 0]
        g_error, error = self.out * self.sizes[2] * self.gradient_error, self.value_error
        delta2 = delta2.sqrt_().add_(error).square_()
        slack = 2 * (margin * g2.sqrt() + g_error) * size.sqrt_() + g2.sqrt() * error
        a2, g2 = self.a.square(), (g2.sqrt() * (1 + margin) + g_error).square()
        if self.at.layer.softcap is not None:
            slope = strip.W / strip.P.clamp_min(_TINY)
            inner, slack = inner * slope, slack * slope
            a2, g2 = a2 * slope.square(), g2 * slope.square()
        trace = 2 * (inner + slack) + a2 * delta2
        determinant = (g2 * delta2 - inner.abs().sub_(slack).clamp_min_(0).square_()).clamp_min_(0)
        growth = (trace + (trace.square() + 4 * determinant).sqrt_()) / 2
        norms, delta = (self.value.square() + growth.clamp_min_(0)).sqrt_(), delta2.sqrt_()
        V = self.heads[0].V
        if self.at.n**2 * V.numel() * V.shape[0] <= SMALL:
            norms = torch.minimum(norms, self._exact(delta))
        return delta, strip.P * norms

    def _exact(self, delta: Tensor) -> Tensor:
        """‖W_O W_V + s_ij W_O(v_j − o_i)a_ijᵀ‖ for all pairs from the matrices themselves, when they are few and small."""
        a, strip = self.strip.a @ self.stacked("K")[:, None].mT, self.strip
        update = self.v[:, None] - self.o[:, :, None]
        if self.at.layer.softcap is not None:
            update = update * (strip.W / strip.P.clamp_min(_TINY))[..., None]
        M = self.stacked("V")[:, None, None] + update[..., None] * a[..., None, :]
        rest = self.value_off + self.value_error * self.a + delta * self.gradient_error
        norms: Tensor = matrix_norm_upper(M, squarings=5) + self.margin * (self.value + delta * self.a) + rest
        return norms

    @cached_property
    def query_grams(self) -> Tensor:
        """W_O C_i τW_Q times its transpose, (H, r, ·, ·)."""
        C = self.strip.covariances @ self.stacked("R_Q")[:, None].mT
        C = C if self.R_O is None else self.R_O[:, None] @ C
        return C @ C.mT

    @cached_property
    def queries(self) -> Tensor:
        """‖W_O C_i τW_Q‖, (H, r)."""
        strip, (far, ends) = self.strip, self.strip.sizes
        k = torch.linalg.vector_norm(strip.k, dim=-1)[:, None]
        # Cancellation in a covariance is relative to the second moments it is the difference of.
        off = self.margin * far * k + self.at.unit * (self.at.factors[5] * k + far * self.key + ends.sqrt() * k)
        off = (strip.W * off).sum(-1) * (self.out_size * self.sizes[0])[..., 0]
        squares = matrix_norm_upper(self.query_grams, symmetric=True, single=self.query_grams.shape[-1] >= 32)
        norms: Tensor = squares.sqrt() + ROUNDS * off
        return norms
