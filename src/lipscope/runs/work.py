"""What a worker does with a job: load the model, run the pass, measure task after task.

Nothing here depends on the engine, on the number of workers or on what ran before, so every engine gives the same bits.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lipscope.runs.environment import environment
from lipscope.runs.fingerprints import digest
from lipscope.runs.loading import loaded_model
from lipscope.runs.registry import Kind, Row, load_object
from lipscope.runs.tasks import Job, Task


@dataclass(frozen=True)
class Outcome:
    """What became of one task.

    Attributes:
        task: the task.
        rows: (key, row) pairs; empty when it failed.
        error: one line, when it failed.
        trace: the traceback, when it failed.
        seconds: time it took.
        environment: where it ran.
    """

    task: Task
    rows: tuple[tuple[str, Row], ...]
    error: str | None
    trace: str | None
    seconds: float
    environment: dict[str, Any]


# Replaying puts hooks into the model and sets torch's threads: one task at a time in a process, also where a cluster
# gives its workers several threads.
_one_at_a_time = threading.Lock()


def run_job(job: Job) -> Iterator[Outcome]:
    """Measure the tasks of a job one after the other; a task that fails does not stop the others."""
    kind: Kind = load_object(job.kind)()
    where = environment(job.threads)
    start = time.perf_counter()
    with _one_at_a_time, torch_threads(job.threads):
        try:
            handle = loaded_model(job.model, job.dtype, job.fingerprint).handle
            recorded = kind.record(handle, job.payload)
        except Exception as error:
            for task in job.tasks:
                yield _failed(task, error, start, where)
            return
        for task in job.tasks:
            start = time.perf_counter()
            try:
                rows = kind.measure(handle, recorded, job.payload, task.identity)
                keyed = tuple((row_key(task, row, kind.coordinates), row) for row in rows)
                if len({key for key, _ in keyed}) < len(keyed):
                    raise ValueError(f"kind {job.kind} gave rows that {', '.join(kind.coordinates)} do not tell apart")
                yield Outcome(task, keyed, None, None, time.perf_counter() - start, where)
            except Exception as error:
                yield _failed(task, error, start, where)


def row_key(task: Task, row: Row, coordinates: tuple[str, ...]) -> str:
    """Content address of a row: that of its task, and its place in it."""
    return digest([task.key, {name: row.get(name) for name in coordinates}])


def _failed(task: Task, error: Exception, start: float, where: dict[str, Any]) -> Outcome:
    line = " ".join(f"{type(error).__name__}: {error}".split())
    trace = "".join(traceback.format_exception(error))
    return Outcome(task, (), line, trace, time.perf_counter() - start, where)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many torch threads for a while; then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
