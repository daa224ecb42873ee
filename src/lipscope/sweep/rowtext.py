"""A row of the table as it lies in the store: what it is in columns, what was measured as JSON, and a checksum of both.

SQLite notices a broken page but not a flipped bit inside a number; the checksum does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from lipscope.sweep.errors import StoreError
from lipscope.sweep.fingerprints import digest
from lipscope.sweep.registry import Row
from lipscope.sweep.schema import KEY_COLUMNS
from lipscope.sweep.tasks import Task

# Depends on the machine's mood, not on what was measured.
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


def is_sound(record: Sequence[Any]) -> bool:
    """Whether the checksum of a record fits."""
    try:
        return bool(digest(list(record[:-1])) == record[-1])
    except (TypeError, ValueError):
        return False


def table_digest(rows: Iterable[Row]) -> str:
    """Hash of a table but for its time columns: equal tables were measured bit for bit alike."""
    kept = sorted(
        json.dumps({name: value for name, value in row.items() if name not in TIME_COLUMNS}, sort_keys=True) for row in rows
    )
    return digest(kept)
