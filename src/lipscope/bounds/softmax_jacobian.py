"""The softmax Jacobian diag(p) − ppᵀ: its largest eigenvalue exactly, and the closed bound g₁.

λ_max is the root in (p₍₂₎, p₍₁₎) of the secular equation Σ_i p_i²/(p_i − λ) = 1, and p₍₁₎ itself when p₍₁₎ = p₍₂₎. Always

    λ_max ≤ g₁(p) = p₍₁₎(1 − p₍₁₎ + p₍₂₎) ≤ ½        (Yudin et al. 2025)
"""

from __future__ import annotations

import torch
from torch import Tensor


def g1(p: Tensor) -> Tensor:
    """g₁(p) = p₍₁₎(1 − p₍₁₎ + p₍₂₎) for rows of probabilities (…, n); p₍₂₎ = 0 when n = 1.

    It holds for rows that sum to less than one as well (sinks, hidden rows).

    Example:
        >>> import torch
        >>> g1(torch.tensor([0.5, 0.5]))
        tensor(0.5000)
    """
    first, second = _two_largest(p)
    return first * (1 - first + second)


def largest_eigenvalue(p: Tensor, iterations: int = 64) -> Tensor:
    """λ_max(diag(p) − ppᵀ) for rows p ≥ 0 with sum at most one, shape (…, n), by bisection of the secular equation.

    f(λ) = 1 − Σ p_i²/(p_i − λ) changes sign once in (p₍₂₎, p₍₁₎): it tends to −∞ at p₍₁₎ and +∞ at p₍₂₎. The upper end
    of the last bracket is returned, so that the value is an upper bound to the last bit of the bisection.

    Args:
        p: probabilities (…, n).
        iterations: bisection steps.

    Returns:
        Eigenvalues (…), float64.
    """
    p = p.double()
    first, second = _two_largest(p)
    # With a top value of multiplicity m, m − 1 eigenvalues equal it.
    low, high = second.clone(), first.clone()
    top = p == first[..., None]
    rest = torch.where(top, torch.zeros_like(p), p)
    for _ in range(iterations):
        middle = (low + high) / 2
        gap = rest - middle[..., None]
        terms = torch.where(rest > 0, rest.square() / torch.where(gap == 0, -torch.full_like(gap, 1e-300), gap), 0.0)
        top_term = first.square() / (first - middle).clamp_min(1e-300)
        above = 1 - terms.sum(-1) - top_term > 0
        # f > 0 to the left of the root.
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return torch.where(first == second, first, high)


def _two_largest(p: Tensor) -> tuple[Tensor, Tensor]:
    values = p.topk(min(2, p.shape[-1]), dim=-1).values
    return values[..., 0], values[..., 1] if p.shape[-1] > 1 else torch.zeros_like(values[..., 0])
