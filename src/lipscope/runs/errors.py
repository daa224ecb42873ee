"""What can go wrong with a store, in words that say what to do."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
