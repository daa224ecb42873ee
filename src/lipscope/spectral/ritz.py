"""What the small bidiagonal matrices say: Ritz values, their error, and the polynomial upper bound."""

from __future__ import annotations

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float64).tiny
# The least exponent that is looked for, how far rounding may carry one, and enough steps for the slowest case.
_LEAST, _ROUNDING, _NEWTON_STEPS = -80.0, 1e-12, 100


class RitzPairs:
    """Singular values of the small bidiagonals, their vectors, and the residuals ‖Jᵀu − θv‖ = β_k·|last entry of x|."""

    def __init__(self, alpha: Tensor, beta: Tensor, k: int) -> None:
        left, values, right_t = torch.linalg.svd(bidiagonal(alpha, beta))
        self.k = k
        self.values: Tensor = values
        self.left, self.right = left, right_t.transpose(1, 2)
        self.residual: Tensor = beta[:, -1:] * left[:, -1, :].abs()

    def relative_error(self, rounding: float) -> Tensor:
        """Estimated relative error of the k leading values: the largest of min(r, r²/2gap)/θ over them."""
        k, values = self.k, self.values
        r, theta = self.residual[:, :k], values[:, :k]
        following = torch.nn.functional.pad(values, (0, 1))[:, 1 : k + 1]
        # With no further Ritz value nothing is known of the gap yet.
        gap = (theta - following) if values.shape[1] > k else torch.zeros_like(theta)
        # Of the symmetric form [[0, J], [Jᵀ, 0]] the unit vector (u, v)/√2 has residual r/√2: hence the factor ½.
        refined = r * (r / (2 * gap).clamp_min(_TINY))
        error = torch.minimum(r, refined) / theta.clamp_min(_TINY)
        negligible = r <= rounding * values[:, :1]
        return error.masked_fill(negligible, 0.0).amax(-1)


def bidiagonal(alpha: Tensor, beta: Tensor) -> Tensor:
    """Upper bidiagonal matrices (B, k, k) with diagonal alpha and superdiagonal beta (its last entry is not used)."""
    return torch.diag_embed(alpha) + torch.nn.functional.pad(torch.diag_embed(beta[:, :-1]), (1, 0, 0, 1))


def polynomial_upper_bound(alpha: Tensor, beta: Tensor, *, first: Tensor, overlap: Tensor, floor: Tensor) -> Tensor:
    """The root t ≥ θ₁² of ∏(t − θᵢ²) = ∏ αⱼβⱼ / overlap, as √t, over the recurrence that began at step ``first``.

    It bounds σ on the complement of what came before, when the start of that recurrence has at least this overlap with
    the top singular vector there.

    In x = log(t/θ₁² − 1) the logarithm of the left side is increasing and convex, so that Newton's iteration from a point
    beyond the root never falls below it: every iterate is a bound. Logarithms keep the products in range.

    Args:
        alpha: diagonals (B, k), float64.
        beta: superdiagonals (B, k); the last one leads to v_{k+1}.
        first: index of the first step of the current recurrence (B,); infinity is returned where it equals k.
        overlap: g(δ) of the current recurrence (B,).
        floor: norms below this are rounding, and count as this much (B,).

    Returns:
        Upper bounds (B,).
    """
    k = alpha.shape[1]
    position = torch.arange(k, device=alpha.device)
    current = position[None] >= first[:, None]
    count = current.sum(-1)
    # Steps before ``first`` are cut out; their zeros sort behind the values that count.
    values = torch.linalg.svdvals(bidiagonal(alpha * current, beta * current))
    scale = torch.maximum(values[:, :1], floor[:, None]).clamp_min(_TINY)
    counted = position[None] < count[:, None]
    roots = (values / scale).square()

    def log_over(entries: Tensor) -> Tensor:
        return torch.where(current, (torch.maximum(entries, floor[:, None]) / scale).clamp_min(_TINY).log(), 0.0).sum(-1)

    target = log_over(alpha) + log_over(beta) - overlap.log()
    # (t − 1)^count ≤ ∏(t − rootsᵢ), so this exponent lies beyond the root.
    high = (target / count.clamp_min(1)).clamp(min=_LEAST)
    gaps = (1 - roots).clamp_min(0)
    for _ in range(_NEWTON_STEPS):
        near = high.exp()[:, None]
        distance = near + gaps
        excess = torch.where(counted, distance.log(), 0.0).sum(-1) - target
        slope = torch.where(counted, near / distance, 0.0).sum(-1).clamp_min(_TINY)
        step = torch.minimum((excess / slope).clamp_min(0), high - _LEAST)
        high = high - step
        if not bool((step > _ROUNDING).any()):
            break
    upper = scale[:, 0] * (1 + (high + _ROUNDING).exp()).sqrt()
    upper = torch.where(alpha.amax(1) > 0, upper, torch.zeros_like(upper))
    return torch.where(count > 0, upper, torch.full_like(upper, torch.inf))
