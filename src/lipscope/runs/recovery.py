"""What can still be read of a damaged store moves into a new one; the damaged file is kept beside it.

A task survives when its own record and all its rows are readable and their checksums fit; any other task counts as not
measured and is measured again. Records are looked up one by one by their number, so a broken page costs its records only.
When the file's first page is gone, so is the list of tables; as every store is laid out alike, the first page of a fresh one
stands in for it.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lipscope.rounding import printable
from lipscope.runs.rows import connect, count_tasks, is_record, is_sound, seal
from lipscope.runs.schema import KEY_COLUMNS, RECORD, SEALED, UNREADABLE, create, is_damage
from lipscope.runs.writing import write_file

# No record of ours is smaller, which bounds their number by the file's size.
_SMALLEST_RECORD = 64
# Of a plan: whether its list of tasks is not as long as it was.
_SHORT = "task_count != (SELECT count(*) FROM plan_tasks WHERE plan = plans.id)"


@dataclass(frozen=True)
class Recovery:
    """What a recovery saved and lost."""

    problem: str
    kept_tasks: int  # tasks that were saved
    kept_rows: int  # their rows
    lost: tuple[str, ...]  # what is known about tasks that were lost: model, layer, scope, n
    lost_unnamed: int | None  # tasks that the plan asked for and of which nothing is left; they may never have been measured
    damaged: Path  # where the damaged file lies now
    other: tuple[str, ...] = ()  # what else was damaged: plans, runs, where they ran

    def __str__(self) -> str:
        lines = [
            f"The store was damaged ({self.problem}). Recovered: {self.kept_rows} rows of {self.kept_tasks} tasks.",
            f"Lost: {len(self.lost)} tasks whose record or rows could not be read" + (":" if self.lost else "."),
            *(f"  {name}" for name in self.lost[:_SHOWN]),
            *([f"  … and {len(self.lost) - _SHOWN} more"] if len(self.lost) > _SHOWN else []),
        ]
        if self.lost_unnamed is None:
            lines.append("The list of planned tasks could not be read, so tasks without any trace are not counted.")
        elif self.lost_unnamed:
            lines.append(f"Of {self.lost_unnamed} more planned tasks there is no trace: lost, or never measured.")
        lines += self.other
        lines.append(f"`lipscope sweep` measures what is missing again. The damaged file is kept as {self.damaged}.")
        return printable("\n".join(lines))


_SHOWN = 8


def damage(connection: sqlite3.Connection) -> str | None:
    """What is wrong with a store: broken pages, changed records, missing rows. None when it is sound."""
    try:
        verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if verdict != "ok":
            return " ".join(str(verdict).split())
        # Whoever was killed while making a store left a file without tables.
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        return _changed(connection) if tables else None
    except UNREADABLE as error:
        if not is_damage(error):
            raise
        return str(error)


def _changed(db: sqlite3.Connection) -> str | None:
    broken = {"rows": sum(not is_sound(record) for record in db.execute(f"SELECT {RECORD} FROM rows"))}
    for table, columns in SEALED.items():
        records = db.execute(f"SELECT {columns}, checksum FROM {table}")
        broken[table] = sum(not is_record(table, record) for record in records)
    if any(broken.values()):
        return f"{' and '.join(f'{count} {table}' for table, count in broken.items() if count)} do not fit their checksums"
    missing = {
        "tasks lack some of their rows": "tasks WHERE row_count != (SELECT count(*) FROM rows WHERE rows.task = tasks.key)",
        "rows lack their task": "rows WHERE task NOT IN (SELECT key FROM tasks)",
        "plans lack some of their tasks": f"plans WHERE {_SHORT}",
    }
    for words, where in missing.items():
        if count := db.execute(f"SELECT count(*) FROM {where}").fetchone()[0]:
            return f"{count} {words}"
    return None


def recover(path: Path, problem: str) -> Recovery | None:
    """Put a new store with all that is readable in the place of a damaged one; None when nothing is readable."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
        best: _Found | None = None
        for number, copy in enumerate(_readable_copies(path, Path(directory))):
            found = _collect(copy)
            if best is None or len(found.rows) + len(found.tasks) > len(best.rows) + len(best.tasks):
                best = found
            if number == 0 and found.tasks:
                break
        if best is None or not (best.tasks or best.records["plans"]):
            return None
        fresh = Path(directory) / "recovered.db"
        kept = _write(fresh, best)
        return _replace(path, fresh, best, kept, problem)


