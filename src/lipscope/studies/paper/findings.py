"""What the rows say: sentences by rules that cannot overstate.

A claim on growth needs a 95 % interval of the exponent no wider than 0.2. Such an interval covers at most one of the rivals
0, ¼, ½ and 1, and the claim is the one that it covers, or the two it lies between; what is not decided is counted as
undecided. A σ is called larger than another one where their intervals lie apart. Each rule looks at the lines of
``FINDINGS.csv`` and gives no sentence, or some with their counts and at most three examples: the extremes, and the layer
that the paper draws. No rule knows what should come out.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from lipscope.rounding import counted, round_down, round_up
from lipscope.studies.paper import analysis
from lipscope.studies.paper.analysis import COMPANION, EXPONENT, REAL_TEXT, SIGMA, UNDECIDED, Number
from lipscope.studies.paper.cast import GPT2, SUFFIX, Cast
from lipscope.studies.paper.plan import ADVERSARIAL, PUBLISHED

# How near nine of ten inputs have to lie to a curve to follow it, and a number to another one to be called unchanged.
CLOSE, _CHANGED = 0.1, 0.1

TEXT, SCRIPTS, WORST, MASKS, NORM, MODELS = (
    "What σ does on real text", "What the published scripts compute instead", "The worst case, and where it ends",
    "Masked against unmasked", "What layer normalisation changes", "Which models, and how sure this is",
)  # fmt: skip


def findings(numbers: Sequence[Number], cast: Cast) -> dict[str, list[str]]:
    """Every paragraph that the numbers support, by topic, in the order of the page; each opens with what was found."""
    found = {topic: [text for rule in rules if (text := " ".join(rule(numbers)))] for topic, rules in _RULES.items()}
    last = [f"{sentence}." for sentence in cast.absent]
    if stand_ins := [f"{m.name} stands in for {m.stands_for}" for m in cast.members if m.stands_for and not m.masked]:
        missing = list(dict.fromkeys(m.stands_for for m in cast.members if m.stands_for))
        last.insert(0, f"**Nothing here is a measurement of {' or '.join(missing)}**: {_listed(stand_ins)}.")
        if GPT2 in missing:
            last.append(f"The attention weights of the original {GPT2} were measured alone: `docs/gpt2-attention.md`.")
    found[MODELS] = [" ".join(last), *found[MODELS]] if last else found[MODELS]
    return {topic: texts for topic, texts in found.items() if texts}


def _named(numbers: Sequence[Number], table: str, condition: str = "") -> list[Number]:
    return [one for one in numbers if one.table == table and re.fullmatch(condition or ".*", one.condition)]


def _decided(table: Sequence[Number]) -> list[Number]:
    return [one for one in table if one.verdict != UNDECIDED]


# In the order of the exponents.
_GROWTH = {
    "below 0": "falls", "0": "shows no growth", "between 0 and ¼": "grows more slowly than n^¼", "¼": "grows like n^¼",
    "between ¼ and ½": "grows faster than n^¼ but more slowly than √n", "½": "grows like √n",
    "between ½ and 1": "grows faster than √n but more slowly than n", "1": "grows like n", "above 1": "grows faster than n",
    UNDECIDED: "is undecided",
}  # fmt: skip
LIKE_ROOT = ("½", "between ½ and 1", "1", "above 1")


def _counts(table: Sequence[Number]) -> str:
    """How many curves grow how."""
    found = Counter(one.verdict for one in table)
    parts = [f"{words} in {found[name]}" for name, words in _GROWTH.items() if found[name]]
    # The verb once.
    grows = [i for i, part in enumerate(parts) if part.startswith("grows ")]
    parts = [part.removeprefix("grows ") if i in grows[1:] else part for i, part in enumerate(parts)]
    return f"{_listed(parts)} of {counted(len(table), 'curve')}"


def _listed(parts: Sequence[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]


def _all(count: int, number: int, noun: str) -> str:
    return f"all {counted(number, noun)}" if count == number > 1 else f"{count} of {counted(number, noun)}"


def _shown(one: Number) -> str:
    return f"{analysis.exponent(one.value, one.low, one.high)} at {one.place}"


def _on_text(numbers: Sequence[Number]) -> Iterator[str]:
    table = _named(numbers, EXPONENT + SIGMA, REAL_TEXT)
    if not table:
        return
    if slower := _slower(table):
        many = _all(len(slower), len(table), "curve")
        yield f"**On real text σ grows more slowly than √n, if at all, in {many}**, a layer each."
    yield f"σ {_counts(table)}."
    if decided := sorted(_decided(table), key=lambda one: one.value):
        own = [f"; it is {_shown(one)}, whose curve is published" for one in decided[1:-1] if one.is_published]
        yield f"α goes from {_shown(decided[0])} to {_shown(decided[-1])}{''.join(own)}."
    halves = [_named(_decided(numbers), EXPONENT + SIGMA, half) for half in (analysis.SHORTER, analysis.LONGER)]
    first, last = ({(one.model, one.layer): one for one in half} for half in halves)
    if both := [(first[place], last[place]) for place in first if place in last]:
        slows, gains = (sum(a.low > b.high for a, b in pairs) for pairs in (both, [(b, a) for a, b in both]))
        yield (
            f"α is an average over these lengths: of {counted(len(both), 'curve')} that both halves of them decide, growth "
            f"is slower on the longer half in {slows} and faster in {gains}, intervals apart."
        )


def _slower(table: Sequence[Number]) -> list[Number]:
    """Curves whose interval lies below ½, by more than the last digit that is shown."""
    return [one for one in _decided(table) if one.high < 0.5 - analysis.NEAR]


def _on_second_text(numbers: Sequence[Number]) -> Iterator[str]:
    if not (table := _named(numbers, EXPONENT + SIGMA, REAL_TEXT + ", .*")):
        return
    name, slower = table[0].condition.removeprefix(REAL_TEXT + ", "), _slower(table)
    slower = slower if _slower(_named(numbers, EXPONENT + SIGMA, REAL_TEXT)) else []
    yield (
        f"On a second text of the paper, {name}, "
        + (f"that holds for {_all(len(slower), len(table), 'curve')}." if slower else f"σ {_counts(table)}.")
    )
    first = {(one.model, one.layer): one for one in _decided(_named(numbers, EXPONENT + SIGMA, REAL_TEXT))}
    both = [(one, first[one.model, one.layer]) for one in _decided(table) if (one.model, one.layer) in first]
    if both:
        overlap = sum(a.low <= b.high and b.low <= a.high for a, b in both)
        furthest = max(max(a.high - b.low, b.high - a.low) for a, b in both)
        yield (
            f"The intervals of both texts overlap in {_all(overlap, len(both), 'curve')}, and the exponents differ "
            f"by {round_up(furthest, decimals=2)} at most."
        )


def _companion(numbers: Sequence[Number]) -> Iterator[str]:
    if table := _named(numbers, analysis.COMPANION_RATIO):
        larger, smaller, inputs = _totals(table)
        yield (
            ("**The published scripts compute another number than σ**: " if larger + smaller else "They report ")
            + f"√‖Jᵀf(X)‖ is larger than σ at {larger} of {counted(inputs, 'input')} and smaller at {smaller}, intervals "
            f"apart ({_reach(table)} times σ)" + (", so it is no bound of σ." if larger and smaller else ".")
        )
    if table := _named(numbers, EXPONENT + COMPANION, REAL_TEXT):
        yield f"It {_counts(table)}."


def _published(numbers: Sequence[Number]) -> Iterator[str]:
    """Whose curve is the one drawn in the public repository?"""
    parts = []
    for estimator, name in ((COMPANION, "the scripts' number"), (SIGMA, "σ")):
        for one in _named(numbers, analysis.DISTANCE + estimator):
            if one.high <= CLOSE:
                parts.append(f"follows {name} (nine of ten inputs lie within {_percent(one.high, round_up)})")
            elif one.low > CLOSE:
                away = _percent(one.low, round_down)
                parts.append(f"does not follow {name} (nine of ten inputs lie more than {away} away)")
            else:
                parts.append(f"lies {one.value:.0%} from {name} in the median")
    if parts:
        yield (
            f"The curve {PUBLISHED}, drawn in the public repository for random GPT-2, layer 6, {_listed(parts)}. Whether "
            "the published figures came from that revision is unknown."
        )


def _differences(numbers: Sequence[Number]) -> Iterator[str]:
    table = [one for one in numbers if one.table.startswith(analysis.DIFFERENCE)]
    # A difference counts as one where the whole range of the ratio is off by more than a tenth.
    moved = [one for one in table if one.low > 1 + _CHANGED or one.high < 1 - _CHANGED]
    moved.sort(key=lambda one: -abs(math.log(one.value)))
    strongest = list({one.table: one for one in reversed(moved)}.values())[::-1]
    examples = ", ".join(
        f"{one.table.removeprefix(analysis.DIFFERENCE)}: {one.value:.2g} times for {one.model}" for one in strongest[:2]
    )
    if table:
        yield (
            f"Of {len({one.table for one in table})} differences between the scripts and σ, each measured alone, "
            f"{len(strongest)} change the number of some model by more than {_CHANGED:.0%} at every input"
            + (f" ({examples})." if examples else ".")
        )


_POINTS = {
    "groups": "at the best split into two groups of equal tokens",
    "proposition 3[.]4": "at those of the paper's Proposition 3.4",
    "ascent": "after a short gradient ascent, at few lengths,",
}  # fmt: skip


def at_radii(numbers: Sequence[Number], points: str) -> list[Number]:
    """Exponents at constructed tokens of the paper's radii."""
    radii = {one.condition for one in _named(numbers, analysis.LOG_BORDER)}
    found = _named(numbers, EXPONENT + SIGMA, f"R = [^,]*, {points}")
    return [one for one in found if one.condition.split(",")[0] in radii or not radii]


