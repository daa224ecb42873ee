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
distinct ones with that additive term, for every head, soft-cap and sink. Unmasked, J commutes with permutations inside
the groups and falls apart into

    moving groups as wholes      D J_g D⁻¹,  D = diag(√m_b),  J_g the Jacobian of the g-token layer
    moving against one another   B_b, the part of ∂out_b/∂x_b that goes through the query, once m_b ≥ 2

so σ is the largest of these norms, exactly, whatever n. ``GroupGain`` is one block of it: the gain of moving the m tokens
at u together, seen by the n−m tokens at w, whose norm for one plain head is √((n−m)/m)·p·‖V(I + (1−p)(u−w)(Aw)ᵀ)‖. Under
the causal mask, with the tokens at u first, row m+i sees m tokens at u and i at w, and the blocks of all rows stack up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.attention.core import group_queries
from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal, Full
from lipscope.attention.norms import Normalisation
from lipscope.attention.operators import AttentionOperator
from lipscope.bounds.domain import domain_of
from lipscope.bounds.pairs import HeadPairs, PlainHead, tokens
from lipscope.bounds.registry import names as bound_names
from lipscope.measure.sigma import local_lipschitz
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Auto, Solver
from lipscope.studies.rows import Row, sigma_row


def grouped_layer(layer: Attention, counts: Tensor) -> Attention:
    """The layer on distinct tokens that stand for ``counts`` (items, g) copies each; counts need not be integers."""
    bias = counts.to(layer.q).log()[:, None, None, :].expand(-1, layer.heads, counts.shape[1], -1)
    return dataclasses.replace(layer, mask=None, bias=bias)


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
    if len(counts) != tokens.shape[0] or min(counts) < 1:
        raise ValueError(f"counts must give at least one copy of each of the {tokens.shape[0]} tokens, got {list(counts)}")
    precise = layer.to(torch.float64)
    weights = torch.tensor([list(counts)], dtype=torch.float64)
    operator = AttentionOperator.at(grouped_layer(precise, weights), tokens.double()[None])
    g, d, d_out = tokens.shape[0], precise.width, precise.output_width
    scale = weights[0].sqrt()
    J = operator.to_dense()[0].reshape(g, d_out, g, d) * scale[:, None, None, None] / scale[None, None, :, None]
    norms = [float(torch.linalg.matrix_norm(J.reshape(g * d_out, g * d), 2))]
    norms += [float(torch.linalg.matrix_norm(_through_query(precise, operator, b), 2)) for b in range(g) if counts[b] >= 2]
    return max(norms)


def _through_query(layer: Attention, operator: AttentionOperator, token: int) -> Tensor:
    """B_b (d_out, d): what moving token b does to its own output through its query alone."""
    n, d = operator.input_shape
    units = torch.zeros(d, n, d, dtype=operator.dtype)
    units[:, token] = torch.eye(d, dtype=operator.dtype)
    dq, dk, dv = layer.split_heads(units @ layer.qkv.mT)
    many = operator.select(torch.zeros(d, dtype=torch.int64))
    moved = many.core.jvp(group_queries(dq, layer.kv_heads), torch.zeros_like(dk), torch.zeros_like(dv))
    return layer.merge_heads(moved)[:, token].mT


class GroupGain(Operator):
    """The block of J from the m tokens at u, moved together, to the n−m tokens at w; full or causal mask."""

    def __init__(self, layer: Attention, u: Tensor, w: Tensor, n: int, m: int) -> None:
        if isinstance(layer.mask, Causal):
            later = torch.arange(1, n - m + 1, dtype=torch.float64)
            counts = torch.stack([torch.full_like(later, m), later], dim=1)
            self._weight = 1 / math.sqrt(m)
        else:
            counts = torch.tensor([[float(m), float(n - m)]], dtype=torch.float64)
            self._weight = math.sqrt((n - m) / m)
        pair = torch.stack([u, w]).to(layer.q).expand(counts.shape[0], 2, -1)
        self._inner = AttentionOperator.at(grouped_layer(layer, counts), pair)
        self._rows = counts.shape[0]
        self.batch = 1
        self.input_shape, self.output_shape = (layer.width,), (self._rows, layer.output_width)
        self.dtype, self.device = layer.dtype, layer.device

    @property
    def rounding_error(self) -> float:
        """That of the grouped layer."""
        return self._inner.rounding_error

    @property
    def rounding_floor(self) -> float:
        """That of the grouped layer, all rows together."""
        return self._weight * float(torch.as_tensor(self._inner.rounding_floor).norm())

    def matvec(self, u: Tensor) -> Tensor:
        """The rows at w for a common displacement (1, d) of the tokens at u."""
        moved = torch.stack([u, torch.zeros_like(u)], dim=1).expand(self._rows, -1, -1)
        outputs = self._inner.matvec(moved.reshape(self._rows, -1)).reshape(self._rows, 2, -1)
        return self._weight * outputs[:, 1].reshape(1, -1)

    def rmatvec(self, g: Tensor) -> Tensor:
        """The transpose."""
        rows = g.reshape(self._rows, -1)
        seen = self._inner.rmatvec(torch.stack([torch.zeros_like(rows), rows], dim=1).flatten(1))
        return self._weight * seen.reshape(self._rows, 2, -1)[:, 0].sum(0, keepdim=True)

    def select(self, items: Tensor) -> GroupGain:
        """There is one item."""
        return self


def group_gain(layer: Attention, u: Tensor, w: Tensor, n: int, m: int) -> float:
    """A lower bound for σ at m tokens u followed by n−m tokens w: the norm of ``GroupGain``.

    For one plain head this is ``bounds.pairs.two_groups``, or ``causal_groups``; it holds for several heads, biases,
    grouped queries, soft-cap and sinks alike.
    """
    if not has_closed_form(layer):
        raise ValueError(f"the closed form needs a full or causal mask and no additive bias, got mask {layer.mask}")
    if not 0 < m < n:
        raise ValueError(f"m must lie between 1 and n − 1 = {n - 1}, got {m}")
    operator = GroupGain(layer.to(torch.float64), u, w, n, m)
    return float(Auto(rtol=1e-6, interval=None).solve(operator).estimate[0])


NAMES = ("proposition34.max", "proposition34.min", "pair", "groups", "meanfield")
# Symmetric inputs repeat singular values, and without an upper end a solve can settle on a repeated one below the largest.
# Another start vector than the one that measures what is chosen.
RANKING = Auto(rtol=1e-3, interval=0.5, seed=1)


@dataclass(frozen=True, eq=False)
class Construction:
    """A constructed input."""

    name: str  # see the table of this module
    tokens: Tensor  # X (n, d), inside the set
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
    pairs = [HeadPairs(precise, h, domain) for h in heads]
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
