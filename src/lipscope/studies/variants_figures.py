"""The figure of a comparison: σ over n, σ over R, and on one ruler per kind what is typical, found, and possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lipscope.studies.variants import Comparison

# The colours of Okabe and Ito, which everyone can tell apart; lines differ by marker too.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
MARKERS = ("o", "s", "^", "v", "D", "P", "X", "*")


def draw(comparison: Comparison, path: Path, title: str = "") -> None:
    """Write the figure as PNG or SVG, by the ending of ``path``.

    Args:
        comparison: what was measured.
        path: the file to write.
        title: printed above.

    Raises:
        ImportError: when matplotlib is missing.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("figures need matplotlib: pip install 'lipscope[report]'") from None

    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "lipscope"}):
        figure = Figure(figsize=(12, 4.4), layout="constrained")
        left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
        _curves(left, comparison, "by_length", "number of tokens n", f"typical tokens, R = {comparison.radius:.3g}")
        _curves(middle, comparison, "by_radius", "radius R", f"typical tokens, n = {comparison.n}")
        _ruler(right, comparison)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        if title:
            figure.suptitle(title, fontsize=10)
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, dpi=150, metadata=metadata)


def _curves(axes: Any, comparison: Comparison, which: str, label: str, title: str) -> None:
    from matplotlib.ticker import LogFormatter, NullLocator

    for index, kind in enumerate(comparison.kinds):
        points = getattr(kind, which)
        axes.plot(list(points), list(points.values()), color=COLOURS[index % 8], marker=MARKERS[index % 8], markersize=5,
                  linewidth=1.4, label=kind.name)  # fmt: skip
    ticks = list(getattr(comparison.kinds[0], which))
    axes.set(xscale="log", yscale="log", xlabel=label, ylabel="σ (median)", title=title)
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.grid(alpha=0.25)


def _ruler(axes: Any, comparison: Comparison) -> None:
    """One line per kind: typical σ, the worst found, the least bound."""
    kinds = comparison.kinds
    for row, kind in enumerate(kinds):
        colour = COLOURS[row % 8]
        reach = [kind.median] + ([] if kind.worst is None else [float(kind.worst.lower)])
        reach += [kind.bounds[0].value] if kind.bounds else []
        axes.plot([min(reach), max(reach)], [row, row], color=colour, linewidth=1, alpha=0.6)
        axes.plot(kind.median, row, "o", color=colour, markersize=6, label="typical σ" if row == 0 else None)
        if kind.worst is not None:
            axes.plot(
                float(kind.worst.lower), row, ">", color=colour, markersize=7, label="worst found" if row == 0 else None
            )
        if kind.bounds:
            axes.plot(kind.bounds[0].value, row, "|", color=colour, markersize=14, markeredgewidth=2.5,
                      label="least bound" if row == 0 else None)  # fmt: skip
    axes.set_yticks(range(len(kinds)), [kind.name for kind in kinds])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="σ", title=f"tokens of norm ≤ {comparison.radius:.3g}, n = {comparison.n}")
    axes.grid(alpha=0.25, axis="x")
    axes.legend(fontsize=8, frameon=False, loc="best")
