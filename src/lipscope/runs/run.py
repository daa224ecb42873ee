"""A run: rows, what was asked for, and how they came about; made by a scan, or read from a store or from a scan's files.

Nothing here needs torch. ``load_run`` gives a run to a report: rows keep all their columns; those without an interval for σ
(a kind of a sweep may measure something else) are counted and left out.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lipscope.doors import read_json, reading, refuse_shape
from lipscope.measure.columns import COLUMNS
from lipscope.rounding import Shown, counted, enclosure, interval, number, printable
from lipscope.runs.writing import csv_text, read_cell, write_file

if TYPE_CHECKING:
    from lipscope.runs.fit import GrowthFit

Row = dict[str, Any]
Item = TypeVar("Item")

# Beyond it an influence matrix is more than a page shows, and its n² entries take longer than the scan itself.
LONGEST_VIEW = 48
# What stands for the name of a text that has none.
LIVE_DOCUMENTS = "a list of documents"
_SHOWN = 24
# Where a scan with --out keeps its rows as they come.
SCAN_STORE = "rows.db"
_SQLITE = b"SQLite format 3\x00"
_WHOLE_NUMBERS = ("layer", "head", "n", "input", "document", "iterations", "seed", "max_steps", "threads")
_NEEDED = ("layer", "n", "lower", "estimate", "upper")
_WORDS = ("model", "text", "kind", "scope", "mask", "dtype", "notes", "status", "solver", "upper_kind", "options", "damage")
# What a perturbation of a layer does to the outputs.
_DAMAGE = ("predicted", "predicted_low", "predicted_high", "measured", "shift", "size")
_ROW: dict[str, Any] = {
    **dict.fromkeys((*COLUMNS, *_DAMAGE), float | None), **dict.fromkeys(_WHOLE_NUMBERS, int | None),
    **dict.fromkeys(_WORDS, str | None), "converged": bool | None,
}  # fmt: skip
_STORY = dict.fromkeys(("about", "environment"), Row | None) | dict.fromkeys(("command", "created"), str | None)
_ASKED: dict[str, Any] = {"seed": int, "text": str | None, "solver": Row | str | None}
_VIEW: dict[str, Any] = {
    **dict.fromkeys(("layer", "n", "input"), int), **dict.fromkeys(("lower", "estimate", "upper"), float), "scope": str,
    "head": int | None, "tokens": list[str], "energy": list[float], "singular_values": list[float],
    "influence": list[list[float]],
}  # fmt: skip


_BOUNDS = ("certified", "refined", "castin2024", "refined_global", "castin2024_global")
_ABOUT = ("radius_rms", "max_logit", "entropy", "sink_mass", "typical", "stable_rank", "predicted", "measured")


@dataclass(frozen=True)
class Point:
    """One cell at one length, over its inputs."""

    n: int
    inputs: int  # how many
    lower: float  # least lower end
    median: float  # median estimate
    upper: float  # largest upper end
    bounds: Mapping[str, float]  # by column: those that every input has, the largest
    about: Mapping[str, float]  # what was recorded beside σ: the mean over the inputs, of the logit the largest

    @property
    def sigma(self) -> str:
        """The median and the interval that holds all inputs, in words."""
        return f"{number(self.median)} in {enclosure(self.lower, self.upper)}"


@dataclass(frozen=True)
class Provenance:
    """How a run came about; what is not known is None or empty."""

    command: str | None = None  # the command line that makes it again
    plan: str | None = None  # the plan of a sweep, as it was written
    seeds: tuple[int, ...] = ()  # where inputs lie and solvers start
    rtol: tuple[float, ...] = ()  # relative accuracies that were asked for
    delta: tuple[float, ...] = ()  # failure probabilities that were asked for
    environments: tuple[Mapping[str, Any], ...] = ()  # versions and hardware
    created: str | None = None  # when, in UTC

    @classmethod
    def of_scan(cls, run: Mapping[str, Any]) -> Provenance:
        """From what ``run.json`` holds: ``about``, ``command``, ``environment`` and ``created``."""
        about = run.get("about") or {}
        solver = about["solver"] if isinstance(about.get("solver"), dict) else {}
        asked = {"seeds": about.get("seed"), "rtol": solver.get("rtol"), "delta": solver.get("delta")}
        known: dict[str, Any] = {name: () if value is None else (value,) for name, value in asked.items()}
        where = (run["environment"],) if run.get("environment") else ()
        return cls(run.get("command"), created=run.get("created"), environments=where, **known)


def no_run(source: str | os.PathLike[str]) -> str:
    """What is said of a run that is not there."""
    return f"there is no run {str(source)!r}: name the store of a sweep or the directory of a scan"


@dataclass(frozen=True, repr=False)
class Run(Shown):
    """Rows of a scan or a sweep: plain dictionaries with the same keys, one per layer, head and input.

    ``lower``, ``estimate`` and ``upper`` are σ, beside them stand bounds, token norms and what attention looks like:
    ``lipscope.measure.columns.COLUMNS`` says what every key means.

    Attributes:
        rows: the rows.
        about: of a scan, what was asked for, as JSON values: text, lengths, inputs, seed, solver, …
        views: the worst places token by token, when they were asked for; see ``lipscope.models.tokens.TokenView.to_dict``.
        name: what the run is called on a page.
        provenance: how it came about.
        left_out: rows without an interval for σ, in a report.
        tasks: of a sweep: tasks asked for, done, failed.
        failures: why tasks failed, one line each.
        lost: of a store that was found damaged, how many tasks were lost.
        path: where it was read from, if it was.
    """

    rows: Sequence[Row]
    about: Mapping[str, Any] = field(default_factory=dict)
    views: Sequence[Row] = ()
    name: str = "scan"
    provenance: Provenance = field(default_factory=Provenance)
    left_out: int = 0
    tasks: tuple[int, int, int] | None = None
    failures: Sequence[str] = ()
    lost: int = 0
    path: Path | None = None

    @classmethod
    def read(cls, source: str | os.PathLike[str], *, all_plans: bool = False) -> Run:
        """Read the store of a sweep, or a directory or a rows file that ``lipscope scan --out`` wrote.

        Args:
            source: where it is.
            all_plans: of a store, the rows of every plan it served.

        Raises:
            FileNotFoundError: when there is nothing there.
            ValueError: when it is neither a store nor the rows of a scan; says what is missing.
        """
        path = Path(source)
        if path.is_dir():
            found = [path / name for name in ("rows.json", "rows.csv") if (path / name).is_file()]
            if found:
                return _from_files(found[0], path.name or str(path))
            if is_store(path / SCAN_STORE):  # of a scan that was killed
                return replace(_from_store(path / SCAN_STORE, all_plans), name=path.name or str(path))
            raise ValueError(
                f"{path} holds neither rows.json nor rows.csv: name a directory that `lipscope scan --out` wrote"
            )
        if not path.is_file():
            raise FileNotFoundError(no_run(source))
        if is_store(path):
            return _from_store(path, all_plans)
        return _from_files(path, path.parent.name if path.stem == "rows" and path.parent.name else path.stem)

    def __len__(self) -> int:
        return len(self.rows)

    def to_rows(self) -> list[Row]:
        """The rows."""
        return list(self.rows)

    def csv_text(self) -> str:
        """The rows as CSV."""
        return csv_text(self.rows)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as CSV."""
        write_file(path, self.csv_text())

    def to_json(self) -> str:
        """The rows as JSON."""
        return json.dumps(list(self.rows), indent=1)

    def fit(self, *, level: float = 0.95, seed: int = 0) -> dict[tuple[int, int | None], GrowthFit]:
        """σ against n: a power law, and a saturating curve to compare, for every (layer, head) that ``fit_growth`` takes."""
        from lipscope.runs.fit import can_fit, fit_growth

        points = {place: [[r[of] for r in rows] for of in ("n", "estimate")] for place, rows in by_place(self.rows).items()}
        return {place: fit_growth(*found, level=level, seed=seed) for place, found in points.items() if can_fit(*found)}

    def worst(self) -> list[Row]:
        """One summary per (layer, head), the largest median σ at the longest length first."""
        summaries = []
        for (layer, head), rows in by_place(self.rows).items():
            point = point_of(at_longest(rows))
            sigma = {name: getattr(point, name) for name in ("n", "inputs", "median", "lower", "upper")}
            about = {name: point.about.get(name) for name in ("radius_rms", "entropy", "sink_mass", "max_logit")}
            summaries.append({"layer": layer, "head": head} | sigma | about)
        return sorted(summaries, key=lambda s: -float(s["median"]))

    def __str__(self) -> str:
        if not self.rows:
            return "empty run"
        first = self.rows[0]
        lines = [f"{first['model']}: {counted(len(self.rows), 'measurement')} of σ[{first['scope']}], {first['dtype']}"]
        lines += [f"  note: {first['notes']}"] if first["notes"] else []
        for s in self.worst()[:_SHOWN]:
            where = place_words(first["scope"], s["layer"], s["head"])
            lines.append(
                f"  {where}: median σ = {s['median']:.4g} at n = {s['n']}, all in {interval(s['lower'], s['upper'])}"
            )
        return printable("\n".join(lines))


