"""Where a sweep stands, read from its store without disturbing whoever writes to it.

The file is opened read-only and no lock is taken: the write-ahead log lets one process write while others read.
"""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from lipscope.rounding import duration

# A driver on another machine cannot be asked whether it lives; one whose store has not changed for so long counts as gone.
_SILENCE = 120.0


@dataclass(frozen=True)
class SweepProgress:
    """Where a sweep stands."""

    asked: int  # tasks of the last plan
    done: int  # tasks of it that are done
    failed: int  # tasks of it that failed
    rows: int  # rows of it
    running: bool  # whether its driver is at work
    seconds: float  # time since the run began, of a running sweep

    @property
    def version(self) -> str:
        """Changes whenever there is something new to show."""
        return f"{self.asked}-{self.done}-{self.failed}-{self.rows}"

    @property
    def words(self) -> str:
        """One line for people."""
        line = f"{self.done} of {self.asked} tasks done, {self.rows} rows"
        line += f", {self.failed} failed" if self.failed else ""
        left = self.asked - self.done - self.failed
        if not left:
            return f"Complete: {line}."
        return (
            f"Running for {duration(round(self.seconds))}: {line}."
            if self.running
            else f"Not running: {line}, {left} to do."
        )


def read_progress(path: str | os.PathLike[str]) -> SweepProgress:
    """Look at a store."""
    store = Path(path).resolve()
    if not store.is_file():
        raise FileNotFoundError(f"there is no store {str(path)!r}")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(store))}?mode=ro", uri=True, timeout=10)) as db:
            db.execute("BEGIN")  # all answers from one moment
            run = db.execute("SELECT plan, started, finished FROM runs ORDER BY id DESC LIMIT 1").fetchone()
            if run is None:
                return SweepProgress(0, 0, 0, 0, False, 0.0)
            plan, started, finished = run
            asked, done, failed = db.execute(
                "SELECT count(*), coalesce(sum(status = 'done'), 0), coalesce(sum(status = 'failed'), 0) FROM plan_tasks "
                "LEFT JOIN tasks ON tasks.key = plan_tasks.task WHERE plan = ?", (plan,),
            ).fetchone()  # fmt: skip
            (rows,) = db.execute(
                "SELECT coalesce(sum(row_count), 0) FROM tasks WHERE key IN (SELECT task FROM plan_tasks WHERE plan = ?)",
                (plan,),
            ).fetchone()
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} is not a lipscope store that can be read ({error})") from None
    seconds = (datetime.now(UTC) - datetime.fromisoformat(started)).total_seconds()
    return SweepProgress(asked, done, failed, rows, finished is None and _driver_lives(store), seconds)


def _driver_lives(store: Path) -> bool:
    """Whether the process named in the lock file is there. The lock itself is not touched."""
    try:
        owner = json.loads(Path(f"{store}.lock").read_text(encoding="utf-8"))
        process, host = int(owner["process"]), owner["host"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if host == socket.gethostname():
        try:
            if os.name == "posix":  # elsewhere, signal 0 would end the process
                os.kill(process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return True
    changed = max(file.stat().st_mtime for file in (store, Path(f"{store}-wal")) if file.exists())
    return time.time() - changed < _SILENCE
