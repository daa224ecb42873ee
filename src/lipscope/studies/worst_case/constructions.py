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

Such inputs are made of a few distinct tokens, each repeated: n tokens cost no more than the distinct ones.

m_b copies of a token are one token whose score has log m_b added, so attention over n tokens is attention over the g
distinct ones with that additive term, for every head, soft-cap and sink: attention of a measure (``mean_field``).
``group_gain`` is one block of the Jacobian: the gain of moving the m tokens at u together, seen by the n−m tokens at w, for
one plain head √((n−m)/m)·p·‖V(I + (1−p)(u−w)(Aw)ᵀ)‖. Under the causal mask, with the tokens at u first, row m+i sees m
tokens at u and i at w, and the blocks of all rows stack up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal, Full
from lipscope.attention.norms import Normalisation
from lipscope.bounds.domain import domain_of
from lipscope.bounds.pairs import HeadPairs, PlainHead, tokens
from lipscope.bounds.registry import names as bound_names
from lipscope.measure.sigma import local_lipschitz
from lipscope.spectral.autodiff import AutodiffOperator
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Auto, Solver
from lipscope.studies.mean_field.attention import MeanFieldAttention, mean_field_operator
from lipscope.studies.mean_field.measures import Measure
from lipscope.studies.rows import Row, sigma_row


def has_closed_form(layer: Attention, *, causal: bool = True) -> bool:
    """Whether repeated tokens are interchangeable: no additive bias, and no mask but (where allowed) the causal one."""
    # Rotary embeddings, where a layer has them, tell copies at different positions apart.
    if layer.bias is not None or getattr(layer, "rotary", None) is not None:
        return False
    return isinstance(layer.mask, (Full, Causal) if causal else Full)


def grouped_sigma(layer: Attention, tokens: Tensor, counts: Sequence[float]) -> float:
    """σ of an unmasked layer at ``counts[b]`` copies of ``tokens[b]``, exact up to rounding, at a cost that ignores n.

    Args:
        layer: an unmasked layer without additive bias.
        tokens: the distinct tokens (g, d).
        counts: how often each occurs.

    Raises:
        ValueError: when the layer has a mask or an additive bias, or a count is below 1.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(1, dtype=torch.float64)
        >>> layer = lipscope.Attention(-W, W, W, scale=1.0)
        >>> X = torch.tensor([[-1.0]] + [[1.0]] * 7, dtype=torch.float64)
        >>> bool(abs(grouped_sigma(layer, X[:2], [1, 7]) - lipscope.local_lipschitz(layer, X).estimate) < 1e-12)
        True
    """
    if not has_closed_form(layer, causal=False):
        raise ValueError(f"grouped_sigma needs an unmasked layer without additive bias, got mask {layer.mask}")
    if tokens.ndim != 2:
        raise ValueError(f"tokens must have shape (g, d), got {tuple(tokens.shape)}")
    if len(counts) != tokens.shape[0] or min(counts) < 1:
        raise ValueError(f"counts must give at least one copy of each of the {tokens.shape[0]} tokens, got {list(counts)}")
    total = math.fsum(counts)
    F = MeanFieldAttention(layer, None if layer.sinks is None else total)
    # Copies of a token also move against one another, as the two halves of an atom do.
    several = [b for b, count in enumerate(counts) if count >= 2]
    measure = Measure(tokens, torch.tensor(counts, dtype=torch.float64) / total).split(2, several)
    return float(torch.linalg.matrix_norm(mean_field_operator(F, measure).to_dense()[0], 2))


