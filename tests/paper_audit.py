"""Every sentence of the findings page against the lines of FINDINGS.csv, by code that shares nothing with the rules.

A sentence that no check here knows is a fault: what is added to the page needs a check beside it.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lipscope.studies.paper.analysis import NEAR, RIVALS, UNDECIDED, WIDEST

WORDS = {
    "falls": "below 0", "shows no growth": "0", "grows more slowly than n^¼": "between 0 and ¼", "grows like n^¼": "¼",
    "grows faster than n^¼ but more slowly than √n": "between ¼ and ½", "grows like √n": "½",
    "grows faster than √n but more slowly than n": "between ½ and 1", "grows like n": "1", "grows faster than n": "above 1",
    "is undecided": UNDECIDED,
}  # fmt: skip
COUNTS = r"(?P<counts>(?:falls|shows|grows|is undecided)\b.*) of (?P<curves>\d+) curves?"
ALL = r"(?:all (?P<all>\d+)|(?P<some>\d+) of (?P<of>\d+))"
NUMBER = r"[-\d.,e+]*\d"
EXAMPLE = re.compile(r"(-?\d+\.\d\d) \((-?\d+\.\d\d) … (-?\d+\.\d\d)\) at (\S+) layer (\d+)")


@dataclass(frozen=True)
class Line:
    """One line of FINDINGS.csv."""

    table: str
    model: str
    layer: int
    condition: str
    value: float
    low: float
    high: float
    verdict: str
    larger: int
    smaller: int
    inputs: int


def line(row: dict[str, Any]) -> Line:
    """A row of the file, or one that would be written into it."""
    counts = (int(row.get(name) or 0) for name in ("larger", "smaller", "inputs"))
    ends = (float(row[name]) for name in ("value", "low", "high"))
    return Line(row["table"], row["model"], int(row["layer"]), row["condition"], *ends, row["verdict"], *counts)


def read_lines(path: Path) -> list[Line]:
    """The file."""
    with path.open(encoding="utf-8", newline="") as file:
        return [line(row) for row in csv.DictReader(file)]


def verdict_of(one: Line) -> str:
    """Which exponent an interval leaves, made anew from its ends."""
    if not one.high - one.low <= WIDEST:
        return UNDECIDED
    near = [name for value, name in RIVALS.items() if one.low - NEAR <= value <= one.high + NEAR]
    if near:
        (only,) = near
        return only
    names = ["below 0", *RIVALS.values(), "above 1"]
    place = sum(value < one.low for value in RIVALS)
    outside = {0: names[0], len(RIVALS): names[-1]}
    return outside.get(place, f"between {names[place]} and {names[place + 1]}")


def sentences(paragraphs: Iterable[str]) -> list[str]:
    """The sentences of a section, without marks."""
    text = " ".join(paragraphs).replace("**", "")
    return [part for part in re.split(r"(?<=[.!?])\s+(?=[A-ZσαN√])", text) if part]


class Audit:
    """The lines behind a page, and a check for each of its sentences."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = list(lines)
        for one in self.lines:
            if one.table.startswith("exponent of "):
                assert one.verdict == verdict_of(one), one
        radii = {one.condition for one in self.of("log10 of n up to which √n growth is proved")}
        self.placed = {points: [one for one in self.of("exponent of σ", rf"R = .*, {points}")
                                if one.condition.split(",")[0] in radii or not radii]
                       for points in ("groups", "ascent", r"proposition 3\.4")}  # fmt: skip

    def of(self, table: str, condition: str = ".*") -> list[Line]:
        """Lines of one table."""
        return [one for one in self.lines if one.table == table and re.fullmatch(condition, one.condition)]

    def text(self) -> list[Line]:
        """Exponents of σ on the first text."""
        return self.of("exponent of σ", "real text")

    def second(self) -> list[Line]:
        """Those on the second."""
        return self.of("exponent of σ", "real text, .*")

    def check(self, topic: str, paragraphs: Iterable[str]) -> None:
        """Fails where a sentence is not known, or says what its lines do not."""
        for sentence in sentences(paragraphs):
            for pattern, check in CHECKS:
                if found := re.fullmatch(pattern, sentence):
                    check(self, found)
                    break
            else:
                raise AssertionError(f"{topic}: no check knows the sentence {sentence!r}")

    def count(self, found: re.Match[str], holding: Iterable[Any], among: int) -> None:
        """``all N`` or ``k of N``."""
        every, k = found["all"], sum(1 for _ in holding)
        assert (int(every or found["some"]), int(every or found["of"])) == (k, among), found.string

    def verdicts(self, found: re.Match[str], table: list[Line]) -> None:
        """The counts of how curves grow."""
        claims, verb = {}, ""
        for part in re.split(r", | and (?=\D)", found["counts"]):
            words, count = part.rsplit(" in ", 1)
            verb = "grows " if words.startswith("grows ") else verb
            claims[WORDS[words if words in WORDS else verb + words]] = int(count)
        assert claims == Counter(verdict_of(one) for one in table), found.string
        assert int(found["curves"]) == len(table) > 0

    def totals(self, found: re.Match[str], table: list[Line]) -> None:
        """``larger``, ``smaller`` and the number of comparisons, and their range, rounded outwards."""
        for name in ("larger", "smaller", "inputs"):
            if name in found.groupdict():
                assert int(found[name]) == sum(getattr(one, name) for one in table), found.string
        low, high = min(one.low for one in table), max(one.high for one in table)
        outwards(found["low"], found["high"], low, high)


