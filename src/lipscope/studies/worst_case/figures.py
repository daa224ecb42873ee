"""Figures of an attack, as PNG by matplotlib and as self-contained HTML by plotly; they need ``lipscope[report]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lipscope.rounding import interval
from lipscope.studies.worst_case.ascent import Ascent
from lipscope.studies.worst_case.growth_in_n import Growth
from lipscope.studies.worst_case.tokens import TokenAttack

# Colours that everyone can tell apart (Okabe and Ito), black for what was found, dashes for what was built.
_STYLES: dict[str, tuple[str, str, bool]] = {
    "worst": ("#000000", "solid", True),
    "ascent": ("#000000", "solid", True),
    "groups": ("#009E73", "dash", False),
    "pair": ("#E69F00", "dash", False),
    "proposition34.max": ("#56B4E9", "dash", False),
    "proposition34.min": ("#CC79A7", "dash", False),
    "meanfield": ("#F0E442", "dash", False),
    "given": ("#999999", "solid", True),
    "refined.unmasked": ("#0072B2", "solid", False),
    "refined.masked": ("#0072B2", "solid", False),
    "refined.visibility": ("#0072B2", "dot", False),
    "castin2024.general": ("#D55E00", "solid", False),
    "castin2024.meanfield": ("#D55E00", "dot", False),
}
_LABELS = {
    "worst": "worst σ found",
    "given": "σ on the text",
    "castin2024.general": "upper bound: paper, Theorem 3.3",
    "castin2024.meanfield": "upper bound: paper, Theorem 3.5",
    "refined.unmasked": "upper bound: refined",
    "refined.masked": "upper bound: refined",
    "refined.visibility": "upper bound: refined, by visibility",
}
_OUT_OF_SIGHT = 1e3
_DASHES = {"solid": "-", "dash": "--", "dot": ":"}


@dataclass(frozen=True)
class Line:
    """One curve of a figure."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str = "#999999"
    dash: str = "solid"
    points: bool = False
    thin: bool = False
    labels: Sequence[str] = field(default=())


@dataclass(frozen=True)
class Figure:
    """Curves with their axes, drawn alike by both libraries."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = True
    markers_only: bool = False

    def save(self, stem: Path) -> tuple[Path, Path]:
        """Write ``stem``.png and ``stem``.html."""
        png, html = stem.with_suffix(".png"), stem.with_suffix(".html")
        self._png(png)
        self._html(html)
        return png, html

    def _png(self, path: Path) -> None:
        import matplotlib as mpl

        mpl.use("agg")
        import matplotlib.pyplot as plt

        drawing, axes = plt.subplots(figsize=(7.5, 5))
        for line in self.lines:
            style = "" if self.markers_only else _DASHES[line.dash]
            axes.plot(
                line.x, line.y, linestyle=style or "none", color=line.colour, label=line.name or None,
                marker="o" if line.points or self.markers_only else None, markersize=3.5,
                linewidth=0.7 if line.thin else 1.6, alpha=0.6 if line.thin else 1.0,
            )  # fmt: skip
        axes.set(title=self.title, xlabel=self.x, ylabel=self.y)
        axes.set_xscale("log" if self.log_x else "linear")
        axes.set_yscale("log" if self.log_y else "linear")
        if self.log_x:
            # Lengths are small whole numbers: powers of ten would say little.
            ticks = [2**k for k in range(1, 21) if min(self.lines[0].x) <= 2**k <= max(self.lines[0].x)]
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
        axes.grid(True, which="both", color="#eeeeee")
        axes.set_axisbelow(True)
        if any(line.name for line in self.lines):
            axes.legend(fontsize=7.5)
        drawing.tight_layout()
        drawing.savefig(path, dpi=150)
        plt.close(drawing)

    def _html(self, path: Path) -> None:
        from plotly import graph_objects as go  # type: ignore[import-untyped]

        drawing = go.Figure()
        for line in self.lines:
            mode = "markers" if self.markers_only else "lines+markers" if line.points else "lines"
            drawing.add_trace(
                go.Scatter(
                    x=list(line.x), y=list(line.y), mode=mode, name=line.name, showlegend=bool(line.name),
                    text=list(line.labels) or None,
                    line={"color": line.colour, "dash": line.dash, "width": 1 if line.thin else 2},
                    marker={"color": line.colour, "size": 6}, opacity=0.6 if line.thin else 1.0,
                )
            )  # fmt: skip
        drawing.update_layout(title=self.title, template="plotly_white")
        drawing.update_xaxes(title=self.x, type="log" if self.log_x else "linear")
        drawing.update_yaxes(title=self.y, type="log" if self.log_y else "linear")
        drawing.write_html(path, include_plotlyjs=True)


def growth_figure(study: Growth, title: str) -> Figure:
    """Worst σ, constructions and upper bounds over n."""
    n = [w.n for w in study.worst]
    lines = []
    for name, values in study.curves().items():
        if name == "ascent" or (name == "refined.visibility" and len(study.worst[0].bounds) > 2):
            continue  # the worst curve, or the same bound, under another name
        if max(values) > _OUT_OF_SIGHT * max(w.bounds["castin2024.general"] for w in study.worst):
            continue  # the mean-field bound at a large radius would flatten everything else
        colour, dash, points = _STYLES[name]
        lines.append(Line(_LABELS.get(name, name), n, values, colour, dash, points))
    if "worst" in study.fits:
        fit = study.fits["worst"]
        law = f"{fit.c:.3g}·n^{fit.alpha:.2f} (α in {interval(fit.alpha_low, fit.alpha_high, decimals=2)})"
        lines.append(Line(law, n, [fit.c * k**fit.alpha for k in n], "#999999", "dot", thin=True))
    return Figure(title, "number of tokens n", "local Lipschitz constant σ", lines, log_x=True)


def history_figure(found: Ascent, title: str) -> Figure:
    """σ of every restart over the steps, the winner in black."""
    steps = list(range(len(found.history)))
    lines = []
    for i, label in enumerate(found.labels):
        curve = found.history[:, i].tolist()
        if i == found.best:
            lines.append(Line(f"winner, from {label}", steps, curve, "#000000"))
        else:
            lines.append(Line("", steps, curve, _KINDS[_kind(label)], thin=True))
    kinds = dict.fromkeys(_kind(label) for label in found.labels)
    lines += [Line(f"from {kind}", [], [], _KINDS[kind], thin=True) for kind in kinds]
    return Figure(title, "step", "σ (lower bound)", lines)


_KINDS = {"constructions": "#009E73", "noise": "#0072B2", "given inputs": "#D55E00", "the length before": "#CC79A7"}


def _kind(label: str) -> str:
    first = label.split()[0].removesuffix(",")
    return {"noise": "noise", "given": "given inputs", "shorter": "the length before"}.get(first, "constructions")


def tokens_figure(found: TokenAttack, title: str) -> Figure:
    """Measured against predicted σ of every candidate, round by round."""
    colours = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
    lines = []
    for number in sorted({trial.round for trial in found.tried}):
        trials = [trial for trial in found.tried if trial.round == number]
        raised = sum(trial.sigma > trial.before for trial in trials)
        lines.append(
            Line(f"round {number + 1}: {raised} of {len(trials)} raise σ", [t.before + t.predicted for t in trials],
                 [t.sigma for t in trials], colours[number % len(colours)],
                 labels=[f"position {t.position}, word {t.word}" for t in trials])
        )  # fmt: skip
    return Figure(title, "σ predicted to first order", "σ measured", lines, log_y=False, markers_only=True)
