"""Attacks on sweeps and their stores: kills, interruptions, full disks and damage.

A sweep is forked from this process, which has torch and the model loaded, and runs the command line as a user would.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from contextlib import closing, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from lipscope.runs import Store, StoreError
from report_card import Card

FLAGS = ["--model", "gpt2-mini", "--text", "python-docs", "--layers", "0,2", "--lengths", "6,9,12,16", "--inputs", "3",
         "--scope", "attention", "--scope", "head", "--views", "1"]  # fmt: skip
# A request to end is answered within this time, or the process counts as hanging.
DEADLINE = 15.0
# What a sweep may end with: done, some tasks failed, refused, interrupted.
STATUSES = {0, 1, 2, 130, 143}


def sweep(store: Path, log: Path, *, prepare: Callable[[], object] = lambda: None) -> int:
    """Fork ``lipscope sweep``; returns the number of its process."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with log.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
            os.dup2(file.fileno(), 2)  # what is said past Python goes there too
            prepare()
            from lipscope.cli.main import main

            sys.argv = ["lipscope", "sweep", *FLAGS, "--store", str(store)]
            try:
                main()
            except SystemExit as end:
                file.flush()
                os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        import traceback

        with log.open("a", encoding="utf-8") as file:
            file.write("Traceback outside of the command\n")
            traceback.print_exc(file=file)
        os._exit(99)
    os._exit(0)


