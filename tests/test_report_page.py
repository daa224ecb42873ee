"""The page and the figures for print: one file, safe, accessible, and both drawn from the same data."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chart_cases import assert_drawn_alike
from lipscope.cli.main import app
from lipscope.report import write_report
from lipscope.report.charts import Chart, Panel, Series
from lipscope.report.compare import comparison_chart, comparisons
from lipscope.report.draw_page import Looks, page_chart
from lipscope.report.draw_print import draw, print_figure
from lipscope.report.html import compact_rows, inert_json
from lipscope.report.palette import palette
from lipscope.report.run_charts import growth, growth_chart, heat_chart, layers_chart, scatter_charts, scopes_chart
from lipscope.report.settings import report_data
from lipscope.runs import run_plan
from lipscope.runs.run import load_run
from report_cases import HOSTILE, make_rows, make_view, write_run
from sweep_cases import plan_of, save_models


class Elements(HTMLParser):
    """Every element of a page, with its attributes, and the content of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._inside: dict[str, str | None] | None = None
        self._text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))
        if tag == "script":
            self._inside, self._text = dict(attrs), []

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self._text.append(data)

    def handle_endtag(self, tag: str) -> None:
        if tag == "script" and self._inside is not None:
            self.scripts.append((self._inside, "".join(self._text)))
            self._inside = None


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("page")
    name = HOSTILE[1]
    views = [make_view(list(HOSTILE), model=name, text=HOSTILE[3])]
    run = write_run(directory / "run", make_rows(model=name), views=views, text=HOSTILE[3])
    return write_report(run, directory / "report.html").read_text(encoding="utf-8")


def test_one_file_without_a_network(page: str) -> None:
    elements = Elements(page)
    for tag, attributes in elements.all:
        for name in ("src", "href", "action", "srcset", "poster"):
            value = attributes.get(name) or ""
            assert not re.match(r"(https?:)?//", value), (tag, value)
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
    style = page.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_only_the_page_s_own_scripts_may_run(page: str) -> None:
    elements = Elements(page)
    policy = next(a["content"] for t, a in elements.all if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    running = [text for attributes, text in elements.scripts if attributes.get("type") != "application/json"]
    assert len(running) == 3  # Plotly, charts, page: nothing that came with the text
    for text in running:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy


def test_everything_has_a_name_for_those_who_cannot_see_it(page: str) -> None:
    elements = Elements(page)
    identities = [attributes["id"] for _, attributes in elements.all if "id" in attributes]
    assert len(identities) == len(set(identities))
    for tag, attributes in elements.all:
        if attributes.get("role") == "img" and "data-chart" in attributes:
            assert len(attributes["aria-label"] or "") > 20
        if tag == "button" and "data-cell" in attributes and "tabindex" in attributes:
            assert "σ ≈" in (attributes["aria-label"] or "")
        if tag == "select":
            assert any(t == "label" and a.get("for") == attributes["id"] for t, a in elements.all)
        if "aria-labelledby" in attributes:
            assert attributes["aria-labelledby"] in identities


def test_the_embedded_data_are_the_rows(page: str) -> None:
    rows = json.loads(next(text for attributes, text in Elements(page).scripts if attributes.get("id") == "rows"))
    expected = make_rows(model=HOSTILE[1])
    assert rows["count"] == len(expected)
    columns = {column["name"]: column for column in rows["columns"]}
    assert columns["estimate"]["values"] == [row["estimate"] for row in expected]
    assert columns["model"]["same"] == HOSTILE[1]
    layers = columns["layer"]["values"]
    assert layers == [row["layer"] for row in expected]


def test_inert_json_says_the_same_and_ends_no_script() -> None:
    value = {"text": list(HOSTILE), "numbers": [1.5, float("inf"), float("nan"), None, True]}
    text = inert_json(value)
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"text": list(HOSTILE), "numbers": [1.5, None, None, None, True]}
    assert json.loads(inert_json({"half": "\ud800"})) == {"half": "?"}


def test_words_that_repeat_are_kept_once() -> None:
    run = load_run_of(make_rows() + make_rows(model="other"))
    column = next(c for c in compact_rows([run])["columns"] if c["name"] == "model")
    assert column["words"] == ["toy", "other"]
    assert column["places"] == [0] * 96 + [1] * 96


def load_run_of(rows: list[dict[str, Any]]) -> Any:
    from lipscope.runs.run import Run

    return load_run(Run(tuple(rows), {"text": "book"}))


def run_charts(rows: list[dict[str, Any]]) -> list[Chart]:
    data = report_data([load_run_of(rows)])
    (setting, *_) = data.settings
    twice = comparisons(report_data([data.runs[0], data.runs[0]]))
    found = [growth(data), growth_chart(setting, setting.worst), layers_chart(setting), heat_chart(setting)]
    scopes = scopes_chart(data.settings)
    return [*found, *scatter_charts(setting), *map(comparison_chart, twice), *([] if scopes is None else [scopes])]


@pytest.mark.parametrize(
    "rows",
    [
        make_rows(),
        make_rows(heads=None) + make_rows(heads=None, scope="norm+attention"),
        [row for row in make_rows() if (row["layer"], row["head"]) != (1, 2)],
    ],
    ids=["heads", "scopes", "holes"],
)
def test_print_and_page_draw_the_same_numbers(rows: list[dict[str, Any]]) -> None:
    for chart in run_charts(rows):
        assert_drawn_alike(chart)