def _worst_case(numbers: Sequence[Number]) -> Iterator[str]:
    parts = []
    for points, words in _POINTS.items():
        if table := at_radii(numbers, points):
            rising, open_ = sum(one.verdict in LIKE_ROOT for one in table), len(table) - len(_decided(table))
            parts.append(f"{words} in {_all(rising, len(table), 'curve')}" + (f" ({open_} undecided)" if open_ else ""))
    if parts:
        groups = [one.verdict in LIKE_ROOT for one in _decided(at_radii(numbers, "groups"))]
        mark = "**" if groups and all(groups) else ""
        claim = f"{mark}At tokens built to make σ large it grows like √n or faster{mark}"
        yield f"{claim}: {_listed(parts)}, one head at one radius R each."
    if table := _named(numbers, analysis.ASCENT_RATIO):
        (larger, _, inputs), most = _totals(table), max(one.high for one in table)
        if larger:
            yield (
                f"The worst case lies higher still: the ascent found a larger σ than the best construction in "
                f"{_all(larger, inputs, 'run')}, intervals apart, {_plain(f'{most:.2g}')} times as large at most."
            )


def _border(numbers: Sequence[Number]) -> Iterator[str]:
    if known := _named(numbers, analysis.LOG_BORDER):
        least = min(one.low for one in known)
        last = max(one.high for one in _named(numbers, analysis.LENGTHS, ADVERSARIAL))
        words = ", beyond every length measured here" if least > math.log10(last) else ""
        yield (
            "Tokens of bounded norm allow growth like √n up to some n only; one bound holds for all longer inputs (the "
            "mean-field regime). At these radii growth is "
            f"proved up to n = 10^{math.floor(10 * least) / 10:g} or more{words}."
        )
    near = _named(numbers, analysis.BORDER_RATIO)
    if {one.condition for one in near} == {analysis.BEFORE, analysis.BEYOND} and min(one.low for one in near) >= 1:
        yield (
            "With tokens so short that this n lies within the lengths measured, the proven upper bound is "
            f"{_reach(near)} times the σ attained, on both sides of it."
        )


