"""Inputs made of a few distinct tokens, each repeated: n tokens cost no more than the distinct ones.

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

import torch
from torch import Tensor

from lipscope.attention.core import group_queries
from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal, Full
from lipscope.attention.operators import AttentionOperator
from lipscope.spectral.operator import Operator
from lipscope.spectral.solvers import Auto


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