def plain(text: str) -> float:
    """A number for people."""
    return float(text.replace(",", ""))


def outwards(shown_low: str, shown_high: str | None, low: float, high: float) -> None:
    """Two digits that contain the range, and not much more."""
    a, b = plain(shown_low), plain(shown_high or shown_low)
    assert a <= low * (1 + 1e-9), (shown_low, low)
    assert b >= high * (1 - 1e-9), (shown_high, high)
    assert a > low * 0.9 - 1e-9, (shown_low, low)
    assert b < high * 1.11 + 1e-9, (shown_high, high)


def _slower(table: list[Line]) -> list[Line]:
    return [one for one in table if one.high - one.low <= WIDEST and one.high < 0.5 - NEAR]


def _examples(audit: Audit, found: re.Match[str]) -> None:
    shown = EXAMPLE.findall(found.string)
    assert 1 <= len(shown) <= 3
    decided = [one for one in audit.text() if verdict_of(one) != UNDECIDED]
    ends = [min(one.value for one in decided), max(one.value for one in decided)]
    for (value, low, high, model, layer), end in zip(shown, [*ends, None][: len(shown)], strict=False):
        (one,) = [one for one in decided if (one.model, one.layer) == (model, int(layer))]
        assert abs(float(value) - one.value) <= 0.0051
        assert end is None or one.value == end
        assert float(low) <= one.low < float(low) + 0.0101
        assert float(high) - 0.0101 < one.high <= float(high)


def _halves(audit: Audit, found: re.Match[str]) -> None:
    pairs = []
    for first in audit.of("exponent of σ", "shorter half of the lengths"):
        for last in audit.of("exponent of σ", "longer half of the lengths"):
            same = (first.model, first.layer) == (last.model, last.layer)
            if same and UNDECIDED not in (verdict_of(first), verdict_of(last)):
                pairs.append((first, last))
    assert len(pairs) == int(found["pairs"])
    assert sum(last.high < first.low for first, last in pairs) == int(found["slower"])
    assert sum(last.low > first.high for first, last in pairs) == int(found["faster"])


def _both_texts(audit: Audit, found: re.Match[str]) -> None:
    pairs = [(a, b) for a in audit.text() for b in audit.of("exponent of σ", "real text, .*")
             if (a.model, a.layer) == (b.model, b.layer) and UNDECIDED not in (verdict_of(a), verdict_of(b))]  # fmt: skip
    audit.count(found, [1 for a, b in pairs if max(a.low, b.low) <= min(a.high, b.high)], len(pairs))
    furthest = max(max(abs(a.high - b.low), abs(b.high - a.low)) for a, b in pairs)
    assert furthest <= float(found["most"]) < furthest + 0.0101


def _drawn(audit: Audit, found: re.Match[str]) -> None:
    for name, words in (("companion", "the scripts' number"), ("σ", "σ")):
        for one in audit.of(f"from the drawn curve: {name}"):
            either = rf"((?:does not follow|follows) {words} \([^)]*\)|lies \S+ from {words} in the median)"
            (said,) = re.findall(either, found.string)
            share = float(re.findall(r"([\d.]+) ?%", said)[0]) / 100
            if said.startswith("follows"):
                assert one.high <= share <= 0.1
            elif said.startswith("does not"):
                assert 0.1 - 1e-9 <= share <= one.low
            else:
                assert one.low <= 0.1 < one.high


