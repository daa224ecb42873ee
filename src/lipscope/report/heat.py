"""The heat map of σ: layer × head where heads were measured, layer × length otherwise; and its colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lipscope.report.data import Setting
from lipscope.report.summary import interval, number

# Stops of the colour map viridis (van der Walt and Smith 2015): even steps look even, also in grey and to the colour-blind.
VIRIDIS = (
    (68, 1, 84), (72, 36, 117), (65, 68, 135), (53, 95, 141), (42, 120, 142), (33, 145, 140), (34, 168, 132), (68, 191, 112),
    (122, 209, 81), (189, 223, 38), (253, 231, 37),
)  # fmt: skip


@dataclass(frozen=True)
class HeatCell:
    """One place of the map.

    Attributes:
        cell: number of the cell in its setting, None where nothing was measured.
        n: the length it shows.
        value: median σ.
        words: the place, its σ and its interval.
        shade: from 0 (least) to 1 (largest) on a logarithmic scale.
    """

    cell: int | None
    n: int | None
    value: float
    words: str
    shade: float

    @property
    def shown(self) -> str:
        """The value as the rest of the report writes it."""
        return number(self.value)

    @property
    def colour(self) -> str:
        """Background, as #rrggbb."""
        return viridis(self.shade)

    @property
    def ink(self) -> str:
        """Text that can be read on it."""
        return "#000000" if _luminance(self.colour) > _READABLE else "#ffffff"


@dataclass(frozen=True)
class HeatMap:
    """Rows are layers, columns heads or lengths."""

    columns: str
    column_names: Sequence[str]
    row_names: Sequence[str]
    cells: Sequence[Sequence[HeatCell | None]]
    low: float
    high: float
    title: str

    @property
    def words(self) -> str:
        """The text alternative."""
        return f"{self.title}. From {number(self.low)} to {number(self.high)}."


def heat_map(setting: Setting) -> HeatMap:
    """Median σ of every cell, at the longest length for heads."""
    layers = sorted({cell.layer for cell in setting.cells})
    found: dict[tuple[int, int], tuple[int, int, float, str]] = {}
    longest = setting.lengths[-1]
    if setting.by_head:
        columns = sorted({cell.head for cell in setting.cells if cell.head is not None})
        names = [str(h) for h in columns]
    else:
        columns, names = setting.lengths, [str(n) for n in setting.lengths]
    for index, cell in enumerate(setting.cells):
        for p in cell.points:
            if setting.by_head and (p.n != longest or cell.head is None):
                continue
            words = f"{cell.where}, n = {p.n}: σ ≈ {number(p.median)}, in {interval(p.lower, p.upper)}"
            found[cell.layer, p.n if cell.head is None else cell.head] = (index, p.n, p.median, words)
    values = [value for _, _, value, _ in found.values() if value > 0]
    low, high = min(values, default=0.0), max(values, default=0.0)
    cells = []
    for layer in layers:
        line: list[HeatCell | None] = []
        for column in columns:
            at = found.get((layer, column))
            line.append(None if at is None else HeatCell(*at, shade(at[2], low, high)))
        cells.append(line)
    what = f"every head at n = {longest}" if setting.by_head else "every layer and length"
    return HeatMap(
        "head" if setting.by_head else "n", names, [str(layer) for layer in layers], cells, low, high, f"Median σ of {what}"
    )


def shade(value: float, low: float, high: float) -> float:
    """Where a value lies between two others on a logarithmic scale, from 0 to 1.

    Example:
        >>> shade(10.0, 1.0, 100.0)
        0.5
    """
    if value <= 0 or low <= 0:
        return 0.0
    return 1.0 if high <= low else min(1.0, max(0.0, math.log(value / low) / math.log(high / low)))


# Above this luminance black has the larger contrast, below it white (WCAG 2.2, contrast ratio).
_READABLE = 0.179


def _luminance(colour: str) -> float:
    channels = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def viridis(t: float) -> str:
    """A colour of the map, t from 0 to 1."""
    place = min(max(t, 0.0), 1.0) * (len(VIRIDIS) - 1)
    k = min(int(place), len(VIRIDIS) - 2)
    mixed = (a + (place - k) * (b - a) for a, b in zip(VIRIDIS[k], VIRIDIS[k + 1], strict=True))
    return "#" + "".join(f"{round(channel):02x}" for channel in mixed)
