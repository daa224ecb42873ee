"""Charts of the studies: a comparison of kinds of attention, an attack, the regimes of a head, and the mean-field limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lipscope.bounds.registry import BoundTable
from lipscope.models.layer_bounds import LayerBounds
from lipscope.models.tokens import TokenView
from lipscope.report.charts import Chart, Group, Look, Panel, Series
from lipscope.report.palette import CYCLE
from lipscope.report.run_charts import damage_chart, growth, where_chart
from lipscope.rounding import interval, round_down, round_up
from lipscope.runs.run import Run
from lipscope.spectral.result import SpectralNorm
from lipscope.studies.mean_field.study import PlateauStudy
from lipscope.studies.sensitivity import Sensitivity
from lipscope.studies.variants import Comparison
from lipscope.studies.worst_case.ascent import Ascent
from lipscope.studies.worst_case.growth_in_n import Growth, RegimeMap
from lipscope.studies.worst_case.tokens import TokenAttack

# Name in the legend, colour and look of every curve; constructions are called by their own name.
_CONSTRUCTIONS = {"groups": "green", "pair": "amber", "proposition34.max": "sky", "proposition34.min": "purple",
                  "meanfield": "yellow"}  # fmt: skip
_LOOKS: dict[str, tuple[str, str, Look]] = {
    **{name: (name, colour, "dashes") for name, colour in _CONSTRUCTIONS.items()},
    "worst": ("worst σ found", "black", "line"),
    "given": ("σ on the text", "grey", "line"),
    "refined.unmasked": ("upper bound: refined", "blue", "line"),
    "refined.masked": ("upper bound: refined", "blue", "line"),
    "refined.visibility": ("upper bound: refined, by visibility", "blue", "dots"),
    "castin2024.general": ("upper bound: paper, Theorem 3.3", "orange", "line"),
    "castin2024.meanfield": ("upper bound: paper, Theorem 3.5", "orange", "dots"),
}
# Where a restart began, by the first word of its label: its name, and its colour.
_STARTS = {"noise": ("noise", "blue"), "given": ("given inputs", "orange"), "shorter": ("the length before", "purple")}
_CURVES = {
    "sigma": ("σ of the cloud (median)", "blue"),
    "ratio": ("ratio of two samples (median)", "green"),
    "insertion": ("ratio of one inserted token (median)", "orange"),
}
# Values that span more than this are drawn on a logarithmic axis.
_DECADES = 20


def plot(result: Any, title: str = "") -> Chart:
    """The chart of anything that was measured; a notebook shows it, ``lipscope.report.draw(chart, "a.png")`` writes it.

    Args:
        result: what ``local_lipschitz``, ``scan``, ``sensitivity``, ``attack``, a table of bounds, or a study returned.
        title: what to write above it, by default what the result says of itself.

    Raises:
        TypeError: when there is no chart of such a thing; says of what there is.

    Example:
        >>> import lipscope
        >>> row = {"model": "m", "layer": 0, "n": 8, "lower": 1.0, "estimate": 1.1, "upper": 1.2}
        >>> lipscope.plot(lipscope.Run((row, row | {"n": 16, "estimate": 1.2})), "σ of m")
        <Chart growth: σ of m>
    """
    for kind, make in _CHARTS.items():
        if isinstance(result, kind):
            chart: Chart = make(result, title or str(result).splitlines()[0])
            return chart
    known = ", ".join(kind.__name__ for kind in _CHARTS)
    raise TypeError(f"there is no chart of a {type(result).__name__}, only of: {known}")


def run_chart(run: Run, title: str) -> Chart:
    """Growth of σ in every layer or head."""
    return replace(growth(run), title=title)


def values_chart(found: SpectralNorm, title: str) -> Chart:
    """σ of every input with its interval."""
    rows = found.to_rows()
    x, y = list(range(len(rows))), [row["estimate"] for row in rows]
    low, high = ([row[end] for row in rows] for end in ("lower", "upper"))
    panel = Panel([Series("σ", x, y, "points", "blue", low, high)], "input", "σ", x_ticks=x)
    return Chart("sigma", title, [panel], f"σ of {len(rows)} inputs.")


def bounds_chart(found: BoundTable | LayerBounds, title: str) -> Chart:
    """Every bound of σ, and σ where it was measured."""
    rows = found.to_rows()
    marks: dict[str, tuple[str, Look]] = {"upper": ("orange", "points"), "lower": ("green", "marks")}
    series = []
    for side, (colour, look) in marks.items():
        kept = [(k, row["value"]) for k, row in enumerate(rows) if row["side"] == side and 0 < row["value"] < math.inf]
        series.append(Series(f"{side} bounds", [k for k, _ in kept], [y for _, y in kept], look, colour))
    names = [row["name"] for row in rows]
    if rows[0]["sigma"] is not None:
        series.append(Series("σ", range(len(rows)), [rows[0]["sigma"]] * len(rows), "line", "blue", group="fit"))
    panel = Panel(series, "", "σ", y_log=True, x_ticks=range(len(rows)), x_names=names)
    return Chart("bounds", title, [panel], f"{len(rows)} bounds: {', '.join(names)}.")


def sensitivity_chart(found: Sensitivity, title: str) -> Chart:
    """Predicted and measured damage of every layer or head."""
    chart = damage_chart(found.rows, title)
    assert chart is not None
    return chart


def comparison_chart(comparison: Comparison, title: str) -> Chart:
    """Three panels: growth with n, growth with R, and the range of every kind of attention."""
    panels = [
        _medians(comparison, "by_length", "number of tokens n", f"typical tokens, R = {comparison.radius:.3g}"),
        _medians(comparison, "by_radius", "radius R", f"typical tokens, n = {comparison.n}"),
        _ranges(comparison),
    ]
    words = "; ".join(f"{kind.name}: median σ {kind.median:.3g}" for kind in comparison.kinds)
    return Chart("comparison", title, panels, f"{words}.", columns=3)


def _medians(comparison: Comparison, which: str, label: str, title: str) -> Panel:
    series = []
    for index, kind in enumerate(comparison.kinds):
        points = getattr(kind, which)
        series.append(Series(kind.name, list(points), list(points.values()), colour=CYCLE[index % len(CYCLE)]))
    return Panel(series, label, "σ (median)", title, x_log=True, y_log=True, x_ticks=list(series[0].x))


def _ranges(comparison: Comparison) -> Panel:
    """A line per kind from the least to the largest of typical σ, worst found and least bound."""
    kinds = comparison.kinds
    typical = {k: kind.median for k, kind in enumerate(kinds)}
    worst = {k: float(kind.worst.lower) for k, kind in enumerate(kinds) if kind.worst is not None}
    bound = {k: kind.bounds[0].value for k, kind in enumerate(kinds) if kind.bounds}
    series = []
    for k, kind in enumerate(kinds):
        reach = [values[k] for values in (typical, worst, bound) if k in values]
        ends = [min(reach), max(reach)]
        series.append(Series(kind.name, [k, k], ends, colour="silver", group="guide", listed=False))
    series += [
        Series("typical σ", list(typical), list(typical.values()), "points", "blue"),
        Series("worst found", list(worst), list(worst.values()), "points", "orange"),
        Series("least bound", list(bound), list(bound.values()), "marks", "black"),
    ]
    series = [one for one in series if len(one.x)]
    title = f"tokens of norm ≤ {comparison.radius:.3g}, n = {comparison.n}"
    names = [kind.name for kind in kinds]
    return Panel(series, "", "σ", title, y_log=True, x_ticks=range(len(kinds)), x_names=names)


def growth_chart(study: Growth, title: str) -> Chart:
    """Worst σ, constructions and upper bounds over n."""
    n = [w.n for w in study.worst]
    series = []
    for name, values in study.curves().items():
        if name == "ascent" or (name == "refined.visibility" and len(study.worst[0].bounds) > 2):
            continue  # the worst curve, or the same bound, under another name
        label, colour, look = _LOOKS[name]
        group: Group = "bound" if name in study.worst[0].bounds else "measured"
        series.append(Series(label, n, values, look, colour, group=group))
    if "worst" in study.fits:
        fit = study.fits["worst"]
        law = f"{fit.c:.3g}·n^{fit.alpha:.2f} (α in {interval(fit.alpha_low, fit.alpha_high, decimals=2)})"
        series.append(Series(law, n, [fit.c * k**fit.alpha for k in n], "dots", "grey", group="guide"))
    words = f"Worst σ found: {', '.join(f'{float(w.sigma.estimate):.3g} at n = {w.n}' for w in study.worst)}."
    panel = Panel(series, "number of tokens n", "local Lipschitz constant σ", x_log=True, y_log=True, x_ticks=n)
    return Chart("growth", title, [panel], words)


def regime_chart(found: RegimeMap, title: str) -> Chart:
    """The (n, R) plane with its two borders, and at one radius bounds, constructions and ascent over n."""
    radii, ends = [R for R, _ in found.borders], [regime for _, regime in found.borders]
    growing, level = ([getattr(r, name) / math.log(10) for r in ends] for name in ("log_growth", "log_plateau"))
    own, n, last = found.found.radius, [w.n for w in found.found.worst], found.found.worst[-1].n
    plane = [
        Series("plateau above: n ≥ κ", radii, level, "dashes", "blue", group="fit"),
        Series("√n growth below: n ≤ 1 + e^E", radii, growing, "line", "orange", group="fit"),
        Series("between", radii, level, "band", "silver", growing, [max(pair) for pair in zip(growing, level, strict=True)]),
        Series(f"measured here, n ≤ {last}", [own] * len(n), [math.log10(k) for k in n], "points", "black"),
    ]
    curves = [
        Series("upper bound", found.lengths, found.upper, "line", "blue", group="fit"),
        Series("lower bound", found.lengths, found.lower, "dashes", "green", group="fit"),
        Series(
            "constructions", n, [max(float(c.sigma.lower) for c in w.built) for w in found.found.worst], "points", "amber"
        ),
        Series("ascent", n, [float(w.ascent.sigma.lower) for w in found.found.worst if w.ascent], "marks", "black"),
    ]
    heights, borders = [min(found.lower), max(found.upper)], [found.here.log_growth, found.here.log_plateau]
    for name, at in zip(("n = 1 + e^E", "n = κ"), borders, strict=True):
        if at < math.log(found.lengths[-1]):
            curves.append(Series(name, [math.exp(at)] * 2, heights, "dots", "grey", group="guide"))
    words = f"E = {found.here.exponent:.3g}: √n growth up to n = 10^{round_down(borders[0] / math.log(10), 3)}, "
    words += f"upper bound level from n = 10^{round_up(borders[1] / math.log(10), 3)}; n = {last} is {found.here.at(last)}."
    panels = [
        Panel(plane, "radius R of the set", "log₁₀ n", "regimes", x_log=True),
        Panel(curves, "number of tokens n", "worst σ of the head", f"{found.found.domain}", x_log=True, y_log=True),
    ]
    return Chart("regimes", title, panels, words, columns=2)


def view_chart(view: TokenView, title: str) -> Chart:
    """The share of every token in the worst direction: over an image, over time, or word by word."""
    chart = where_chart(view.to_dict() | {"influence": []})
    assert chart is not None  # a view has tokens
    return replace(chart, title=title)


def history_chart(found: Ascent, title: str) -> Chart:
    """σ of every restart over the steps, the winner in black."""
    steps = list(range(len(found.history)))
    series = []
    seen: set[str] = set()
    for i, label in enumerate(found.labels):
        curve = found.history[:, i].tolist()
        if i == found.best:
            series.append(Series(f"winner, from {label}", steps, curve, colour="black", group="fit"))
            continue
        start, colour = _STARTS.get(label.split()[0].removesuffix(","), ("constructions", "green"))
        series.append(Series(f"from {start}", steps, curve, colour=colour, group="guide", listed=start not in seen))
        seen.add(start)
    words = f"σ of {len(found.labels)} restarts over {len(steps) - 1} steps, at most {float(found.history.max()):.4g}."
    return Chart("ascent", title, [Panel(series, "step", "σ (lower bound)", y_log=True)], words)


def tokens_chart(found: TokenAttack, title: str) -> Chart:
    """Measured against predicted σ of every candidate, round by round."""
    series = []
    for number in sorted({trial.round for trial in found.tried}):
        trials = [trial for trial in found.tried if trial.round == number]
        raised = sum(trial.sigma > trial.before for trial in trials)
        name = f"round {number + 1}: {raised} of {len(trials)} raise σ"
        x, y = [t.before + t.predicted for t in trials], [t.sigma for t in trials]
        hover = [f"position {t.position}, word {t.word}" for t in trials]
        series.append(Series(name, x, y, "points", CYCLE[number % len(CYCLE)], hover=hover))
    panel = Panel(series, "σ predicted to first order", "σ measured", from_zero=False)
    return Chart("tokens", title, [panel], f"{len(found.tried)} substitutions: {'; '.join(one.name for one in series)}.")


def plateau_chart(study: PlateauStudy, title: str) -> Chart:
    """Single draws as points, medians as lines, the plateau and the refined constant."""
    draws, medians = [], []
    for column, (name, colour) in _CURVES.items():
        kept = [(row.n, value) for row in study.rows if (value := getattr(row, column)) is not None]
        draws.append(Series(name, [n for n, _ in kept], [y for _, y in kept], "points", colour, listed=False))
        at = [(n, y) for n, y in zip(study.lengths, study.medians(column), strict=True) if y is not None]
        if at:
            medians.append(Series(name, [n for n, _ in at], [y for _, y in at], colour=colour))
    guides, fit = [], study.plateau()
    if fit is not None and fit.is_visible:
        level = [fit.level] * len(study.lengths)
        guides.append(Series(f"fitted plateau {fit.level:.3g}", study.lengths, level, "dots", "blue", group="fit"))
    # The refined constant of the law's radius, or that of the largest norm drawn where the law has none.
    level = [float("nan") if value is None else value for value in study.medians("bound")]
    name = f"refined constant at the largest norm drawn, {round_up(level[0], 2)} … {round_up(level[-1], 2)}"
    if math.isfinite(study.bound):
        level, name = [study.bound] * len(study.lengths), f"refined constant {round_up(study.bound, 3)}"
    guides.append(Series(name, study.lengths, level, "dashes", "grey", group="bound"))
    series = [*draws, *medians, *guides]
    heights = [y for one in series if one.group != "bound" and one.listed for y in one.y if 0 < y < math.inf]
    panel = Panel(
        series, "number of tokens n", "local constant σ, and ratios", x_log=True, x_ticks=study.lengths,
        y_log=bool(heights) and max(heights) > _DECADES * min(heights),
    )  # fmt: skip
    words = ", ".join(f"{y:.3g} at n = {n}" for n, y in zip(medians[0].x, medians[0].y, strict=True))
    return Chart("plateau", title, [panel], f"Median σ of clouds of n tokens: {words}.")


_CHARTS: dict[type, Callable[[Any, str], Chart]] = {
    Run: run_chart, SpectralNorm: values_chart, BoundTable: bounds_chart, LayerBounds: bounds_chart,
    Sensitivity: sensitivity_chart, Comparison: comparison_chart, Growth: growth_chart, RegimeMap: regime_chart,
    Ascent: history_chart, TokenAttack: tokens_chart, PlateauStudy: plateau_chart, TokenView: view_chart,
}  # fmt: skip
