"""Charts for the page: Plotly traces as JSON values, their colours still roles, so that the page can change its theme.

Looks repeat and numbers do not, so traces refer to a shared list of looks: a page of thousands of curves stays small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lipscope.report.charts import Chart, Series

_DASHES = {"line": "solid", "dashes": "dash", "dots": "dot"}
_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "x")


class Looks:
    """The looks of traces, each kept once."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self.all: list[dict[str, Any]] = []

    def number(self, look: dict[str, Any]) -> int:
        """Where a look is in the list."""
        key = repr(look)
        if key not in self._known:
            self._known[key] = len(self.all)
            self.all.append(look)
        return self._known[key]


def page_chart(chart: Chart, looks: Looks) -> dict[str, Any]:
    """A chart as the page's script takes it: traces, axes and words."""
    clouds = sum(series.look == "points" for series in chart.series)
    traces: list[dict[str, Any]] = []
    for index, series in enumerate(chart.series):
        traces += _traces(series, looks, _SYMBOLS[index % len(_SYMBOLS)] if 1 < clouds <= len(_SYMBOLS) else "circle")
    return {
        "title": chart.title, "words": chart.words, "traces": traces,
        "x": {"label": chart.x, "log": chart.x_log, "ticks": _digits(chart.x_ticks),
              "names": list(chart.x_names) or [f"{tick:g}" for tick in chart.x_ticks]},
        "y": {"label": chart.y, "log": chart.y_log},
    }  # fmt: skip


def _traces(series: Series, looks: Looks, symbol: str) -> list[dict[str, Any]]:
    colour = f"@{series.colour}"
    common = {"group": series.group, "legendgroup": series.name}
    if series.look == "band":
        edge = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", **common}
        filled = edge | {"fill": "tonexty", "fillcolor": f"{colour}/0.18"}
        return [
            {"look": looks.number(edge | {"showlegend": False}), "name": series.name, **_numbers(series.x, series.low)},
            {"look": looks.number(filled), "name": series.name, **_numbers(series.x, series.high)},
        ]
    if series.look == "points":
        look: dict[str, Any] = {
            "type": "scatter", "mode": "markers", "marker": {"color": colour, "size": 7, "symbol": symbol, "opacity": 0.85}
        }  # fmt: skip
    else:
        width = 1.5 if series.group == "guide" else 2.25
        look = {"type": "scatter", "mode": "lines", "line": {"color": colour, "dash": _DASHES[series.look], "width": width}}
        if series.group == "measured":
            look |= {"mode": "lines+markers", "marker": {"color": colour, "size": 7}}
    look |= common | {"showlegend": series.listed}
    trace: dict[str, Any] = {"name": series.name, **_numbers(series.x, series.y)}
    if series.hover:
        look["hovertemplate"] = "%{text}<extra></extra>"
        trace["text"] = list(series.hover)
    if len(series.low) and series.look == "points":
        look["error_y"] = {"type": "data", "symmetric": False, "thickness": 1.5, "width": 3, "color": colour}
        trace["high"] = _digits([high - y for y, high in zip(series.y, series.high, strict=True)])
        trace["low"] = _digits([y - low for y, low in zip(series.y, series.low, strict=True)])
    return [{"look": looks.number(look), **trace}]


def _numbers(x: Sequence[float], y: Sequence[float]) -> dict[str, list[float]]:
    return {"x": _digits(x), "y": _digits(y)}


def _digits(values: Sequence[float]) -> list[float]:
    """Five significant digits: more than a screen shows. Whole numbers stay whole."""
    return [value if isinstance(value, int) else float(f"{value:.5g}") for value in values]
