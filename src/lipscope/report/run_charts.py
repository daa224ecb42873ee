"""The charts of a run: growth with the length, layers, heat maps, scatters, scopes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import itemgetter

from scipy.stats import spearmanr

from lipscope.report.charts import Chart, HeatCell, HeatMap, Look, Panel, Series, log_grid, shade
from lipscope.report.palette import CYCLE, DEPTHS
from lipscope.report.settings import BOUNDS, Cell, ReportData, Setting, report_data
from lipscope.report.summary import damage_sentence, exponent, places
from lipscope.rounding import counted, enclosure, number
from lipscope.runs.run import Point, Row, Source, grouped, load_run

# A legend of more layers lists the first and the last, whose colours span the others.
_MOST_NAMES = 12
# Column of the rows, name of the file, title, label of the axis.
_SCATTERS = (
    ("radius_rms", "radius", "σ and the norm of the tokens", "root mean square token norm |x|"),
    ("max_logit", "max-logit", "σ and the largest logit", "largest visible logit"),
    ("entropy", "entropy", "σ and attention entropy", "mean entropy of an attention row, nats"),
    ("sink_mass", "sink", "σ and attention sinks", "attention on the first token and on sinks"),
    ("typical", "typical", "σ and the typical gain", "gain of random directions, r.m.s."),
    ("stable_rank", "stable-rank", "σ and the stable rank", "stable rank: directions about as bad"),
    ("predicted", "predicted", "σ and the predicted damage", "predicted damage to the outputs"),
    ("measured", "measured", "σ and the measured damage", "measured damage to the outputs"),
)
# Ends of the predicted damage.
_ENDS = ("predicted_low", "predicted_high")


def growth(source: Source | ReportData) -> Chart:
    """σ of every layer or head against n, a panel per setting: medians, and bands that hold all inputs.

    Args:
        source: what ``lipscope.scan`` returned or wrote, the store of a sweep, or a ``ReportData``.

    Example:
        >>> from lipscope.runs.run import Run
        >>> row = {"model": "m", "layer": 0, "n": 8, "lower": 1.0, "estimate": 1.1, "upper": 1.2}
        >>> chart = growth(Run((row, row | {"n": 16, "estimate": 1.2})))
        >>> chart.series[1].name, chart.series[1].y
        ('layer 0', [1.1, 1.2])
    """
    data = source if isinstance(source, ReportData) else report_data([load_run(source)])
    panels = []
    for setting in data.settings:
        series: list[Series] = []
        layers = sorted({cell.layer for cell in setting.cells})
        for cell in setting.cells:
            name = f"layer {cell.layer}"
            # Heads of a layer share its colour, and its line in the legend.
            listed = _listed(cell.layer, layers) and all(name != one.name for one in series)
            band, line = _measured(cell, name, name, _depth(cell.layer, layers[-1]), f"{cell.where}, ")
            series += [replace(band, listed=False), replace(line, listed=listed)]
        panels.append(_over_n(setting, series, data.label(setting) if len(data.settings) > 1 else ""))
    words = "; ".join(f"{data.label(setting)}: {places(setting)}" for setting in data.settings)
    title = data.label(data.settings[0]) if len(panels) == 1 else "Growth of σ with the length"
    return Chart("growth", title, panels, f"σ against the number of tokens. {words}.", columns=min(2, len(panels)))


def growth_chart(setting: Setting, cell: Cell) -> Chart:
    """σ of one cell against n: intervals, both fits, the guides √n and n^¼, and the bounds."""
    points = cell.points
    series = [*_measured(cell, "σ of all inputs", "median σ"), *_fits(cell), *_guides(cell), *_bounds(cell)]
    words = f"σ of {cell.where} against the number of tokens: " + "; ".join(f"n = {p.n}: {p.sigma}" for p in points)
    name = f"growth-layer{cell.layer}" + ("" if cell.head is None else f"-head{cell.head}")
    panel = _over_n(setting, series, ticks=[p.n for p in points])
    return Chart(name, f"Growth of σ with the length: {cell.where}", [panel], words)


def _measured(cell: Cell, band: str, line: str, colour: str = "blue", where: str = "") -> list[Series]:
    """A band that holds all inputs, and a line through the medians."""
    words = [f"{where}{_point_words(p)}" for p in cell.points]
    both = point_series(line, [p.n for p in cell.points], cell.points, "line", colour, words)
    return [replace(both, name=band, y=[], look="band", hover=()), replace(both, low=(), high=())]


def _fits(cell: Cell) -> list[Series]:
    fit, grid = cell.fit, _grid(cell)
    if fit is None or not fit.is_decided:
        return []
    power = [fit.c * x**fit.alpha for x in grid]
    limit = [fit.limit * x / (x + fit.half_length) for x in grid]
    return [
        Series(f"fit n^{exponent(fit.alpha)}", grid, power, "dashes", "orange", group="fit"),
        Series("fit levelling off", grid, limit, "dots", "green", group="fit"),
    ]


def _guides(cell: Cell) -> list[Series]:
    first = next((p for p in cell.points if p.median > 0), None)
    if first is None or len(cell.points) < 2:
        return []
    grid = _grid(cell)
    return [
        Series(f"guide {label}", grid, [first.median * (x / first.n) ** power for x in grid], "dots", colour, group="guide")
        for power, label, colour in ((0.5, "√n", "grey"), (0.25, "n^¼", "silver"))
    ]


def _bounds(cell: Cell) -> Iterable[Series]:
    for field, (label, colour, _) in BOUNDS.items():
        n, y = [p.n for p in cell.points if field in p.bounds], [p.bounds[field] for p in cell.points if field in p.bounds]
        if n:
            label += "" if n[-1] == cell.last.n else f", to n = {n[-1]}"
            yield Series(label, n, y, "dashes" if field.endswith("global") else "line", colour, group="bound")


def layers_chart(setting: Setting) -> Chart:
    """σ against n for every layer; for heads, the largest of a layer's."""
    layers: dict[int, dict[int, Point]] = {}
    for cell in setting.cells:
        best = layers.setdefault(cell.layer, {})
        for point in cell.points:
            best[point.n] = max(best.get(point.n, point), point, key=lambda p: p.median)
    series = []
    for layer, best in layers.items():
        points, name = [best[n] for n in sorted(best)], f"layer {layer}"
        hover = [f"{name}, {_point_words(p)}" for p in points]
        line = point_series(name, sorted(best), points, "line", _depth(layer, max(layers)), hover)
        series.append(replace(line, listed=_listed(layer, list(layers))))
    which = "the worst head of every layer" if setting.by_head else "every layer"
    at = setting.lengths[-1]
    words = f"Median σ of {which} against n. At n = {at}: " + ", ".join(
        f"layer {layer}: {number(best[at].median)}" for layer, best in layers.items() if at in best
    )
    return Chart("layers", f"Growth of σ with the length: {which}", [_over_n(setting, series)], words)


