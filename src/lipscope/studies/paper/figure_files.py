"""Draw figures as PNG and PDF (matplotlib) and as interactive pages that need no network (plotly), in one style."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from lipscope.studies.paper.figure_data import Figure, Panel, Series

_WIDTH, _HEIGHT = 5.2, 3.3
_STYLE = {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 7, "axes.spines.top": False, "axes.spines.right": False}


def write_figure(figure: Figure, directory: Path) -> list[Path]:
    """Write one figure in every format.

    Args:
        figure: its data.
        directory: where to.

    Returns:
        The files: PNG, PDF and HTML.

    Raises:
        ImportError: when matplotlib or plotly is missing; says how to install them.
    """
    stem = directory / figure.name
    files = [stem.with_suffix(suffix) for suffix in (".png", ".pdf", ".html")]
    _draw(figure, files[0], files[1])
    files[2].write_text(_page(figure), encoding="utf-8")
    return files


def _draw(figure: Figure, png: Path, pdf: Path) -> None:
    matplotlib = _report("matplotlib")
    from matplotlib.figure import Figure as Canvas

    columns = figure.columns
    lines = -(-len(figure.panels) // columns)
    with matplotlib.rc_context(_STYLE):
        canvas = Canvas(figsize=(_WIDTH * max(columns, 2), _HEIGHT * lines + 0.6), layout="constrained")
        axes = canvas.subplots(lines, columns, squeeze=False).flat
        for ax, panel in zip(axes, figure.panels, strict=False):
            _draw_panel(ax, panel)
        for ax in list(axes)[len(figure.panels) :]:
            ax.set_axis_off()
        canvas.suptitle(figure.title + (f"\n{figure.note}" if figure.note else ""), fontsize=10)
        # Places are found once; with a layout engine left, every file would be drawn twice.
        engine = canvas.get_layout_engine()
        assert engine is not None
        engine.execute(canvas)
        canvas.set_layout_engine(None)
        canvas.savefig(png, dpi=130, metadata={"Software": None})
        canvas.savefig(pdf, metadata={"Creator": None, "Producer": None, "CreationDate": None})


def _draw_panel(ax: Any, panel: Panel) -> None:
    for s in panel.series:
        label = s.name if s.listed else None
        match s.look:
            case "line":
                ax.plot(s.x, s.y, "-", color=s.color, label=label, linewidth=1.5)
            case "dashes":
                ax.plot(s.x, s.y, "--", color=s.color, label=label, linewidth=1.5)
            case "dots":
                ax.plot(s.x, s.y, ":", color=s.color, label=label, linewidth=1.5)
            case "marks":
                ax.plot(s.x, s.y, "x", color=s.color, label=label, markersize=5)
            case "points":
                ax.plot(s.x, s.y, ".", color=s.color, label=label, markersize=4, alpha=0.6)
        if len(s.low):
            ax.vlines(s.x, s.low, s.high, color=s.color, alpha=0.25, linewidth=0.8)
    ax.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    if panel.x_log:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(_few_numbers(ax.get_xlim()))
    if panel.x_names:
        ax.set_xticks(range(len(panel.x_names)), panel.x_names)
    if panel.y_log:
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_minor_formatter(_few_numbers(ax.get_ylim()))
    else:
        tops = [y for s in panel.series for y in (*s.y, *s.high)]
        ax.set_ylim(0, 1.1 * max(tops, default=1.0))
    ax.grid(alpha=0.2)
    ax.legend(framealpha=0.85, edgecolor="none", loc="best")


def _few_numbers(limits: tuple[float, float]) -> Any:
    """Numbers at 2 and 5 between the powers of ten, where few of those are in view."""
    low, high = limits
    ticker = _report("matplotlib.ticker")
    if math.log10(high / low) > 2:
        return ticker.NullFormatter()
    return ticker.FuncFormatter(lambda y, _: f"{y:g}" if f"{y:.0e}"[0] in "25" else "")


def _page(figure: Figure) -> str:
    _report("plotly")
    from plotly.subplots import make_subplots  # type: ignore[import-untyped]  # plotly ships no types

    columns = figure.columns
    lines = -(-len(figure.panels) // columns)
    grid = make_subplots(lines, columns, subplot_titles=[panel.title for panel in figure.panels])
    shown: set[str] = set()
    for index, panel in enumerate(figure.panels):
        place = {"row": index // columns + 1, "col": index % columns + 1}
        for s in panel.series:
            grid.add_scatter(**_trace(s), legendgroup=s.name, showlegend=s.listed and s.name not in shown, **place)
            shown.add(s.name)
        grid.update_xaxes(title=panel.x_label, type="log" if panel.x_log else "linear", **place)
        if panel.x_names:
            grid.update_xaxes(tickvals=list(range(len(panel.x_names))), ticktext=list(panel.x_names), **place)
        scale = {"type": "log"} if panel.y_log else {"rangemode": "tozero"}
        grid.update_yaxes(title=panel.y_label, **scale, **place)
    title = figure.title + (f"<br><sup>{figure.note}</sup>" if figure.note else "")
    grid.update_layout(title=title, template="plotly_white", height=120 + 380 * lines)
    text: str = grid.to_html(include_plotlyjs=True, full_html=True, div_id=figure.name)
    return text


def _trace(s: Series) -> dict[str, Any]:
    trace: dict[str, Any] = {"x": list(s.x), "y": list(s.y), "name": s.name}
    if s.look in ("points", "marks"):
        trace |= {
            "mode": "markers",
            "marker": {"color": s.color, "size": 5, "symbol": "x" if s.look == "marks" else "circle"},
        }
    else:
        dash = {"line": "solid", "dashes": "dash", "dots": "dot"}[s.look]
        trace |= {"mode": "lines", "line": {"color": s.color, "dash": dash}}
    if len(s.low):
        above = [high - y for y, high in zip(s.y, s.high, strict=True)]
        below = [y - low for y, low in zip(s.y, s.low, strict=True)]
        trace["error_y"] = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 0.6}
    return trace


def _report(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(f"figures need {name}: pip install 'lipscope[report]'") from None
