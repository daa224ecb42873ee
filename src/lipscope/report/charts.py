"""Figures as data: a chart is a grid of panels, a panel holds series with their axes, or the cells of a heat map.

``draw_print`` draws them by matplotlib, ``draw_page`` by Plotly, with the same numbers. Colours are names of the palette,
and no meaning hangs on colour alone: line styles, markers and names differ too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from lipscope.report.palette import ink_on, viridis
from lipscope.rounding import round_down

Look = Literal["line", "dashes", "dots", "points", "marks", "band"]
Group = Literal["measured", "fit", "guide", "bound"]

# Drawn to scale, a bound beyond FAR times everything else would press the rest into one line: it gets a part of the axis of
# its own. One beyond OUT_OF_SIGHT times would do that to other bounds: the legend tells it.
FAR, OUT_OF_SIGHT = 3.0, 1e9
# More ticks than this run into each other.
_MOST_TICKS = 16
_MARKERS = 5


@dataclass(frozen=True)
class Series:
    """One curve, cloud or band.

    Attributes:
        name: in the legend.
        x: horizontal positions.
        y: heights.
        look: ``line``, ``dashes``, ``dots``, ``points``, ``marks`` (crosses) or ``band`` (between ``low`` and ``high``).
        colour: its name in the palette.
        low: lower ends of intervals, or of the band.
        high: upper ends.
        group: what it belongs to: ``measured`` (lines have markers), ``fit``, ``guide`` (thin) or ``bound`` (may lie far).
        hover: a line of words for every point.
        listed: whether the legend shows it.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    look: Look = "line"
    colour: str = "blue"
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    group: Group = "measured"
    hover: Sequence[str] = ()
    listed: bool = True


@dataclass(frozen=True)
class Panel:
    """Series with their axes.

    Attributes:
        series: what is drawn.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        title: what tells it from the other panels of its chart.
        x_log: logarithmic horizontal axis.
        y_log: logarithmic vertical axis.
        x_ticks: where the horizontal axis has numbers, by default anywhere.
        x_names: names in place of these numbers.
        from_zero: whether a linear vertical axis begins at zero.
    """

    series: Sequence[Series]
    x: str
    y: str
    title: str = ""
    x_log: bool = False
    y_log: bool = False
    x_ticks: Sequence[float] = ()
    x_names: Sequence[str] = ()
    from_zero: bool = True

    @cached_property
    def highest(self) -> float:
        """The largest value of what is no bound; infinite where there is nothing but bounds."""
        return max((y for one in self.series if one.group != "bound" for y in (*one.y, *one.high)), default=math.inf)

    @cached_property
    def drawn(self) -> list[Series]:
        """The series; bounds that are out of sight are empty, and their names say how large they are."""
        shown, limit = [], min(OUT_OF_SIGHT * self.highest, sys.float_info.max)
        for one in self.series:
            hidden = one.group == "bound" and len(one.y) > 0 and min(one.y) > limit
            if hidden:
                size = f"{round_down(min(one.y), 3)} or more" if math.isfinite(min(one.y)) else "infinite"
                one = replace(one, name=f"{one.name}: {size}", x=(), y=(), hover=())
            shown.append(one)
        return shown

    @cached_property
    def far(self) -> list[Series]:
        """Bounds that lie far above everything else."""
        return [one for one in self.drawn if one.group == "bound" and len(one.y) and min(one.y) > FAR * self.highest]

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Numbers of the horizontal axis with their names; empty where the renderer is to choose."""
        if len(self.x_ticks) > _MOST_TICKS and not self.x_names:
            return []
        names = self.x_names or [f"{tick:.4g}" for tick in self.x_ticks]
        return list(zip(self.x_ticks, names, strict=True))

    def marker(self, series: Series) -> int:
        """Number of the marker of a cloud: markers differ where there are a few clouds."""
        clouds = [one for one in self.drawn if one.look == "points"]
        return clouds.index(series) if series in clouds and 1 < len(clouds) <= _MARKERS else 0


@dataclass(frozen=True)
class HeatCell:
    """One cell of a heat map."""

    value: float  # what its colour shows
    shown: str  # the value as people read it
    words: str  # where it is, and its value
    shade: float  # from 0 (least) to 1 (largest) on a logarithmic scale
    cell: int | None = None  # number of the cell that a click on it chooses, if any

    @property
    def colour(self) -> str:
        """Background, as #rrggbb."""
        return viridis(self.shade)

    @property
    def ink(self) -> str:
        """Text that can be read on it."""
        return ink_on(self.colour)


