"""Scaled cosine similarity attention with the Lipschitz constant ½ of the softmax: Nair (2025), Theorem 2.

    σ ≤ νε^{−½}( n²τ‖W_K‖ + nτ‖W_Q‖ + 2n‖W_V‖ )

the bound of LipsFormer with ½ in the place of (n−1)/n.
"""

from __future__ import annotations

from lipscope.attention.variants import CosineAttention
from lipscope.bounds.bound import Bound
from lipscope.bounds.qi2023 import over_heads

_SOURCE = "Nair, Softmax is 1/2-Lipschitz: A tight bound across all ℓp norms, 2025, Theorem 2"


def scsa(layer: CosineAttention, n: int) -> Bound:
    """νε^{−½}(n²τ‖W_K‖ + nτ‖W_Q‖ + 2n‖W_V‖), on the whole space, Frobenius norms, unmasked; heads as in ``qi2023``.

    Args:
        layer: the layer.
        n: number of tokens.

    Returns:
        A set bound valid on the whole space.
    """

    def head(query: float, key: float, value: float) -> float:
        return n**2 * layer.tau * key + n * layer.tau * query + 2 * n * value

    return over_heads("nair2025.scsa", layer, n, head, _SOURCE)
