"""The paper's figures as charts: panels in its layout (a row per model, a column per layer)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from lipscope.report.charts import Chart, Look, Panel, Series, log_grid
from lipscope.report.palette import CYCLE
from lipscope.studies.paper import analysis
from lipscope.studies.paper.analysis import COMPANION, SIGMA, Curve, FitRow, Row
from lipscope.studies.paper.cast import Cast, Member
from lipscope.studies.paper.findings import PUBLISHED_LAYER, PUBLISHED_MODEL
from lipscope.studies.paper.plan import ADVERSARIAL, BORDER, NORM_SCOPES, PUBLISHED_EXPONENT, PUBLISHED_FACTOR

_TOKENS = "number of tokens n"
_POINTS: dict[str, Look] = {"proposition 3.4": "line", "groups": "dots", "ascent": "marks"}


def charts(rows: Sequence[Row], cast: Cast) -> list[Chart]:
    """Every chart that the rows have data for; their words can be read without the page around them."""
    text, long, fits = analysis.text_curves(rows), analysis.long_curves(rows), analysis.fit_table(rows)
    note = "blue: the true σ with its interval; orange: √‖Jᵀf(X)‖ of the public scripts, which is not σ"
    own = [c for c in text if (c.model, c.layer) == (PUBLISHED_MODEL, PUBLISHED_LAYER)]
    made = [
        _chart("exponents", "Exponents α of σ ≈ c·n^α on real text", _exponents(fits),
               "With 95 % intervals, a place per layer: σ, and √‖Jᵀf(X)‖ of the public scripts. Lines: 0, ¼, ½."),
        _chart("published", "Random GPT-2, layer 6, on real text", _growth(own, cast.members),
               "Against n: σ with its interval, the scripts' √‖Jᵀf(X)‖, and the curve drawn in the public repository."),
        _chart("border", "Worst-case σ of one head where √n growth ends", _border(rows, cast),
               "Tokens are so short that √n growth ends within these lengths. σ at constructed tokens lies between the "
               "closed-form lower bound and the upper bounds; to the left of the dotted line growth like √n is proved."),
        _chart("masks", "σ under the causal mask over σ without", _masks(rows),
               "Same weights, same text, against n; above 1 the masked layer is the less smooth one."),
        _chart("layernorm", "σ with and without normalisation and residual", _layernorm(rows, cast),
               "Attention alone, behind its normalisation, and with the residual, by layer and by n. Dashed: the longest "
               "token that the normalisation lets through, and the global bound of attention that follows."),
        _chart("long-range", "σ on real text, long range", _growth(long, cast.members, log=True), note),
        _chart("radius", "Norm of the tokens that enter attention, against n", _radius(text, cast)),
        _chart("adversarial", "σ at adversarial points, by radius R", _adversarial(rows, cast),
               "line: Proposition 3.4; dotted: best split into two groups; crosses: gradient ascent"),
        _chart("differences", "What each difference from the published scripts does to the number", _differences(rows)),
    ]  # fmt: skip
    for weights in ("random", "pretrained"):
        members = [m for m in cast.members if m.weights == weights]
        made.append(_chart(f"growth-{weights}", f"σ on real text, {weights} weights", _growth(text, members), note))
    return [chart for chart in made if chart.panels]


def _chart(name: str, title: str, panels: list[Panel], words: str = "") -> Chart:
    names = "; ".join(panel.title for panel in panels if panel.title)
    return Chart(
        name,
        title,
        panels,
        f"{title}. {words}".strip() if words else f"{title}: {names}.",
        columns=min(2, max(1, len(panels))),
    )


def _exponents(fits: Sequence[FitRow]) -> list[Panel]:
    table = [row for row in fits if row.curve.condition == analysis.REAL_TEXT]
    places = list(dict.fromkeys(row.place for row in table))
    if not places:
        return []
    series = []
    for estimator, name, colour, shift in (
        (SIGMA, "σ", "blue", -0.1),
        (COMPANION, "√‖Jᵀf(X)‖ of the scripts", "orange", 0.1),
    ):
        mine = [row for row in table if row.estimator == estimator]
        if mine:
            x, ends = [places.index(row.place) + shift for row in mine], [(r.fit.alpha_low, r.fit.alpha_high) for r in mine]
            low, high = [low for low, _ in ends], [high for _, high in ends]
            series.append(Series(name, x, [row.fit.alpha for row in mine], "points", colour, low, high))
    for exponent, name in list(analysis.RIVALS.items())[:3]:
        series.append(Series(name, [-0.5, len(places) - 0.5], [exponent] * 2, "dots", "grey", group="guide", listed=False))
    return [Panel(series, "", "exponent α", x_ticks=range(len(places)), x_names=places, from_zero=False)]


def _border(rows: Sequence[Row], cast: Cast) -> list[Panel]:
    panels = []
    curves = [c for c in analysis.adversarial_curves(rows) if c.experiment == BORDER]
    # One layer of random weights, the paper's where it is there, and one of trained ones.
    there = [m for m in cast.members if any(c.model == m.name for c in curves)]
    random = [m for m in there if m.weights == "random" and m.family == "gpt2"]
    for member in random[:1] + [m for m in there if m.weights == "pretrained"][:1]:
        layer = max(c.layer for c in curves if c.model == member.name)
        mine = {c.rows[0]["points"]: c for c in curves if (c.model, c.layer) == (member.name, layer)}
        groups = mine["groups"]
        series = [
            Series("upper bound: paper, Theorem 3.3", *groups.values("castin2024"), "dashes", "orange", group="fit"),
            Series("upper bound: refined", *groups.values("refined"), "line", "blue", group="fit"),
            Series("lower bound, closed form", *groups.values("predicted"), "dashes", "green", group="fit"),
            Series("σ, best groups", *groups.values("estimate"), "points", "black"),
        ]
        if "proposition 3.4" in mine:
            series.append(Series("σ, Proposition 3.4", *mine["proposition 3.4"].values("estimate"), "marks", "purple"))
        ends = [min(y for one in series for y in one.y), max(y for one in series for y in one.y)]
        edge = 1 + math.exp(groups.rows[0]["exponent"])
        series.append(Series(f"n = 1 + e^E = {edge:.3g}", [edge] * 2, ends, "dots", "grey", group="guide"))
        title = f"{member.title}, layer {layer}, head {groups.rows[0]['head']}, R = {groups.rows[0]['radius']:.3g}"
        panels.append(Panel(series, _TOKENS, "σ of the head", title, x_log=True, y_log=True))
    return panels


def _masks(rows: Sequence[Row]) -> list[Panel]:
    pairs, series = analysis.masked_ratios(rows), list[Series]()
    for (model, layer), mine in analysis.grouped(pairs, "model", "layer").items():
        found = {n: [pair["ratio"] for pair in group] for (n,), group in sorted(analysis.grouped(mine, "n").items())}
        low, middle, high = ([pick(ratios) for ratios in found.values()] for pick in (min, median, max))
        colour = CYCLE[len(series) % len(CYCLE)]
        series.append(Series(f"{model}, layer {layer}", list(found), middle, "points", colour, low, high))
    if series:
        lengths = [pair["n"] for pair in pairs]
        series.append(Series("equal", [min(lengths), max(lengths)], [1.0, 1.0], "dashes", "grey", group="guide"))
    return [Panel(series, _TOKENS, "σ causal over σ unmasked", from_zero=False)] if series else []


def _growth(curves: Sequence[Curve], members: Sequence[Member], log: bool = False) -> list[Panel]:
    return [
        Panel(_growth_series(curve), _TOKENS, "local Lipschitz constant",
              f"{member.title}, layer {curve.layer}, mask {curve.mask}", x_log=log, y_log=log)
        for member in members for curve in curves if curve.model == member.name
    ]  # fmt: skip


def _growth_series(curve: Curve) -> list[Series]:
    n, sigma = curve.values("estimate")
    series = [Series("σ", n, sigma, "points", "blue", curve.values("lower")[1], curve.values("upper")[1])]
    series.append(Series("companion estimator", *curve.values(COMPANION), "points", "orange"))
    series.append(Series("certified upper bound", *curve.values("certified"), "marks", "green", group="bound"))
    series = [one for one in series if one.x]
    grid = log_grid(min(n), max(n), 61)
    for estimator, colour in ((SIGMA, "blue"), (COMPANION, "orange")):
        fit = curve.fit(estimator)
        if fit is not None:
            label = f"{analysis.power_law(fit, 2)} ({estimator})"
            series.append(Series(label, grid, [fit.c * k**fit.alpha for k in grid], "line", colour, group="fit"))
    if (curve.model, curve.layer) == (PUBLISHED_MODEL, PUBLISHED_LAYER):
        drawn = [PUBLISHED_FACTOR * k**PUBLISHED_EXPONENT for k in grid]
        label = f"{PUBLISHED_FACTOR}·n^{PUBLISHED_EXPONENT}, drawn in the public repository"
        series.append(Series(label, grid, drawn, "dashes", "grey", group="fit"))
    return series


def _radius(curves: Sequence[Curve], cast: Cast) -> list[Panel]:
    panels = []
    for member in cast.members:
        for curve in () if member.masked else [c for c in curves if c.model == member.name]:
            series = [
                Series("largest token norm", *curve.values("radius_max"), "points", "blue"),
                Series("root mean square", *curve.values("radius_rms"), "marks", "orange"),
            ]
            panels.append(Panel(series, _TOKENS, "norm of tokens", f"{member.title}, layer {curve.layer}"))
    return panels


def _adversarial(rows: Sequence[Row], cast: Cast) -> list[Panel]:
    curves = [c for c in analysis.adversarial_curves(rows) if c.experiment == ADVERSARIAL]
    panels = []
    for member in cast.members:
        for layer in sorted({c.layer for c in curves if c.model == member.name}):
            mine = [c for c in curves if (c.model, c.layer) == (member.name, layer)]
            title = f"{member.title}, layer {layer}, head {mine[0].rows[0]['head']}"
            series = _adversarial_series(mine)
            panels.append(Panel(series, _TOKENS, "σ of the head", title, x_log=True, y_log=True))
    return panels


def _adversarial_series(curves: Sequence[Curve]) -> list[Series]:
    series = []
    radii = sorted({c.rows[0]["radius"] for c in curves})
    for radius, colour in zip(radii, CYCLE, strict=False):
        for curve in (c for c in curves if c.rows[0]["radius"] == radius):
            points = curve.rows[0]["points"]
            listed = points == "proposition 3.4"
            name = f"R = {radius:g}" if listed else f"R = {radius:g}, {points}"
            values = curve.values("estimate")
            series.append(Series(name, *values, _POINTS[points], colour, group="fit", listed=listed))
    grid = sorted({row["n"] for c in curves for row in c.rows})
    start = max(row["estimate"] for c in curves for row in c.rows if row["n"] == grid[0] and row["points"] != "ascent")
    line = [start * (n / grid[0]) ** 0.5 for n in grid]
    return [*series, Series("slope of √n", grid, line, "dashes", "grey", group="guide")]


def _layernorm(rows: Sequence[Row], cast: Cast) -> list[Panel]:
    table = analysis.norm_table(rows)
    panels = []
    for member in cast.members:
        mine = [row for row in table if row["model"] == member.name]
        if not mine:
            continue
        longest, deep = max(row["n"] for row in mine), max(row["layer"] for row in mine)
        at_n, at_layer = [r for r in mine if r["n"] == longest], [r for r in mine if r["layer"] == deep]
        for some, x, label, where in ((at_n, "layer", "layer", f"n = {longest}"), (at_layer, "n", _TOKENS, f"layer {deep}")):
            title = f"{member.title}, {where}"
            panels.append(Panel(_layernorm_series(some, x), label, "σ (and radius, bound)", title, y_log=True))
    return panels


def _layernorm_series(rows: Sequence[Row], x: str) -> list[Series]:
    series = []
    for scope, colour in zip(NORM_SCOPES, ("blue", "orange", "green"), strict=True):
        kept = [r for r in rows if scope in r["sigma"]]
        series.append(Series(scope, [r[x] for r in kept], [r["sigma"][scope] for r in kept], "line", colour))
    radii = {r[x]: r["known"][analysis.IMAGE_RADIUS] for r in rows if r["known"][analysis.IMAGE_RADIUS] is not None}
    series.append(Series("image radius of the norm", [*radii], [*radii.values()], "dashes", "purple", group="guide"))
    bounds = {r[x]: r["known"][analysis.GLOBAL_BOUND] for r in rows if r["known"][analysis.GLOBAL_BOUND] is not None}
    series.append(Series("global bound of attention", [*bounds], [*bounds.values()], "dashes", "grey", group="bound"))
    return [one for one in series if len(one.x)]


def _differences(rows: Sequence[Row]) -> list[Panel]:
    table = analysis.difference_table(rows)
    if not table:
        return []
    variants = list(dict.fromkeys(row.table for row in table))
    series = []
    for index, model in enumerate(dict.fromkeys(row.model for row in table)):
        mine = [row for row in table if row.model == model]
        at = [variants.index(row.table) + 0.09 * (index - 2) for row in mine]
        low, high = [row.low for row in mine], [row.high for row in mine]
        look: Look = "points" if index < len(CYCLE) else "marks"
        series.append(Series(model, at, [row.value for row in mine], look, CYCLE[index % len(CYCLE)], low, high))
    ends = [-0.4, len(variants) - 0.6]
    series.append(Series("no effect", ends, [1.0, 1.0], "dashes", "grey", group="guide"))
    at_n = ", ".join(dict.fromkeys(row.condition for row in table))
    return [
        Panel(series, "", "value over σ, median and range", at_n, y_log=True, x_ticks=range(len(variants)), x_names=variants)
    ]
