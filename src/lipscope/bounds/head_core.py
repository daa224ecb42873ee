"""One head at one input, in float64: the probabilities, block norms and covariances that the constants of balls are made of.

Every number here is an upper bound of what it stands for, its own rounding included; see ``head_rounding``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lipscope.attention.core import Point
from lipscope.attention.layer import Attention
from lipscope.attention.rotary import Rotation
from lipscope.bounds.head_rounding import Rounding
from lipscope.bounds.spectral_upper import matrix_norm_upper
from lipscope.bounds.weights import HeadWeights

# Entries of scratch memory for the covariances of one block of rows.
SCRATCH = 1 << 23
# Multiplications up to which block norms are computed from the blocks themselves.
SMALL = 1 << 22
_TINY = 1e-300


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadCore:
    """One head evaluated at one input of n tokens."""

    q: Tensor  # scaled queries (n, dk)
    k: Tensor  # keys (n, dk), shifted by their mean where a shift does not matter
    v: Tensor  # values (n, dv), shifted by their mean
    o: Tensor  # outputs Σ_j P_ij v_j, shifted likewise
    P: Tensor  # probabilities (n, n)
    W: Tensor  # P times the slope of the soft-cap
    sink_share: Tensor | None  # share of the sink in every row (n,), or None
    centre: Tensor  # the mean that was taken from the values
    softcapped: bool
    rounding: Rounding
    rotation: Rotation | None  # the rotations of rotary embeddings, or None; q and k are rotated already
    weights: HeadWeights

    @classmethod
    def at(cls, single: Attention, x: Tensor, weights: HeadWeights, offset: Tensor | None = None) -> HeadCore:
        """Evaluate a one-head layer in float64 at tokens x (n, d), to all of which an offset is to be added."""
        point = Point.of(single, x[None], offset)
        q, k, v = (t[0, 0] for t in (point.q, point.k, point.v))
        softcapped, sinks = single.softcap is not None, single.sinks is not None
        mean = v.mean(0)
        centre = mean if point.shift is None else mean + point.shift[0, 0, 0]
        rotation, gain = single.rotation(x.shape[0], 1), None
        if rotation is not None:
            rotation = Rotation(rotation.cos[0, 0], rotation.sin[0, 0], rotation.interleaved)
            gain = max(1.0, float((rotation.cos.square() + rotation.sin.square()).max().sqrt()))
        rule = single.score_rule(x.shape[0], 1, tiled=True)
        raw = (q @ k.mT)[None, None]
        P, W = (t[0, 0] for t in rule.probabilities(raw))
        v = v - mean
        o, sink_share = P @ v, None
        if sinks:
            sink_share = rule.sink_share(raw)[0, 0, :, 0]
            o = o - sink_share[:, None] * centre
        return cls(
            q=q,
            k=k if softcapped or sinks else k - k.mean(0),
            v=v,
            o=o,
            P=P,
            W=W if softcapped else P,
            sink_share=sink_share,
            centre=centre,
            softcapped=softcapped,
            rounding=Rounding.of(weights, x, rule, gain, offset),
            rotation=rotation,
            weights=weights,
        )

    @property
    def margin(self) -> float:
        """Relative rounding margin of a probability."""
        return self.rounding.margin

    def value_error(self, w: HeadWeights) -> Tensor:
        """What rounding may do to ‖v_j − o_i‖ seen through the output weights, for every row."""
        size = self.P.new_full((len(self.P),), self.rounding.value)
        if self.sink_share is not None:
            size = size + self.sink_share * self.rounding.shift
        return 2 * self.rounding.unit * w.out * size

    @property
    def gradient_error(self) -> float:
        """What rounding may do to ‖a_ij‖."""
        return 2 * self.rounding.unit * self.rounding.query * self.weights.sizes[1]

    @property
    def orthogonal(self) -> bool:
        """∂s_ij/∂x_j is the same for all j: no soft-cap, no rotary embeddings."""
        return not self.softcapped and self.rotation is None

    @cached_property
    def a(self) -> Tensor:
        """‖a_ij‖, a_ij = W_KᵀR_jᵀq_i with τ inside q: (n, 1), or (n, n) with rotary embeddings; rounding included."""
        R_K, error = self.weights.R_K, self.gradient_error
        if self.rotation is None:
            norms: Tensor = torch.linalg.vector_norm(self.q @ R_K.mT, dim=-1, keepdim=True) + error
            return norms
        return torch.cat([torch.linalg.vector_norm(Y, dim=-1) + error for _, Y in self.pair_images(R_K, self.q)])

    def pair_images(self, M: Tensor, t: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """M R_jᵀ t_i for all pairs, (rows i, columns j, rows of M), a block of rows at a time."""
        n, right = t.shape[0], self.rotated(M).flatten(0, 1).mT
        step = max(1, SCRATCH // (n * M.shape[0]))
        for start in range(0, n, step):
            part = slice(start, min(n, start + step))
            yield part, (t[part] @ right).reshape(-1, n, M.shape[0])

    def query_gradients(self, w: HeadWeights, shift: Tensor) -> tuple[Tensor, Tensor]:
        """‖b_ij‖ and ‖b_ij − R_Q R_iᵀ shift_i‖, b_ij = τW_QᵀR_iᵀk_j, for all pairs, with rotary embeddings."""
        norms, spreads = torch.empty_like(self.P), torch.empty_like(self.P)
        for i, M in enumerate(self.rotated(w.R_Q)):
            b = self.k @ M.mT
            norms[i] = torch.linalg.vector_norm(b, dim=-1)
            spreads[i] = torch.linalg.vector_norm(b - M @ shift[i], dim=-1)
        return norms, spreads

    def rotated(self, M: Tensor) -> Tensor:
        """M R_jᵀ for every token j, (n, rows of M, dk)."""
        assert self.rotation is not None
        return self.rotation.unsqueeze().apply(M.expand(len(self.k), *M.shape))

    def projected_norm(self, t: Tensor, M: Tensor) -> float:
        """‖t Mᵀ‖, or the largest ‖t R_j Mᵀ‖ over tokens with rotary embeddings."""
        if self.rotation is None:
            return float(torch.linalg.matrix_norm(t @ M.mT, 2))
        rotated = self.rotated(M)
        return float(matrix_norm_upper(rotated @ (t.mT @ t) @ rotated.mT, symmetric=True).max().sqrt())

    def block_norms(self, w: HeadWeights) -> tuple[Tensor, Tensor]:
        """‖W_O(v_j − o_i)‖ and P_ij‖W_O W_V + s_ij W_O(v_j − o_i)a_iᵀ‖ for all pairs, s the slope of the soft-cap."""
        v, o, margin, P = *self.through_output(w), self.margin, self.P
        size = v.square().sum(-1)[None, :] + o.square().sum(-1)[:, None]
        delta2 = torch.addmm(size, o, v.mT, alpha=-2).clamp_min_(0).add_(size, alpha=margin)
        if self.rotation is None:
            g = self.q @ w.VK.mT
            inner = g @ v.mT - (g * o).sum(-1, keepdim=True)
            g2 = g.square().sum(-1, keepdim=True)
        else:
            inner, g2 = torch.empty_like(P), torch.empty_like(P)
            for part, G in self.pair_images(w.VK, self.q):
                g2[part] = G.square().sum(-1)
                inner[part] = (G @ o[part, :, None])[..., 0].neg_() + (G * v).sum(-1)
        g_error, error = w.out * w.sizes[2] * self.gradient_error, self.value_error(w)[:, None]
        delta2 = delta2.sqrt_().add_(error).square_()
        slack = 2 * (margin * g2.sqrt() + g_error) * size.sqrt_() + g2.sqrt() * error
        a2, g2 = self.a.square(), (g2.sqrt() * (1 + margin) + g_error).square()
        if self.softcapped:
            slope = self.W / P.clamp_min(_TINY)
            inner, slack = inner * slope, slack * slope
            a2, g2 = a2 * slope.square(), g2 * slope.square()
        trace = 2 * (inner + slack) + a2 * delta2
        determinant = (g2 * delta2 - inner.abs().sub_(slack).clamp_min_(0).square_()).clamp_min_(0)
        growth = (trace + (trace.square() + 4 * determinant).sqrt_()) / 2
        norms = (w.value**2 + growth.clamp_min_(0)).sqrt_()
        delta = delta2.sqrt_()
        if len(P) ** 2 * w.V.numel() * w.V.shape[0] <= SMALL:
            norms = torch.minimum(norms, self._exact_blocks(w, v, o, delta))
        return delta, P * norms

    def _exact_blocks(self, w: HeadWeights, v: Tensor, o: Tensor, delta: Tensor) -> Tensor:
        """‖W_O W_V + s_ij W_O(v_j − o_i)a_iᵀ‖ for all pairs from the matrices themselves, when they are few and small."""
        pairs = self.rotation is not None
        a = torch.cat([Y for _, Y in self.pair_images(w.K, self.q)]) if pairs else (self.q @ w.K.mT)[:, None]
        update = v[None] - o[:, None]
        if self.softcapped:
            update = update * (self.W / self.P.clamp_min(_TINY))[..., None]
        M = w.V + update[..., None] * a[..., None, :]
        rest = w.value_error + self.value_error(w)[:, None] * self.a + delta * self.gradient_error
        return matrix_norm_upper(M, squarings=5) + self.margin * (w.value + delta * self.a) + rest

    def query_norms(self, w: HeadWeights) -> Tensor:
        """‖B_i‖, B_i = W_O C_i τW_Q with C_i = Σ_j W_ij (v_j − o_i) k_jᵀ, a block of rows at a time."""
        v, o = self.through_output(w)
        k = self.k if self.rotation is not None else self.k @ w.R_Q.mT
        r, m, found = v.shape[1], k.shape[1], []
        products = (v[:, :, None] * k[:, None, :]).flatten(1)
        for part in torch.arange(len(v), device=v.device).split(max(1, SCRATCH // (r * m))):
            W = self.W[part]
            cross = (W @ products).reshape(-1, r, m) - o[part, :, None] * (W @ k)[:, None, :]
            if self.rotation is not None:
                here = Rotation(self.rotation.cos[part, None], self.rotation.sin[part, None], self.rotation.interleaved)
                cross = here.transpose(cross) @ w.R_Q.mT
            found.append(matrix_norm_upper(cross))
        # Cancellation in a covariance is relative to the second moments it is the difference of.
        return torch.cat(found) + self._slack(w)

    def _largest(self, t: Tensor) -> Tensor:
        """The largest norm of a vector (n, ·) among those that every row sees."""
        norms = torch.linalg.vector_norm(t, dim=-1).expand_as(self.P)
        largest: Tensor = norms.masked_fill(self.P == 0, 0.0).amax(-1)
        return largest

    def _slack(self, w: HeadWeights) -> Tensor:
        """What rounding may add to ‖B_i‖, from what the row sees."""
        v, o = self.through_output(w)
        v_size = self._largest(v) + torch.linalg.vector_norm(o, dim=-1)
        if self.sink_share is not None:
            v_size = v_size + self.sink_share * w.out * torch.linalg.vector_norm(self.centre)
        k_size = self._largest(self.k if self.rotation is not None else self.k @ w.R_Q.mT)
        k_error = 2 * self.rounding.unit * self.rounding.key * w.sizes[0]
        if self.rotation is not None:
            stretch = (self.rotation.cos.square() + self.rotation.sin.square()).amax(-1).sqrt().clamp_min(1.0)
            k_size = k_size * stretch * w.query
        slack: Tensor = self.P.sum(-1) * (self.margin * v_size * k_size + self.value_error(w) * k_size + v_size * k_error)
        return slack

    def through_output(self, w: HeadWeights) -> tuple[Tensor, Tensor]:
        """Values and outputs through W_O."""
        if w.R_O is None:
            return self.v, self.o
        return self.v @ w.R_O.mT, self.o @ w.R_O.mT
