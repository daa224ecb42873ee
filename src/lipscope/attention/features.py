"""What a token becomes before it meets the others: features z = Wx, and what variants make of them, token by token.

    linear       c·z                         derivative  c·dz
    normalised   ẑ = c·z/s, s = √(|z|² + ε)              c·(dz − (z/s)(z/s · dz))/s
    lifted keys  (z, −t|z|²)                             (dz, −2t z·dz)

Scores of all softmax variants are inner products of such features: −t|q_i − q_j|² is, up to a term that is the same for a
whole row, the product of (2t q_i, 1) with (q_j, −t|q_j|²).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from lipscope.attention.core import typical_norm


@dataclass(frozen=True, eq=False)
class Feature:
    """Linear features c·Wx of tokens, at one batch of tokens, with their derivative."""

    weights: Tensor  # W, (heads·m, d)
    heads: int
    z: Tensor  # Wx by head, (B, heads, n, m)
    scale: float = 1.0  # c

    @classmethod
    def at(cls, X: Tensor, weights: Tensor, heads: int, scale: float = 1.0, **more: float) -> Self:
        """The features of tokens (B, n, d)."""
        return cls(weights, heads, _by_head(X @ weights.mT, heads), scale, **more)

    @property
    def value(self) -> Tensor:
        """The features, (B, heads, n, ·)."""
        return self.scale * self.z

    def jvp(self, U: Tensor) -> Tensor:
        """How the features move with the tokens, for U of shape (B, n, d)."""
        return self._push(_by_head(U @ self.weights.mT, self.heads))

    def vjp(self, G: Tensor) -> Tensor:
        """The transpose of ``jvp``: (B, heads, n, ·) → (B, n, d)."""
        return self._pull(G).transpose(1, 2).flatten(2) @ self.weights

    def sizes(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Norms of the features and of the terms of z behind them, (B, heads); slopes, and what is off in them, (…, n)."""
        W = self.weights.detach().double().unflatten(0, (self.heads, -1))
        s = self.size[..., 0].double() if isinstance(self, Normalised) else torch.ones_like(self.z[..., 0]).double()
        off = (X.double().square() @ W.square().sum(1).mT).sqrt().mT / s
        slope = self.scale * typical_norm(W.square().sum((1, 2)), *W.shape[1:])[:, None] / s
        wrong = slope * (1 + off) if isinstance(self, Normalised) else slope
        return self.value.norm(dim=-1).amax(-1).double(), self.scale * off.amax(-1), slope, wrong

    def select(self, items: Tensor) -> Self:
        """Keep the listed batch items."""
        return replace(self, z=self.z[items])

    def _push(self, dz: Tensor) -> Tensor:
        return self.scale * dz

    def _pull(self, G: Tensor) -> Tensor:
        return self.scale * G


@dataclass(frozen=True, eq=False)
class Normalised(Feature):
    """Features c·z/√(|z|² + ε), head by head."""

    eps: float = 0.0  # ε

    @property
    def size(self) -> Tensor:
        """The norms √(|z|² + ε), (B, heads, n, 1)."""
        return (self.z.square().sum(-1, keepdim=True) + self.eps).sqrt()

    @property
    def value(self) -> Tensor:
        """The features, of norm at most c."""
        return self.scale * self.z / self.size

    def _push(self, dz: Tensor) -> Tensor:
        size = self.size
        unit = self.z / size
        return self.scale * (dz - unit * (unit * dz).sum(-1, keepdim=True)) / size

    def _pull(self, G: Tensor) -> Tensor:
        # The derivative of a normalisation is a symmetric matrix.
        return self._push(G)


@dataclass(frozen=True, eq=False)
class LiftedKey(Feature):
    """Features (z, −t|z|²), with t in place of the scale."""

    @property
    def value(self) -> Tensor:
        return torch.cat([self.z, -self.scale * self.z.square().sum(-1, keepdim=True)], dim=-1)

    def _push(self, dz: Tensor) -> Tensor:
        return torch.cat([dz, -2 * self.scale * (self.z * dz).sum(-1, keepdim=True)], dim=-1)

    def _pull(self, G: Tensor) -> Tensor:
        return G[..., :-1] - 2 * self.scale * self.z * G[..., -1:]


@dataclass(frozen=True, eq=False)
class LiftedQuery(Feature):
    """Features (2t z, 1), with t in place of the scale."""

    @property
    def value(self) -> Tensor:
        return torch.cat([2 * self.scale * self.z, torch.ones_like(self.z[..., :1])], dim=-1)

    def _push(self, dz: Tensor) -> Tensor:
        return torch.cat([2 * self.scale * dz, torch.zeros_like(dz[..., :1])], dim=-1)

    def _pull(self, G: Tensor) -> Tensor:
        return 2 * self.scale * G[..., :-1]


def _by_head(projected: Tensor, heads: int) -> Tensor:
    """Reshape (B, n, heads·m) → (B, heads, n, m)."""
    B, n, _ = projected.shape
    return projected.reshape(B, n, heads, -1).transpose(1, 2).contiguous()