def _masks(numbers: Sequence[Number]) -> Iterator[str]:
    if not (table := _named(numbers, analysis.MASK_RATIO)):
        return
    larger, smaller, inputs = _totals(table)
    yield (
        f"**Under the causal mask σ is larger in {_all(larger, inputs, 'comparison')}** of the same weights on the same "
        f"text, intervals apart, and smaller in {smaller}: {_reach(table)} times, the layers' medians {_medians(table)}."
    )
    exponents = {(one.model, one.layer): one for one in _decided(_named(numbers, EXPONENT + SIGMA, REAL_TEXT))}
    both = [(one, exponents[model + SUFFIX, k]) for (model, k), one in exponents.items() if (model + SUFFIX, k) in exponents]
    if both:
        apart = sum(masked.low > free.high for free, masked in both)
        yield f"It also grows faster with n, in {_all(apart, len(both), 'layer')}: intervals of the exponents apart."


def _normalisation(numbers: Sequence[Number]) -> Iterator[str]:
    if table := _named(numbers, analysis.SCOPE_RATIO + "norm+attention"):
        larger, smaller, inputs = _totals(table)
        mixed = min(larger, smaller) > _CHANGED * inputs
        yield (
            "**Normalisation before attention has no single effect**: it" if mixed else "Normalisation before attention"
        ) + (
            f" raises σ in {larger} of {counted(inputs, 'comparison')} and lowers it in {smaller}, intervals apart "
            f"({_reach(table)} times σ of attention alone)."
        )
    if (table := _named(numbers, analysis.GLOBAL_RATIO)) and min(one.low for one in table) >= 1:
        yield (
            "Normalised tokens are bounded, so one constant holds for all inputs of a length; the proven one is "
            f"{_reach(table)} times the σ measured."
        )


