"""What a layer does to queries and keys by position, found by showing it the same token at every place.

If every token is z, the core receives R_t(W z + b) at place t. When R_t turns (and perhaps stretches) pairs of coordinates,
it is one complex number per pair, the same for all heads, for queries and for keys and for every z, so few samples
determine it and many check it. Which coordinates form a pair, and how many are turned, is tried out, not read from a name.

Only R_t R_s⁻¹ can be known: W is found in the frame of the first place, which changes no score.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.attention.rotary import Rotary

# Heads and places that are enough to tell layouts apart; the tables themselves are fitted to all.
_HEADS, _PLACES = 8, 64


@dataclass(frozen=True)
class Layout:
    """The first ``width`` coordinates are turned; pairs are neighbours, or lie half the width apart."""

    width: int
    interleaved: bool

    def pairs(self, t: Tensor) -> Tensor:
        """(…, dk) → complex (…, width/2)."""
        moving = t[..., : self.width]
        if self.interleaved:
            return torch.complex(moving[..., 0::2].contiguous(), moving[..., 1::2].contiguous())
        half = self.width // 2
        return torch.complex(moving[..., :half].contiguous(), moving[..., half:].contiguous())

    def fit(self, seen: Tensor, reference: Tensor) -> Tensor:
        """The complex numbers c_t with seen_t ≈ c_t·reference, by least squares over the samples.

        Args:
            seen: what the core received, (samples, B, n, dk).
            reference: the same before it was turned, (samples, dk).

        Returns:
            Complex (B, n, width/2).
        """
        before = self.pairs(reference)
        weight = before.abs().square().sum(0).clamp_min(torch.finfo(reference.dtype).tiny)
        return (before.conj()[:, None, None] * self.pairs(seen)).sum(0) / weight

    def error(self, seen: Tensor, reference: Tensor) -> float:
        """How far ``seen`` is from a turned ``reference``, the coordinates that stay included."""
        turned = self.fit(seen, reference) * self.pairs(reference)[:, None, None]
        moving = (turned - self.pairs(seen)).abs().amax()
        still = (seen[..., self.width :] - reference[:, None, None, self.width :]).abs()
        return max(float(moving), float(still.amax()) if still.numel() else 0.0)

    def table(self, numbers: Tensor) -> Rotary:
        """The rotations as tables, (n, r) when all inputs share them."""
        if bool((numbers == numbers[:1]).all()):
            numbers = numbers[0]

        def spread(t: Tensor) -> Tensor:
            return t.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat([t, t], dim=-1)

        return Rotary(spread(numbers.real), spread(numbers.imag), self.interleaved)


def find_layout(seen: Tensor, reference: Tensor, allowed: float) -> Layout | None:
    """The layout that explains what was seen with the smallest error, None when every error exceeds ``allowed``."""
    samples, _, n, dk = seen.shape
    heads = torch.linspace(0, samples - 1, min(samples, _HEADS)).long().unique()
    places = torch.linspace(0, n - 1, min(n, _PLACES)).long().unique()
    few, before = seen[heads][:, :, places], reference[heads]
    candidates = [Layout(width, woven) for width in range(dk - dk % 2, 0, -2) for woven in (False, True)]
    if not candidates:
        return None
    best = min(candidates, key=lambda layout: layout.error(few, before))
    return best if best.error(seen, reference) <= allowed else None