class _Found:
    """Everything that could be read and is as it was written."""

    def __init__(self) -> None:
        self.records: dict[str, list[tuple[Any, ...]]] = {table: [] for table in SEALED}
        self.broken: Counter[str] = Counter()  # records that are not as they were written, by table
        self.last_run = 0  # number of the last run, sound or not
        self.rows: dict[str, list[tuple[Any, ...]]] = {}
        self.listed = False  # whether the list of planned tasks could be read to its end

    @property
    def tasks(self) -> dict[str, tuple[Any, ...]]:
        return {record[1]: record for record in self.records["tasks"]}


def _collect(path: Path) -> _Found:
    found = _Found()
    with closing(connect(path)) as db, suppress(*UNREADABLE):
        most = path.stat().st_size // _SMALLEST_RECORD + 1
        for record in _by_number(db, "rows", RECORD, most):
            if is_sound(record):
                found.rows.setdefault(record[1], []).append(record)
        for table, columns in SEALED.items():
            wanted = f"{columns}, checksum"
            numbered = table != "plan_tasks"
            for record in _by_number(db, table, wanted, most) if numbered else db.execute(f"SELECT {wanted} FROM {table}"):
                if table == "runs":
                    found.last_run = max(found.last_run, record[0])
                if is_record(table, record):
                    found.records[table].append(record)
                else:
                    found.broken[table] += 1
        found.listed = True
    asked = sum(record[4] for record in found.records["plans"])
    found.broken["plan_tasks"] = max(found.broken["plan_tasks"], asked - len(found.records["plan_tasks"]))
    return found


def _by_number(db: sqlite3.Connection, table: str, columns: str, most: int) -> Iterator[tuple[Any, ...]]:
    """Records in their order or, where that does not lead to the end, one by one: those on broken pages are passed over."""
    with suppress(*UNREADABLE):
        yield from db.execute(f"SELECT {columns} FROM {table} NOT INDEXED ORDER BY id").fetchall()
        return
    query = f"SELECT {columns} FROM {table} NOT INDEXED WHERE id = ?"
    for number in range(1, most + 1):
        with suppress(*UNREADABLE):
            record = db.execute(query, (number,)).fetchone()
            if record is not None:
                yield record


def _write(path: Path, found: _Found) -> list[str]:
    """A sound store of what belongs together; returns the keys of the tasks in it."""
    kept = []
    with closing(connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")  # it goes to the disk as a whole, before it takes the old one's place
        create(db)
        db.execute("BEGIN")
        for table in ("plans", "environments", "runs", "plan_tasks"):
            db.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({_marks(SEALED[table])}, '')",
                           (record[:-1] for record in found.records[table]))  # fmt: skip
        for key, task in found.tasks.items():
            rows = found.rows.get(key, [])
            if len(rows) != task[5]:
                continue
            with suppress(sqlite3.IntegrityError):
                db.execute(f"INSERT INTO tasks ({SEALED['tasks']}) VALUES ({_marks(SEALED['tasks'])})", task[:-1])
                db.executemany(f"INSERT INTO rows ({RECORD}) VALUES ({_marks(RECORD)})", rows)
                kept.append(key)
        # At least what the plan of a run measured was asked for by it.
        incomplete = f"plan IN (SELECT id FROM plans WHERE {_SHORT}) OR plan NOT IN (SELECT id FROM plans)"
        listed = f"SELECT plan, key, '' FROM tasks JOIN runs ON tasks.run = runs.id WHERE {incomplete}"
        db.execute(f"INSERT OR IGNORE INTO plan_tasks {listed}")
        if found.last_run > db.execute("SELECT coalesce(max(id), 0) FROM runs").fetchone()[0]:
            newest = "(SELECT coalesce(max(plan), 1) FROM (SELECT plan FROM plan_tasks UNION SELECT id FROM plans))"
            now = datetime.now(UTC).isoformat()
            db.execute(f"INSERT INTO runs VALUES (?, {newest}, 'lost', 0, ?, ?, '')", (found.last_run, now, now))
        for table in SEALED:
            seal(db, table)
        for (plan,) in db.execute("SELECT id FROM plans").fetchall():
            count_tasks(db, plan)
        db.execute("COMMIT")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with path.open("rb+") as file:
        os.fsync(file)
    return kept


