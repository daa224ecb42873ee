"""The report as one HTML file: templates with escaping on, data as inert JSON, scripts allowed by their hash alone.

The page's content security policy names the hash of every script it carries: whatever a text, a token or the name of a model
contains, nothing else can run, and nothing can be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from lipscope import __version__
from lipscope.report.data import ReportData, report_data
from lipscope.report.page import Page
from lipscope.runs.run import Row, Run, Source, load_run

TEMPLATES = Path(__file__).parent / "templates"
_SCRIPTS = ("charts.js", "page.js")


def write_report(
    source: Source, out: str | os.PathLike[str], *, compare: Source | None = None, all_plans: bool = False
) -> Path:
    """Write the report of a run, or of two side by side, as one HTML file.

    Args:
        source: the store of a sweep, what ``lipscope scan --out`` wrote, or a ``Scan``.
        out: the file to write.
        compare: a second run.
        all_plans: of a store, the rows of every plan it served.

    Returns:
        The file.

    Example:
        >>> import tempfile
        >>> from lipscope.runs.scan import Scan
        >>> row = {"model": "m", "layer": 0, "n": 8, "lower": 1.0, "estimate": 1.1, "upper": 1.2}
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     page = write_report(Scan((row,)), f"{directory}/report.html").read_text(encoding="utf-8")
        >>> "How smooth is m?" in page
        True
    """
    sources = [source] if compare is None else [source, compare]
    return save_page(report_data([load_run(one, all_plans=all_plans) for one in sources]), out)


def save_page(data: ReportData, out: str | os.PathLike[str]) -> Path:
    """Write the page of a report; refuses one without rows."""
    for run in data.runs:
        if not run.rows:
            raise ValueError(f"the run {run.name} has no rows yet: `lipscope view` shows a sweep while it runs")
    path = Path(out)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {str(path.parent)!r} for the report")
    path.write_text(render_page(Page(data), data.runs), encoding="utf-8", errors="replace")
    return path


def render_page(page: Page, runs: Sequence[Run], *, live: bool = False) -> str:
    """The whole page; ``live`` for a page that looks for new rows at the server it came from."""
    from markupsafe import Markup

    scripts = [plotly_script(), *(read_template(name) for name in (*_SCRIPTS, *(["live.js"] if live else [])))]
    text: str = _environment().get_template("report.html.j2").render(
        page=page.words, charts=page.charts, version=__version__, live=live, policy=policy(scripts, live=live),
        style=Markup(read_template("style.css")), scripts=[Markup(script) for script in scripts],
        data=Markup(inert_json(page.script)), rows=Markup(inert_json(compact_rows(runs))),
    )  # fmt: skip
    return text


def render_content(page: Page) -> str:
    """What stands between header and footer."""
    text: str = _environment().get_template("content.html.j2").render(page=page.words, charts=page.charts)
    return text


def policy(scripts: Sequence[str], *, live: bool) -> str:
    """The content security policy: these scripts, and no network but the report's own server."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def inert_json(value: Any) -> str:
    r"""JSON that cannot end the script element that holds it, whatever it contains.

    Example:
        >>> inert_json({"token": "</script>"})
        '{"token":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
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


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become null, as in an export."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return value


@cache
def read_template(name: str) -> str:
    """One of the page's own files."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


@cache
def plotly_script() -> str:
    """The Plotly library, to carry it along."""
    return str(_needed("plotly.offline").get_plotlyjs())


@cache
def _environment() -> Any:
    jinja = _needed("jinja2")
    return jinja.Environment(loader=jinja.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja.StrictUndefined)


def _needed(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ImportError(f"reports need {name.split('.')[0]}: pip install 'lipscope[report]'") from None
