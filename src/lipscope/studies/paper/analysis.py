"""From rows to statements that can be checked: curves, fitted exponents, correlations, ratios. No words, only numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np
from scipy import stats

from lipscope.runs.fit import GrowthFit, fit_growth
from lipscope.studies.paper.differences import VARIANTS
from lipscope.studies.paper.plan import ADVERSARIAL, DIFFERENCES, GROWTH, LAYERNORM, LONG, NORM_SCOPES

Row = dict[str, Any]
SIGMA, COMPANION = "σ", "companion"
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

    def values(self, column: str) -> tuple[list[int], list[float]]:
        """The lengths n and a column, where the column has a value."""
        kept = [(row["n"], float(row[column])) for row in self.rows if row.get(column) is not None]
        return [n for n, _ in kept], [value for _, value in kept]

    def fit(self, estimator: str = SIGMA) -> GrowthFit | None:
        """The power law of σ or of the companion estimator; None with fewer than three lengths."""
        n, values = self.values("estimate" if estimator == SIGMA else COMPANION)
        far = [(k, value) for k, value in zip(n, values, strict=True) if k >= _SHORTEST]
        if self.experiment == ADVERSARIAL and len({k for k, _ in far}) >= 3:
            n, values = [k for k, _ in far], [value for _, value in far]
        if len(set(n)) < 3 or min(values) <= 0:
            return None
        return _fit(tuple(n), tuple(values))


@lru_cache(maxsize=1024)
def _fit(n: tuple[int, ...], values: tuple[float, ...]) -> GrowthFit:
    """Figures, tables and findings ask for the same fits, and a bootstrap takes its time."""
    return fit_growth(n, values)


def of(rows: Iterable[Row], *experiments: str) -> list[Row]:
    """Rows of some experiments."""
    return [row for row in rows if row.get("experiment") in experiments]


def text_curves(rows: Sequence[Row]) -> list[Curve]:
    """Real text, a curve per model and layer."""
    return _curves(of(rows, GROWTH), GROWTH, lambda row: "real text")


def long_curves(rows: Sequence[Row]) -> list[Curve]:
    """Real text over the whole range of n, for the layers that have a long range."""
    far = of(rows, LONG)
    layers = {(row["model"], row["layer"]) for row in far}
    near = [row for row in of(rows, GROWTH) if (row["model"], row["layer"]) in layers]
    return _curves(near + far, LONG, lambda row: "long range")


def adversarial_curves(rows: Sequence[Row]) -> list[Curve]:
    """A curve per model, layer, radius and kind of points."""
    return _curves(of(rows, ADVERSARIAL), ADVERSARIAL, lambda row: f"R = {row['radius']:g}, {row['points']}")


def _curves(rows: Sequence[Row], experiment: str, condition: Any) -> list[Curve]:
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["layer"], row["mask"], condition(row)), []).append(row)
    return [
        Curve(model, layer, mask, experiment, what, tuple(sorted(group, key=lambda row: (row["n"], row["input"]))))
        for (model, layer, mask, what), group in groups.items()
    ]


@dataclass(frozen=True)
class FitRow:
    """One line of the table of exponents."""

    curve: Curve
    estimator: str  # ``"σ"`` or ``"companion"``
    fit: GrowthFit

    def contains(self, exponent: float) -> bool:
        """Whether the confidence interval of the exponent covers a value."""
        return self.fit.alpha_low <= exponent <= self.fit.alpha_high


def fit_table(rows: Sequence[Row]) -> list[FitRow]:
    """Exponents of every curve, for both estimators."""
    table = []
    for curve in (*text_curves(rows), *long_curves(rows), *adversarial_curves(rows)):
        for estimator in (SIGMA, COMPANION):
            fit = curve.fit(estimator)
            if fit is not None:
                table.append(FitRow(curve, estimator, fit))
    return table


@dataclass(frozen=True)
class Correlation:
    """Pearson correlation of n with the largest token norm of an input, with its 95 % interval."""

    model: str
    layer: int
    r: float
    low: float
    high: float
    points: int


def radius_correlations(rows: Sequence[Row]) -> list[Correlation]:
    """One per curve on real text; none where the norm never changes."""
    found = []
    for curve in text_curves(rows):
        n, radius = curve.values("radius_max")
        if len(n) < 4 or np.ptp(radius) <= 1e-6 * max(radius) or len(set(n)) < 2:
            continue
        result = stats.pearsonr(n, radius)
        interval = result.confidence_interval(0.95)
        found.append(
            Correlation(curve.model, curve.layer, float(result.statistic), float(interval.low), float(interval.high), len(n))
        )
    return found


@dataclass(frozen=True)
class NormRow:
    """One layer of the LayerNorm study at one n; medians over inputs, None where a scope or bound does not exist."""

    model: str
    layer: int
    n: int
    sigma: dict[str, float]
    radius: float
    image_radius: float | None
    global_bound: float | None
    published_bound: float | None


def norm_table(rows: Sequence[Row]) -> list[NormRow]:
    """The three scopes side by side."""
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for row in of(rows, LAYERNORM):
        groups.setdefault((row["model"], row["layer"], row["n"]), []).append(row)
    table = []
    for (model, layer, n), group in groups.items():
        by_scope = {scope: [row for row in group if row["scope"] == scope] for scope in NORM_SCOPES}
        inner = by_scope["attention"]
        sigma = {scope: median(row["estimate"] for row in found) for scope, found in by_scope.items() if found}
        table.append(
            NormRow(model, layer, n, sigma, max(row["radius_max"] for row in inner), _least(inner, "radius_norm"),
                    _least(inner, "refined_global"), _least(inner, "castin2024_global"))
        )  # fmt: skip
    return sorted(table, key=lambda row: (row.model, row.n, row.layer))


@dataclass(frozen=True)
class DifferenceRow:
    """What one difference from the published scripts does to σ of one model: medians, and the ratio's range."""

    variant: str
    model: str
    layer: int
    n: int
    reference: float
    value: float
    ratio: float
    ratio_low: float
    ratio_high: float
    inputs: int


