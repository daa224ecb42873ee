"""Findings appear only when the numbers support them; figures and pages are made from rows alone."""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lipscope.report.html import Document, Section, Table
from lipscope.runs.fit import fit_growth
from lipscope.studies.paper import analysis
from lipscope.studies.paper.analysis import NEAR, RIVALS, UNDECIDED, WIDEST, verdict
from lipscope.studies.paper.charts import charts
from lipscope.studies.paper.pages import MASKS, MODELS, NORM, SCRIPTS, TEXT, WORST, findings
from lipscope.studies.paper.run import write_results
from paper_cases import CAST, TINY, text_rows

ABOUT = {"mode": "quick", "measured_seconds": 12.0, "threads": 1, "text": "alice"}


def said(rows: list[dict[str, Any]], topic: str) -> str:
    return " ".join(findings(rows, CAST).get(topic, []))


def scattered(rows: list[dict[str, Any]], size: float) -> list[dict[str, Any]]:
    """The same rows with so much scatter that no exponent can be told."""
    G = np.random.default_rng(0)
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


@pytest.mark.parametrize("seed", range(5))
def test_every_count_of_the_page_is_that_of_the_intervals(seed: int) -> None:
    """No sentence is stronger than its rows: the counts are made anew from the fits, without the rules."""
    G = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for layer in range(8):
        drawn = text_rows("bert-random", layer, 2.0, float(G.choice([0, 0.1, 0.25, 0.35, 0.5])), companion=(1.0, 0.2))
        rows += scattered(drawn, float(G.choice([0.0, 0.02, 0.6])))
    fits = [fit_growth(*zip(*[(r["n"], r["estimate"]) for r in rows if r["layer"] == k], strict=True)) for k in range(8)]
    wide = sum(fit.alpha_high - fit.alpha_low > 0.2 for fit in fits)
    quarter = sum(fit.alpha_high - fit.alpha_low <= 0.2 and fit.alpha_low <= 0.26 and fit.alpha_high >= 0.24 for fit in fits)
    text = said(rows, TEXT)
    listed = text.split("the exponent ", 1)[1].split(" (for example")[0].split(", with")[0].rstrip(".").split("; ")
    claims = dict(part.rsplit(" in ", 1) for part in listed)
    assert int(claims.get("undecided", 0)) == wide
    assert int(claims.get("¼", 0)) == quarter
    assert f"n^¼ is excluded in {8 - wide - quarter} of 8" in text
    below = sum(fit.alpha_high < 0.5 and fit.alpha_high - fit.alpha_low <= 0.2 for fit in fits)
    assert f"√n on {below} of 8 curves" in text or (not below and "more slowly" not in text)
    # Examples are decided ones, three at most.
    examples = re.findall(r"layer \d+ -?[\d.]+ \(-?[\d.]+ … -?[\d.]+\)", text)
    assert len(examples) <= 3
    for low, high in (re.findall(r"(-?[\d.]+) … (-?[\d.]+)", example)[0] for example in examples):
        assert float(high) - float(low) <= 0.22  # rounded outwards


def test_scatter_is_no_growth() -> None:
    """Rows that an interval around ½ covers, and everything else too: what was called √n before."""
    wide = said(scattered(adversarial(0.5), 2.0), WORST)
    assert "undecided in 1, with an interval wider than 0.2" in wide
    assert "½" not in wide
    assert "for example" not in wide
    assert "½ in 1" in said(adversarial(0.5), WORST)
    assert "½" not in said(adversarial(0.42), WORST).replace("between ¼ and ½", "")


def test_the_second_text_is_counted_by_itself() -> None:
    first = [*text_rows("gpt2-random", 0, 1.0, 0.5), *text_rows("gpt2-random", 6, 1.0, 0.25)]
    assert "second text" not in said(first, TEXT)
    other = {"experiment": "growth, second text", "text": "ag_news"}
    second = [*text_rows("gpt2-random", 0, 3.0, 0.5, **other), *text_rows("gpt2-random", 6, 1.0, 0.5, **other)]
    found = said(first + second, TEXT)
    assert "σ grows more slowly than √n on 1 of 2 curves: the interval lies below ½." in found
    assert "It has, over 2 curves, the exponent ½ in 1; ¼ in 1" in found
    assert "On the paper's second text, ag_news, σ has, over 2 curves, the exponent ½ in 2" in found
    assert "On 1 of 2 curves that both texts decide, they agree on the exponent" in found
    # What one of the texts does not decide is no agreement.
    assert "On 0 of 1 curve that both texts decide" in said(first + scattered(second[:15], 1.0) + second[15:], TEXT)
    assert {row["condition"] for row in analysis.every_number(first + second)} >= {"real text", "real text, ag_news"}
    (chart,) = [chart for chart in charts(first + second, CAST) if chart.name == "exponents"]
    drawn = {series.name: list(series.y) for series in chart.panels[0].series}
    assert drawn["σ, second text"] == pytest.approx([0.5, 0.5], abs=0.01)
    assert drawn["σ"] == pytest.approx([0.5, 0.25], abs=0.01)


