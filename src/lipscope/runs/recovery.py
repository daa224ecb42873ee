"""What can still be read of a damaged store moves into a new one; the damaged file is kept beside it.

A task survives when its own record and all its rows are readable and their checksums fit; any other task counts as not
measured and is measured again. Records are looked up one by one by their number, so a broken page costs its records only.
When the file's first page is gone, so is the list of tables; as every store is laid out by the same migrations, the first
page of a fresh one stands in for it.
"""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lipscope.runs.rows import digest, is_sound
from lipscope.runs.schema import DAMAGED, KEY_COLUMNS, RECORD, VERSION, migrate, primary_code

_TASK = "key, status, identity, labels, row_count, error, trace, seconds, flops, run, environment, finished, attempts"
# No record of ours is smaller, which bounds their number by the file's size.
_SMALLEST_RECORD = 64


@dataclass(frozen=True)
class Recovery:
    """What a recovery saved and lost."""

    problem: str
    kept_tasks: int  # tasks that were saved
    kept_rows: int  # their rows
    lost: tuple[str, ...]  # what is known about tasks that were lost: model, layer, scope, n
    lost_unnamed: int | None  # tasks that the plan asked for and of which nothing is left; they may never have been measured
    damaged: Path  # where the damaged file lies now

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
        lines.append(f"What is missing is measured again. The damaged file is kept as {self.damaged}.")
        return "\n".join(lines)


_SHOWN = 8


def damage(connection: sqlite3.Connection) -> str | None:
    """What is wrong with a store: broken pages, changed rows, missing rows. None when it is sound."""
    try:
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            return " ".join(str(verdict).split())
        if connection.execute("PRAGMA user_version").fetchone()[0] < 1:
            return None
        broken = sum(not is_sound(record) for record in connection.execute(f"SELECT {RECORD} FROM rows"))
        if broken:
            return f"{broken} rows do not fit their checksums"
        short = connection.execute(
            "SELECT count(*) FROM tasks WHERE status = 'done' AND row_count != "
            "(SELECT count(*) FROM rows WHERE rows.task = tasks.key)"
        ).fetchone()[0]
    except sqlite3.DatabaseError as error:
        if primary_code(error) not in DAMAGED:
            raise
        return str(error)
    return f"{short} tasks lack some of their rows" if short else None


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
        if best is None or not (best.tasks or best.plans):
            return None
        fresh = Path(directory) / "recovered.db"
        kept = _write(fresh, best)
        return _replace(path, fresh, best, kept, problem)


class _Found:
    """Everything that could be read."""

    def __init__(self) -> None:
        self.plans: list[tuple[Any, ...]] = []
        self.environments: list[tuple[Any, ...]] = []
        self.runs: list[tuple[Any, ...]] = []
        self.tasks: dict[str, tuple[Any, ...]] = {}
        self.rows: dict[str, list[tuple[Any, ...]]] = {}
        self.planned: list[tuple[Any, ...]] | None = None


def _collect(path: Path) -> _Found:
    found = _Found()
    with closing(sqlite3.connect(path, isolation_level=None)) as db, suppress(sqlite3.DatabaseError):
        migrate(db)
        most = path.stat().st_size // _SMALLEST_RECORD + 1
        found.plans = list(_by_number(db, "plans", "id, digest, text, created", most))
        found.environments = list(_by_number(db, "environments", "id, digest, content", most))
        found.runs = list(_by_number(db, "runs", "id, plan, engine, environment, started, finished", most))
        found.tasks = {record[0]: record for record in _by_number(db, "tasks", _TASK, most) if _is_task(record)}
        for record in _by_number(db, "rows", RECORD, most):
            if is_sound(record):
                found.rows.setdefault(record[1], []).append(record)
        with suppress(sqlite3.DatabaseError):
            found.planned = db.execute("SELECT plan, task FROM plan_tasks").fetchall()
    return found