def difference_table(rows: Sequence[Row]) -> list[DifferenceRow]:
    """A line per difference and model."""
    groups: dict[tuple[str, str, int, int], list[Row]] = {}
    for row in of(rows, DIFFERENCES):
        groups.setdefault((row["variant"], row["model"], row["layer"], row["n"]), []).append(row)
    table = []
    for (variant, model, layer, n), group in groups.items():
        ratios = [row["value"] / row["reference"] for row in group]
        table.append(
            DifferenceRow(variant, model, layer, n, median(row["reference"] for row in group),
                          median(row["value"] for row in group), median(ratios), min(ratios), max(ratios), len(group))
        )  # fmt: skip
    order = list(VARIANTS)
    return sorted(table, key=lambda row: order.index(row.variant))


def companion_ratios(curve: Curve) -> list[float]:
    """Companion estimator over σ, input by input."""
    return [row["companion"] / row["estimate"] for row in curve.rows if row.get("companion") is not None]


def certificate_ratios(rows: Sequence[Row]) -> list[float]:
    """Certified upper bound over the estimate of σ, where there is one."""
    kept = [row for row in rows if row.get("certified") is not None and math.isfinite(row["certified"])]
    return [row["certified"] / row["estimate"] for row in kept]


def _least(rows: Sequence[Row], column: str) -> float | None:
    values = [row[column] for row in rows if row.get(column) is not None]
    return min(values) if values else None


def power_law(fit: GrowthFit, decimals: int = 3) -> str:
    """``c·n^α`` as text; an exponent that rounds to zero has no sign."""
    return f"{fit.c:.3g}·n^{round(fit.alpha, decimals) + 0.0:.{decimals}f}"
