"""Pages as one HTML file: a report, a chart, a document. Escaping is on, data are inert JSON, scripts run by their hash.

A page's content security policy names the hash of every script it carries: whatever a text, a token or the name of a model
contains, nothing else can run, and nothing can be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from lipscope import __version__
from lipscope.report.charts import Chart
from lipscope.report.draw_page import Looks, page_chart
from lipscope.report.page import Page
from lipscope.report.palette import palette
from lipscope.report.settings import read_data
from lipscope.report.summary import listed
from lipscope.rounding import number
from lipscope.runs.run import Row, Run, Source
from lipscope.runs.writing import finite_json, write_file

TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("plotly", "charts.js")
# What Markdown marks, in HTML; a page stands alone, so that a link is the name of the file it leads to.
_MARKS = (
    (re.compile(r"\*\*(.+?)\*\*"), r"<strong>\1</strong>"),
    (re.compile(r"\*(.+?)\*"), r"<em>\1</em>"),
    (re.compile(r"\[([^\]]+)\]\(([\w./-]+)\)"), r"\1 (<code>\2</code>)"),
)  # fmt: skip


def write_report(
    source: Source, out: str | os.PathLike[str], *, compare: Source | None = None, all_plans: bool = False
) -> Path:
    """Write the report of a run, or of two side by side, as one HTML file.

    Args:
        source: the store of a sweep, what ``lipscope scan --out`` wrote, or a ``Run``.
        out: the file to write.
        compare: a second run.
        all_plans: of a store, the rows of every plan it served.

    Returns:
        The file.

    Example:
        >>> import tempfile
        >>> from lipscope.runs.run import Run
        >>> row = {"model": "m", "layer": 0, "n": 8, "lower": 1.0, "estimate": 1.1, "upper": 1.2}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     page = write_report(Run((row,)), f"{directory}/report.html").read_text(encoding="utf-8")
        >>> "How smooth is m?" in page
        True
    """
    data = read_data(source, compare, all_plans)
    for run in data.runs:
        if not run.rows:
            raise ValueError(f"the run {run.name} has no rows yet: `lipscope view` shows a sweep while it runs")
    return write_file(out, render_page(Page(data)))


def render_page(page: Page, *, live: bool = False) -> str:
    """The page of a report; ``live`` for one that looks for new rows at the server it came from."""
    scripts = [*_SCRIPTS, "page.js", *(["live.js"] if live else [])]
    more = {"page": page.words, "charts": page.charts, "live": live}
    return _render("report.html.j2", page.words["title"], scripts, page.script, rows=compact_rows(page.runs), **more)


def render_content(page: Page) -> str:
    """What stands between header and footer."""
    return str(_environment().get_template("content.html.j2").render(page=page.words, charts=page.charts))


def render_chart(chart: Chart) -> str:
    """A chart as an interactive page of its own."""
    looks: Looks = []
    charts = {chart.name: page_chart(chart, looks)}
    data = {"palettes": {theme: palette(theme) for theme in ("light", "dark")}, "looks": looks, "charts": charts}
    return _render("chart.html.j2", chart.title, [*_SCRIPTS, "chart.js"], data, name=chart.name, charts=charts)


@dataclass(frozen=True)
class Table:
    """A table of text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it; figures are names of PNG files with their captions."""

    heading: str
    paragraphs: Sequence[str] = ()
    bullets: Sequence[str] = ()
    table: Table | None = None
    figures: Mapping[str, str] = field(default_factory=dict)
    code: str = ""  # lines to show as they are


@dataclass(frozen=True)
class Document:
    """A page of headings, paragraphs, tables and figures, as Markdown and as HTML."""

    title: str
    lead: Sequence[str]  # paragraphs below it
    sections: Sequence[Section] = ()  # the rest

    def to_markdown(self) -> str:
        """The document as Markdown; figures are links to PNG files in the directory ``figures`` beside it."""
        parts = [f"# {self.title}", *self.lead]
        for section in self.sections:
            parts += [f"## {section.heading}", *section.paragraphs]
            if section.bullets:
                parts.append("\n".join(f"- {bullet}" for bullet in section.bullets))
            if section.table is not None:
                header, rows = section.table.header, section.table.rows
                parts.append("\n".join([_line(header), "|" + "---|" * len(header), *map(_line, rows)]))
            parts += [f"```text\n{section.code}\n```"] if section.code else []
            parts += [f"![{name}](figures/{name}.png)\n\n*{caption}*" for name, caption in section.figures.items()]
        return "\n\n".join(parts) + "\n"

    def to_html(self, figures: Path) -> str:
        """The document as one HTML file with the PNG files of a directory inside."""
        names = [name for section in self.sections for name in section.figures]
        images = {name: base64.b64encode((figures / f"{name}.png").read_bytes()).decode() for name in names}
        return _render("document.html.j2", self.title, document=self, images=images)


def _line(cells: Sequence[str]) -> str:
    # A plain bar would end the cell.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _render(template: str, title: str, scripts: Sequence[str] = (), data: Any = None, rows: Any = None, **more: Any) -> str:
    """A page with its style, its scripts and its data, which nothing else can add to."""
    from markupsafe import Markup

    texts = [read_template(name) for name in scripts]
    text: str = _environment().get_template(template).render(
        title=title, version=__version__, policy=policy(texts, live=bool(more.get("live"))),
        style=Markup(read_template("style.css")), scripts=[Markup(script) for script in texts],
        data={name: Markup(inert_json(value)) for name, value in (("data", data), ("rows", rows)) if value is not None},
        **more,
    )  # fmt: skip
    return text


def policy(scripts: Sequence[str], *, live: bool) -> str:
    """The content security policy: these scripts, and no network but the report's own server."""
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts] or ["'none'"]
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {' '.join(hashes)}; style-src 'unsafe-inline'; img-src data: blob:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def inert_json(value: Any) -> str:
    r"""JSON that cannot end the script element that holds it, whatever it contains.

    Example:
        >>> inert_json({"token": "</script>"})
        '{"token":"\\u003c/script\\u003e"}'
    """
    text = finite_json(value, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # Half a surrogate pair cannot be written as UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def compact_rows(runs: Sequence[Run]) -> dict[str, Any]:
    """All rows column by column: one value where it is always the same, places in a list of words where words repeat."""
    rows: list[Row] = [({"run": run.name} if len(runs) > 1 else {}) | row for run in runs for row in run.rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns: list[dict[str, Any]] = []
    for name in names:
        values = [row.get(name) for row in rows]
        distinct = list({repr(value): value for value in values}.values())
        if len(distinct) == 1:
            columns.append({"name": name, "same": distinct[0]})
        elif any(isinstance(value, str) for value in distinct):
            places = {repr(value): place for place, value in enumerate(distinct)}
            columns.append({"name": name, "words": distinct, "places": [places[repr(value)] for value in values]})
        else:
            columns.append({"name": name, "values": values})
    return {"count": len(rows), "columns": columns}


@cache
def read_template(name: str) -> str:
    """One of the page's own files, or the Plotly library, to carry it along."""
    if name == "plotly":
        return str(needed("plotly.offline").get_plotlyjs())
    return (TEMPLATES / name).read_text(encoding="utf-8")


@cache
def _environment() -> Any:
    jinja = needed("jinja2")
    made = jinja.Environment(loader=jinja.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja.StrictUndefined)
    made.filters |= {"marked": _marked, "number": number, "listed": listed, "shown": "{:g}".format}
    return made


def _marked(text: str) -> str:
    """Escaped text, with its Markdown marks in HTML."""
    from markupsafe import Markup, escape

    parts = str(escape(text)).split("`")
    for i, part in enumerate(parts):
        for pattern, mark in _MARKS if i % 2 == 0 else ():
            part = pattern.sub(mark, part)
        parts[i] = part if i % 2 == 0 else f"<code>{part}</code>"
    return Markup("".join(parts))


def needed(name: str) -> Any:
    """A module of the extra ``report``; says how to install it where it is missing."""
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(f"figures and reports need {name.split('.')[0]}: pip install 'lipscope[report]'") from None
