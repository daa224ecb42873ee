"""Sigmoid attention: the bound of Ramapuram et al. (2024) at one input, and the same on a ball.

With P_ij = sigmoid(s_ij), σ_∞ = n·sup sigmoid and σ'_∞ = n·sup sigmoid' over the scores, A = τW_KᵀW_Q:

    σ ≤ ‖V‖( σ_∞ + 2σ'_∞‖A‖·(1/n)Σ_i|x_i|² )

since ‖P‖ ≤ n·max P, and ‖(sigmoid'∘dS)XVᵀ‖_F ≤ sup sigmoid'·‖dS‖_F‖X‖‖V‖ with ‖dS‖_F ≤ 2‖A‖‖X‖·‖ε‖_F. On a ball the
scores lie within b ± ‖A‖R²; with b = −log n, σ_∞ and σ'_∞ are at most e^{‖A‖R²}, whatever n.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lipscope.attention.variants import SigmoidAttention
from lipscope.bounds.bound import Bound
from lipscope.bounds.weights import HeadWeights, layer_weights

_SOURCE = "Ramapuram et al., Theory, Analysis, and Best Practices for Sigmoid Self-Attention, ICLR 2025, as restated here"


def local(layer: SigmoidAttention, x: Tensor) -> Bound:
    """‖V‖(σ_∞ + 2σ'_∞‖A‖·(1/n)Σ_i|x_i|²) at tokens x (n, d), heads summed; any mask, Frobenius norms.

    Args:
        layer: the layer.
        x: tokens (n, d).

    Returns:
        A local bound.
    """
    X = x.detach().double()
    n = X.shape[0]
    precise = layer.to(torch.float64)
    with torch.no_grad():
        q, k, _ = (feature.value for feature in precise.features(X[None]))
        P = precise.weights(q @ k.mT)[0]
    highest = n * P.amax((-1, -2)) * (1 + 1e-12)
    steepest = n * (P * (1 - P)).amax((-1, -2)) * (1 + 1e-12)
    moment = float(X.square().sum() / n)

    def head(h: int, w: HeadWeights) -> float:
        return w.value * (float(highest[h]) + 2 * float(steepest[h]) * w.interaction * moment)

    holds_for = "sigmoid attention, this input; any mask"
    return Bound("ramapuram2024.local", _over_heads(layer, head), "local", holds_for, _SOURCE, {"n": n})


def ball(layer: SigmoidAttention, radius: float, n: int) -> Bound:
    """‖V‖(σ_∞ + 2σ'_∞‖A‖R²) with the suprema over scores within b ± ‖A‖R²; any mask, Frobenius norms.

    Args:
        layer: the layer.
        radius: R.
        n: number of tokens.

    Returns:
        A set bound.
    """
    shift = layer.shift_at(n)

    def head(h: int, w: HeadWeights) -> float:
        a = w.interaction * radius**2
        # The slope of the sigmoid is largest at 0, and falls to both sides.
        nearest = min(max(0.0, shift - a), shift + a)
        return w.value * n * (_sigmoid(shift + a) + 2 * _slope(nearest) * a)

    return Bound("ramapuram2024.ball", _over_heads(layer, head), "set",
                 f"sigmoid attention, tokens of norm ≤ {radius:g}, n = {n}, any mask", _SOURCE,
                 {"R": radius, "n": n, "shift": shift})  # fmt: skip


def _over_heads(layer: SigmoidAttention, head: Callable[[int, HeadWeights], float]) -> float:
    """min(Σ_h with W_O inside, ‖W_O‖·root of squares)."""
    weights = layer_weights(layer.scaled)
    total = sum(head(h, w) for h, w in enumerate(weights.image))
    return min(total, weights.out * math.hypot(*(head(h, w) for h, w in enumerate(weights.plain))))


def _sigmoid(s: float) -> float:
    return 1 / (1 + math.exp(-s)) if s > -700 else 0.0


def _slope(s: float) -> float:
    return _sigmoid(s) * _sigmoid(-s)
