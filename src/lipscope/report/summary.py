"""What the numbers say, in plain words. A rule writes every sentence from the data; without the number, no sentence."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from scipy.stats import rankdata

from lipscope.measure.atlas import standing
from lipscope.measure.scopes import SCOPES
from lipscope.report.settings import Cell, Setting
from lipscope.rounding import counted, enclosure, number, span
from lipscope.runs.fit import FEWEST_LENGTHS, TOO_FEW, GrowthFit
from lipscope.runs.run import Row, Run, at_longest, grouped

# What may predict how much a perturbation of a layer hurts, and what people call it.
PREDICTORS = {"estimate": "σ", "sigma_shift": "σ·‖δ‖", "typical": "typical gain", "stable_rank": "stable rank",
              "max_logit": "largest logit", "predicted": "Fisher prediction"}  # fmt: skip
# Of intervals of predictions and rank correlations; how often layers are drawn again for the latter.
LEVEL, RESAMPLES = 0.95, 1000
# A difference of AIC below this does not tell two curves apart (Burnham and Anderson 2002, section 2.6).
_AIC_TELLS = 2.0
# With three parameters the AIC says nothing for fewer: its small-sample correction has points − 4 in the denominator.
_FEWEST_POINTS = 6
# Relative residuals below this are rounding: a few units of float32, in which most models compute.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Card:
    """One number of the summary with its name and its circumstances."""

    title: str
    value: str
    detail: str


def exponent(value: float) -> str:
    """Two decimals, and no sign on what they show as zero.

    Example:
        >>> exponent(-0.0012), exponent(0.497)
        ('0.00', '0.50')
    """
    return f"{value:.2f}".replace("-0.00", "0.00")


def exponents(fit: GrowthFit) -> str:
    """The interval of a fitted exponent, its ends rounded outwards to two decimals."""
    return span(fit.alpha_low, fit.alpha_high, decimals=2, between=" to ")


def listed(values: list[int]) -> str:
    """Lengths in words, the middle left out when there are many."""
    if len(values) > 7:
        return f"{values[0]}, {values[1]}, …, {values[-1]} ({len(values)} lengths)"
    return ", ".join(map(str, values))


def places(setting: Setting, count: int | None = None) -> str:
    """So many layers, or heads."""
    count = len(setting.cells) if count is None else count
    return counted(count, "head" if setting.by_head else "layer")


def answer(setting: Setting) -> str:
    """How smooth it is and where it is worst, in one sentence."""
    cell, ranked = setting.worst, setting.ranked()
    text = (
        f"least smooth in {cell.where}, where a small change of its {cell.last.n} tokens can come out about "
        f"{number(cell.last.median)} times as large"
    )
    if "typical" in cell.last.about:
        text += f" (a random one {number(cell.last.about['typical'])} times)"
    if len(ranked) > 1:
        middle = statistics.median(other.last.median for other in ranked)
        text += f"; in the median of its {places(setting, len(ranked))}, {number(middle)} times"
    if (ratio := cell.over_sigma("refined")) is not None:
        text += f". The bound for all tokens of that norm allows {number(ratio)} times as much"
    return f"{text}."


def sentences(setting: Setting, run: Run) -> list[str]:
    """The summary of a setting."""
    cell, point = setting.worst, setting.worst.last
    on = f" on {setting.text}" if setting.text else ""
    inputs = sorted({p.inputs for c in setting.cells for p in c.points})
    each = counted(inputs[0], "input") if len(inputs) == 1 else f"{inputs[0]} to {inputs[-1]} inputs"
    what = SCOPES.get(setting.scope or "", "")
    found = [
        f"σ of {places(setting)} of {setting.model or 'the model'}{on}"
        + (f", for the map “{setting.scope}”: {what}" if what else f", scope {setting.scope}")
        + f". {len(setting.rows)} measurements, at n = {listed(setting.lengths)} tokens, {each} of each length."
    ]
    at = "one input" if point.inputs == 1 else f"median of {point.inputs} inputs"
    found.append(
        f"The least smooth at n = {point.n} is {cell.where}: a small change of its tokens can come out about "
        f"{number(point.median)} times as large ({at}; σ {'' if point.inputs == 1 else 'of each '}lies in "
        f"{enclosure(point.lower, point.upper)}{_sure(cell)})."
    )
    ranked = setting.ranked()
    if len(ranked) > 1 and ranked[-1].last.median > 0:
        last = ranked[-1]
        found.append(
            f"The smoothest at that length is {last.where} with σ ≈ {number(last.last.median)}: a factor of "
            f"{number(point.median / last.last.median)} between the two."
        )
    top, high = max(((c, p) for c in setting.cells for p in c.points), key=lambda pair: pair[1].median)
    if high.median > point.median and number(high.median) != number(point.median):
        found.append(f"At a shorter length σ was larger: about {number(high.median)} in {top.where} at n = {high.n}.")
    if logits := [(c.last.about["max_logit"], c.where) for c in ranked if "max_logit" in c.last.about]:
        found.append(f"The largest logit at that length is {number(max(logits)[0])}, in {max(logits)[1]}.")
    place = atlas_sentence(cell.rows[0], cell.layer, point.n, point.lower, point.upper)
    found += [words for words in (directions_sentence(setting.rows), place) if words]
    found.append(growth_sentence(cell))
    if close := closeness_sentence(cell):
        found.append(close)
    return found + warnings(setting, run)


def directions_sentence(rows: Iterable[Row]) -> str | None:
    """In how many directions it is about as bad as in the worst one, at the longest length, of how many."""
    known = [row for row in at_longest(rows) if row["stable_rank"] and row["typical"] and row["document"] is None]
    if not known:
        return None
    ranks, gains = ([row[name] for row in known] for name in ("stable_rank", "typical"))
    # ‖J‖_F² is both stable_rank·σ² and typical² times the number of inputs.
    size = round(max(row["stable_rank"] * (row["estimate"] / row["typical"]) ** 2 for row in known))
    estimated = sum(row["typical_low"] is not None for row in known)
    how = f" ({estimated} of {len(known)} estimated from random directions)" if estimated else ""
    return (
        f"Stable ranks at n = {known[0]['n']} are {number(min(ranks))} to {number(max(ranks))}{how}: about so many of "
        f"{size:,} directions are as bad as the worst one. A random one comes out {number(min(gains))} to "
        f"{number(max(gains))} times as large."
    )


def damage_sentence(rows: Sequence[Row]) -> str:
    """Which layers carry half of the predicted damage of a perturbation, and how often the prediction held."""
    layers, total = sorted(carriers(rows)), len({row["layer"] for row in rows})
    text = f"Half of the predicted damage of {rows[0]['kind']} is in {len(layers)} of {total} layers ("
    text += f"{', '.join(map(str, layers))})."
    if known := [row for row in rows if row.get("measured") is not None]:
        inside = sum(row["predicted_low"] <= row["measured"] <= row["predicted_high"] for row in known)
        text += f" The measured one lies in the 95 % interval of the prediction in {inside} of {len(known)} places."
        found = correlations([known])
        ranks = (f"{PREDICTORS[name]} {value:.2f} [{low:.2f}, {high:.2f}]" for name, (value, low, high) in found.items())
        text += f" Rank correlation with it, and its 95 % interval: {', '.join(ranks)}." if found else ""
    return text


def correlations(settings: Sequence[Sequence[Row]]) -> dict[str, tuple[float, float, float]]:
    """Rank correlation of measured damage with each predictor: mean over settings, and a 95 % bootstrap over layers.

    Every setting holds rows of the same layers (or heads) in the same order. Predictors without numbers are left out.
    """
    layers = len(settings[0])
    draws = np.vstack([np.arange(layers), np.random.default_rng(0).integers(layers, size=(RESAMPLES, layers))])

    def ranks(rows: Sequence[Row], column: str) -> Any:
        factors = ("estimate", "shift") if column == "sigma_shift" else (column,)
        values = np.prod(np.array([[row.get(factor) for factor in factors] for row in rows], dtype=float), axis=1)
        centred = rankdata(values[draws], axis=1) - (layers + 1) / 2
        return centred / np.linalg.norm(centred, axis=1, keepdims=True)

    found = {}
    with np.errstate(invalid="ignore"):  # a draw of equal values has no ranks
        for name in PREDICTORS:
            means = np.mean([(ranks(rows, name) * ranks(rows, "measured")).sum(1) for rows in settings], axis=0).clip(-1, 1)
            if np.isfinite(means[0]):
                low, high = np.nanquantile(means[1:], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
                found[name] = float(means[0]), float(low), float(high)
    return found


def carriers(rows: Iterable[Row]) -> list[int]:
    """The fewest layers that carry at least half of the predicted damage, most first."""
    totals: Counter[int] = Counter()
    for row in rows:
        totals[row["layer"]] += row["predicted"]
    ranked = [layer for layer, _ in totals.most_common()]
    return next(ranked[:k] for k in count(1) if 2 * sum(totals[i] for i in ranked[:k]) >= totals.total())


def atlas_sentence(row: Row, layer: int, n: int, lower: float, upper: float) -> str | None:
    """Where the least smooth layer, at n between these ends, stands in the atlas; ``row`` is one of its rows."""
    found = standing(row["model"], row["scope"], n, lower, upper)
    return None if found is None else f"σ of layer {layer}, the least smooth, is {found}."


def masks_of(rows: Iterable[Row]) -> str:
    """The mask, or which layers have which."""
    found = {mask: sorted({row["layer"] for row in same}) for mask, same in grouped(rows, lambda row: row["mask"]).items()}
    if len(found) == 1:
        return str(*found)
    parts = ((mask, "s" * (len(layers) > 1), ", ".join(map(str, layers))) for mask, layers in found.items())
    return ", ".join("{} (layer{} {})".format(*part) for part in parts)


def growth_sentence(cell: Cell) -> str:
    """How σ of a cell grows with n, and which guides its exponent can be told from."""
    fit = cell.fit
    if fit is None:
        if len(cell.points) < FEWEST_LENGTHS:
            count = len(cell.points)
            return f"No growth with the length is fitted: that takes {FEWEST_LENGTHS} lengths, and there are {count}."
        return "No growth with the length is fitted: some σ is 0."
    if not fit.is_decided:
        return f"In {cell.where}, there are {TOO_FEW}: the {fit.level:.0%} interval of the exponent is {exponents(fit)}."
    text = (
        f"In {cell.where}, σ goes like n^{exponent(fit.alpha)} from n = {cell.points[0].n} to {cell.last.n} "
        f"({fit.level:.0%} interval of the exponent: {exponents(fit)}): "
        f"{against_guides(fit)}"
    )
    return f"{text} {which_curve(fit)}".rstrip()


# Exponents below this are printed as 0.00.
_FLAT = 0.005


def against_guides(fit: GrowthFit) -> str:
    """Which of no growth, n^¼ and √n the interval of an exponent contains."""
    if max(abs(fit.alpha_low), abs(fit.alpha_high)) < _FLAT:
        return "to two digits it does not change with the length."
    if fit.alpha_high < 0:
        return "it falls with the length."
    if fit.alpha_low <= 0:
        return "growth cannot be told from none."
    if fit.alpha_low > 0.5:
        return "faster than √n."
    if fit.alpha_high >= 0.5:
        return "it grows, and the interval contains √n." + (" It contains n^¼ too." if fit.alpha_low <= 0.25 else "")
    if fit.alpha_low <= 0.25 <= fit.alpha_high:
        return "it grows, slower than √n, and the interval contains n^¼."
    return "it grows, slower than √n and " + ("faster than n^¼." if fit.alpha_low > 0.25 else "slower than n^¼.")


def tells(fit: GrowthFit) -> bool:
    """Whether the points tell the two curves apart: enough of them, and a difference of AIC that means something."""
    apart = abs(fit.aic_power - fit.aic_saturating) >= _AIC_TELLS
    return fit.points >= _FEWEST_POINTS and apart and fit.is_decided and not _both_exact(fit)


def _both_exact(fit: GrowthFit) -> bool:
    """Whether both curves go through all points up to rounding, from AIC = N·log(RSS/N) + 6."""
    worse = max(fit.aic_power, fit.aic_saturating)
    return math.exp((worse - 6) / fit.points / 2) < _ROUNDING


def which_curve(fit: GrowthFit) -> str:
    """Which of the two curves the points prefer; nothing where both pass through all of them."""
    if _both_exact(fit):
        return ""
    if not tells(fit):
        return f"These {fit.points} points do not tell a power law from a curve that levels off."
    if fit.better == "saturating":
        return f"A curve that levels off, at σ ≈ {number(fit.limit)}, describes the points better than a power law (by AIC)."
    return "A power law describes the points better than a curve that levels off (by AIC)."


def closeness_sentence(cell: Cell) -> str | None:
    """How far above the measured σ the bounds lie."""
    parts = [f"{name} is {ratio} times the measured σ" for name, ratio in _ratios(cell)]
    if not parts:
        return None
    which = "" if cell.last.inputs == 1 else f" (of each input, median of {cell.last.inputs})"
    return f"How close to the bounds, there{which}: {'; '.join(parts)}."


def _ratios(cell: Cell) -> list[tuple[str, str]]:
    named = (
        ("the certificate at the same inputs", "certified"),
        ("the refined bound for all tokens of that norm", "refined"),
        ("the paper's bound for them", "castin2024"),
    )
    return [(name, number(ratio)) for name, bound in named if (ratio := cell.over_sigma(bound)) is not None]


def warnings(setting: Setting, run: Run) -> list[str]:
    """What a reader must know before believing the rest."""
    found = [f"Note on the model: {note}." for note in sorted({str(row["notes"]) for row in setting.rows if row["notes"]})]
    wide = sum(row["converged"] is False for row in setting.rows)
    if wide:
        found.append(
            f"{wide} of {len(setting.rows)} estimates were not shown to have converged; their intervals are valid but wide."
        )
    if run.tasks is not None:
        asked, done, failed = run.tasks
        if done + failed < asked:
            found.append(f"The sweep is not complete: {done} of {asked} tasks are done.")
        if failed:
            found.append(f"{failed} of {asked} tasks failed; the method section lists the reasons.")
    if run.lost:
        found.append(f"The store was damaged: up to {run.lost} measured tasks were lost, and their rows are not shown.")
    if run.left_out:
        found.append(f"{run.left_out} rows of the run hold no interval for σ and are not shown.")
    return found


def cards(setting: Setting) -> list[Card]:
    """The four numbers at the top."""
    cell, point = setting.worst, setting.worst.last
    title = f"{'σ' if point.inputs == 1 else 'Median σ'} of the least smooth"
    place = f"L{cell.layer}" + ("" if cell.head is None else f" H{cell.head}")
    place, detail = ("all", cell.where) if setting.scope == "model" else (place, f"{cell.where}, of {places(setting)}")
    found = [
        Card(title, number(point.median), f"at n = {point.n}, in {enclosure(point.lower, point.upper)}"),
        Card("Where", place, detail),
    ]
    if cell.fit is not None and cell.fit.is_decided:
        detail = f"{cell.fit.level:.0%}: {exponents(cell.fit)}; √n is 0.5"
        found.append(Card("Growth exponent α", exponent(cell.fit.alpha), detail))
    else:
        middle = statistics.median(c.last.median for c in setting.cells)
        found.append(Card("Median σ", number(middle), f"over {places(setting)}"))
    if ratios := _ratios(cell):
        found.append(Card("Bound over σ", f"{ratios[0][1]}×", ratios[0][0]))
    return found


def _sure(cell: Cell) -> str:
    rows = at_longest(cell.rows)
    chances = [row["delta"] for row in rows if row["upper_kind"] == "probabilistic" and row["delta"] is not None]
    if chances:
        return f"; an upper end fails with probability at most {max(chances):g}"
    kinds = sorted({str(row["upper_kind"]) for row in rows if row["upper_kind"]})
    return f"; upper end {' or '.join(kinds)}" if kinds else ""
