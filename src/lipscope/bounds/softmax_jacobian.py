"""Bounds through the norm of the softmax Jacobian diag(p) − ppᵀ: Yudin et al. 2025, and a sharper form of theirs.

Its largest eigenvalue λ_max is the root in (p₍₂₎, p₍₁₎) of the secular equation Σ_i p_i²/(p_i − λ) = 1, and p₍₁₎ itself when
p₍₁₎ = p₍₂₎. Always

    λ_max ≤ g₁(p) = p₍₁₎(1 − p₍₁₎ + p₍₂₎) ≤ ½        (Yudin et al. 2025)

One head without biases: σ(X) ≤ ‖V‖( ‖P‖ + 2‖X‖²‖A‖ max_i g₁(P_i) ), since dS = dX AᵀXᵀ + X A dXᵀ up to transposes and each
row passes through diag(P_i) − P_iP_iᵀ. Two improvements are free: the exact eigenvalue instead of g₁, and, since
(diag(p) − ppᵀ)1 = 0, values and keys may be shifted by their means; the norms are then those of the projections themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.validation import balanced, times_power
from lipscope.bounds.blocks import Blocks
from lipscope.bounds.bound import OURS, Bound, bound
from lipscope.bounds.constants import Constants, HeadConstants
from lipscope.bounds.head_blocks import HeadBlocks
from lipscope.bounds.products import Products
from lipscope.bounds.spectral_upper import matrix_norm_upper, nonnegative_norms
from lipscope.bounds.weights import layer_weights, over_heads, spectral

_Heads: TypeAlias = Callable[[HeadBlocks, tuple[HeadConstants, ...], float], Tensor]
_SOURCE = "Yudin, Gaponov, Kudriashov, Rakhuba, Pay Attention to Attention Distribution, arXiv 2507.07814, 2025"


@bound("yudin2025.published", needs="x", without="rotary")
def yudin2025_published(layer: Attention, x: Tensor) -> Bound:
    """The bound ‖V‖‖P‖ + (‖V‖‖X‖ + √n b_V)(2‖X‖‖A‖ + √n(b_Q + b_K)) max_i g₁(P_i) at tokens x (n, d), any mask.

    Without biases it is ‖V‖(‖P‖ + 2‖X‖²‖A‖ max_i g₁(P_i)). Here b_Q = τ‖W_Kᵀb_Q‖, and b_K, b_V are zero unless there are
    sinks (b_K: or a soft-cap). ‖P‖ is replaced by a rigorous upper bound. Frobenius norms.
    """
    root = math.sqrt(x.shape[0])

    def heads(at: HeadBlocks, constants: tuple[HeadConstants, ...], size: float) -> Tensor:
        columns = [(c.value, c.value_bias, c.interaction, c.query_bias + c.key_bias) for c in constants]
        value, value_bias, interaction, biases = at.o.new_tensor(columns).T
        scores = 2 * size * interaction + root * biases
        slopes = g1(at.strip.P).amax(-1)
        found: Tensor = value * nonnegative_norms(at.strip.P)[0] + (value * size + root * value_bias) * scores * slopes
        return found

    return _joined("published", _SOURCE, layer, x, heads)


@bound("yudin2025.improved", needs="x")
def yudin2025_improved(layer: Attention, x: Tensor) -> Bound:
    """The bound ‖V‖‖P‖ + ‖W_O(V − mean)‖(‖τ(K − mean)W_Q‖ + ‖τQW_K‖) max_i λ_max(diag(P_i) − P_iP_iᵀ) at tokens x (n, d).

    Never larger than ``yudin2025.published``. With rotary embeddings the norms of scores are the largest ‖τK R_iW_Q‖ and ‖τQ
    R_jW_K‖ over tokens. The means are subtracted where a shift does not matter (not with sinks; keys not with a
    soft-cap). Any mask, Frobenius norms. Ours.
    """

    def heads(at: HeadBlocks, constants: tuple[HeadConstants, ...], size: float) -> Tensor:
        strip = at.strip
        v = at.v if strip.sink_share is None else at.through(strip.v + at.at.centre)
        # A matrix of n rows is off by √n times the error of one.
        root = math.sqrt(at.at.n)
        values = torch.linalg.matrix_norm(v, 2) + root * at.value_error.expand_as(at.o[..., :1]).amax((1, 2))
        errors = (2 * at.unit * at.key * at.sizes[0] + at.gradient_error)[:, 0, 0]
        scores = _projected_norms(at.at, strip.k, at.stacked("R_Q")) + _projected_norms(at.at, strip.q, at.stacked("R_K"))
        value = v.new_tensor([c.value for c in constants])
        slopes = largest_eigenvalue(strip.P).amax(-1)
        found: Tensor = value * nonnegative_norms(strip.P)[0] + values * (scores + root * errors) * slopes
        return found

    return _joined("improved", f"{OURS}, after {_SOURCE}", layer, x, heads)


def _projected_norms(at: Blocks, t: Tensor, M: Tensor) -> Tensor:
    """‖t Mᵀ‖ of every head, or the largest ‖t R_j Mᵀ‖ over tokens with rotary embeddings."""
    if at.rotation is None:
        norms: Tensor = torch.linalg.matrix_norm(t @ M.mT, 2)
        return norms
    rotated = at.rotation.unsqueeze().apply(M[:, None].expand(-1, at.n, -1, -1))
    return matrix_norm_upper(rotated @ (t.mT @ t)[:, None] @ rotated.mT, symmetric=True).amax(-1).sqrt()


def _joined(name: str, reference: str, layer: Attention, x: Tensor, heads: _Heads) -> Bound:
    """The heads joined, rounded up by the margin of the probabilities; infinite where these have no digits."""
    layer, x, _, power = balanced(layer, x.detach().double())
    constants, size, precise = Constants.of(layer, x.shape[0]), spectral(x), layer.to(torch.float64)
    with torch.no_grad():
        at = Blocks(precise, x, products=Products(precise, layer_weights(layer)), height=len(x))
        (strip,) = at.strips()
        sides = (at.weights.plain, constants.plain), (at.weights.image, constants.image)
        plain, image = (heads(HeadBlocks(strip, w), c, size).tolist() for w, c in sides)
    value = over_heads(plain, at.weights.out, image) * (1 + 4 * at.margin) + at.underflow if at.margin < 0.1 else math.inf
    value = float(times_power(torch.tensor(value, dtype=torch.float64), power, outwards=1))
    return Bound(f"yudin2025.{name}", value, "local", "this input; any mask", reference, {"n": x.shape[0]})


def g1(p: Tensor) -> Tensor:
    """The closed bound g₁(p) = p₍₁₎(1 − p₍₁₎ + p₍₂₎) for rows of probabilities (…, n); p₍₂₎ = 0 when n = 1.

    It holds for rows that sum to less than one as well (sinks, hidden rows).

    Example:
        >>> import torch
        >>> g1(torch.tensor([0.5, 0.5]))
        tensor(0.5000)
    """
    first, second = _two_largest(p)
    return first * (1 - first + second)


def largest_eigenvalue(p: Tensor, iterations: int = 64) -> Tensor:
    """The eigenvalue λ_max(diag(p) − ppᵀ) for rows p ≥ 0 with sum at most one, by bisection of the secular equation.

    The function f(λ) = 1 − Σ p_i²/(p_i − λ) changes sign once in (p₍₂₎, p₍₁₎): it tends to −∞ at p₍₁₎ and +∞ at p₍₂₎. The
    upper end of the last bracket is returned, so that the value is an upper bound to the last bit of the bisection.
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
