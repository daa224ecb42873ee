"""Sinkhorn attention: weights whose rows and columns add up to one (Sander, Ablin, Blondel, Peyré 2022), at convergence.

    P_ij = exp(S_ij + f_i + g_j),  Σ_j P_ij = Σ_i P_ij = 1        S = τ Q Kᵀ

g minimises the convex Φ(g) = Σ_i log Σ_j exp(S_ij + g_j) − Σ_j g_j, whose gradient is (column sums) − 1 and whose Hessian
is diag(column sums) − PᵀP; Newton's method finds it. The derivative is an orthogonal projection: with ⟨D, D'⟩_P = Σ P∘D∘D',

    dP = P∘(dS − f ⊕ g),   f ⊕ g the nearest to dS in that product:   (I − PᵀP) g = colsum(P∘dS) − Pᵀ rowsum(P∘dS)

Published models stop after a few normalisations; what is measured here is their limit.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from lipscope.attention.core import Triple
from lipscope.attention.layer import Attention
from lipscope.attention.masks import Full, Mask
from lipscope.attention.variants.features import Feature
from lipscope.attention.variants.layer import Core, Features, Variant

_STEPS = 200


@dataclass(frozen=True, eq=False, kw_only=True)
class SinkhornAttention(Variant):
    """Attention with doubly stochastic weights; no mask, since a triangular doubly stochastic matrix is the identity.

    Attributes:
        k: key weights, ``(heads·dk, d)``.
        scale: τ, 1/√dk by default.

    Example:
        >>> import torch
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> layer = SinkhornAttention(q=W, k=W, v=W)
        >>> X = torch.randn(5, 2, dtype=torch.float64)
        >>> bool(torch.allclose(layer(X).sum(0), X.sum(0)))       # columns add up to one: no token is lost
        True
    """

    k: Tensor
    scale: float | None = None

    kind: ClassVar[str] = "sinkhorn"
    masks: ClassVar[tuple[type[Mask], ...]] = (Full,)

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

    def outputs(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """P ṽ. Two Newton steps from the solution carry the derivatives of P up to the third order."""
        scores = q @ k.mT
        g = potential(scores.detach())
        # One step squares the error, so after two steps g(S + dS) is right up to terms of fourth order in dS.
        for _ in range(2):
            g = g + _newton_step(scores, g)
        return torch.softmax(scores + g, dim=-1) @ v

    def linearise(self, q: Tensor, k: Tensor, v: Tensor) -> Core:
        """The core with the projection that makes up its derivative."""
        return SinkhornCore.at(q, k, v)


@dataclass(frozen=True, eq=False)
class SinkhornCore:
    """Doubly stochastic attention at one point; shapes as in ``Linearisation``, without grouped queries.

    ``inverse`` is that of I − PᵀP + 11ᵀ/n, (B, H, n, n).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    P: Tensor
    o: Tensor
    inverse: Tensor
    score_size: float

    @classmethod
    def at(cls, q: Tensor, k: Tensor, v: Tensor) -> SinkhornCore:
        """Linearise at features (B, H, n, ·)."""
        scores = q @ k.mT
        # The smallest eigenvalue of I − PᵀP costs digits, so everything n×n is done in double precision.
        P = torch.softmax(scores.double() + potential(scores.double()), dim=-1)
        curvature = _curvature(P)
        gap = float(torch.linalg.eigvalsh(curvature)[..., 0].min())
        size = float(q.norm(dim=-1).amax() * k.norm(dim=-1).amax()) + P.shape[-1] * max(1.0, 1 / max(gap, 1e-300))
        # Values about their mean: dP has vanishing rows, so nothing changes but a cancellation.
        v = v - v.mean(-2, keepdim=True)
        return cls(q, k, v, P.to(q), (P.to(q) @ v), torch.linalg.inv(curvature).to(q), size)

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the products."""
        return self.P.dtype

    def finite(self) -> dict[str, Tensor]:
        """What must be finite for the products to make sense."""
        return {"weights": self.P, "values": self.v, "queries": self.q, "keys": self.k, "projection": self.inverse}

    def project(self, D: Tensor) -> Tensor:
        """P∘(D − f ⊕ g): what is left of D, so that rows and columns of the result vanish."""
        weighted = self.P * D
        row, column = weighted.sum(-1, keepdim=True), weighted.sum(-2).unsqueeze(-1)
        g = self.inverse @ (column - self.P.mT @ row)
        f = row - self.P @ g
        return weighted - self.P * (f + g.mT)

    def jvp(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """DO for perturbations of the features."""
        return self.project(dq @ self.k.mT + self.q @ dk.mT) @ self.v + self.P @ dv

    def vjp(self, g: Tensor) -> Triple:
        """(gQ, gK, gV) for a cotangent g of O: the projection is its own transpose."""
        gS = self.project(g @ self.v.mT)
        return gS @ self.k, gS.mT @ self.q, self.P.mT @ g

    def select(self, items: Tensor) -> SinkhornCore:
        """Keep the listed batch items."""
        kept = (t[items] for t in (self.q, self.k, self.v, self.P, self.o, self.inverse))
        return SinkhornCore(*kept, self.score_size)


def potential(scores: Tensor, steps: int = _STEPS) -> Tensor:
    """G of shape (…, 1, n) with softmax_j(S_ij + g_j) doubly stochastic, by Newton's method on Φ with line search.

    Raises:
        FloatingPointError: when the columns do not come out right: the scores are too far apart.
    """
    S = scores.detach().double()
    # One Sinkhorn step first: it is exact when scores do not depend on the query.
    g = torch.logsumexp(-torch.logsumexp(S, -1, keepdim=True) + S, -2, keepdim=True).neg()
    value = _objective(S, g)
    for _ in range(steps):
        step, gradient = _newton_step(S, g), _column_error(S, g)
        if float(gradient.abs().max()) < 1e-13 * S.shape[-1]:
            break
        length = torch.ones_like(value)
        slope = (gradient * step).sum((-1, -2), keepdim=True)
        for _ in range(40):
            trial = _objective(S, g + length * step)
            worse = trial > value + 1e-4 * length * slope + 1e-12 * value.abs()
            if not bool(worse.any()):
                break
            length = torch.where(worse, length / 2, length)
        g = g + length * step
        value = _objective(S, g)
    error = float(_column_error(S, g).abs().max())
    if not error < 1e-8:
        raise FloatingPointError(
            f"Sinkhorn's normalisation leaves column sums off by {error:.1e}: the scores are too far apart for doubly "
            "stochastic weights in float64. Rescale the tokens or the weights."
        )
    return (g - g.mean(-1, keepdim=True)).to(scores)


def _objective(S: Tensor, g: Tensor) -> Tensor:
    return torch.logsumexp(S + g, -1, keepdim=True).sum(-2, keepdim=True) - g.sum(-1, keepdim=True)


def _column_error(S: Tensor, g: Tensor) -> Tensor:
    return torch.softmax(S + g, -1).sum(-2, keepdim=True) - 1


def _curvature(P: Tensor) -> Tensor:
    """The Hessian of Φ, with 11ᵀ/n on the direction of constants, in which Φ does not change."""
    n = P.shape[-1]
    return torch.diag_embed(P.sum(-2)) - P.mT @ P + 1 / n


def _newton_step(S: Tensor, g: Tensor) -> Tensor:
    """−H⁻¹∇Φ, (…, 1, n)."""
    P = torch.softmax(S + g, -1)
    gradient = P.sum(-2, keepdim=True) - 1
    # Kept away from zero eigenvalues where P is nearly a permutation; Newton's direction is then still one of descent.
    shift = 1e-14 * torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    return -torch.linalg.solve(_curvature(P) + shift, gradient.mT).mT
