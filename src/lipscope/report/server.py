"""``view``: the report of a store on a local port, fresh while its sweep is running.

It listens on the loopback interface, answers GET and HEAD under a random path only, refuses names other than its own in the
Host header (so that no web page can reach it by a name of its own), and has nothing that writes.

Where a sweep stands is read from its store without disturbing whoever writes to it: the file is opened read-only and no lock
is taken, as the write-ahead log lets one process write while others read.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import sqlite3
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lipscope.report.html import compact_rows, inert_json, render_content, render_page
from lipscope.report.page import Page
from lipscope.report.settings import report_data
from lipscope.rounding import duration
from lipscope.runs.run import is_store, load_run
from lipscope.runs.store import PROGRESS, Store

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
        if not (left := self.asked - self.done - self.failed):
            return f"Complete: {line}."
        if self.running:
            return f"Running for {duration(round(self.seconds))}: {line}."
        return f"Not running: {line}, {left} to do."


def read_progress(path: str | os.PathLike[str]) -> SweepProgress:
    """Look at a store."""
    store = Path(path).resolve()
    if not store.is_file():
        raise FileNotFoundError(f"there is no store {str(path)!r}")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(store))}?mode=ro", uri=True, timeout=10)) as db:
            db.execute("BEGIN")  # all answers from one moment
            run = db.execute("SELECT started, finished FROM runs ORDER BY id DESC LIMIT 1").fetchone()
            asked, done, failed, rows = db.execute(PROGRESS).fetchone()
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} is not a lipscope store that can be read ({error})") from None
    if run is None:
        return SweepProgress(0, 0, 0, 0, False, 0.0)
    seconds = (datetime.now(UTC) - datetime.fromisoformat(run[0])).total_seconds()
    return SweepProgress(asked, done, failed, rows, run[1] is None and _driver_lives(store), seconds)


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


# A page of many rows takes seconds to make; a running sweep must not be slowed down by its spectators.
LEAST_PAUSE = 3.0
LOOPBACK = "127.0.0.1"
# Connections at once, a thread for each; for one more, the one that has been silent for longest has to go.
MOST_CONNECTIONS = 64


class ReportServer(ThreadingHTTPServer):
    """Serves the report of one store, or of the files of a scan; port 0 is any that is free."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, path: str | os.PathLike[str], *, host: str = LOOPBACK, port: int = 0) -> None:
        self.path = Path(path)
        self.secret = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        self._room = threading.Semaphore(MOST_CONNECTIONS)
        self._silent: dict[Any, None] = {}  # connections without a request to answer, the oldest first
        self._made: Page | None = None
        self._made_at = -LEAST_PAUSE
        self._is_store = is_store(self.path)
        if self._is_store:
            Store(self.path).close()  # a damaged one is recovered, and says so
        self.progress()  # refuse what cannot be shown before anyone looks
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection its thread, as soon as there is room."""
        wait = 0.0
        while not self._room.acquire(timeout=wait):
            wait = 0.5
            for oldest in list(self._silent)[:1]:
                self.note(oldest, silent=False)
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        self.note(request, silent=True)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        self.note(request, silent=False)
        super().shutdown_request(request)
        self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a peer that is gone is no error, and others are answered."""

    def note(self, request: Any, *, silent: bool) -> None:
        """Note whether a connection waits for its next request, or has one to be answered."""
        self._silent.pop(request, None)
        if silent:
            self._silent[request] = None

    @property
    def url(self) -> str:
        """Where the report is, for whoever knows its secret."""
        return f"http://{_bracketed(str(self.server_address[0]))}:{self.server_port}/{self.secret}/"

    def knows(self, host: str) -> bool:
        """Whether a Host header may be meant for this server.

        On the loopback interface only its own names are; on others a machine has names that it does not know itself.
        """
        if not ip_address(str(self.server_address[0])).is_loopback:
            return True
        own = {_bracketed(str(self.server_address[0])), "localhost", LOOPBACK, "[::1]"}
        return host.lower() in {f"{name}:{self.server_port}" for name in own}

    def progress(self) -> SweepProgress:
        """Where the run stands; the files of a scan are complete."""
        if self._is_store:
            return read_progress(self.path)
        rows = len(load_run(self.path).rows)
        return SweepProgress(1, 1, 0, rows, False, 0.0)

    def page(self) -> Page:
        """The page of the rows so far, made anew when there are more and the last one is some seconds old."""
        with self._lock:
            version = self.progress().version
            if self._made is None or (self._made.version != version and not self._is_new):
                self._made, self._made_at = Page(report_data([load_run(self.path)]), version), time.monotonic()
            return self._made

    @property
    def _is_new(self) -> bool:
        return time.monotonic() - self._made_at < LEAST_PAUSE

    def answer(self, name: str) -> tuple[str, str] | None:
        """Content type and text of what lies under the secret path; None for nothing."""
        if name == "":
            return "text/html; charset=utf-8", render_page(self.page(), live=True)
        if name == "progress.json":
            now = self.progress()
            # A page is told of new rows when it can have them.
            shown = self._made.version if self._made is not None and self._is_new else now.version
            found = {**vars(now), "words": now.words, "version": shown}
            return "application/json", json.dumps(found)
        if name == "content.json":
            page = self.page()
            rows = compact_rows(page.runs)
            found = {"version": page.version, "html": render_content(page), "data": page.script, "rows": rows}
            return "application/json", inert_json(found)
        return None


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    server_version = "lipscope"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    # A peer that says nothing must not hold a thread for ever.
    timeout = 30

    def do_GET(self) -> None:
        """Answer; to HEAD without a body."""
        self.server.note(self.connection, silent=False)
        status, kind, text = self._answer()
        content = text.encode("utf-8", "replace")
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind), ("Content-Length", str(len(content))), ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"), ("Referrer-Policy", "no-referrer"), ("X-Frame-Options", "DENY"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.server.note(self.connection, silent=True)

    do_HEAD = do_GET  # noqa: N815

    def _answer(self) -> tuple[HTTPStatus, str, str]:
        secret, _, name = self.path.split("?")[0].removeprefix("/").partition("/")
        known = hmac.compare_digest(secret.encode("utf-8", "replace"), self.server.secret.encode())
        status, reason = HTTPStatus.NOT_FOUND, "not found"
        try:
            if not self.server.knows(self.headers.get("Host", "")):
                status, reason = HTTPStatus.FORBIDDEN, "unknown host"
            elif known and (found := self.server.answer(name)) is not None:
                return HTTPStatus.OK, *found
        except Exception as error:
            status, reason = HTTPStatus.INTERNAL_SERVER_ERROR, f"the report could not be made: {error}"
        return status, "text/plain; charset=utf-8", f"{' '.join(reason.split())}\n"

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the secret is in every line."""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
