"""Scaled cosine similarity attention is Lipschitz on the whole space: Qi et al., *LipsFormer* (2023), Theorem 1.

With queries, keys and values normalised as z/√(|z|² + ε), scores τ q̂·k̂ and values ν v̂, one head of n tokens has

    σ ≤ νε^{−½}( 2n(n−1)τ‖W_K‖ + 2(n−1)τ‖W_Q‖ + 2n‖W_V‖ )
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from lipscope.attention.variants import CosineAttention
from lipscope.bounds.bound import Bound
from lipscope.bounds.bounded_scores import spectral

_SOURCE = "Qi, Wang, Chen, Shi, Zhang, LipsFormer, ICLR 2023, Theorem 1"


def scsa(layer: CosineAttention, n: int) -> Bound:
    """νε^{−½}(2n(n−1)τ‖W_K‖ + 2(n−1)τ‖W_Q‖ + 2n‖W_V‖), on the whole space, Frobenius norms, unmasked.

    Published for one head; several heads are joined by the root of squares times ‖W_O‖.

    Args:
        layer: the layer.
        n: number of tokens.

    Returns:
        A set bound valid on the whole space.
    """

    def head(query: float, key: float, value: float) -> float:
        return 2 * n * (n - 1) * layer.tau * key + 2 * (n - 1) * layer.tau * query + 2 * n * value

    return over_heads("qi2023.scsa", layer, n, head, _SOURCE)


def over_heads(
    name: str, layer: CosineAttention, n: int, head: Callable[[float, float, float], float], source: str
) -> Bound:
    """The bound ν ε^{−½} ‖W_O‖ times the root of squares of ``head(‖W_Q^h‖, ‖W_K^h‖, ‖W_V^h‖)``."""

    def norms(M: Tensor) -> list[float]:
        return [spectral(block) for block in M.chunk(layer.heads)]

    values = [head(*each) for each in zip(norms(layer.q), norms(layer.k), norms(layer.v), strict=True)]
    out = 1.0 if layer.out is None else spectral(layer.out)
    value = layer.nu / math.sqrt(layer.eps) * out * math.hypot(*values)
    return Bound(name, value, "set", f"cosine attention, all tokens, n = {n}, unmasked", source, {"n": n})
