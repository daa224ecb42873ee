"""Certificates of a layer with several heads: block norms, row–column, and the factored form.

J = W_O · diag_h(J_h) · [τW_Q; W_K; W_V], so J is the sum of a mean part, a key part and a query part, σ ≤ mean + key +
query:

    mean   ≤ min( ‖W_O‖‖W_V‖ max_h ‖P^h‖,  ‖P̄‖‖W_OW_V‖ + ‖W_O‖‖W_V‖ max_h ‖P^h − P̄‖ ),   P̄ the mean over the heads
    key²   ≤ max_j ‖Σ_h W_K^hᵀ R_jᵀ( Σ_i κ_i P_ij^h q_i^h q_i^hᵀ )R_j W_K^h‖,    κ_i = ‖Σ_h W_O^h Cov_i^h W_O^hᵀ‖
    query  ≤ max_i ‖Σ_h W_O^h C_i^h R_i τW_Q^h‖

with Cov_i the covariance of the values under row i and C_i that of values and keys (W²/P and W in place of P with a
soft-cap), and R the rotations of rotary embeddings. The sums over heads are bounded by ``head_sum``. Two passes over
the heads, so that no more than a fixed number of n×n matrices is ever held. Ours; proofs in docs/theory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds.head_core import HeadCore
from lipscope.bounds.head_sum import factor, factor_pair, product_norms, quadratic_norms
from lipscope.bounds.spectral_upper import matrix_norm_upper, nonnegative_norm
from lipscope.bounds.weights import HeadWeights, LayerWeights

# heads·n·d_head³ up to which covariances are also taken through W_O.
CHEAP = 1 << 25
# heads·n² up to which the heads are kept for the second pass instead of being evaluated again.
_FEW = 1 << 21


def several_heads(layer: Attention, x: Tensor, weights: LayerWeights, gain: Tensor) -> tuple[dict[str, float], float]:
    """Every certificate of a layer in float64 at tokens x (n, d), and the margin they are to be enlarged by."""
    totals = _Totals(x, gain, images=layer.heads * x.shape[0] * layer.head_width**3 <= CHEAP)
    singles = [layer.head(h) for h in range(layer.heads)]
    cores: list[HeadCore] = []
    few = layer.heads * x.shape[0] ** 2 <= _FEW
    for single, w in zip(singles, weights.image, strict=True):
        core = HeadCore.at(single, x, w)
        totals.add(core, w)
        if few:
            cores.append(core)
    kappa = quadratic_norms(weights.gram_out, weights.out, torch.stack(totals.F), torch.stack(totals.F_rest))
    keys = _Keys(gain, kappa, totals.P_sum / layer.heads)
    for h, w in enumerate(weights.image):
        keys.add(cores[h] if few else HeadCore.at(singles[h], x, w))
    return totals.certificates(weights, keys), totals.margin


class _Totals:
    """First pass: sums and maxima over the heads, and the factors of their covariances."""

    def __init__(self, x: Tensor, gain: Tensor, images: bool) -> None:
        n = x.shape[0]
        self.gain, self.images = gain, images
        self.blocks, self.means, self.spreads, self.most, self.weighted, self.P_sum = (x.new_zeros(n, n) for _ in range(6))
        self.least = x.new_ones(n, n)
        self.B, self.rho = x.new_zeros(n), x.new_zeros(n)
        self.row_column = self.margin = 0.0
        self.U: list[Tensor] = []
        self.Z: list[Tensor] = []
        self.C_rest: list[Tensor] = []
        self.F: list[Tensor] = []
        self.F_rest: list[Tensor] = []

    def add(self, core: HeadCore, w: HeadWeights) -> None:
        P = core.P
        self.margin = max(self.margin, core.margin)
        delta, block = core.block_norms(w)
        self.blocks += block
        self.means.add_(P, alpha=w.value)
        self.spreads += delta.mul_(core.W).mul_(core.a)
        self.P_sum += P
        torch.minimum(self.least, P, out=self.least)
        torch.maximum(self.most, P, out=self.most)

        factors = covariance_factors(core)
        for into, tensor in zip((self.U, self.Z, self.C_rest, self.F, self.F_rest), factors, strict=True):
            into.append(tensor)
        if self.images:
            B, c = core.covariance_norms(w)
            self.B += B
        else:
            c = head_covariance(core, w, self.F[-1], self.F_rest[-1])
        rho = core.rho(c, w)
        self.row_column += math.sqrt(float((rho.square() @ P * self.gain.square()).max()))
        self.weighted.addcmul_(rho[:, None], P)
        self.rho += rho

    def certificates(self, weights: LayerWeights, keys: _Keys) -> dict[str, float]:
        gain = self.gain
        both = weights.out * weights.values
        mean = _least_mean(self.means, self.least, self.most, weights)
        B = product_norms(
            weights.gram_out, weights.gram_query, (weights.out, weights.queries),
            torch.stack(self.U), torch.stack(self.Z), torch.stack(self.C_rest),
        )  # fmt: skip
        B = (torch.minimum(B, self.B) if self.images else B) * gain
        N = torch.minimum(self.blocks, mean + self.spreads) * gain + torch.diag(B)
        means = min(
            nonnegative_norm(mean * gain),
            both * keys.largest,
            nonnegative_norm(keys.P_mean * gain) * weights.total + both * keys.deviation,
        )
        # Cauchy–Schwarz over the heads with weights ρ: (Σ_h ρ_h e_h)² ≤ (Σ_h ρ_h)(Σ_h ρ_h e_h²).
        together = math.sqrt(float((self.rho @ self.weighted * gain.square()).max()))
        return {
            "block_norm": nonnegative_norm(N),
            "row_column": min(self.row_column, together) + float(B.max()),
            "factored": means + keys.bound(weights) + float(B.max()),
        }


def covariance_factors(core: HeadCore) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """U, Z with UZᵀ ≈ C_i and what is missing, F with FFᵀ ≈ Cov_i and what is missing, in the head's own coordinates."""
    parts = [(*factor_pair(cross), *factor(own)) for _, cross, own in core.moments(None)]
    U, Z, C_rest, F, F_rest = (torch.cat(each) for each in zip(*parts, strict=True))
    C_slack, F_slack = core.moment_slack(None)
    return U, Z, C_rest + C_slack, F, F_rest + F_slack