def place_words(scope: str | None, layer: int, head: int | None) -> str:
    """Which map of a model was measured.

    Example:
        >>> place_words("head", 4, 10), place_words("model", 0, None)
        ('layer 4, head 10', 'the whole model')
    """
    return "the whole model" if scope == "model" else f"layer {layer}" + ("" if head is None else f", head {head}")


Source = str | os.PathLike[str] | Run


def load_run(source: Source, *, all_plans: bool = False) -> Run:
    """A run, or what ``Run.read`` takes, as a report shows it: rows with an interval, all with the columns it looks at.

    Example:
        >>> row = {"model": "m", "layer": 0, "n": 8, "lower": 1.0, "estimate": 1.1, "upper": 1.2}
        >>> load_run(Run((row,))).rows[0]["scope"] is None
        True
    """
    run = source if isinstance(source, Run) else Run.read(source, all_plans=all_plans)
    common = dict.fromkeys(name for name in (*COLUMNS, "text", "kind", "options") if name not in _NEEDED)
    rows = [common | dict(row) for row in run.rows]
    lacking = [column for column in _NEEDED if all(column not in row for row in run.rows)]
    if rows and lacking:
        raise ValueError(f"the rows of {run.name} have no column {lacking[0]!r}: they do not come from a scan or a sweep")
    # One value of every type in a column stands for all, but for integers that no float holds.
    kinds = {
        (name, type(value), type(value) is int and abs(value) >> 63): value for row in rows for name, value in row.items()
    }
    for (name, *_), value in kinds.items():
        refuse_shape(f"a row of {run.name}", {name: value}, _ROW)
    for row in rows:
        row["text"] = row["text"] if row["text"] is not None else run.about.get("text")
    kept = [row for row in rows if all(_known([row], column) for column in _NEEDED)]
    return replace(run, rows=kept, left_out=run.left_out + len(rows) - len(kept))


