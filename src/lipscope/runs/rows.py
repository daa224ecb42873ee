"""A row as it lies in the store: what it is in columns, what was measured as JSON, and a checksum of both.

SQLite notices a broken page but not a flipped bit inside a number; the checksum does, for rows and for all records beside
them. Content hashes say what a measurement was made of, independent of names, places and time.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipscope.runs.registry import Row
from lipscope.runs.schema import KEY_COLUMNS, SEALED, StoreError

if TYPE_CHECKING:
    from lipscope.runs.tasks import Task

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


def is_sound(record: Sequence[Any]) -> bool:
    """Whether the checksum of a record fits."""
    try:
        return bool(digest(record[:-1]) == record[-1])
    except (TypeError, ValueError):
        return False


def is_record(table: str, record: Sequence[Any]) -> bool:
    """Whether a record of a table other than ``rows`` is as it was written: its checksum and its content hash fit."""
    if not is_sound(record):
        return False
    try:
        "".join(value for value in record if isinstance(value, str)).encode()
        if table == "plans":
            return bool(digest(record[2]) == record[1])
        if table == "environments":
            return bool(digest(json.loads(record[2])) == record[1])
        if table == "tasks":
            return bool(digest(json.loads(record[3])) == record[1]) and isinstance(json.loads(record[4]), dict)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def table_digest(rows: Iterable[Row]) -> str:
    """Hash of a table but for its time columns: equal tables were measured bit for bit alike."""
    kept = sorted(
        json.dumps({name: value for name, value in row.items() if name not in TIME_COLUMNS}, sort_keys=True) for row in rows
    )
    return digest(kept)
