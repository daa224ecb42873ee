"""The Plotly renderer: a chart as JSON values for the page's script, its colours still names, so that the theme can change.

Looks repeat and numbers do not, so traces refer to a shared list of looks: a page of thousands of curves stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lipscope.report.charts import Chart, HeatMap, Panel, Series

_DASHES = {"line": "solid", "dashes": "dash", "dots": "dot"}
_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x")


# The looks of traces, each kept once.
Looks = list[dict[str, Any]]


def page_chart(chart: Chart, looks: Looks, caption: str = "") -> dict[str, Any]:
    """A chart as the page's script and templates take it: words, and panels with their traces and axes."""
    return {
        "title": chart.title, "words": chart.words, "caption": caption or chart.note, "columns": chart.columns,
        "panels": [_heat_map(panel) if isinstance(panel, HeatMap) else _panel(panel, looks) for panel in chart.panels],
    }  # fmt: skip


def _panel(panel: Panel, looks: Looks) -> dict[str, Any]:
    far = panel.far
    traces = [
        trace | ({"far": True} if series in far else {})
        for series in panel.drawn for trace in _traces(series, looks, _SYMBOLS[panel.marker(series)])
    ]  # fmt: skip
    return {
        "title": panel.title, "traces": traces,
        "x": {"label": panel.x, "log": panel.x_log, "ticks": _digits([tick for tick, _ in panel.ticks]),
              "names": [name for _, name in panel.ticks]},
        "y": {"label": panel.y, "log": panel.y_log, "zero": panel.from_zero},
    }  # fmt: skip


def matrix(
    z: Sequence[Sequence[float | None]], columns: Sequence[str], rows: Sequence[str], x: str, y: str, title: str = ""
) -> dict[str, Any]:
    """A panel of numbers as colours, on a linear scale."""
    return {"title": title, "z": z, "columns": list(columns), "rows": list(rows), "x": {"label": x}, "y": {"label": y}}


def _heat_map(heat: HeatMap) -> dict[str, Any]:
    values = [[None if cell is None else cell.value for cell in line] for line in heat.cells]
    words = [["" if cell is None else cell.words for cell in line] for line in heat.cells]
    return matrix(values, heat.column_names, heat.row_names, heat.x, heat.y, heat.title) | {"text": words}


def _traces(series: Series, looks: Looks, symbol: str) -> list[dict[str, Any]]:
    colour = f"@{series.colour}"
    common: dict[str, Any] = {"type": "scatter", "group": series.group, "legendgroup": series.name}
    if series.look == "band":
        edge = common | {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
        filled = edge | {"fill": "tonexty", "fillcolor": f"{colour}/0.18", "showlegend": series.listed}
        return [
            {"look": _place(looks, edge), "name": series.name, **_numbers(series.x, series.low)},
            {"look": _place(looks, filled), "name": series.name, **_numbers(series.x, series.high)},
        ]
    look: dict[str, Any] = common | {"showlegend": series.listed}
    if series.look in ("points", "marks"):
        sign = "x-thin-open" if series.look == "marks" else symbol
        look |= {"mode": "markers", "marker": {"color": colour, "size": 7, "symbol": sign, "opacity": 0.85}}
    else:
        width = 1.5 if series.group == "guide" else 2.25
        look |= {"mode": "lines", "line": {"color": colour, "dash": _DASHES[series.look], "width": width}}
        if series.group == "measured":
            look |= {"mode": "lines+markers", "marker": {"color": colour, "size": 7}}
    trace: dict[str, Any] = {"name": series.name, **_numbers(series.x, series.y)}
    if series.hover:
        look["hovertemplate"] = "%{text}<extra></extra>"
        trace["text"] = list(series.hover)
    if len(series.low) and series.look in ("points", "marks"):
        look["error_y"] = {"type": "data", "symmetric": False, "thickness": 1.5, "width": 3, "color": colour}
        trace["high"] = _digits([high - y for y, high in zip(series.y, series.high, strict=True)])
        trace["low"] = _digits([y - low for y, low in zip(series.y, series.low, strict=True)])
    return [{"look": _place(looks, look), **trace}]


def _place(looks: Looks, look: dict[str, Any]) -> int:
    if look not in looks:
        looks.append(look)
    return looks.index(look)


def _numbers(x: Sequence[float], y: Sequence[float]) -> dict[str, Sequence[float | None]]:
    # The legend leaves out traces without points.
    return {"x": _digits(x) or [None], "y": _digits(y) or [None]}


def _digits(values: Sequence[float]) -> list[float]:
    """Five significant digits: more than a screen shows. Whole numbers stay whole."""
    return [value if isinstance(value, int) else float(f"{value:.5g}") for value in values]
