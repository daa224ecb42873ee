"""Figures for a paper: the charts by matplotlib, as PNG, PDF and SVG, in one style that bears grey and small print."""

from __future__ import annotations

import math
import os
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from lipscope.report.charts import Chart, Series, log_ticks
from lipscope.report.heat import VIRIDIS, HeatMap
from lipscope.report.palette import palette

FORMATS = ("png", "pdf", "svg")
_STYLE: dict[str, Any] = {
    "font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "axes.labelsize": 9,
    "legend.fontsize": 7.5, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.22,
    "grid.linewidth": 0.6, "lines.linewidth": 1.6, "lines.markersize": 4.5, "pdf.fonttype": 42, "svg.fonttype": "none",
    # The same figure gives the same file.
    "svg.hashsalt": "lipscope",
    # Names of models and texts are not mathematics.
    "text.parse_math": False,
}  # fmt: skip
_WIDTH, _HEIGHT = 5.4, 3.6
_LINES = {"line": "-", "dashes": "--", "dots": ":"}
_MARKS = ("o", "D", "s", "^", "X")


def draw_chart(chart: Chart) -> Any:
    """A chart as a matplotlib figure; needs ``lipscope[report]``."""
    colours = palette("light")
    far = _far_bounds(chart)
    with _matplotlib().rc_context(_STYLE):
        figure = _figure(_WIDTH, _HEIGHT + (1.0 if far else 0.0))
        top, ax = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2.3)) if far else (None, figure.subplots())
        clouds = sum(series.look == "points" for series in chart.series)
        for index, series in enumerate(chart.series):
            mark = _MARKS[index % len(_MARKS)] if 1 < clouds <= len(_MARKS) else "o"
            _draw(top if top is not None and series in far else ax, series, colours[series.colour], mark)
        ax.set(xlabel=chart.x, ylabel=chart.y)
        (ax if top is None else top).set_title(chart.title)
        _scale(ax, chart)
        if top is not None:
            top.set_ylabel("bounds")
            _scale(top, chart)
        # Beside the axes: nothing that was measured may lie under a legend.
        if ax.get_legend_handles_labels()[0]:
            figure.legend(loc="outside right center", frameon=False, ncols=1 + (len(chart.series) > 16))
        return figure


def _far_bounds(chart: Chart) -> list[Series]:
    """Bounds for all inputs, when they lie far above what was measured at some: they get a part of the axis of their own."""
    near = [y for series in chart.series if series.group != "bound" for y in (*series.y, *series.high)]
    bounds = [series for series in chart.series if series.group == "bound"]
    return [series for series in bounds if near and chart.y_log and min(series.y) > _FAR * max(near)]


# The page's script breaks its axis at the same factor.
_FAR = 3.0


def _scale(ax: Any, chart: Chart) -> None:
    if chart.x_log:
        ax.set_xscale("log")
        _plain_numbers(ax.xaxis, ax.get_xlim())
    if chart.y_log:
        ax.set_yscale("log")
        _plain_numbers(ax.yaxis, ax.get_ylim())
    if len(chart.x_ticks):
        ax.set_xticks(list(chart.x_ticks), list(chart.x_names) or [f"{tick:g}" for tick in chart.x_ticks])
        ax.xaxis.set_minor_locator(import_module("matplotlib.ticker").NullLocator())


def draw_heat_map(heat: HeatMap) -> Any:
    """The heat map as a matplotlib figure, on a logarithmic colour scale."""
    matplotlib = _matplotlib()
    colors = import_module("matplotlib.colors")
    rows, columns = len(heat.row_names), len(heat.column_names)
    with matplotlib.rc_context(_STYLE | {"axes.grid": False}):
        figure = _figure(max(3.4, 1.6 + 0.42 * columns), max(2.4, 1.0 + 0.3 * rows))
        ax = figure.subplots()
        values = [[math.nan if cell is None else cell.value for cell in line] for line in heat.cells]
        scale = None
        if heat.low > 0:
            scale = colors.LogNorm(heat.low, max(heat.high, heat.low * 1.0001))
        map_ = colors.LinearSegmentedColormap.from_list("viridis", [tuple(c / 255 for c in stop) for stop in VIRIDIS])
        image = ax.imshow(values, aspect="auto", cmap=map_, norm=scale)
        ax.set_xticks(range(columns), list(heat.column_names))
        ax.set_yticks(range(rows), list(heat.row_names))
        ax.set(xlabel={"head": "head", "n": "tokens n"}[heat.columns], ylabel="layer", title=heat.title)
        if rows * columns <= _MOST_NUMBERS:
            for y, line in enumerate(heat.cells):
                for x, cell in enumerate(line):
                    if cell is not None:
                        ax.text(x, y, cell.shown, ha="center", va="center", color=cell.ink, fontsize=6.5)
        bar = figure.colorbar(image, ax=ax, label="σ")
        if heat.low > 0:
            _plain_numbers(bar.ax.yaxis, (heat.low, heat.high))
        for spine in ax.spines.values():
            spine.set_visible(False)
        ax.tick_params(length=0)
        return figure


_MOST_NUMBERS = 160


def save_figure(figure: Any, stem: str | os.PathLike[str]) -> list[Path]:
    """Write a figure as PNG, PDF and SVG; the same figure gives the same bytes."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    nameless: dict[str, dict[str, Any]] = {
        "png": {"Software": None}, "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
        "svg": {"Creator": None, "Date": None},
    }  # fmt: skip
    files = []
    with _matplotlib().rc_context(_STYLE):
        for suffix in FORMATS:
            files.append(stem.with_name(f"{stem.name}.{suffix}"))
            figure.savefig(files[-1], dpi=200, metadata=nameless[suffix])
    return files


def _draw(ax: Any, series: Series, colour: str, mark: str) -> None:
    label = series.name if series.listed else None
    if series.look == "band":
        ax.fill_between(series.x, series.low, series.high, color=colour, alpha=0.2, linewidth=0, label=label)
        return
    if series.look == "points":
        if len(series.low):
            below = [y - low for y, low in zip(series.y, series.low, strict=True)]
            above = [high - y for y, high in zip(series.y, series.high, strict=True)]
            ax.errorbar(series.x, series.y, [below, above], fmt=mark, color=colour, label=label, capsize=2, elinewidth=1.1)
        else:
            ax.plot(series.x, series.y, mark, color=colour, label=label, markersize=3.2, alpha=0.8, markeredgewidth=0)
        return
    width = 1.0 if series.group == "guide" else 1.6
    ax.plot(
        series.x, series.y, _LINES[series.look], color=colour, label=label, linewidth=width,
        marker="o" if series.group == "measured" else None,
    )  # fmt: skip


def _plain_numbers(axis: Any, limits: tuple[float, float]) -> None:
    """20 and not 2·10¹; powers only for what is very large or small."""
    low, high = limits
    if low <= 0:
        return
    ticks = log_ticks(low, high)
    ticker = import_module("matplotlib.ticker")
    axis.set_major_locator(ticker.FixedLocator(ticks))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())
    axis.set_minor_locator(ticker.NullLocator())


def _figure(width: float, height: float) -> Any:
    return import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def _matplotlib() -> ModuleType:
    try:
        return import_module("matplotlib")
    except ImportError:
        raise ImportError("figures for print need matplotlib: pip install 'lipscope[report]'") from None
