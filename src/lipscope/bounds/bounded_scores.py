"""Softmax attention on bounded features: L2, scaled-cosine and QK-normalised attention. Ours; proof in docs/theory.

One head, o_i = Σ_j P_ij ṽ_j with scores s_ij of token-wise features, on a set of tokens where

    λ ≥ ‖Dṽ_j‖    ν ≥ ‖ṽ_j‖    α ≥ ‖∂s_ij/∂x_j‖    β ≥ ‖∂s_ij/∂x_i‖    scores of one row differ by at most 2h

gives σ ≤ (λ + να)·√κ + νβ, κ = max_j Σ_{i sees j} 1/(1 + (m_i − 1)e^{−2h}), m_i the number of keys row i sees. It is the
row–column certificate: a row of P has entries of at most 1/(1 + (m_i − 1)e^{−2h}), so κ bounds the column sums of P.

    L2          λ = ‖V‖, ν = ‖V‖R, V = W_O W_V A      α = 4t‖W_Q‖²R    β = 2t‖W_Q‖²R    h = 2t‖W_Q‖²R²
    cosine      λ = ν'‖W_O‖‖W_V‖ε^{−½}, ν = ν'‖W_O‖   α = τ‖W_K‖ε^{−½}    β = τ‖W_Q‖ε^{−½}    h = τ     (no radius)
    QK-norm     λ = ‖W_O W_V‖, ν = ‖W_O W_V‖R         α, β, h as for cosine
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.attention.variants import CosineAttention, L2Attention, QKNormAttention, Variant
from lipscope.bounds.bound import OURS, Bound


@dataclass(frozen=True)
class Limits:
    """What the features of one head can do on a set of tokens; the letters are those of the module."""

    lam: float
    nu: float
    alpha: float
    beta: float
    half_range: float

    def bound(self, column: float) -> float:
        """(λ + να)√κ + νβ."""
        return (self.lam + self.nu * self.alpha) * math.sqrt(column) + self.nu * self.beta


def softmax(layer: Variant, radius: float, n: int) -> Bound:
    """(λ + να)√κ + νβ summed over heads, or ‖W_O‖ times the root of squares without W_O, whichever is less.

    Frobenius norms, any mask. For scaled-cosine attention it does not depend on the radius: it holds on the whole space.
    Without a mask κ ≤ min(n, e^{2h}), so for cosine and QK-normalised attention it is bounded in n. Ours.

    Args:
        layer: an L2, cosine or QK-normalised layer.
        radius: R, the largest norm of a token.
        n: number of tokens.

    Returns:
        A set bound.

    Raises:
        TypeError: when the layer is of another kind.

    Example:
        >>> import torch
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> layer = CosineAttention(q=W, k=W, v=W, tau=1.0, eps=1.0)
        >>> softmax(layer, 1.0, 10**6).value == softmax(layer, 1e9, 10**6).value <= 2 * 2.7183 + 1
        True
    """
    plain = image = 0.0
    for h in range(layer.heads):
        for out in dict.fromkeys((None, head_out(layer, h))):
            limits = _limits(layer, h, out, radius)
            value = limits.bound(column_sum(layer, n, limits.half_range, h))
            if out is None:
                plain = math.hypot(plain, value)
            else:
                image += value
    value = plain if layer.out is None else min(image, spectral(layer.out) * plain)
    where = "all tokens" if isinstance(layer, CosineAttention) else f"tokens of norm ≤ {radius:g}"
    holds_for = f"{layer.kind} attention, {where}, n = {n}, mask {layer.mask}"
    return Bound("bounded_scores.softmax", value, "set", holds_for, OURS, {"R": radius, "n": n})


def column_sum(layer: Variant, n: int, half_range: float, head: int = 0) -> float:
    """κ, from the mask and the range of the scores."""
    q = math.exp(-2 * min(half_range, 300.0))
    seen = layer.visible(n)
    if seen is None:
        return n / (1 + (n - 1) * q)
    seen = seen[:, head if seen.shape[1] > 1 else 0]
    share = 1 / (1 + (seen.sum(-1, keepdim=True).double() - 1) * q)
    return float((seen * share).sum(-2).max())


def head_out(layer: Variant, head: int) -> Tensor | None:
    """The block of W_O that belongs to a head, float64; None without W_O."""
    if layer.out is None:
        return None
    return layer.out.detach().double().chunk(layer.heads, dim=1)[head]


def spectral(M: Tensor) -> float:
    """‖M‖₂ in float64, rounded up by a relative 1e-12."""
    return float(torch.linalg.matrix_norm(M.detach().double(), 2)) * (1 + 1e-12)


def _limits(layer: Variant, head: int, out: Tensor | None, radius: float) -> Limits:
    def block(M: Tensor) -> Tensor:
        return M.detach().double().chunk(layer.heads)[head]

    through = 1.0 if out is None else spectral(out)
    query = spectral(block(layer.q))
    if isinstance(layer, L2Attention):
        value = block(layer.value_weights())
        size, sharp = spectral(value if out is None else out @ value), layer.t * query**2
        return Limits(size, size * radius, 4 * sharp * radius, 2 * sharp * radius, 2 * sharp * radius**2)
    if isinstance(layer, CosineAttention):
        root, tau = layer.eps**-0.5, layer.tau
        lam, nu = layer.nu * through * spectral(block(layer.v)) * root, layer.nu * through
    elif isinstance(layer, QKNormAttention):
        root, tau = layer.eps**-0.5, layer.cosine_scale
        lam = spectral(block(layer.v) if out is None else out @ block(layer.v))
        nu = lam * radius
    else:
        raise TypeError(f"layer must be an L2, cosine or QK-normalised layer, got {layer.kind}")
    return Limits(lam, nu, tau * spectral(block(layer.k)) * root, tau * query * root, tau)
