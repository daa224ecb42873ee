"""The store of a sweep: one SQLite file that keeps every finished task, whatever happens next.

Write-ahead logging, one transaction per task with all its rows, every transaction on the disk before the next task counts
as done. Only the driver of a sweep writes, under a lock that belongs to the process and is gone when it dies, however it
dies; anyone may read meanwhile.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lipscope.runs import schema
from lipscope.runs.recovery import Recovery, damage, recover
from lipscope.runs.writing import open_log, refuse_special

if TYPE_CHECKING:
    from lipscope.runs.tasks import Task
    from lipscope.runs.work import Outcome


class StoreLock:
    """Holds ``PATH.lock`` until ``release``; refuses when another process holds it, with its number and machine."""

    def __init__(self, store: Path) -> None:
        self.path = Path(f"{store}.lock")
        file = open_log(self.path)
        if not _try_lock(file):
            file.seek(0)
            owner = _owner(file.read())
            file.close()
            raise schema.LockedStoreError(
                f"{store} is being written by another process{owner}. Wait for it, stop it, or use another --store; "
                "`lipscope export` may read the store meanwhile"
            )
        file.truncate(0)
        json.dump({"process": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat()}, file)
        file.flush()
        self._file = file

    def release(self) -> None:
        """Let others write. The file stays: removing it would let two processes hold two different locks."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()


def _try_lock(file: IO[str]) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # what the two of them say when another process holds it
        return False
    return True


def _owner(text: str) -> str:
    try:
        owner = json.loads(text)
        return f" (process {owner['process']} on {owner['host']}, since {owner['since'][:19]} UTC)"
    except (ValueError, KeyError, TypeError):
        return ""


# The kind of tasks that look at tokens: what they measure is no row of the table.
VIEWS = "tokens"
_LAST_PLAN = "(SELECT plan FROM runs ORDER BY id DESC LIMIT 1)"
# Tasks of the last plan: asked for, done, failed; and their rows.
PROGRESS = (
    "SELECT count(*), coalesce(sum(status = 'done'), 0), coalesce(sum(status = 'failed'), 0), coalesce(sum(row_count), 0) "
    f"FROM plan_tasks LEFT JOIN tasks ON tasks.key = plan_tasks.task WHERE plan = {_LAST_PLAN}"
)


