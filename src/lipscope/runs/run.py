"""One run, wherever it comes from: the store of a sweep, the files of a scan, or a ``Scan`` itself, as rows and their story.

Everything a report shows is made from a ``Run``. Rows keep all their columns; those without an interval for σ (a kind of a
sweep may measure something else) are counted and left out.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lipscope.runs.scan import Scan

Row = dict[str, Any]
Source = str | os.PathLike[str] | Scan

_SQLITE = b"SQLite format 3\x00"
_WHOLE = ("layer", "head", "n", "input", "document", "iterations", "seed", "max_steps", "threads")
_NEEDED = ("layer", "n", "lower", "estimate", "upper")


@dataclass(frozen=True)
class Story:
    """How a run came about; what is not known is None or empty.

    Attributes:
        command: the command line that makes it again.
        plan: the plan of a sweep, as it was written.
        seeds: where inputs lie and solvers start.
        rtol: relative accuracies that were asked for.
        delta: failure probabilities that were asked for.
        environments: versions and hardware.
        created: when, in UTC.
    """

    command: str | None = None
    plan: str | None = None
    seeds: tuple[int, ...] = ()
    rtol: tuple[float, ...] = ()
    delta: tuple[float, ...] = ()
    environments: tuple[Mapping[str, Any], ...] = ()
    created: str | None = None


@dataclass(frozen=True)
class Run:
    """Rows and their story.

    Attributes:
        name: what the run is called on the page.
        rows: its rows, all with the same columns.
        story: how it came about.
        views: token views, as ``TokenView.to_dict`` writes them, with ``model`` and ``text``.
        left_out: rows without an interval for σ.
        tasks: of a sweep: tasks asked for, done, failed.
        failures: why tasks failed, one line each.
        path: where it was read from, None for a ``Scan``.
    """

    name: str
    rows: Sequence[Row]
    story: Story = field(default_factory=Story)
    views: Sequence[Row] = ()
    left_out: int = 0
    tasks: tuple[int, int, int] | None = None
    failures: Sequence[str] = ()
    path: Path | None = None


def load_run(source: Source, *, all_plans: bool = False) -> Run:
    """Read a run.

    Args:
        source: the store of a sweep, a directory or a rows file that ``lipscope scan --out`` wrote, or a ``Scan``.
        all_plans: of a store, the rows of every plan it served.

    Raises:
        FileNotFoundError: when there is nothing there.
        ValueError: when it is neither a store nor the rows of a scan; says what is missing.

    Example:
        >>> row = {"model": "m", "layer": 0, "n": 8, "lower": 1.0, "estimate": 1.1, "upper": 1.2}
        >>> load_run(Scan((row,))).rows[0]["scope"] is None
        True
    """
    if isinstance(source, Scan):
        views = [{"model": source.about.get("model"), "text": source.about.get("text"), **v.to_dict()} for v in source.views]
        return _run("scan", source.rows, _story({"about": source.about}), views, text=source.about.get("text"))
    path = Path(source)
    if path.is_dir():
        found = [path / name for name in ("rows.json", "rows.csv") if (path / name).is_file()]
        if not found:
            raise ValueError(
                f"{path} holds neither rows.json nor rows.csv: name a directory that `lipscope scan --out` wrote"
            )
        return _scan_files(found[0], path.name or str(path))
    if not path.is_file():
        raise FileNotFoundError(f"there is no run {str(source)!r}: name the store of a sweep or the directory of a scan")
    if is_store(path):
        return _store(path, all_plans)
    return _scan_files(path, path.parent.name if path.stem == "rows" and path.parent.name else path.stem)


def is_store(path: Path) -> bool:
    """Whether a file is an SQLite database; opening it as a store says whether it is ours."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def _store(path: Path, all_plans: bool) -> Run:
    from lipscope.runs.store import Store

    with Store(path) as store:
        rows, plan, environments = store.rows(all_plans=all_plans), store.plan(), store.environments()
        tasks, failures = store.progress(), store.failures()
    reasons = [
        f"{failure['model']}, layer {failure['layer']}, scope {failure['scope']}, n = {failure['n']}: {failure['error']}"
        for failure in failures
    ]
    story = Story(
        command=f"lipscope sweep plan.toml --store {path.name}", plan=plan, seeds=_values(rows, "seed"),
        rtol=_values(rows, "rtol"), delta=_values(rows, "delta_asked"), environments=tuple(environments),
    )  # fmt: skip
    return _run(path.stem, rows, story, [], tasks=tasks, failures=reasons, path=path)


def _scan_files(path: Path, name: str) -> Run:
    try:
        text = path.read_text(encoding="utf-8")
        rows = _from_csv(text) if path.suffix == ".csv" else json.loads(text)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{path} is neither a store nor the rows of a scan: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is not the rows of a scan: it must be a list of rows")
    about = _beside(path, "run.json", {})
    views = _beside(path, "tokens.json", [])
    return _run(name, rows, _story(about), views, text=(about.get("about") or {}).get("text"), path=path)


def _beside(path: Path, name: str, default: Any) -> Any:
    file = path.with_name(name)
    if not file.is_file():
        return default
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from None
    if not isinstance(found, type(default)):
        raise ValueError(f"{file} is not what `lipscope scan --out` writes")
    return found


def _story(run: Mapping[str, Any]) -> Story:
    about = run.get("about") or {}
    solver = about.get("solver")
    options = solver if isinstance(solver, dict) else {}
    return Story(
        command=run.get("command"), created=run.get("created"),
        seeds=() if "seed" not in about else (about["seed"],),
        rtol=() if "rtol" not in options else (options["rtol"],),
        delta=() if "delta" not in options else (options["delta"],),
        environments=(run["environment"],) if run.get("environment") else (),
    )  # fmt: skip


def _run(
    name: str, rows: Sequence[Mapping[str, Any]], story: Story, views: Sequence[Row], *, text: str | None = None, **more: Any
) -> Run:
    """The rows that hold an interval, all with the columns that a report looks at."""
    common = dict.fromkeys(("model", "text", "kind", "options", *_OPTIONAL))
    complete = [common | dict(row) for row in rows]
    if complete:
        for column in _NEEDED:
            if all(column not in row for row in rows):
                raise ValueError(f"the rows of {name} have no column {column!r}: they do not come from a scan or a sweep")
    for row in complete:
        row["text"] = row["text"] if row["text"] is not None else text
    kept = [row for row in complete if all(_finite(row.get(column)) for column in _NEEDED)]
    return Run(name, kept, story, views, len(complete) - len(kept), **more)


def _from_csv(text: str) -> list[Row]:
    return [{name: _value(name, cell) for name, cell in row.items()} for row in csv.DictReader(text.splitlines())]


def _value(name: str, cell: str | None) -> Any:
    if cell is None or cell == "":
        return None
    if cell in ("True", "False"):
        return cell == "True"
    if name in _WHOLE:
        return int(cell)
    if name in _WORDS:
        return cell
    try:
        return float(cell)
    except ValueError:
        return cell


def _values(rows: Sequence[Row], name: str) -> tuple[Any, ...]:
    return tuple(sorted({row[name] for row in rows if row.get(name) is not None}))


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_WORDS = ("model", "text", "kind", "scope", "mask", "dtype", "notes", "status", "solver", "upper_kind", "options")
_OPTIONAL = (
    "head", "scope", "mask", "input", "document", "dtype", "upper_kind", "delta", "certified", "refined", "castin2024",
    "refined_global", "castin2024_global", "radius_max", "radius_rms", "entropy", "sink_mass", "converged", "notes",
)  # fmt: skip
