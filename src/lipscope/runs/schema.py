"""The format of a store: its tables, its records with their checksums, and what can go wrong with it.

A row has what it is in columns, what was measured as JSON, and a checksum of both. SQLite notices a broken page but not a
flipped bit inside a number; the checksum does, for rows and for all records beside them. Content hashes say what a
measurement was made of, independent of names, places and time.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipscope.runs.registry import Row

if TYPE_CHECKING:
    from lipscope.runs.tasks import Task

# "Lips" in ASCII: tells a store from other SQLite databases.
APPLICATION_ID = 0x4C697073
VERSION = 4

# Columns of a row that say what it is; everything else it holds was measured.
KEY_COLUMNS = ("model", "text", "kind", "layer", "head", "scope", "mask", "n", "input", "document", "dtype")
# What checksums cover.
SEALED = {
    "rows": f"key, task, {', '.join(KEY_COLUMNS)}, measured",
    "plans": "id, digest, text, created, task_count",
    "environments": "id, digest, content",
    "runs": "id, plan, engine, environment, started, finished",
    "tasks": "id, key, status, identity, labels, row_count, error, trace, seconds, flops, run, environment, finished, "
    "attempts",
    "plan_tasks": "plan, task",
}
RECORD = f"{SEALED['rows']}, checksum"


def create(connection: sqlite3.Connection) -> None:
    """Make the tables, in one transaction."""
    tables = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
    # PRAGMAs take no parameters; both numbers are our own.
    numbers = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION};"
    connection.executescript(f"BEGIN IMMEDIATE; {tables} {numbers} COMMIT;")


def has_our_tables(connection: sqlite3.Connection) -> bool:
    """Whether tables and columns are those of a store, whatever the header says."""
    query = "SELECT t.name, c.name FROM sqlite_schema AS t, pragma_table_info(t.name) AS c WHERE t.type = 'table'"
    found = {(table, column) for table, column in connection.execute(query) if not table.startswith("sqlite_")}
    ours = {(table, column) for table, columns in SEALED.items() for column in (*columns.split(", "), "checksum")}
    return found == ours | {("rows", "id")}


DIGEST_SIZE = 16


def digest(value: Any) -> str:
    """Hash of a JSON value, the same on every machine.

    Example:
        >>> digest({"a": 1, "b": 2.0}) == digest({"b": 2.0, "a": 1})
        True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_SIZE).hexdigest()


