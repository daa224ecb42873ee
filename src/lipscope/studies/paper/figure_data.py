"""The figures as data: panels in the paper's layout (a row per model, a column per layer), each with its series.

``figure_files`` draws the same data as PNG, PDF and interactive HTML.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from lipscope.rounding import span
from lipscope.studies.paper import analysis
from lipscope.studies.paper.analysis import COMPANION, SIGMA, Curve, Row
from lipscope.studies.paper.cast import Cast, Member
from lipscope.studies.paper.findings import PUBLISHED_LAYER, PUBLISHED_MODEL
from lipscope.studies.paper.plan import NORM_SCOPES, PUBLISHED_EXPONENT, PUBLISHED_FACTOR, WORST_CASE_EXPONENT

# The colours of Okabe and Ito, which everyone can tell apart.
BLUE, ORANGE, GREEN, PINK, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#777777"
_CYCLE = (BLUE, ORANGE, GREEN, PINK, SKY, GREY)

# A bound larger than this times everything measured is told, not drawn.
_FAR = 3
# Points of a fitted line.
_STEPS = 60

Look = Literal["points", "line", "dashes", "dots", "marks"]


@dataclass(frozen=True)
class Series:
    """Points or a line of a panel; ``low`` and ``high`` are ends of intervals; the legend lists it if ``listed``."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: str
    look: Look = "points"
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    listed: bool = True


@dataclass(frozen=True)
class Panel:
    """One plot; ``x_names`` are words for x = 0, 1, 2 and so on."""

    title: str
    series: tuple[Series, ...]
    x_label: str
    y_label: str
    x_log: bool = False
    y_log: bool = False
    x_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """A grid of panels.

    Attributes:
        name: name of its files.
        title: what it shows.
        panels: row by row.
        columns: panels in a row.
        note: a line below the title.
    """

    name: str
    title: str
    panels: tuple[Panel, ...]
    columns: int = 2
    note: str = field(default="")


def figures(rows: Sequence[Row], cast: Cast) -> list[Figure]:
    """Every figure that the rows have data for."""
    text = analysis.text_curves(rows)
    made = []
    for weights in ("random", "pretrained"):
        members = [m for m in cast.members if m.weights == weights]
        made.append(_growth(f"growth-{weights}", f"σ on real text, {weights} weights", text, members))
    long = analysis.long_curves(rows)
    made.append(_growth("long-range", "σ on real text, long range", long, list(cast.members), log=True))
    made += [_radius(text, cast), _adversarial(rows, cast), *_layernorm(rows, cast), _differences(rows)]
    return [figure for figure in made if figure.panels]


def _growth(name: str, title: str, curves: Sequence[Curve], members: Sequence[Member], log: bool = False) -> Figure:
    panels = []
    for member in members:
        for curve in (c for c in curves if c.model == member.name):
            panels.append(
                Panel(f"{member.title}, layer {curve.layer}, mask {curve.mask}", _growth_series(curve), "number of tokens n",
                      "local Lipschitz constant", x_log=log, y_log=log)
            )  # fmt: skip
    note = "blue: the true σ with its interval; orange: √‖Jᵀf(X)‖ of the public scripts, which is not σ"
    return Figure(name, title, tuple(panels), note=note)


def _growth_series(curve: Curve) -> tuple[Series, ...]:
    n, sigma = curve.values("estimate")
    series = [Series("σ", n, sigma, BLUE, "points", curve.values("lower")[1], curve.values("upper")[1])]
    x, y = curve.values(COMPANION)
    if x:
        series.append(Series("companion estimator", x, y, ORANGE))
    highest = max(sigma + y)
    x, y = curve.values("certified")
    if x and max(y) <= _FAR * highest:
        series.append(Series("certified upper bound", x, y, GREEN, "marks"))
    elif x:
        # Drawn to scale it would press the measurements into one line.
        series.append(Series(f"certified upper bound {span(min(y), max(y), 2)}: above", [], [], GREEN, "marks"))
    grid = [min(n) * (max(n) / min(n)) ** (step / _STEPS) for step in range(_STEPS + 1)]
    for estimator, color in ((SIGMA, BLUE), (COMPANION, ORANGE)):
        fit = curve.fit(estimator)
        if fit is not None:
            label = f"{analysis.power_law(fit, 2)} ({estimator})"
            series.append(Series(label, grid, [fit.c * k**fit.alpha for k in grid], color, "line"))
    if (curve.model, curve.layer) == (PUBLISHED_MODEL, PUBLISHED_LAYER):
        drawn = [PUBLISHED_FACTOR * k**PUBLISHED_EXPONENT for k in grid]
        label = f"{PUBLISHED_FACTOR}·n^{PUBLISHED_EXPONENT}, drawn in the public repository"
        series.append(Series(label, grid, drawn, GREY, "dashes"))
    return tuple(series)


