"""The figure of a convergence study: σ and W_2 ratios against n, as PNG and as a self-contained HTML page."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

from lipscope.rounding import round_up
from lipscope.studies.mean_field.study import PlateauStudy

# A bound larger than this times everything measured is told, not drawn.
_FAR = 1000
# The colours of Okabe and Ito, which everyone can tell apart.
_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#777777"


def draw_png(study: PlateauStudy, path: Path, title: str = "") -> None:
    """Write the figure as PNG.

    Args:
        study: a convergence study.
        path: the file to write.
        title: printed above.
    """
    matplotlib = _report("matplotlib")
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 10}):
        figure = Figure(figsize=(7.5, 4.6), layout="constrained")
        axes = figure.add_subplot()
        for points in _points(study):
            axes.plot(points["x"], points["y"], ".", color=points["color"], alpha=0.35, markersize=5)
        for line in _lines(study):
            axes.plot(line["x"], line["y"], line["dash"], color=line["color"], label=line["name"], linewidth=1.6)
        axes.set(xscale="log", xlabel="number of tokens n", ylabel="local constant σ, and ratios", title=title)
        axes.set_xticks(study.lengths, [str(n) for n in study.lengths], rotation=45 if len(study.lengths) > 8 else 0)
        axes.minorticks_off()
        if _spans_decades(study):
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False, loc="best")
        axes.grid(alpha=0.25)
        figure.savefig(path, dpi=150, metadata={"Software": None})


def draw_html(study: PlateauStudy, path: Path, title: str = "") -> None:
    """Write the figure as one HTML file that needs no network.

    Args:
        study: a convergence study.
        path: the file to write.
        title: printed above.
    """
    _report("plotly")
    import plotly.graph_objects as go  # type: ignore[import-untyped]  # plotly ships no types

    figure = go.Figure()
    for points in _points(study):
        figure.add_scatter(x=points["x"], y=points["y"], mode="markers", showlegend=False, name=points["name"],
                           marker={"color": points["color"], "opacity": 0.35, "size": 5})  # fmt: skip
    dashes = {"-": "solid", "--": "dash", ":": "dot"}
    for line in _lines(study):
        figure.add_scatter(x=line["x"], y=line["y"], mode="lines", name=line["name"],
                           line={"color": line["color"], "dash": dashes[line["dash"]]})  # fmt: skip
    figure.update_xaxes(
        type="log", title="number of tokens n", tickvals=study.lengths, ticktext=[str(n) for n in study.lengths]
    )
    scale = {"type": "log"} if _spans_decades(study) else {"rangemode": "tozero"}
    figure.update_yaxes(title="local constant σ, and ratios", **scale)
    figure.update_layout(title=title, template="plotly_white", legend={"orientation": "h", "y": -0.2})
    path.write_text(figure.to_html(include_plotlyjs=True, full_html=True, div_id="study"), encoding="utf-8")


_COLUMNS = {
    "sigma": ("σ of the cloud (median)", _BLUE),
    "ratio": ("ratio of two samples (median)", _GREEN),
    "insertion": ("ratio of one inserted token (median)", _ORANGE),
}


def _points(study: PlateauStudy) -> list[dict[str, Any]]:
    """Single draws."""
    groups = []
    for column, (name, color) in _COLUMNS.items():
        kept = [(row.n, value) for row in study.rows if (value := getattr(row, column)) is not None]
        groups.append({"name": name, "color": color, "x": [n for n, _ in kept], "y": [value for _, value in kept]})
    return groups


def _lines(study: PlateauStudy) -> list[dict[str, Any]]:
    """Medians, the fitted plateau, and the bound where it is not far above everything."""
    lines = []
    for column, (name, color) in _COLUMNS.items():
        kept = [(n, value) for n, value in zip(study.lengths, study.medians(column), strict=True) if value is not None]
        if kept:
            lines.append(_line(name, color, "-", [n for n, _ in kept], [value for _, value in kept]))
    fit = study.plateau()
    if fit is not None and fit.is_visible:
        lines.append(_line(f"fitted plateau {fit.level:.3g}", _BLUE, ":", study.lengths, [fit.level] * len(study.lengths)))
    level = study.medians("bound")
    known = [value for value in level if value is not None]
    name = f"refined constant at the largest norm drawn, {round_up(known[0], 2)} … {round_up(known[-1], 2)}"
    if math.isfinite(study.bound):
        level, name = [study.bound] * len(study.lengths), f"refined constant {round_up(study.bound, 3)}"
    highest = max(row.upper for row in study.rows)
    if max(value for value in level if value is not None) > _FAR * highest:
        # Drawn to scale it would press the measurements into one line.
        return [*lines, _line(f"{name}: far above", _GREY, "--", [], [])]
    return [*lines, _line(name, _GREY, "--", study.lengths, level)]


def _line(name: str, color: str, dash: str, x: list[int], y: Any) -> dict[str, Any]:
    return {"name": name, "color": color, "dash": dash, "x": x, "y": list(y)}


def _spans_decades(study: PlateauStudy) -> bool:
    values = [y for line in _lines(study) for y in line["y"] if 0 < y < math.inf]
    return bool(values) and max(values) > 20 * min(values)


def _report(name: str) -> ModuleType:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise ImportError(f"figures need {name}: pip install 'lipscope[report]'") from None