def connect(path: Path | str) -> sqlite3.Connection:
    """Open a database whose bytes may be anything: those that are no UTF-8 are read too, and fit no checksum."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=30)
    connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    connection.create_function("seal", -1, lambda *values: digest(values), deterministic=True)
    return connection


def seal(connection: sqlite3.Connection, table: str, where: str = "true", *values: Any) -> None:
    """Write the checksums of records, from what lies in the store."""
    connection.execute(f"UPDATE {table} SET checksum = seal({SEALED[table]}) WHERE {where}", values)


def count_tasks(connection: sqlite3.Connection, plan: int) -> None:
    """Note how many tasks a plan asks for, so that one that is deleted from the list is missed."""
    count = "(SELECT count(*) FROM plan_tasks WHERE plan = ?1)"
    connection.execute(f"UPDATE plans SET task_count = {count} WHERE id = ?1", (plan,))
    seal(connection, "plans", "id = ?", plan)


# What a row was measured with and on, in an export; the kind's own settings are JSON, fingerprints are cut short.
IDENTITY_COLUMNS = {
    "seed": "integer", "rtol": "number", "delta_asked": "number", "interval": "number", "max_steps": "integer",
    "threads": "integer", "options": "text", "quantities": "text", "loader": "text",
    "model_digest": "text", "text_digest": "text", "batch_digest": "text",
}  # fmt: skip
SHORT_DIGEST = 12

# What a view of a layer, token by token, says; see ``lipscope.models.tokens.TokenView.to_dict``.
VIEW_COLUMNS = (
    "model", "text", "layer", "head", "scope", "n", "input", "lower", "estimate", "upper", "upper_kind", "delta", "tokens",
    "energy", "singular_values", "influence",
)  # fmt: skip

# Differ from run to run; no part of what was measured.
TIME_COLUMNS = ("seconds",)


def to_record(key: str, task: Task, row: Row) -> tuple[Any, ...]:
    """(key, task, key columns…, measured, checksum)."""
    about = {**task.labels, **{name: task.identity.get(name) for name in ("layer", "scope", "n", "dtype")}}
    fixed = [row.get(name, about.get(name)) for name in KEY_COLUMNS]
    measured = json.dumps({name: value for name, value in row.items() if name not in KEY_COLUMNS})
    values = [key, task.key, *fixed, measured]
    return (*values, digest(values))


def from_record(record: Sequence[Any]) -> Row:
    """The flat row; raises StoreError when the checksum does not fit."""
    *values, checksum = record
    if digest(values) != checksum:
        raise StoreError(f"row {values[0]} is damaged: its checksum does not fit")
    key, _, *fixed, measured = values
    return {**dict(zip(KEY_COLUMNS, fixed, strict=True)), **json.loads(measured), "key": key}


def identity_columns(identity: Mapping[str, Any]) -> Row:
    """What tells a row from that of another measurement with the same model, text, layer and length.

    Taken from the identity that the key of the task is the hash of.

    Example:
        >>> about = identity_columns({"solver": {"rtol": 0.001}, "seed": 3, "threads": 1, "model": "0123456789abcdef"})
        >>> about["rtol"], about["seed"], about["model_digest"], about["text_digest"]
        (0.001, 3, '0123456789ab', None)
    """
    solver = identity.get("solver") or {}
    short = {f"{name}_digest": (identity.get(name) or "")[:SHORT_DIGEST] or None for name in ("model", "text", "batch")}
    plain = {name: identity.get(name, solver.get(name)) for name in IDENTITY_COLUMNS if name not in short}
    # The column ``delta`` is measured: that of the upper end which was the least, if it was a probabilistic one.
    plain["delta_asked"] = solver.get("delta")
    for name in ("options", "quantities"):
        plain[name] = json.dumps(plain[name], sort_keys=True) if plain[name] else None
    return plain | short


# Where a record has the content whose hash it is known by.
_CONTENT = {"plans": 2, "environments": 2, "tasks": 3}


def is_record(table: str, record: Sequence[Any]) -> bool:
    """Whether a record is as it was written: its checksum fits, and the content hash that it is known by."""
    *values, checksum = record
    try:
        "".join(value for value in values if isinstance(value, str)).encode()
        sound = bool(digest(values) == checksum)
        if table in _CONTENT:
            content = record[_CONTENT[table]]
            sound = sound and bool(digest(content if table == "plans" else json.loads(content)) == record[1])
        return sound and (table != "tasks" or isinstance(json.loads(record[4]), dict))
    except (TypeError, ValueError, RecursionError):
        return False


def table_digest(rows: Iterable[Row]) -> str:
    """Hash of a table but for its time columns: equal tables were measured bit for bit alike."""
    kept = sorted(
        json.dumps({name: value for name, value in row.items() if name not in TIME_COLUMNS}, sort_keys=True) for row in rows
    )
    return digest(kept)


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


# An error message that quotes a damaged name is no UTF-8 either.
UNREADABLE = (sqlite3.DatabaseError, UnicodeDecodeError)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_EXPLAINED = (
    (
        (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR), StoreFullError,
        "no more rows can be written to {path} ({error}): the disk is probably full. All finished tasks are kept. "
        "Make room and run the same command again to go on",
    ),
    (
        _DAMAGED, StoreError,
        "{path} was damaged while in use ({error}). Run the same command again: it recovers what is readable",
    ),
    (
        (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM), StoreError,
        "{path} cannot be opened for writing ({error}): check the rights of its directory",
    ),
    (
        (sqlite3.SQLITE_CONSTRAINT,), StoreError,
        "{path} has some of these rows already ({error}): something else wrote to it. Nothing was changed. "
        "See that only one sweep uses the store, and run the same command again to go on",
    ),
)  # fmt: skip


def is_damage(error: Exception) -> bool:
    """Whether an error says that the file is damaged, and not that it is locked, say."""
    return isinstance(error, UnicodeDecodeError) or _primary_code(error) in _DAMAGED


def _primary_code(error: Exception) -> int:
    """SQLite's result code without its extension; 0 when there is none."""
    return int(getattr(error, "sqlite_errorcode", 0) or 0) & 0xFF


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Inside, SQLite's errors become ``StoreError``s."""
    try:
        yield
    except sqlite3.Error as error:
        for codes, kind, words in _EXPLAINED:
            if _primary_code(error) in codes:
                raise kind(words.format(path=path, error=error)) from error
        raise
