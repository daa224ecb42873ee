"""The store: transactions, resume, locks, versions, damage, full disks, export."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pandas
import pyarrow.parquet
import pytest

from lipscope.runs import Plan, Store, StoreError, expand, export, run_plan
from lipscope.runs.schema import (
    IDENTITY_COLUMNS,
    VERSION,
    ForeignFileError,
    LockedStoreError,
    StoreFullError,
    StoreVersionError,
    digest,
    table_digest,
)
from lipscope.runs.sweep import kept_notices
from lipscope.runs.tasks import Task, Work
from lipscope.runs.work import Outcome
from sweep_cases import plan_of, save_models

WHERE = {"versions": {"lipscope": "0"}, "threads": 1}


def made_up_task(number: int) -> Task:
    identity = {"layer": number % 12, "scope": "attention", "n": 8 + number, "dtype": "float32", "number": number}
    return Task(digest(identity), identity, {"model": "m", "text": "t", "kind": "text"}, Work(1e9, 3, 3))


def made_up_outcome(number: int, rows: int = 3) -> Outcome:
    task = made_up_task(number)
    content = [
        {
            "mask": "full",
            "input": i,
            "lower": number,
            "estimate": number + i / 7,
            "upper": number + 1,
            "far": math.inf,
            "notes": "x" * 200,
        }
        for i in range(rows)
    ]
    return Outcome(task, tuple((digest([task.key, i]), row) for i, row in enumerate(content)), None, None, 0.1, WHERE)


def filled(path: Path, tasks: int = 200) -> str:
    """A store with made-up tasks; returns the digest of its table."""
    with Store(path, write=True) as store:
        run = store.begin_run("plan", [made_up_task(i) for i in range(tasks)], "none", WHERE)
        for i in range(tasks):
            store.save(made_up_outcome(i), run)
        return table_digest(store.rows())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sweep")
    save_models(directory)
    return directory


def small(place: Path, **settings: Any) -> Plan:
    return plan_of(place, **({"layers": [0], "scopes": ["attention"]} | settings))


def test_rows_come_back_as_they_were(tmp_path: Path) -> None:
    filled(tmp_path / "run.db", 3)
    with Store(tmp_path / "run.db") as store:
        rows = store.rows()
        assert [(r["n"], r["input"], r["estimate"]) for r in rows[:4]] == [
            (8, 0, 0.0), (8, 1, 1 / 7), (8, 2, 2 / 7), (9, 0, 1.0)]  # fmt: skip
        assert all(r["far"] == math.inf and r["model"] == "m" and r["dtype"] == "float32" for r in rows)
        assert store.progress() == (3, 3, 0)
        assert store.environments() == [WHERE]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            store.connection.execute("DELETE FROM rows")


def test_a_longer_plan_measures_only_what_is_new(place: Path, tmp_path: Path) -> None:
    first = run_plan(small(place), tmp_path / "run.db")
    assert (first.measured, first.kept, first.rows) == (8, 0, 24)
    more = run_plan(small(place, layers="all"), tmp_path / "run.db")
    assert (more.measured, more.kept, more.rows) == (8, 8, 48)
    # The table is that of the last plan; the store still has all.
    fewer = run_plan(small(place), tmp_path / "run.db")
    assert (fewer.measured, fewer.rows, fewer.digest) == (0, 24, first.digest)
    with Store(tmp_path / "run.db") as store:
        assert len(store.rows(all_plans=True)) == 48
        assert store.plan() == small(place).text
        (where,) = store.environments()
        assert {"lipscope", "torch", "python"} <= where["versions"].keys()
        assert where["threads"] == 1
        assert where["cores"] == os.cpu_count()


def test_kept_tasks_say_under_which_name_and_version_they_were_measured(place: Path, tmp_path: Path) -> None:
    plan = small(place)
    run_plan(plan, tmp_path / "run.db")
    said: list[str] = []
    run_plan(plan, tmp_path / "run.db", notice=said.append)
    assert said == []

    expansion = expand(plan)
    with Store(tmp_path / "run.db") as store:
        here = store.environments()[0]
        renamed = [dataclasses.replace(task, labels={**task.labels, "text": "other"}) for task in expansion.tasks]
        (sentence, *_), named = kept_notices(store, renamed, here), expansion.tasks[0].labels["text"]
        assert f"'{named}'" in sentence
        assert "'other'" in sentence
        later = {**here, "versions": {**here["versions"], "torch": "99.0"}}
        (sentence,) = kept_notices(store, expansion.tasks, later)
        assert sentence.startswith(f"8 tasks were measured before with torch {here['versions']['torch']} (this run: 99.0)")


def test_failures_are_kept_and_retried_on_request(place: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    plan = small(place, kind="sweep_cases:Fragile", options={"broken": str(broken)})
    first = run_plan(plan, tmp_path / "run.db")
    assert (first.measured, first.failed, first.rows) == (6, 2, 16)
    assert first.failures[0]["error"] == "ArithmeticError: nine is not a good number"
    assert (first.failures[0]["n"], first.failures[0]["model"], first.failures[0]["attempts"]) == (9, "tiny-bert", 1)
    assert "in measure" in first.failures[0]["trace"]
    again = run_plan(plan, tmp_path / "run.db")
    assert (again.measured, again.kept, again.failed) == (0, 6, 2)
    still = run_plan(plan, tmp_path / "run.db", retry_failed=True)
    assert (still.measured, still.failed, still.failures[0]["attempts"]) == (0, 2, 2)
    broken.unlink()
    mended = run_plan(plan, tmp_path / "run.db", retry_failed=True)
    assert (mended.measured, mended.kept, mended.failed, mended.rows) == (2, 6, 0, 24)
    whole = run_plan(plan, tmp_path / "whole.db")
    assert whole.digest == mended.digest


def test_two_processes_on_one_store(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    code = (
        "import sys, time; from pathlib import Path; from lipscope.runs.store import StoreLock\n"
        "lock = StoreLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(LockedStoreError, match=rf"written by another process \(process {other.pid} on .*--store"):
            Store(path, write=True)
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    # A killed process holds no lock, although its file is still there.
    assert Path(f"{path}.lock").exists()
    with Store(path, write=True):
        with pytest.raises(LockedStoreError, match=f"process {os.getpid()}"):
            Store(path, write=True)
        with Store(path) as reader:
            assert reader.rows() == []


def test_a_link_to_a_store_has_the_lock_of_the_store(tmp_path: Path) -> None:
    path, link, lost = tmp_path / "run.db", tmp_path / "links" / "link.db", tmp_path / "lost.db"
    link.parent.mkdir()
    link.symlink_to(path)
    lost.symlink_to(tmp_path / "gone" / "run.db")
    for first, second in ((path, link), (link, path)):
        with Store(first, write=True), pytest.raises(LockedStoreError, match=f"process {os.getpid()}"):
            Store(second, write=True)
    assert [file.name for file in link.parent.iterdir()] == ["link.db"]
    with pytest.raises(FileNotFoundError, match=r"no directory '.*gone' for the store"):
        Store(lost, write=True)


def test_rows_that_are_there_already_are_refused_in_words(tmp_path: Path) -> None:
    filled(tmp_path / "run.db", 2)
    with Store(tmp_path / "run.db", write=True) as store:
        before = store.rows()
        with pytest.raises(StoreError, match=r"has some of these rows already \(UNIQUE .*Nothing was changed"):
            store.save(made_up_outcome(1), 1)
        assert store.rows() == before


@pytest.mark.parametrize("version", [3, VERSION + 1])
def test_a_store_of_another_version_is_refused_unchanged(tmp_path: Path, version: int) -> None:
    path = tmp_path / "run.db"
    filled(path, 2)
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE what_comes_next (x)")
        db.execute(f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    for write in (False, True):
        with pytest.raises(StoreVersionError, match=f"another version .*schema {version}; this one knows {VERSION}"):
            Store(path, write=write)
    assert path.read_bytes() == before


def test_other_files_are_refused_unchanged(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as db:
        db.execute("CREATE TABLE things (x)")
    words = tmp_path / "plan.toml"
    words.write_text("models = ['a']\n" * 1000)
    for path, message in ((other, "not a lipscope store"), (words, "left as it is")):
        before = path.read_bytes()
        with pytest.raises(ForeignFileError, match=message):
            Store(path, write=True)
        assert path.read_bytes() == before
    with pytest.raises(FileNotFoundError, match="no store"):
        Store(tmp_path / "nowhere.db")
    with pytest.raises(FileNotFoundError, match="no directory"):
        Store(tmp_path / "nowhere" / "run.db", write=True)


def _break(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    size = 4096
    rng = random.Random(1)
    match how:
        case "pages":
            for page in rng.sample(range(20, len(content) // size), 4):
                content[page * size : (page + 1) * size] = rng.randbytes(size)
        case "truncated":
            del content[len(content) * 2 // 3 :]
        case "first page":
            content[:size] = bytes(size)
        case "one digit":
            place = content.index(b'"estimate": 5')
            content[place + 12 : place + 13] = b"6"
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("how", ["pages", "truncated", "first page", "one digit"])
def test_a_damaged_store_gives_back_what_is_readable(tmp_path: Path, how: str) -> None:
    path = tmp_path / "run.db"
    filled(path)
    with Store(path) as store:
        whole = {row["key"]: row for row in store.rows()}
        tasks = store.tasks("done")
    _break(path, how)
    broken = path.read_bytes()
    with Store(path, write=True) as store:
        recovery = store.recovery
        assert recovery is not None
        rows, kept = store.rows(all_plans=True), store.tasks("done")
    # Nothing invented, nothing changed, whole tasks only, and everything is accounted for.
    assert all(whole[row["key"]] == row for row in rows)
    assert kept <= tasks
    assert (recovery.kept_tasks, recovery.kept_rows) == (len(kept), len(rows)) == (len(kept), 3 * len(kept))
    assert recovery.damaged.read_bytes() == broken
    least = {"pages": 150, "truncated": 60, "first page": 200, "one digit": 199}[how]
    assert len(kept) >= least
    if how != "truncated":
        assert len(kept) + len(recovery.lost) + (recovery.lost_unnamed or 0) == 200
    if how == "one digit":
        assert recovery.lost == ("m, layer 5, scope attention, n = 13",)
        assert "layer 5" in str(recovery)
    # What was lost is measured again, and the table is what it was.
    with Store(path, write=True) as store:
        assert store.recovery is None
        run = store.begin_run("plan", [made_up_task(i) for i in range(200)], "none", WHERE)
        for i in range(200):
            if made_up_task(i).key not in kept:
                store.save(made_up_outcome(i), run)
        assert {row["key"]: row for row in store.rows()} == whole


def test_a_damaged_sweep_is_recovered_and_completed(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    whole = run_plan(small(place), path)
    with closing(sqlite3.connect(path)) as db:
        db.execute(
            "UPDATE rows SET measured = replace(measured, 'estimate', 'estimatf') WHERE n = 9 AND model = 'tiny-gpt2'"
        )
        db.commit()
    notices: list[str] = []
    again = run_plan(small(place), path, notice=notices.append)
    assert (again.measured, again.kept, again.digest) == (1, 7, whole.digest)
    assert "Recovered: 20 rows of 7 tasks" in notices[0]
    assert "tiny-gpt2, layer 0, scope attention, n = 9" in notices[0]


def test_a_full_disk_stops_cleanly_and_the_sweep_goes_on_later(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.db"
    plan = expand(small(place, layers="all"))
    begin = Store.begin_run

    def narrow(self: Store, *arguments: Any) -> int:
        run = begin(self, *arguments)
        pages = self.connection.execute("PRAGMA page_count").fetchone()[0]
        self.connection.execute(f"PRAGMA max_page_count = {pages + 4}")
        return run

    monkeypatch.setattr(Store, "begin_run", narrow)
    with pytest.raises(StoreFullError, match=r"disk is probably full. All finished tasks are kept"):
        run_plan(plan, path)
    monkeypatch.undo()
    with Store(path) as store:
        done = len(store.tasks("done"))
        assert 0 < done < 16
        assert store.recovery is None  # every finished task has all its rows
    rest = run_plan(plan, path)
    assert (rest.kept, rest.measured, rest.failed) == (done, 16 - done, 0)
    assert rest.digest == run_plan(plan, tmp_path / "whole.db").digest


def test_export_table(tmp_path: Path, place: Path) -> None:
    run_plan(small(place), tmp_path / "run.db")
    with Store(tmp_path / "run.db") as store:
        rows = store.rows()
    text, count = export(tmp_path / "run.db", "csv")
    assert count == len(rows) == 24
    read = list(csv.DictReader(io.StringIO(text or "")))
    assert [float(r["estimate"]) for r in read] == [r["estimate"] for r in rows]
    assert json.loads(export(tmp_path / "run.db", "json")[0] or "") == rows
    export(tmp_path / "run.db", "parquet", tmp_path / "rows.parquet")
    table = pandas.read_parquet(tmp_path / "rows.parquet")
    assert list(table.columns) == list(rows[0])
    assert table["estimate"].tolist() == [r["estimate"] for r in rows]
    about = pyarrow.parquet.read_schema(tmp_path / "rows.parquet").metadata
    assert about[b"lipscope.plan"].decode() == small(place).text
    filled(tmp_path / "infinite.db", 1)
    assert json.loads(export(tmp_path / "infinite.db", "json")[0] or "")[0]["far"] is None
    for arguments, message in (
        (("xlsx",), "format must be"),
        (("parquet",), "binary"),
        (("csv", tmp_path / "no" / "x"), "no directory"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            export(tmp_path / "run.db", *arguments)
    assert not list(tmp_path.glob(".*part"))


def test_exported_rows_tell_measurements_apart(tmp_path: Path, place: Path) -> None:
    changes: list[dict[str, Any]] = [
        {}, {"seed": 1}, {"rtol": 1e-4}, {"delta": 1e-4}, {"interval": 0}, {"max_steps": 200}, {"options": {"x": 1}},
        {"threads": 2}, {"inputs": 3}, {"batch_tokens": 6}, {"quantities": ["sweep_cases:largest_token"]},
    ]  # fmt: skip
    model = small(place).blocks[0].models[1]
    for change in changes:
        run_plan(small(place, **({"models": [model], "lengths": [6], "inputs": 2} | change)), tmp_path / "run.db")
    export(tmp_path / "run.db", "parquet", tmp_path / "rows.parquet", all_plans=True)
    table = pandas.read_parquet(tmp_path / "rows.parquet")
    assert len(table) == 2 * len(changes) + 1
    what = ["input", *IDENTITY_COLUMNS]
    assert not table.duplicated(what).any()
    assert sorted(table["rtol"].unique()) == [1e-4, 1e-3]
    assert table["options"].dropna().unique().tolist() == ['{"x": 1}']
    # The digest of an input is that of its tokens, whatever shared its pass; input 0 of another seed is another text.
    first = table[table["input"] == 0]
    job = expand(small(place, models=[model], lengths=[6], inputs=2)).jobs[0]
    assert set(first.loc[first["seed"] == 0, "input_digest"]) == {digest(job.payload["ids"][0])[:12]}
    assert not set(first.loc[first["seed"] == 1, "input_digest"]) & set(first.loc[first["seed"] == 0, "input_digest"])


def test_a_column_of_several_types_is_text_in_parquet(tmp_path: Path) -> None:
    values = [1.5, "none", None, True, [1, 2], {"a": 1}]
    task = made_up_task(0)
    rows = tuple((digest([task.key, i]), {"input": i, "mixed": value, "whole": i}) for i, value in enumerate(values))
    with Store(tmp_path / "run.db", write=True) as store:
        run = store.begin_run("plan", [task], "none", WHERE)
        store.save(Outcome(task, rows, None, None, 0.1, WHERE), run)
    assert [row["mixed"] for row in json.loads(export(tmp_path / "run.db", "json")[0] or "")] == values
    export(tmp_path / "run.db", "parquet", tmp_path / "rows.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "rows.parquet")
    assert table["mixed"].to_pylist() == ["1.5", "none", None, "true", "[1, 2]", '{"a": 1}']
    assert table["whole"].to_pylist() == list(range(len(values)))
