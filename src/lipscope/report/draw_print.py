"""The matplotlib renderer: a chart as PNG, PDF or SVG, in one style that bears grey and small print."""

from __future__ import annotations

import io
import math
import os
import re
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from lipscope.report.charts import Chart, HeatMap, Panel, Series, log_ticks
from lipscope.report.compare import comparison_chart, comparisons
from lipscope.report.html import needed, render_chart
from lipscope.report.palette import VIRIDIS, palette
from lipscope.report.run_charts import growth_chart, heat_chart, layers_chart, scatter_charts, scopes_chart
from lipscope.report.settings import read_data
from lipscope.runs.run import Source
from lipscope.runs.writing import write_file

FORMATS = ("png", "pdf", "svg")
_STYLE: dict[str, Any] = {
    "font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "axes.labelsize": 9, "legend.fontsize": 7.5,
    "legend.framealpha": 0.85, "legend.edgecolor": "none", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.alpha": 0.22, "grid.linewidth": 0.6, "lines.linewidth": 1.6, "lines.markersize": 4.5,
    "pdf.fonttype": 42, "svg.fonttype": "none",
    # The same figure gives the same file.
    "svg.hashsalt": "lipscope",
    # Names of models and texts are not mathematics.
    "text.parse_math": False,
}  # fmt: skip
# Metadata that would change with the clock and the version of matplotlib.
_NAMELESS: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None},
    "svg": {"Creator": None, "Date": None},
}
_LINES = {"line": "-", "dashes": "--", "dots": ":"}
_MARKS = ("o", "D", "s", "^", "X")
# Above so many points, dots are small and intervals have no caps.
_MANY = 60
# Above so many cells, a heat map has no numbers in them.
_MOST_NUMBERS = 160
# Names of more letters than this stand aslant below an axis.
_LONGEST_NAME = 6
# Names of more letters than this take more room beside it.
_SHORT_NAME = 24


def draw(chart: Chart, *paths: str | os.PathLike[str]) -> list[Path]:
    """Write a chart to files by their endings: ``.png``, ``.pdf``, ``.svg``, or ``.html`` for an interactive page.

    The same chart gives the same bytes. Directories are made. Needs ``lipscope[report]``.

    Returns:
        The files.

    Raises:
        ImportError: when matplotlib or plotly is missing; says how to install it.
        ValueError: for another ending.

    Example:
        >>> import tempfile
        >>> from lipscope.report.charts import Panel
        >>> chart = Chart("line", "A line", [Panel([Series("y = x", [1, 2], [1, 2])], "x", "y")], "A straight line.")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     [path.name for path in draw(chart, f"{directory}/line.png")]
        ['line.png']
    """
    files, drawn = [Path(path) for path in paths], None
    for path in files:
        ending = path.suffix.removeprefix(".")
        path.parent.mkdir(parents=True, exist_ok=True)
        if ending == "html":
            write_file(path, render_chart(chart))
        elif ending in FORMATS:
            drawn = drawn or print_figure(chart)
            with needed("matplotlib").rc_context(_STYLE):
                write_file(path, partial(drawn.savefig, format=ending, metadata=_NAMELESS[ending]))
        else:
            raise ValueError(f"a chart is drawn as .png, .pdf, .svg or .html, got {path.name!r}")
    return files


def write_figures(
    source: Source, directory: str | os.PathLike[str], *, compare: Source | None = None, all_plans: bool = False
) -> list[Path]:
    """Write the figures of a report as PNG, PDF and SVG; needs ``lipscope[report]``.

    Args:
        source: as for ``write_report``, and so are ``compare`` and ``all_plans``.
        directory: where to; made when it does not exist. With several settings, each has its own directory in it.
        compare: a second run.
        all_plans: of a store, the rows of every plan it served.

    Returns:
        The files.
    """
    place, data = Path(directory), read_data(source, compare, all_plans)
    named: list[tuple[Path, Chart | None]] = []
    for number, setting in enumerate(data.settings):
        # Letters, digits, dots and dashes: a label may hold anything.
        name = re.sub(r"[^A-Za-z0-9.]+", "-", data.label(setting)).strip("-.")[:80] or "setting"
        home = place if len(data.settings) == 1 else place / f"{number}-{name}"
        charts = [heat_chart(setting), layers_chart(setting), *scatter_charts(setting)]
        named += [(home / chart.name, chart) for chart in charts]
        named.append((home / "growth-worst", growth_chart(setting, setting.worst)))
        side = data.beside(setting)
        if side[0] is setting:
            named.append((home / "scopes", scopes_chart(side)))
    named += [(place / f"comparison-{k}", comparison_chart(one)) for k, one in enumerate(comparisons(data))]
    return [
        file for stem, chart in named if chart is not None
        for file in draw(chart, *(stem.with_name(f"{stem.name}.{ending}") for ending in FORMATS))
    ]  # fmt: skip


