"""Every figure of a report as files for print, from the same data as the page."""

from __future__ import annotations

import os
import re
from pathlib import Path

from lipscope.report.charts import entropy_chart, growth_chart, layers_chart, radius_chart, scopes_chart, sink_chart
from lipscope.report.compare import comparison_chart, comparisons
from lipscope.report.data import ReportData
from lipscope.report.figures_print import draw_chart, draw_heat_map, save_figure
from lipscope.report.heat import heat_map


def write_figures(data: ReportData, directory: str | os.PathLike[str]) -> list[Path]:
    """Write the figures of a report as PNG, PDF and SVG; needs ``lipscope[report]``.

    Args:
        data: from ``report_data``.
        directory: where to; made when it does not exist. With several settings, each has its own directory in it.

    Returns:
        The files.
    """
    place = Path(directory)
    files: list[Path] = []
    for number, setting in enumerate(data.settings):
        home = place if len(data.settings) == 1 else place / f"{number}-{_file_name(data.label(setting))}"
        files += save_figure(draw_heat_map(heat_map(setting)), home / "heat-map")
        charts = [layers_chart(setting), radius_chart(setting), entropy_chart(setting), sink_chart(setting)]
        for chart in charts:
            if chart is not None:
                files += save_figure(draw_chart(chart), home / chart.name)
        files += save_figure(draw_chart(growth_chart(setting, setting.worst)), home / "growth-worst")
        side = [s for s in data.settings if (s.run, s.model, s.text) == (setting.run, setting.model, setting.text)]
        scopes = scopes_chart(side) if side[0] is setting else None
        if scopes is not None:
            files += save_figure(draw_chart(scopes), home / "scopes")
    for number, comparison in enumerate(comparisons(data)):
        files += save_figure(draw_chart(comparison_chart(comparison)), place / f"comparison-{number}")
    return files


def _file_name(text: str) -> str:
    """Letters, digits, dots and dashes: a label may hold anything."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:80] or "setting"
