"""Charts of an attack: the worst σ over n, the course of an ascent, and predictions against measurements."""

from __future__ import annotations

from lipscope.report.charts import Chart, Look, Panel, Series
from lipscope.report.palette import CYCLE
from lipscope.rounding import interval
from lipscope.studies.worst_case.ascent import Ascent
from lipscope.studies.worst_case.growth_in_n import Growth
from lipscope.studies.worst_case.tokens import TokenAttack

# Name in the legend, colour and look of every curve; curves without a name here are called by their own.
_FOUND: dict[str, tuple[str, str, Look]] = {
    "worst": ("worst σ found", "black", "line"),
    "given": ("σ on the text", "grey", "line"),
    "groups": ("groups", "green", "dashes"),
    "pair": ("pair", "amber", "dashes"),
    "proposition34.max": ("proposition34.max", "sky", "dashes"),
    "proposition34.min": ("proposition34.min", "purple", "dashes"),
    "meanfield": ("meanfield", "yellow", "dashes"),
}
_BOUNDS: dict[str, tuple[str, str, Look]] = {
    "refined.unmasked": ("upper bound: refined", "blue", "line"),
    "refined.masked": ("upper bound: refined", "blue", "line"),
    "refined.visibility": ("upper bound: refined, by visibility", "blue", "dots"),
    "castin2024.general": ("upper bound: paper, Theorem 3.3", "orange", "line"),
    "castin2024.meanfield": ("upper bound: paper, Theorem 3.5", "orange", "dots"),
}
# Where a restart began: the first word of its label.
_STARTS = {"noise": "noise", "given": "given inputs", "shorter": "the length before"}
_START_COLOURS = {"constructions": "green", "noise": "blue", "given inputs": "orange", "the length before": "purple"}


def growth_chart(study: Growth, title: str) -> Chart:
    """Worst σ, constructions and upper bounds over n."""
    n = [w.n for w in study.worst]
    series = []
    for name, values in study.curves().items():
        if name == "ascent" or (name == "refined.visibility" and len(study.worst[0].bounds) > 2):
            continue  # the worst curve, or the same bound, under another name
        label, colour, look = (_FOUND | _BOUNDS)[name]
        series.append(Series(label, n, values, look, colour, group="bound" if name in _BOUNDS else "measured"))
    if "worst" in study.fits:
        fit = study.fits["worst"]
        law = f"{fit.c:.3g}·n^{fit.alpha:.2f} (α in {interval(fit.alpha_low, fit.alpha_high, decimals=2)})"
        series.append(Series(law, n, [fit.c * k**fit.alpha for k in n], "dots", "grey", group="guide"))
    words = f"Worst σ found: {', '.join(f'{float(w.sigma.estimate):.3g} at n = {w.n}' for w in study.worst)}."
    panel = Panel(series, "number of tokens n", "local Lipschitz constant σ", x_log=True, y_log=True, x_ticks=n)
    return Chart("growth", title, [panel], words)


def history_chart(found: Ascent, title: str) -> Chart:
    """σ of every restart over the steps, the winner in black."""
    steps = list(range(len(found.history)))
    series = []
    seen: set[str] = set()
    for i, label in enumerate(found.labels):
        curve = found.history[:, i].tolist()
        if i == found.best:
            series.append(Series(f"winner, from {label}", steps, curve, colour="black", group="fit"))
            continue
        start = _STARTS.get(label.split()[0].removesuffix(","), "constructions")
        series.append(
            Series(f"from {start}", steps, curve, colour=_START_COLOURS[start], group="guide", listed=start not in seen)
        )
        seen.add(start)
    words = f"σ of {len(found.labels)} restarts over {len(steps) - 1} steps, at most {float(found.history.max()):.4g}."
    return Chart("ascent", title, [Panel(series, "step", "σ (lower bound)", y_log=True)], words)


def tokens_chart(found: TokenAttack, title: str) -> Chart:
    """Measured against predicted σ of every candidate, round by round."""
    series = []
    for number in sorted({trial.round for trial in found.tried}):
        trials = [trial for trial in found.tried if trial.round == number]
        raised = sum(trial.sigma > trial.before for trial in trials)
        name = f"round {number + 1}: {raised} of {len(trials)} raise σ"
        x, y = [t.before + t.predicted for t in trials], [t.sigma for t in trials]
        hover = [f"position {t.position}, word {t.word}" for t in trials]
        series.append(Series(name, x, y, "points", CYCLE[number % len(CYCLE)], hover=hover))
    panel = Panel(series, "σ predicted to first order", "σ measured", from_zero=False)
    return Chart("tokens", title, [panel], f"{len(found.tried)} substitutions: {'; '.join(one.name for one in series)}.")
