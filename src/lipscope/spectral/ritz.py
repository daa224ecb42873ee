"""What the small matrices of a recurrence say: Ritz values, their error, and the polynomial upper bound.

They come in two forms. Two-sided recurrences give a bidiagonal matrix with diagonal α and superdiagonal β. One-sided ones
give the gains αⱼ = ‖J vⱼ‖ and the lengths βⱼ of what Jᵀ leads out of the space, from which VᵀJᵀJV is tridiagonal with
diagonal αⱼ² and off-diagonal αⱼβⱼ. In both, αⱼβⱼ are the factors by which the polynomial of v_{k+1} is divided.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TINY, _LARGEST_SHARE = torch.finfo(torch.float64).tiny, 1e100
# The least exponent that is looked for, how far rounding may carry one, and enough steps for the slowest case.
_LEAST_EXPONENT, _ROUNDING, _NEWTON_STEPS = -80.0, 1e-12, 100


class RitzPairs:
    """Singular values in the space of a recurrence, their vectors over its bases, and the residuals ‖Jᵀu − θv‖.

    The last entry of ``beta`` (B, k) leads out of the space; of a one-sided recurrence there are no left vectors.
    """

    def __init__(self, alpha: Tensor, beta: Tensor, k: int, *, one_sided: bool = False) -> None:
        self.k = k
        self.values: Tensor
        self.left: Tensor | None = None
        if one_sided:
            scale = _scale(alpha)
            squares, vectors = torch.linalg.eigh(gram(alpha / scale, beta / scale))
            self.values = scale * squares.flip(-1).clamp_min(0).sqrt()
            self.right = vectors.flip(-1)
            # JᵀJv − θ²v has the length αβ·|last entry|, and u is J·v over θ.
            share = (alpha[:, -1:] / self.values.clamp_min(_TINY)).clamp_max(_LARGEST_SHARE)
            self.residual: Tensor = beta[:, -1:] * share * self.right[:, -1, :].abs()
        else:
            self.left, self.values, right_t = svd(bidiagonal(alpha, beta))
            self.right = right_t.transpose(1, 2)
            self.residual = beta[:, -1:] * self.left[:, -1, :].abs()

    def relative_error(self, rounding: Tensor) -> Tensor:
        """Estimated relative error of the k leading values: the largest of min(r, r²/2gap)/θ over them."""
        k, values = self.k, self.values
        r, theta = self.residual[:, :k], values[:, :k]
        following = torch.nn.functional.pad(values, (0, 1))[:, 1 : k + 1]
        # With no further Ritz value nothing is known of the gap yet.
        gap = (theta - following) if values.shape[1] > k else torch.zeros_like(theta)
        # Of the symmetric form [[0, J], [Jᵀ, 0]] the unit vector (u, v)/√2 has residual r/√2: hence the factor ½.
        refined = r * (r / (2 * gap).clamp_min(_TINY))
        error = torch.minimum(r, refined) / theta.clamp_min(_TINY)
        negligible = r <= rounding[:, None] * values[:, :1]
        return error.masked_fill(negligible, 0.0).amax(-1)


def svd(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thin SVDs U (B, M, r), the values (B, r) and Vᵀ (B, r, N), r = min(M, N)."""
    try:
        return tuple(torch.linalg.svd(matrices, full_matrices=False))
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # The divide-and-conquer driver fails on some matrices with many equal singular values; the slower one does not.
        from scipy.linalg import svd as gesvd

        parts = [gesvd(matrix.cpu().numpy(), full_matrices=False, lapack_driver="gesvd") for matrix in matrices]
        left, values, right = (
            torch.stack([torch.from_numpy(array).to(matrices) for array in arrays]) for arrays in zip(*parts, strict=True)
        )
        return left, values, right


def bidiagonal(alpha: Tensor, beta: Tensor) -> Tensor:
    """Upper bidiagonal matrices (B, k, k) with diagonal alpha and superdiagonal beta (its last entry is not used)."""
    return torch.diag_embed(alpha) + torch.nn.functional.pad(torch.diag_embed(beta[:, :-1]), (1, 0, 0, 1))


def gram(alpha: Tensor, beta: Tensor) -> Tensor:
    """Tridiagonal matrices (B, k, k) with diagonal α² and off-diagonal αβ (the last β is not used)."""
    off = torch.nn.functional.pad(torch.diag_embed((alpha * beta)[:, :-1]), (1, 0, 0, 1))
    return torch.diag_embed(alpha.square()) + off + off.mT


def _scale(alpha: Tensor) -> Tensor:
    """The largest gain (B, 1), by which a matrix is divided before it is squared."""
    return alpha.amax(1, keepdim=True).clamp_min(_TINY)


def polynomial_upper_bound(
    values: Tensor, alpha: Tensor, beta: Tensor, *, log_overlap: Tensor, floor: Tensor, one_sided: bool = False
) -> Tensor:
    """The root t ≥ θ₁² of ∏(t − θᵢ²) = ∏ αⱼβⱼ / g, as √t, over all recurrences so far.

    It bounds σ when the product of the overlaps that their starts have with the top singular vector is at least g.

    In x = log(t/θ₁² − 1) the logarithm of the left side is increasing and convex, so that Newton's iteration from a point
    beyond the root never falls below it: every iterate is a bound. Logarithms keep the products in range.

    Args:
        values: Ritz values θ (B, k), largest first; float64.
        alpha: diagonals (B, k), or gains.
        beta: superdiagonals (B, k), or lengths; the last one leads to v_{k+1}.
        log_overlap: log g (B,).
        floor: norms below this are rounding, and count as this much (B,).
        one_sided: which form it is.
    """
    scale = torch.maximum(values[:, :1], floor[:, None]).clamp_min(_TINY)
    a, b, least = alpha / scale, beta / scale, floor[:, None] / scale
    # The rounding of JᵀJ, and that of J. Where J·v is nothing but rounding, Jᵀ of it is not known: its gain is at most √t.
    lost = (a <= least) & (not one_sided)
    factors = torch.maximum(a * b, least) if one_sided else torch.maximum(a, least) * torch.maximum(b, least)
    factors = torch.where(lost, least, factors)
    target = factors.clamp_min(_TINY).log().sum(-1) - log_overlap
    # Every such step has a Ritz value 0 and, divided by √t, counts half. (t − 1)^count ≤ ∏(t − rootsᵢ): beyond the root.
    half = 0.5 * lost.sum(-1)
    high = (target / (alpha.shape[1] - half)).clamp(min=_LEAST_EXPONENT)
    gaps = (1 - (values / scale).square()).clamp_min(0)
    for _ in range(_NEWTON_STEPS):
        near = high.exp()[:, None]
        distance = near + gaps
        excess = distance.log().sum(-1) - half * near[:, 0].log1p() - target
        slope = ((near / distance).sum(-1) - half * near[:, 0] / (1 + near[:, 0])).clamp_min(_TINY)
        step = torch.minimum((excess / slope).clamp_min(0), high - _LEAST_EXPONENT)
        high = high - step
        if not bool((step > _ROUNDING).any()):
            break
    upper = scale[:, 0] * (1 + (high + _ROUNDING).exp()).sqrt()
    return torch.where(alpha.amax(1) > 0, upper, torch.zeros_like(upper))
