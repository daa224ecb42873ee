"""From rows to statements that can be checked: curves, fitted exponents, correlations, ratios. No words, only numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple

import numpy as np

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
REAL_TEXT, BUILT = "real text", "constructed tokens"
SHORTER, LONGER = "shorter half of the lengths", "longer half of the lengths"
BEFORE, BEYOND = "before the border", "beyond the border"
# What the lines of FINDINGS.csv are called.
EXPONENT, DIFFERENCE, SCOPE_RATIO = "exponent of ", "value over σ: ", "over σ of attention: "
COMPANION_RATIO, MASK_RATIO, DISTANCE = "companion over σ", "σ causal over σ unmasked", "from the drawn curve: "
ASCENT_RATIO = "ascent over the best construction"
CERTIFICATE_RATIO, PAPER_BOUND_RATIO = "certified upper bound over σ", "bound of Theorem 3.3 over σ"
GLOBAL_RATIO, BORDER_RATIO = "global bound over σ", "refined bound over σ"
LOG_BORDER, LENGTHS, UNFINISHED = "log10 of n up to which √n growth is proved", "lengths n", "rows that did not converge"
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


class Number(NamedTuple):
    """One line of ``FINDINGS.csv``: a number between its ends. Sentences are made from these lines alone."""

    table: str  # what it is
    model: str
    layer: int
    condition: str  # on what it was measured
    value: float  # an estimate, or the median of what was compared
    low: float  # lower end of its 95 % interval, or the least of what was compared
    high: float  # upper end, or the largest
    verdict: str = ""  # which exponent it is
    larger: int | None = None  # comparisons of which σ's intervals say that the first is larger
    smaller: int | None = None  # those of which they say that it is smaller
    inputs: int | None = None  # comparisons, or rows, that it was made from

    @property
    def is_published(self) -> bool:
        """Whether the public repository draws a curve for this layer."""
        return (self.model, self.layer) == plan.PUBLISHED_AT

    @property
    def place(self) -> str:
        """Whose number it is."""
        more = "" if self.condition.startswith(REAL_TEXT) else f", {self.condition.split(',')[0]}"
        return f"{self.model} layer {self.layer}{more}"


def fit_table(rows: Sequence[Row]) -> list[Number]:
    """Exponents of every curve, for both estimators."""
    curves = [*text_curves(rows), *second_curves(rows), *long_curves(rows), *adversarial_curves(rows)]
    return [one for curve in curves for name in (SIGMA, COMPANION) for one in _fitted(curve, name, curve.condition)]


def _fitted(curve: Curve, estimator: str, condition: str) -> Iterator[Number]:
    if (fit := curve.fit(estimator)) is not None:
        ends = fit.alpha, fit.alpha_low, fit.alpha_high
        name = EXPONENT + estimator
        yield Number(name, curve.model, curve.layer, condition, *ends, verdict(*ends[1:]), inputs=fit.points)


def _halves(curve: Curve) -> Iterator[Number]:
    lengths = sorted({row["n"] for row in curve.rows})
    for half, kept in ((SHORTER, lengths[: len(lengths) // 2]), (LONGER, lengths[len(lengths) // 2 :])):
        rows = tuple(row for row in curve.rows if row["n"] in kept)
        yield from _fitted(replace(curve, rows=rows), SIGMA, half)


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
    return Number(table, model, layer, condition, median(values), min(values), max(values), inputs=len(values))


def _exact(value: float) -> Row:
    return {"lower": value, "estimate": value, "upper": value}


def _compared(table: str, place: tuple[str, int, str], pairs: Sequence[tuple[Row, Row]]) -> Number:
    """Ratios of two σ, and how often their intervals lie apart."""
    larger = sum(one["lower"] > other["upper"] for one, other in pairs)
    smaller = sum(one["upper"] < other["lower"] for one, other in pairs)
    found = _middle(table, *place, [one["estimate"] / other["estimate"] for one, other in pairs])
    return found._replace(larger=larger, smaller=smaller)


def masked_pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """With and without the causal mask, for every input of a model of BERT's kind that was measured with both."""
    at = {(row["model"], row["layer"], row["n"], row["input"]): row for row in of(rows, GROWTH)}
    return [(at[model + SUFFIX, *where], row) for (model, *where), row in at.items() if (model + SUFFIX, *where) in at]


def exponent(alpha: float, low: float, high: float) -> str:
    """α with its interval, as text; an exponent that rounds to zero has no sign."""
    return f"{round(alpha, 2) + 0.0:.2f} ({span(low, high, decimals=2)})"


