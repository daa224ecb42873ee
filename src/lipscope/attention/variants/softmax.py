"""Softmax attention on other features: L2 (Kim et al. 2021), scaled cosine (Qi et al. 2023), QK-normalised.

    L2               s_ij = −|q_i − q_j|²/√dk, queries and keys tied       v_j = W_V A x_j,  A = W_QᵀW_Q/√dk
    scaled cosine    s_ij = τ q̂_i·k̂_j                                      v_j = ν v̂_j
    QK-normalised    s_ij = τ q̂_i·k̂_j                                      v_j = W_V x_j

with ẑ = z/√(|z|² + ε) for z = Wx, head by head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from lipscope.attention.core import Linearisation
from lipscope.attention.scores import ScoreRule, safe_softmax
from lipscope.attention.variants.features import Feature, LiftedKey, LiftedQuery, Normalised
from lipscope.attention.variants.layer import Core, Features, Variant


class _Softmax(Variant):
    """P = softmax of inner products of features."""

    def outputs(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Softmax(q̃k̃ᵀ)ṽ."""
        scores = q @ k.mT
        visible = self.visible(q.shape[-2])
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        return safe_softmax(scores) @ v

    def linearise(self, q: Tensor, k: Tensor, v: Tensor) -> Core:
        """The softmax core, with values about their mean, which changes no product and spares a cancellation."""
        return Linearisation.at(q, k, v, ScoreRule(allowed=self.visible(q.shape[-2]))).with_centred_values()


@dataclass(frozen=True, eq=False, kw_only=True)
class L2Attention(_Softmax):
    """L2 attention with tied queries and keys, Lipschitz on the whole space (Kim, Papamakarios, Mnih 2021).

    P_ij ∝ exp(−t|W_Q x_i − W_Q x_j|²), head = P X Aᵀ W_Vᵀ with A = t·W_QᵀW_Q, t = 1/√dk: the theorem needs the keys tied
    to the queries and the factor A before W_V.

    Example:
        >>> import torch
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> L2Attention(q=W, v=W)(torch.zeros(3, 2, dtype=torch.float64)).shape
        torch.Size([3, 2])
    """

    kind: ClassVar[str] = "l2"

    @property
    def t(self) -> float:
        """1/√dk."""
        return 1 / math.sqrt(self.head_width)

    def value_weights(self) -> Tensor:
        """W_V A of every head, ``(heads·dv, d)``."""
        Q = self.q.reshape(self.heads, self.head_width, self.width)
        V = self.v.reshape(self.heads, -1, self.width)
        return (self.t * (V @ Q.mT) @ Q).flatten(0, 1)

    def features(self, X: Tensor) -> Features:
        """(2t q_i, 1), (q_j, −t|q_j|²) and W_V A x_j."""
        q = LiftedQuery.at(X, self.q, self.heads, self.t)
        return q, LiftedKey(self.q, self.heads, q.z, self.t), Feature.at(X, self.value_weights(), self.heads)


@dataclass(frozen=True, eq=False, kw_only=True)
class CosineAttention(_Softmax):
    """Scaled cosine similarity attention of LipsFormer: queries, keys and values normalised (Qi et al. 2023).

    Attributes:
        k: key weights, ``(heads·dk, d)``.
        tau: τ, the scale of the cosines.
        nu: ν, the size of the values.
        eps: ε of the normalisation, not zero: the constant grows as ε^{−½}.
    """

    k: Tensor
    tau: float = 12.0
    nu: float = 1.0
    eps: float = 1e-2

    kind: ClassVar[str] = "cosine"
    numbers: ClassVar[tuple[str, ...]] = ("tau", "nu", "eps")

    def features(self, X: Tensor) -> Features:
        """τ q̂_i, k̂_j and ν v̂_j."""
        return (
            Normalised.at(X, self.q, self.heads).scaled(self.tau, self.eps),
            Normalised.at(X, self.k, self.heads).scaled(1.0, self.eps),
            Normalised.at(X, self.v, self.heads).scaled(self.nu, self.eps),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class QKNormAttention(_Softmax):
    """Attention with normalised queries and keys (Henry et al. 2020, Dehghani et al. 2023); values as they are.

    Attributes:
        k: key weights, ``(heads·dk, d)``.
        tau: τ, the scale of the cosines; √dk by default, which is what RMSNorm on queries and keys amounts to.
        eps: ε of the normalisation.
    """

    k: Tensor
    tau: float | None = None
    eps: float = 1e-2

    kind: ClassVar[str] = "qk-norm"
    numbers: ClassVar[tuple[str, ...]] = ("cosine_scale", "eps")

    @property
    def cosine_scale(self) -> float:
        """τ."""
        return math.sqrt(self.head_width) if self.tau is None else self.tau

    def features(self, X: Tensor) -> Features:
        """τ q̂_i, k̂_j and W_V x_j."""
        return (
            Normalised.at(X, self.q, self.heads).scaled(self.cosine_scale, self.eps),
            Normalised.at(X, self.k, self.heads).scaled(1.0, self.eps),
            Feature.at(X, self.v, self.heads),
        )
