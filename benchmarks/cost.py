"""What σ of a layer costs: floating-point operations, bytes and steps, from the layer's shape alone.

One pair (J·u, Jᵀ·g) at n tokens multiplies the tokens by all weights twice, 4·n·(weights), and makes for every visible
entry of the scores of every head

    8·d_k + 8·d_v     operations with the probabilities at hand
    12·d_k + 8·d_v    when tiles rebuild them: one more product of length d_k for J and for Jᵀ

A solve is one linearisation (2·d_k + 2·d_v per entry) and k pairs, k about 18 for an interval of 10 % whatever n. Its
memory is planned in ``lipscope.measure.memory``. Checked at several sizes by benchmarks/cost_model.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from lipscope.attention.layer import Attention
from lipscope.measure.memory import TYPICAL_PAIRS

# Copies of the projections, of the heads' outputs and of the tokens at the peak of a solve; see lipscope.measure.memory.
PROJECTIONS, OUTPUTS, TOKENS = 3, 4, 10


@dataclass(frozen=True)
class LayerShape:
    """The numbers of a layer that its cost depends on.

    Attributes:
        width: token dimension d.
        heads: query heads.
        kv_heads: key heads.
        key_width: d_k.
        value_width: d_v.
        output_width: dimension of the output tokens; 0 without W_O.
    """

    width: int
    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    output_width: int

    @classmethod
    def of(cls, layer: Attention) -> LayerShape:
        """The shape of a layer."""
        out = 0 if layer.out is None else layer.out.shape[0]
        return cls(layer.width, layer.heads, layer.kv_heads, layer.head_width, layer.value_width, out)

    @property
    def weights(self) -> int:
        """Entries of W_Q, W_K, W_V and W_O."""
        projections = (self.heads + self.kv_heads) * self.key_width + self.kv_heads * self.value_width
        return self.width * projections + self.output_width * self.heads * self.value_width


def pair_of_products(shape: LayerShape, n: int, *, visible: float = 1.0, rebuilt: bool = True) -> float:
    """Floating-point operations of one pair (J·u, Jᵀ·g).

    Args:
        shape: the layer.
        n: number of tokens.
        visible: share of the n×n entries that is visited, ½ under a causal mask.
        rebuilt: probabilities are rebuilt tile by tile, as beyond a few hundred megabytes of them.

    Example:
        >>> bert = LayerShape(768, 12, 12, 64, 64, 768)
        >>> f"{pair_of_products(bert, 4096, visible=0.5):.3g}"
        '1.68e+11'
    """
    per_entry = (12 if rebuilt else 8) * shape.key_width + 8 * shape.value_width
    return 4.0 * n * shape.weights + visible * n * n * shape.heads * per_entry


def linearisation(shape: LayerShape, n: int, *, visible: float = 1.0) -> float:
    """Floating-point operations of what happens once per input: projections, normalisers and outputs."""
    per_entry = 2 * shape.key_width + 2 * shape.value_width
    return 2.0 * n * shape.weights + visible * n * n * shape.heads * per_entry


def solve(shape: LayerShape, n: int, *, visible: float = 1.0, pairs: float = TYPICAL_PAIRS) -> float:
    """Floating-point operations of one σ: a linearisation and ``pairs`` pairs of products."""
    return linearisation(shape, n, visible=visible) + pairs * pair_of_products(shape, n, visible=visible)


def forward(shape: LayerShape, n: int, *, visible: float = 1.0) -> float:
    """Floating-point operations of the layer itself, fused attention included."""
    return 2.0 * n * shape.weights + visible * n * n * shape.heads * 2 * (shape.key_width + shape.value_width)


def vector_bytes(shape: LayerShape, n: int, *, element: int = 4) -> int:
    """Bytes of one Krylov vector."""
    return n * shape.width * element


def working_bytes(shape: LayerShape, n: int, *, vectors: int, element: int = 4) -> int:
    """Bytes of one σ beside the weights with ``vectors`` Krylov vectors; tiles and what is kept of them left out."""
    rows = shape.heads * shape.key_width + shape.kv_heads * (shape.key_width + shape.value_width)
    tokens = n * element * (PROJECTIONS * rows + OUTPUTS * shape.heads * shape.value_width)
    return tokens + (TOKENS + vectors) * vector_bytes(shape, n, element=element)
