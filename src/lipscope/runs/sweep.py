"""``run_plan``: measure what a plan asks for and the store does not have yet.

A task is known by its content: measured before under another name, or by other versions, it is not measured again. The rows
then carry the old name, and digits beyond the tolerance may differ between versions, so both are said.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from lipscope.runs.engines import Engine, InProcess, check_workers
from lipscope.runs.estimate import Estimate, calibrate, estimate
from lipscope.runs.plan import Plan
from lipscope.runs.recovery import Recovery
from lipscope.runs.run import worst_inputs
from lipscope.runs.schema import digest, table_digest
from lipscope.runs.store import VIEWS, Store
from lipscope.runs.tasks import Expansion, Job, Task, Work, expand
from lipscope.runs.work import environment

Progress = Callable[["Step"], None]

VIEWS_KIND = "lipscope.runs.kinds:Tokens"
# A view finds eight singular values, and a column of influence for every token.
_LOOK = 10.0
# What a view has in common with the task that it looks into.
_SAME = ("model", "loader", "dtype", "threads", "text", "n", "layer", "scope")


@dataclass(frozen=True)
class Step:
    """Where a sweep stands."""

    done: float  # work done in this run, in floating-point operations
    total: float  # work of this run
    tasks: int  # tasks finished in this run
    all_tasks: int  # tasks of this run
    failed: int  # tasks of this run that failed
    task: Task | None = None  # the task that just ended; None at the start and while waiting


@dataclass(frozen=True)
class Summary:
    """What a run did."""

    tasks: int  # tasks that the plan asks for
    kept: int  # tasks that the store had already
    measured: int  # tasks measured now
    failed: int  # tasks of the plan that have failed, now or before; see ``Store.failures``
    rows: int  # rows of the plan in the store
    seconds: float  # time of this run
    digest: str  # hash of the plan's table but for its times; equal digests are equal tables
    failures: list[dict[str, Any]] = field(default_factory=list)  # the failed tasks
    recovery: Recovery | None = None  # what a damaged store lost, or None


def run_plan(
    plan: Plan | Expansion,
    store: str | os.PathLike[str] | Store,
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
        store: the file of the store, made when it does not exist; or a store that is open for writing.
        engine: who computes; this process by default.
        retry_failed: also measure tasks that failed before.
        progress: called at the start, after every task, and now and then while waiting; what it raises ends the run.
        notice: called with what the user should know at once: a damaged store (by default a warning), tasks kept from
            another name or version.

    Raises:
        ValueError: when the plan names what does not exist; before anything is measured.
        StoreError: when the store cannot be used, is locked, or the disk is full.
        EngineError: when the cluster is not there.

    Example:
        >>> import lipscope, tempfile
        >>> plan = lipscope.runs.Plan.of(models=["gpt2-mini"], texts=["python-docs"], layers=[0], lengths=[8], inputs=2)
        >>> expansion = lipscope.runs.expand(plan)      # loads the model and refuses what it does not have
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     first = lipscope.runs.run_plan(expansion, f"{directory}/run.db")
        ...     again = lipscope.runs.run_plan(expansion, f"{directory}/run.db")
        >>> (first.measured, first.rows), (again.measured, again.kept)
        ((1, 2), (0, 1))
    """
    start = time.monotonic()
    expansion = plan if isinstance(plan, Expansion) else expand(plan)
    if not expansion.plan.text and not isinstance(store, Store):
        raise ValueError("a plan that holds objects of this process has no text to keep: run it into Store(None)")
    engine = engine or InProcess()
    with nullcontext(store) if isinstance(store, Store) else Store(store, write=True, notice=notice) as ledger:
        tasks = expansion.tasks
        keys = {task.key for task in tasks}
        done, failed = ledger.tasks("done"), set() if retry_failed else ledger.tasks("failed")
        jobs = expansion.pending(done | failed)
        here = environment(expansion.plan.threads)
        if notice is not None:
            for sentence in kept_notices(ledger, tasks, here):
                notice(sentence)
        run = ledger.begin_run(expansion.plan.text, tasks, engine.name, here)
        step = Step(0.0, sum(job.flops for job in jobs), 0, sum(len(job.tasks) for job in jobs), 0)
        progress = progress or (lambda step: None)
        with engine if jobs or any(job.views for job in expansion.jobs) else nullcontext():
            for now in _steps(engine, jobs, ledger, run, step):
                step = now
                progress(step)
            views = view_jobs(expansion, ledger)
            looks = [task for job in views for task in job.tasks]
            ledger.add_tasks(run, looks)
            views = [job for job in views if job.tasks[0].key not in done | failed]
            for _ in _steps(engine, views, ledger, run, step) if views else ():
                progress(replace(step, task=None))
        ledger.finish_run(run)
        rows = ledger.rows()
        failures = ledger.failures(keys | {task.key for task in looks})
        return Summary(
            tasks=len(tasks),
            kept=len(done & keys),
            measured=step.tasks - step.failed,
            failed=len(failures),
            rows=len(rows),
            seconds=time.monotonic() - start,
            digest=table_digest(rows),
            failures=failures,
            recovery=ledger.recovery,
        )


