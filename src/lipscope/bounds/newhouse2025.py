"""The bound behind Lipschitz-constrained training, in root-mean-square norms: Newhouse et al. 2025.

With ‖x‖_rms = ‖x‖/√d, ‖W‖_rms = ‖W‖·√(d_in/d_out), scores q·k/d_head and the output multiplied by s/3, one head is
⅓s‖W_O‖‖W_V‖(1 + 2‖W_Q‖‖W_K‖r²)-Lipschitz in the norm max_i‖x_i‖_rms for tokens of rms norm at most r.
"""

from __future__ import annotations

import math

from lipscope.attention.layer import Attention
from lipscope.bounds.bound import Bound
from lipscope.bounds.weights import layer_weights, spectral, triangle

_SOURCE = "Newhouse et al., Training Transformers with Enforced Lipschitz Constants, arXiv 2507.13338, 2025"


def attention(layer: Attention, radius: float, *, scale: float = 3.0) -> Bound:
    """(s/3) Σ_h ‖W_O^h‖‖W_V^h‖(1 + 2τd_head‖W_Q^h‖‖W_K^h‖r²), all norms rms, r = R/√d; any mask, any n.

    Valid without query bias, soft-cap or sinks. With τ = 1/d_head and s = 1 it is the published constant; ``scale`` = 3
    leaves the layer's output as it is. In rms norms the width ratios cancel between neighbouring factors, so it equals
    the bound ``block_inf.max_token`` with ‖W_OW_V‖ and ‖A‖ replaced by products of norms.

    Args:
        layer: the layer.
        radius: R, the largest Euclidean norm of a token.
        scale: s, the factor of the output times 3.

    Returns:
        A set bound in the norm max_i‖x_i‖/√d.
    """
    weights = layer_weights(layer)
    d, dk, dv, d_out = layer.width, layer.head_width, layer.value_width, layer.output_width
    r = radius / math.sqrt(d)
    total = 0.0
    for h, w in enumerate(weights.plain):
        single = layer.head(h).to(weights.plain[h].R_K.dtype)
        key = spectral(triangle(single.k.detach().mT)) * math.sqrt(d / dk)
        query = w.query / abs(layer.tau) * math.sqrt(d / dk) if layer.tau else 0.0
        value = w.value * math.sqrt(d / dv)
        out = weights.image[h].out * math.sqrt(dv / d_out)
        total += out * value * (1 + 2 * abs(layer.tau) * dk * query * key * r**2)
    return Bound("newhouse2025.attention", scale / 3 * total, "set", f"tokens of norm ≤ {radius:g}, any n, any mask",
                 _SOURCE, {"R": radius, "scale": scale}, norm="max_i‖x_i‖/√d")  # fmt: skip
