"""The format of a store: its tables, and what can go wrong with it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path

# "Lips" in ASCII: tells a store from other SQLite databases.
APPLICATION_ID = 0x4C697073
VERSION = 4

# What was measured is JSON: its columns may grow. A checksum covers all other columns of its record, and a plan knows how
# many tasks it asks for. The order of the tables is part of the format: recovery counts on their first pages.
_TABLES = """
CREATE TABLE plans (
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, text TEXT NOT NULL, created TEXT NOT NULL,
    task_count INTEGER NOT NULL DEFAULT 0, checksum TEXT NOT NULL DEFAULT ''
);
CREATE TABLE environments (
    id INTEGER PRIMARY KEY, digest TEXT NOT NULL UNIQUE, content TEXT NOT NULL, checksum TEXT NOT NULL DEFAULT ''
);
CREATE TABLE runs (
    id INTEGER PRIMARY KEY, plan INTEGER NOT NULL REFERENCES plans(id), engine TEXT NOT NULL,
    environment INTEGER NOT NULL REFERENCES environments(id), started TEXT NOT NULL, finished TEXT,
    checksum TEXT NOT NULL DEFAULT ''
);
CREATE TABLE tasks (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, status TEXT NOT NULL CHECK (status IN ('done', 'failed')),
    identity TEXT NOT NULL, labels TEXT NOT NULL, row_count INTEGER NOT NULL, error TEXT, trace TEXT,
    seconds REAL NOT NULL, flops REAL NOT NULL, run INTEGER NOT NULL REFERENCES runs(id),
    environment INTEGER NOT NULL REFERENCES environments(id), finished TEXT NOT NULL, attempts INTEGER NOT NULL DEFAULT 1,
    checksum TEXT NOT NULL DEFAULT ''
);
CREATE TABLE plan_tasks (
    plan INTEGER NOT NULL REFERENCES plans(id), task TEXT NOT NULL, checksum TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (plan, task)
) WITHOUT ROWID;
CREATE TABLE rows (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, task TEXT NOT NULL REFERENCES tasks(key),
    model TEXT, text TEXT, kind TEXT, layer INTEGER, head INTEGER, scope TEXT, mask TEXT, n INTEGER, input INTEGER,
    document INTEGER, dtype TEXT, measured TEXT NOT NULL, checksum TEXT NOT NULL
);
CREATE INDEX rows_of_task ON rows (task);
"""

# Columns of a row that say what it is; everything else it holds was measured.
KEY_COLUMNS = ("model", "text", "kind", "layer", "head", "scope", "mask", "n", "input", "document", "dtype")
RECORD = f"key, task, {', '.join(KEY_COLUMNS)}, measured, checksum"
# What the checksums of the other tables cover.
SEALED = {
    "plans": "id, digest, text, created, task_count",
    "environments": "id, digest, content",
    "runs": "id, plan, engine, environment, started, finished",
    "tasks": "id, key, status, identity, labels, row_count, error, trace, seconds, flops, run, environment, finished, "
    "attempts",
    "plan_tasks": "plan, task",
}


def create(connection: sqlite3.Connection) -> None:
    """Make the tables, in one transaction."""
    # PRAGMAs take no parameters; both numbers are our own.
    connection.executescript(
        f"BEGIN IMMEDIATE; {_TABLES} PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}; COMMIT;"
    )


def has_our_tables(connection: sqlite3.Connection) -> bool:
    """Whether tables and columns are those of a store, whatever the header says."""
    return _columns(connection) == _our_columns()


def _columns(connection: sqlite3.Connection) -> set[tuple[str, str]]:
    query = "SELECT t.name, c.name FROM sqlite_schema AS t, pragma_table_info(t.name) AS c WHERE t.type = 'table'"
    return {(table, column) for table, column in connection.execute(query) if not table.startswith("sqlite_")}


@cache
def _our_columns() -> set[tuple[str, str]]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as fresh:
        create(fresh)
        return _columns(fresh)


class StoreWarning(UserWarning):
    """Something about a store that whoever reads it should know."""


class DamagedStoreWarning(StoreWarning):
    """A store was damaged; what was lost is not among its rows."""


class StoreError(RuntimeError):
    """A store cannot be used; the message says why and what to do."""


class LockedStoreError(StoreError):
    """Another process writes to the store."""


class StoreVersionError(StoreError):
    """The store was written by a lipscope whose stores have another format."""


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