def head_covariance(core: HeadCore, w: HeadWeights, F: Tensor, rest: Tensor) -> Tensor:
    """c_i through W_O by way of ‖W_O‖, from the factors of the covariances."""
    c = matrix_norm_upper(F.mT @ F, symmetric=True) + rest
    if core.missing is not None and not core.bent:
        c = c + core.missing * (core.o + core.centre).square().sum(-1)
    return w.out**2 * c


def mean_blocks(P: Sequence[Tensor], weights: LayerWeights) -> Tensor:
    """≥ ‖Σ_h P_ij^h V_h‖: by the triangle inequality, by what all heads share, and through ‖W_O‖‖W_V‖."""
    means = sum((p * w.value for p, w in zip(P[1:], weights.image[1:], strict=True)), P[0] * weights.image[0].value)
    least, most = P[0], P[0]
    for p in P[1:]:
        least, most = torch.minimum(least, p), torch.maximum(most, p)
    return _least_mean(means, least, most, weights)


def _least_mean(means: Tensor, least: Tensor, most: Tensor, weights: LayerWeights) -> Tensor:
    shared = means + least * (weights.total - sum(w.value for w in weights.image))
    return torch.minimum(torch.minimum(means, shared), weights.out * weights.values * most)


class _Keys:
    """Second pass: what needs all heads to have been seen."""

    def __init__(self, gain: Tensor, kappa: Tensor, P_mean: Tensor) -> None:
        self.gain, self.kappa, self.P_mean = gain, kappa, P_mean
        self.F: list[Tensor] = []
        self.rest: list[Tensor] = []
        self.largest = self.deviation = 0.0

    def add(self, core: HeadCore) -> None:
        P, q = core.P, core.q
        n, dk = q.shape
        self.largest = max(self.largest, nonnegative_norm(P * self.gain))
        self.deviation = max(self.deviation, nonnegative_norm((P - self.P_mean).abs() * self.gain))
        weights = (P * self.kappa[:, None]).mT
        outer = (q[:, :, None] * q[:, None, :]).flatten(1)
        parts = []
        step = max(1, (1 << 23) // dk**2)
        for start in range(0, n, step):
            part = slice(start, min(n, start + step))
            Q = (weights[part] @ outer).reshape(-1, dk, dk)
            Q = core.query_images(core.query_images(Q, part).mT, part)
            F, rest = factor(Q)
            parts.append((F, rest + core.margin * Q.diagonal(dim1=-2, dim2=-1).sum(-1)))
        F, rest = (torch.cat(each) for each in zip(*parts, strict=True))
        self.F.append(F)
        self.rest.append(rest)

    def bound(self, weights: LayerWeights) -> float:
        """The key part."""
        norms = quadratic_norms(weights.gram_key, weights.keys, torch.stack(self.F), torch.stack(self.rest))
        return math.sqrt(float((norms * self.gain.square()).max()))