def is_store(path: Path) -> bool:
    """Whether a file is an SQLite database; opening it as a store says whether it is ours."""
    if not path.is_file():
        return False
    with reading(path), path.open("rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE


def grouped(items: Iterable[Item], key: Callable[[Item], Any]) -> dict[Any, list[Item]]:
    """Items by what a function says of them, in the order in which they come."""
    groups: dict[Any, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def by_place(rows: Iterable[Row]) -> dict[tuple[int, int | None], list[Row]]:
    """Rows by (layer, head), without those of single documents in a packed input."""
    return grouped((row for row in rows if row["document"] is None), itemgetter("layer", "head"))


def point_of(rows: Sequence[Row]) -> Point:
    """What rows of one place and length say together."""
    return Point(
        rows[0]["n"],
        len(rows),
        lower=min(row["lower"] for row in rows),
        median=statistics.median(row["estimate"] for row in rows),
        upper=max(row["upper"] for row in rows),
        # A bound of some inputs is not a bound of all.
        bounds={bound: max(values) for bound in _BOUNDS if len(values := _known(rows, bound)) == len(rows)},
        about={
            name: float(max(values) if name == "max_logit" else statistics.fmean(values))
            for name in _ABOUT
            if (values := _known(rows, name))
        },
    )


def _known(rows: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None and math.isfinite(row[name])]


def at_longest(rows: Iterable[Row]) -> list[Row]:
    """The rows at the longest length."""
    known = list(rows)
    longest = max(row["n"] for row in known)
    return [row for row in known if row["n"] == longest]


def worst_inputs(rows: Iterable[Row], count: int) -> list[Row]:
    """For the ``count`` layers or heads with the largest median σ at their longest n, the row of their worst input.

    That input is looked for at the longest measured n up to ``LONGEST_VIEW``; at the shortest when all are longer.

    Example:
        >>> cell = {"layer": 0, "head": None, "document": None, "n": 8}
        >>> rows = [cell | {"input": 0, "estimate": 1.0}, cell | {"input": 1, "estimate": 3.0}]
        >>> [row["input"] for row in worst_inputs(rows, 1)]
        [1]
    """
    ranked = sorted(by_place(rows).values(), key=lambda cell: -statistics.median(r["estimate"] for r in at_longest(cell)))
    found = []
    for cell in ranked[:count]:
        lengths = {row["n"] for row in cell}
        n = max((n for n in lengths if n <= LONGEST_VIEW), default=min(lengths))
        found.append(max((row for row in cell if row["n"] == n), key=lambda row: row["estimate"]))
    return found


def _from_store(path: Path, all_plans: bool) -> Run:
    from lipscope.runs.store import Store

    with Store(path) as store:
        rows, views = store.rows(all_plans=all_plans), store.views(all_plans=all_plans)
        plan, environments = store.plan(), store.environments()
        tasks, failures, recovery = store.progress(), store.failures(), store.recovery
    reasons = [
        f"{failure['model']}, layer {failure['layer']}, scope {failure['scope']}, n = {failure['n']}: {failure['error']}"
        for failure in failures
    ]
    provenance = Provenance(
        command=None if path.name == SCAN_STORE else f"lipscope sweep plan.toml --store {path.name}",
        plan=plan,
        seeds=_values(rows, "seed"),
        rtol=_values(rows, "rtol"),
        delta=_values(rows, "delta_asked"),
        environments=tuple(environments),
    )
    lost = 0 if recovery is None else len(recovery.lost) + (recovery.lost_unnamed or 0)
    return Run(rows, {}, views, path.stem, provenance, tasks=tasks, failures=reasons, lost=lost, path=path)


def _from_files(path: Path, name: str) -> Run:
    with reading(path):
        data = path.read_bytes()
    try:
        text = data.decode("utf-8")
        if path.suffix == ".csv":
            lines = csv.DictReader(io.StringIO(text, newline=""))
            rows = [{read_cell(name): _value(name, cell) for name, cell in line.items()} for line in lines]
        else:
            rows = json.loads(text)
    except (ValueError, csv.Error, RecursionError) as error:
        raise ValueError(f"{path} is neither a store nor the rows of a scan: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is not the rows of a scan: it must be a list of rows")
    file, views_file = path.with_name("run.json"), path.with_name("tokens.json")
    told = read_json(file, dict) if file.is_file() else {}
    about, environment = told.get("about") or {}, told.get("environment") or {}
    solver = about.get("solver") if isinstance(about, dict) and isinstance(about.get("solver"), dict) else {}
    for part, shape in ((told, _STORY), (about, _ASKED), (solver, dict.fromkeys(("rtol", "delta"), float | None)),
                        (environment, {"versions": Row})):  # fmt: skip
        refuse_shape(str(file), part, shape)
    views = read_json(views_file, list) if views_file.is_file() else []
    for view in views:
        refuse_shape(str(views_file), view, _VIEW, whole=True)
    return Run(rows, about, views, name, Provenance.of_scan(told), path=path)


def _value(name: str, cell: str | None) -> Any:
    if not cell:
        return None
    if cell in ("True", "False"):
        return cell == "True"
    if name in _WHOLE_NUMBERS:
        return int(cell)
    with suppress(ValueError):
        return read_cell(cell) if name in _WORDS else float(cell)
    return read_cell(cell)


def _values(rows: Sequence[Row], name: str) -> tuple[Any, ...]:
    return tuple(sorted({row[name] for row in rows if row.get(name) is not None}))