class Store(AbstractContextManager["Store"]):
    """An open store.

    Args:
        path: the file, made when it does not exist and ``write`` is on; None for a store in memory.
        write: hold the lock and allow writing.
        notice: called when the store was damaged, with what was lost; by default it is a warning.

    Every record is checked against its checksum when a store is opened, and tasks, plans and environments against the hash
    that they are known by. What does not fit is left out as if it had never been measured, and said.

    Attributes:
        recovery: what was saved and lost when the file was damaged, else None.
        connection: to SQLite.

    Raises:
        LockedStoreError: when another process writes to it.
        StoreVersionError: when it comes from a lipscope with another format.
        ForeignFileError: when the file is something else.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None, *, write: bool = False, notice: Callable[[str], None] | None = None
    ) -> None:
        self.recovery: Recovery | None = None
        self._lock: StoreLock | None = None
        if path is None:
            self.path = Path("memory")
            self.connection = schema.connect(":memory:")
            schema.create(self.connection)
            return
        # One file has one lock, whatever links lead to it.
        self.path = refuse_special(Path(path).resolve())
        if not write and not self.path.exists():
            raise FileNotFoundError(f"there is no store {str(path)!r}")
        if not self.path.parent.is_dir():
            # A link may lead to a place that is not there; otherwise, say it as it was given.
            missing = self.path.parent if Path(path).parent.is_dir() else Path(path).parent
            raise FileNotFoundError(f"there is no directory {str(missing)!r} for the store")
        self._lock = StoreLock(self.path) if write else None
        try:
            self._open(write, notice)
        except BaseException:
            self.close()
            raise

    def _open(self, write: bool, notice: Callable[[str], None] | None) -> None:
        with schema.explained(self.path):
            if self.path.exists() and self.path.stat().st_size and (problem := damage(self.path)) is not None:
                with self._alone():
                    self.recovery = recover(self.path, problem)
                if self.recovery is None:
                    raise schema.ForeignFileError(
                        f"{self.path} is not a lipscope store, or nothing in it can be read ({problem}). It was left as it "
                        "is: name another --store"
                    )
                if notice is not None:
                    notice(str(self.recovery))
                else:
                    warnings.warn(str(self.recovery), schema.DamagedStoreWarning, stacklevel=4)
            self.connection = schema.connect(self.path)
            if write:
                self.connection.execute("PRAGMA journal_mode = WAL")
                self.connection.execute("PRAGMA synchronous = FULL")
            if not self.connection.execute("PRAGMA user_version").fetchone()[0]:
                with self._alone():
                    schema.create(self.connection)
            if not write:
                self.connection.execute("PRAGMA query_only = ON")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Reading repairs too, but only when nobody writes."""
        lock = self._lock or StoreLock(self.path)
        try:
            yield
        finally:
            if self._lock is None:
                lock.release()

    def close(self) -> None:
        """Close the file and release the lock."""
        if hasattr(self, "connection"):
            self.connection.close()
        if self._lock is not None:
            self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── writing ──

    def begin_run(self, plan: str, tasks: Iterable[Task], engine: str, environment: dict[str, Any]) -> int:
        """Note the plan verbatim, what it asks for, and where it runs; returns the number of the run."""
        with self._transaction() as db:
            known = schema.digest(plan)
            db.execute("INSERT OR IGNORE INTO plans (digest, text, created) VALUES (?, ?, ?)", (known, plan, _now()))
            number: int = db.execute("SELECT id FROM plans WHERE digest = ?", (known,)).fetchone()[0]
            db.execute("DELETE FROM plan_tasks WHERE plan = ?", (number,))
            self._ask(number, tasks)
            run = db.execute(
                "INSERT INTO runs (plan, engine, environment, started) VALUES (?, ?, ?, ?)",
                (number, engine, self._environment(environment), _now()),
            ).lastrowid
            assert run is not None
            schema.seal(db, "runs", "id = ?", run)
        return run

    def add_tasks(self, run: int, tasks: Iterable[Task]) -> None:
        """Note further tasks that the plan of a run asks for."""
        with self._transaction() as db:
            (plan,) = db.execute("SELECT plan FROM runs WHERE id = ?", (run,)).fetchone()
            self._ask(plan, tasks)

    def _ask(self, plan: int, tasks: Iterable[Task]) -> None:
        ask = "INSERT OR IGNORE INTO plan_tasks VALUES (?1, ?2, seal(?1, ?2))"
        self.connection.executemany(ask, ((plan, task.key) for task in tasks))
        schema.count_tasks(self.connection, plan)

    def finish_run(self, run: int) -> None:
        """Note that a run came to its end."""
        with self._transaction() as db:
            db.execute("UPDATE runs SET finished = ? WHERE id = ?", (_now(), run))
            schema.seal(db, "runs", "id = ?", run)

    def save(self, outcome: Outcome, run: int) -> None:
        """Keep a finished task and its rows, or its error: all of it or nothing."""
        task = outcome.task
        records = [schema.to_record(key, task, row) for key, row in outcome.rows]
        with self._transaction() as db:
            db.execute(
                "INSERT INTO tasks (key, status, identity, labels, row_count, error, trace, seconds, flops, run, "
                "environment, finished) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                "status = excluded.status, row_count = excluded.row_count, error = excluded.error, trace = excluded.trace, "
                "seconds = excluded.seconds, run = excluded.run, environment = excluded.environment, "
                "finished = excluded.finished, attempts = attempts + 1",
                (
                    task.key, "done" if outcome.error is None else "failed", json.dumps(task.identity),
                    json.dumps(task.labels), len(records), outcome.error, outcome.trace, outcome.seconds, task.work.flops,
                    run, self._environment(outcome.environment), _now(),
                ),
            )  # fmt: skip
            schema.seal(db, "tasks", "key = ?", task.key)
            marks = ", ".join("?" * len(schema.RECORD.split(",")))
            db.executemany(f"INSERT INTO rows ({schema.RECORD}) VALUES ({marks})", records)

    def _environment(self, content: dict[str, Any]) -> int:
        known = schema.digest(content)
        db = self.connection
        db.execute("INSERT OR IGNORE INTO environments (digest, content) VALUES (?, ?)", (known, json.dumps(content)))
        number: int = db.execute("SELECT id FROM environments WHERE digest = ?", (known,)).fetchone()[0]
        schema.seal(db, "environments", "id = ?", number)
        return number

    # ── reading ──

    def tasks(self, status: str) -> set[str]:
        """Keys of the tasks that are ``done`` or ``failed``."""
        return {key for (key,) in self.connection.execute("SELECT key FROM tasks WHERE status = ?", (status,))}

    def provenance(self) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
        """For every finished task: the labels it was measured under, and where it ran."""
        query = (
            "SELECT key, labels, content FROM tasks JOIN environments ON environments.id = tasks.environment "
            "WHERE status = 'done'"
        )
        return {key: (json.loads(labels), json.loads(content)) for key, labels, content in self.connection.execute(query)}

    def failures(self, keys: Collection[str] | None = None) -> list[dict[str, Any]]:
        """Failed tasks: key, labels, layer, scope, n, error, trace, attempts."""
        found = []
        query = "SELECT key, error, trace, attempts, labels, identity FROM tasks WHERE status = 'failed' ORDER BY id"
        for key, error, trace, attempts, labels, identity in self.connection.execute(query):
            about = {name: json.loads(identity).get(name) for name in ("layer", "scope", "n")}
            found.append({"key": key, **json.loads(labels), **about, "error": error, "trace": trace, "attempts": attempts})
        return [failure for failure in found if keys is None or failure["key"] in keys]

    def rates(self) -> dict[tuple[str | None, str], float]:
        """Floating-point operations per second of the finished tasks, by model and scope."""
        query = (
            "SELECT json_extract(labels, '$.model'), json_extract(identity, '$.scope'), "
            "sum(flops) / max(sum(seconds), 1e-9) FROM tasks WHERE status = 'done' GROUP BY 1, 2"
        )
        return {(model, scope): rate for model, scope, rate in self.connection.execute(query)}

    def seconds(self) -> float:
        """Time that the tasks of the last plan took, added up."""
        asked = f"SELECT task FROM plan_tasks WHERE plan = {_LAST_PLAN}"
        query = f"SELECT coalesce(sum(seconds), 0) FROM tasks WHERE key IN ({asked})"
        return float(self.connection.execute(query).fetchone()[0])

    def progress(self) -> tuple[int, int, int]:
        """Tasks of the last plan: asked for, done, failed."""
        asked, done, failed, _ = self.connection.execute(PROGRESS).fetchone()
        return asked, done, failed

    def plan(self) -> str | None:
        """The last plan, as it was written."""
        found = self.connection.execute(f"SELECT text FROM plans WHERE id = {_LAST_PLAN}").fetchone()
        return None if found is None else str(found[0])

    def environments(self) -> list[dict[str, Any]]:
        """Where tasks of this store ran."""
        return [json.loads(text) for (text,) in self.connection.execute("SELECT content FROM environments ORDER BY id")]

    def rows(self, *, all_plans: bool = False) -> list[dict[str, Any]]:
        """The rows of the last plan (or of all) as flat dictionaries with the same columns, in a fixed order.

        Each has what it is (model, layer, …), what was measured, and what it was measured with (seed, rtol, …).
        """
        order = "kind, model, text, dtype, scope, layer, head, n, input, document, key"
        query = f"SELECT {schema.RECORD} FROM rows WHERE kind IS NOT '{VIEWS}'{_planned(all_plans)} ORDER BY {order}"
        records = self.connection.execute(query).fetchall()
        identities = self.connection.execute("SELECT key, identity FROM tasks")
        about = {key: schema.identity_columns(json.loads(identity)) for key, identity in identities}
        # A column that a kind or quantity measured under the same name is the kind's.
        found = [{**about[record[1]], **schema.from_record(record)} for record in records]
        trailing = (*schema.IDENTITY_COLUMNS, "key")
        columns = list(dict.fromkeys(name for row in found for name in row if name not in trailing))
        return [{name: row.get(name) for name in (*columns, *trailing)} for row in found]

    def rows_of(self, tasks: Collection[str]) -> dict[str, list[dict[str, Any]]]:
        """What was measured, by the key of its task, in the order in which it was measured."""
        found: dict[str, list[dict[str, Any]]] = {}
        for record in self.connection.execute(f"SELECT {schema.RECORD} FROM rows ORDER BY id"):
            if record[1] in tasks:
                found.setdefault(record[1], []).append(schema.from_record(record))
        return found

    def views(self, *, all_plans: bool = False) -> list[dict[str, Any]]:
        """The worst places of the last plan (or of all), token by token; see ``lipscope.models.tokens.TokenView``."""
        query = f"SELECT {schema.RECORD} FROM rows WHERE kind = '{VIEWS}'{_planned(all_plans)} ORDER BY id"
        found = (schema.from_record(record) for record in self.connection.execute(query))
        return [{name: row.get(name) for name in schema.VIEW_COLUMNS} for row in found]

    # ── plumbing ──

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with schema.explained(self.path), self.connection:  # which ends the transaction, one way or the other
            self.connection.execute("BEGIN IMMEDIATE")
            yield self.connection


def _planned(all_plans: bool) -> str:
    return "" if all_plans else f" AND task IN (SELECT task FROM plan_tasks WHERE plan = {_LAST_PLAN})"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
