"""Sinkhorn attention: weights whose rows and columns add up to one (Sander, Ablin, Blondel, Peyré 2022), at convergence.

    P_ij = exp(S_ij + f_i + g_j),  Σ_j P_ij = Σ_i P_ij = 1        S = τ Q Kᵀ

g minimises the convex Φ(g) = Σ_i log Σ_j exp(S_ij + g_j) − Σ_j g_j, whose gradient is (column sums) − 1 and whose Hessian
is diag(column sums) − PᵀP; Newton's method finds it. The derivative is an orthogonal projection: with ⟨D, D'⟩_P = Σ P∘D∘D',

    dP = P∘(dS − f ⊕ g),   f ⊕ g the nearest to dS in that product:   (I − PᵀP) g = colsum(P∘dS) − Pᵀ rowsum(P∘dS)

Published models stop after a few normalisations; what is measured here is their limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from lipscope.attention.core import Linearisation, Triple, largest_product
from lipscope.attention.validation import rows_of

_STEPS = 60
# Newton's method has no trouble with scores that differ by less.
_GENTLE = 16.0
# Where P is nearly a permutation some eigenvalues of I − PᵀP vanish to rounding.
_SHIFT, _FLAT = 1e-14, 1e-11


@dataclass(frozen=True, eq=False)
class SinkhornCore(Linearisation):
    """Doubly stochastic attention at one point, without grouped queries.

    ``inverse`` is that of I − PᵀP + 11ᵀ/n, (B, H, n, n), on the directions that are not flat.
    """

    inverse: Tensor

    @property
    def scratch(self) -> int:
        return 2 * super().scratch

    def finite(self) -> dict[str, Tensor]:
        return super().finite() | {"projection": self.inverse}

    def project(self, D: Tensor) -> Tensor:
        """P∘(D − f ⊕ g): what is left of D, so that rows and columns of the result vanish."""
        weighted = self.P * D
        row, column = weighted.sum(-1, keepdim=True), weighted.sum(-2).unsqueeze(-1)
        g = self.inverse @ (column - self.P.mT @ row)
        f = row - self.P @ g
        return weighted - self.P * (f + g.mT)

    def jvp(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        return self.project(dq @ self.k.mT + self.q @ dk.mT) @ self.v + self.P @ dv

    def vjp(self, g: Tensor) -> Triple:
        """The cotangents (gQ, gK, gV) for one g of O: the projection is its own transpose."""
        gS = self.project(g @ self.v.mT)
        return gS @ self.k, gS.mT @ self.q, self.P.mT @ g

    def select(self, items: Tensor) -> Self:
        return rows_of(super().select(items), items, "inverse")


def sinkhorn_core(q: Tensor, k: Tensor, v: Tensor) -> SinkhornCore:
    """The core at features (B, H, n, ·)."""
    scores = (q @ k.mT).double()
    # The smallest eigenvalue of I − PᵀP costs digits, so everything n×n is done in double precision.
    weights = torch.softmax(scores + potential(scores), dim=-1)
    inverse, lost = _projection(weights)
    size = largest_product(q, k) + lost / torch.finfo(q.dtype).eps
    # Values about their mean: dP has vanishing rows, so nothing changes but a cancellation.
    v, P = v - v.mean(-2, keepdim=True), weights.to(q)
    return SinkhornCore(q, k, v, P, P, P @ v, size, inverse.to(q))


def _projection(P: Tensor) -> tuple[Tensor, float]:
    """The inverse of I − PᵀP + 11ᵀ/n without its flat directions, and the relative error that this may cost.

    A flat direction g makes f ⊕ g, f = −Pg, almost vanish where P has its mass. Its part of the projection is P∘e⟨e, D⟩_P
    with e = (f ⊕ g)/√λ, of norm at most ‖P∘e‖_F; rounding of the others is of order eps/λ.
    """
    values, vectors = torch.linalg.eigh(_curvature(P))
    flat = values < _FLAT
    lost = torch.finfo(P.dtype).eps * P.shape[-1] / float(torch.where(flat, 1.0, values).min())
    for place in flat.nonzero():
        *where, column = place.tolist()
        here, g = P[tuple(where)], vectors[tuple(where)][:, column]
        e = (g[None, :] - (here @ g)[:, None]) / max(float(values[tuple(place)]), 1e-16) ** 0.5
        lost += float((here * e).norm())
    kept = torch.where(flat, 0.0, 1 / torch.where(flat, 1.0, values))
    return (vectors * kept[..., None, :]) @ vectors.mT, lost


def potential(scores: Tensor) -> Tensor:
    """The potential g, (…, 1, n), with softmax_j(S_ij + g_j) doubly stochastic.

    Newton's method on Φ with line search, for scores that grow in steps: the solution for s·S is a good start for
    2s·S, also where scores are so far apart that P is nearly a permutation. Beyond that it raises a FloatingPointError.
    """
    S = scores.detach().double()
    spread = float((S.amax((-1, -2)) - S.amin((-1, -2))).max())
    halvings = max(0, math.ceil(math.log2(max(spread, 1e-300) / _GENTLE)))
    g = torch.zeros_like(S[..., :1, :])
    for step in range(halvings, -1, -1):
        g = _minimise(S / 2**step, 2 * g)
    error = float(_column_error(S, g).abs().max())
    if not error < 1e-8:
        raise FloatingPointError(
            f"Sinkhorn's normalisation leaves column sums off by {error:.1e}: the scores are too far apart for doubly "
            "stochastic weights in float64. Rescale the tokens or the weights."
        )
    return (g - g.mean(-1, keepdim=True)).to(scores)


def _minimise(S: Tensor, g: Tensor) -> Tensor:
    """The minimiser of Φ, from g."""
    value = _objective(S, g)
    for _ in range(_STEPS):
        gradient = _column_error(S, g)
        size = gradient.abs().amax((-1, -2), keepdim=True)
        if float(size.max()) < 1e-13 * S.shape[-1]:
            break
        # Φ may be almost flat: a shift in proportion to the gradient keeps steps finite and the convergence quadratic.
        step = newton_step(S, g, 1e-3 * size + _SHIFT)
        slope, length = (gradient * step).sum(-1, keepdim=True), torch.ones_like(value)
        for _ in range(30):
            worse = _objective(S, g + length * step) > value + 1e-4 * length * slope + 1e-13 * value.abs()
            if not bool(worse.any()):
                break
            length = torch.where(worse, length / 2, length)
        g = g + length * step
        value = _objective(S, g)
    return g


def _objective(S: Tensor, g: Tensor) -> Tensor:
    return torch.logsumexp(S + g, -1, keepdim=True).sum(-2, keepdim=True) - g.sum(-1, keepdim=True)


def _column_error(S: Tensor, g: Tensor) -> Tensor:
    return torch.softmax(S + g, -1).sum(-2, keepdim=True) - 1


def _curvature(P: Tensor) -> Tensor:
    """The Hessian of Φ, with 11ᵀ/n on the direction of constants, in which Φ does not change."""
    n = P.shape[-1]
    return torch.diag_embed(P.sum(-2)) - P.mT @ P + 1 / n


def newton_step(S: Tensor, g: Tensor, shift: Tensor | float = _SHIFT) -> Tensor:
    """The step −(H + shift)⁻¹∇Φ, (…, 1, n)."""
    P = torch.softmax(S + g, -1)
    gradient = P.sum(-2, keepdim=True) - 1
    identity = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    found: Tensor = torch.linalg.solve(_curvature(P) + shift * identity, -gradient.mT)
    return found.mT
