"""What can still be read of a damaged store moves into a new one; the damaged file is kept beside it.

A task survives when its own record and all its rows are readable and their checksums fit; any other task counts as not
measured and is measured again. Records are looked up one by one by their number, so a broken page costs its records only.
When the file's first page is gone, so is the list of tables; as every store is laid out alike, the first page of a fresh one
stands in for it.
"""

from __future__ import annotations

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
from lipscope.runs import schema
from lipscope.runs.writing import write_file

# No record of ours is smaller, which bounds their number by the file's size.
_SMALLEST_RECORD = 64
# What does not belong together.
_LACKING = "tasks WHERE row_count != (SELECT count(*) FROM rows WHERE rows.task = tasks.key)"
_ORPHANS = "rows WHERE task NOT IN (SELECT key FROM tasks)"
_SHORT = "plans WHERE task_count != (SELECT count(*) FROM plan_tasks WHERE plan = plans.id)"
_OTHER = {
    "plans": "plans; their rows are kept",
    "environments": "environments, which say where tasks ran",
    "runs": "runs",
    "plan_tasks": "entries which say what a plan asked for; `--all` exports the rows of all plans",
}
_SHOWN = 8


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


def damage(path: Path) -> str | None:
    """What is wrong with a store: broken pages, changed records, missing rows; None for nothing. Refuses other files."""
    with closing(schema.connect(path)) as db:
        try:
            asked = ("PRAGMA user_version", "PRAGMA application_id", "SELECT count(*) FROM sqlite_schema")
            version, kind, tables = (db.execute(query).fetchone()[0] for query in asked)
            ours = schema.has_our_tables(db)
            if tables and not ours and kind != schema.APPLICATION_ID:
                raise schema.ForeignFileError(f"{path} is a database, but not a lipscope store: name another --store")
            if not ours and version not in (0, schema.VERSION):
                raise schema.StoreVersionError(
                    f"{path} was written by another version of lipscope (schema {version}; this one knows "
                    f"{schema.VERSION}): read it with that version, or name another --store. It was not changed"
                )
            if tables and (not ours or (version, kind) != (schema.VERSION, schema.APPLICATION_ID)):
                return f"its header says schema {version} of kind {kind:#x}, but its tables do not"
            verdict = str(db.execute("PRAGMA integrity_check(1)").fetchone()[0])
            if verdict != "ok":
                return " ".join(verdict.split())
            # Whoever was killed while making a store left a file without tables.
            return _changed(db) if tables else None
        except schema.UNREADABLE as error:
            if schema.is_damage(error):
                return str(error)
            raise


def _changed(db: sqlite3.Connection) -> str | None:
    broken = []
    for table, columns in schema.SEALED.items():
        records = db.execute(f"SELECT {columns}, checksum FROM {table}")
        if count := sum(not schema.is_record(table, record) for record in records):
            broken.append(f"{count} {table}")
    if broken:
        return f"{' and '.join(broken)} do not fit their checksums"
    missing = {
        "tasks lack some of their rows": _LACKING,
        "rows lack their task": _ORPHANS,
        "plans lack some of their tasks": _SHORT,
    }
    return next((f"{count} {words}" for words, what in missing.items() if (count := _count(db, what))), None)


def _count(db: sqlite3.Connection, what: str) -> int:
    return int(db.execute(f"SELECT count(*) FROM {what}").fetchone()[0])


