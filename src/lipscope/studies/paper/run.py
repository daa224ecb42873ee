"""``reproduce``: measure every experiment of the paper that is not measured yet, and write figures, tables and pages.

Rows are kept in ``RUN.db`` in the output directory; a run that is stopped goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lipscope.attention.layer import Attention
from lipscope.models.corpora import CORPORA, read_text
from lipscope.models.text import chunks_of
from lipscope.report import draw
from lipscope.report.html import needed
from lipscope.runs.engines import Engine
from lipscope.runs.plan import ModelChoice
from lipscope.runs.store import Store
from lipscope.runs.sweep import Progress, Summary, run_plan
from lipscope.runs.tasks import expand
from lipscope.runs.work import forget_models, loaded_model
from lipscope.runs.writing import csv_text, write_file
from lipscope.studies.paper import analysis
from lipscope.studies.paper.analysis import Row
from lipscope.studies.paper.cast import Cast, chosen_layers, find_cast, weights_of
from lipscope.studies.paper.charts import charts
from lipscope.studies.paper.differences import textbook_seconds
from lipscope.studies.paper.pages import findings_page, reproduction_page
from lipscope.studies.paper.plan import FULL, GROWTH, LONG, SECOND_TEXT, Settings, paper_plan, paper_text

STORE = "RUN.db"
_SAMPLES = 2


@dataclass(frozen=True)
class Reproduction:
    """What a run left behind."""

    directory: Path
    rows: list[Row]
    summary: Summary
    # Seconds that the textbook loop would need for the values of σ on real text, and how that was found.
    textbook: dict[str, Any]


def reproduce(
    out: str | os.PathLike[str],
    settings: Settings = FULL,
    *,
    bert: str | None = None,
    gpt2: str | None = None,
    engine: Engine | None = None,
    retry_failed: bool = False,
    progress: Progress | None = None,
    notice: Callable[[str], None] = lambda message: None,
) -> Reproduction:
    """Run the paper's experiments, and write what they show into the directory ``out``.

    ``bert`` and ``gpt2`` are those of ``cast.find_cast``. ``notice`` is called with what the user should know: stand-ins, a
    damaged store. Where figures cannot be drawn, that is refused before anything is measured.
    """
    for name in ("matplotlib", "plotly", "jinja2"):
        needed(name)
    directory = Path(out)
    directory.mkdir(parents=True, exist_ok=True)
    cast = find_cast(bert, gpt2)
    plan = paper_plan(settings, cast)
    for member in cast.members:
        if member.stands_for and not member.masked:
            notice(f"{member.name} stands in for {member.stands_for}, which is not on this machine")
    expansion = expand(plan)
    if engine is not None:
        forget_models()  # workers load their own
    summary = run_plan(
        expansion, directory / STORE, engine=engine, retry_failed=retry_failed, progress=progress, notice=notice
    )
    with Store(directory / STORE) as store:
        rows = store.rows()
        seconds = store.seconds()
    textbook = _textbook(rows, cast, settings, {job.model: job.fingerprint for job in expansion.jobs})
    about = {"mode": settings.name, "measured_seconds": seconds, "threads": settings.threads, "text": paper_text(),
             "second": getattr(CORPORA[SECOND_TEXT].find(), "name", None), "textbook": textbook}  # fmt: skip
    write_results(rows, cast, settings, about, directory)
    return Reproduction(directory, rows, summary, textbook)


def write_results(rows: Sequence[Row], cast: Cast, settings: Settings, about: dict[str, Any], directory: Path) -> list[Path]:
    """Write figures, tables and pages from rows; nothing is measured.

    ``about`` holds the mode, seconds, threads, the text and the textbook's time.
    """
    pictures = directory / "figures"
    pictures.mkdir(exist_ok=True)
    files, drawn = [], charts(rows, cast)
    for chart in drawn:
        files += draw(chart, *(pictures / f"{chart.name}.{ending}" for ending in ("png", "pdf", "html")))
    found = findings_page(rows, cast, about, drawn)
    reproduced = reproduction_page(rows, cast, settings, about)
    for name, text in (
        ("FINDINGS.md", found.to_markdown()),
        ("findings.html", found.to_html(pictures)),
        ("reproduction.md", reproduced.to_markdown()),
        ("FINDINGS.csv", csv_text([one._asdict() for one in analysis.every_number(rows)])),
    ):
        files.append(write_file(directory / name, text))
    return files


def _textbook(
    rows: Sequence[Row], cast: Cast, settings: Settings, fingerprints: Mapping[ModelChoice, str]
) -> dict[str, Any]:
    """The textbook loop on one input each of the first models whose weights make plain attention."""
    ours = list(analysis.of(rows, GROWTH, LONG))
    points = [(row["n"], row["width"]) for row in ours]
    samples: list[tuple[Attention, torch.Tensor]] = []
    n = settings.lengths[len(settings.lengths) // 2]
    for member in cast.members:
        if len(samples) == _SAMPLES or member.masked:
            continue
        handle = loaded_model(member.choice, None, fingerprints.get(member.choice)).handle
        layer = chosen_layers(len(handle.layers), "first and middle")[-1]
        weights = weights_of(handle, layer)
        if weights is None or weights.kv_heads != weights.heads:
            continue
        ids = chunks_of(handle, read_text(paper_text()), n)
        samples.append((weights, handle.record(input_ids=ids)[layer].tokens()[0]))
    if not samples or not points:
        return {}
    own = sum(row["seconds"] for row in ours)
    return textbook_seconds(samples, points) | {"points": len(points), "own_seconds": own}
