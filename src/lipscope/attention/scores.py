"""From raw scores to probabilities: soft-cap, additive terms, masks, sinks, and a softmax that survives hidden rows.

    s = c·tanh(τ q·k / c) + B       P_ij = exp(s_ij) / (exp(sink) + Σ_l exp(s_il))

A row in which nothing is visible has P = 0, hence output 0 and derivative 0, never NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lipscope.attention.masks import Mask

# Rows and columns of the scores, and the number of tokens that there are.
Part: TypeAlias = tuple[slice, slice, int]


@dataclass(frozen=True, eq=False)
class ScoreRule:
    """What happens between q·k and the softmax. Tensors broadcast to (batch, heads, n, n)."""

    softcap: float | None = None  # c in c·tanh(s/c), or None
    additive: Tensor | None = None  # finite term added after the soft-cap, or None
    allowed: Tensor | None = None  # True where query i sees key j, or None for everywhere
    sinks: Tensor | None = None  # one extra logit per head, shape (heads,), of a virtual token with value zero; or None
    # A rule for who sees whom, beside ``allowed``; it is evaluated where it is needed, tile by tile
    mask: Mask | None = None

    def visible(self, rows: slice, columns: slice, n: int, device: torch.device) -> Tensor | None:
        """True where query i of ``rows`` sees key j of ``columns``, among n tokens; None for everywhere."""
        seen = None if self.allowed is None else tile_of(self.allowed, rows, columns)
        ruled = None if self.mask is None else self.mask.sees(rows, columns, n)
        if ruled is None:
            return seen
        ruled = ruled.to(device)
        return ruled if seen is None else seen & ruled

    def span(self, rows: slice, n: int) -> tuple[int, int]:
        """A range of keys outside which the queries ``rows`` see nothing."""
        return (0, n) if self.mask is None else self.mask.span(rows, n)

    def probabilities(self, raw: Tensor, part: Part | None = None) -> tuple[Tensor, Tensor]:
        """The matrices P and W with dP = W∘dS − P·rowsum(W∘dS), for raw scores S of shape (B, H, n, n).

        W is P itself, times the slope of the soft-cap where there is one. A ``part`` of the scores must hold all columns
        that its rows see.
        """
        scores, slope = self.scores(raw, part)
        P = safe_softmax(scores, self.sinks)
        return P, P if slope is None else P * slope

    def sink_share(self, raw: Tensor, part: Part | None = None) -> Tensor:
        """What the sink takes of every row, (B, H, n, 1): 1 − Σ_j P_ij without its cancellation; arguments as above."""
        assert self.sinks is not None
        total = torch.logsumexp(self.scores(raw, part)[0], -1, keepdim=True)
        return torch.sigmoid(self.sinks[:, None, None].to(total) - total)

    def sink_size(self, scores: float) -> float:
        """The largest logit of a sink that shares a row with scores of this size: beyond e^±750 one of both is nothing."""
        if self.sinks is None:
            return 0.0
        sizes = self.sinks.detach().abs().double()
        return float(torch.where(sizes <= scores + 750, sizes, 0.0).max())

    def scores(self, raw: Tensor, part: Part | None = None) -> tuple[Tensor, Tensor | None]:
        """Scores with soft-cap and additive term, −inf where nothing is seen, and the slope of the soft-cap if any."""
        queries, keys = raw.shape[-2:]
        rows, columns, n = part or (slice(0, queries), slice(0, keys), keys)
        scores, slope = raw, None
        if self.softcap is not None:
            inner = raw / self.softcap
            scores, slope = self.softcap * torch.tanh(inner), tanh_slope(inner)
        if self.additive is not None:
            scores = scores + tile_of(self.additive, rows, columns)
        visible = self.visible(rows, columns, n, scores.device)
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        return scores, slope


def tanh_slope(x: Tensor) -> Tensor:
    """The derivative 1 − tanh²(x) as 4e/(1 + e)², e = exp(−2|x|): with its digits also where tanh is almost ±1."""
    e = torch.exp(-2 * x.abs())
    return 4 * e / (1 + e).square()


def softcap_size(size: float, softcap: float | None) -> float:
    """Score magnitude for the rounding allowance; a soft-cap adds the relative error of its slope, 2·err(s/c)."""
    return size if softcap is None else size * (1 + 1 / softcap)


def tile_of(tensor: Tensor, rows: slice, columns: slice) -> Tensor:
    """Rows and columns of a tensor that may be the same for all queries or for all keys."""
    everything = slice(None)
    return tensor[..., rows if tensor.shape[-2] > 1 else everything, columns if tensor.shape[-1] > 1 else everything]


def safe_softmax(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the last dimension; rows of −inf become rows of zeros, sinks take their share and vanish."""
    peak = scores.amax(-1, keepdim=True)
    if sinks is not None:
        peak = torch.maximum(peak, sinks[:, None, None].to(scores))
    peak = peak.masked_fill(peak == float("-inf"), 0.0)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks[:, None, None].to(scores) - peak)
    return weights / total.masked_fill(total == 0, 1.0)
