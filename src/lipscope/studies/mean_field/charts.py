"""The chart of a convergence study: σ and W_2 ratios against n, the fitted plateau, and the bound."""

from __future__ import annotations

import math

from lipscope.report.charts import Chart, Panel, Series
from lipscope.rounding import round_up
from lipscope.studies.mean_field.study import PlateauStudy

_COLUMNS = {
    "sigma": ("σ of the cloud (median)", "blue"),
    "ratio": ("ratio of two samples (median)", "green"),
    "insertion": ("ratio of one inserted token (median)", "orange"),
}
# Values that span more than this are drawn on a logarithmic axis.
_DECADES = 20


def plateau_chart(study: PlateauStudy, title: str) -> Chart:
    """Single draws as points, medians as lines, the plateau and the refined constant."""
    draws, medians = [], []
    for column, (name, colour) in _COLUMNS.items():
        kept = [(row.n, value) for row in study.rows if (value := getattr(row, column)) is not None]
        draws.append(Series(name, [n for n, _ in kept], [y for _, y in kept], "points", colour, listed=False))
        at = [(n, y) for n, y in zip(study.lengths, study.medians(column), strict=True) if y is not None]
        if at:
            medians.append(Series(name, [n for n, _ in at], [y for _, y in at], colour=colour))
    series = [*draws, *medians, *_plateau(study), _bound(study)]
    heights = [y for one in series if one.group != "bound" and one.listed for y in one.y if 0 < y < math.inf]
    panel = Panel(
        series, "number of tokens n", "local constant σ, and ratios", x_log=True, x_ticks=study.lengths,
        y_log=bool(heights) and max(heights) > _DECADES * min(heights),
    )  # fmt: skip
    words = ", ".join(f"{y:.3g} at n = {n}" for n, y in zip(medians[0].x, medians[0].y, strict=True))
    return Chart("plateau", title, [panel], f"Median σ of clouds of n tokens: {words}.")


def _plateau(study: PlateauStudy) -> list[Series]:
    fit = study.plateau()
    if fit is None or not fit.is_visible:
        return []
    level = [fit.level] * len(study.lengths)
    return [Series(f"fitted plateau {fit.level:.3g}", study.lengths, level, "dots", "blue", group="fit")]


def _bound(study: PlateauStudy) -> Series:
    """The refined constant of the law's radius, or that of the largest norm drawn where the law has none."""
    level = [float("nan") if value is None else value for value in study.medians("bound")]
    name = f"refined constant at the largest norm drawn, {round_up(level[0], 2)} … {round_up(level[-1], 2)}"
    if math.isfinite(study.bound):
        level, name = [study.bound] * len(study.lengths), f"refined constant {round_up(study.bound, 3)}"
    return Series(name, study.lengths, level, "dashes", "grey", group="bound")
