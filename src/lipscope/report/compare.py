"""Two runs side by side: before and after fine-tuning, random and pretrained, two texts.

Settings with the same scope are paired, those of the same kind, options, dtype, text and model first, and what a pair does
not share is said; cells by layer and head, at the longest length that both runs have. Two models are compared cell by cell
only when they have the same cells: layer 3 of six and layer 3 of thirty have nothing but a number in common. A change is
called clear when the ranges of the two do not overlap: then every input of the one has a larger σ than every input of the
other.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lipscope.report.charts import Chart, Panel, Series
from lipscope.report.run_charts import layers_panel, point_series
from lipscope.report.settings import Cell, ReportData, Setting
from lipscope.report.summary import exponent, exponents, places
from lipscope.rounding import number
from lipscope.runs.fit import TOO_FEW
from lipscope.runs.run import Point

_SHOWN = 12
# What makes two measurements the same but for the run, in the order in which a partner should share it.
_MATCHED = ("kind", "options", "dtype", "text", "model")


@dataclass(frozen=True)
class Change:
    """One cell in both runs."""

    before: Cell
    a: Point
    b: Point

    @property
    def ratio(self) -> float:
        """Median σ of the second run over that of the first."""
        return self.b.median / self.a.median

    @property
    def clear(self) -> bool:
        """Whether the ranges of σ do not overlap."""
        return self.b.lower > self.a.upper or self.b.upper < self.a.lower


@dataclass(frozen=True)
class Comparison:
    """A setting in both runs."""

    first: Setting
    second: Setting
    n: int  # the length of comparison
    changes: Sequence[Change]  # cells that both have, in order

    @property
    def names(self) -> tuple[str, str]:
        """What the two are called."""
        return self.first.name, self.second.name

    def largest(self) -> list[Change]:
        """The changes with the largest factors, up or down."""
        return sorted(self.changes, key=lambda change: -max(change.ratio, 1 / change.ratio))[:_SHOWN]


def comparisons(data: ReportData) -> list[Comparison]:
    """Every setting of the first run with its partner in the second; empty for one run."""
    if len(data.runs) != 2:
        return []
    found = []
    seconds = [setting for setting in data.settings if setting.run == 1]
    for first in (setting for setting in data.settings if setting.run == 0):
        partners = [setting for setting in seconds if setting.scope == first.scope]
        if not partners:
            continue
        partner = min(partners, key=lambda s: [_value(s, name) != _value(first, name) for name in _MATCHED])
        cells, others = ({(cell.layer, cell.head): cell for cell in setting.cells} for setting in (first, partner))
        n = max(set(first.lengths) & set(partner.lengths), default=0)
        pairs = [(cell, cell.at(n), others[place].at(n)) for place, cell in cells.items() if place in others]
        changes = [Change(cell, a, b) for cell, a, b in pairs if a and b and a.median > 0 and b.median > 0]
        if changes and (first.model == partner.model or cells.keys() == others.keys()):
            found.append(Comparison(first, partner, n, changes))
    return found


def _value(setting: Setting, name: str) -> str:
    # A scan measures text and has no options, and its rows say neither; those of a sweep do.
    return str(getattr(setting, name) or {"kind": "text", "options": "none"}.get(name, "not recorded"))


def comparison_sentences(comparison: Comparison) -> list[str]:
    """What changed, in plain words."""
    a, b = comparison.names
    changes = comparison.changes
    up = sum(change.ratio > 1 for change in changes)
    clear = [change for change in changes if change.clear]
    factor = statistics.median(change.ratio for change in changes)
    first, second = comparison.first, comparison.second
    found = [
        f"{b} against {a}, at n = {comparison.n}, scope {first.scope}: the median σ is larger in {up} of "
        f"{places(first, len(changes))} and smaller in {sum(change.ratio < 1 for change in changes)}; the middle factor is "
        f"{number(factor)}.",
        f"In {len(clear)} of them the change is clear: the ranges of σ do not overlap.",
    ]
    top = comparison.largest()[0]
    found.append(f"The largest factor is {number(top.ratio)}, in {top.before.where}: from {top.a.sigma} to {top.b.sigma}.")
    worst = {a: first.worst, b: second.worst}
    ends = [f"{name}: {number(cell.last.median)} in {cell.where} at n = {cell.last.n}" for name, cell in worst.items()]
    found.append(f"The least smooth place: {'; '.join(ends)}.")
    fits = {name: cell.fit for name, cell in worst.items() if cell.fit is not None}
    if len(fits) == 2:
        said = [f"{exponent(f.alpha) if f.is_decided else TOO_FEW} ({exponents(f)}) in {name}" for name, f in fits.items()]
        found.append(f"Growth exponent there: {'; '.join(said)}.")
    different = [
        f"{name}: {_value(first, name)} and {_value(second, name)}"
        for name in reversed(_MATCHED) if _value(first, name) != _value(second, name)
    ]  # fmt: skip
    if different:
        found.append(f"The runs differ in {'; '.join(different)}.")
    return found


def comparison_chart(comparison: Comparison) -> Chart:
    """Both runs layer by layer; for heads, σ of the second run against that of the first."""
    a, b = comparison.names
    panel = _heads_panel(comparison) if comparison.first.by_head else _layers_panel(comparison)
    title = f"Every head, n = {comparison.n}" if comparison.first.by_head else f"{a} and {b}, n = {comparison.n}"
    words = f"Median σ at n = {comparison.n}, {a} to {b}: " + "; ".join(
        f"{c.before.where} {number(c.a.median)} to {number(c.b.median)}" for c in comparison.largest()
    )
    return Chart("comparison", title, [panel], words)


def _layers_panel(comparison: Comparison) -> Panel:
    layers = [change.before.layer for change in comparison.changes]
    series = []
    for name, end, colour, shift in zip(comparison.names, ("a", "b"), ("blue", "orange"), (-0.12, 0.12), strict=True):
        points: list[Point] = [getattr(change, end) for change in comparison.changes]
        words = [f"{name}, layer {layer}: {p.sigma}" for layer, p in zip(layers, points, strict=True)]
        series.append(point_series(name, [layer + shift for layer in layers], points, "points", colour, words))
    return layers_panel(series, layers, f"σ, scope {comparison.first.scope}")


def _heads_panel(comparison: Comparison) -> Panel:
    a, b = comparison.names
    changes = comparison.changes
    first, second = [c.a.median for c in changes], [c.b.median for c in changes]
    ends = [min(first + second), max(first + second)]
    hover = [f"{c.before.where}: {number(c.a.median)} to {number(c.b.median)}" for c in changes]
    series = [
        Series("no change", ends, ends, "dots", "grey", group="guide"),
        Series("a head", first, second, "points", "orange", hover=hover),
    ]
    return Panel(series, f"σ in {a}", f"σ in {b}", x_log=True, y_log=True)
