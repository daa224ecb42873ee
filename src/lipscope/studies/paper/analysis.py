"""From rows to statements that can be checked: curves, fitted exponents, correlations, ratios. No words, only numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from lipscope.rounding import span
from lipscope.runs import run
from lipscope.runs.fit import GrowthFit, fit_growth
from lipscope.studies.paper import plan
from lipscope.studies.paper.cast import SUFFIX
from lipscope.studies.paper.differences import VARIANTS
from lipscope.studies.paper.plan import ADVERSARIAL, BORDER, DIFFERENCES, GROWTH, LAYERNORM, LONG, NORM_SCOPES, SECOND

Row = dict[str, Any]
SIGMA, COMPANION = "σ", "companion"
COLUMN = {SIGMA: "estimate", COMPANION: "companion"}
REAL_TEXT = "real text"
RIVALS = {0.0: "0", 0.25: "¼", 0.5: "½", 1.0: "1"}
WIDEST = 0.2
# By less than this no exponent is excluded: it is the last digit that is shown, and √(n−1) is no power of n.
NEAR = 0.01
UNDECIDED = "undecided"
IMAGE_RADIUS, GLOBAL_BOUND = "image radius", "global bound, refined"
_NORM_COLUMNS = {IMAGE_RADIUS: "radius_norm", GLOBAL_BOUND: "refined_global", "global bound, paper": "castin2024_global"}
# Constructions grow like √(n−1), which is no power of n for the first few n.
_SHORTEST = 7


@dataclass(frozen=True)
class Curve:
    """Measurements over n of one layer under one condition."""

    model: str
    layer: int
    mask: str
    experiment: str
    condition: str  # what tells it from other curves of the same layer: ``"real text"``, ``"R = 15.5, groups"``, …
    rows: tuple[Row, ...]  # the rows, in the order of n

    @property
    def is_published(self) -> bool:
        """Whether the public repository draws a curve for this layer."""
        return (self.model, self.layer) == plan.PUBLISHED_AT

    def values(self, column: str) -> tuple[list[int], list[float]]:
        """The lengths n and a column, where the column has a value."""
        kept = [(row["n"], float(row[column])) for row in self.rows if row.get(column) is not None]
        return [n for n, _ in kept], [value for _, value in kept]

    def fit(self, estimator: str = SIGMA) -> GrowthFit | None:
        """The power law of σ or of the companion estimator; None with fewer than three lengths."""
        points = list(zip(*self.values(COLUMN[estimator]), strict=True))
        far = [point for point in points if point[0] >= _SHORTEST]
        if self.experiment in (ADVERSARIAL, BORDER) and len({n for n, _ in far}) >= 3:
            points = far
        if len({n for n, _ in points}) < 3 or min(value for _, value in points) <= 0:
            return None
        return _fit(*zip(*points, strict=True))


# Figures, tables and findings ask for the same fits, and a bootstrap takes its time.
_fit = lru_cache(maxsize=1024)(fit_growth)


def of(rows: Iterable[Row], *experiments: str) -> list[Row]:
    """Rows of some experiments."""
    return [row for row in rows if row.get("experiment") in experiments]


def grouped(rows: Iterable[Row], *columns: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by what they hold in some columns, in the order in which they come."""
    return run.grouped(rows, lambda row: tuple(row[name] for name in columns))


def text_curves(rows: Sequence[Row]) -> list[Curve]:
    """Real text, a curve per model and layer."""
    return _curves(of(rows, GROWTH), GROWTH, REAL_TEXT)


def second_curves(rows: Sequence[Row]) -> list[Curve]:
    """The same for the second text, where there is one."""
    return _curves(of(rows, SECOND), SECOND, REAL_TEXT + ", {text}")


def long_curves(rows: Sequence[Row]) -> list[Curve]:
    """Real text over the whole range of n, for the layers that have a long range."""
    far = of(rows, LONG)
    layers = {(row["model"], row["layer"]) for row in far}
    near = [row for row in of(rows, GROWTH) if (row["model"], row["layer"]) in layers]
    return _curves(near + far, LONG, "long range")


def adversarial_curves(rows: Sequence[Row]) -> list[Curve]:
    """A curve per model, layer, radius and kind of points."""
    return [curve for name in (ADVERSARIAL, BORDER) for curve in _curves(of(rows, name), name, "R = {radius:.4g}, {points}")]


def _curves(rows: Sequence[Row], experiment: str, condition: str) -> list[Curve]:
    named = [row | {"condition": condition.format(**row)} for row in rows]
    return [
        Curve(model, layer, mask, experiment, what, tuple(sorted(group, key=lambda row: (row["n"], row["input"]))))
        for (model, layer, mask, what), group in grouped(named, "model", "layer", "mask", "condition").items()
    ]


def verdict(low: float, high: float) -> str:
    """What the interval of an exponent leaves: one of the rivals, the gap between two of them, or ``"undecided"``.

    Example:
        >>> verdict(0.47, 0.53), verdict(0.06, 0.08), verdict(-0.3, 0.6)
        ('½', 'between 0 and ¼', 'undecided')
    """
    if not high - low <= WIDEST:
        return UNDECIDED
    below = ["below 0", *(name for exponent, name in RIVALS.items() if exponent <= high + NEAR)]
    above = [*(name for exponent, name in RIVALS.items() if exponent >= low - NEAR), "above 1"]
    if below[-1] == above[0]:
        return above[0]
    return below[0] if len(below) == 1 else above[-1] if len(above) == 1 else f"between {below[-1]} and {above[0]}"


