"""Commands for sweeps: ``sweep`` measures many things and loses nothing, ``export`` writes its table for other tools."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipscope.cli import options as opt
from lipscope.cli.options import Group, indices, option
from lipscope.cli.source import look_first
from lipscope.cli.terminal import announce, echo, notice, print_table, progress_bar, waiting
from lipscope.rounding import counted, duration
from lipscope.runs.registry import Trust
from lipscope.runs.run import grouped

if TYPE_CHECKING:
    from lipscope.runs.estimate import Estimate
    from lipscope.runs.plan import Plan
    from lipscope.runs.sweep import Step, Summary
    from lipscope.runs.tasks import Expansion, Task


Format = StrEnum("Format", ["parquet", "csv", "json"])


@dataclass(frozen=True)
class Asked(Group):
    """A plan as options."""

    model: Annotated[list[str] | None, option("A model; may be repeated.")] = None
    text: Annotated[list[str] | None, option(f"{opt.CORPUS} May be repeated.")] = None
    layers: Annotated[str | None, option("'all' (the default), or indices such as 0,6,-1.")] = None
    per_head: opt.PerHead = False
    head: opt.HeadChoice = None
    scope: Annotated[list[str] | None, option("A scope as for scan, attention by default; may be repeated.")] = None
    lengths: Annotated[str | None, option(f"{opt.LENGTHS[:-1]}; 16,32,64,128 by default.")] = None
    inputs: Annotated[int | None, option("Inputs per length, 4 by default, disjoint in the text.")] = None
    pack: opt.Pack = False
    rtol: Annotated[float | None, option("Relative accuracy of the estimates, 0.001 by default.")] = None
    seed: Annotated[int | None, option("Seed of everything drawn, 0 by default.")] = None
    certificate: opt.Certificate = None
    dtype: opt.Dtype = None
    memory: opt.Memory = None
    views: Annotated[int | None, option(f"{opt.VIEWS}; 3 by default, where that is quick.")] = None
    threads: opt.Threads = None
    tokenizer: opt.Tokenizer = None
    stream: Annotated[bool | None, option("Read the weights layer by layer while measuring, in every worker anew.")] = None


NOTHING = Asked()


def sweep(
    plan: Annotated[
        Path | None,
        typer.Argument(help="A plan in TOML; without it, the options are the plan.", show_default=False),
    ] = None,
    store: Annotated[Path | None, option("Where rows are kept; PLAN.db or sweep.db by default.")] = None,
    asked: Asked = NOTHING,
    workers: opt.Workers = None,
    scheduler: opt.Scheduler = None,
    retry_failed: opt.RetryFailed = False,
    allow_pickle: opt.AllowPickle = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    trust_module: Annotated[
        list[str] | None, option("A module whose kinds, quantities and loaders the plan may name; may be repeated.")
    ] = None,
    dry_run: Annotated[bool, option("Print counts, time and memory, and stop.", "--dry-run")] = False,
) -> None:
    """Measure many models, texts, layers and lengths, and never lose a row. Run it again to go on where it stopped."""
    for one in asked.model or ():
        look_first(one)
    with gentle_end():
        chosen = _plan(plan, asked, Trust(tuple(trust_module or ()), allow_pickle, trust_remote_code))
        ledger = store or Path(f"{plan.stem}.db" if plan else "sweep.db")
        if dry_run:
            from lipscope.runs.sweep import dry_run as preview

            with waiting("looking at models and texts, and measuring a sample"):
                expansion, left = preview(chosen, ledger, workers=workers or 1, retry_failed=retry_failed)
            _print_estimate(expansion, left, workers or 1, ledger)
            return
        from lipscope.runs.engines import make_engine
        from lipscope.runs.estimate import largest_plan
        from lipscope.runs.sweep import run_plan
        from lipscope.runs.tasks import expand

        engine = make_engine(scheduler, workers)
        with waiting("looking at models and texts"):
            expansion = expand(chosen)
        n = max((task.identity["n"] for task in expansion.tasks), default=0)
        limit = next((str(block.memory) for block in chosen.blocks if block.memory is not None), None)
        announce(n, limit, lambda: largest_plan(expansion.jobs, n))
        with task_bar(ledger) as progress:
            summary = run_plan(expansion, ledger, engine=engine, retry_failed=retry_failed, progress=progress, notice=notice)
        _print_summary(summary, ledger)
        if summary.failed:
            raise typer.Exit(1)


def export(
    store: Annotated[Path, typer.Argument(help="What `lipscope sweep` wrote; may be in use.", show_default=False)],
    format: Annotated[Format, option("parquet, csv or json.", default=True)] = Format.csv,
    out: Annotated[Path | None, option("The file to write; CSV and JSON are printed without it.")] = None,
    all_plans: opt.AllPlans = False,
) -> None:
    """Write the table of a sweep for other tools, one column per quantity."""
    from lipscope.runs.files import export as write_table

    content, count = write_table(store, format.value, out, all_plans=all_plans)
    if content is not None:
        echo(content, data=True)
    else:
        notice(f"{count} rows are in {out}")


def _plan(file: Path | None, asked: Asked, trust: Trust) -> Plan:
    from lipscope.runs.plan import ModelChoice, Plan

    if file is not None:
        if asked.given():
            raise ValueError(f"a plan file says what to measure: leave out {', '.join(asked.given())}")
        return Plan.read(file, trust=trust)
    if not asked.model or not asked.text:
        raise ValueError("give a plan file, or at least one --model and one --text")
    loading = {name: getattr(trust, name) for name in ("allow_pickle", "trust_remote_code")}
    loading |= {"tokenizer": asked.tokenizer, "stream": bool(asked.stream)}
    scopes = list(dict.fromkeys([*(asked.scope or ()), *(["head"] if asked.per_head or asked.head is not None else [])]))
    same = ("lengths", "inputs", "rtol", "seed", "certificate", "memory", "views", "threads")
    flags = {name: getattr(asked, name) for name in same} | {"texts": asked.text, "scopes": scopes or None}
    flags["models"] = [ModelChoice(name, **loading) for name in asked.model]
    flags["kind"] = "packed" if asked.pack else None
    flags["dtype"] = asked.dtype and asked.dtype.value
    flags["layers"] = asked.layers and (indices("layers", asked.layers) or "all")
    flags["heads"] = asked.head and (indices("head", asked.head) or "all")
    if asked.views is None and not asked.pack and set(scopes) <= {"head", "attention"}:
        # Elsewhere a view takes a pass per column of the Jacobian: only when it is asked for.
        flags["views"] = 3
    return Plan.of(**{name: value for name, value in flags.items() if value is not None})


# Seconds that a task may still take after a request to end.
GRACE = 5.0
_requests: list[int] = []


class Stopped(KeyboardInterrupt):
    """A signal asked for the end; its argument is the signal's number."""