def wait(child: int, seconds: float) -> int | None:
    """The wait status of a child, or None when it still runs after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


def rows_by_key(store: Path) -> dict[str, Any]:
    """The measured rows of a store by their key, without the time they took."""
    with Store(store) as opened:
        rows = opened.rows(all_plans=True)
    for row in rows:
        row.pop("seconds", None)
    keyed = {row["key"]: row for row in rows}
    if len(keyed) != len(rows):
        raise AssertionError(f"{len(rows) - len(keyed)} rows twice in {store}")
    return keyed


def undisturbed(directory: Path) -> tuple[Path, float]:
    """A finished sweep to compare with, and how long it took."""
    store, start = directory / "undisturbed.db", time.monotonic()
    status = wait(sweep(store, directory / "undisturbed.log"), 300)
    if status != 0:
        raise SystemExit(f"the undisturbed sweep ended with {status}: {(directory / 'undisturbed.log').read_text()}")
    return store, time.monotonic() - start


def kills(card: Card, directory: Path, truth: Path, life: float, rng: random.Random, count: int) -> None:
    """SIGKILL, SIGTERM and SIGINT at random moments: no row lost, doubled or changed, and every request to end obeyed."""
    expected = rows_by_key(truth)
    tally = dict.fromkeys(("SIGKILL", "SIGTERM", "SIGINT"), 0)
    number, finished, slowest = 0, 0, 0.0
    store, before = directory / "kills-0.db", dict[str, Any]()
    while sum(tally.values()) < count:
        log = directory / f"kills-{number}.log"
        name = rng.choices(list(tally), weights=(2, 2, 1))[0]
        child = sweep(store, log)
        status = wait(child, rng.uniform(0, 0.9 * life) if rng.random() < 0.9 else rng.uniform(0, 0.05))
        if status is None:
            asked = time.monotonic()
            os.kill(child, getattr(signal, name))
            status = wait(child, DEADLINE)
            taken = time.monotonic() - asked
            if name != "SIGKILL":
                slowest = max(slowest, taken)
            tally[name] += 1
            if status is None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                card.check(False, f"{name} was not obeyed within {DEADLINE:g} s")
            else:
                ended = os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
                # It may have come to its end just before.
                fine = {-signal.SIGKILL, 0} if name == "SIGKILL" else {*STATUSES, -getattr(signal, name)}
                card.check(ended in fine, f"after {name} the sweep ended with {ended}")
        else:
            finished += 1
        if store.exists():
            try:
                now = rows_by_key(store)
            except StoreError as error:  # killed before its first page was on the disk
                card.check(not before, f"rows lost: {error}")
                now = {}
            card.check(before.keys() <= now.keys(), f"{len(before.keys() - now.keys())} rows lost after {name}")
            card.check(all(now[key] == expected.get(key) for key in now), f"a row changed after {name}")
            before = now
        card.check("Traceback" not in log.read_text(encoding="utf-8"), f"a traceback in {log}")
        if len(before) == len(expected):
            number, before = number + 1, {}
            store = directory / f"kills-{number}.db"
    status = wait(sweep(store, directory / "last.log"), 300)
    card.check(status == 0 and rows_by_key(store) == expected, "the sweep did not end with the undisturbed rows")
    told = ", ".join(f"{times} {name}" for name, times in tally.items())
    card.details += [told, f"{number + 1} stores", f"slowest answer to a request to end {slowest:.1f} s"]


def full_disks(card: Card, directory: Path, truth: Path, rng: random.Random, count: int) -> None:
    """No file may grow beyond a random size: the sweep says so, keeps what it has, and goes on when there is room."""
    expected, size = rows_by_key(truth), truth.stat().st_size
    for number in range(count):
        store, log = directory / f"disk-{number}.db", directory / f"disk-{number}.log"
        room = int(rng.uniform(0.01, 1.2) * size)

        def shrink(room: int = room) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

        status = wait(sweep(store, log, prepare=shrink), 300)
        said = log.read_text(encoding="utf-8")
        card.check(
            status is not None and os.WIFEXITED(status) and "Traceback" not in said, f"full at {room} bytes: {said[-300:]}"
        )
        status = wait(sweep(store, directory / f"disk-{number}-again.log"), 300)
        card.check(status == 0 and rows_by_key(store) == expected, f"rows missing after a disk full at {room} bytes")


def damage(card: Card, directory: Path, truth: Path, rng: random.Random, count: int) -> None:
    """Bytes flipped, pages overwritten, files cut, fields edited: what is shown is true, what is gone is named."""
    expected = rows_by_key(truth)
    content = truth.read_bytes()
    tables = _columns(truth)
    silent = refused = recovered = 0
    for number in range(count):
        place = directory / "damaged"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        store = place / "run.db"
        what = rng.choice([_flip, _zero, _cut, _noise]) if number % 2 else _edit
        told = what(store, content, rng, tables)
        try:
            with Store(store, write=True) as opened:
                opened.connection.execute("SELECT 1")
                announced = opened.recovery is not None
            shown = rows_by_key(store)
        except (StoreError, OSError, ValueError) as error:
            refused += 1
            card.check(bool(str(error)), f"{told}: refused without a word")
            continue
        except Exception as error:
            card.check(False, f"{told}: {type(error).__name__}: {error}")
            continue
        recovered += announced
        wrong = [key for key, row in shown.items() if row != expected.get(key)]
        card.check(not wrong, f"{told}: {len(wrong)} rows shown that were never measured")
        missing = expected.keys() - shown.keys()
        silent += bool(missing) and not announced
        card.check(not missing or announced, f"{told}: {len(missing)} rows gone without a word")
    again = 0
    for number in range(max(count // 20, 3)):
        store = directory / f"mended-{number}.db"
        told = rng.choice([_flip, _zero, _noise])(store, content, rng, tables)
        status = wait(sweep(store, directory / f"mended-{number}.log"), 300)
        if status is not None and os.WIFEXITED(status) and os.WEXITSTATUS(status) == 2:
            continue  # nothing of it can be read: refused, and the file left as it is
        again += 1
        card.check(status == 0 and rows_by_key(store) == expected, f"{told}: measuring again did not give all rows")
    card.details += [f"{recovered} recovered", f"{refused} refused", f"{again} measured again to the end"]


Tables = list[tuple[str, str]]


def _columns(store: Path) -> Tables:
    with closing(sqlite3.connect(store)) as db:
        names = [
            name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%'")
        ]
        return [
            (name, column[1]) for name in names for column in db.execute(f"PRAGMA table_info({name})") if column[1] != "id"
        ]


def _flip(store: Path, content: bytes, rng: random.Random, tables: Tables) -> str:
    changed, places = bytearray(content), [rng.randrange(len(content)) for _ in range(rng.choice((1, 1, 4, 40)))]
    for place in places:
        changed[place] ^= 1 << rng.randrange(8)
    store.write_bytes(bytes(changed))
    return f"{len(places)} bits flipped, the first in byte {places[0]}"


def _zero(store: Path, content: bytes, rng: random.Random, tables: Tables) -> str:
    page = rng.randrange(len(content) // 4096)
    store.write_bytes(content[: 4096 * page] + bytes(4096) + content[4096 * (page + 1) :])
    return f"page {page} zeroed"


def _noise(store: Path, content: bytes, rng: random.Random, tables: Tables) -> str:
    start, length = rng.randrange(len(content)), rng.randrange(1, 3000)
    store.write_bytes(content[:start] + rng.randbytes(length) + content[start + length :])
    return f"{length} random bytes from {start} on"


def _cut(store: Path, content: bytes, rng: random.Random, tables: Tables) -> str:
    length = rng.randrange(len(content))
    store.write_bytes(content[:length])
    return f"cut after {length} bytes"


def _edit(store: Path, content: bytes, rng: random.Random, tables: Tables) -> str:
    """One field of one record replaced by something of another type, by another number, or by bytes that are no text."""
    store.write_bytes(content)
    table, column = rng.choice(tables)
    with closing(sqlite3.connect(store, isolation_level=None)) as db:
        db.text_factory = bytes
        if table == "plan_tasks":  # it has no record numbers
            table, column = "tasks", "key"
        found = db.execute(f"SELECT rowid, {column} FROM {table} ORDER BY random() LIMIT 1").fetchone()
        if found is None:
            return f"{table}.{column} is empty"
        record, value = found
        text = value if isinstance(value, bytes) else str(value).encode()
        digit = next((i for i, byte in enumerate(text) if chr(byte).isdigit()), None)
        other: Any = rng.choice([None, "", "<b>x</b>", b"\xff\xfe\x00", -1, 1e308, "[" * 3000, 2**62])
        if digit is not None and rng.random() < 0.5:
            other = (text[:digit] + str(9 - int(chr(text[digit]))).encode() + text[digit + 1 :]).decode(errors="replace")
        try:
            if isinstance(other, bytes):
                db.execute(f"UPDATE {table} SET {column} = CAST(? AS TEXT) WHERE rowid = ?", (other, record))
            else:
                db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (other, record))
        except sqlite3.IntegrityError:
            return f"{table}.{column} cannot hold {other!r}"
    return f"{table}.{column} of record {record} set to {str(other)[:40]!r}"
