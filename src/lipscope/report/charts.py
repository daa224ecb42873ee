"""Figures as data: axes, series and words, drawn alike by matplotlib for print and by Plotly for the page.

Colours are roles (``measured``, ``refined``, ``paper``, …), which each renderer and theme turns into a colour; all of them
can be told apart by everyone (Okabe and Ito), and no meaning hangs on colour alone: line styles and names differ too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scipy.stats import spearmanr

from lipscope.report.data import Cell, Point, Setting
from lipscope.report.summary import exponent, interval, number, places

# Curves that bend are drawn through so many points.
_STEPS = 17
# A scatter of more rows than this shows the medians of its cells instead.
_MOST_POINTS = 2500
DEPTHS = 12


@dataclass(frozen=True)
class Series:
    """One curve, cloud or band.

    Attributes:
        name: in the legend.
        x: horizontal places.
        y: heights.
        look: ``line``, ``dashes``, ``dots``, ``points`` or ``band`` (between ``low`` and ``high``).
        colour: its role.
        low: lower ends of intervals, or of the band.
        high: upper ends.
        group: what it belongs to: ``measured``, ``fit``, ``guide``, ``bound``.
        hover: a line of words for every point.
        listed: whether the legend shows it.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    look: str = "line"
    colour: str = "measured"
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    group: str = "measured"
    hover: Sequence[str] = ()
    listed: bool = True


@dataclass(frozen=True)
class Chart:
    """Curves with their axes.

    Attributes:
        name: of its file.
        title: what it shows.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        series: what is drawn.
        words: the text alternative.
        x_log: logarithmic horizontal axis.
        y_log: logarithmic vertical axis.
        x_ticks: where the horizontal axis has numbers, by default anywhere.
        x_names: names in place of these numbers.
    """

    name: str
    title: str
    x: str
    y: str
    series: Sequence[Series]
    words: str
    x_log: bool = False
    y_log: bool = False
    x_ticks: Sequence[float] = field(default=())
    x_names: Sequence[str] = field(default=())


def growth_chart(setting: Setting, cell: Cell) -> Chart:
    """σ of one cell against n: intervals, both fits, the guides √n and n^¼, and the bounds."""
    points = cell.points
    n = [point.n for point in points]
    series = [
        Series("σ of all inputs", n, [], "band", low=[p.lower for p in points], high=[p.upper for p in points]),
        Series("median σ", n, [p.median for p in points], hover=[_point_words(p) for p in points]),
    ]
    first = next((p for p in points if p.median > 0), None)
    fit, grid = cell.fit, _between(n[0], n[-1])
    if fit is not None:
        label = f"fit n^{exponent(fit.alpha)}"
        series.append(Series(label, grid, [fit.c * x**fit.alpha for x in grid], "dashes", "power", group="fit"))
        limit = [fit.limit * x / (x + fit.half_length) for x in grid]
        series.append(Series("fit levelling off", grid, limit, "dots", "saturating", group="fit"))
    if first is not None and len(points) > 1:
        for power, label in ((0.5, "√n"), (0.25, "n^¼")):
            guide = [first.median * (x / first.n) ** power for x in grid]
            series.append(Series(f"guide {label}", grid, guide, "dots", f"guide{power}", group="guide"))
    for field_name, label, colour in _BOUNDS:
        values = [(p.n, getattr(p, field_name)) for p in points if getattr(p, field_name) is not None]
        if values:
            look = "dashes" if field_name.endswith("global") else "line"
            series.append(Series(label, [v[0] for v in values], [v[1] for v in values], look, colour, group="bound"))
    words = f"σ of {cell.where} against the number of tokens: " + "; ".join(
        f"n = {p.n}: {number(p.median)} in {interval(p.lower, p.upper)}" for p in points
    )
    return Chart(
        f"growth-{_place(cell)}", f"Growth of σ with the length: {cell.where}", "tokens n", f"σ, scope {setting.scope}",
        series, words, x_log=True, y_log=True, x_ticks=n,
    )  # fmt: skip


_BOUNDS = (
    ("certified", "certificate", "certified"),
    ("refined", "refined bound", "refined"),
    ("paper", "paper's bound", "paper"),
    ("refined_global", "refined, any input", "refined"),
    ("paper_global", "paper's, any input", "paper"),
)


