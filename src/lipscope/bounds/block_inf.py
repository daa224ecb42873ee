"""A bound in the norm max_i ‖x_i‖, free of n, and what it gives for Frobenius norms. Ours; proof in docs/theory."""

from __future__ import annotations

import math

from lipscope.attention.layer import Attention
from lipscope.bounds.bound import OURS, Bound
from lipscope.bounds.constants import Constants, HeadConstants


def _head(c: HeadConstants, radius: float) -> float:
    return c.value + c.nu(radius) * c.alpha(radius) + c.queries(radius)


def max_token(layer: Attention | Constants, radius: float, n: int | None = None) -> Bound:
    """‖V‖ + να + νβ in the norm max_i‖x_i‖ on both sides, any mask and n; ‖V‖(1+2a) without biases.

    Row i moves by at most Σ_j P_ij(‖V‖ + ‖v_j − o_i‖‖a_i‖)‖ε_j‖ + ‖B_i‖‖ε_i‖, and Σ_j P_ij‖v_j − o_i‖ ≤ ν.

    Args:
        layer: the layer, or ``Constants.of_norms(‖V‖, ‖A‖)``.
        radius: R.
        n: number of tokens, which only matters for rotary embeddings; None for all their positions.

    Returns:
        A set bound in the norm max_i‖x_i‖.
    """
    constants = Constants.of(layer, n)
    # The outputs of the heads of one token are joined: a root of squares over heads is valid for one token too.
    value = constants.combine(lambda c: _head(c, radius))
    return Bound("block_inf.max_token", value, "set", f"tokens of norm ≤ {radius:g}, any n, any mask", OURS,
                 {"R": radius}, norm="max_i‖x_i‖")  # fmt: skip


def frobenius(layer: Attention | Constants, radius: float, n: int) -> Bound:
    """√n(‖V‖ + να + νβ) for Frobenius norms: ‖Y‖_F ≤ √n·max_i‖y_i‖ and max_i‖x_i‖ ≤ ‖X‖_F. Any mask.

    Args:
        layer: the layer, or ``Constants.of_norms(‖V‖, ‖A‖)``.
        radius: R.
        n: number of tokens.

    Returns:
        A set bound.
    """
    value = math.sqrt(n) * max_token(layer, radius, n).value
    return Bound("block_inf.frobenius", value, "set", f"tokens of norm ≤ {radius:g}, n = {n}, any mask", OURS,
                 {"R": radius, "n": n})  # fmt: skip
