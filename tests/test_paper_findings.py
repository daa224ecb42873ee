"""Findings appear only when the numbers support them; figures and pages are made from rows alone."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from lipscope.report.html import Document, Section, Table
from lipscope.studies.paper import analysis
from lipscope.studies.paper.charts import charts
from lipscope.studies.paper.findings import findings
from lipscope.studies.paper.run import write_results
from paper_cases import CAST, TINY, text_rows

ABOUT = {"mode": "quick", "measured_seconds": 12.0, "threads": 1, "text": "alice", "textbook": {}}


def said(rows: list[dict[str, Any]], topic: str) -> str:
    return " ".join(f.text for f in findings(rows, CAST) if f.topic == topic)


def test_a_quarter_is_found_only_where_it_is() -> None:
    growing = said(text_rows("bert-random", 0, 2.0, 0.25), "Growth on real text")
    assert "covers 1/4 in 1, lies below it in 0 and above it in 0" in growing
    assert "bert-random layer 0: the true σ fits 2·n^0.250" in growing
    assert "companion" not in growing
    flat = said(text_rows("bert-random", 0, 2.0, 0.05), "Growth on real text")
    assert "covers 1/4 in 0, lies below it in 1 and above it in 0" in flat


def test_two_lengths_give_no_exponent() -> None:
    assert said(text_rows("bert-random", 0, 2.0, 0.25, lengths=(4, 8)), "Growth on real text") == ""


@pytest.mark.parametrize(("companion", "verdict"), [((0.445, 0.25), "is followed by"), ((0.7, 0.1), "is not that of")])
def test_the_published_curve(companion: tuple[float, float], verdict: str) -> None:
    text = said(text_rows("gpt2-random", 6, 0.18, 0.09, companion=companion), "The published curve")
    assert f"{verdict} the companion estimator here" in text
    assert "is not that of the true σ here" in text
    assert "unknown" in text


def test_no_word_on_the_published_curve_without_its_model() -> None:
    assert said(text_rows("bert-random", 6, 0.18, 0.09, companion=(0.445, 0.25)), "The published curve") == ""


def test_companion_is_called_no_bound_only_when_it_is_on_both_sides() -> None:
    both = text_rows("bert-random", 0, 1.0, 0.0, companion=(0.5, 0.3))
    assert "neither an upper nor a lower bound" in said(both, "The companion estimator")
    above = text_rows("bert-random", 0, 1.0, 0.0, companion=(2.0, 0.0))
    assert "above it every time" in said(above, "The companion estimator")
    assert said(text_rows("bert-random", 0, 1.0, 0.0), "The companion estimator") == ""


def adversarial(alpha: float, points: str = "proposition 3.4", factor: float = 1.0) -> list[dict[str, Any]]:
    more = {"experiment": "adversarial", "radius": 15.5, "points": points, "head": 3}
    return [row for row in text_rows("bert-random", 6, factor, alpha, **more) if row["input"] == 1]


def test_the_worst_case() -> None:
    assert "σ grows like √n" in said(adversarial(0.5), "The worst case")
    slower = said(adversarial(0.3), "The worst case")
    assert "that covers it, in 0." in slower
    assert "grows like √n" not in slower
    assert "σ falls with n in 1" in said(adversarial(-0.2), "The worst case")
    climbed = adversarial(0.5) + adversarial(0.5, "ascent", 3.0)
    assert "reaches 3 times the σ of the best construction" in said(climbed, "The worst case")
    # An ascent below its own start would be a fault, not a finding.
    assert "gradient ascent reaches" not in said(adversarial(0.5) + adversarial(0.5, "ascent", 0.5), "The worst case")


def test_radius() -> None:
    rows = text_rows("bert-random", 0, 1.0, 0.0)
    assert said(rows, "Radius against n") == ""
    for row in rows:
        row["radius_max"] = 3.0 + 0.01 * row["n"] + 0.001 * row["input"]
    assert "grows with n" in said(rows, "Radius against n")


def norms(**columns: Any) -> list[dict[str, Any]]:
    made = []
    for scope, size in (("attention", 1.0), ("norm+attention", 4.0), ("attention+residual", 1.5)):
        made += text_rows("gpt2-random", 3, size, 0.0, experiment="layernorm", scope=scope, **columns)
    return made


def test_layernorm() -> None:
    plain = said(norms(), "LayerNorm")
    assert "σ at scope norm+attention is 4 times σ of attention alone, above it" in plain
    assert "global constant" not in plain
    bounded = said(norms(radius_norm=27.7, refined_global=100.0), "LayerNorm")
    assert "never longer than 27.7" in bounded
    assert "the proven one is 100 times the σ measured" in bounded


def test_certificates_and_unfinished_rows() -> None:
    rows = text_rows("bert-random", 0, 1.0, 0.0)
    assert said(rows, "Certificates") == ""
    assert said(rows, "Accuracy") == ""
    good = text_rows("bert-random", 0, 1.0, 0.0, certified=2.0)
    assert "All 15 certified upper bounds lie above" in said(good, "Certificates")
    assert "a fault" in said(text_rows("bert-random", 0, 1.0, 0.0, certified=0.5), "Certificates")
    assert "15 of 15 rows" in said(text_rows("bert-random", 0, 1.0, 0.0, converged=False), "Accuracy")


def test_stand_ins_are_named() -> None:
    assert "minilm-l6 stands in for bert-base-uncased" in said([], "Models")


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
    for figure in ("growth-random", "long-range", "radius", "adversarial", "layernorm", "differences"):
        assert {f"{figure}.png", f"{figure}.pdf", f"{figure}.html"} <= names
    assert "growth-pretrained.png" not in names
    assert all(file.stat().st_size > 200 for file in files)
    page = (tmp_path / "reproduction.md").read_text(encoding="utf-8")
    assert "Ratio 1.25 (1.25 … 1.25) for gpt2-random" in page
    assert "Not measured in this run" in page
    names = [s.name for chart in charts(rows, CAST) for s in chart.series]
    assert "0.445·n^0.25, drawn in the public repository" in names
    with (tmp_path / "exponents.csv").open(encoding="utf-8", newline="") as file:
        table = list(csv.reader(file))
    assert ["gpt2-random", "6", "full", "real text"] in [row[:4] for row in table]
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