def layers_chart(setting: Setting) -> Chart:
    """σ against n for every layer; for heads, the largest of a layer's."""
    layers: dict[int, list[Cell]] = {}
    for cell in setting.cells:
        layers.setdefault(cell.layer, []).append(cell)
    series = []
    for layer, cells in layers.items():
        best: dict[int, Point] = {}
        for point in (point for cell in cells for point in cell.points):
            if point.n not in best or point.median > best[point.n].median:
                best[point.n] = point
        lengths = sorted(best)
        series.append(
            Series(
                f"layer {layer}",
                lengths,
                [best[n].median for n in lengths],
                "line",
                _depth(layer, max(layers)),
                low=[best[n].lower for n in lengths],
                high=[best[n].upper for n in lengths],
                hover=[f"layer {layer}, {_point_words(best[n])}" for n in lengths],
                listed=_named(layer, list(layers)),
            )
        )
    which = "the worst head of every layer" if setting.by_head else "every layer"
    at = setting.lengths[-1]
    words = f"Median σ of {which} against n. At n = {at}: " + ", ".join(
        f"layer {layer}: {number(max(c.last.median for c in cells if c.last.n == at))}"
        for layer, cells in layers.items() if any(c.last.n == at for c in cells)
    )  # fmt: skip
    return Chart(
        "layers", f"Growth of σ with the length: {which}", "tokens n", f"σ, scope {setting.scope}", series, words,
        x_log=True, y_log=True, x_ticks=setting.lengths,
    )  # fmt: skip


def radius_chart(setting: Setting) -> Chart | None:
    """σ against the norm of the tokens."""
    return _scatter(setting, "radius", "radius_rms", "σ and the norm of the tokens", "root mean square token norm |x|")


def entropy_chart(setting: Setting) -> Chart | None:
    """σ against the entropy of attention."""
    return _scatter(setting, "entropy", "entropy", "σ and attention entropy", "mean entropy of an attention row, nats")


def sink_chart(setting: Setting) -> Chart | None:
    """σ against the attention on the first token and on sinks."""
    return _scatter(setting, "sink", "sink_mass", "σ and attention sinks", "attention on the first token and on sinks")


def _scatter(setting: Setting, name: str, column: str, title: str, label: str) -> Chart | None:
    rows = [row for row in setting.rows if row[column] is not None and row["estimate"] > 0]
    if not rows:
        return None
    dots = [
        (row["layer"], row[column], row["estimate"], f"{_row_words(row)}, σ ≈ {number(row['estimate'])}") for row in rows
    ]
    shown = "one dot per measurement"
    if len(dots) > _MOST_POINTS:
        attribute = {"radius_rms": "radius"}.get(column, column)
        dots = [
            (c.layer, getattr(p, attribute), p.median, f"{c.where}, n = {p.n}, median σ ≈ {number(p.median)}")
            for c in setting.cells for p in c.points if getattr(p, attribute) is not None and p.median > 0
        ]  # fmt: skip
        shown = "one dot per place and length, the median of its inputs"
    layers = sorted({dot[0] for dot in dots})
    series = [
        Series(
            f"layer {layer}", [d[1] for d in dots if d[0] == layer], [d[2] for d in dots if d[0] == layer], "points",
            _depth(layer, layers[-1]), hover=[d[3] for d in dots if d[0] == layer],
            listed=_named(layer, layers),
        )
        for layer in layers
    ]  # fmt: skip
    words = f"{title}, {shown}. {rank_sentence(setting, column)}"
    return Chart(name, title, label, f"σ, scope {setting.scope}", series, words, y_log=True)


def rank_sentence(setting: Setting, column: str) -> str:
    """Spearman's rank correlation of a column with σ over the cells at the longest length, where there are enough."""
    attribute = {"radius_rms": "radius"}.get(column, column)
    pairs = [
        (getattr(cell.last, attribute), cell.last.median) for cell in setting.ranked()
        if getattr(cell.last, attribute) is not None
    ]  # fmt: skip
    few = f"{places(setting, len(pairs))} at n = {setting.lengths[-1]}"
    if len(pairs) < 5 or len({x for x, _ in pairs}) < 2 or len({y for _, y in pairs}) < 2:
        return f"With {few}, no correlation is given."
    found = spearmanr([x for x, _ in pairs], [y for _, y in pairs])
    # Parts of one model on the same inputs are no independent draws, which the p-value takes them for.
    chance = f"p = {float(found.pvalue):.2g} if they were independent, which they are not"
    return f"Rank correlation with σ over {few}: {float(found.statistic):+.2f} ({chance})."