@dataclass(frozen=True, eq=False)
class FitRow:
    """The exponent of one curve."""

    curve: Curve
    estimator: str  # ``"σ"`` or ``"companion"``
    fit: GrowthFit

    @property
    def verdict(self) -> str:
        """Which exponent it is."""
        return verdict(self.fit.alpha_low, self.fit.alpha_high)

    @property
    def place(self) -> str:
        """Whose curve it is."""
        more = "" if self.curve.condition.startswith(REAL_TEXT) else f", {self.curve.condition.split(',')[0]}"
        return f"{self.curve.model} layer {self.curve.layer}{more}"


def fit_table(rows: Sequence[Row]) -> list[FitRow]:
    """Exponents of every curve, for both estimators."""
    return [
        FitRow(curve, estimator, fit)
        for curve in (*text_curves(rows), *second_curves(rows), *long_curves(rows), *adversarial_curves(rows))
        for estimator in (SIGMA, COMPANION)
        if (fit := curve.fit(estimator)) is not None
    ]


class Number(NamedTuple):
    """One number behind the sentences, between its ends: a line of ``FINDINGS.csv``."""

    table: str
    model: str
    layer: int
    condition: str
    value: float
    low: float
    high: float
    verdict: str = ""


def radius_correlations(rows: Sequence[Row]) -> list[Number]:
    """Pearson correlation of n with the largest token norm, and its 95 % interval; none where the norm never changes."""
    found = []
    for curve in text_curves(rows):
        n, radius = curve.values("radius_max")
        if len(n) < 4 or np.ptp(radius) <= 1e-6 * max(radius) or len(set(n)) < 2:
            continue
        result = stats.pearsonr(n, radius)
        r, (low, high) = float(result.statistic), map(float, result.confidence_interval(0.95))
        found.append(Number("correlation of n and largest norm", curve.model, curve.layer, REAL_TEXT, r, low, high))
    return found


def norm_table(rows: Sequence[Row]) -> list[Row]:
    """The three scopes side by side, a row per layer and n: σ in the median over inputs, None where a bound is missing."""
    table: list[Row] = []
    for (model, layer, n), group in grouped(of(rows, LAYERNORM), "model", "layer", "n").items():
        by_scope = {scope: [row for row in group if row["scope"] == scope] for scope in NORM_SCOPES}
        inner = by_scope["attention"]
        sigma = {scope: median(row["estimate"] for row in found) for scope, found in by_scope.items() if found}
        known = {"largest token": max(row["radius_max"] for row in inner)}
        for name, column in _NORM_COLUMNS.items():
            known[name] = min((row[column] for row in inner if row.get(column) is not None), default=None)
        table.append({"model": model, "layer": layer, "n": n, "sigma": sigma, "known": known})
    return sorted(table, key=lambda row: (row["model"], row["n"], row["layer"]))


def difference_table(rows: Sequence[Row]) -> list[Number]:
    """By what each difference from the published scripts multiplies σ of a model: the median over inputs, and the range."""
    found = []
    for (name, model, layer, n), group in grouped(of(rows, DIFFERENCES), "variant", "model", "layer", "n").items():
        found.append(_middle(name, model, layer, f"n = {n}", [row["value"] / row["reference"] for row in group]))
    order = list(VARIANTS)
    return sorted(found, key=lambda one: order.index(one.table))


def _middle(table: str, model: str, layer: int, condition: str, values: Sequence[float]) -> Number:
    return Number(table, model, layer, condition, median(values), min(values), max(values))


def masked_ratios(rows: Sequence[Row]) -> list[Row]:
    """σ with over σ without the causal mask, for every input of a model of BERT's kind that was measured with both."""
    at = {(row["model"], row["layer"], row["n"], row["input"]): row["estimate"] for row in of(rows, GROWTH)}
    return [
        {"model": model, "layer": layer, "n": n, "ratio": at[model + SUFFIX, layer, n, index] / value}
        for (model, layer, n, index), value in at.items()
        if (model + SUFFIX, layer, n, index) in at
    ]


def exponent(fit: GrowthFit) -> str:
    """α with its interval, as text; an exponent that rounds to zero has no sign."""
    return f"{round(fit.alpha, 2) + 0.0:.2f} ({span(fit.alpha_low, fit.alpha_high, decimals=2)})"


def every_number(rows: Sequence[Row]) -> list[Row]:
    """What the sentences were counted from, one number a line."""
    found = []
    for fit in fit_table(rows):
        ends = (fit.fit.alpha, fit.fit.alpha_low, fit.fit.alpha_high)
        place = (fit.curve.model, fit.curve.layer, fit.curve.condition)
        found.append(Number(f"exponent of {fit.estimator}", *place, *ends, fit.verdict))
    found += radius_correlations(rows)
    for (model, layer), group in grouped(masked_ratios(rows), "model", "layer").items():
        found.append(_middle("σ causal over σ unmasked", model, layer, REAL_TEXT, [pair["ratio"] for pair in group]))
    for row in norm_table(rows):
        known = {f"σ at scope {scope}": value for scope, value in row["sigma"].items()} | row["known"]
        there = {name: value for name, value in known.items() if value is not None}
        found += [_middle(name, row["model"], row["layer"], f"n = {row['n']}", [value]) for name, value in there.items()]
    found += [one._replace(table=f"value over σ: {one.table}") for one in difference_table(rows)]
    return [one._asdict() for one in found]
