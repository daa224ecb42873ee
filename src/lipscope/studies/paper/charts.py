"""The paper's figures as charts: panels in its layout (a row per model, a column per layer)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from lipscope.report.charts import Chart, Look, Panel, Series, log_grid
from lipscope.report.palette import CYCLE
from lipscope.studies.paper import analysis
from lipscope.studies.paper.analysis import COMPANION, EXPONENT, REAL_TEXT, SIGMA, Curve, Number, Row
from lipscope.studies.paper.cast import Cast, Member
from lipscope.studies.paper.plan import ADVERSARIAL, BORDER, NORM_SCOPES, PUBLISHED, published

_TOKENS, _SCRIPTS = "number of tokens n", "√‖Jᵀf(X)‖ of the scripts"
_POINTS: dict[str, Look] = {"proposition 3.4": "line", "groups": "dots", "ascent": "marks"}


def charts(rows: Sequence[Row], cast: Cast) -> list[Chart]:
    """Every chart that the rows have data for; their words can be read without the page around them."""
    text, long, fits = analysis.text_curves(rows), analysis.long_curves(rows), analysis.fit_table(rows)
    note = f"blue: the true σ with its interval; orange: {_SCRIPTS}, which is not σ"
    own = [curve for curve in text if curve.is_published]
    second = ", and σ on a second text" if analysis.second_curves(rows) else ""
    made = [
        _chart("exponents", "Exponents α of σ ≈ c·n^α on real text", _exponents(fits),
               f"One place per layer, with 95 % intervals: σ, {_SCRIPTS}{second}. Dotted: 0, ¼ and ½."),
        _chart("published", "Random GPT-2, layer 6, on real text", _growth(own, cast.members),
               f"Against n: σ with its interval and its certified upper bound, {_SCRIPTS}, and the curve drawn in the "
               "public repository."),
        _chart("border", "Worst-case σ of one head, where proved √n growth ends (dotted)", _border(rows, cast),
               "Against n, with tokens of norm R: the largest σ lies between the constructed tokens and the upper bounds; "
               "what the best groups attain has a lower bound in closed form."),
        _chart("masks", "σ under the causal mask over σ without it, against n", _masks(rows),
               "Same weights, same text; median and range over inputs. Above 1 the masked layer is the less smooth one."),
        _chart("layernorm", "σ of attention alone, with the normalisation before it, and with the residual around both",
               _layernorm(rows, cast),
               "By layer and by n. Dashed: the longest token that the normalisation lets through (image radius), and the "
               "bound for all inputs of this length that follows from it."),
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


def _chart(name: str, title: str, panels: Iterable[Panel], words: str = "") -> Chart:
    panels = list(panels)
    about = f". {words}" if words else f": {'; '.join(panel.title for panel in panels if panel.title)}."
    return Chart(name, title, panels, f"{title}{about}", columns=min(2, max(1, len(panels))))


def _exponents(fits: Sequence[Number]) -> Iterator[Panel]:
    table = [one for one in fits if one.condition.startswith(REAL_TEXT)]
    places = list(dict.fromkeys(one.place for one in table))
    series = []
    for first, estimator, name, colour, shift in (
        (True, SIGMA, "σ", "blue", -0.1),
        (False, SIGMA, "σ, second text", "green", 0.0),
        (True, COMPANION, _SCRIPTS, "orange", 0.1),
    ):
        mine = [one for one in table if one.table == EXPONENT + estimator and (one.condition == REAL_TEXT) == first]
        if mine:
            x, alpha = [places.index(one.place) + shift for one in mine], [one.value for one in mine]
            low, high = [one.low for one in mine], [one.high for one in mine]
            series.append(Series(name, x, alpha, "points", colour, low, high))
    for exponent, name in list(analysis.RIVALS.items())[:3]:
        series.append(Series(name, [-0.5, len(places) - 0.5], [exponent] * 2, "dots", "grey", group="guide", listed=False))
    if places:
        yield Panel(series, "", "exponent α", x_ticks=range(len(places)), x_names=places, from_zero=False)


def _border(rows: Sequence[Row], cast: Cast) -> Iterator[Panel]:
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
        heights = [y for one in series for y in one.y]
        edge = 1 + math.exp(groups.rows[0]["exponent"])
        ends = [min(heights), max(heights)]
        series.append(Series(f"n = 1 + e^E = {edge:.3g}", [edge] * 2, ends, "dots", "grey", group="guide"))
        title = f"{member.title}, layer {layer}, head {groups.rows[0]['head']}, R = {groups.rows[0]['radius']:.3g}"
        yield Panel(series, _TOKENS, "σ of the head", title, x_log=True, y_log=True)


def _masks(rows: Sequence[Row]) -> Iterator[Panel]:
    ratios = [free | {"ratio": masked["estimate"] / free["estimate"]} for masked, free in analysis.masked_pairs(rows)]
    series = list[Series]()
    for (model, layer), mine in analysis.grouped(ratios, "model", "layer").items():
        found = {n: [row["ratio"] for row in group] for (n,), group in sorted(analysis.grouped(mine, "n").items())}
        low, middle, high = ([pick(ratios) for ratios in found.values()] for pick in (min, median, max))
        colour = CYCLE[len(series) % len(CYCLE)]
        series.append(Series(f"{model}, layer {layer}", list(found), middle, "points", colour, low, high))
    if series:
        lengths = [row["n"] for row in ratios]
        series.append(Series("equal", [min(lengths), max(lengths)], [1.0, 1.0], "dashes", "grey", group="guide"))
        yield Panel(series, _TOKENS, "σ causal over σ unmasked", from_zero=False)


def _growth(curves: Sequence[Curve], members: Sequence[Member], log: bool = False) -> list[Panel]:
    return [
        Panel(_growth_series(curve), _TOKENS, "local Lipschitz constant",
              f"{member.title}, layer {curve.layer}, mask {curve.mask}", x_log=log, y_log=log)
        for member in members for curve in curves if curve.model == member.name
    ]  # fmt: skip


def _growth_series(curve: Curve) -> list[Series]:
    n, sigma = curve.values("estimate")
    series = [
        Series("σ", n, sigma, "points", "blue", curve.values("lower")[1], curve.values("upper")[1]),
        Series(_SCRIPTS, *curve.values(COMPANION), "points", "orange"),
        Series("certified upper bound", *curve.values("certified"), "marks", "green", group="bound"),
    ]
    grid = log_grid(min(n), max(n), 61)
    for estimator, colour in ((SIGMA, "blue"), (COMPANION, "orange")):
        if fit := curve.fit(estimator):
            whose = SIGMA if estimator == SIGMA else "scripts"
            label = f"{fit.c:.3g}·n^{round(fit.alpha, 2) + 0.0:.2f} ({whose})"
            series.append(Series(label, grid, [fit.c * k**fit.alpha for k in grid], "line", colour, group="fit"))
    if curve.is_published:
        label = f"{PUBLISHED}, drawn in the public repository"
        series.append(Series(label, grid, list(map(published, grid)), "dashes", "grey", group="fit"))
    return [one for one in series if len(one.x)]


def _radius(curves: Sequence[Curve], cast: Cast) -> Iterator[Panel]:
    for member in cast.members:
        for curve in () if member.masked else [c for c in curves if c.model == member.name]:
            series = [
                Series("largest token norm", *curve.values("radius_max"), "points", "blue"),
                Series("root mean square", *curve.values("radius_rms"), "marks", "orange"),
            ]
            yield Panel(series, _TOKENS, "norm of tokens", f"{member.title}, layer {curve.layer}")


def _adversarial(rows: Sequence[Row], cast: Cast) -> Iterator[Panel]:
    curves = [c for c in analysis.adversarial_curves(rows) if c.experiment == ADVERSARIAL]
    for member in cast.members:
        for layer in sorted({c.layer for c in curves if c.model == member.name}):
            mine, series = [c for c in curves if (c.model, c.layer) == (member.name, layer)], list[Series]()
            radii = sorted({c.rows[0]["radius"] for c in mine})
            for curve in sorted(mine, key=lambda c: float(c.rows[0]["radius"])):
                radius, points = curve.rows[0]["radius"], curve.rows[0]["points"]
                listed, colour = points == "proposition 3.4", CYCLE[radii.index(radius) % len(CYCLE)]
                name = f"R = {radius:g}" if listed else f"R = {radius:g}, {points}"
                found = curve.values("estimate")
                series.append(Series(name, *found, _POINTS[points], colour, group="fit", listed=listed))
            every = [row for c in mine for row in c.rows]
            grid = sorted({row["n"] for row in every})
            start = max(row["estimate"] for row in every if row["n"] == grid[0] and row["points"] != "ascent")
            line = [start * (n / grid[0]) ** 0.5 for n in grid]
            series.append(Series("slope of √n", grid, line, "dashes", "grey", group="guide"))
            title = f"{member.title}, layer {layer}, head {mine[0].rows[0]['head']}"
            yield Panel(series, _TOKENS, "σ of the head", title, x_log=True, y_log=True)


def _layernorm(rows: Sequence[Row], cast: Cast) -> Iterator[Panel]:
    table = analysis.norm_table(rows)
    before = {row["model"] for row in table if "norm+attention" in row["sigma"]}
    for member in cast.members:
        # Models that normalise before attention, where there are any.
        if mine := [row for row in table if row["model"] == member.name and (not before or member.name in before)]:
            longest, deep = max(row["n"] for row in mine), max(row["layer"] for row in mine)
            for column, at, x, label in (("n", longest, "layer", "layer"), ("layer", deep, "n", _TOKENS)):
                series = _layernorm_series([row for row in mine if row[column] == at], x)
                title = f"{member.title}, {column} {'= ' if column == 'n' else ''}{at}"
                yield Panel(series, label, "σ (and radius, bound)", title, y_log=True)


def _layernorm_series(rows: Sequence[Row], x: str) -> list[Series]:
    def over_x(table: str, name: str) -> tuple[list[float], list[float]]:
        found = {row[x]: row[table][name] for row in rows if row[table].get(name) is not None}
        return list(found), list(found.values())

    colours = zip(NORM_SCOPES, ("blue", "orange", "green"), strict=True)
    series = [Series(scope, *over_x("sigma", scope), "line", colour) for scope, colour in colours]
    radii, bounds = over_x("known", analysis.IMAGE_RADIUS), over_x("known", analysis.GLOBAL_BOUND)
    series.append(Series("image radius of the norm", *radii, "dashes", "purple", group="guide"))
    series.append(Series("global bound of attention", *bounds, "dashes", "grey", group="bound"))
    return [one for one in series if len(one.x)]


def _differences(rows: Sequence[Row]) -> Iterator[Panel]:
    table = analysis.difference_table(rows)
    variants, series = list(dict.fromkeys(row.table for row in table)), list[Series]()
    for index, model in enumerate(dict.fromkeys(row.model for row in table)):
        mine = [row for row in table if row.model == model]
        at = [variants.index(row.table) + 0.09 * (index - 2) for row in mine]
        low, high = [row.low for row in mine], [row.high for row in mine]
        look: Look = "points" if index < len(CYCLE) else "marks"
        series.append(Series(model, at, [row.value for row in mine], look, CYCLE[index % len(CYCLE)], low, high))
    if series:
        series.append(Series("no effect", [-0.4, len(variants) - 0.6], [1.0, 1.0], "dashes", "grey", group="guide"))
        label, at_n = "value over σ, median and range", ", ".join(dict.fromkeys(row.condition for row in table))
        yield Panel(series, "", label, at_n, y_log=True, x_ticks=range(len(variants)), x_names=variants)
