"""The format of a store: its tables, as the sequence of migrations that made them, and what can go wrong with it.

A new store runs through all migrations, an older one through those it lacks. A migration that was released is never changed,
and every one changes the tables, so that they tell a wrong version number in the header from a newer store.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

# "Lips" in ASCII: tells a store from other SQLite databases.
APPLICATION_ID = 0x4C697073

MIGRATIONS = (
    # 1: plans, runs, where they ran, tasks and rows. What was measured is JSON: its columns may grow. The checksum of a row
    # covers all its other columns.
    """
    CREATE TABLE plans (id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, text TEXT NOT NULL, created TEXT NOT NULL);
    CREATE TABLE environments (id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, content TEXT NOT NULL);
    CREATE TABLE runs (
        id INTEGER PRIMARY KEY, plan INTEGER NOT NULL REFERENCES plans(id), engine TEXT NOT NULL,
        environment INTEGER NOT NULL REFERENCES environments(id), started TEXT NOT NULL, finished TEXT
    );
    CREATE TABLE tasks (
        id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, status TEXT NOT NULL CHECK (status IN ('done', 'failed')),
        identity TEXT NOT NULL, labels TEXT NOT NULL, row_count INTEGER NOT NULL, error TEXT, trace TEXT,
        seconds REAL NOT NULL, flops REAL NOT NULL, run INTEGER NOT NULL REFERENCES runs(id),
        environment INTEGER NOT NULL REFERENCES environments(id), finished TEXT NOT NULL
    );
    CREATE TABLE rows (
        id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, task TEXT NOT NULL REFERENCES tasks(key),
        model TEXT, text TEXT, kind TEXT, layer INTEGER, head INTEGER, scope TEXT, mask TEXT, n INTEGER, input INTEGER,
        document INTEGER, dtype TEXT, measured TEXT NOT NULL, checksum TEXT NOT NULL
    );
    """,
    # 2: which tasks a plan asks for, so that one store can serve several plans; how often a task was tried.
    """
    CREATE TABLE plan_tasks (
        plan INTEGER NOT NULL REFERENCES plans(id), task TEXT NOT NULL, PRIMARY KEY (plan, task)
    ) WITHOUT ROWID;
    INSERT INTO plan_tasks SELECT DISTINCT runs.plan, tasks.key FROM tasks JOIN runs ON tasks.run = runs.id;
    ALTER TABLE tasks ADD COLUMN attempts INTEGER NOT NULL DEFAULT 1;
    CREATE INDEX rows_of_task ON rows (task);
    """,
    # 3: a checksum for every record, not for rows alone. ``seal`` writes them; until then they are empty.
    "".join(
        f"ALTER TABLE {table} ADD COLUMN checksum TEXT NOT NULL DEFAULT '';"
        for table in ("plans", "environments", "runs", "tasks", "plan_tasks")
    ),
)

VERSION = len(MIGRATIONS)

# Columns of a row that say what it is; everything else it holds was measured.
KEY_COLUMNS = ("model", "text", "kind", "layer", "head", "scope", "mask", "n", "input", "document", "dtype")
RECORD = f"key, task, {', '.join(KEY_COLUMNS)}, measured, checksum"
# What the checksums of the other tables cover.
SEALED = {
    "plans": "id, digest, text, created",
    "environments": "id, digest, content",
    "runs": "id, plan, engine, environment, started, finished",
    "tasks": "id, key, status, identity, labels, row_count, error, trace, seconds, flops, run, environment, finished, "
    "attempts",
    "plan_tasks": "plan, task",
}


def migrate(connection: sqlite3.Connection, to: int = VERSION) -> int:
    """Bring a store to schema version ``to``, each step in one transaction; returns the version it had."""
    had: int = connection.execute("PRAGMA user_version").fetchone()[0]
    for version in range(had + 1, to + 1):
        # PRAGMAs take no parameters; both numbers are our own.
        connection.executescript(
            f"BEGIN IMMEDIATE; {MIGRATIONS[version - 1]} PRAGMA application_id = {APPLICATION_ID}; "
            f"PRAGMA user_version = {version}; COMMIT;"
        )
    return had


def layout_version(connection: sqlite3.Connection) -> int | None:
    """The schema version whose tables these are; None when they are not ours."""
    tables = _tables(connection)
    return next((version for version in range(1, VERSION + 1) if _tables_of(version) == tables), None)


def _tables(connection: sqlite3.Connection) -> set[tuple[str, str]]:
    query = "SELECT t.name, c.name FROM sqlite_schema AS t, pragma_table_info(t.name) AS c WHERE t.type = 'table'"
    return {(table, column) for table, column in connection.execute(query) if not table.startswith("sqlite_")}


@cache
def _tables_of(version: int) -> set[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as fresh:
        migrate(fresh, version)
        return _tables(fresh)


class StoreWarning(UserWarning):
    """Something about a store that whoever reads it should know."""


class DamagedStoreWarning(StoreWarning):
    """A store was damaged; what was lost is not among its rows."""


class StoreError(RuntimeError):
    """A store cannot be used; the message says why and what to do."""


class LockedStoreError(StoreError):
    """Another process writes to the store."""


class NewerStoreError(StoreError):
    """The store was written by a newer lipscope."""


class ForeignFileError(StoreError):
    """The file is not a store."""


class StoreFullError(StoreError):
    """There is no room for another row."""


DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
_NO_ENTRY = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM)


# An error message that quotes a damaged name is no UTF-8 either.
UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)


def is_damage(error: Exception) -> bool:
    """Whether an error says that the file is damaged, and not that it is locked, say."""
    return isinstance(error, UnicodeDecodeError) or (isinstance(error, sqlite3.Error) and primary_code(error) in DAMAGED)


def primary_code(error: sqlite3.Error) -> int:
    """SQLite's result code without its extension; 0 when there is none."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Inside, SQLite's errors become ``StoreError``s."""
    try:
        yield
    except sqlite3.Error as error:
        code = primary_code(error)
        if code in _NO_ROOM:
            raise StoreFullError(
                f"no more rows can be written to {path} ({error}): the disk is probably full. All finished tasks are kept. "
                "Make room and run the same command again to go on"
            ) from error
        if code in DAMAGED:
            raise StoreError(
                f"{path} was damaged while in use ({error}). Run the same command again: it recovers what is readable"
            ) from error
        if code in _NO_ENTRY:
            raise StoreError(f"{path} cannot be opened for writing ({error}): check the rights of its directory") from error
        if isinstance(error, sqlite3.IntegrityError):
            raise StoreError(
                f"{path} has some of these rows already ({error}): something else wrote to it. Nothing was changed. "
                "See that only one sweep uses the store, and run the same command again to go on"
            ) from error
        raise
