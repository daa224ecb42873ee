"""The local server: loopback, a secret path, nothing that writes, and rows while a sweep is running."""

from __future__ import annotations

import http.client
import json
import os
import socket
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from lipscope.report.server import MOST_CONNECTIONS, ReportServer, SweepProgress, read_progress
from lipscope.runs.schema import DamagedStoreWarning, StoreError
from lipscope.runs.store import Store
from lipscope.runs.sweep import run_plan
from lipscope.runs.tasks import expand
from report_cases import make_rows, write_run
from sweep_cases import plan_of, save_models
from test_sweep_store import filled


@contextmanager
def serving(path: Path, **options: object) -> Iterator[ReportServer]:
    with ReportServer(path, **options) as server:  # type: ignore[arg-type]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(
    server: ReportServer, path: str, *, method: str = "GET", host: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.headers.items()), body


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("server") / "run", make_rows())


def test_it_answers_those_who_know_the_secret(scan: Path) -> None:
    with serving(scan) as server:
        assert server.url.startswith(f"http://127.0.0.1:{server.server_port}/")
        secret = server.url.split("/")[3]
        assert len(secret) >= 32
        status, headers, body = ask(server, f"/{secret}/")
        assert status == 200
        assert "How smooth is toy?" in body.decode()
        assert "connect-src &#39;self&#39;" in body.decode()
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        status, headers, empty = ask(server, f"/{secret}/", method="HEAD")
        assert (status, empty, headers["Content-Length"]) == (200, b"", str(len(body)))
        progress = json.loads(ask(server, f"/{secret}/progress.json")[2])
        assert progress["words"] == "Complete: 1 of 1 tasks done, 96 rows."
        fresh = json.loads(ask(server, f"/{secret}/content.json")[2])
        assert fresh["version"] == progress["version"]
        assert "<h1>" in fresh["html"]
        assert fresh["rows"]["count"] == 96


def test_it_answers_nobody_else(scan: Path) -> None:
    with serving(scan) as server:
        secret = server.secret
        for path in (
            "/",
            "/report.html",
            f"/{secret[:-1]}/",
            f"/{secret}x/",
            "/../etc/passwd",
            f"/{secret}/../../etc/passwd",
            "/%C3%A9/",
        ):
            status, _, body = ask(server, path)
            assert (status, body) == (404, b"not found\n"), path
        # A web page that gives its own name our address must not read the report.
        for host in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", "127.0.0.1:1"):
            assert ask(server, f"/{secret}/", host=host)[0] == 403
        assert ask(server, f"/{secret}/progress.json", host=f"localhost:{server.server_port}")[0] == 200


def test_idle_connections_keep_nobody_out(scan: Path) -> None:
    before = threading.active_count()
    with serving(scan) as server, ExitStack() as held:
        address = ("127.0.0.1", server.server_port)
        idle = [held.enter_context(socket.create_connection(address, timeout=10)) for _ in range(300)]
        for number, connection in enumerate(idle):
            # Some say nothing, some begin a request, some have had an answer and keep the connection.
            if number % 3:
                connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"\r\n" * (number % 3 - 1))
        with ThreadPoolExecutor(8) as clients:
            asked = [clients.submit(ask, server, f"/{server.secret}/progress.json") for _ in range(200)]
            assert [future.result()[0] for future in asked] == [200] * 200
        assert threading.active_count() - before <= MOST_CONNECTIONS + 2


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_writes(scan: Path, method: str) -> None:
    with serving(scan) as server:
        before = {path: path.read_bytes() for path in scan.iterdir()}
        assert ask(server, f"/{server.secret}/", method=method)[0] == 501
        assert {path: path.read_bytes() for path in scan.iterdir()} == before


def test_it_listens_on_the_loopback_interface_only(scan: Path) -> None:
    with ReportServer(scan) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
    with ReportServer(scan) as one, ReportServer(scan) as two:
        assert one.secret != two.secret


def test_what_cannot_be_shown_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no run"):
        ReportServer(tmp_path / "none")
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE t (x)").connection.close()
    with pytest.raises(StoreError, match="not a lipscope store"):
        ReportServer(tmp_path / "other.db")


def test_a_damaged_store_is_recovered_and_shown(tmp_path: Path) -> None:
    filled(tmp_path / "run.db", 3)
    with closing(sqlite3.connect(tmp_path / "run.db")) as db:
        db.execute("UPDATE runs SET started = CAST(x'ff' AS TEXT)")
        db.execute("UPDATE rows SET scope = CAST(x'ff' AS TEXT) WHERE n = 9")
        db.commit()
    with pytest.warns(DamagedStoreWarning, match="m, layer 1, scope attention, n = 9"):
        ReportServer(tmp_path / "run.db").server_close()
    with serving(tmp_path / "run.db") as server:
        assert "Not running: 2 of 3 tasks done, 6 rows" in ask(server, f"/{server.secret}/progress.json")[2].decode()
        assert "The sweep is not complete: 2 of 3 tasks are done." in ask(server, f"/{server.secret}/")[2].decode()


def test_a_sweep_is_watched_while_it_runs_and_never_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lipscope.report.server.LEAST_PAUSE", 0.0)
    save_models(tmp_path)
    expansion = expand(plan_of(tmp_path, scopes=["attention"], inputs=2))
    store = tmp_path / "run.db"
    seen: list[tuple[SweepProgress, int]] = []
    with Store(store, write=True):
        pass
    with serving(store) as server:
        assert "Nothing measured yet" in ask(server, f"/{server.secret}/")[2].decode()

        def look(step: object) -> None:
            # Called by the driver between its tasks, while it holds its lock and its store is open for writing.
            content = json.loads(ask(server, f"/{server.secret}/content.json")[2])
            seen.append((read_progress(store), content["rows"]["count"]))

        summary = run_plan(expansion, store, progress=look)
        assert summary.failed == 0
        after = json.loads(ask(server, f"/{server.secret}/progress.json")[2])
    steps = [progress.done for progress, _ in seen]
    assert steps == list(range(len(expansion.tasks) + 1))
    assert all(progress.running for progress, _ in seen)
    assert all(progress.rows == shown for progress, shown in seen)
    assert seen[-1][1] == summary.rows
    assert (after["running"], after["done"]) == (False, len(expansion.tasks))
    assert after["words"].startswith("Complete: ")


def test_a_killed_sweep_is_not_called_running(tmp_path: Path) -> None:
    save_models(tmp_path)
    expansion = expand(plan_of(tmp_path, scopes=["attention"], lengths=[6], inputs=1))
    store = tmp_path / "run.db"
    with Store(store, write=True) as ledger:
        ledger.begin_run(expansion.plan.text, expansion.tasks, "none", {})
        assert read_progress(store).running
        assert read_progress(store).words.startswith("Running for ")
    lock = Path(f"{store}.lock")
    gone = next(number for number in range(2**22 - 1, 0, -1) if not _lives(number))
    lock.write_text(json.dumps({"process": gone, "host": socket.gethostname(), "since": "2024-01-01T00:00:00+00:00"}))
    assert not read_progress(store).running
    assert read_progress(store).words == "Not running: 0 of 4 tasks done, 0 rows, 4 to do."
    # On another machine only the file can tell: it is fresh.
    lock.write_text(json.dumps({"process": gone, "host": "elsewhere", "since": "2024-01-01T00:00:00+00:00"}))
    assert read_progress(store).running


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
