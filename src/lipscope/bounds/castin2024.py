"""The upper bounds of Castin, Ablin and Peyré, *How Smooth Is Attention?* (ICML 2024), as restated in docs/theory.

For one head without biases, tokens in the ball B_R, a = ‖A‖R²:

    Theorem 3.3   σ ≤ √3‖V‖(a²(4n+1) + n)^½            masked and unmasked
    Theorem 3.5   W_p-Lipschitz constant ≤ ‖V‖(1+3a)e^{2a}   unmasked, any number of tokens

With biases, soft-cap and sinks the same proofs give the forms below; they reduce to the above without.
"""

from __future__ import annotations

import math

from lipscope.attention.layer import Attention
from lipscope.bounds.bound import CASTIN, Bound
from lipscope.bounds.constants import Constants, HeadConstants


def general(layer: Attention | Constants, radius: float, n: int) -> Bound:
    """√3(n‖V‖² + 4n ν²α² + ν²β²)^½ for tokens in B_R, any mask; √3‖V‖(a²(4n+1) + n)^½ without biases.

    Frobenius norms. Castin et al., Theorem 3.3 (the form with biases is ours, by the same proof).

    Args:
        layer: the layer, or ``Constants.of_norms(‖V‖, ‖A‖)``.
        radius: R.
        n: number of tokens.

    Returns:
        A set bound.
    """

    def head(c: HeadConstants) -> float:
        keys = c.nu(radius) * c.alpha(radius)
        return math.sqrt(3 * (n * c.value**2 + 4 * n * keys**2 + c.queries(radius) ** 2))

    value = Constants.of(layer, n).combine(head)
    return Bound("castin2024.general", value, "set", f"tokens of norm ≤ {radius:g}, n = {n}, any mask",
                 f"{CASTIN}, Theorem 3.3", {"R": radius, "n": n})  # fmt: skip


def meanfield(layer: Attention | Constants, radius: float) -> Bound:
    """(‖V‖ + 2να + νβ)e^{2h} for tokens in B_R, unmasked, every n; ‖V‖(1+3a)e^{2a} without biases.

    It bounds the Lipschitz constant for the Wasserstein distances W_p, hence σ. Castin et al., Theorem 3.5.

    Args:
        layer: the layer, or ``Constants.of_norms(‖V‖, ‖A‖)``.
        radius: R.

    Returns:
        A set bound.
    """

    def head(c: HeadConstants) -> float:
        inner = c.value + c.nu(radius) * (2 * c.alpha(radius)) + c.queries(radius)
        return inner * exp(2 * c.half_range(radius))

    value = Constants.of(layer).combine(head)
    return Bound("castin2024.meanfield", value, "set", f"tokens of norm ≤ {radius:g}, any n, unmasked",
                 f"{CASTIN}, Theorem 3.5", {"R": radius})  # fmt: skip


def exp(x: float) -> float:
    """e^x, infinite instead of an overflow error."""
    return math.exp(x) if x < 700 else math.inf
