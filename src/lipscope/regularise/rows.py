"""Penalties on attention rows and logits, which bounds of σ are made of.

    g_k(p) = p₍ₖ₎(1 − p₍ₖ₎ + p₍ₖ₊₁₎)        JaSMin_0 = max_i log g₁(P_i)        JaSMin_k = max_i log(g₁(P_i)/g_k(P_i))

g₁ bounds the norm of the softmax Jacobian diag(p) − ppᵀ; Yudin et al. 2025 (arXiv 2507.07814) minimise it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def g_k(p: Tensor, k: int = 1) -> Tensor:
    """The number p₍ₖ₎(1 − p₍ₖ₎ + p₍ₖ₊₁₎) for rows of probabilities (…, n); values beyond the n-th count as 0.

    Example:
        >>> import torch
        >>> g_k(torch.tensor([0.5, 0.3, 0.2]), 2)
        tensor(0.2700)
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    largest = p.topk(min(k + 1, p.shape[-1]), dim=-1).values
    largest = torch.nn.functional.pad(largest, (0, k + 1 - largest.shape[-1]))
    here, following = largest[..., k - 1], largest[..., k]
    return here * (1 - here + following)


def jasmin(P: Tensor, k: int = 0) -> Tensor:
    """JaSMin of attention weights P (…, n, n): mean over heads and inputs of max_i log g₁(P_i), or log(g₁/g_k) for k > 0.

    Rows in which g is 0 have a vanishing softmax Jacobian (they see one key only) and are left out, as are rows that see
    fewer than k keys.

    Args:
        P: probabilities; rows may be hidden (all zero).
        k: 0, or the k of g₁/g_k, at least 2.

    Returns:
        A scalar; 0 when no row of any head is left.

    Example:
        >>> import torch
        >>> jasmin(torch.tensor([[0.5, 0.5], [0.9, 0.1]]))          # max(log 0.5, log 0.18)
        tensor(-0.6931)
    """
    if k < 0 or k == 1:
        raise ValueError(f"k must be 0 or at least 2 (g₁/g₁ is constant), got {k}")
    floor = torch.finfo(P.dtype).tiny
    first = g_k(P)
    counts = first > floor
    value = first.clamp_min(floor).log()
    if k:
        other = g_k(P, k)
        counts = counts & (other > floor)
        value = value - other.clamp_min(floor).log()
    worst = value.masked_fill(~counts, float("-inf")).amax(-1)
    known = counts.any(-1)
    if not bool(known.any()):
        return P.new_zeros(())
    return worst[known].mean()


def max_logit(scores: Tensor, visible: Tensor | None = None, *, limit: float = 0.0) -> Tensor:
    """Mean over heads and inputs of max(0, max_ij |s_ij| − limit)², over visible pairs.

    Args:
        scores: logits (B, H, n, n), with their scale, before a mask.
        visible: True where query i sees key j, broadcastable; None for everywhere.
        limit: logits up to this cost nothing.

    Returns:
        A scalar.
    """
    if limit < 0:
        raise ValueError(f"limit must not be negative, got {limit:g}")
    sizes = scores.abs()
    if visible is not None:
        sizes = sizes.masked_fill(~visible, 0.0)
    return (sizes.amax((-1, -2)) - limit).clamp_min(0).square().mean()
