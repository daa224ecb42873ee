"""What σ(rX) tends to as r → ∞: attention becomes a choice of one token per row.

When every row has a unique largest score, P tends to the 0–1 matrix of the choices and all covariances vanish, so

    σ(rX) → ‖V‖·√( max_j #{i : argmax_l s_il = j} )
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds.bound import CASTIN, Bound
from lipscope.bounds.weights import layer_weights


def limit(layer: Attention, x: Tensor) -> Bound:
    """‖V‖√(max_j #{i : argmax_l s_il = j}) for one head; the sum over heads bounds the limit for several.

    The scores are those of r²·x_jᵀAx_i alone: biases are outgrown. Holds for almost every X (unique largest scores) and
    any mask, without soft-cap and sinks. Regime of Castin et al.; formula derived in docs/theory.

    Args:
        layer: the layer.
        x: tokens (n, d), their direction.

    Returns:
        A limit.
    """
    weights = layer_weights(layer)
    n = x.shape[0]
    bare = Attention(layer.q, layer.k, layer.v, heads=layer.heads, kv_heads=layer.kv_heads, scale=layer.scale,
                     rotary=layer.rotary)  # fmt: skip
    q, k, _ = bare.to(torch.float64).project(x.detach().double()[None])
    scores = q[0] @ k[0].repeat_interleave(layer.heads // layer.kv_heads, dim=0).mT
    allowed = layer.score_rule(n, 1).allowed
    if allowed is not None:
        scores = scores.masked_fill(~allowed[0], -math.inf)
    total = 0.0
    for h, w in enumerate(weights.image):
        sees = torch.isfinite(scores[h]).any(-1)
        chosen = torch.bincount(scores[h].argmax(-1)[sees], minlength=n)
        total += w.value * math.sqrt(int(chosen.max()))
    return Bound("large_radius.limit", total, "limit", "σ(rX) as r → ∞, almost every X, any mask", CASTIN,
                 {"n": n, "heads": layer.heads})  # fmt: skip