def test_two_lengths_give_no_exponent() -> None:
    assert said(text_rows("bert-random", 0, 2.0, 0.25, lengths=(4, 8)), TEXT) == ""


@pytest.mark.parametrize(("companion", "word"), [((0.445, 0.25), "follows"), ((0.7, 0.1), "is not")])
def test_the_published_curve(companion: tuple[float, float], word: str) -> None:
    text = said(text_rows("gpt2-random", 6, 0.18, 0.09, companion=companion), SCRIPTS)
    assert f"{word} √‖Jᵀf(X)‖, which the scripts compute" in text
    assert "is not σ (median distance" in text
    assert "unknown" in text
    assert "repository" not in said(text_rows("bert-random", 6, 0.18, 0.09, companion=companion), SCRIPTS)


def test_companion_is_called_no_bound_only_when_it_is_on_both_sides() -> None:
    both = text_rows("bert-random", 0, 1.0, 0.0, companion=(0.5, 0.3))
    assert "it is no bound of σ" in said(both, SCRIPTS)
    above = said(text_rows("bert-random", 0, 1.0, 0.0, companion=(2.0, 0.0)), SCRIPTS)
    assert "above it 15 times and below it 0 times." in above
    assert said(text_rows("bert-random", 0, 1.0, 0.0), SCRIPTS) == ""


def test_a_difference_counts_where_every_input_shows_it() -> None:
    rows = difference("dropout", 1.25) + difference("primal", 3.0) + difference("token types", 1.05)
    assert "Of 3 differences between the scripts and σ, 2 change" in said(rows, SCRIPTS)
    rows[0] = rows[0] | {"value": 2.0}  # one input without an effect
    assert "1 change" in said(rows, SCRIPTS)