def _radius(curves: Sequence[Curve], cast: Cast) -> Figure:
    panels = []
    for member in cast.members:
        if member.masked:
            continue
        for curve in (c for c in curves if c.model == member.name):
            largest, rms = curve.values("radius_max"), curve.values("radius_rms")
            series = (Series("largest token norm", *largest, BLUE), Series("root mean square", *rms, ORANGE, "marks"))
            panels.append(Panel(f"{member.title}, layer {curve.layer}", series, "number of tokens n", "norm of tokens"))
    return Figure("radius", "Norm of the tokens that enter attention, against n", tuple(panels))


def _adversarial(rows: Sequence[Row], cast: Cast) -> Figure:
    curves = analysis.adversarial_curves(rows)
    panels = []
    for member in cast.members:
        for layer in sorted({c.layer for c in curves if c.model == member.name}):
            mine = [c for c in curves if (c.model, c.layer) == (member.name, layer)]
            head = mine[0].rows[0]["head"]
            panels.append(
                Panel(f"{member.title}, layer {layer}, head {head}", _adversarial_series(mine), "number of tokens n",
                      "σ of the head", x_log=True, y_log=True)
            )  # fmt: skip
    return Figure("adversarial", "σ at adversarial points, by radius R", tuple(panels),
                  note="line: Proposition 3.4; dotted: best split into two groups; crosses: gradient ascent")  # fmt: skip


def _adversarial_series(curves: Sequence[Curve]) -> tuple[Series, ...]:
    series = []
    radii = sorted({c.rows[0]["radius"] for c in curves})
    looks: dict[str, Look] = {"proposition 3.4": "line", "groups": "dots", "ascent": "marks"}
    for radius, color in zip(radii, _CYCLE, strict=False):
        for curve in (c for c in curves if c.rows[0]["radius"] == radius):
            points = curve.rows[0]["points"]
            listed = points == "proposition 3.4"
            name = f"R = {radius:g}" if listed else f"R = {radius:g}, {points}"
            series.append(Series(name, *curve.values("estimate"), color, looks[points], listed=listed))
    grid = sorted({row["n"] for c in curves for row in c.rows})
    start = max(row["estimate"] for c in curves for row in c.rows if row["n"] == grid[0] and row["points"] != "ascent")
    line = [start * (n / grid[0]) ** WORST_CASE_EXPONENT for n in grid]
    return (*series, Series("slope of √n", grid, line, GREY, "dashes"))


def _layernorm(rows: Sequence[Row], cast: Cast) -> list[Figure]:
    table = analysis.norm_table(rows)
    panels = []
    for member in cast.members:
        mine = [row for row in table if row.model == member.name]
        if not mine:
            continue
        longest = max(row.n for row in mine)
        deep = max(row.layer for row in mine)
        for rest, x, label, where in (
            ([r for r in mine if r.n == longest], "layer", "layer", f"n = {longest}"),
            ([r for r in mine if r.layer == deep], "n", "number of tokens n", f"layer {deep}"),
        ):
            series = []
            for scope, color in zip(NORM_SCOPES, (BLUE, ORANGE, GREEN), strict=True):
                kept = [r for r in rest if scope in r.sigma]
                if kept:
                    series.append(
                        Series(scope, [getattr(r, x) for r in kept], [r.sigma[scope] for r in kept], color, "line")
                    )
            for name, column, color in (("image radius of the norm", "image_radius", PINK),
                                        ("global bound of attention", "global_bound", GREY)):  # fmt: skip
                kept = [r for r in rest if getattr(r, column) is not None]
                if kept:
                    xs, ys = [getattr(r, x) for r in kept], [getattr(r, column) for r in kept]
                    series.append(Series(name, xs, ys, color, "dashes"))
            panels.append(Panel(f"{member.title}, {where}", tuple(series), label, "σ (and radius, bound)", y_log=True))
    return [Figure("layernorm", "σ with and without normalisation and residual", tuple(panels))]


def _differences(rows: Sequence[Row]) -> Figure:
    table = analysis.difference_table(rows)
    if not table:
        return Figure("differences", "", ())
    variants = list(dict.fromkeys(row.variant for row in table))
    series = []
    for index, model in enumerate(dict.fromkeys(row.model for row in table)):
        mine = [row for row in table if row.model == model]
        at = [variants.index(row.variant) + 0.09 * (index - 2) for row in mine]
        series.append(
            Series(model, at, [row.ratio for row in mine], _CYCLE[index % len(_CYCLE)], "marks" if index >= len(_CYCLE)
                   else "points", [row.ratio_low for row in mine], [row.ratio_high for row in mine])
        )  # fmt: skip
    series.append(Series("no effect", [-0.4, len(variants) - 0.6], [1.0, 1.0], GREY, "dashes"))
    at_n = ", ".join(f"n = {n}" for n in sorted({row.n for row in table}))
    panel = Panel(at_n, tuple(series), "", "value over σ, median and range", y_log=True, x_names=tuple(variants))
    return Figure("differences", "What each difference from the published scripts does to the number", (panel,), columns=1)