def _marks(columns: str) -> str:
    return ", ".join("?" * len(columns.split(",")))


def _replace(path: Path, fresh: Path, found: _Found, kept: list[str], problem: str) -> Recovery:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    damaged = path.with_name(f"{path.name}.damaged-{stamp}")
    # The old log must not be replayed into the new file.
    for suffix in ("-wal", "-shm"):
        if Path(f"{path}{suffix}").exists():
            os.replace(f"{path}{suffix}", f"{damaged}{suffix}")
    write_file(damaged, path.read_bytes())
    shutil.copymode(path, fresh)
    os.replace(fresh, path)
    lost = (found.tasks.keys() | found.rows.keys()) - set(kept)
    names = sorted(_name(found.tasks.get(key), found.rows.get(key, [])) for key in lost)
    planned = {task for _, task, _ in found.records["plan_tasks"]}
    unnamed = len(planned - found.tasks.keys() - found.rows.keys()) if found.listed else None
    rows = sum(len(found.rows.get(key, [])) for key in kept)
    other = [f"Damaged: {found.broken[table]} of its {words}." for table, words in _OTHER.items() if found.broken[table]]
    if found.broken["runs"]:
        other.append("Where the last run is not known, the newest plan counts as the last.")
    return Recovery(problem, len(kept), rows, tuple(names), unnamed, damaged, tuple(other))


_OTHER = {
    "plans": "plans; their rows are kept",
    "environments": "environments, which say where tasks ran",
    "runs": "runs",
    "plan_tasks": "entries which say what a plan asked for; `--all` exports the rows of all plans",
}


def _name(task: tuple[Any, ...] | None, rows: list[tuple[Any, ...]]) -> str:
    about = dict(zip(KEY_COLUMNS, rows[0][2:], strict=False)) if rows else {}
    if task is not None:  # its identity has a model too, but as a fingerprint: that of the labels counts
        about = json.loads(task[3]) | json.loads(task[4])
    model, layer, scope, n = (about.get(name) for name in ("model", "layer", "scope", "n"))
    return f"{model}, layer {layer}, scope {scope}, n = {n}"


def _readable_copies(path: Path, directory: Path) -> Iterator[Path]:
    """The file as it is, then with the first page of a fresh store."""
    plain, fresh, patched = (directory / f"{name}.db" for name in ("plain", "fresh", "patched"))
    shutil.copy2(path, plain)
    if Path(f"{path}-wal").exists():
        shutil.copy2(f"{path}-wal", f"{plain}-wal")
    yield plain
    content = path.read_bytes()
    with closing(connect(fresh)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        create(db)
        size: int = db.execute("PRAGMA page_size").fetchone()[0]
    page = bytearray(fresh.read_bytes()[:size])
    # Its own idea of the file's length, in pages (bytes 28 to 31 of the file format).
    page[28:32] = max(len(content) // size, 1).to_bytes(4, "big")
    patched.write_bytes(bytes(page) + content[size:])
    yield patched
