"""``run_plan``: measure what a plan asks for and the store does not have yet.

A task is known by its content: measured before under another name, or by other versions, it is not measured again. The rows
then carry the old name, and digits beyond the tolerance may differ between versions, so both are said.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from lipscope.runs.engines import Engine, InProcess
from lipscope.runs.estimate import Estimate, calibrate, estimate
from lipscope.runs.plan import Plan
from lipscope.runs.recovery import Recovery
from lipscope.runs.rows import table_digest
from lipscope.runs.store import Store
from lipscope.runs.tasks import Expansion, Task, expand
from lipscope.runs.work import environment, run_job

Progress = Callable[["Step"], None]


@dataclass(frozen=True)
class Step:
    """Where a sweep stands.

    Attributes:
        done: work done in this run, in floating-point operations.
        total: work of this run.
        tasks: tasks finished in this run.
        all_tasks: tasks of this run.
        failed: tasks of this run that failed.
        task: the task that just ended; None at the start.
    """

    done: float
    total: float
    tasks: int
    all_tasks: int
    failed: int
    task: Task | None = None


@dataclass(frozen=True)
class Summary:
    """What a run did.

    Attributes:
        tasks: tasks that the plan asks for.
        kept: tasks that the store had already.
        measured: tasks measured now.
        failed: tasks of the plan that have failed, now or before; see ``Store.failures``.
        rows: rows of the plan in the store.
        seconds: time of this run.
        digest: hash of the plan's table but for its times; equal digests are equal tables.
        failures: the failed tasks.
        recovery: what a damaged store lost, or None.
    """

    tasks: int
    kept: int
    measured: int
    failed: int
    rows: int
    seconds: float
    digest: str
    failures: list[dict[str, Any]] = field(default_factory=list)
    recovery: Recovery | None = None


def run_plan(
    plan: Plan | Expansion,
    store: str | os.PathLike[str],
    *,
    engine: Engine | None = None,
    retry_failed: bool = False,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
) -> Summary:
    """Measure what a plan asks for and the store does not have yet.

    Every finished task is in the store before the next one counts. A run that is stopped, by whatever, goes on where it was
    when it is called again.

    Args:
        plan: the plan, or its expansion.
        store: the file of the store; made when it does not exist.
        engine: who computes; this process by default.
        retry_failed: also measure tasks that failed before.
        progress: called at the start and after every task.
        notice: called with what the user should know at once: a damaged store, tasks kept from another name or version.

    Returns:
        What was done.

    Raises:
        ValueError: when the plan names what does not exist; before anything is measured.
        StoreError: when the store cannot be used, is locked, or the disk is full.
        EngineError: when the cluster is not there.

    Example:
        >>> import lipscope, tempfile
        >>> plan = lipscope.runs.Plan.of(models=["gpt2-random"], texts=["python-docs"], layers=[0], lengths=[8], inputs=2)
        >>> expansion = lipscope.runs.expand(plan)      # loads the model and refuses what it does not have
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     first = lipscope.runs.run_plan(expansion, f"{directory}/run.db")
        ...     again = lipscope.runs.run_plan(expansion, f"{directory}/run.db")
        >>> (first.measured, first.rows), (again.measured, again.kept)
        ((1, 2), (0, 1))
    """
    start = time.monotonic()
    expansion = plan if isinstance(plan, Expansion) else expand(plan)
    engine = engine or InProcess()
    with Store(store, write=True) as ledger:
        if ledger.recovery is not None and notice is not None:
            notice(str(ledger.recovery))
        tasks = expansion.tasks
        keys = {task.key for task in tasks}
        had = ledger.tasks("done") & keys
        jobs = expansion.pending(had if retry_failed else had | ledger.tasks("failed"))
        total = sum(job.flops for job in jobs)
        all_tasks = sum(len(job.tasks) for job in jobs)
        here = environment(expansion.plan.threads)
        if notice is not None:
            for sentence in kept_notices(ledger, tasks, here):
                notice(sentence)
        run = ledger.begin_run(expansion.plan.text, tasks, engine.name, here)
        done, measured, failed = 0.0, 0, 0
        if progress is not None:
            progress(Step(done, total, 0, all_tasks, failed))
        if jobs:
            with engine:
                for outcome in engine.run(jobs):
                    ledger.save(outcome, run)
                    done += outcome.task.work.flops
                    measured += 1
                    failed += outcome.error is not None
                    if progress is not None:
                        progress(Step(done, total, measured, all_tasks, failed, outcome.task))
        ledger.finish_run(run)
        rows = ledger.rows()
        failures = ledger.failures(keys)
        return Summary(
            len(tasks), len(had), measured - failed, len(failures), len(rows), time.monotonic() - start, table_digest(rows),
            failures, ledger.recovery,
        )  # fmt: skip


def dry_run(
    plan: Plan, store: str | os.PathLike[str], *, workers: int = 1, retry_failed: bool = False
) -> tuple[Expansion, Estimate]:
    """What a plan would take: every task is listed, and a sample is measured for the time; nothing is stored.

    Rates of tasks that the store has already are taken from there.
    """
    expansion = expand(plan)
    known: dict[Any, float] = {}
    finished: set[str] = set()
    if os.path.exists(store):
        with Store(store) as ledger:
            known = ledger.rates()
            finished = ledger.tasks("done") if retry_failed else ledger.tasks("done") | ledger.tasks("failed")
    jobs = expansion.pending(finished)
    return expansion, estimate(jobs, calibrate(jobs, run_job, known), workers)


_TOLD = ("lipscope", "torch", "transformers")


def kept_notices(ledger: Store, tasks: Iterable[Task], here: dict[str, Any]) -> list[str]:
    """One sentence for every other name and every other version behind the tasks that are done already.

    Args:
        ledger: the store.
        tasks: what the plan asks for now.
        here: the environment of this run.

    Returns:
        The sentences; none when names and versions agree.
    """
    before = ledger.provenance()
    renamed: Counter[tuple[str, str, str]] = Counter()
    versions: Counter[tuple[str, str, str]] = Counter()
    for task in tasks:
        if task.key not in before:
            continue
        labels, environment = before[task.key]
        for what in ("model", "text"):
            old, new = labels.get(what), task.labels.get(what)
            if old is not None and new is not None and old != new:
                renamed[what, old, new] += 1
        for package in _TOLD:
            old, new = environment.get("versions", {}).get(package), here["versions"].get(package)
            if old is not None and new is not None and old != new:
                versions[package, old, new] += 1
    return [
        f"{count} tasks of {what} {new!r} were measured before as {old!r}, which has the same content: their rows keep "
        f"the name {old!r}"
        for (what, old, new), count in renamed.items()
    ] + [
        f"{count} tasks were measured before with {package} {old} (this run: {new}) and are kept; name another store to "
        "measure them again"
        for (package, old, new), count in versions.items()
    ]
