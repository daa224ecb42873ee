"""The driver is killed at random moments, again and again; the sweep ends with the table of an undisturbed run.

Drivers are forked from this process, which has torch and the models loaded, so that a life takes a fraction of a second.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from lipscope.runs import Store, expand, run_plan
from lipscope.runs.recovery import damage
from lipscope.runs.schema import table_digest
from sweep_cases import plan_of, save_models
from test_sweep_store import WHERE, made_up_outcome, made_up_task

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

KILLS = 12


def _forked(work: Callable[[], object]) -> int:
    """Run ``work`` in a child process; returns its number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _life(work: Callable[[], object], seconds: float) -> bool:
    """Let ``work`` live for a while, then kill it with SIGKILL; True when it was killed before its end."""
    child = _forked(work)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def _done(path: Path) -> set[str]:
    """Finished tasks of a store that must be sound."""
    if not path.exists():
        return set()
    assert damage(path) is None
    with closing(sqlite3.connect(path)) as db:
        if db.execute("PRAGMA user_version").fetchone()[0] == 0:
            return set()
        return {key for (key,) in db.execute("SELECT key FROM tasks WHERE status = 'done'")}


def test_a_driver_killed_again_and_again_loses_nothing(tmp_path: Path) -> None:
    save_models(tmp_path)
    plan = expand(plan_of(tmp_path, kind="sweep_cases:SlowText", options={"sleep": 0.05}))
    undisturbed = run_plan(plan, tmp_path / "undisturbed.db")
    path, rng = tmp_path / "run.db", random.Random(5)
    kills, seen = 0, [set[str]()]
    while kills < KILLS:
        # Lives of all lengths, and no more than a few tasks in each, so that the sweep outlives its drivers.
        life = rng.uniform(0, 0.02 if kills % 3 == 0 else 3 * undisturbed.seconds / 32)
        kills += _life(lambda: run_plan(plan, path), life)
        done = _done(path)
        assert seen[-1] <= done, "a finished task was lost"
        assert len(done) < 32, "the kills must fall into the run"
        seen.append(done)
    assert len(seen[-1]) > 0
    assert not _life(lambda: run_plan(plan, path), 120)
    finished = run_plan(plan, path)
    assert (finished.measured, finished.kept, finished.rows) == (0, 32, undisturbed.rows)
    assert finished.digest == undisturbed.digest
    with Store(path) as store, Store(tmp_path / "undisturbed.db") as other:
        mine, theirs = store.rows(), other.rows()
    for row in (*mine, *theirs):
        del row["seconds"]
    assert mine == theirs


def test_kills_in_the_middle_of_writing_leave_whole_tasks(tmp_path: Path) -> None:
    path, rng = tmp_path / "run.db", random.Random(6)

    def write() -> None:
        with Store(path, write=True) as store:
            run = store.begin_run("plan", [], "none", WHERE)
            for i in count(len(store.tasks("done"))):
                store.save(made_up_outcome(i, rows=5), run)

    kills, before = 0, set[str]()
    while kills < KILLS:
        kills += _life(write, rng.uniform(0.05, 0.3))
        done = _done(path)
        assert before <= done
        before = done
    assert before == {made_up_task(i).key for i in range(len(before))} != set()
    with Store(path) as store:
        rows = store.rows(all_plans=True)
    expected = [row for i in range(len(before)) for row in _flat(i)]
    assert len(rows) == 5 * len(before)
    assert table_digest({"key": r["key"], "estimate": r["estimate"]} for r in rows) == table_digest(expected)


def _flat(number: int) -> list[dict[str, object]]:
    return [{"key": key, "estimate": row["estimate"]} for key, row in made_up_outcome(number, rows=5).rows]
