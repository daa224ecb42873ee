"""Attacks on what lipscope shows: texts that want to be markup or scripts, and a view server under load. Loopback only."""

from __future__ import annotations

import http.client
import io
import json
import random
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from lipscope.report import write_report
from lipscope.report.server import ReportServer
from report_card import ROOT, Card

sys.path.insert(0, str(ROOT / "tests"))
from report_cases import make_rows, make_view, write_run

PIECES = (
    *("<", ">", "</script>", "<script>", "window.hacked=1", "<!--", "-->", "]]>", '"', "'", "`", "${", "{{", "}}", "&#60;"),
    *(
        "<img src=x onerror=window.hacked=1>",
        "<svg/onload=window.hacked=1>",
        "javascript:window.hacked=1",
        "<iframe srcdoc=",
    ),
    *("<style>*{display:none}</style>", "<base href=//example.invalid/>", "<meta http-equiv=refresh content=0>"),
    *("\\u003c", "\x1b[31m", "=cmd|' /C calc'!A0", "\u202e", "\u2028", "\x00", "\ud800", "é", "x" * 300),
)
TEXT_COLUMNS = ("model", "notes", "mask", "scope", "status", "solver", "dtype", "upper_kind")


@contextmanager
def browser() -> Iterator[Any]:
    """Headless Chromium."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    binary = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        raise SystemExit("the attack on reports needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=Service(driver))
    try:
        window.set_page_load_timeout(60)
        yield window
    finally:
        window.quit()


def injections(card: Card, directory: Path, rng: random.Random, count: int) -> None:
    """Hostile strings in every field of a run that is text: the page shows them, runs none, and asks nobody for anything."""

    def hostile() -> str:
        return "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 6)))

    pages = refused = injected = 0
    with browser() as window:
        while injected < count:
            given: dict[str, Any] = {name: hostile() for name in rng.sample(TEXT_COLUMNS, rng.randrange(1, 4))}
            tokens = [hostile() for _ in range(6)]
            name, text = given.get("model", "toy"), hostile()
            rows = make_rows(layers=2, heads=2, lengths=(8, 16), **given)
            run = directory / "run"
            shutil.rmtree(run, ignore_errors=True)
            write_run(run, rows, views=[make_view(tokens, model=name, text=text, layer=1, head=1)], text=text)
            about = json.loads((run / "run.json").read_text(encoding="utf-8"))
            about["about"][hostile()] = hostile()
            about["environment"][rng.choice(["processor", hostile()])] = hostile()
            about["command"] = hostile()
            (run / "run.json").write_text(json.dumps(about), encoding="utf-8")
            strings = len(given) + len(tokens) + 5
            injected += strings
            card.tried += strings - 1
            try:
                page = write_report(run, directory / "report.html")
            except ValueError as error:
                refused += 1
                card.check(bool(str(error)), "a run was refused without a word")
                continue
            pages += 1
            try:
                problem = _look(window, page)
            except Exception as error:
                problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            card.check(problem is None, lambda given=given, problem=problem: f"{given}: {problem}")  # type: ignore[misc]
    card.details += [f"{pages} pages opened in Chromium", f"{refused} runs refused"]


def _look(window: Any, page: Path) -> str | None:
    """What went wrong on a page, or None."""
    from selenium.webdriver.support.ui import WebDriverWait

    window.get("about:blank")
    window.get_log("browser")
    window.get(page.resolve().as_uri())
    ready = "return performance.getEntriesByName('lipscope-shown').length > 0"
    WebDriverWait(window, 30, poll_frequency=0.05).until(lambda at: at.execute_script(ready))
    if not window.execute_script("return window.hacked === undefined"):
        return "a script ran"
    if (kinds := "main script, main img, main iframe, main style, main base, main meta") and (
        found := window.execute_script(
            f"return [...document.querySelectorAll('{kinds}')].map((e) => e.outerHTML.slice(0, 80))"
        )
    ):
        return f"markup got in: {found[:2]}"
    if asked := window.execute_script("return performance.getEntriesByType('resource').map((e) => e.name)"):
        return f"the page asked for {asked[:2]}"
    said = [entry["message"] for entry in window.get_log("browser")]
    return f"the browser complains: {said[0][:200]}" if said else None


def view_under_load(card: Card, directory: Path, rng: random.Random, *, idle: int, requests: int) -> None:
    """Many idle connections and malformed requests: every proper request is answered."""
    run = write_run(directory / "view", make_rows(layers=2, heads=2, lengths=(8, 16)))
    said = io.StringIO()
    with ReportServer(run) as server, ExitStack() as stack, redirect_stderr(said):
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        where = ("127.0.0.1", server.server_port)
        try:
            held = 0
            for _ in range(idle):
                try:
                    stack.enter_context(socket.create_connection(where, timeout=5))
                    held += 1
                except OSError:
                    pass
            for number in range(requests):
                if number % 2:
                    with socket.create_connection(where, timeout=10) as peer:
                        peer.sendall(
                            rng.choice(
                                [b"\x00" * 400, b"GET " + rng.randbytes(200), b"GET / HTTP/9.9\r\n\r\n", b"A" * 70_000]
                            )
                        )
                connection = http.client.HTTPConnection(*where, timeout=20)
                try:
                    connection.request("GET", f"/{server.secret}/progress.json")
                    answer = connection.getresponse()
                    answer.read()
                    card.check(answer.status == 200, f"request {number}: status {answer.status}")
                except OSError as error:
                    card.check(False, f"request {number}: {type(error).__name__}")
                finally:
                    connection.close()
            card.check(server.socket.getsockname()[0] == "127.0.0.1", "the server listens on another interface")
            card.check(not said.getvalue(), lambda: f"the server said {said.getvalue()[-200:]!r}")
        finally:
            server.shutdown()
            thread.join()
    card.details.append(f"{held} idle connections held, {requests // 2} malformed requests between")