def heat_chart(setting: Setting) -> Chart:
    """The heat map as a chart of one panel."""
    heat = heat_map(setting)
    return Chart("heat-map", heat.title, [heat], heat.words)


def heat_map(setting: Setting) -> HeatMap:
    """Median σ, layer × head at the longest length where heads were measured, layer × length otherwise."""
    by_head, longest = setting.by_head, setting.lengths[-1]
    shown = [
        (index, cell, p)
        for index, cell in enumerate(setting.cells) if by_head == (cell.head is not None)
        for p in cell.points if p.n == longest or not by_head
    ]  # fmt: skip
    values = [p.median for _, _, p in shown if p.median > 0]
    low, high = min(values, default=0.0), max(values, default=0.0)
    found = {}
    for index, cell, p in shown:
        words = f"{cell.where}, n = {p.n}: σ ≈ {number(p.median)}, in {enclosure(p.lower, p.upper)}"
        heat = HeatCell(p.median, number(p.median), words, shade(p.median, low, high), index)
        found[cell.layer, cell.head if by_head else p.n] = heat
    layers = sorted({cell.layer for cell in setting.cells})
    columns = sorted({cell.head for cell in setting.cells if cell.head is not None}) if by_head else setting.lengths
    title = f"Median σ of {f'every head at n = {longest}' if by_head else 'every layer and length'}"
    return HeatMap(
        list(map(str, columns)), list(map(str, layers)),
        [[found.get((layer, column)) for column in columns] for layer in layers], low, high, title,
        f"{title}. From {number(low)} to {number(high)}.", "head" if by_head else "tokens n",
    )  # fmt: skip


