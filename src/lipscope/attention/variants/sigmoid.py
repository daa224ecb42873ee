"""Sigmoid attention: every weight for itself, no softmax (Ramapuram et al. 2024).

    P_ij = sigmoid(τ q_i·k_j + b)      dP = P(1 − P)∘dS      b = −log n by default

Rows do not add up to one; b = −log n keeps their sums near one when scores are small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lipscope.attention.core import Linearisation
from lipscope.attention.variants.dot_product import DotProductVariant
from lipscope.attention.variants.layer import Core


@dataclass(frozen=True, eq=False, kw_only=True)
class SigmoidAttention(DotProductVariant):
    """Attention with P_ij = sigmoid(τ q_i·k_j + b).

    Attributes:
        k: key weights, ``(heads·dk, d)``.
        scale: τ, 1/√dk by default.
        shift: b, −log n by default, n the number of tokens.

    Example:
        >>> import torch
        >>> W = torch.eye(1, dtype=torch.float64)
        >>> SigmoidAttention(q=0 * W, k=W, v=W)(torch.ones(4, 1, dtype=torch.float64))[0]      # 4·sigmoid(−log 4)
        tensor([0.8000], dtype=torch.float64)
    """

    shift: float | None = None

    kind: ClassVar[str] = "sigmoid"

    def shift_at(self, n: int) -> float:
        """B for n tokens."""
        return -math.log(n) if self.shift is None else self.shift

    def weights(self, scores: Tensor) -> Tensor:
        """P of scores (B, H, n, n)."""
        n = scores.shape[-1]
        P = torch.sigmoid(scores + self.shift_at(n))
        visible = self.visible(n)
        return P if visible is None else P * visible

    def outputs(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Sigmoid(q̃k̃ᵀ + b)ṽ."""
        return self.weights(q @ k.mT) @ v

    def linearise(self, q: Tensor, k: Tensor, v: Tensor) -> Core:
        """The softmax core with W = P(1 − P) and without its row term, which is the part that comes from Σ_j P_ij = 1."""
        P = self.weights(q @ k.mT)
        size = float(q.norm(dim=-1).amax() * k.norm(dim=-1).amax())
        return Linearisation(q, k, v, P, P * (1 - P), torch.zeros_like(P[..., :1] * v), size)