def recover(path: Path, problem: str) -> Recovery | None:
    """Put a new store with all that is readable in the place of a damaged one; None when nothing is readable."""
    found = []
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as directory:
        for copy in _readable_copies(path, Path(directory)):
            with closing(copy):
                found.append(_Saved(copy, path.stat().st_size // _SMALLEST_RECORD + 1))
            if _count(found[-1].db, "tasks"):
                break
        best = max(found, key=lambda saved: _count(saved.db, "rows") + _count(saved.db, "tasks"))
        if not (_count(best.db, "tasks") or _count(best.db, "plans")):
            return None
        lost, unnamed = best.put_in_order()
        fresh = Path(directory) / "recovered.db"
        with closing(sqlite3.connect(fresh)) as file:
            best.db.backup(file)  # on the disk, before it takes the old one's place
            file.execute("PRAGMA journal_mode = WAL")
        damaged = path.with_name(f"{path.name}.damaged-{datetime.now(UTC):%Y%m%d-%H%M%S}")
        # The old log must not be replayed into the new file.
        for suffix in ("-wal", "-shm"):
            if Path(f"{path}{suffix}").exists():
                os.replace(f"{path}{suffix}", f"{damaged}{suffix}")
        write_file(damaged, path.read_bytes())
        shutil.copymode(path, fresh)
        os.replace(fresh, path)
    other = [f"Damaged: {best.broken[table]} of its {words}." for table, words in _OTHER.items() if best.broken[table]]
    if best.broken["runs"]:
        other.append("Where the last run is not known, the newest plan counts as the last.")
    kept = _count(best.db, "tasks"), _count(best.db, "rows")
    return Recovery(problem, *kept, tuple(sorted(lost)), unnamed, damaged, tuple(other))


def _readable_copies(path: Path, directory: Path) -> Iterator[sqlite3.Connection]:
    """The file as it is, then with the first page of a fresh store."""
    plain = directory / "plain.db"
    shutil.copy2(path, plain)
    if Path(f"{path}-wal").exists():
        shutil.copy2(f"{path}-wal", f"{plain}-wal")
    yield schema.connect(plain)
    patched, content = schema.connect(":memory:"), path.read_bytes()
    schema.create(patched)
    size: int = patched.execute("PRAGMA page_size").fetchone()[0]
    page = bytearray(patched.serialize()[:size])
    # Its own idea of the file's length, in pages (bytes 28 to 31 of the file format).
    page[28:32] = max(len(content) // size, 1).to_bytes(4, "big")
    patched.deserialize(bytes(page) + content[size:])
    yield patched


class _Saved:
    """A new store, in memory, of every record of a damaged one that is as it was written."""

    def __init__(self, damaged: sqlite3.Connection, most: int) -> None:
        self.db = schema.connect(":memory:")
        self.broken: Counter[str] = Counter()  # records that are not as they were written, by table
        self.last_run = 0  # number of the last run, sound or not
        self.listed = False  # whether the list of planned tasks could be read to its end
        schema.create(self.db)
        with suppress(*schema.UNREADABLE):
            for table, columns in schema.SEALED.items():
                marks = ", ".join("?" * len(columns.split(",")))
                insert = f"INSERT OR IGNORE INTO {table} ({columns}, checksum) VALUES ({marks}, ?)"
                for record in _records(damaged, table, f"{columns}, checksum", most):
                    if table == "runs":
                        self.last_run = max(self.last_run, record[0])
                    if schema.is_record(table, record):
                        self.db.execute(insert, record)
                    else:
                        self.broken[table] += 1
            self.listed = True
        asked = self.db.execute("SELECT coalesce(sum(task_count), 0) FROM plans").fetchone()[0]
        self.broken["plan_tasks"] = max(self.broken["plan_tasks"], asked - _count(self.db, "plan_tasks"))

    def put_in_order(self) -> tuple[list[str], int | None]:
        """Keep what belongs together; returns the names of the tasks that are lost, and how many left no trace."""
        db = self.db
        traceless = "plan_tasks WHERE task NOT IN (SELECT key FROM tasks UNION SELECT task FROM rows)"
        unnamed: int = db.execute(f"SELECT count(DISTINCT task) FROM {traceless}").fetchone()[0]
        # The identity of a task has a model too, but as a fingerprint: that of the labels counts.
        told = [("labels", "model"), *(("identity", name) for name in ("layer", "scope", "n"))]
        names = ", ".join(f"json_extract({column}, '$.{name}')" for column, name in told)
        query = f"SELECT {names} FROM {_LACKING} UNION ALL SELECT model, layer, scope, n FROM {_ORPHANS} GROUP BY task"
        lost = ["{}, layer {}, scope {}, n = {}".format(*place) for place in db.execute(query)]
        db.execute(f"DELETE FROM {_LACKING}")
        db.execute(f"DELETE FROM {_ORPHANS}")
        # At least what the plan of a run measured was asked for by it.
        incomplete = f"plan IN (SELECT id FROM {_SHORT}) OR plan NOT IN (SELECT id FROM plans)"
        measured = f"SELECT plan, key, '' FROM tasks JOIN runs ON tasks.run = runs.id WHERE {incomplete}"
        db.execute(f"INSERT OR IGNORE INTO plan_tasks {measured}")
        if self.last_run > db.execute("SELECT coalesce(max(id), 0) FROM runs").fetchone()[0]:
            newest = "(SELECT coalesce(max(plan), 1) FROM (SELECT plan FROM plan_tasks UNION SELECT id FROM plans))"
            now = datetime.now(UTC).isoformat()
            db.execute(f"INSERT INTO runs VALUES (?, {newest}, 'lost', 0, ?, ?, '')", (self.last_run, now, now))
        for table in ("runs", "plan_tasks"):
            schema.seal(db, table)
        for (plan,) in db.execute("SELECT id FROM plans").fetchall():
            schema.count_tasks(db, plan)
        return lost, unnamed if self.listed else None


def _records(db: sqlite3.Connection, table: str, columns: str, most: int) -> Iterator[tuple[Any, ...]]:
    """Records in their order or, where that does not lead to the end, one by one: those on broken pages are passed over."""
    if table == "plan_tasks":  # which have no numbers
        yield from db.execute(f"SELECT {columns} FROM {table}")
        return
    with suppress(*schema.UNREADABLE):
        yield from db.execute(f"SELECT {columns} FROM {table} NOT INDEXED ORDER BY id").fetchall()
        return
    query = f"SELECT {columns} FROM {table} NOT INDEXED WHERE id = ?"
    for number in range(1, most + 1):
        with suppress(*schema.UNREADABLE):
            record = db.execute(query, (number,)).fetchone()
            if record is not None:
                yield record
