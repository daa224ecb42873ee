"""What rounding may do to one head in float64: bounds of its errors in terms of what was added up, not of what is left."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.attention.scores import ScoreRule, softcap_size, tile_of
from lipscope.bounds.weights import HeadWeights

# How often the margins of single numbers cover the rounding of a product of two parts.
ROUNDS = 4
# A probability below e^−_UNDERFLOW is zero in float64; rows of an additive term looked at together.
_UNDERFLOW, _ROWS = 750.0, 256
# Probabilities below this may vanish in squares of squares; what they can do to a norm is added to it.
_LEAST = 1e-140


@dataclass(frozen=True)
class Rounding:
    """What rounding may do to one head, to first order and in the worst case.

    ``margin`` is the relative error of a probability, and hence of every sum of nonnegative terms built on it. A score is
    two products of length d and one of length dk, so its error is at most (2d + dk)·eps times the sizes of a query and of a
    key; the exponential and the normalisation double it, and a further factor 2 and 8(n + d) units cover the remaining
    sums. The slope of a soft-cap c adds 2/c of the error. Adding a term B_ij, and the peak that is taken away, round once
    each; a sink is one more score. The size of a query is ‖W_Q‖_F‖x‖ + ‖b_Q‖, not its norm, which may be small because
    these cancel; of keys and values likewise, without the terms that ``Point`` leaves out.
    """

    margin: float
    unit: float  # error of a projection, relative to its size
    query: float  # sizes of queries, keys, values, and of the common term of the values
    key: float
    value: float
    shift: float

    @classmethod
    def of(cls, w: HeadWeights, x: Tensor, rule: ScoreRule, gain: float | None, offset: Tensor | None) -> Rounding:
        """At tokens x (n, d) plus an offset; rotations of norm at most ``gain`` enlarge a score by its square."""
        (n, d), eps = x.shape, torch.finfo(torch.float64).eps
        norms = torch.linalg.vector_norm(x, dim=-1)
        most = float(norms.max()) + (0.0 if offset is None else float(torch.linalg.vector_norm(offset)))
        away = float(torch.linalg.vector_norm(x - x[norms.argmin()], dim=-1).max())
        query, key, shift = (size * most + bias for size, bias in zip(w.sizes, w.biases, strict=True))
        if gain is None and rule.softcap is None and rule.sinks is None:
            key = w.sizes[1] * away
        query, key = query * (gain or 1.0), key * (gain or 1.0)
        scores = softcap_size(query * key, rule.softcap)
        length, added = 4 * (2 * d + w.R_K.shape[1] + 8), additive_size(rule, n, query * key)
        added += rule.sink_size(scores + added)
        margin = eps * (length * scores + 8 * (n + d) + 4 * added)
        return cls(margin, eps * (2 * d + w.R_K.shape[1] + 16), query, key, w.sizes[2] * away, shift)

    def underflow(self, w: HeadWeights, n: int) -> float:
        """What probabilities whose squares leave the range of floats may take from a norm of n×n blocks."""
        moved = 2 * (self.value + self.shift) * (self.query * w.sizes[1] + self.key * w.sizes[0])
        return n * _LEAST * max(1.0, w.out) * (w.sizes[2] + moved)


def additive_size(rule: ScoreRule, n: int, scores: float) -> float:
    """Largest additive term of an entry whose probability may differ from zero, when scores without it are ≤ ``scores``.

    Entry (i, j) is compared with the largest visible term of its row: with B_ij < max_l B_il − 2·scores − 750, P_ij is zero.
    """
    if rule.additive is None:
        return 0.0
    everything, largest = slice(0, n), 0.0
    for start in range(0, n, _ROWS):
        rows = slice(start, min(n, start + _ROWS))
        B = tile_of(rule.additive, rows, everything)
        visible = rule.visible(rows, everything, n, B.device)
        seen = B if visible is None else torch.where(visible, B, float("-inf"))
        matters = (seen > float("-inf")) & (seen >= seen.amax(-1, keepdim=True) - (2 * scores + _UNDERFLOW))
        largest = max(largest, float(torch.where(matters, seen.abs(), 0.0).amax()))
    return largest