def test_no_chart_of_what_was_not_recorded() -> None:
    names = [chart.name for chart in scatter_charts(report_data([load_run_of(make_rows(radius_rms=None))]).settings[0])]
    assert names == ["max-logit", "entropy", "sink"]


def test_bounds_that_lie_far_away_get_a_part_of_the_axis_of_their_own() -> None:
    near, high, low = Series("σ", [1, 2], [1.0, 2.0]), [7.0, 8.0], [5.0, 8.0]
    for values, far in ((high, True), (low, False)):
        for log in (True, False):
            panel = Panel([near, Series("bound", [1, 2], values, group="bound")], "n", "σ", y_log=log)
            assert [one.name for one in panel.far] == ["bound"] * far
            assert len(print_figure(Chart("c", "c", [panel], "c")).axes) == 1 + far
    assert Panel([Series("guide", [1, 2], high, group="guide"), near], "n", "σ").far == []


def test_a_figure_is_the_same_file_every_time(tmp_path: Path) -> None:
    data = report_data([load_run_of(make_rows(heads=None, layers=1, model="$x_$ <b>"))])
    chart = growth_chart(data.settings[0], data.settings[0].worst)
    names = [f"growth.{ending}" for ending in ("png", "pdf", "svg", "html")]
    first, second = (draw(chart, *(tmp_path / place / name for name in names)) for place in ("a", "b"))
    assert [path.name for path in first] == names
    for one, two in zip(first, second, strict=True):
        assert one.stat().st_size > 1000
        assert one.read_bytes() == two.read_bytes(), one.name
    with pytest.raises(ValueError, match=r"drawn as .png, .pdf, .svg or .html, got 'growth.gif'"):
        draw(chart, tmp_path / "growth.gif")


def test_a_chart_s_own_page_runs_its_own_scripts_only(tmp_path: Path) -> None:
    panel = Panel([Series(HOSTILE[0], [1, 2], [1, 2])], HOSTILE[1], HOSTILE[2], HOSTILE[3])
    (file,) = draw(Chart("c", HOSTILE[1], [panel, panel], HOSTILE[2], 2, HOSTILE[3]), tmp_path / "c.html")
    found = file.read_text(encoding="utf-8")
    test_only_the_page_s_own_scripts_may_run(found)
    test_one_file_without_a_network(found)
    test_everything_has_a_name_for_those_who_cannot_see_it(found)


def test_colours_of_every_role_on_both_papers() -> None:
    data = report_data([load_run_of(make_rows())])
    looks = Looks()
    page_chart(growth_chart(data.settings[0], data.settings[0].worst), looks)
    used = set(re.findall(r"@([a-z0-9.]+)", json.dumps(looks)))
    assert len(used) >= 7
    for theme in ("light", "dark"):
        assert used <= set(palette(theme))
    with pytest.raises(ValueError, match="theme must be"):
        palette("sepia")


def test_the_command_writes_page_and_figures_and_refuses_clearly(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", make_rows())
    runner = CliRunner()
    arguments = ["report", str(run), "--out", str(tmp_path / "r.html"), "--figures", str(tmp_path / "figures")]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert str((tmp_path / "r.html").resolve()) in done.output.replace("\n", "")
    stems = {"heat-map", "layers", "growth-worst", "radius", "max-logit", "entropy", "sink"}
    names = {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "pdf", "svg")}
    assert {path.name for path in (tmp_path / "figures").iterdir()} == names
    for wrong, message in (
        (["report", str(tmp_path / "none.db")], "there is no run"),
        (["report", str(run), "--out", str(tmp_path / "no" / "r.html")], "there is no directory"),
        (["report", str(write_run(tmp_path / "empty", []))], "has no rows yet"),
        (["view", str(tmp_path / "none.db")], "there is no run"),
    ):
        refused = runner.invoke(app, wrong)
        assert refused.exit_code == 2
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    store = tmp_path / "run.db"
    save_models(tmp_path)
    run_plan(plan_of(tmp_path, lengths=[6], inputs=1, scopes=["attention"]), store)
    sources = [str(write_run(tmp_path / "scan", make_rows(), views=[make_view(["a", "b"])])), str(store)]
    code = f"""
import sys
import lipscope.report
from lipscope.report import draw, growth, write_figures, write_report
from lipscope.report.server import ReportServer
for source in {sources!r}:
    write_report(source, source + ".html", compare=source)
    draw(growth(source), source + ".png", source + "-chart.html")
    ReportServer(source).page()
assert not {{"torch", "transformers"}} & sys.modules.keys(), "a report imports torch"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_templates_are_part_of_the_package() -> None:
    from importlib.resources import files

    names = {entry.name for entry in (files("lipscope.report") / "templates").iterdir()}
    assert {"report.html.j2", "content.html.j2", "figure.html.j2", "style.css", "charts.js", "page.js", "live.js"} <= names
    assert {"base.html.j2", "chart.html.j2", "document.html.j2", "chart.js"} <= names
