"""Attacks on a sweep with Dask: where it listens; its worker, its scheduler, its driver killed; what is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from attack_stores import FLAGS, rows_by_key
from lipscope.runs import StoreError
from report_card import Card

LISTENING = "0A"


def children(process: int) -> set[int]:
    """All descendants of a process."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found, fresh = set[int](), {process}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def listening(processes: set[int]) -> set[str]:
    """Addresses on which any of the processes accepts connections, in the kernel's hexadecimal form."""
    inodes = set()
    for process in processes:
        try:
            links = [os.readlink(entry) for entry in Path(f"/proc/{process}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                found.add(fields[1].rpartition(":")[0])
    return found


def alive(processes: set[int]) -> set[int]:
    """Those that still run; ended ones that nobody has waited for do not count."""
    left = set()
    for process in processes:
        try:
            state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            left.add(process)
    return left


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A program of this environment, with its words in a file."""
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-m", *command], stdout=file, stderr=file, cwd=log.parent)


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait for something; False when it did not happen in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def sweep(store: Path, *more: str) -> subprocess.Popen[bytes]:
    """The command line in a process of its own."""
    return start(["lipscope", "sweep", *FLAGS, "--store", str(store), *more], Path(f"{store}.log"))


def some_rows(store: Path) -> bool:
    """Whether a store has rows already."""
    try:
        return store.exists() and bool(rows_by_key(store))
    except (OSError, ValueError, StoreError):  # it is being made
        return False


def finished(card: Card, store: Path, truth: Path, process: subprocess.Popen[bytes], what: str) -> None:
    """Check that a sweep comes to its end with the rows of an undisturbed one."""
    try:
        code: int | None = process.wait(120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        code = None
    said = Path(f"{store}.log").read_text(encoding="utf-8", errors="replace")
    good = code == 0 and rows_by_key(store) == rows_by_key(truth)
    card.check(good, f"{what}: ended with {code}, {said[-300:]}")


def cluster(card: Card, directory: Path, truth: Path) -> None:
    """The attacks one after the other."""
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}

    store = directory / "worker.db"
    process = sweep(store, "--workers", "2")
    until(lambda: len(children(process.pid)) >= 3, 60)
    until(lambda: some_rows(store), 60)
    family = children(process.pid) | {process.pid}
    where = listening(family)
    card.check(bool(where) and where <= loopback, f"a local cluster listens on {where}")
    workers = [child for child in children(process.pid) if "spawn_main" in _command(child)]
    if workers:
        os.kill(max(workers), signal.SIGKILL)
    finished(card, store, truth, process, "a worker was killed")
    card.check(until(lambda: not alive(family), 20), f"processes left after the sweep: {alive(family)}")

    store = directory / "driver.db"
    process = sweep(store, "--workers", "2")
    until(lambda: some_rows(store), 60)
    family = children(process.pid)
    process.kill()
    process.wait()
    gone = until(lambda: not alive(family), 40)
    card.check(gone, f"orphans 40 s after the driver was killed: {alive(family)}")
    for orphan in alive(family):
        os.kill(orphan, signal.SIGKILL)
    finished(card, store, truth, sweep(store), "going on after the driver was killed")

    store = directory / "scheduler.db"
    port = _free_port()
    address = f"tcp://127.0.0.1:{port}"
    local = ["--host", "127.0.0.1", "--no-dashboard"]
    scheduler = start(["distributed.cli.dask_scheduler", "--port", str(port), *local], directory / "scheduler.log")
    worker = start(["distributed.cli.dask_worker", address, "--nthreads", "1", *local], directory / "worker.log")
    process = sweep(store, "--scheduler", address)
    try:
        card.check(until(lambda: some_rows(store), 90), "no row with a scheduler of its own")
        scheduler.kill()
        try:
            code: int | None = process.wait(90)
        except subprocess.TimeoutExpired:
            code = None
        said = Path(f"{store}.log").read_text(encoding="utf-8", errors="replace")
        card.check(code in (0, 2) and "Traceback" not in said, f"the scheduler was killed: ended with {code}, {said[-300:]}")
    finally:
        for program in (process, worker, scheduler):
            for child in children(program.pid) | {program.pid}:
                if alive({child}):
                    os.kill(child, signal.SIGKILL)
            program.wait()
    before = rows_by_key(store)
    finished(card, store, truth, sweep(store), "going on after the scheduler was killed")
    card.check(before.keys() <= rows_by_key(store).keys(), "rows lost when the scheduler was killed")


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
