"""Inputs at which σ is provably large: two distinct tokens, m copies of u followed by n−m of w.

| name              | tokens                                              | grows as √n up to, and then                   |
|-------------------|-----------------------------------------------------|-----------------------------------------------|
| proposition34.max | (Re, Re/2, …, Re/2), e with eigenvalue γ_max > 0    | n ≈ e^{γ_max R²/4}, decays                    |
| proposition34.min | (−Re, Re, …, Re), e with eigenvalue γ_min < 0       | n ≈ e^{2|γ_min|R²}, decays                    |
| pair              | (u, w, …, w), u and w with the largest (u−w)ᵀAw     | n ≈ e^E, decays; no real eigenvalue is needed |
| groups            | the best of the above with the best m               | levels off                                    |
| meanfield         | −Re and Re as ``proposition34.min``, with the best m | levels off at the two-Dirac constant          |

γ are eigenvalues of A = τW_KᵀW_Q, R the size of the set; on the image of a normalisation A is seen in its coordinates.
Each head of a layer has its own A; the head whose input gives the layer the largest σ is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.norms import Normalisation
from lipscope.bounds.pairs import Candidate, HeadPairs, lower_meanfield, tokens
from lipscope.bounds.registry import names as bound_names
from lipscope.measure.sigma import local_lipschitz
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Auto, Solver
from lipscope.studies.rows import Row, sigma_row
from lipscope.studies.worst_case.domain import Domain, domain_of
from lipscope.studies.worst_case.grouped import group_gain, has_closed_form

NAMES = ("proposition34.max", "proposition34.min", "pair", "groups", "meanfield")


@dataclass(frozen=True, eq=False)
class Construction:
    """A constructed input.

    Attributes:
        name: see the table of this module.
        tokens: X (n, d), inside the set.
        head: the head whose A it was built from.
        m: number of tokens at u; the other n−m are at w.
        predicted: closed-form lower bound for σ(X) of the whole layer; None when a mask or additive bias rules it out.
        sigma: the measured σ(X).
        limit: for ``meanfield`` on a ball and one plain head, the limit n → ∞ that the closed form tends to; else None.
        note: what stood in for what, or an empty string.
    """

    name: str
    tokens: Tensor
    head: int
    m: int
    predicted: float | None
    sigma: SpectralNorm
    limit: float | None = None
    note: str = ""

    def to_row(self) -> Row:
        """A row with the columns of a scan, and how the input was built."""
        own = {"name": self.name, "m": self.m, "predicted": self.predicted, "limit": self.limit, "note": self.note}
        return sigma_row(self.sigma, kind=self.name, tokens=self.tokens, built_from_head=self.head, **own)


def construct(
    attention: Attention,
    n: int,
    *,
    radius: float | None = None,
    norm: Normalisation | None = None,
    names: Sequence[str] = NAMES,
    head: int | None = None,
    solver: Solver | None = None,
) -> tuple[Construction, ...]:
    """Build the constructions for a layer, and measure the layer's σ at each.

    Args:
        attention: the layer; for one head alone pass ``attention.head(h)``.
        n: number of tokens.
        radius: R, for tokens of norm at most R.
        norm: instead of a radius, a ``LayerNorm`` or ``RMSNorm``: tokens in its image.
        names: which ones; all by default.
        head: build from this head's A; by default every head is tried and the one with the largest measured σ is kept.
        solver: how σ is measured; ``Auto()`` by default.

    Returns:
        One ``Construction`` per name, in the order given. A layer without the real eigenvalue that a name needs gets the
        general pair instead, with a note.

    Raises:
        ValueError: when n < 2, the radius is not positive, a name is unknown, or the layer is made for another n.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> layer = lipscope.Attention(-W, W, W, scale=1.0)             # A = −I
        >>> pair = lipscope.studies.worst_case.construct(layer, 5, radius=1.0, names=["pair"])[0]
        >>> pair.predicted <= pair.sigma.upper
        True
    """
    domain = domain_of(radius, norm, attention.width)
    if not names:
        raise ValueError(f"names is empty; constructions are: {', '.join(NAMES)}")
    for name in names:
        if name not in NAMES:
            raise ValueError(f"unknown construction {name!r}; constructions are: {', '.join(NAMES)}")
    heads = range(attention.heads) if head is None else [head]
    check_length(attention, n)
    precise = attention.to(torch.float64)
    affine = domain.affine(precise.q)
    pairs = [HeadPairs(precise, h, affine, domain.size, lambda z: domain.tokens(domain.project(z))) for h in heads]
    found = [candidate for each in pairs for candidate in each.all(names, n)]
    X = torch.stack([tokens(c.u, c.w, n, c.m) for c in found])
    # Symmetric inputs repeat singular values: one round for all of them ranks, a second one measures the chosen.
    rough = local_lipschitz(precise, X, solver=Auto(rtol=1e-3, interval=None), certificate=False).estimate
    result = []
    for name in names:
        # A head that has the eigenvalue comes before one in which the general pair stands in.
        index = max((i for i, c in enumerate(found) if c.name == name), key=lambda i: (not found[i].note, float(rough[i])))
        result.append(_finish(precise, found[index], X[index], domain, solver))
    return tuple(result)


def _finish(layer: Attention, c: Candidate, X: Tensor, domain: Domain, solver: Solver | None) -> Construction:
    n = X.shape[0]
    predicted = group_gain(layer, c.u, c.w, n, c.m) if has_closed_form(layer) else None
    limit = None
    if c.name == "meanfield" and not c.note and domain.norm is None and "lower.meanfield" in bound_names(layer):
        bound = lower_meanfield(layer, domain.radius)
        limit = None if bound is None else bound.value
    return Construction(c.name, X, c.head, c.m, predicted, local_lipschitz(layer, X, solver=solver), limit, c.note)


def check_length(attention: Attention, n: int) -> None:
    """Refuse a number of tokens that says nothing, or that the layer is not made for."""
    if not isinstance(n, int) or n < 2:
        raise ValueError(f"n must be an integer of at least 2 (one token alone is mapped affinely), got {n!r}")
    attention.score_rule(n, 1)