def where_chart(view: Row) -> Chart | None:
    """The share of every patch in the worst direction over the image, or of every frame over time; None for words."""
    tokens, energy = view["tokens"], [float(share) for share in view["energy"]]
    name, title = "where", "Where the worst direction lies"
    times = [float(found[1]) for token in tokens if (found := _TIME.fullmatch(token))]
    places = {(int(found[1]), int(found[2])): k for k, token in enumerate(tokens) if (found := _PATCH.fullmatch(token))}
    rows, columns = (max((place[axis] for place in places), default=-1) + 1 for axis in (0, 1))
    if places and len(places) == rows * columns:
        most = max(energy)
        cells = [
            [
                HeatCell(share, f"{share:.0%}", f"row {i}, column {j}: {share:.2%}", share / most if most else 0.0)
                for j in range(columns)
                for share in [energy[places[i, j]]]
            ]
            for i in range(rows)
        ]
        rest = sum(share for k, share in enumerate(energy) if k not in places.values())
        words = f"Share of every patch in the worst direction; {rest:.1%} lie on tokens that are no patches."
        sides = (list(map(str, range(columns))), list(map(str, range(rows))))
        heat = HeatMap(*sides, cells, 0.0, most, title, words, "column of the image", "row of the image", "share")
        return Chart(name, title, [heat], words, note=words)
    # Tokens without a place are words, but where there are too many for their influence on each other.
    timed = len(times) == len(tokens)
    if not tokens or (not timed and view["influence"]):
        return None
    hover = [f"{token}: {share:.2%}" for token, share in zip(tokens, energy, strict=True)]
    line = Series("share of a token", times if timed else [*range(len(tokens))], energy, hover=hover, group="fit")
    words = f"Share of every token in the worst direction; most of it at {tokens[energy.index(max(energy))]}."
    panel = Panel([line], "time, s" if timed else "token", "share of the worst direction", title)
    return Chart(name, title, [panel], words)


_TIME, _PATCH = re.compile(r"(\d+\.\d\d) s"), re.compile(r"row (\d+), col (\d+)")


def scatter_charts(setting: Setting) -> list[Chart]:
    """σ against what was recorded beside it: norms of tokens, logits, entropy, sinks, typical gain, stable rank, damage.

    A dot is a layer or head at the longest length, the median of its inputs: what the rank correlation is computed from.
    """
    charts, n = [], setting.lengths[-1]
    for column, name, title, label in _SCATTERS:
        dots = [cell for cell in setting.ranked() if column in cell.last.about and cell.last.median > 0]
        layers = sorted({cell.layer for cell in dots})
        if not dots:
            continue
        series = []
        for layer in layers:
            mine = [cell for cell in dots if cell.layer == layer]
            hover = [f"{c.where}: {number(c.last.about[column])}, median σ ≈ {number(c.last.median)}" for c in mine]
            x, y = [c.last.about[column] for c in mine], [c.last.median for c in mine]
            colour, listed = _depth(layer, layers[-1]), _listed(layer, layers)
            series.append(Series(f"layer {layer}", x, y, "points", colour, hover=hover, listed=listed))
        far = column in ("predicted", "measured") and all(cell.last.about[column] > 0 for cell in dots)
        panel = Panel(series, label, f"σ at n = {n}, scope {setting.scope}", x_log=far, y_log=True)
        rank = rank_sentence(setting, column)
        each = "head" if setting.by_head else "layer"
        charts.append(Chart(name, title, [panel], f"{title}, one dot per {each} at n = {n}. {rank}", note=rank))
    return charts


def damage_chart(rows: Sequence[Row], title: str) -> Chart | None:
    """Predicted damage of every layer, or head, with its interval, and the measured one; None where none was asked for."""
    known = [row for row in rows if all(row.get(name) is not None for name in ("predicted", *_ENDS))]
    if not known:
        return None
    series, said = [], []
    for which, (kind, mine) in enumerate(grouped(known, itemgetter("kind")).items()):
        said.append(damage_sentence(mine))
        looks: tuple[tuple[str, Look, Sequence[str]], ...] = (("predicted", "points", _ENDS), ("measured", "marks", ()))
        for column, look, ends in looks:
            # Zero has no place on a logarithmic axis.
            at = [row for row in mine if row.get(column) and math.isfinite(row[column])]
            x, y, *interval = ([row[name] for row in at] for name in ("layer", column, *ends))
            low, high = interval or ((), ())
            series.append(Series(f"{kind}, {column}", x, y, look, CYCLE[which % len(CYCLE)], low, high))
    unit, words = known[0].get("damage") or "damage", " ".join(said)
    panel = layers_panel([one for one in series if len(one.x)], {row["layer"] for row in known}, unit)
    return Chart("sensitivity", title, [panel], words, note=words)


