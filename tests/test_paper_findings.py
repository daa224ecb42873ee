"""Findings appear only when the numbers support them; figures and pages are made from rows alone."""

from __future__ import annotations

import csv
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lipscope.report.html import Document, Section, Table
from lipscope.studies.paper import analysis
from lipscope.studies.paper.analysis import NEAR, RIVALS, UNDECIDED, WIDEST, verdict
from lipscope.studies.paper.charts import charts
from lipscope.studies.paper.findings import MASKS, MODELS, NORM, SCRIPTS, TEXT, WORST, findings
from lipscope.studies.paper.pages import reproduction_page
from lipscope.studies.paper.run import write_results
from paper_audit import CHECKS, Audit, line, read_lines, sentences
from paper_cases import CAST, TINY, text_rows

ABOUT = {"mode": "quick", "measured_seconds": 12.0, "threads": 1, "text": "alice"}


def found_in(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The findings of rows, every sentence of which is checked against its lines."""
    numbers = analysis.every_number(rows)
    topics = findings(numbers, CAST)
    audit = Audit(line(dict(zip(type(one).__annotations__, one, strict=True))) for one in numbers)
    for topic, paragraphs in topics.items():
        audit.check(topic, paragraphs)
    return topics


def said(rows: list[dict[str, Any]], topic: str) -> str:
    return " ".join(found_in(rows).get(topic, [])).replace("**", "")


def scattered(rows: list[dict[str, Any]], size: float, generator: Any = None) -> list[dict[str, Any]]:
    """The same rows with scatter, which may be so much that no exponent can be told."""
    G = generator or np.random.default_rng(0)
    return [row | {"estimate": row["estimate"] * math.exp(size * G.standard_normal())} for row in rows]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.45, 0.55, "½"), (0.24, 0.26, "¼"), (-0.01, 0.01, "0"), (0.92, 1.08, "1"), (0.06, 0.08, "between 0 and ¼"),
        (0.3, 0.45, "between ¼ and ½"), (0.55, 0.7, "between ½ and 1"), (-0.3, -0.1, "below 0"), (1.02, 1.2, "above 1"),
        (0.494, 0.499, "½"),
        (0.25, 0.25, "¼"), (0.4, 0.61, UNDECIDED), (-12.9, 13.8, UNDECIDED), (math.nan, 0.5, UNDECIDED),
        (-math.inf, math.inf, UNDECIDED),
    ],
)  # fmt: skip
def test_an_exponent_is_claimed_only_where_its_interval_is_narrow(low: float, high: float, expected: str) -> None:
    assert verdict(low, high) == expected


def test_no_narrow_interval_covers_two_rivals() -> None:
    assert min(b - a for a, b in itertools.pairwise(RIVALS)) > WIDEST + 2 * NEAR


def drawn(seed: int) -> list[dict[str, Any]]:
    """Rows of every experiment with exponents, scatter, intervals and sizes that are drawn, often near what a rule asks."""
    G = np.random.default_rng(seed)

    def pick(*choices: float) -> float:
        return float(G.choice(choices))

    def some(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows = scattered(rows, pick(0.0, 0.003, 0.02, 0.1, 0.6), G)
        wide = pick(0.0, 0.02, 0.2)
        ends = [(row["estimate"] * (1 - 0.01 * wide), row["estimate"] * (1 + wide)) for row in rows]
        return [row | {"lower": low, "upper": high} for row, (low, high) in zip(rows, ends, strict=True)]

    rows: list[dict[str, Any]] = []
    lengths = tuple(int(n) for n in np.unique(np.geomspace(2, 98, int(G.integers(3, 12))).round()))
    for model, masked in (("bert-random", "bert-random-causal"), ("gpt2-random", "")):
        for layer in (0, 6):
            alpha, factor = pick(-0.1, 0, 0.01, 0.1, 0.24, 0.25, 0.35, 0.489, 0.495, 0.5, 0.7, 1.0), pick(0.2, 0.5)
            companion = (factor * pick(0.5, 0.99, 1.0, 2.0), alpha + pick(0, 0.1)) if G.random() < 0.7 else (0.445, 0.25)
            more = {"certified": 2.0, "lengths": lengths} if G.random() < 0.5 else {"lengths": lengths}
            rows += some(text_rows(model, layer, factor, alpha, companion=companion, **more))
            other = {"experiment": "growth, second text", "text": "ag_news", "lengths": lengths}
            rows += some(text_rows(model, layer, factor, alpha + pick(-0.03, 0, 0.03, 0.3), **other))
            if masked:
                rows += some(text_rows(masked, layer, factor * pick(1.0, 1.01, 1.5), alpha + pick(-0.05, 0, 0.05), **more))
            rows += some(norms(factor, pick(0.5, 1.0, 4.0), pick(0.9, 1.0, 1.5), model, layer, refined_global=pick(0.1, 50)))
            for radius in (15.5, 100.0):
                known = {"radius": radius, "log_growth": pick(2.0, 20.0), "castin2024": 50.0}
                for points in ("groups", "proposition 3.4", "ascent"):
                    built = adversarial(pick(0.3, 0.45, 0.5, 0.55), points, pick(1.0, 1.001, 2.0), **known)
                    rows += some([row | {"model": model, "layer": layer} for row in built])
            near = {"experiment": "border", "log_growth": 2.5, "exponent": 2.4, "refined": pick(0.5, 50.0), "layer": layer}
            rows += some([row | near | {"model": model} for row in adversarial(0.4, "groups")])
        rows += difference("dropout", pick(1.0, 1.09, 1.11), model) + difference("primal", pick(0.3, 0.91, 3.0), model)
    return rows


@pytest.mark.parametrize("seed", range(12))
def test_no_sentence_is_stronger_than_its_rows_whatever_they_are(seed: int) -> None:
    topics = found_in(drawn(seed))
    assert {TEXT, SCRIPTS, WORST, MASKS, NORM, MODELS} >= set(topics) >= {TEXT, SCRIPTS, MASKS, NORM, MODELS}


def test_every_sentence_that_has_a_check_is_said_of_some_rows() -> None:
    """Rules are drawn, not only allowed: each of them speaks at least once, and so do the checks."""
    spoken = [sentence for seed in range(12) for texts in found_in(drawn(seed)).values() for sentence in sentences(texts)]
    spoken += sentences(findings(analysis.every_number([]), CAST)[MODELS])
    # What needs a cast, a failed row or a single verdict has a test of its own.
    silent = [pattern for pattern, _ in CHECKS if not any(re.fullmatch(pattern, sentence) for sentence in spoken)]
    assert len(silent) <= 4, silent


def test_scatter_is_no_growth() -> None:
    """Rows that an interval around ½ covers, and everything else too: what was called √n before."""
    wide = said(scattered(adversarial(0.5), 2.0), WORST)
    assert "Proposition 3.4 in 0 of 1 curve (1 undecided)" in wide
    assert "Proposition 3.4 in 1 of 1 curve, one head" in said(adversarial(0.5), WORST)
    assert "Proposition 3.4 in 0 of 1 curve, one head" in said(adversarial(0.42), WORST)


def test_the_second_text_is_counted_by_itself() -> None:
    first = [*text_rows("gpt2-random", 0, 1.0, 0.5), *text_rows("gpt2-random", 6, 1.0, 0.25)]
    assert "second text" not in said(first, TEXT)
    other = {"experiment": "growth, second text", "text": "ag_news"}
    second = [*text_rows("gpt2-random", 0, 3.0, 0.5, **other), *text_rows("gpt2-random", 6, 1.0, 0.5, **other)]
    found = said(first + second, TEXT)
    assert "σ grows more slowly than √n, if at all, in 1 of 2 curves, a layer each." in found
    assert "σ grows like n^¼ in 1 and like √n in 1 of 2 curves" in found
    assert "On a second text of the paper, ag_news, σ grows like √n in 2 of 2 curves" in found
    assert "The intervals of both texts overlap in 1 of 2 curves, and the exponents differ by 0.27 at most" in found
    # What one of the texts does not decide is no agreement.
    assert "overlap in 0 of 1 curve" in said(first + scattered(second[:15], 1.0) + second[15:], TEXT)
    assert {one.condition for one in analysis.every_number(first + second)} >= {"real text", "real text, ag_news"}
    (chart,) = [chart for chart in charts(first + second, CAST) if chart.name == "exponents"]
    drawn = {series.name: list(series.y) for series in chart.panels[0].series}
    assert drawn["σ, second text"] == pytest.approx([0.5, 0.5], abs=0.01)
    assert drawn["σ"] == pytest.approx([0.5, 0.25], abs=0.01)


def test_two_lengths_give_no_exponent() -> None:
    assert said(text_rows("bert-random", 0, 2.0, 0.25, lengths=(4, 8)), TEXT) == ""


def test_two_texts_agree_where_their_intervals_do() -> None:
    """Two exponents between 0 and ¼ are not the same exponent."""
    other = {"experiment": "growth, second text", "text": "ag_news"}
    rows = text_rows("gpt2-random", 0, 1.0, 0.05) + text_rows("gpt2-random", 0, 1.0, 0.2, **other)
    assert "overlap in 0 of 1 curve, and the exponents differ by 0.17 at most" in said(rows, TEXT)


def test_a_bent_curve_is_called_an_average() -> None:
    rows = [row | {"estimate": row["estimate"] * (2 - 4 / row["n"])} for row in
            text_rows("gpt2-random", 0, 1.0, 0.0, lengths=tuple(range(4, 65, 4)))]  # fmt: skip
    assert "of 1 curve that both halves of them decide, growth is slower on the longer half in 1 and faster in 0" in said(
        rows, TEXT
    )
    straight = said(text_rows("gpt2-random", 0, 1.0, 0.3, lengths=tuple(range(4, 65, 4))), TEXT)
    assert "slower on the longer half in 0 and faster in 0" in straight


def test_an_interval_that_almost_reaches_a_half_does_not_lie_below_it() -> None:
    """The same curve is not counted as √n, and as growing more slowly."""
    text = said(text_rows("gpt2-random", 0, 1.0, 0.486), TEXT)
    assert "grows like √n in 1" in text
    assert "more slowly than √n" not in text


@pytest.mark.parametrize(("companion", "words"), [((0.445, 0.25), "follows"), ((0.7, 0.1), "does not follow")])
def test_the_published_curve(companion: tuple[float, float], words: str) -> None:
    text = said(text_rows("gpt2-random", 6, 0.18, 0.09, companion=companion), SCRIPTS)
    assert f"{words} the scripts' number (nine of ten" in text or "in the median" in text
    assert ("follows the scripts' number" in text) == (words == "follows")
    assert "does not follow σ (nine of ten inputs lie more than" in text
    assert "unknown" in text
    assert "repository" not in said(text_rows("bert-random", 6, 0.18, 0.09, companion=companion), SCRIPTS)


def test_half_of_the_inputs_make_no_curve_followed() -> None:
    """More than half of the inputs lie on the drawn curve, the others far from it."""
    rows = text_rows("gpt2-random", 6, 0.18, 0.09, companion=(0.445, 0.25))
    rows = [row | {"companion": 10 * row["companion"]} if k % 5 > 2 else row for k, row in enumerate(rows)]
    assert "follows the scripts' number" not in said(rows, SCRIPTS)


def test_companion_is_called_no_bound_only_when_intervals_say_so() -> None:
    both = text_rows("bert-random", 0, 1.0, 0.0, companion=(0.5, 0.3))
    assert "it is no bound of σ" in said(both, SCRIPTS)
    above = said(text_rows("bert-random", 0, 1.0, 0.0, companion=(2.0, 0.0)), SCRIPTS)
    assert "larger than σ at 15 of 15 inputs and smaller at 0" in above
    assert "bound" not in above
    inside = said(text_rows("bert-random", 0, 1.0, 0.0, companion=(1.03, 0.0)), SCRIPTS)
    assert "another number" not in inside
    assert "larger than σ at 0 of 15 inputs and smaller at 0" in inside
    assert said(text_rows("bert-random", 0, 1.0, 0.0), SCRIPTS) == ""


def test_a_difference_counts_where_every_input_shows_it() -> None:
    rows = difference("dropout", 1.25) + difference("primal", 3.0) + difference("token types", 1.05)
    assert "Of 3 differences between the scripts and σ, each measured alone, 2 change" in said(rows, SCRIPTS)
    rows[0] = rows[0] | {"value": 2.0}  # one input without an effect
    assert "alone, 1 change" in said(rows, SCRIPTS)


def adversarial(alpha: float, points: str = "proposition 3.4", factor: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    more = {"experiment": "adversarial", "radius": 15.5, "points": points, "head": 3} | more
    return [row for row in text_rows("bert-random", 6, factor, alpha, **more) if row["input"] == 1]


def test_the_worst_case() -> None:
    groups = adversarial(0.5, "groups") + adversarial(0.5, "groups", radius=100.0)
    assert "two groups of equal tokens in all 2 curves, one head" in said(groups, WORST)
    assert findings(analysis.every_number(groups), CAST)[WORST][0].startswith("**At tokens built")
    mixed = groups + adversarial(0.3, "groups", radius=10.0)
    assert findings(analysis.every_number(mixed), CAST)[WORST][0].startswith("At tokens built")
    assert "in 2 of 3 curves" in said(mixed, WORST)
    climbed = said(adversarial(0.5) + adversarial(0.5, "ascent", 3.0), WORST)
    assert "a larger σ than the best construction in all 5 runs, intervals apart, 3 times as large at most" in climbed
    # An ascent that ends where it began, but for its digits, is not left out with the others, and is no gain.
    ends = [row | {"estimate": row["estimate"] * (0.999 if row["n"] == 4 else 1)} for row in adversarial(0.5, "ascent", 3.0)]
    same = [row | {"lower": 0.1, "upper": 9.9} if row["n"] == 4 else row for row in ends]
    assert "in 4 of 5 runs" in said(adversarial(0.5) + same, WORST)
    assert "higher still" not in said(adversarial(0.5) + adversarial(0.5, "ascent", 0.5), WORST)


def test_the_border() -> None:
    assert "n = 10^8.6 or more, beyond every length" in said(adversarial(0.5, log_growth=20.0, log_plateau=30.0), WORST)
    near = said(adversarial(0.5, log_growth=2.0, log_plateau=3.0), WORST)
    assert "n = 10^0.8 or more." in near
    seen = adversarial(0.5, "groups", experiment="border", log_growth=2.5, exponent=2.4, refined=50.0)
    assert "on both sides of it" in said(seen, WORST)
    assert "on both sides" not in said([row for row in seen if row["n"] < 8], WORST)
    # An upper bound below what was attained would be a fault, not a finding.
    assert "on both sides" not in said([row | {"refined": 0.5} for row in seen], WORST)


def test_masks_are_compared_on_the_same_inputs_only() -> None:
    free = text_rows("bert-random", 0, 1.0, 0.0)
    rows = free + text_rows("bert-random-causal", 0, 1.5, 0.1)
    assert "larger in all 15 comparisons" in said(rows, MASKS)
    assert "grows faster with n, in 1 of 1 layer" in said(rows, MASKS)
    # Estimates that differ by less than the intervals are wide decide nothing.
    near = said(free + text_rows("bert-random-causal", 0, 1.05, 0.0), MASKS)
    assert "larger in 0 of 15 comparisons" in near
    assert "smaller in 0:" in near
    assert said(free + text_rows("bert-random-causal", 0, 1.5, 0.1, lengths=(5, 9, 17)), MASKS) == ""
    assert "grows" not in said(free + scattered(text_rows("bert-random-causal", 0, 1.5, 0.1), 1.0), MASKS)
    assert said(free, MASKS) == ""


def norms(inner: float = 1.0, normed: float = 4.0, residual: float = 1.5, model: str = "gpt2-random", layer: int = 3,
          **columns: Any) -> list[dict[str, Any]]:  # fmt: skip
    made = []
    for scope, size in (("attention", 1.0), ("norm+attention", normed), ("attention+residual", residual)):
        made += text_rows(model, layer, inner * size, 0.0, experiment="layernorm", scope=scope, **columns)
    return made


def test_layernorm() -> None:
    plain = said(norms(), NORM)
    assert "attention raises σ in 15 of 15 comparisons and lowers it in 0, intervals apart (4 times" in plain
    assert "one constant" not in plain
    assert "has no single effect" in said(norms() + norms(normed=0.2, layer=6), NORM)
    assert "raises σ in 0 of 15 comparisons and lowers it in 0" in said(norms(normed=1.02), NORM)
    bounded = said(norms(radius_norm=27.7, refined_global=100.0), NORM)
    assert "the proven one is 99 to 110 times" in bounded
    # A bound below σ would be a fault, not a finding.
    assert "one constant" not in said(norms(radius_norm=27.7, refined_global=0.5), NORM)


def test_certificates_and_unfinished_rows() -> None:
    assert "certified" not in said(text_rows("bert-random", 0, 1.0, 0.0), MODELS)
    good = text_rows("bert-random", 0, 1.0, 0.0, certified=2.0)
    assert "None of 15 certified upper bounds lies below a value that is attained" in said(good, MODELS)
    # Tight ones at constructed tokens do not make those on text look tight.
    both = said(good + adversarial(0.0, certified=1.0), MODELS)
    assert "medians are 2 times σ on real text and 1 times σ on constructed tokens" in both
    assert "a fault" in said(text_rows("bert-random", 0, 1.0, 0.0, certified=0.5), MODELS)
    assert "15 rows did not reach" in said(text_rows("bert-random", 0, 1.0, 0.0, converged=False), MODELS)


def test_stand_ins_are_named() -> None:
    text = said([], MODELS)
    assert "Nothing here is a measurement of bert-base-uncased: minilm-l6 stands in for bert-base-uncased." in text


def difference(variant: str, ratio: float, model: str = "gpt2-random") -> list[dict[str, Any]]:
    return [
        {"experiment": "differences", "variant": variant, "model": model, "layer": 6, "scope": "attention", "n": 8,
         "input": i, "mask": "causal", "reference": 2.0, "value": 2.0 * ratio, "notes": ""}
        for i in range(2)
    ]  # fmt: skip


def test_results_are_written_from_rows(tmp_path: Path) -> None:
    rows = text_rows("gpt2-random", 6, 0.2, 0.1, companion=(0.445, 0.25), certified=0.9) + adversarial(0.5) + norms()
    rows += text_rows("bert-random", 0, 0.2, 0.1, companion=(0.4, 0.2)) + difference("dropout", 1.25)
    rows += text_rows("bert-random", 0, 0.2, 0.1, experiment="long range", lengths=(128, 256))
    files = write_results(rows, CAST, TINY, ABOUT, tmp_path)
    names = {file.name for file in files}
    for figure in (
        "exponents",
        "published",
        "growth-random",
        "long-range",
        "radius",
        "adversarial",
        "layernorm",
        "differences",
    ):
        assert {f"{figure}.png", f"{figure}.pdf", f"{figure}.html"} <= names
    assert "growth-pretrained.png" not in names
    assert all(file.stat().st_size > 200 for file in files)
    page = (tmp_path / "reproduction.md").read_text(encoding="utf-8")
    assert "not measured: no model here has it" in page
    assert "1.25" not in page  # the method, and no copy of the numbers
    assert "| Proposition 3.4: σ at its tokens grows like √n | adversarial | agrees |" in page
    assert "| Theorem 3.3: upper bound for n tokens | border | not measured here |" in page
    names = [s.name for chart in charts(rows, CAST) for s in chart.series]
    assert "0.445·n^0.25, drawn in the public repository" in names
    with (tmp_path / "FINDINGS.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.reader(file))
    assert ["exponent of σ", "gpt2-random", "6", "real text"] in [row[:4] for row in table]
    assert ["value over σ: dropout", "gpt2-random", "6", "n = 8", "1.25"] in [row[:5] for row in table]
    assert {"largest token", "σ at scope norm+attention"} <= {row[0] for row in table}
    found = (tmp_path / "FINDINGS.md").read_text(encoding="utf-8")
    assert len(found.split()) < 900
    assert found.count("![") <= 5
    html = (tmp_path / "findings.html").read_text(encoding="utf-8")
    assert "data:image/png;base64" in html
    assert "http://" not in html
    assert "https://" not in html


def test_what_agrees_with_the_paper_is_told_by_the_rows() -> None:
    def agreement(rows: list[dict[str, Any]], start: str) -> str:
        tables = (section.table for section in reproduction_page(rows, CAST, TINY, ABOUT).sections)
        lines = (row for table in tables if table for row in table.rows)
        return next(row[2] for row in lines if row[0].startswith(start))

    growing, level = adversarial(0.5, castin2024=99.0), [row | {"layer": 0} for row in adversarial(0.1)]
    assert agreement(growing, "Proposition 3.4") == "agrees"
    assert agreement(growing + level, "Proposition 3.4") == "agrees on some curves"
    assert agreement(level, "Proposition 3.4") == "does not agree"
    assert agreement([], "Proposition 3.4") == "undecided"
    assert agreement(growing, "Theorem 3.3") == "holds at all constructed tokens"
    assert agreement([row | {"castin2024": 0.1} for row in growing], "Theorem 3.3") == "does not hold: a fault"
    assert agreement(growing, "σ against n on AG_NEWS") == "not measured here"
    own = text_rows("gpt2-random", 6, 0.2, 0.1, companion=(0.445, 0.25))
    assert agreement(own, "the fit 0.445") == "σ does not follow it"
    assert agreement([row | {"estimate": row["companion"]} for row in own], "the fit 0.445") == "see the findings"


def test_fit_table_has_both_estimators() -> None:
    table = analysis.fit_table(text_rows("bert-random", 0, 2.0, 0.1, companion=(1.0, 0.3)))
    assert [(one.table, round(one.value, 6)) for one in table] == [("exponent of σ", 0.1), ("exponent of companion", 0.3)]


def test_pages_escape_what_they_show(tmp_path: Path) -> None:
    page = Document("a < b", ["`x | **y**` **[z](y.md)**"], [Section("h", table=Table(["<t>"], [["a|b"]]))])
    assert "| a\\|b |" in page.to_markdown()
    html = page.to_html(tmp_path)
    assert "a &lt; b" in html
    assert "<code>x | **y**</code> <strong>z (<code>y.md</code>)</strong>" in html
    assert "&lt;t&gt;" in html


DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_no_sentence_of_the_published_page_is_stronger_than_its_interval() -> None:
    """Every sentence of docs/FINDINGS.md, made anew from the intervals and counts in docs/FINDINGS.csv."""
    audit = Audit(read_lines(DOCS / "FINDINGS.csv"))
    title, *sections = (DOCS / "FINDINGS.md").read_text(encoding="utf-8").split("\n## ")
    assert [section.split("\n", 1)[0] for section in sections] == [TEXT, SCRIPTS, WORST, MASKS, NORM, MODELS]
    for section in sections:
        heading, body = section.split("\n", 1)
        paragraphs = [part for part in body.split("\n\n") if part.strip() and not re.match(r"!\[|\*(?!\*)", part.strip())]
        audit.check(heading, (part.strip() for part in paragraphs))
    assert len(title.split()) < 150


@pytest.mark.parametrize("file", ["README.md", "docs/index.md"])
def test_what_leads_to_the_page_says_what_it_says(file: str) -> None:
    readme = " ".join((DOCS.parent / file).read_text(encoding="utf-8").split())
    table = Audit(read_lines(DOCS / "FINDINGS.csv")).text()
    slower = [one for one in table if one.high < 0.5 - NEAR and one.high - one.low <= WIDEST]
    (count,) = re.findall(r"lies below ½ in all (\d+) curves", readme)
    assert len(slower) == len(table) == int(count)