def _differences(audit: Audit, found: re.Match[str]) -> None:
    table = [one for one in audit.lines if one.table.startswith("value over σ: ")]
    moved = [one for one in table if one.low > 1.1 or one.high < 0.9]
    assert int(found["kinds"]) == len({one.table for one in table})
    assert int(found["moved"]) == len({one.table for one in moved})
    for kind, times, model in re.findall(r"[(;,] ?([^:(]*?): (\S+) times for ([^,)]+)", found.string):
        assert any(one.table.endswith(f": {kind}") and one.model == model and f"{one.value:.2g}" == times for one in moved)


def _proved(audit: Audit, found: re.Match[str]) -> None:
    least = min(one.low for one in audit.of("log10 of n up to which √n growth is proved"))
    assert least - 0.1 - 1e-9 < float(found["power"]) <= least + 1e-9
    longest = max(one.high for one in audit.of("lengths n", "adversarial"))
    assert ("beyond every length" in found.string) == (10**least > longest)


def _near_the_border(audit: Audit, found: re.Match[str]) -> None:
    table = audit.of("refined bound over σ")
    assert {one.condition for one in table} == {"before the border", "beyond the border"}
    assert min(one.low for one in table) >= 1
    audit.totals(found, table)


def _masked(audit: Audit, found: re.Match[str]) -> None:
    table = audit.of("σ causal over σ unmasked")
    assert int(found["all"] or found["some"]) == sum(one.larger for one in table)
    assert int(found["all"] or found["of"]) == sum(one.inputs for one in table)
    audit.totals(found, table)
    outwards(found["least"], found["most"], min(one.value for one in table), max(one.value for one in table))


def _masked_exponents(audit: Audit, found: re.Match[str]) -> None:
    decided = {(one.model, one.layer): one for one in audit.text() if verdict_of(one) != UNDECIDED}
    both = [(one, other) for (model, k), one in decided.items() if (other := decided.get((f"{model}-causal", k)))]
    audit.count(found, [1 for free, masked in both if masked.low > free.high], len(both))


def _normalised(audit: Audit, found: re.Match[str]) -> None:
    audit.totals(found, audit.of("over σ of attention: norm+attention"))
    mixed = min(int(found["larger"]), int(found["smaller"])) > 0.1 * int(found["inputs"])
    assert mixed == ("no single effect" in found.string)


def _certificates(audit: Audit, found: re.Match[str]) -> None:
    table = audit.of("certified upper bound over σ")
    assert sum(one.smaller for one in table) == 0
    assert int(found["checked"]) == sum(one.inputs for one in table)
    each = rf"({NUMBER})(?: to ({NUMBER}))? times σ on (real text|constructed tokens)"
    for low, high, where in re.findall(each, found.string):
        values = [one.value for one in table if one.condition == where]
        outwards(low, high, min(values), max(values))


def _companion(audit: Audit, found: re.Match[str]) -> None:
    audit.totals(found, audit.of("companion over σ"))
    both_sides = min(int(found["larger"]), int(found["smaller"])) > 0
    assert ("it is no bound of σ" in found.string) == both_sides
    assert ("another number" in found.string) == (int(found["larger"]) + int(found["smaller"]) > 0)


def _built(audit: Audit, found: re.Match[str]) -> None:
    words = {"two groups": "groups", "Proposition 3.4": r"proposition 3\.4", "gradient ascent": "ascent"}
    count = ALL.replace("?P<all>", "").replace("?P<some>", "").replace("?P<of>", "")
    each = rf"(two groups|Proposition 3\.4|gradient ascent)\D*? in {count} curves?(?: \((\d+) undecided\))?"
    parts = re.findall(each, found["parts"])
    assert {words[part[0]] for part in parts} == {points for points, table in audit.placed.items() if table}
    for name, every, some, among, undecided in parts:
        verdicts = [verdict_of(one) for one in audit.placed[words[name]]]
        rising = sum(one in ("½", "between ½ and 1", "1", "above 1") for one in verdicts)
        assert (int(every or some), int(every or among)) == (rising, len(verdicts)), found.string
        assert int(undecided or 0) == verdicts.count(UNDECIDED)


def _ascent(audit: Audit, found: re.Match[str]) -> None:
    table = audit.of("ascent over the best construction")
    audit.count(found, range(sum(one.larger for one in table)), sum(one.inputs for one in table))
    most = max(one.high for one in table)
    assert plain(found["times"]) == float(f"{most:.2g}")