def _by_number(db: sqlite3.Connection, table: str, columns: str, most: int) -> Iterator[tuple[Any, ...]]:
    """Records one by one; those on broken pages are passed over."""
    query = f"SELECT {columns} FROM {table} NOT INDEXED WHERE id = ?"
    for number in range(1, most + 1):
        with suppress(sqlite3.DatabaseError, UnicodeDecodeError):
            record = db.execute(query, (number,)).fetchone()
            if record is not None:
                yield record


def _is_task(record: tuple[Any, ...]) -> bool:
    try:
        return bool(digest(json.loads(record[2])) == record[0]) and isinstance(json.loads(record[3]), dict)
    except (TypeError, ValueError):
        return False


def _write(path: Path, found: _Found) -> list[str]:
    """A sound store of what belongs together; returns the keys of the tasks in it."""
    kept = []
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        migrate(db)
        db.execute("BEGIN")
        for table, records in (("plans", found.plans), ("environments", found.environments), ("runs", found.runs)):
            for record in records:
                with suppress(sqlite3.IntegrityError):
                    db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(record))})", record)
        for key, task in found.tasks.items():
            rows = found.rows.get(key, [])
            if len(rows) != task[4]:
                continue
            with suppress(sqlite3.IntegrityError):
                db.execute(f"INSERT INTO tasks ({_TASK}) VALUES ({', '.join('?' * len(task))})", task)
                db.executemany(f"INSERT INTO rows ({RECORD}) VALUES ({', '.join('?' * len(RECORD.split(',')))})", rows)
                kept.append(key)
        db.executemany("INSERT OR IGNORE INTO plan_tasks VALUES (?, ?)", found.planned or [])
        db.execute("COMMIT")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return kept


def _replace(path: Path, fresh: Path, found: _Found, kept: list[str], problem: str) -> Recovery:
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    damaged = path.with_name(f"{path.name}.damaged-{stamp}")
    # The old log must not be replayed into the new file.
    for suffix in ("-wal", "-shm"):
        if Path(f"{path}{suffix}").exists():
            os.replace(f"{path}{suffix}", f"{damaged}{suffix}")
    shutil.copy2(path, damaged)
    os.replace(fresh, path)
    lost = (found.tasks.keys() | found.rows.keys()) - set(kept)
    names = sorted(_name(found.tasks.get(key), found.rows.get(key, [])) for key in lost)
    planned = None if found.planned is None else {task for _, task in found.planned}
    unnamed = None if planned is None else len(planned - found.tasks.keys() - found.rows.keys())
    rows = sum(len(found.rows.get(key, [])) for key in kept)
    return Recovery(problem, len(kept), rows, tuple(names), unnamed, damaged)


def _name(task: tuple[Any, ...] | None, rows: list[tuple[Any, ...]]) -> str:
    about = dict(zip(KEY_COLUMNS, rows[0][2:], strict=False)) if rows else {}
    if task is not None:  # its identity has a model too, but as a fingerprint: that of the labels counts
        about = json.loads(task[2]) | json.loads(task[3])
    return f"{about['model']}, layer {about['layer']}, scope {about['scope']}, n = {about['n']}"


def _readable_copies(path: Path, directory: Path) -> Iterator[Path]:
    """The file as it is, then with the first page of a fresh store, laid out from each schema version on."""
    plain = directory / "plain.db"
    shutil.copy2(path, plain)
    if Path(f"{path}-wal").exists():
        shutil.copy2(f"{path}-wal", f"{plain}-wal")
    yield plain
    content = path.read_bytes()
    for start in range(1, VERSION + 1):
        fresh = directory / f"fresh-{start}.db"
        with closing(sqlite3.connect(fresh, isolation_level=None)) as db:
            db.execute("PRAGMA journal_mode = WAL")
            migrate(db, start)
            migrate(db)
            size: int = db.execute("PRAGMA page_size").fetchone()[0]
        page = bytearray(fresh.read_bytes()[:size])
        # Its own idea of the file's length, in pages (bytes 28 to 31 of the file format).
        page[28:32] = max(len(content) // size, 1).to_bytes(4, "big")
        patched = directory / f"patched-{start}.db"
        patched.write_bytes(bytes(page) + content[size:])
        yield patched
