"""What every chart must pass: both renderers draw its numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lipscope.report.charts import Chart, HeatMap
from lipscope.report.draw_page import Looks, page_chart
from lipscope.report.draw_print import print_figure
from lipscope.report.palette import palette


def assert_drawn_alike(chart: Chart) -> None:
    """Every series of every panel, in both renderers: numbers, and colours for lines."""
    looks = Looks()
    page, printed = page_chart(chart, looks), print_figure(chart)
    lines = [line for axes in printed.axes for line in axes.get_lines()]
    for panel, made in zip(chart.panels, page["panels"], strict=True):
        if isinstance(panel, HeatMap):
            assert made["z"] == [[cell and cell.value for cell in line] for line in panel.cells]
            image = next(image for axes in printed.axes for image in axes.get_images())
            values = [[cell.value if cell else math.nan for cell in line] for line in panel.cells]
            assert image.get_array().filled(math.nan) == pytest.approx(np.array(values), nan_ok=True)
            continue
        traces = iter(made["traces"])
        for series in panel.drawn:
            trace = next(traces)
            if series.look == "band":
                assert trace["y"] == pytest.approx(list(series.low), rel=1e-4)
                assert next(traces)["y"] == pytest.approx(list(series.high), rel=1e-4)
                continue
            assert trace["name"] == series.name
            # The legend of a page leaves out traces without points, so empty ones have one that is not drawn.
            assert trace["x"] == (pytest.approx(list(series.x), rel=1e-4) if len(series.x) else [None])
            assert trace["y"] == (pytest.approx(list(series.y), rel=1e-4) if len(series.y) else [None])
            assert bool(trace.get("far")) == (series in panel.far)
            same = [
                line
                for line in lines
                if list(line.get_ydata()) == list(series.y) and list(line.get_xdata()) == list(series.x)
            ]
            look = looks[trace["look"]]
            colour = look.get("line", look.get("marker"))["color"]
            assert palette("light")[colour.removeprefix("@")] in {line.get_color() for line in same}, series.name
