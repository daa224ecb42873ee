"""Runs as files: the table of a store for other tools, and the directory that a scan writes.

``rows.csv`` and ``rows.json`` hold the rows of a scan, ``fits.csv`` the growth of σ with n, ``run.json`` what was asked for,
with which command and versions, and ``tokens.json`` the worst places token by token.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from lipscope.runs.run import Row, Run
from lipscope.runs.schema import IDENTITY_COLUMNS, KEY_COLUMNS, StoreWarning
from lipscope.runs.store import Store
from lipscope.runs.writing import csv_lines, csv_text, finite_json, write_file

FORMATS = ("parquet", "csv", "json")
RUN_FORMAT = 1
_NUMBERS = ("layer", "head", "n", "input", "document")
_FIT = ("c", "alpha", "alpha_low", "alpha_high", "level", "aic_power", "aic_saturating", "better")


def export(
    store: str | os.PathLike[str], format: str, out: str | os.PathLike[str] | None = None, *, all_plans: bool = False
) -> tuple[str | None, int]:
    """Write the rows of the last plan (or of all plans) with one column per quantity.

    Args:
        store: the file of the store; may be in use.
        format: ``"parquet"`` (needs ``lipscope[report]``; keeps the plan and the environments as metadata; a column
            of several types becomes text), ``"csv"``, or
            ``"json"`` (numbers that are not finite become null).
        out: the file to write, replaced as a whole; for CSV and JSON None returns the text instead.
        all_plans: rows of every plan that the store served.

    Returns:
        The text, or None when it went to a file; and the number of rows.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    if format == "parquet" and out is None:
        raise ValueError("Parquet is binary: say where to write it with --out FILE")
    if format == "parquet" and find_spec("pyarrow") is None:
        raise ValueError("Parquet needs pyarrow: pip install 'lipscope[report]', or use --format csv")
    with Store(store) as ledger:
        rows = ledger.rows(all_plans=all_plans)
        plan, environments = ledger.plan(), ledger.environments()
        asked, done, _ = ledger.progress()
    if done < asked:
        warnings.warn(f"the table is not complete: {done} of {asked} tasks of the plan are done", StoreWarning, stacklevel=2)
    if format == "parquet":
        assert out is not None
        write_file(out, lambda file: _write_parquet(rows, plan, environments, file))
        return None, len(rows)
    text = csv_text(rows) if format == "csv" else finite_json(rows, indent=1) + "\n"
    if out is not None:
        write_file(out, text)
    return text if out is None else None, len(rows)


def write_run(run: Run, place: Path, *, command: str | None = None, environment: Mapping[str, Any] | None = None) -> None:
    """Write a scan, the command line that makes it again, and versions and hardware into a directory, made when missing."""
    place.mkdir(parents=True, exist_ok=True)
    run.to_csv(place / "rows.csv")
    write_file(place / "rows.json", run.to_json())
    told = {
        "format": RUN_FORMAT,
        "about": dict(run.about),
        "command": command,
        "environment": None if environment is None else dict(environment),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_file(place / "run.json", json.dumps(told, indent=1))
    write_file(place / "tokens.json", json.dumps(list(run.views)))
    fits, found = place / "fits.csv", [(*where, *(getattr(fit, name) for name in _FIT)) for where, fit in run.fit().items()]
    if found:
        write_file(fits, csv_lines([("layer", "head", *_FIT), *found]))
    else:
        fits.unlink(missing_ok=True)  # of an earlier scan into the same directory


def _write_parquet(rows: list[Row], plan: str | None, environments: list[dict[str, Any]], file: IO[bytes]) -> None:
    arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    columns = list(rows[0]) if rows else [*KEY_COLUMNS, *IDENTITY_COLUMNS, "key"]
    # Key columns have a type even where all of them are empty; the others get that of their values.
    types = {name: arrow.int64() if name in _NUMBERS else arrow.string() for name in (*KEY_COLUMNS, "key")}
    named = {"integer": arrow.int64(), "number": arrow.float64(), "text": arrow.string()}
    types |= {name: named[kind] for name, kind in IDENTITY_COLUMNS.items()}
    arrays = {name: _array(arrow, [row[name] for row in rows], types.get(name)) for name in columns}
    table = arrow.table(arrays)
    about = {"lipscope.plan": plan or "", "lipscope.environments": json.dumps(environments)}
    parquet.write_table(table.replace_schema_metadata(about), file)


def _array(arrow: Any, values: list[Any], kind: Any) -> Any:
    """A column of Parquet has one type: one of numbers and words, say, becomes text, as it is in CSV."""
    try:
        return arrow.array(values, kind)
    except (arrow.ArrowInvalid, arrow.ArrowTypeError):
        text = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
        return arrow.array(text, arrow.string())