def rank_sentence(setting: Setting, column: str) -> str:
    """Spearman's rank correlation of a column with σ over the cells at the longest length, where there are enough."""
    pairs = [(cell.last.about[column], cell.last.median) for cell in setting.ranked() if column in cell.last.about]
    few = f"{places(setting, len(pairs))} at n = {setting.lengths[-1]}"
    if len(pairs) < 5 or len({x for x, _ in pairs}) < 2 or len({y for _, y in pairs}) < 2:
        return f"With {few}, no correlation is given."
    found = spearmanr([x for x, _ in pairs], [y for _, y in pairs])
    # Parts of one model on the same inputs are no independent draws, which the p-value takes them for.
    chance = f"p = {float(found.pvalue):.2g} if they were independent, which they are not"
    return f"Rank correlation with σ over {few}: {float(found.statistic):+.2f} ({chance})."


def scopes_chart(settings: Sequence[Setting]) -> Chart | None:
    """Scopes of one model and text side by side: σ of every layer at the longest length they share."""
    chosen: dict[str | None, Setting] = {}
    for setting in settings:
        if not setting.by_head and setting.scope != "model":
            chosen.setdefault(setting.scope, setting)
    shared = set.intersection(*(set(setting.lengths) for setting in chosen.values())) if len(chosen) > 1 else set()
    if not shared:
        return None
    n = max(shared)
    series = [_scope_series(setting, n, CYCLE[k % len(CYCLE)]) for k, setting in enumerate(chosen.values())]
    words = f"σ of every layer at n = {n}: " + "; ".join(
        f"{one.name}: " + ", ".join(number(value) for value in one.y) for one in series
    )
    panel = layers_panel(series, {layer for one in series for layer in one.x}, "σ")
    return Chart("scopes", f"With and without normalisation and residual, n = {n}", [panel], words)


def _scope_series(setting: Setting, n: int, colour: str) -> Series:
    at = {cell.layer: point for cell in setting.cells if (point := cell.at(n)) is not None}
    words = [f"{setting.scope}, layer {layer}, {_point_words(p)}" for layer, p in at.items()]
    return point_series(str(setting.scope), list(at), list(at.values()), "points", colour, words)


def point_series(
    name: str, x: Sequence[float], points: Sequence[Point], look: Look, colour: str, words: Sequence[str]
) -> Series:
    """Medians with the ends of all inputs."""
    y, low, high = ([getattr(p, what) for p in points] for what in ("median", "lower", "upper"))
    return Series(name, x, y, look, colour, low, high, hover=words)


def layers_panel(series: Sequence[Series], layers: Iterable[float], label: str) -> Panel:
    """A panel over the layers, each named."""
    ticks = sorted(layers)
    return Panel(series, "layer", label, y_log=True, x_ticks=ticks, x_names=list(map(str, ticks)))


def _over_n(setting: Setting, series: Sequence[Series], title: str = "", ticks: Sequence[int] | None = None) -> Panel:
    ticks = setting.lengths if ticks is None else ticks
    return Panel(series, "tokens n", f"σ, scope {setting.scope}", title, x_log=True, y_log=True, x_ticks=ticks)


def _grid(cell: Cell) -> list[float]:
    return log_grid(cell.points[0].n, cell.points[-1].n)


def _point_words(p: Point) -> str:
    return f"n = {p.n}: {p.sigma}, {counted(p.inputs, 'input')}"


def _listed(layer: int, layers: Sequence[int]) -> bool:
    """Whether a legend lists a layer."""
    return len(layers) <= _MOST_NAMES or layer in (layers[0], layers[-1])


def _depth(layer: int, last: int) -> str:
    """The colour of a layer: its place from the first to the last."""
    return f"depth{0 if last == 0 else math.floor(layer / last * (DEPTHS - 1) + 0.5)}"
