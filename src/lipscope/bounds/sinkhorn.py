"""Sinkhorn attention is smooth in n and polynomial in R: a bound of ours for doubly stochastic weights.

One head, rows and columns of P add up to one, tokens in B_R, a = ‖A‖R²:

    σ ≤ ‖V‖(1 + 2a)          for every number of tokens

Proof. ‖P‖₂ ≤ 1. dP = P∘δ, where δ is dS less its orthogonal projection onto {f_i + g_j} in ⟨D, D'⟩_P = Σ P∘D∘D', so that
Σ P∘δ² ≤ Σ P∘dS². Rows of dP vanish, hence (dP·V)_i = Σ_j P_ij δ_ij (v_j − o_i), whose square is at most c_i Σ_j P_ij δ_ij²
with c_i = ‖Σ_j P_ij (v_j − o_i)(v_j − o_i)ᵀ‖ ≤ ‖V‖²R². And dS_ij = a_i·ε_j + b_j·ε_i with ‖a_i‖, ‖b_j‖ ≤ ‖A‖R: as rows and
columns of P add up to one, the root of Σ_ij P_ij dS_ij² is at most 2‖A‖R·‖ε‖_F.

Softmax attention has no bound of this kind: there columns of P add up to anything between 0 and n.
"""

from __future__ import annotations

import math

from lipscope.attention.sinkhorn import SinkhornAttention
from lipscope.bounds.bound import OURS, Bound
from lipscope.bounds.weights import HeadWeights, layer_weights


def doubly_stochastic(layer: SinkhornAttention, radius: float) -> Bound:
    """‖V‖(1 + 2‖A‖R²), heads summed, or ‖W_O‖ times the root of squares; every n, no mask, Frobenius norms. Ours.

    Args:
        layer: the layer.
        radius: R, the largest norm of a token.

    Returns:
        A set bound.

    Example:
        >>> import torch
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> round(doubly_stochastic(SinkhornAttention(q=W, k=W, v=W, scale=1.0), 2.0).value, 9)
        9.0
    """
    weights = layer_weights(layer.scaled)

    def head(w: HeadWeights) -> float:
        return w.value * (1 + 2 * w.interaction * radius**2)

    value = min(sum(map(head, weights.image)), weights.out * math.hypot(*map(head, weights.plain)))
    return Bound("sinkhorn.doubly_stochastic", value, "set", f"Sinkhorn attention, tokens of norm ≤ {radius:g}, any n", OURS,
                 {"R": radius})  # fmt: skip