TIMES = rf"(?P<low>{NUMBER})(?: to (?P<high>{NUMBER}))?"
Check = Callable[[Audit, "re.Match[str]"], None]
CHECKS: tuple[tuple[str, Check], ...] = (
    (rf"On real text σ grows more slowly than √n, if at all, in {ALL} curves?, a layer each\.",
     lambda a, f: a.count(f, _slower(a.text()), len(a.text()))),
    (rf"σ {COUNTS}\.", lambda a, f: a.verdicts(f, a.text())),
    (r"α goes from .*", _examples),
    (r"α is an average over these lengths: of (?P<pairs>\d+) curves? that both halves of them decide, growth is slower on "
     r"the longer half in (?P<slower>\d+) and faster in (?P<faster>\d+), intervals apart\.", _halves),
    (rf"On a second text of the paper, .*, that holds for {ALL} curves?\.",
     lambda a, f: a.count(f, _slower(a.second()), len(a.second()))),
    (rf"On a second text of the paper, [^,]*, σ {COUNTS}\.", lambda a, f: a.verdicts(f, a.second())),
    (rf"The intervals of both texts overlap in {ALL} curves?, and the exponents differ by (?P<most>{NUMBER}) at most\.",
     _both_texts),
    (r"(?:The published scripts compute another number than σ: |They report )√‖Jᵀf\(X\)‖ is larger than σ at "
     r"(?P<larger>\d+) of (?P<inputs>\d+) inputs? and smaller at (?P<smaller>\d+), intervals apart "
     rf"\({TIMES} times σ\)(?:, so it is no bound of σ)?\.", _companion),
    (rf"It {COUNTS}\.", lambda a, f: a.verdicts(f, a.of("exponent of companion", "real text"))),
    (r"The curve 0\.445·n\^0\.25, drawn in the public repository for random GPT-2, layer 6, .*\.", _drawn),
    (r"Whether the published figures came from that revision is unknown\.", lambda a, f: None),
    (r"Of (?P<kinds>\d+) differences between the scripts and σ, each measured alone, (?P<moved>\d+) change the number of "
     r"some model by more than 10 ?% at every input(?: \(.*\))?\.", _differences),
    (r"At tokens built to make σ large it grows like √n or faster: (?P<parts>.*), one head at one radius R each\.", _built),
    (rf"The worst case lies higher still: the ascent found a larger σ than the best construction in {ALL} runs?, intervals "
     rf"apart, (?P<times>{NUMBER}) times as large at most\.", _ascent),
    (r"Tokens of bounded norm allow growth like √n up to some n only; one bound holds for all longer inputs \(.*\)\.",
     lambda a, f: None),
    (rf"At these radii growth is proved up to n = 10\^(?P<power>{NUMBER}) or more(?:, beyond every length measured here)?\.",
     _proved),
    (rf"With tokens so short that this n lies within the lengths measured, the proven upper bound is {TIMES} times the σ "
     r"attained, on both sides of it\.", _near_the_border),
    (rf"Under the causal mask σ is larger in {ALL} comparisons? of the same weights on the same text, intervals apart, and "
     rf"smaller in (?P<smaller>\d+): {TIMES} times, the layers' medians (?P<least>{NUMBER})(?: to (?P<most>{NUMBER}))?\.",
     _masked),
    (rf"It also grows faster with n, in {ALL} layers?: intervals of the exponents apart\.", _masked_exponents),
    (r"Normalisation before attention (?:has no single effect: it )?raises σ in "
     rf"(?P<larger>\d+) of (?P<inputs>\d+) comparisons? and lowers it in (?P<smaller>\d+), intervals apart \({TIMES} times "
     r"σ of attention alone\)\.", _normalised),
    (r"Normalised tokens are bounded, so one constant holds for all inputs of a length; the proven one is "
     rf"{TIMES} times the σ measured\.", lambda a, f: a.totals(f, a.of("global bound over σ"))),
    (r"Nothing here is a measurement of [^:]*: .* stands in for .*\.", lambda a, f: None),
    (r"The attention weights of the original gpt2 were measured alone: .*\.", lambda a, f: None),
    (r".* is not on this machine, and nothing that could stand in for it is installed\.", lambda a, f: None),
    (r"None of (?P<checked>\d+) certified upper bounds? lies below a value that is attained; the layers' medians are .*\.",
     _certificates),
    (r"(?P<n>\d+) certified upper bounds on (?P<where>.*) lie below a value that is attained: a fault\.",
     lambda a, f: _equal(int(f["n"]), sum(one.smaller for one in a.of("certified upper bound over σ", f["where"])))),
    (r"(?P<n>\d+) rows did not reach the accuracy asked for; their intervals say so\.",
     lambda a, f: _equal(int(f["n"]), sum(int(one.value) for one in a.of("rows that did not converge")))),
)  # fmt: skip


def _equal(one: int, other: int) -> None:
    assert one == other
