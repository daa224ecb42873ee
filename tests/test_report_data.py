"""What a report is made of: runs read back, points, fits, words, comparisons."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lipscope.report.compare import comparison_sentences, comparisons
from lipscope.report.page import cell_facts, cell_table, page_view
from lipscope.report.run_charts import (
    growth,
    growth_chart,
    heat_map,
    layers_chart,
    rank_sentence,
    scatter_charts,
    scopes_chart,
)
from lipscope.report.settings import ReportData, report_data
from lipscope.report.summary import (
    against_guides,
    answer,
    cards,
    closeness_sentence,
    growth_sentence,
    sentences,
    which_curve,
)
from lipscope.rounding import enclosure, number
from lipscope.runs.fit import GrowthFit, fit_growth
from lipscope.runs.run import Run, load_run
from report_cases import make_rows, make_view, write_run


def data_of(rows: list[dict[str, Any]]) -> ReportData:
    return report_data([load_run(Run(tuple(rows), {"text": "book"}))])


def test_a_run_is_the_same_from_json_csv_and_python(tmp_path: Path) -> None:
    rows = make_rows()
    write_run(tmp_path / "run", rows)
    (tmp_path / "csv").mkdir()
    Run(tuple(rows)).to_csv(tmp_path / "csv" / "rows.csv")
    sources = [tmp_path / "run", tmp_path / "run" / "rows.json", tmp_path / "csv", Run(tuple(rows))]
    cells = [[(c.layer, c.head, c.points) for c in report_data([load_run(s)]).settings[0].cells] for s in sources]
    assert all(one == cells[0] for one in cells)
    story = load_run(tmp_path / "run").provenance
    assert (story.seeds, story.rtol, story.delta) == ((3,), (0.001,), (1e-6,))
    assert load_run(tmp_path / "run").rows[0]["text"] == "book"
    assert load_run(tmp_path / "csv").provenance.command is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "neither a store nor the rows"),
        ("{}", "must be a list of rows"),
        ('[{"layer": 1}]', "have no column 'n'"),
    ],
)
def test_what_is_no_run_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no run"):
        load_run(tmp_path / "nowhere.db")
    (tmp_path / "rows.json").unlink()
    with pytest.raises(ValueError, match=r"neither rows\.json nor rows\.csv"):
        load_run(tmp_path)


def test_rows_without_an_interval_are_counted_and_left_out() -> None:
    rows = make_rows()
    rows[3]["upper"] = float("inf")
    run = load_run(Run(tuple(rows)))
    assert (len(run.rows), run.left_out) == (len(rows) - 1, 1)
    assert any("1 rows of the run hold no interval" in line for line in sentences(report_data([run]).settings[0], run))


def test_a_point_encloses_all_its_inputs() -> None:
    rows = make_rows(inputs=3)
    rows[1]["certified"] = None
    rows[0]["document"] = None
    packed = dict(rows[0]) | {"document": 1, "lower": 0.0, "upper": 1e9}
    setting = data_of([*rows, packed]).settings[0]
    for cell in setting.cells:
        for point in cell.points:
            at = [r for r in rows if (r["layer"], r["head"], r["n"]) == (cell.layer, cell.head, point.n)]
            assert point.inputs == 3
            assert point.lower == min(r["lower"] for r in at)
            assert point.upper == max(r["upper"] for r in at)
            assert point.median == sorted(r["estimate"] for r in at)[1]
            assert point.bounds["refined"] == max(r["refined"] for r in at)
    # A bound of some inputs is no bound of all.
    assert setting.cells[0].points[0].bounds.get("certified") is None
    assert setting.cells[0].points[1].bounds.get("certified") is not None


def test_the_worst_cell_is_the_largest_median_at_the_longest_length() -> None:
    rows = make_rows(layers=2, heads=2)
    for row in rows:
        if (row["layer"], row["n"]) == (0, 8):
            row["estimate"] = row["upper"] = 1e6
    worst = data_of(rows).settings[0].worst
    assert (worst.layer, worst.head) == (1, 1)


def test_fits_are_those_of_the_library() -> None:
    cell = data_of(make_rows(inputs=4)).settings[0].cells[5]
    assert cell.fit == fit_growth([r["n"] for r in cell.rows], [r["estimate"] for r in cell.rows])


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.4, -0.1, "falls"), (-0.004, -0.001, "does not change"),
        (-0.1, 0.2, "cannot be told from none"), (0.6, 0.7, "faster than √n"),
        (0.3, 0.6, "contains √n"), (0.1, 0.4, "slower than √n, and the interval contains n^¼"),
        (0.3, 0.4, "slower than √n and faster than n^¼"), (0.1, 0.2, "slower than √n and slower than n^¼"),
    ],
)  # fmt: skip
def test_growth_is_put_into_words_by_its_interval(low: float, high: float, said: str) -> None:
    fit = GrowthFit(1.0, (low + high) / 2, low, high, 0.95, 1.0, 1.0, 0.0, 0.0, 8)
    assert said in against_guides(fit)


def test_a_curve_is_only_preferred_when_the_points_tell() -> None:
    for points, difference, said in (
        (8, 5.0, "A power law describes"), (8, -5.0, "A curve that levels off, at σ ≈ 7.00"),
        (8, 1.0, "do not tell"), (3, 50.0, "These 3 points do not tell"),
    ):  # fmt: skip
        fit = GrowthFit(1.0, 0.3, 0.2, 0.4, 0.95, 7.0, 1.0, 0.0, difference, points)
        assert said in which_curve(fit)


@pytest.mark.parametrize("noise", [0.0, 1e-7])
def test_no_curve_is_preferred_by_rounding(noise: float) -> None:
    lengths = (8, 16, 32, 64, 128, 256)
    rows = make_rows(layers=1, heads=None, inputs=1, lengths=lengths)
    for row, wiggle in zip(rows, (0.3, 1.0, -0.7, -0.2, 0.9, 0.1), strict=True):
        row |= dict.fromkeys(("lower", "estimate", "upper"), 2.0 * (1 + noise * wiggle))
    cell = data_of(rows).settings[0].worst
    assert "does not change with the length." in growth_sentence(cell)
    assert "curve" not in growth_sentence(cell)
    assert "AIC" not in dict(cell_facts(cell))["growth"]
    # One curve through all points is news, as the other is not.
    for row in rows:
        row |= dict.fromkeys(("lower", "estimate", "upper"), 2.0 * row["n"] ** 0.5)
    assert "A power law describes the points better" in growth_sentence(data_of(rows).settings[0].worst)


def test_what_is_largest_at_the_longest_length_is_not_called_the_largest() -> None:
    rows = make_rows(layers=2, heads=None)
    (setting,) = data_of(rows).settings
    assert cards(setting)[0].title == "Median σ of the least smooth"
    assert cards(setting)[0].detail.startswith("at n = 64, in [")
    assert "shorter length" not in " ".join(sentences(setting, data_of(rows).runs[0]))
    for row in rows:
        if (row["layer"], row["n"]) == (0, 16):
            row |= dict.fromkeys(("lower", "estimate", "upper"), 500.0)
    data = data_of(rows)
    text = " ".join(sentences(data.settings[0], data.runs[0]))
    assert "The least smooth at n = 64 is layer 1" in text
    assert "At a shorter length σ was larger: about 500 in layer 0 at n = 16." in text
    assert not any("argest" in card.title for card in cards(data.settings[0]))


def test_no_sentence_without_its_number() -> None:
    rows = make_rows(lengths=(8, 16), certified=None, refined=None, castin2024=None)
    data = data_of(rows)
    setting = data.settings[0]
    assert "takes 3 lengths, and there are 2" in growth_sentence(setting.worst)
    assert closeness_sentence(setting.worst) is None
    text = " ".join(sentences(setting, data.runs[0]))
    assert "bound" not in text
    assert "exponent" not in text
    assert "α" not in " ".join(card.title for card in cards(setting))
    assert rank_sentence(data_of(make_rows(layers=2, heads=2)).settings[0], "entropy").startswith("With 4 heads")


def test_the_summary_says_what_the_rows_say() -> None:
    data = data_of(make_rows())
    setting = data.settings[0]
    text = " ".join(sentences(setting, data.runs[0]))
    worst = setting.worst
    assert (worst.layer, worst.head) == (2, 3)
    assert f"layer 2, head 3: a small change of its tokens can come out about {number(worst.last.median)} times" in text
    assert f"{enclosure(worst.last.lower, worst.last.upper)}" in text
    assert "fails with probability at most 1e-06" in text
    assert worst.fit is not None
    assert f"n^{worst.fit.alpha:.2f}" in text
    assert "certificate at the same inputs is 2.50 times" in text
    rows = make_rows(converged=False)
    assert "96 of 96 estimates were not shown to have converged" in " ".join(
        sentences(data_of(rows).settings[0], data.runs[0])
    )


def test_a_bound_is_divided_by_sigma_of_its_own_input() -> None:
    rows = make_rows(layers=1, heads=None, inputs=3)
    for row in rows:
        sigma, factor = ((1.0, 1.1), (10.0, 1.2), (100.0, 1.3))[row["input"]]
        bounds = dict.fromkeys(("certified", "refined", "castin2024", "refined_global"), factor * sigma)
        row |= {"lower": sigma, "estimate": sigma, "upper": sigma} | bounds
    (setting,) = data_of(rows).settings
    assert "median of 3): the certificate at the same inputs is 1.20 times" in str(closeness_sentence(setting.worst))
    assert {card.title: card.value for card in cards(setting)}["Bound over σ"] == "1.20×"
    facts = dict(cell_facts(setting.worst))
    assert facts["certificate at these inputs"] == "≤ 130, 1.20 × σ (median)"
    assert facts["refined bound, any input"] == "≤ 130, 1.20 × σ (median)"
    rows[-1]["certified"] = None
    assert data_of(rows).settings[0].worst.over_sigma("certified") is None


@given(st.floats(1e-12, 1e12), st.floats(0, 1))
def test_a_printed_interval_contains_the_interval(lower: float, width: float) -> None:
    upper = lower * (1 + width)
    low, high = map(float, enclosure(lower, upper)[1:-1].split(", "))
    assert low <= lower <= upper <= high
    # Three digits, so at most one unit of the third is given away at each end.
    assert low >= lower * (1 - 0.0101)
    assert high <= upper * (1 + 0.0101)


def test_every_printed_end_is_rounded_outwards() -> None:
    ends = {"lower": 1.00620, "estimate": 1.006205, "upper": 1.00621, "certified": 1.1234}
    rows = [row | ends for row in make_rows(heads=None)]
    data = data_of(rows)
    (setting,) = data.settings
    assert "σ of each lies in [1.00, 1.01]" in " ".join(sentences(setting, data.runs[0]))
    assert "in [1.00, 1.01]" in cards(setting)[0].detail
    assert "in [1.00, 1.01]" in growth_chart(setting, setting.worst).words
    assert all("in [1.00, 1.01]" in cell.words for line in heat_map(setting).cells for cell in line if cell)
    assert dict(cell_facts(setting.worst))["certificate at these inputs"].startswith("≤ 1.13,")
    assert cell_table(setting.worst)[1][2:6] == ["1.00", "1.01", "1.01", "1.13"]
    assert page_view(make_view(["a", "b"]) | ends)[0]["sigma"] == "1.01 in [1.00, 1.01]"
    (comparison,) = comparisons(report_data([data.runs[0], data.runs[0]]))
    assert "1.01 in [1.00, 1.01] to 1.01 in [1.00, 1.01]" in " ".join(comparison_sentences(comparison))


def test_heat_maps_of_heads_of_layers_and_with_holes() -> None:
    heads = heat_map(data_of(make_rows()).settings[0])
    assert (heads.x, len(heads.row_names), len(heads.column_names)) == ("head", 3, 4)
    assert max(cell.value for line in heads.cells for cell in line if cell) == heads.high
    layers = heat_map(data_of(make_rows(heads=None)).settings[0])
    assert (layers.x, list(layers.column_names)) == ("tokens n", ["8", "16", "32", "64"])
    holes = heat_map(data_of([r for r in make_rows() if (r["layer"], r["head"]) != (1, 2)]).settings[0])
    assert holes.cells[1][2] is None
    shades = [cell.shade for line in heads.cells for cell in line if cell]
    assert (min(shades), max(shades)) == (0.0, 1.0)


def test_charts_hold_the_points_the_guides_and_the_bounds() -> None:
    setting = data_of(make_rows()).settings[0]
    cell = setting.cells[4]
    chart = growth_chart(setting, cell)
    series = {one.name: one for one in chart.series}
    assert list(series["median σ"].y) == [p.median for p in cell.points]
    assert list(series["σ of all inputs"].low) == [p.lower for p in cell.points]
    root = series["guide √n"]
    assert root.y[-1] / root.y[0] == pytest.approx((64 / 8) ** 0.5)
    quarter = series["guide n^¼"]
    assert quarter.y[-1] / quarter.y[0] == pytest.approx((64 / 8) ** 0.25)
    assert list(series["refined bound"].y) == [p.bounds["refined"] for p in cell.points]
    assert list(series["paper's bound"].y) == [p.bounds["castin2024"] for p in cell.points]
    fit = cell.fit
    assert fit is not None
    assert series[f"fit n^{fit.alpha:.2f}"].y[-1] == pytest.approx(fit.c * 64**fit.alpha)
    assert series["fit levelling off"].y[-1] == pytest.approx(fit.limit * 64 / (64 + fit.half_length))
    top = {one.name: one.y[-1] for one in layers_chart(setting).series}
    assert top["layer 1"] == max(c.last.median for c in setting.cells if c.layer == 1)


def test_scatters_show_what_the_correlation_speaks_of() -> None:
    (setting,) = data_of(make_rows()).settings
    medians = sorted(cell.last.median for cell in setting.cells)
    for chart in scatter_charts(setting):
        assert sorted(y for one in chart.series for y in one.y) == medians
        assert "over 12 heads at n = 64" in chart.note or "With 12 heads at n = 64" in chart.note
        assert chart.panels[0].y == "σ at n = 64, scope head"


def test_typical_gain_and_stable_rank_have_their_places_where_rows_hold_them() -> None:
    (setting,) = data_of(make_rows(typical=1.5, stable_rank=3.0)).settings
    facts = dict(cell_facts(setting.worst))
    assert (facts["typical gain"], facts["stable rank"]) == ("1.50", "3.00")
    assert "(a random one 1.50 times)" in answer(setting)
    (without,) = data_of(make_rows()).settings
    assert "typical gain" not in dict(cell_facts(without.worst))
    assert "random" not in answer(without)


def test_growth_by_head_has_a_colour_and_a_line_of_the_legend_per_layer() -> None:
    chart = growth(data_of(make_rows(layers=12, heads=12)))
    listed = [one for one in chart.series if one.listed]
    assert [one.name for one in listed] == [f"layer {layer}" for layer in range(12)]
    assert len({one.colour for one in listed}) == 12
    assert {one.hover[0].split(":")[0] for one in chart.series if one.look == "line"} >= {"layer 3, head 5, n = 8"}


def test_a_bound_that_ends_early_says_where_and_why() -> None:
    rows = [row | ({"certified": None} if row["n"] > 16 else {}) for row in make_rows()]
    (setting,) = data_of(rows).settings
    names = [one.name for one in growth_chart(setting, setting.worst).series]
    assert "certificate, to n = 16" in names
    assert "refined bound" in names
    (told,) = [value for label, value in cell_facts(setting.worst) if label == "certificate at these inputs"]
    assert told.endswith("at n = 16; beyond, it would cost more than σ")


def test_scopes_stand_side_by_side_at_a_shared_length() -> None:
    rows = make_rows(heads=None) + make_rows(heads=None, scope="norm+attention", lengths=(8, 16, 32))
    chart = scopes_chart(data_of(rows).settings)
    assert chart is not None
    assert [one.name for one in chart.series] == ["attention", "norm+attention"]
    assert "n = 32" in chart.title
    assert scopes_chart(data_of(make_rows(heads=None)).settings) is None


def test_two_runs_are_compared_cell_by_cell(tmp_path: Path) -> None:
    rows = make_rows(heads=None)
    after = [
        row | {name: (3 if row["layer"] == 1 else 1.001) * row[name] for name in ("lower", "estimate", "upper")}
        for row in rows
    ]
    runs = [load_run(write_run(tmp_path / name, one)) for name, one in (("before", rows), ("after", after))]
    (comparison,) = comparisons(report_data(runs))
    assert [change.ratio for change in comparison.changes] == pytest.approx([1.001, 3, 1.001])
    assert [change.clear for change in comparison.changes] == [False, True, False]
    text = " ".join(comparison_sentences(comparison))
    assert "larger in 3 of 3 layers" in text
    assert "In 1 of them the change is clear" in text
    assert "The largest factor is 3.00, in layer 1" in text
    assert comparison.names == ("toy on book (before)", "toy on book (after)")
    assert comparisons(report_data(runs[:1])) == []
    other = load_run(write_run(tmp_path / "other", make_rows(heads=None, scope="block")))
    assert comparisons(report_data([runs[0], other])) == []
    # Another model is compared layer by layer only when it has the same layers.
    stranger = [row | {"model": "another"} for row in rows]
    same, fewer = (load_run(write_run(tmp_path / name, some)) for name, some in (
        ("same", stranger), ("fewer", [row for row in stranger if row["layer"] < 2])))  # fmt: skip
    (unlike,) = comparisons(report_data([runs[0], same]))
    assert unlike.names == ("toy on book", "another on book")  # what they are, not where they lie
    assert comparisons(report_data([runs[0], fewer])) == []


@pytest.mark.parametrize("name", ["kind", "options", "dtype", "text", "model"])
def test_a_setting_is_compared_with_its_like_and_any_difference_is_said(name: str) -> None:
    rows = [row | {"text": "book", "kind": "text", "options": "{}"} for row in make_rows(heads=None)]
    # Sorted before and after the plain setting: neither order may decide.
    for other in ("a", "z"):
        strange = [
            row | {name: other} | {end: 3 * row[end] for end in ("lower", "estimate", "upper")} for row in rows
        ]  # fmt: skip
        both, plain, odd = (load_run(Run(tuple(some))) for some in (rows + strange, rows, strange))
        matched = comparisons(report_data([both, both]))
        assert len(matched) == 2
        for one in matched:
            assert getattr(one.first, name) == getattr(one.second, name)
            assert [change.ratio for change in one.changes] == [1.0, 1.0, 1.0]
            assert "differ" not in " ".join(comparison_sentences(one))
        (unlike,) = comparisons(report_data([plain, odd]))
        assert f"The runs differ in {name}: {rows[0][name]} and {other}." in comparison_sentences(unlike)
    # Rows of a scan have no column kind.
    scan = load_run(Run(tuple(row | {"kind": None} for row in rows)))
    (alike,) = comparisons(report_data([scan, load_run(Run(tuple(rows)))]))
    assert "differ" not in " ".join(comparison_sentences(alike))


def test_settings_are_told_apart_and_carry_their_views(tmp_path: Path) -> None:
    rows = make_rows() + make_rows(model="other") + make_rows(dtype="float64")
    data = report_data([load_run(write_run(tmp_path / "run", rows, views=[make_view(["a", "b"])]))])
    assert len(data.settings) == 3
    assert len({data.label(setting) for setting in data.settings}) == 3
    assert [len(data.views(setting)) for setting in data.settings if setting.model == "other"] == [0]
    assert [len(data.views(setting)) for setting in data.settings if setting.model == "toy"] == [1, 1]


def test_rows_of_a_scan_written_as_csv_come_back_as_they_were() -> None:
    rows = make_rows(heads=None)
    read = list(csv.DictReader(io.StringIO(Run(tuple(rows)).csv_text())))
    assert float(read[0]["estimate"]) == rows[0]["estimate"]
    assert json.loads(Run(tuple(rows)).to_json()) == rows


def test_a_fit_that_tells_nothing_says_so() -> None:
    from lipscope.runs.fit import TOO_FEW, fit_growth

    wide = fit_growth([8, 16, 32], [1.0, 9.0, 1.1])
    assert wide.alpha_high - wide.alpha_low > 1
    assert str(wide).startswith(TOO_FEW)
    assert "prefers" not in str(wide)
    narrow = fit_growth([8, 16, 32, 64], [2.0, 2.8, 4.0, 5.6])
    assert "AIC prefers" in str(narrow)


def test_the_whole_model_is_no_layer() -> None:
    rows = [row | {"scope": "model"} for row in make_rows(layers=1, heads=None)]
    run = load_run(Run(tuple(rows)))
    said = str(run)
    assert "the whole model: median" in said
    [setting] = report_data([run]).settings
    assert setting.worst.where == "the whole model"
    assert (cards(setting)[1].value, cards(setting)[1].detail) == ("all", "the whole model")
    assert not any("layer 0" in sentence for sentence in [said, answer(setting), *sentences(setting, run)])