def adversarial(alpha: float, points: str = "proposition 3.4", factor: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    more = {"experiment": "adversarial", "radius": 15.5, "points": points, "head": 3} | more
    return [row for row in text_rows("bert-random", 6, factor, alpha, **more) if row["input"] == 1]


def test_the_worst_case() -> None:
    assert "below 0 in 1" in said(adversarial(-0.2), WORST)
    climbed = adversarial(0.5) + adversarial(0.5, "ascent", 3.0)
    assert "reaches 3 times the best construction" in said(climbed, WORST)
    # An ascent below its own start would be a fault, not a finding.
    assert "A short gradient ascent" not in said(adversarial(0.5) + adversarial(0.5, "ascent", 0.5), WORST)


def test_the_border() -> None:
    assert "n = 10^8.6 or more, beyond every length" in said(adversarial(0.5, log_growth=20.0, log_plateau=30.0), WORST)
    near = said(adversarial(0.5, log_growth=2.0, log_plateau=3.0), WORST)
    assert "n = 10^0.8 or more." in near
    seen = adversarial(0.5, "groups", experiment="border", log_growth=2.5, exponent=2.4, refined=50.0)
    assert "before that border and beyond it" in said(seen, WORST)
    assert "beyond it" not in said([row for row in seen if row["n"] < 8], WORST)


def test_masks_are_compared_on_the_same_inputs_only() -> None:
    free = text_rows("bert-random", 0, 1.0, 0.0)
    rows = free + text_rows("bert-random-causal", 0, 1.5, 0.1)
    assert "larger under the causal mask in 15 of 15 comparisons" in said(rows, MASKS)
    assert "exponent is larger under the mask in 1 of 1 layer" in said(rows, MASKS)
    assert said(free + text_rows("bert-random-causal", 0, 1.5, 0.1, lengths=(5, 9, 17)), MASKS) == ""
    assert "exponent" not in said(free + scattered(text_rows("bert-random-causal", 0, 1.5, 0.1), 1.0), MASKS)
    assert said(free, MASKS) == ""


def test_radius() -> None:
    rows = text_rows("bert-random", 0, 1.0, 0.0)
    assert "largest token norm" not in said(rows, TEXT)
    for row in rows:
        row["radius_max"] = 3.0 + 0.01 * row["n"] + 0.001 * row["input"]
    assert "grows with n in 1 of 1 layer, falls in 0 and is undecided in 0" in said(rows, TEXT)


def norms(**columns: Any) -> list[dict[str, Any]]:
    made = []
    for scope, size in (("attention", 1.0), ("norm+attention", 4.0), ("attention+residual", 1.5)):
        made += text_rows("gpt2-random", 3, size, 0.0, experiment="layernorm", scope=scope, **columns)
    return made


def test_layernorm() -> None:
    plain = said(norms(), NORM)
    assert "Measured with the normalisation before it, σ is 4 to 4 times that of attention alone: larger in 5 of 5" in plain
    assert "global constant" not in plain
    assert "the proven one is 1e+02 to 1e+02 times" in said(norms(radius_norm=27.7, refined_global=100.0), NORM)
    # A bound below σ would be a fault, not a finding.
    assert "global constant" not in said(norms(radius_norm=27.7, refined_global=0.5), NORM)


def test_certificates_and_unfinished_rows() -> None:
    assert "certified" not in said(text_rows("bert-random", 0, 1.0, 0.0), MODELS)
    good = text_rows("bert-random", 0, 1.0, 0.0, certified=2.0)
    assert "All 15 certified upper bounds hold" in said(good, MODELS)
    assert "a fault" in said(text_rows("bert-random", 0, 1.0, 0.0, certified=0.5), MODELS)
    assert "15 of 15 rows" in said(text_rows("bert-random", 0, 1.0, 0.0, converged=False), MODELS)


def test_stand_ins_are_named() -> None:
    assert "minilm-l6 stands in for bert-base-uncased: nothing here is a measurement of bert-base-uncased" in said(
        [], MODELS
    )


def difference(variant: str, ratio: float) -> list[dict[str, Any]]:
    return [
        {"experiment": "differences", "variant": variant, "model": "gpt2-random", "layer": 6, "scope": "attention", "n": 8,
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


def test_fit_table_has_both_estimators() -> None:
    table = analysis.fit_table(text_rows("bert-random", 0, 2.0, 0.1, companion=(1.0, 0.3)))
    assert [(row.estimator, round(row.fit.alpha, 6)) for row in table] == [("σ", 0.1), ("companion", 0.3)]


def test_pages_escape_what_they_show(tmp_path: Path) -> None:
    page = Document("a < b", ["`x | y`"], [Section("h", table=Table(["<t>"], [["a|b"]]))])
    assert "| a\\|b |" in page.to_markdown()
    html = page.to_html(tmp_path)
    assert "a &lt; b" in html
    assert "<code>x | y</code>" in html
    assert "&lt;t&gt;" in html


# What a sentence of the page counts, and which lines of FINDINGS.csv it counts: the number, and the condition.
COUNTED = {
    r"below ½\. It": ("σ", r"real text"),
    r"second text, ag_news, σ": ("σ", r"real text, ag_news"),
    r"The scripts' number √‖Jᵀf\(X\)‖": ("companion", r"real text"),
    r"a curve per layer and radius, σ": ("σ", r"R = (15\.5|21\.5|100|10), groups"),
    r"After gradient ascent on the tokens σ": ("σ", r"R = (15\.5|21\.5|100|10), ascent"),
    r"Proposition 3\.4 σ": ("σ", r"R = (15\.5|21\.5|100|10), proposition 3\.4"),
}


def test_no_sentence_of_the_published_page_is_stronger_than_its_interval() -> None:
    """All counts of exponents in docs/FINDINGS.md, made anew from the ends of the intervals in docs/FINDINGS.csv."""
    docs = Path(__file__).resolve().parent.parent / "docs"
    page = (docs / "FINDINGS.md").read_text(encoding="utf-8")
    with (docs / "FINDINGS.csv").open(encoding="utf-8", newline="") as file:
        numbers = list(csv.DictReader(file))
    ends = {id(one): (float(one["low"]), float(one["high"])) for one in numbers}
    exponents = [one for one in numbers if one["table"].startswith("exponent of ")]
    for one in exponents:
        low, high = ends[id(one)]
        near = [name for value, name in RIVALS.items() if low - NEAR <= value <= high + NEAR]
        claims = [name for name in RIVALS.values() if one["verdict"] == name]
        assert claims == (near if high - low <= WIDEST else []), one
        assert (one["verdict"] == UNDECIDED) == (high - low > WIDEST), one
    sentences = re.findall(
        r"([^.]*(?:\.[^.]*)?) has, over (\d+) curves, the exponent (.*?)(?: \(for|, with|\.(?: |$))", page
    )
    assert len(sentences) == len(COUNTED)
    for before, curves, listed in sentences:
        ((estimator, condition),) = [which for lead, which in COUNTED.items() if re.search(lead + "$", before)]
        counted = [one["verdict"] for one in exponents
                   if one["table"] == f"exponent of {estimator}" and re.fullmatch(condition, one["condition"])]  # fmt: skip
        assert len(counted) == int(curves)
        claims = {name: int(count) for name, count in (part.rsplit(" in ", 1) for part in listed.split("; "))}
        assert claims == Counter(counted), before
    # Every interval that is shown as an example is one of them, rounded outwards.
    shown = re.findall(r"(-?\d+\.\d\d) \((-?\d+\.\d\d) … (-?\d+\.\d\d)\)", page)
    assert shown
    for value, low, high in (map(float, example) for example in shown):
        assert any(
            abs(value - float(one["value"])) <= 0.005 and low <= ends[id(one)][0] <= low + 0.01
            and high - 0.01 <= ends[id(one)][1] <= high for one in exponents
        )  # fmt: skip
    slower = [high < 0.5 for one in exponents for low, high in [ends[id(one)]]
              if one["table"] == "exponent of σ" and one["condition"] == "real text" and high - low <= WIDEST]  # fmt: skip
    assert f"more slowly than √n on {sum(slower)} of " in page