# The verb of the package: ``lipscope.sweep(plan, store)``.
sweep = run_plan


def _steps(engine: Engine, jobs: Sequence[Job], ledger: Store, run: int, step: Step) -> Iterator[Step]:
    """Run the jobs and keep every outcome; yields where the run stands, first of all before it starts."""
    yield step
    for outcome in engine.run(jobs) if jobs else ():
        if outcome is None:
            yield replace(step, task=None)
            continue
        ledger.save(outcome, run)
        done, failed = step.done + outcome.task.work.flops, step.failed + (outcome.error is not None)
        step = replace(step, done=done, tasks=step.tasks + 1, failed=failed, task=outcome.task)
        yield step


def view_jobs(expansion: Expansion, ledger: Store) -> list[Job]:
    """One job for each of the worst places that the plan wants to see token by token; their blocks must be measured."""
    groups: dict[tuple[Any, ...], list[tuple[Job, Task]]] = {}
    for job in expansion.jobs:
        for task in job.tasks if job.views else ():
            group = (job.fingerprint, job.dtype, task.identity["text"], task.identity["scope"], job.views)
            groups.setdefault(group, []).append((job, task))
    jobs = []
    for (*_, count), members in groups.items():
        measured = ledger.rows_of({task.key for _, task in members})
        places = {row["key"]: (job, task) for job, task in members for row in measured.get(task.key, ())}
        rows = [row for found in measured.values() for row in found]
        for row in worst_inputs(rows, count):
            job, task = places[row["key"]]
            ids = job.payload["ids"][row["input"] - job.payload["first"]]
            identity = {name: task.identity[name] for name in _SAME} | {
                "kind": VIEWS_KIND,
                "heads": None if row["head"] is None else [row["head"]],
                "first": row["input"],
                "batch": digest([ids]),
            }
            work = Work(_LOOK * task.work.flops / task.work.inputs, 1, 1)
            view = Task(digest(identity), identity, task.labels | {"kind": VIEWS}, work)
            payload = {name: value for name, value in job.payload.items() if name == "signal"}
            payload |= {"ids": ids, "first": row["input"]}
            jobs.append(replace(job, kind=VIEWS_KIND, payload=payload, tasks=(view,), views=0))
    return jobs


def dry_run(
    plan: Plan, store: str | os.PathLike[str], *, workers: int = 1, retry_failed: bool = False
) -> tuple[Expansion, Estimate]:
    """What a plan would take: every task is listed, and a sample is measured for the time; nothing is stored.

    Rates of tasks that the store has already are taken from there.
    """
    check_workers(workers)
    expansion = expand(plan)
    with Store(store if os.path.exists(store) else None) as ledger:
        known = ledger.rates()
        finished = ledger.tasks("done") if retry_failed else ledger.tasks("done") | ledger.tasks("failed")
    jobs = expansion.pending(finished)
    return expansion, estimate(jobs, calibrate(jobs, known), workers)


_TOLD = ("lipscope", "torch", "transformers")


def kept_notices(ledger: Store, tasks: Iterable[Task], here: dict[str, Any]) -> list[str]:
    """One sentence for every other name and every other version behind the tasks that are done already."""
    before = ledger.provenance()
    told: Counter[str] = Counter()
    for task in tasks:
        labels, environment = before.get(task.key, ({}, {}))
        for what in ("model", "text"):
            old, new = labels.get(what), task.labels.get(what)
            if None not in (old, new) and old != new:
                same = f"of {what} {new!r} were measured before as {old!r}, which has the same content"
                told[f"{same}: their rows keep the name {old!r}"] += 1
        for package in _TOLD:
            old, new = environment.get("versions", {}).get(package), here["versions"].get(package)
            if None not in (old, new) and old != new:
                other = f"were measured before with {package} {old} (this run: {new}) and are kept"
                told[f"{other}; name another store to measure them again"] += 1
    return [f"{count} tasks {words}" for words, count in told.items()]
