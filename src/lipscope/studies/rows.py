"""Rows of studies: the columns of a scan, then a study's own, so that ``lipscope report`` reads what every study writes.

A study measures one layer. What tells its curves from one another (a construction, a kind of attention, a law of tokens) is
in the column ``kind``; who the layer is, in ``model``, ``layer``, ``head`` and ``text``, which the caller knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from lipscope.measure.columns import COLUMNS
from lipscope.report import draw
from lipscope.report.charts import Chart
from lipscope.runs.writing import csv_text, write_file
from lipscope.spectral.result import SpectralNorm

Row = dict[str, Any]


def study_row(found: Mapping[str, Any], *, kind: str, tokens: Tensor | None = None, **own: Any) -> Row:
    """One row: every column of a scan (None where the study does not know it), ``kind``, and the study's own columns.

    ``found`` is what is known of the scan's columns, a row of ``SpectralNorm.to_rows``, say; norms of ``tokens`` (n, d) are
    columns too.

    Example:
        >>> row = study_row({"n": 8, "lower": 1.0, "estimate": 1.1, "upper": 1.2}, kind="pair", m=1)
        >>> row["layer"], row["input"], row["kind"], row["m"], row["certified"]
        (0, 0, 'pair', 1, None)
    """
    known: Row = {"layer": 0, "input": 0, "scope": "attention", **found}
    if tokens is not None:
        norms = tokens.norm(dim=-1)
        known |= {"n": len(tokens), "radius_max": float(norms.max()), "radius_rms": float(norms.square().mean().sqrt())}
    return {name: known.get(name) for name in COLUMNS} | {"text": None, "kind": kind} | own


def sigma_row(sigma: SpectralNorm, **columns: Any) -> Row:
    """The row of a σ that was measured at one input; see ``study_row``."""
    (found,) = sigma.to_rows()
    return study_row(found, **columns)


def write_study(place: Path, rows: Sequence[Row], *charts: Chart, endings: Sequence[str] = ("png", "html")) -> None:
    """Write ``rows.json``, ``rows.csv`` and charts into a directory, which is made when it does not exist."""
    place.mkdir(parents=True, exist_ok=True)
    write_file(place / "rows.json", json.dumps(list(rows), indent=1))
    write_file(place / "rows.csv", csv_text(rows))
    for chart in charts:
        draw(chart, *(place / f"{chart.name}.{ending}" for ending in endings))
