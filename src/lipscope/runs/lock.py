"""One driver per store. The lock belongs to the process: when it dies, however it dies, the lock is gone."""

from __future__ import annotations

import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from lipscope.runs.errors import LockedStoreError


class StoreLock:
    """Holds ``PATH.lock`` until ``release``.

    Raises:
        LockedStoreError: when another process holds it, with its number and machine.
    """

    def __init__(self, store: Path) -> None:
        self.path = Path(f"{store}.lock")
        file = self.path.open("a+", encoding="utf-8")
        if not _try_lock(file):
            file.seek(0)
            owner = _owner(file.read())
            file.close()
            raise LockedStoreError(
                f"{store} is being written by another process{owner}. Wait for it, stop it, or use another --store; "
                "`lipscope export` may read the store meanwhile"
            )
        file.truncate(0)
        json.dump({"process": os.getpid(), "host": socket.gethostname(), "since": datetime.now(UTC).isoformat()}, file)
        file.flush()
        self._file: IO[str] | None = file

    def release(self) -> None:
        """Let others write. The file stays: removing it would let two processes hold two different locks."""
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None


def _try_lock(file: IO[str]) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        try:
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        except OSError:
            return False
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _owner(text: str) -> str:
    try:
        owner = json.loads(text)
        return f" (process {owner['process']} on {owner['host']}, since {owner['since'][:19]} UTC)"
    except (ValueError, KeyError, TypeError):
        return ""
