"""Sentences written from the rows by rules that cannot overstate: what is not decided is counted as undecided.

A claim on growth needs a 95 % interval of the exponent no wider than 0.2. Such an interval covers at most one of the rivals
0, ¼, ½ and 1, and the claim is the one that it covers, or the two it lies between. Each rule looks at the rows and gives no
sentence, or one with its count and at most three examples: the extremes, and the layer that the paper draws. No rule knows
what should come out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from lipscope.rounding import counted
from lipscope.studies.paper import analysis
from lipscope.studies.paper.analysis import COMPANION, SIGMA, UNDECIDED, WIDEST, FitRow, Row
from lipscope.studies.paper.cast import SUFFIX, Cast
from lipscope.studies.paper.plan import ADVERSARIAL, BORDER, GROWTH, PUBLISHED, published

# How near a curve has to lie to another one to be called it, and a number to another one to be called unchanged.
_CLOSE, _CHANGED = 0.05, 0.1

TEXT, SCRIPTS, WORST, MASKS, NORM, MODELS = (
    "What σ does on real text", "What the published scripts compute instead", "The worst case, and where it ends",
    "Masked against unmasked", "What layer normalisation changes", "What stood in for what, and how sure this is",
)  # fmt: skip


class Finding(NamedTuple):
    """A sentence and the topic under which it stands."""

    topic: str
    text: str


def findings(rows: Sequence[Row], cast: Cast) -> list[Finding]:
    """Every sentence that the rows support, in the order of the page."""
    fits = analysis.fit_table(rows)
    found = [Finding(topic, text) for topic, rule in _RULES for text in rule(rows, fits)]
    found += [Finding(MODELS, f"{sentence}.") for sentence in cast.absent]
    if stand_ins := [f"{m.name} stands in for {m.stands_for}" for m in cast.members if m.stands_for and not m.masked]:
        missing = " and ".join(dict.fromkeys(m.stands_for for m in cast.members if m.stands_for))
        found.append(Finding(MODELS, f"{', '.join(stand_ins)}: nothing here is a measurement of {missing}."))
    return found


def _counts(table: Sequence[FitRow], what: str) -> str:
    """How many exponents are which, with the extremes and the paper's own layer as examples."""
    found = Counter(row.verdict for row in table)
    parts = [f"{name} in {found[name]}" for name in sorted(found, key=lambda name: (name == UNDECIDED, -found[name]))]
    if found[UNDECIDED]:
        parts[-1] += f", with an interval wider than {WIDEST:g}"
    decided = sorted((row for row in table if row.verdict != UNDECIDED), key=lambda row: row.fit.alpha)
    own = [row for row in decided if row.curve.is_published]
    examples = [
        f"{row.place} {analysis.exponent(row.fit)}" for row in dict.fromkeys([*decided[:1], *decided[-1:], *own[:1]])
    ]
    text = f"{what} has, over {counted(len(table), 'curve')}, the exponent {'; '.join(parts)}"
    return text + (f" (for example {', '.join(examples)})." if examples else ".")