@contextmanager
def gentle_end() -> Iterator[None]:
    """A request to end (Ctrl-C, a queue's time limit, a shutdown) is obeyed between two tasks, with exit code 128 + signal.

    An exception from a signal handler is raised anywhere, also where Python drops it. So requests are only noted, and
    ``task_bar`` looks at them. A second request, or ``GRACE`` seconds, end the process at once: what is done is kept.
    """
    try:
        before = {number: signal.signal(number, _note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread
        yield
        return
    _requests.clear()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()
    try:
        yield
    except Stopped as request:
        raise typer.Exit(128 + request.args[0]) from None
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(writer)


def _note(number: int, _: object) -> None:
    _requests.append(number)


def _watch(reader: int) -> None:
    """See to it that a request is obeyed, also while the main thread is busy outside of Python."""
    timer = None
    while signals := os.read(reader, 1):
        if signals[0] in (signal.SIGINT, signal.SIGTERM):
            if timer is not None:
                _end_at_once(signals[0])
            os.write(2, b"ending after this task; a second request ends at once\n")
            timer = threading.Timer(GRACE, _end_at_once, signals)
            timer.daemon = True
            timer.start()
    if timer is not None:
        timer.cancel()
    os.close(reader)


def _end_at_once(number: int) -> None:
    os.write(2, b"\x1b[?25h" * os.isatty(2) + b"ended within a task; every finished one is kept\n")  # with the cursor back
    os._exit(128 + number)


@contextmanager
def task_bar(store: Path, first: str = "starting") -> Iterator[Callable[[Step], None]]:
    """The progress bar, for the steps of a run; ends it between two of them when that was asked for, and loses nothing."""
    try:
        with progress_bar(first) as show:

            def of(step: Step) -> None:
                if _requests:
                    raise Stopped(_requests[0])
                what = f"{step.tasks}/{step.all_tasks} tasks" + (f", {step.failed} failed" if step.failed else "")
                if (task := step.task) is not None:
                    what += f" · {task.labels['model']} layer {task.identity['layer']} n = {task.identity['n']}"
                show(step.done, step.total, what)

            yield of
    except KeyboardInterrupt:
        notice(f"stopped; every finished task is kept in {store}. Run the same command again to go on")
        raise


def _print_estimate(expansion: Expansion, left: Estimate, workers: int, store: Path) -> None:
    def about(task: Task) -> tuple[str, ...]:
        return str(task.labels["model"]), str(task.labels["text"] or "–"), str(task.identity["scope"])

    rows = []
    for (model, source, scope), tasks in grouped(expansion.tasks, about).items():
        lengths = sorted({task.identity["n"] for task in tasks})
        layers = len({task.identity["layer"] for task in tasks})
        span = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} … {lengths[-1]} ({len(lengths)})"
        rows.append([model, source, scope, str(layers), span, str(len(tasks)), str(sum(t.work.rows for t in tasks))])
    names = ["model", "text", "scope", "layers", "n", "tasks", "rows"]
    jobs, finished = len(expansion.jobs), len(expansion.tasks) - left.tasks
    title = f"{counted(len(expansion.tasks), 'task')} in {counted(jobs, 'job')} of one forward pass each; "
    title += f"{finished} {'is' if finished == 1 else 'are'} in {store} already"
    print_table(names, rows, text=names[:3], title=title)
    where = "in this process" if workers == 1 else f"on {workers} workers"
    echo(
        f"Left: {counted(left.tasks, 'task')}, {counted(left.rows, 'row')}; about {duration(left.seconds)} {where}, "
        f"about {left.bytes / 2**30:.1f} GiB of memory. The time is scaled up from a sample measured now, or from "
        "tasks in the store; cost model: lipscope.runs.estimate."
    )


def _print_summary(summary: Summary, store: Path) -> None:
    rows = [["tasks of the plan", str(summary.tasks)], ["kept from before", str(summary.kept)],
            ["measured now", str(summary.measured)], ["failed", str(summary.failed)], ["rows", str(summary.rows)],
            ["time", duration(summary.seconds)], ["table digest", summary.digest]]  # fmt: skip
    print_table(["sweep", str(store)], rows, text=["sweep", str(store)])
    for reason, failures in list(grouped(summary.failures, lambda failure: failure["error"]).items())[:5]:
        first = failures[0]
        place = f"{first['model']}, layer {first['layer']}, scope {first['scope']}, n = {first['n']}"
        echo(f"{len(failures)} failed, the first at {place}: {reason}")
    if summary.failed:
        echo("Run again with --retry-failed to measure them again.")
    echo(f"lipscope export {store} --format parquet --out rows.parquet writes the table.")