def group_gain(layer: Attention, u: Tensor, w: Tensor, n: int, m: int) -> float:
    """A lower bound for σ at m tokens u followed by n−m tokens w: the gain of moving those at u together, seen at w.

    For one plain head this is ``bounds.pairs.two_groups``, or ``causal_groups``; it holds for several heads, biases,
    grouped queries, soft-cap and sinks alike.
    """
    if not has_closed_form(layer):
        raise ValueError(f"the closed form needs a full or causal mask and no additive bias, got mask {layer.mask}")
    if not 0 < m < n:
        raise ValueError(f"m must lie between 1 and n − 1 = {n - 1}, got {m}")
    precise = layer.to(torch.float64)
    # How many tokens at w each of the rows sees that are told apart, and how many tokens share a row.
    seen = torch.arange(1, n - m + 1) if isinstance(layer.mask, Causal) else torch.tensor([n - m])
    share = (n - m) / len(seen)
    counts = torch.stack([torch.full_like(seen, m), seen], dim=1).to(precise.q)
    bias = counts.log()[:, None, None].expand(-1, layer.heads, 2, -1)
    grouped = dataclasses.replace(precise, mask=None, bias=bias)

    def at_w(moved: Tensor) -> Tensor:
        """Outputs (1, rows, d_out) of the tokens at w, with those at u moved to (1, d)."""
        return grouped(torch.stack([moved[0], w.to(moved)]).expand(len(seen), 2, -1))[None, :, 1]

    operator = AutodiffOperator(at_w, u.to(precise.q)[None], check=False)
    return math.sqrt(share / m) * float(Auto(rtol=1e-6, interval=None).solve(operator).estimate[0])


NAMES = ("proposition34.max", "proposition34.min", "pair", "groups", "meanfield")
# Symmetric inputs repeat singular values, and without an upper end a solve can settle on a repeated one below the largest.
# Another start vector than the one that measures what is chosen.
RANKING = Auto(rtol=1e-3, interval=0.5, seed=1)


@dataclass(frozen=True, eq=False)
class Construction:
    """A constructed input."""

    name: str  # see the table of this module
    tokens: Tensor = field(repr=False)  # X (n, d), inside the set
    head: int  # the head whose A it was built from
    m: int  # number of tokens at u; the other n−m are at w
    # Closed-form lower bound for σ(X) of the whole layer; None when a mask or additive bias rules it out.
    predicted: float | None
    sigma: SpectralNorm  # the measured σ(X)
    # For ``meanfield`` on a ball and one plain unmasked head, what the closed form tends to as n → ∞; else None.
    limit: float | None = None
    note: str = ""  # what stood in for what, or an empty string

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
    pairs: Sequence[HeadPairs] | None = None,
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
        pairs: those of the heads on this set, when they are known already, say from another n.
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
    pairs = [HeadPairs(precise, h, domain) for h in heads] if pairs is None else pairs
    found = [candidate for each in pairs for candidate in each.all(names, n)]
    X = torch.stack([tokens(c.u, c.w, n, c.m) for c in found])
    # One round for all of them ranks, a second one measures the chosen.
    rough = local_lipschitz(precise, X, solver=RANKING, certificate=False).estimate
    result = []
    for name in names:
        # A head that has the eigenvalue comes before one in which the general pair stands in.
        index = max((i for i, c in enumerate(found) if c.name == name), key=lambda i: (not found[i].note, float(rough[i])))
        c, limit = found[index], None
        predicted = group_gain(precise, c.u, c.w, n, c.m) if has_closed_form(precise) else None
        if name == "meanfield" and domain.norm is None and "lower.meanfield" in bound_names(precise):
            plain = PlainHead.of(precise)
            limit = None if plain.causal else plain.limit(*plain.coordinates(c.u, c.w))
        sigma = local_lipschitz(precise, X[index], solver=solver)
        result.append(Construction(name, X[index], c.head, c.m, predicted, sigma, limit, c.note))
    return tuple(result)


def check_length(attention: Attention, n: int) -> None:
    """Refuse a number of tokens that says nothing, or that the layer is not made for."""
    if not isinstance(n, int) or n < 2:
        raise ValueError(f"n must be an integer of at least 2 (one token alone is mapped affinely), got {n!r}")
    attention.score_rule(n, 1)