def every_number(rows: Sequence[Row]) -> list[Number]:
    """What the sentences are made from."""
    halves = [one for curve in text_curves(rows) for one in _halves(curve)]
    differences = [one._replace(table=f"{DIFFERENCE}{one.table}") for one in difference_table(rows)]
    return [
        *fit_table(rows),
        *halves,
        *_comparisons(rows),
        *_published(rows),
        *_borders(rows),
        *differences,
        *_extents(rows),
    ]


def _comparisons(rows: Sequence[Row]) -> Iterator[Number]:
    """Everything that is compared with σ input by input, a line per model and layer."""

    def lines(name: str, condition: str, pairs: Iterable[tuple[Row, Row]]) -> Iterator[Number]:
        for (model, layer), mine in run.grouped(pairs, lambda pair: (pair[1]["model"], pair[1]["layer"])).items():
            yield _compared(name, (model, layer, condition), mine)

    def bounds(name: str, condition: str, column: str, found: Iterable[Row]) -> Iterator[Number]:
        there = (row for row in found if row.get(column) is not None and math.isfinite(row[column]))
        return lines(name, condition, ((_exact(row[column]), row) for row in there))

    text, built, normed = of(rows, GROWTH, LONG, SECOND), of(rows, ADVERSARIAL, BORDER), of(rows, LAYERNORM)
    yield from bounds(COMPANION_RATIO, REAL_TEXT, "companion", of(rows, GROWTH))
    yield from lines(MASK_RATIO, REAL_TEXT, masked_pairs(rows))
    yield from bounds(CERTIFICATE_RATIO, REAL_TEXT, "certified", text)
    yield from bounds(CERTIFICATE_RATIO, BUILT, "certified", built)
    yield from bounds(PAPER_BOUND_RATIO, BUILT, "castin2024", built)
    place = ("model", "layer", "n", "input")
    alone = {where: row for where, (row,) in grouped([r for r in normed if r["scope"] == NORM_SCOPES[0]], *place).items()}
    yield from bounds(GLOBAL_RATIO, REAL_TEXT, "refined_global", alone.values())
    for scope in NORM_SCOPES[1:]:
        found = [row for row in normed if row["scope"] == scope]
        yield from lines(f"{SCOPE_RATIO}{scope}", REAL_TEXT, [(row, alone[tuple(map(row.get, place))]) for row in found])
    ascents = []
    for found in grouped(built, "model", "layer", "head", "n", "radius", "experiment").values():
        best = max((row for row in found if row["points"] != "ascent"), key=lambda row: float(row["estimate"]), default=None)
        ascents += [(row, best) for row in found if row["points"] == "ascent" and best is not None]
    yield from lines(ASCENT_RATIO, BUILT, ascents)


def _published(rows: Sequence[Row]) -> Iterator[Number]:
    """How far inputs lie from the curve that the public repository draws: the median, and the first and last tenth."""
    for curve in text_curves(rows):
        for estimator in (SIGMA, COMPANION) if curve.is_published else ():
            n, values = curve.values(COLUMN[estimator])
            if n:
                away = [abs(y / plan.published(k) - 1) for k, y in zip(n, values, strict=True)]
                low, middle, high = map(float, np.quantile(away, (0.1, 0.5, 0.9)))
                yield Number(DISTANCE + estimator, curve.model, curve.layer, REAL_TEXT, middle, low, high, inputs=len(n))


def _borders(rows: Sequence[Row]) -> Iterator[Number]:
    known = [row for row in of(rows, ADVERSARIAL) if row.get("log_growth") is not None]
    for (model, layer, radius), group in grouped(known, "model", "layer", "radius").items():
        borders = [row["log_growth"] / math.log(10) for row in group]
        yield _middle(LOG_BORDER, model, layer, f"R = {radius:.4g}", borders)
    built = [row for row in of(rows, BORDER) if row["points"] == "groups" and row.get("refined")]
    sided = [row | {"side": BEYOND if math.log(row["n"]) > row["log_growth"] else BEFORE} for row in built]
    for (model, layer, side), group in grouped(sided, "model", "layer", "side").items():
        yield _compared(BORDER_RATIO, (model, layer, side), [(_exact(row["refined"]), row) for row in group])


def _extents(rows: Sequence[Row]) -> Iterator[Number]:
    for (experiment, model, layer), group in grouped(rows, "experiment", "model", "layer").items():
        yield _middle(LENGTHS, model, layer, experiment, [float(row["n"]) for row in group])
        if count := sum(row.get("converged") is False for row in group):
            yield Number(UNFINISHED, model, layer, experiment, count, count, count, inputs=len(group))
    for row in norm_table(rows):
        known = {f"σ at scope {scope}": value for scope, value in row["sigma"].items()} | row["known"]
        there = {name: value for name, value in known.items() if value is not None}
        yield from (_middle(name, row["model"], row["layer"], f"n = {row['n']}", [value]) for name, value in there.items())
