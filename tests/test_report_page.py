"""The page and the figures for print: one file, safe, accessible, and both drawn from the same data."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lipscope.cli.main import app
from lipscope.report import load_run, report_data, write_report
from lipscope.report.charts import growth_chart, radius_chart
from lipscope.report.figures_page import Looks, page_chart
from lipscope.report.figures_print import draw_chart, draw_heat_map, save_figure
from lipscope.report.heat import heat_map
from lipscope.report.html import compact_rows, inert_json
from lipscope.report.palette import palette
from report_cases import HOSTILE, make_rows, make_view, write_run


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
    from lipscope.runs.scan import Scan

    return load_run(Scan(tuple(rows), {"text": "book"}))


def test_print_and_page_draw_the_same_numbers() -> None:
    setting = report_data([load_run_of(make_rows())]).settings[0]
    chart = growth_chart(setting, setting.worst)
    looks = Looks()
    traces = page_chart(chart, looks)["traces"]
    lines = {line.get_label(): line for axes in draw_chart(chart).axes for line in axes.get_lines()}
    for series in chart.series:
        if series.look == "band":
            continue
        trace = next(t for t in traces if t["name"] == series.name)
        assert trace["y"] == pytest.approx(list(series.y), rel=1e-4)
        assert list(lines[series.name].get_ydata()) == pytest.approx(list(series.y))
        colour = looks.all[trace["look"]]["line"]["color"]
        assert palette("light")[colour.removeprefix("@")] == lines[series.name].get_color()
    heat = heat_map(setting)
    (image,) = draw_heat_map(heat).axes[0].get_images()
    assert image.get_array().tolist() == [[cell.value for cell in line if cell] for line in heat.cells]
    assert radius_chart(report_data([load_run_of(make_rows(radius_rms=None))]).settings[0]) is None


def test_a_figure_is_the_same_file_every_time(tmp_path: Path) -> None:
    data = report_data([load_run_of(make_rows(heads=None, layers=1, model="$x_$ <b>"))])
    chart = growth_chart(data.settings[0], data.settings[0].worst)
    first, second = (save_figure(draw_chart(chart), tmp_path / name / "growth") for name in ("a", "b"))
    assert [path.suffix for path in first] == [".png", ".pdf", ".svg"]
    for one, two in zip(first, second, strict=True):
        assert one.stat().st_size > 1000
        assert one.read_bytes() == two.read_bytes(), one.name


def test_colours_of_every_role_on_both_papers() -> None:
    data = report_data([load_run_of(make_rows())])
    looks = Looks()
    page_chart(growth_chart(data.settings[0], data.settings[0].worst), looks)
    used = set(re.findall(r"@([a-z0-9.]+)", json.dumps(looks.all)))
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
    stems = {"heat-map", "layers", "growth-worst", "radius", "entropy", "sink"}
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


def test_the_templates_are_part_of_the_package() -> None:
    from importlib.resources import files

    names = {entry.name for entry in (files("lipscope.report") / "templates").iterdir()}
    assert {"report.html.j2", "content.html.j2", "figure.html.j2", "style.css", "charts.js", "page.js", "live.js"} <= names
