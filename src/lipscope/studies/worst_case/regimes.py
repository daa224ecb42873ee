"""The (n, R) map of one head: where its worst σ grows as √n, where its bound is level, and what is reached on the way.

A set of tokens (ball, sphere, image of a normalisation) is scaled to every radius R. The borders n = 1 + e^E and n = κ
divide the plane into √n growth (short inputs, large radii), plateau (long inputs, small radii) and what lies between. At the
set itself upper and lower bound are followed past both borders, and constructions and ascent are measured at lengths one can
measure. Theorems and proofs: docs/theory/mean-field.md, §5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lipscope.attention.layer import Attention
from lipscope.attention.norms import LayerNorm, Normalisation
from lipscope.bounds.domain import domain_of
from lipscope.bounds.exponent import Regime, covering_exponent, regimes
from lipscope.bounds.pairs import HeadPairs
from lipscope.bounds.registry import least
from lipscope.bounds.weights import layer_weights
from lipscope.studies.worst_case.ascent import Progress
from lipscope.studies.worst_case.growth_in_n import Growth, growth

SCALES = tuple(2.0 ** (step / 2) for step in range(-8, 5))
# Lengths at which the bounds are followed; the largest power of two among floats is not far beyond the last.
_POINTS, _LARGEST = 32, 990


@dataclass(frozen=True, eq=False)
class RegimeMap:
    """Where a head is in the (n, R) plane, and its worst σ over n at one set."""

    borders: tuple[tuple[float, Regime], ...]  # the radius of the scaled set with its borders in n, for every scale
    here: Regime  # the borders of the set itself
    lengths: tuple[int, ...]  # powers of two, past both borders of the set where floats reach that far
    lower: tuple[float, ...]  # at every length, what the supremum of σ over the set is at least
    upper: tuple[float, ...]  # what it is at most
    found: Growth  # constructions and ascent at the measured lengths

    def to_dict(self) -> dict[str, Any]:
        """Borders and bounds as plain values; rows of σ are those of ``found``."""
        borders = [{"radius": radius, **vars(regime)} for radius, regime in self.borders]
        bounds = zip(map(float, self.lengths), self.lower, self.upper, strict=True)
        return {"borders": borders, "bounds": [{"n": n, "lower": low, "upper": high} for n, low, high in bounds]}


def regime_map(
    attention: Attention,
    lengths: Sequence[int] = (2, 4, 8, 16, 32, 64),
    *,
    radius: float | None = None,
    norm: Normalisation | None = None,
    scales: Sequence[float] = SCALES,
    restarts: int = 4,
    steps: int = 30,
    progress: Progress | None = None,
) -> RegimeMap:
    """Draw the map of one head: borders in n for every radius, bounds and worst inputs for the set itself.

    Args:
        attention: one head, full or causal mask: ``layer.head(h)``.
        lengths: numbers of tokens at which constructions and ascent are measured.
        radius: R, for tokens of norm at most R.
        norm: instead of a radius, a ``LayerNorm`` or ``RMSNorm``: tokens in its image, with ε = 0 an ellipsoid.
        scales: by how much the set is scaled for the borders; gains and offset of a norm alike.
        restarts: of the ascent, see ``maximise``.
        steps: of the ascent.
        progress: called with (lengths done, lengths, what).

    Raises:
        ValueError: for several heads, and where ``lipscope.bounds.exponent.regimes`` has no borders.

    Example:
        >>> I = torch.eye(2, dtype=torch.float64)
        >>> found = regime_map(Attention(-I, I, I, scale=1.0), [2, 4, 8], radius=1.5, steps=2)
        >>> [found.here.at(n) for n in (8, 10**6)]
        ['√n growth', 'plateau']
        >>> all(low <= high for low, high in zip(found.lower, found.upper))
        True
    """
    if attention.heads != 1:
        raise ValueError(f"a map is of one head, got {attention.heads}: give attention.head(h)")
    domain = domain_of(radius, norm, attention.width)
    borders = []
    for scale in scales:
        larger = None if norm is None else replace(norm, weight=scale * norm.weight)
        if isinstance(larger, LayerNorm) and larger.bias is not None:
            larger = replace(larger, bias=scale * larger.bias)
        there = domain_of(None if radius is None else scale * radius, larger, attention.width)
        borders.append((there.radius, regimes(attention, there)[0]))
    (here,) = regimes(attention, domain)
    pairs = HeadPairs(attention.to(torch.float64), 0, domain)
    u, w = pairs.best()
    image = attention.v.double() @ (u - w)
    image = image if attention.out is None else attention.out.double() @ image
    gain = float(torch.linalg.vector_norm(image) / torch.linalg.vector_norm(u - w).clamp_min(1e-300))
    gain = max(0.0, gain - layer_weights(attention).image[0].value_error)
    every = covering_exponent(attention, domain.radius, domain=domain)
    last = math.ceil(min(_LARGEST, max(here.log_plateau, math.log(max(lengths))) / math.log(2) + 4))
    turn = round(here.exponent / math.log(2))
    sizes = [2**k for k in sorted({*np.linspace(1, last, _POINTS).astype(int).tolist()})]
    lower: list[float] = []
    upper: list[float] = []
    for n in sizes:
        grown = 2 ** int(min(math.log2(n), here.log_growth / math.log(2)))
        # Groups of about n/e^E tokens gain most. Copies of a shorter input move together, so its value holds for n too.
        groups = {1, *(n >> shift for shift in range(max(1, turn - 6), turn + 7))} - {0}
        reached = (*(pairs.gain((u, w), n, m) for m in groups), math.sqrt(grown - 1) / 2 * gain, *lower[-1:])
        allowed = (least("refined", attention, domain.radius, n), None if every is None else every.value)
        lower.append(max(reached))
        upper.append(min(value for value in allowed if value is not None))
    found = growth(
        attention, lengths, radius=radius, norm=norm, method="ascend", restarts=restarts, steps=steps, progress=progress
    )
    return RegimeMap(tuple(borders), here, tuple(sizes), tuple(lower), tuple(upper), found)