def scopes_chart(settings: Sequence[Setting]) -> Chart | None:
    """Scopes of one model and text side by side: σ of every layer at the longest length they share."""
    usable = [setting for setting in reversed(settings) if not setting.by_head and setting.scope != "model"]
    chosen = list({setting.scope: setting for setting in usable}.values())[::-1]
    shared = set.intersection(*(set(setting.lengths) for setting in chosen)) if len(chosen) > 1 else set()
    if not shared:
        return None
    n = max(shared)
    series = []
    for index, setting in enumerate(chosen):
        at = [(cell.layer, point) for cell in setting.cells if (point := cell.at(n)) is not None]
        series.append(
            Series(
                str(setting.scope),
                [layer for layer, _ in at],
                [p.median for _, p in at],
                "points",
                f"scope{index}",
                low=[p.lower for _, p in at],
                high=[p.upper for _, p in at],
                hover=[f"{setting.scope}, layer {layer}, {_point_words(p)}" for layer, p in at],
            )
        )
    layers = sorted({layer for one in series for layer in one.x})
    words = f"σ of every layer at n = {n}: " + "; ".join(
        f"{one.name}: " + ", ".join(number(value) for value in one.y) for one in series
    )
    return Chart(
        "scopes", f"With and without normalisation and residual, n = {n}", "layer", "σ", series, words, y_log=True,
        x_ticks=layers, x_names=[str(layer) for layer in layers],
    )  # fmt: skip


def log_ticks(low: float, high: float) -> list[float]:
    """Where a logarithmic axis has numbers: powers of ten, or 1, 2, 5, or even steps, by how much is in view.

    Example:
        >>> log_ticks(3.0, 40.0), log_ticks(2.0, 20000.0), log_ticks(0.133, 0.152)
        ([5.0, 10.0, 20.0], [10.0, 100.0, 1000.0, 10000.0], [0.135, 0.14, 0.145, 0.15])
    """
    first, last = math.floor(math.log10(low)), math.floor(math.log10(high))
    powers = range(first, last + 1)
    ticks = [tick for k in powers if low <= (tick := 10.0**k) <= high]
    if len(ticks) > 7:
        ticks = ticks[:: math.ceil(len(ticks) / 6)]
    if len(ticks) < 4:
        ticks = [tick for k in powers for m in (1, 2, 5) if low <= (tick := float(f"{m}e{k}")) <= high]
    if len(ticks) < 3 and high > low:
        rough = (high - low) / 4
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(m * unit for m in (1, 2, 5, 10) if m * unit >= rough)
        count = math.floor(high / step) - math.ceil(low / step) + 1
        ticks = [float(f"{(math.ceil(low / step) + k) * step:.6g}") for k in range(count)]
    return ticks


def _between(low: float, high: float) -> list[float]:
    if low == high:
        return [low]
    return [low * (high / low) ** (k / (_STEPS - 1)) for k in range(_STEPS)]


def _point_words(p: Point) -> str:
    return f"n = {p.n}: {number(p.median)} in {interval(p.lower, p.upper)}, {p.inputs} input{'s' * (p.inputs != 1)}"


def _row_words(row: dict[str, object]) -> str:
    head = "" if row["head"] is None else f", head {row['head']}"
    return f"layer {row['layer']}{head}, n = {row['n']}, input {row['input']}"


def _place(cell: Cell) -> str:
    return f"layer{cell.layer}" + ("" if cell.head is None else f"-head{cell.head}")


def _named(layer: int, layers: Sequence[int]) -> bool:
    """Whether a legend lists a layer: of many only the first and the last, whose colours span the others."""
    return len(layers) <= _MOST_NAMES or layer in (layers[0], layers[-1])


_MOST_NAMES = 12


def _depth(layer: int, last: int) -> str:
    """The colour of a layer: its place from the first to the last."""
    return f"depth{0 if last == 0 else math.floor(layer / last * (DEPTHS - 1) + 0.5)}"
