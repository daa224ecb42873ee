"""Whatever bytes a store holds: what was measured comes back as it was or is named as lost, and nothing else comes back."""

from __future__ import annotations

import random
import shutil
import sqlite3
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import command
from lipscope.runs import Store, export
from lipscope.runs.recovery import damage
from lipscope.runs.schema import APPLICATION_ID, VERSION
from test_sweep_store import WHERE, filled, made_up_outcome, made_up_task

TASKS = 4
TABLES = {
    "plans": ("id", "digest", "text", "created", "task_count"),
    "environments": ("id", "digest", "content"),
    "runs": ("id", "plan", "engine", "environment", "started", "finished"),
    "tasks": (
        "id", "key", "status", "identity", "labels", "row_count", "error", "trace", "seconds", "flops", "run", "environment",
        "finished", "attempts",
    ),
    "rows": (
        "key", "task", "model", "text", "kind", "layer", "head", "scope", "mask", "n", "input", "document", "dtype",
        "measured", "checksum",
    ),
    "plan_tasks": ("plan", "task"),
}  # fmt: skip
# One digit or letter more or less, and what no column of ours ever holds.
CHANGES = {
    "digit": "CASE typeof({0}) WHEN 'text' THEN replace({0}, '0', '9') || ' ' ELSE coalesce({0}, 0) + 1 END",
    "no text": "CAST(coalesce({0}, '') || x'ff' AS TEXT)",
    "NUL": "CAST(x'00' || coalesce({0}, '') AS TEXT)",
    "broken JSON": "'{{\"n\": ' || hex(randomblob(4))",
    "deep JSON": f"'{'[' * 3000}'",
    "blob": "x'c0ffee'",
    "infinite": "9e999",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "run.db"
    filled(path, TASKS)
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


def content(path: Path) -> dict[str, Any]:
    """All that an export or a report takes from a store."""
    with Store(path, notice=lambda _: None) as store:
        rows = {row["key"]: row for row in store.rows()}
        return {"rows": rows, "plan": store.plan(), "environments": store.environments(), "recovery": store.recovery}


def assert_true(found: dict[str, Any], truth: dict[str, Any]) -> None:
    """What is there is true; what is not there was named."""
    assert all(truth["rows"][key] == row for key, row in found["rows"].items())
    assert found["plan"] in (truth["plan"], None)
    assert all(environment in truth["environments"] for environment in found["environments"])
    if found["recovery"] is None:
        assert {**found, "recovery": None} == {**truth, "recovery": None}


@pytest.mark.parametrize("table", TABLES)
def test_no_changed_field_is_exported_as_the_truth(sound: Path, tmp_path: Path, table: str) -> None:
    truth = content(sound)
    tried, (digit, no_text, *others) = 0, CHANGES.values()
    for number, column in enumerate(TABLES[table]):
        for change in (digit, no_text, others[number % len(others)]):
            path = Path(shutil.copy(sound, tmp_path / "run.db"))
            with closing(sqlite3.connect(path)) as db:
                db.execute("PRAGMA ignore_check_constraints = ON")
                where = "task = (SELECT max(task) FROM plan_tasks)" if table == "plan_tasks" else "rowid = 1"
                try:
                    db.execute(f"UPDATE {table} SET {column} = {change.format(column)} WHERE {where}")
                except sqlite3.IntegrityError:
                    continue
                db.commit()
            found = content(path)
            tried += 1
            assert found["recovery"] is not None, (column, change)
            assert_true(found, truth)
            # One record costs at most its own task.
            assert len(found["rows"]) >= 3 * (TASKS - 1), (column, change)
            assert content(path)["recovery"] is None
            for file in tmp_path.glob("run.db*"):
                file.unlink()
    assert tried >= 2 * len(TABLES[table])


def test_no_changed_byte_is_exported_as_the_truth(sound: Path, tmp_path: Path) -> None:
    truth, rng, whole = content(sound), random.Random(4), sound.read_bytes()
    named = 0
    for number in range(120):
        path = tmp_path / f"{number}.db"
        damaged = bytearray(whole)
        for _ in range(1 + number % 2):
            damaged[rng.randrange(100, len(whole))] = rng.choice((0, 0xFF, rng.randrange(256)))
        path.write_bytes(damaged)
        found = content(path)
        assert_true(found, truth)
        named += found["recovery"] is not None
    assert named > 20


@pytest.mark.parametrize("version", [-1, 0, 1, VERSION - 1, VERSION + 1, 2**31 - 1])
@pytest.mark.parametrize("kind", [APPLICATION_ID, 0, 7])
def test_a_wrong_number_in_the_header_costs_nothing(sound: Path, tmp_path: Path, version: int, kind: int) -> None:
    path = Path(shutil.copy(sound, tmp_path / "run.db"))
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {version}")
        db.execute(f"PRAGMA application_id = {kind}")
    found = content(path)
    assert found["recovery"] is not None
    assert found["recovery"].lost == ()
    assert found["rows"] == content(sound)["rows"]


@pytest.mark.parametrize("where", ["task = (SELECT max(task) FROM plan_tasks)", "true"])
def test_a_task_that_vanished_from_a_plan_is_missed(sound: Path, tmp_path: Path, where: str) -> None:
    path = Path(shutil.copy(sound, tmp_path / "run.db"))
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"DELETE FROM plan_tasks WHERE {where}")
        db.commit()
    found = content(path)
    assert "1 plans lack some of their tasks" in str(found["recovery"])
    assert "entries which say what a plan asked for" in str(found["recovery"])
    assert found["rows"] == content(sound)["rows"]
    assert content(path)["recovery"] is None


