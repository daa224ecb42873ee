"""Reports: one HTML file that shows how smooth a model is, where it is not, and why; figures for print; a live view."""

from lipscope.report.data import ReportData, report_data
from lipscope.report.figures import write_figures
from lipscope.report.html import write_report
from lipscope.runs.run import Run, load_run

__all__ = ["ReportData", "Run", "load_run", "report_data", "write_figures", "write_report"]
