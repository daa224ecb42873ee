"""Variants whose scores are those of dot products, s_ij = τ q_i·k_j, and whose weights are no softmax of them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.variants.features import Feature
from lipscope.attention.variants.layer import Features, Variant


@dataclass(frozen=True, eq=False, kw_only=True)
class DotProductVariant(Variant):
    """Linear features τ q_i, k_j and v_j.

    Attributes:
        k: key weights, ``(heads·dk, d)``.
        scale: τ, 1/√dk by default.
    """

    k: Tensor
    scale: float | None = None

    @property
    def tau(self) -> float:
        """The scale τ of the scores."""
        return 1 / math.sqrt(self.head_width) if self.scale is None else self.scale

    @cached_property
    def scaled(self) -> Attention:
        """Dot-product attention with the same weights and the same scale."""
        return dataclasses.replace(self.plain, scale=self.tau)

    def features(self, X: Tensor) -> Features:
        """τ q_i, k_j and v_j."""
        return (
            Feature.at(X, self.q, self.heads, self.tau),
            Feature.at(X, self.k, self.heads),
            Feature.at(X, self.v, self.heads),
        )