def test_commands_name_what_is_lost_and_say_so_by_their_exit_code(sound: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(sound, tmp_path / "run.db"))
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE tasks SET identity = replace(identity, '\"n\": 9', '\"n\": 7')")
        db.execute("UPDATE rows SET text = CAST(x'ff' AS TEXT) WHERE n = 10")
        db.commit()
    damaged = Path(shutil.copy(path, tmp_path / "again.db"))
    found = command.run("export", path)
    assert found.returncode == 1, found.stderr
    assert "The store was damaged (3 rows and 1 tasks do not fit their checksums)" in found.stderr
    assert "m, layer 2, scope attention, n = 10" in found.stderr
    assert "m, layer 1, scope attention, n = 9" in found.stderr
    assert found.stdout.count("\n") == 1 + 3 * (TASKS - 2)
    again = command.run("export", path)
    assert (again.returncode, again.stdout) == (0, found.stdout)
    assert "not complete: 2 of 4 tasks of the plan are done" in again.stderr
    shown = command.run("report", damaged, "--out", tmp_path / "report.html")
    assert shown.returncode == 1, shown.stderr
    assert "m, layer 2, scope attention, n = 10" in shown.stderr
    assert "The store was damaged: up to 2 measured tasks were lost" in (tmp_path / "report.html").read_text()


def test_what_was_lost_is_measured_again(sound: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(sound, tmp_path / "run.db"))
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE rows SET measured = CAST(x'c3' AS TEXT) WHERE n = 10")
        db.commit()
    said: list[str] = []
    with Store(path, write=True, notice=said.append) as store:
        assert "Recovered: 9 rows of 3 tasks" in said[0]
        run = store.begin_run("plan", [made_up_task(i) for i in range(TASKS)], "none", WHERE)
        missing = [i for i in range(TASKS) if made_up_task(i).key not in store.tasks("done")]
        assert missing == [2]
        store.save(made_up_outcome(2), run)
    assert content(path)["rows"] == content(sound)["rows"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(path, "csv")


def test_a_store_whose_maker_was_killed_is_not_damaged(tmp_path: Path) -> None:
    """The file is there, its tables are not yet."""
    path = tmp_path / "run.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
    assert damage(path) is None
    with Store(path) as store:
        assert store.rows() == []
        assert store.recovery is None