def _on_text(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    if table := _of_text(fits, SIGMA):
        yield _counts(table, "σ")
        yield f"n^¼ is excluded in {sum(row.verdict not in (UNDECIDED, '¼') for row in table)} of {len(table)}."
    if level := sum(row.fit.better == "saturating" and row.fit.alpha_low > 0 for row in table):
        yield f"A curve that levels off describes {level} of those that grow better (AIC)."


def _radius(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    if table := analysis.radius_correlations(rows):
        grows, falls = sum(c.low > 0 for c in table), sum(c.high < 0 for c in table)
        yield (
            f"The largest token norm of an input grows with n in {grows} of {counted(len(table), 'layer')}, falls in "
            f"{falls} and is undecided in {len(table) - grows - falls} (95 % interval of the correlation)."
        )


def _published(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    """Whose curve is the one drawn in the public repository?"""
    parts = []
    for estimator, name in ((COMPANION, "√‖Jᵀf(X)‖, which the scripts compute"), (SIGMA, "σ")):
        for row in _of_text(fits, estimator):
            if row.curve.is_published:
                points = zip(*row.curve.values(analysis.COLUMN[estimator]), strict=True)
                gap = median(abs(y / published(n) - 1) for n, y in points)
                parts.append(f"{'follows' if gap <= _CLOSE else 'is not'} {name} (median distance {gap:.1%})")
    if parts:
        yield (
            f"The curve {PUBLISHED}, drawn in the public repository for random GPT-2, layer 6, {' and '.join(parts)}; "
            "whether the published figures came from that revision is unknown."
        )


def _companion(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    if table := _of_text(fits, COMPANION):
        yield _counts(table, "The scripts' number √‖Jᵀf(X)‖")
    if ratios := [row[COMPANION] / row["estimate"] for row in analysis.of(rows, GROWTH) if row.get(COMPANION) is not None]:
        above, below = sum(r > 1 for r in ratios), sum(r < 1 for r in ratios)
        yield (
            f"Over {counted(len(ratios), 'input')} it is {_reach(ratios)} times σ, above it {above} times and below it "
            f"{below} times" + (": it is no bound of σ." if above and below else ".")
        )


def _differences(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    table = analysis.difference_table(rows)
    # A difference counts as one where the whole range of the ratio is off by more than a tenth.
    moved = [row for row in table if row.low > 1 + _CHANGED or row.high < 1 - _CHANGED]
    moved.sort(key=lambda row: -abs(math.log(row.value)))
    strongest = list({row.table: row for row in reversed(moved)}.values())[::-1]
    examples = ", ".join(f"{row.table} {row.value:.2g} times for {row.model}" for row in strongest[:3])
    if table:
        yield (
            f"Of {len({row.table for row in table})} differences between the scripts and σ, {len(strongest)} change the "
            f"number of some model by more than {_CHANGED:.0%} at every input" + (f" ({examples})." if examples else ".")
        )


def _worst_case(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    table = [row for row in fits if row.curve.experiment == ADVERSARIAL and row.estimator == SIGMA]
    for kind in dict.fromkeys(str(row.curve.rows[0]["points"]) for row in table):
        group = [row for row in table if row.curve.rows[0]["points"] == kind]
        yield _counts(group, f"σ at constructed tokens (“{kind}”, one curve per layer and radius)")
    gains = [row["estimate"] / best for row in rows if row.get("points") == "ascent" and (best := _best_built(rows, row))]
    if gains and min(gains) >= 1:
        yield (
            f"A short gradient ascent reaches {median(gains):.2g} times the best construction in the median and "
            f"{max(gains):.2g} times at most, over {counted(len(gains), 'run')}."
        )


def _border(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    if known := [row for row in analysis.of(rows, ADVERSARIAL) if row.get("log_growth") is not None]:
        least, last = min(row["log_growth"] for row in known) / math.log(10), max(row["n"] for row in known)
        words = ", beyond every length measured here" if least > math.log10(last) else ""
        yield f"At these radii √n growth is proved up to n = 10^{math.floor(10 * least) / 10:g} or more{words}."
    built = [row for row in analysis.of(rows, BORDER) if row["points"] == "groups" and row.get("refined")]
    if {math.log(row["n"]) > row["log_growth"] for row in built} == {False, True}:
        yield (
            "With tokens so short that proved growth ends within these lengths, the proven upper bound is "
            f"{_reach([row['refined'] / row['lower'] for row in built])} times the σ attained, before that border and "
            "beyond it."
        )


def _best_built(rows: Sequence[Row], climbed: Row) -> float | None:
    place = ("model", "layer", "head", "n", "radius", "experiment")
    return max(
        (row["estimate"] for row in rows
         if row.get("points") not in (None, "ascent") and all(row[name] == climbed[name] for name in place)),
        default=None,
    )  # fmt: skip


def _masks(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    ratios = [pair["ratio"] for pair in analysis.masked_ratios(rows)]
    if not ratios:
        return
    yield (
        f"On the same text and weights σ is larger under the causal mask in {sum(r > 1 for r in ratios)} of {len(ratios)} "
        f"comparisons ({_reach(ratios)} times, {median(ratios):.2g} in the median)."
    )
    exponents = {(row.curve.model, row.curve.layer): row.fit for row in _of_text(fits, SIGMA) if row.verdict != UNDECIDED}
    both = [(fit, exponents[model + SUFFIX, k]) for (model, k), fit in exponents.items() if (model + SUFFIX, k) in exponents]
    if both:
        apart = sum(masked.alpha_low > free.alpha_high for free, masked in both)
        yield f"Its exponent is larger under the mask in {apart} of {counted(len(both), 'layer')}, intervals apart."


def _normalisation(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    table = analysis.norm_table(rows)
    for scope, words in (("norm+attention", "the normalisation before it"), ("attention+residual", "the residual after it")):
        if ratios := [row["sigma"][scope] / row["sigma"]["attention"] for row in table if scope in row["sigma"]]:
            yield (
                f"Measured with {words}, σ is {_reach(ratios)} times that of attention alone: larger in "
                f"{sum(r > 1 for r in ratios)} of {len(ratios)} layers and lengths."
            )
    bounds = [(row["known"][analysis.GLOBAL_BOUND], row["sigma"]["attention"]) for row in table]
    slack = [bound / sigma for bound, sigma in bounds if bound is not None]
    if slack and min(slack) >= 1:
        yield (
            f"Normalised tokens are bounded, so attention has a global constant; the proven one is {_reach(slack)} times "
            "the σ measured."
        )


def _certificates(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    certified = [row for row in rows if row.get("certified") is not None]
    ratios = [row["certified"] / row["estimate"] for row in certified if math.isfinite(row["certified"])]
    if broken := sum(row["certified"] < row["lower"] for row in certified):
        yield f"{broken} certified upper bounds lie below a value that is attained: a fault."
    elif ratios:
        yield f"All {len(ratios)} certified upper bounds hold, at {median(ratios):.3g} times σ in the median."


def _unfinished(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    if count := sum(row.get("converged") is False for row in rows):
        yield f"{count} of {len(rows)} rows did not reach the accuracy asked for; their intervals say so."


def _reach(values: Sequence[float]) -> str:
    return f"{min(values):.2g} to {max(values):.2g}"


def _of_text(fits: Sequence[FitRow], estimator: str) -> list[FitRow]:
    return [row for row in fits if row.estimator == estimator and row.curve.condition == analysis.REAL_TEXT]


_Rule = Callable[[Sequence[Row], Sequence[FitRow]], Iterator[str]]
_RULES: tuple[tuple[str, _Rule], ...] = (
    (TEXT, _on_text), (TEXT, _radius), (SCRIPTS, _published), (SCRIPTS, _companion), (SCRIPTS, _differences),
    (WORST, _worst_case), (WORST, _border), (MASKS, _masks), (NORM, _normalisation), (MODELS, _certificates),
    (MODELS, _unfinished),
)  # fmt: skip
