"""A request to end a sweep is obeyed within a stated time, with a stated exit code, and costs no finished task.

Sweeps are forked from this process, which has torch and the model loaded, and run the command line as a user would.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import command
from lipscope.cli import sweep as cli_sweep
from lipscope.runs import Store, kinds
from lipscope.runs.schema import table_digest
from test_cli_sweep import FLAGS, tiny  # noqa: F401

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

KILLS = 20
MORE = ["--lengths", "4,5,6,7,8,9,10,11,12,13", "--inputs", "1"]
measure = kinds.measured_rows


class Lingering:
    """Takes its time when it is thrown away: there, Python drops every exception."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __del__(self) -> None:
        time.sleep(self.seconds)


@pytest.fixture
def linger(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    def slow(seconds: float) -> None:
        def measured(*arguments: object, **settings: object) -> object:
            Lingering(seconds)
            return measure(*arguments, **settings)  # type: ignore[arg-type]

        monkeypatch.setattr(kinds, "measured_rows", measured)

    return slow


def started(store: Path) -> int:
    """The process of a sweep that has its store open."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child:
        assert os.read(reader, 1) == b"."
        os.close(reader)
        os.close(writer)
        return child
    try:
        begin = Store.begin_run

        def told(self: Store, *arguments: object) -> int:
            os.write(writer, b".")
            return begin(self, *arguments)  # type: ignore[arg-type]

        Store.begin_run = told  # type: ignore[assignment,method-assign]
        os._exit(command.run("sweep", *FLAGS, *MORE, "--store", store).returncode)
    finally:
        os._exit(99)


def ended(child: int, within: float) -> int | None:
    """The exit code of a process; None when it does not end in time, and is killed."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        number, status = os.waitpid(child, os.WNOHANG)
        if number:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def finished(store: Path) -> set[str]:
    with Store(store) as ledger:
        assert ledger.recovery is None
        return ledger.tasks("done")


def test_every_request_to_end_is_obeyed_and_costs_no_finished_task(tmp_path: Path, linger: Callable[[float], None]) -> None:
    whole, rng = tmp_path / "whole.db", random.Random(3)
    assert command.run("sweep", *FLAGS, *MORE, "--store", whole).returncode == 0
    linger(0.02)
    kills, number, store, before = 0, 0, tmp_path / "0.db", set[str]()
    while kills < KILLS:
        child = started(store)
        time.sleep(rng.uniform(0, 0.25))
        request = rng.choice((signal.SIGTERM, signal.SIGTERM, signal.SIGINT))
        os.kill(child, request)
        code = ended(child, cli_sweep.GRACE)
        assert code in (128 + request, 0), f"{request.name}: {code}"
        kills += code != 0
        done = finished(store)
        assert before <= done
        before = done
        if code == 0:
            with Store(store) as one, Store(whole) as other:
                assert table_digest(one.rows()) == table_digest(other.rows())
            number += 1
            store, before = tmp_path / f"{number}.db", set()


@pytest.mark.parametrize("request_number", [signal.SIGTERM, signal.SIGINT])
def test_a_task_without_end_is_cut_off_at_the_deadline(
    tmp_path: Path, linger: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, request_number: signal.Signals
) -> None:
    store = tmp_path / "run.db"
    linger(0.05)
    child = started(store)
    time.sleep(0.3)
    os.kill(child, request_number)
    assert ended(child, 10) == 128 + request_number
    before = finished(store)
    assert before
    monkeypatch.setattr(cli_sweep, "GRACE", 0.3)
    linger(60)
    child = started(store)
    time.sleep(0.1)
    os.kill(child, request_number)
    assert ended(child, 5) == 128 + request_number
    # Who cannot wait asks twice.
    monkeypatch.setattr(cli_sweep, "GRACE", 60)
    child = started(store)
    for _ in range(2):
        time.sleep(0.2)
        os.kill(child, request_number)
    assert ended(child, 5) == 128 + request_number
    assert finished(store) == before
