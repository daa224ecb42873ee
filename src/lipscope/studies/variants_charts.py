"""The chart of a comparison: σ over n, σ over R, and for every kind what is typical, found, and possible."""

from __future__ import annotations

from lipscope.report.charts import Chart, Look, Panel, Series
from lipscope.report.palette import CYCLE
from lipscope.studies.variants import Comparison


def comparison_chart(comparison: Comparison, title: str) -> Chart:
    """Three panels: growth with n, growth with R, and the range of every kind of attention."""
    panels = [
        _curves(comparison, "by_length", "number of tokens n", f"typical tokens, R = {comparison.radius:.3g}"),
        _curves(comparison, "by_radius", "radius R", f"typical tokens, n = {comparison.n}"),
        _ranges(comparison),
    ]
    words = "; ".join(f"{kind.name}: median σ {kind.median:.3g}" for kind in comparison.kinds)
    return Chart("comparison", title, panels, f"{words}.", columns=3)


def _curves(comparison: Comparison, which: str, label: str, title: str) -> Panel:
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
    for name, values, colour in (
        ("typical σ", typical, "blue"),
        ("worst found", worst, "orange"),
        ("least bound", bound, "black"),
    ):
        if values:
            look: Look = "marks" if name == "least bound" else "points"
            series.append(Series(name, list(values), list(values.values()), look, colour))
    title = f"tokens of norm ≤ {comparison.radius:.3g}, n = {comparison.n}"
    names = [kind.name for kind in kinds]
    return Panel(series, "", "σ", title, y_log=True, x_ticks=range(len(kinds)), x_names=names)