def png(chart: Chart) -> bytes:
    """A chart as the bytes of a PNG file."""
    file, save = io.BytesIO(), print_figure(chart).savefig
    save(file, format="png")
    return file.getvalue()


def print_figure(chart: Chart) -> Any:
    """A chart as a matplotlib figure."""
    with needed("matplotlib").rc_context(_STYLE):
        rows, several = -(-len(chart.panels) // chart.columns), len(chart.panels) > 1
        figure = import_module("matplotlib.figure").Figure(_size(chart, rows), 130 if several else 200, layout="constrained")
        grid = figure.add_gridspec(rows, min(chart.columns, len(chart.panels)))
        drawn = []
        for place, panel in zip(grid, chart.panels, strict=False):
            # A single panel bears the title of the chart, and a heat map has no other.
            title = panel.title if several else f"{chart.title}\n{panel.title}".rstrip()
            if isinstance(panel, HeatMap):
                _draw_heat_map(figure, place, panel, title if several else chart.title)
            else:
                drawn.append((_draw_panel(figure, place, panel, title), [one.name for one in panel.drawn]))
        if several:
            figure.suptitle(chart.title + (f"\n{chart.note}" if chart.note else ""), fontsize=10)
        _legends(figure, drawn, several)
        # Places are found once: a layout engine that stays would find them again for every file.
        figure.get_layout_engine().execute(figure)
        figure.set_layout_engine(None)
        return figure


def _size(chart: Chart, rows: int) -> tuple[float, float]:
    """Width and height in inches."""
    first = chart.panels[0]
    if isinstance(first, HeatMap):
        return max(3.4, 1.6 + 0.42 * len(first.column_names)), max(2.4, 1.0 + 0.3 * len(first.row_names))
    if len(chart.panels) == 1:
        legend = 0.07 * max(0, *(len(one.name) - _SHORT_NAME for one in first.drawn if one.listed), 0)
        return max(5.4, 1.5 * len(first.x_names) * _aslant(first)) + legend, 3.6 + (1.0 if first.far else 0.0)
    return (5.2 if chart.columns < 3 else 4.2) * chart.columns, 3.4 * rows + 0.6


def _legends(figure: Any, drawn: list[tuple[list[Any], list[str]]], several: bool) -> None:
    """Legends where no data are: beside a single panel, below the panels of a grid. Panels with the same names share one."""
    told: list[list[str]] = []
    alike = all(names == drawn[0][1] for _, names in drawn)
    for axes, names in drawn:
        if names in told:
            continue
        told.append(names)
        found = [pair for ax in axes for pair in zip(*ax.get_legend_handles_labels(), strict=True)]
        if not found:
            continue
        # In the order in which they were drawn; matplotlib lists lines first.
        handles, labels = zip(*sorted(found, key=lambda pair: names.index(pair[1])), strict=True)
        if not several:
            figure.legend(handles, labels, loc="outside right center", frameon=False, ncols=1 + (len(handles) > 16))
        elif alike:
            figure.legend(handles, labels, loc="outside lower center", fontsize=7, frameon=False, ncols=min(6, len(handles)))
        else:
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
            axes[-1].legend(handles, labels, **below, fontsize=7, frameon=False, ncols=2 if len(handles) > 2 else 1)


def _draw_panel(figure: Any, place: Any, panel: Panel, title: str) -> list[Any]:
    """The axes of a panel: one, or with far bounds two, the upper part first."""
    colours, far = palette("light"), panel.far
    parts = place.subgridspec(2, 1, height_ratios=(1, 2.3)) if far else [place]
    axes = [figure.add_subplot(parts[-1])]
    if far:
        axes.insert(0, figure.add_subplot(parts[0], sharex=axes[0]))
        axes[0].tick_params(labelbottom=False)
    for series in panel.drawn:
        _draw_series(axes[0 if series in far else -1], series, colours[series.colour], _MARKS[panel.marker(series)])
    axes[0].set_title(title)
    axes[-1].set(xlabel=panel.x, ylabel=panel.y)
    if far:
        heights = [y for one in far for y in one.y]
        axes[0].set(ylabel="bounds", ylim=(0.9 * min(heights), 1.1 * max(heights)))
    if not panel.y_log and panel.from_zero:
        heights = [0.0, *(y for one in panel.drawn if one not in far for y in (*one.y, *one.low, *one.high))]
        axes[-1].set_ylim(1.06 * min(heights), 1.06 * max(heights) or 1.0)
    for ax in axes:
        _scale(ax, panel)
    return axes


def _draw_series(ax: Any, series: Series, colour: str, mark: str) -> None:
    style: dict[str, Any] = {"color": colour, "label": series.name if series.listed else None}
    if series.look == "band":
        ax.fill_between(series.x, series.low, series.high, alpha=0.2, linewidth=0, **style)
    elif series.look in ("points", "marks"):
        many = len(series.x) > _MANY
        style |= {"fmt": "x", "alpha": 0.9} if series.look == "marks" else {"fmt": mark, "alpha": 0.6 if many else 0.85}
        ends = None
        if len(series.low):
            below = [y - low for y, low in zip(series.y, series.low, strict=True)]
            ends = [below, [high - y for y, high in zip(series.y, series.high, strict=True)]]
        size = 4.0 if series.look == "marks" else 2.6 if many else 3.6
        ax.errorbar(series.x, series.y, ends, markersize=size, capsize=0 if many else 2, elinewidth=0.6 if many else 1.1,
                    markeredgewidth=1.2 if series.look == "marks" else 0, **style)  # fmt: skip
    else:
        ax.plot(series.x, series.y, _LINES[series.look], linewidth=1.0 if series.group == "guide" else 1.6,
                marker="o" if series.group == "measured" else None, **style)  # fmt: skip


def _scale(ax: Any, panel: Panel) -> None:
    for name, axis, is_log in (("x", ax.xaxis, panel.x_log), ("y", ax.yaxis, panel.y_log)):
        if is_log:
            ax.set(**{f"{name}scale": "log"})
            _plain_numbers(axis, getattr(ax, f"get_{name}lim")())
    if ticks := panel.ticks:
        aslant = {"rotation": 30, "ha": "right"} if _aslant(panel) else {}
        ax.set_xticks([tick for tick, _ in ticks], [name for _, name in ticks], **aslant)
        ax.xaxis.set_minor_locator(import_module("matplotlib.ticker").NullLocator())


def _aslant(panel: Panel) -> bool:
    return max(map(len, panel.x_names), default=0) > _LONGEST_NAME


def _draw_heat_map(figure: Any, place: Any, heat: HeatMap, title: str) -> None:
    colors = import_module("matplotlib.colors")
    ax = figure.add_subplot(place)
    values = [[math.nan if cell is None else cell.value for cell in line] for line in heat.cells]
    scale = colors.LogNorm(heat.low, max(heat.high, heat.low * 1.0001)) if heat.low > 0 else None
    viridis = colors.LinearSegmentedColormap.from_list("viridis", [tuple(c / 255 for c in stop) for stop in VIRIDIS])
    image = ax.imshow(values, aspect="auto", cmap=viridis, norm=scale)
    ax.set_xticks(range(len(heat.column_names)), list(heat.column_names))
    ax.set_yticks(range(len(heat.row_names)), list(heat.row_names))
    ax.set(xlabel=heat.x, ylabel=heat.y, title=title)
    cells = [(x, y, cell) for y, line in enumerate(heat.cells) for x, cell in enumerate(line) if cell is not None]
    for x, y, cell in cells if len(cells) <= _MOST_NUMBERS else ():
        ax.text(x, y, cell.shown, ha="center", va="center", color=cell.ink, fontsize=6.5)
    bar = figure.colorbar(image, ax=ax, label=heat.label)
    if heat.low > 0:
        _plain_numbers(bar.ax.yaxis, (heat.low, heat.high))
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)


def _plain_numbers(axis: Any, limits: tuple[float, float]) -> None:
    """20 and not 2·10¹; powers only for what is very large or small."""
    low, high = limits
    if low <= 0:
        return
    ticker = import_module("matplotlib.ticker")
    axis.set_major_locator(ticker.FixedLocator(log_ticks(low, high)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())
    axis.set_minor_locator(ticker.NullLocator())