def _certificates(numbers: Sequence[Number]) -> Iterator[str]:
    parts, checked = [], 0
    for condition in (REAL_TEXT, analysis.BUILT):
        if table := _named(numbers, analysis.CERTIFICATE_RATIO, condition):
            _, broken, inputs = _totals(table)
            if broken:
                yield f"{broken} certified upper bounds on {condition} lie below a value that is attained: a fault."
                return
            checked += inputs
            parts.append(f"{_medians(table)} times σ on {condition}")
    if parts:
        yield (
            f"None of {counted(checked, 'certified upper bound')} lies below a value that is attained; the layers' "
            f"medians are {_listed(parts)}."
        )


def _unfinished(numbers: Sequence[Number]) -> Iterator[str]:
    if table := _named(numbers, analysis.UNFINISHED):
        yield f"{sum(int(one.value) for one in table)} rows did not reach the accuracy asked for; their intervals say so."


def _totals(table: Sequence[Number]) -> tuple[int, int, int]:
    """In how many comparisons the first is larger, in how many smaller, and of how many."""
    larger, smaller, inputs = (sum(getattr(one, name) or 0 for one in table) for name in ("larger", "smaller", "inputs"))
    return larger, smaller, inputs


def _reach(table: Sequence[Number]) -> str:
    return _range(min(one.low for one in table), max(one.high for one in table))


def _medians(table: Sequence[Number]) -> str:
    return _range(min(one.value for one in table), max(one.value for one in table))


def _range(low: float, high: float) -> str:
    """Two digits of both ends, rounded outwards; one number where they are the same."""
    ends = _plain(round_down(low, 2)), _plain(round_up(high, 2))
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _plain(text: str) -> str:
    """Two digits without a power of ten."""
    return f"{float(text):,.0f}" if float(text) >= 100 else text


def _percent(share: float, rounding: Callable[..., str]) -> str:
    return f"{rounding(100 * share, decimals=1)} %"


_RULES: dict[str, tuple[Callable[[Sequence[Number]], Iterator[str]], ...]] = {
    TEXT: (_on_text, _on_second_text),
    SCRIPTS: (_companion, _published, _differences),
    WORST: (_worst_case, _border),
    MASKS: (_masks,),
    NORM: (_normalisation,),
    MODELS: (_certificates, _unfinished),
}
