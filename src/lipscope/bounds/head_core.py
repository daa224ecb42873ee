"""One head at one input, in float64: the probabilities, block norms and covariances that certificates are made of.

Every number here is an upper bound of what it stands for, its own rounding included; see ``rounding_margin``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds.spectral_upper import matrix_norm_upper
from lipscope.bounds.weights import HeadWeights

# Entries of scratch memory for the covariances of one block of rows.
_SCRATCH = 1 << 23
# Multiplications up to which block norms are computed from the blocks themselves.
_SMALL = 1 << 22
_TINY = 1e-300


def rounding_margin(weights: HeadWeights, x: Tensor) -> float:
    """Relative error of a probability, and hence of every sum of nonnegative terms built on it.

    A score is two products of length d and one of length dk, so its error is at most (2d + dk)·eps times
    |τ|‖W_Q‖_F‖W_K‖_F (‖x‖ + ‖b_Q‖/‖W_Q‖_F)(‖x‖ + ‖b_K‖/‖W_K‖_F); the exponential and the normalisation double it, and a
    further factor 2 and 8(n + d) units cover the remaining sums.
    """
    n, d = x.shape
    size = float(torch.linalg.vector_norm(x, dim=-1).max())
    scores = weights.score_scale * (size + weights.query_shift) * (size + weights.key_shift)
    eps = torch.finfo(torch.float64).eps
    return eps * (4 * (2 * d + weights.R_K.shape[1]) * scores + 8 * (n + d))


@dataclass(frozen=True, eq=False)
class HeadCore:
    """One head evaluated at one input.

    Attributes:
        q: scaled queries (n, dk).
        k: keys (n, dk), shifted by their mean where a shift does not matter.
        v: values (n, dv), shifted by their mean.
        o: outputs Σ_j P_ij v_j, shifted likewise.
        P: probabilities (n, n).
        W: P times the slope of the soft-cap.
        a: ‖a_i‖ = ‖τW_Kᵀq_i‖, (n,).
        missing: share of the sink in every row (n,), or None.
        centre: the mean that was taken from the values.
        bent: there is a soft-cap.
        margin: relative rounding margin.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    P: Tensor
    W: Tensor
    a: Tensor
    missing: Tensor | None
    centre: Tensor
    bent: bool
    margin: float

    @classmethod
    def at(cls, single: Attention, x: Tensor, weights: HeadWeights) -> HeadCore:
        """Evaluate a one-head layer in float64 at tokens x (n, d)."""
        core = single.linearise(x[None])
        q, k, v, P, W = (t[0, 0] for t in (core.q, core.k, core.v, core.P, core.W))
        bent, sinks = single.softcap is not None, single.sinks is not None
        centre = v.mean(0)
        v = v - centre
        o, missing = P @ v, None
        if sinks:
            missing = (1 - P.sum(-1)).clamp_min(0)
            o = o - missing[:, None] * centre
        if not (bent or sinks):
            k = k - k.mean(0)
        a = torch.linalg.vector_norm(q @ weights.R_K.mT, dim=-1)
        return cls(q, k, v, o, P, W if bent else P, a, missing, centre, bent, rounding_margin(weights, x))

    def block_norms(self, w: HeadWeights) -> tuple[Tensor, Tensor]:
        """‖W_O(v_j − o_i)‖ and P_ij‖W_O W_V + s_ij W_O(v_j − o_i)a_iᵀ‖ for all pairs, s the slope of the soft-cap."""
        v, o, margin, P = *self._seen(w), self.margin, self.P
        g = self.q @ w.VK.mT
        size = v.square().sum(-1)[None, :] + o.square().sum(-1)[:, None]
        delta2 = torch.addmm(size, o, v.mT, alpha=-2).clamp_min_(0).add_(size, alpha=margin)
        inner = g @ v.mT - (g * o).sum(-1, keepdim=True)
        slack = 2 * margin * torch.linalg.vector_norm(g, dim=-1)[:, None] * size.sqrt_()
        a2, g2 = self.a.square()[:, None], g.square().sum(-1)[:, None] * (1 + margin)
        if self.bent:
            slope = self.W / P.clamp_min(_TINY)
            inner, slack = inner * slope, slack * slope
            a2, g2 = a2 * slope.square(), g2 * slope.square()
        trace = 2 * (inner + slack) + a2 * delta2
        determinant = (g2 * delta2 - inner.abs().sub_(slack).clamp_min_(0).square_()).clamp_min_(0)
        growth = (trace + (trace.square() + 4 * determinant).sqrt_()) / 2
        norms = (w.value**2 + growth.clamp_min_(0)).sqrt_()
        delta = delta2.sqrt_()
        if P.numel() * w.V.numel() * w.V.shape[0] <= _SMALL:
            norms = torch.minimum(norms, self._exact_blocks(w, v, o, delta))
        return delta, P * norms

    def _exact_blocks(self, w: HeadWeights, v: Tensor, o: Tensor, delta: Tensor) -> Tensor:
        """‖W_O W_V + s_ij W_O(v_j − o_i)a_iᵀ‖ for all pairs from the matrices themselves, when they are few and small."""
        a = self.q @ w.K.mT
        update = v[None] - o[:, None]
        if self.bent:
            update = update * (self.W / self.P.clamp_min(_TINY))[..., None]
        M = w.V + update[..., None] * a[:, None, None, :]
        return matrix_norm_upper(M, squarings=5) + self.margin * (w.value + delta * self.a[:, None])

    def covariance_norms(self, w: HeadWeights | None) -> tuple[Tensor, Tensor]:
        """‖B_i‖ and c_i seen through the weights of the head, or ‖C_i‖ and c_i in the head's own coordinates.

        B_i = W_O C_i τW_Q with C_i = Σ_j W_ij (v_j − o_i) k_jᵀ, and c_i = ‖Σ_j P_ij s_ij² (v_j − o_i)(v_j − o_i)ᵀ‖.
        """
        v, o = self._seen(w)
        k = self.k if w is None else self.k @ w.R_Q.mT
        n, r, m = v.shape[0], v.shape[1], k.shape[1]
        vk, vv = (v[:, :, None] * k[:, None, :]).flatten(1), (v[:, :, None] * v[:, None, :]).flatten(1)
        parts = []
        for rows in torch.arange(n, device=v.device).split(max(1, _SCRATCH // (r * max(r, m)))):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            Wi, oi = self.W[part], o[part]
            cross = (Wi @ vk).reshape(-1, r, m) - oi[:, :, None] * (Wi @ k)[:, None, :]
            U = Wi.square() / self.P[part].clamp_min(_TINY) if self.bent else Wi
            # Σ U(v−o)(v−o)ᵀ = Σ U v vᵀ − o(Uv − ½|U|o)ᵀ − (Uv − ½|U|o)oᵀ
            shifted = oi[:, :, None] * (U @ v - oi * U.sum(-1, keepdim=True) / 2)[:, None, :]
            own = (U @ vv).reshape(-1, r, r) - shifted - shifted.mT
            parts.append((matrix_norm_upper(cross), matrix_norm_upper(own, symmetric=True)))
        B, c = (torch.cat(norms) for norms in zip(*parts, strict=True))
        if self.missing is not None and not self.bent:
            # The sink is one more token, with value 0: it must be counted for the deviations to have mean zero.
            sink = o + (self.centre if w is None or w.R_O is None else self.centre @ w.R_O.mT)
            c = c + self.missing * sink.square().sum(-1)
        # Cancellation in a covariance is relative to the second moments it is the difference of.
        v_size, o_size, k_size = (float(torch.linalg.vector_norm(t, dim=-1).max()) for t in (v, o, k))
        v_size += o_size
        return B + self.margin * v_size * k_size, c + self.margin * v_size**2

    def rho(self, c: Tensor, w: HeadWeights) -> Tensor:
        """ρ_i: √(‖V‖² + c_i‖a_i‖²), or ‖V‖ + √c_i‖a_i‖ with a soft-cap, which breaks the orthogonality."""
        return w.value + c.sqrt() * self.a if self.bent else (w.value**2 + c * self.a.square()).sqrt()

    def _seen(self, w: HeadWeights | None) -> tuple[Tensor, Tensor]:
        """Values and outputs through W_O."""
        if w is None or w.R_O is None:
            return self.v, self.o
        return self.v @ w.R_O.mT, self.o @ w.R_O.mT
