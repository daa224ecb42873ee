"""From rows to what is drawn and said: settings, cells, points.

A *setting* is one model on one text at one scope (and dtype and kind). A *cell* is one layer, or one head, of it: a place in
the heat map. A *point* is a cell at one length n, over its inputs: the least lower end, the median estimate and the largest
upper end, so that σ of every one of these inputs lies between the two ends.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Any

from lipscope.measure.scopes import SCOPES
from lipscope.runs.fit import GrowthFit, can_fit, fit_growth
from lipscope.runs.run import Point, Row, Run, Source, at_longest, by_place, load_run, place_words, point_of

# Columns of bounds on σ: the name in a legend, its colour, and the name in full.
BOUNDS = {
    "certified": ("certificate", "purple", "certificate at these inputs"),
    "refined": ("refined bound", "yellow", "refined bound, tokens of that norm"),
    "castin2024": ("paper's bound", "black", "paper's bound, tokens of that norm"),
    "refined_global": ("refined, any input", "yellow", "refined bound, any input"),
    "castin2024_global": ("paper's, any input", "black", "paper's bound, any input"),
}
# Columns that stand beside σ, and what people call them.
ABOUT = {
    "radius_rms": "token norm |x|",
    "max_logit": "largest logit",
    "entropy": "attention entropy",
    "sink_mass": "on first token and sinks",
    "typical": "typical gain",
    "stable_rank": "stable rank",
    "predicted": "predicted damage",
    "measured": "measured damage",
}


@dataclass(frozen=True)
class Cell:
    """One layer or head of a setting, at all its lengths."""

    layer: int
    head: int | None
    points: tuple[Point, ...]
    rows: tuple[Row, ...]

    @property
    def last(self) -> Point:
        """The point at the longest length."""
        return self.points[-1]

    @property
    def where(self) -> str:
        """The cell in words."""
        return place_words(self.rows[0]["scope"], self.layer, self.head)

    @cached_property
    def fit(self) -> GrowthFit | None:
        """σ against n; None with fewer than three lengths or a σ of 0."""
        found = tuple(row["n"] for row in self.rows), tuple(row["estimate"] for row in self.rows)
        return _fit(*found) if can_fit(*found) else None

    def over_sigma(self, bound: str) -> float | None:
        """Median over the inputs of the longest length of a bound over σ of the same input; None unless all have one."""
        rows = at_longest(self.rows)
        if bound not in self.last.bounds or any(row["estimate"] <= 0 for row in rows):
            return None
        return float(statistics.median(row[bound] / row["estimate"] for row in rows))

    def at(self, n: int) -> Point | None:
        """The point at a length."""
        return next((point for point in self.points if point.n == n), None)


@dataclass(frozen=True)
class Setting:
    """One model on one text at one scope."""

    run: int  # number of the run it belongs to
    name: str  # model and text, and the run where another one has the same
    model: str | None
    text: str | None  # name of the text, None when it is not known
    scope: str | None  # which map σ belongs to
    dtype: str | None  # floating type of the computation
    kind: str | None  # kind of the measurement, for sweeps
    options: str | None  # options of the kind
    cells: tuple[Cell, ...]  # layers or heads, in order

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """All rows of the cells."""
        return tuple(row for cell in self.cells for row in cell.rows)

    @property
    def by_head(self) -> bool:
        """Whether cells are heads."""
        return any(cell.head is not None for cell in self.cells)

    @property
    def lengths(self) -> list[int]:
        """Lengths of any cell."""
        return sorted({point.n for cell in self.cells for point in cell.points})

    @cached_property
    def worst(self) -> Cell:
        """The cell with the largest median σ at the longest length."""
        return self.ranked()[0]

    def ranked(self) -> list[Cell]:
        """The cells at the longest length, the largest median σ first."""
        longest = self.lengths[-1]
        return sorted((cell for cell in self.cells if cell.last.n == longest), key=lambda cell: -cell.last.median)


@dataclass(frozen=True)
class ReportData:
    """What a report shows."""

    runs: tuple[Run, ...]  # one, or two to compare
    settings: tuple[Setting, ...]  # of all runs

    def label(self, setting: Setting) -> str:
        """A setting by what tells it from the others."""
        label = f"{setting.name}, scope {setting.scope or 'not recorded'}"
        for name in ("dtype", "kind", "options"):
            if len({getattr(other, name) for other in self.settings}) > 1 and getattr(setting, name):
                label += f", {getattr(setting, name)}"
        return label

    def beside(self, setting: Setting) -> list[Setting]:
        """The settings of the same run, model and text: its own scope and the others."""
        return [s for s in self.settings if (s.run, s.model, s.text) == (setting.run, setting.model, setting.text)]

    def views(self, setting: Setting) -> list[Row]:
        """Token views of a setting."""
        return [
            view for view in self.runs[setting.run].views
            if view.get("scope") == setting.scope and view.get("model") in (None, setting.model)
            and view.get("text") in (None, setting.text)
        ]  # fmt: skip


def report_data(runs: Sequence[Run]) -> ReportData:
    """Group the rows of one run, or of two.

    Example:
        >>> from lipscope.runs.run import Run, load_run
        >>> row = {"model": "m", "layer": 0, "n": 8, "lower": 1.0, "estimate": 1.1, "upper": 1.2}
        >>> data = report_data([load_run(Run((row, row | {"n": 16, "estimate": 1.2})))])
        >>> [(point.n, point.median) for point in data.settings[0].worst.points]
        [(8, 1.1), (16, 1.2)]
    """
    settings: list[Setting] = []
    named = [{_name(row) for row in run.rows} for run in runs]
    tags = [""] * len(runs)
    if len(runs) == 2 and named[0] & named[1]:
        same = runs[0].name == runs[1].name
        tags = [" (first)", " (second)"] if same else [f" ({run.name})" for run in runs]
    for which, run in enumerate(runs):
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in run.rows:
            # Rows of single documents of a packed input are told apart from the input itself.
            if row["document"] is None:
                groups.setdefault(tuple(row[name] for name in _SETTING), []).append(row)
        for key, rows in sorted(groups.items(), key=lambda item: tuple(_order(part) for part in item[0])):
            settings.append(
                Setting(which, _name(rows[0]) + tags[which], **dict(zip(_SETTING, key, strict=True)), cells=_cells(rows))
            )
    return ReportData(tuple(runs), tuple(settings))


def read_data(source: Source, compare: Source | None = None, all_plans: bool = False) -> ReportData:
    """What a report of one run, or of two, is made of."""
    return report_data([load_run(one, all_plans=all_plans) for one in (source, compare) if one is not None])


_SETTING = ("model", "text", "scope", "dtype", "kind", "options")


def _name(row: Row) -> str:
    return str(row["model"] or "model") + (f" on {row['text']}" if row["text"] else "")


def _order(part: Any) -> tuple[int, str]:
    scopes = list(SCOPES)
    return (scopes.index(part) if part in scopes else len(scopes), str(part))


def _cells(rows: Sequence[Row]) -> tuple[Cell, ...]:
    cells = []
    places = by_place(sorted(rows, key=lambda row: (row["n"], row["input"] or 0)))
    for (layer, head), members in places.items():
        points = tuple(point_of(list(at)) for _, at in groupby(members, key=lambda row: row["n"]))
        cells.append(Cell(layer, head, points, tuple(members)))
    return tuple(sorted(cells, key=lambda cell: (cell.layer, -1 if cell.head is None else cell.head)))


# Called with tuples, which can be remembered.
_fit = lru_cache(maxsize=65536)(fit_growth)