@dataclass(frozen=True)
class HeatMap:
    """A panel of cells, their colours on a logarithmic scale from ``low`` to ``high``; None where nothing was measured."""

    column_names: Sequence[str]
    row_names: Sequence[str]
    cells: Sequence[Sequence[HeatCell | None]]
    low: float
    high: float
    title: str
    words: str
    x: str
    y: str = "layer"
    label: str = "σ"  # what the colours show


@dataclass(frozen=True, repr=False)
class Chart:
    """A grid of panels.

    Attributes:
        name: of its file.
        title: what it shows.
        panels: row by row.
        words: the text alternative.
        columns: panels in a row.
        note: a line below the title.
    """

    name: str
    title: str
    panels: Sequence[Panel | HeatMap]
    words: str
    columns: int = 1
    note: str = ""

    def __repr__(self) -> str:
        return f"<Chart {self.name}: {self.title}>"

    def _repr_png_(self) -> bytes:
        """The chart as a notebook shows it."""
        from lipscope.report.draw_print import png

        return png(self)

    @property
    def series(self) -> list[Series]:
        """The series of all panels."""
        return [one for panel in self.panels if isinstance(panel, Panel) for one in panel.series]


def shade(value: float, low: float, high: float) -> float:
    """Where a value lies between two others on a logarithmic scale, from 0 to 1.

    Example:
        >>> shade(10.0, 1.0, 100.0)
        0.5
    """
    if value <= 0 or low <= 0:
        return 0.0
    return 1.0 if high <= low else min(1.0, max(0.0, math.log(value / low) / math.log(high / low)))


def log_grid(low: float, high: float, points: int = 17) -> list[float]:
    """Points at even steps on a logarithmic axis, for curves that bend.

    Example:
        >>> log_grid(1.0, 100.0, 3)
        [1.0, 10.0, 100.0]
    """
    return [low] if low == high else [low * (high / low) ** (k / (points - 1)) for k in range(points)]


def log_ticks(low: float, high: float) -> list[float]:
    """Where a logarithmic axis has numbers: powers of ten, or 1, 2, 5, or even steps, by how much is in view.

    Example:
        >>> log_ticks(3.0, 40.0), log_ticks(2.0, 20000.0), log_ticks(0.133, 0.152), log_ticks(1.37, 9.9)
        ([5.0, 10.0, 20.0], [10.0, 100.0, 1000.0, 10000.0], [0.135, 0.14, 0.145, 0.15], [2.0, 4.0, 6.0, 8.0])
    """
    first, last = math.floor(math.log10(low)), math.floor(math.log10(high))
    powers = range(first, last + 1)
    ticks = [tick for k in powers if low <= (tick := 10.0**k) <= high]
    if len(ticks) > 7:
        ticks = ticks[:: math.ceil(len(ticks) / 6)]
    if len(ticks) < 4:
        ticks = [tick for k in powers for m in (1, 2, 5) if low <= (tick := float(f"{m}e{k}")) <= high]
    if len(ticks) < 3 and high > low:
        unit = 10.0 ** math.floor(math.log10((high - low) / 4))
        for step in (10 * unit, 5 * unit, 2 * unit, unit):
            inside = range(math.ceil(low / step), math.floor(high / step) + 1)
            if len(inside) > 2:
                return [float(f"{k * step:.6g}") for k in inside]
    return ticks
