"""A local bound through the norm of the softmax Jacobian, after Yudin et al. 2025, and a sharper form of it.

One head without biases: σ(X) ≤ ‖V‖( ‖P‖ + 2‖X‖²‖A‖ max_i g₁(P_i) ), since dS = dX AᵀXᵀ + X A dXᵀ up to transposes and each
row passes through diag(P_i) − P_iP_iᵀ. Two improvements are free: the exact eigenvalue instead of g₁, and, since
(diag(p) − ppᵀ)1 = 0, values and keys may be shifted by their means; the norms are then those of the projections themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds.bound import OURS, Bound
from lipscope.bounds.constants import Constants, HeadConstants
from lipscope.bounds.head_core import HeadCore
from lipscope.bounds.softmax_jacobian import g1, largest_eigenvalue
from lipscope.bounds.spectral_upper import nonnegative_norm
from lipscope.bounds.weights import HeadWeights, layer_weights

_SOURCE = "Yudin, Gaponov, Kudriashov, Rakhuba, Pay Attention to Attention Distribution, arXiv 2507.07814, 2025"


def published(layer: Attention, x: Tensor) -> Bound:
    """‖V‖‖P‖ + (‖V‖‖X‖ + √n b_V)(2‖X‖‖A‖ + √n(b_Q + b_K)) max_i g₁(P_i) at tokens x (n, d), any mask.

    Without biases it is ‖V‖(‖P‖ + 2‖X‖²‖A‖ max_i g₁(P_i)). Here b_Q = τ‖W_Kᵀb_Q‖, and b_K, b_V are zero unless there are
    sinks (b_K: or a soft-cap). ‖P‖ is replaced by a rigorous upper bound. Frobenius norms.

    Args:
        layer: the layer.
        x: tokens (n, d).

    Returns:
        A local bound.
    """
    size = float(torch.linalg.matrix_norm(x.double(), 2))
    root = math.sqrt(x.shape[0])

    def head(core: HeadCore, w: HeadWeights, c: HeadConstants) -> float:
        values = c.value * size + root * c.value_bias
        scores = 2 * size * c.interaction + root * (c.query_bias + c.key_bias)
        return c.value * nonnegative_norm(core.P) + values * scores * float(g1(core.P).max())

    value = _over_heads(layer, x, head)
    return Bound("yudin2025.published", value, "local", "this input; any mask", _SOURCE, {"n": x.shape[0]})


def improved(layer: Attention, x: Tensor) -> Bound:
    """‖V‖‖P‖ + ‖W_O(V − mean)‖(‖τ(K − mean)W_Q‖ + ‖τQW_K‖) max_i λ_max(diag(P_i) − P_iP_iᵀ) at tokens x (n, d).

    Never larger than ``published``. With rotary embeddings the norms of scores are the largest ‖τK R_iW_Q‖ and ‖τQ
    R_jW_K‖ over tokens. The means are subtracted where a shift does not matter (not with sinks; keys not with a
    soft-cap). Any mask, Frobenius norms. Ours.

    Args:
        layer: the layer.
        x: tokens (n, d).

    Returns:
        A local bound.
    """

    def head(core: HeadCore, w: HeadWeights, c: HeadConstants) -> float:
        v = core.v if core.missing is None else core.v + core.centre
        if w.R_O is not None:
            v = v @ w.R_O.mT
        values, slope = float(torch.linalg.matrix_norm(v, 2)), float(largest_eigenvalue(core.P).max())
        scores = core.projected_norm(core.k, w.R_Q) + core.projected_norm(core.q, w.R_K)
        return c.value * nonnegative_norm(core.P) + values * scores * slope

    value = _over_heads(layer, x, head)
    return Bound("yudin2025.improved", value, "local", "this input; any mask", f"{OURS}, after {_SOURCE}",
                 {"n": x.shape[0]})  # fmt: skip


def _over_heads(layer: Attention, x: Tensor, head: Callable[[HeadCore, HeadWeights, HeadConstants], float]) -> float:
    """min(Σ_h with W_O inside, ‖W_O‖·root of squares), rounded up by the margin of the probabilities."""
    weights, constants = layer_weights(layer), Constants.of(layer, x.shape[0])
    precise, x = layer.to(torch.float64), x.detach().double()
    total = joint = margin = 0.0
    with torch.no_grad():
        for h in range(layer.heads):
            core = HeadCore.at(precise.head(h), x, weights.plain[h])
            margin = max(margin, core.margin)
            total += head(core, weights.image[h], constants.image[h])
            joint = math.hypot(joint, head(core, weights.plain[h], constants.plain[h]))
    return min(total, weights.out * joint) * (1 + 4 * margin)
