"""Commands for sweeps: ``sweep`` and ``export``. Heavy imports happen inside them."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipscope.cli.tables import print_table

if TYPE_CHECKING:
    from lipscope.runs.estimate import Estimate
    from lipscope.runs.plan import Plan
    from lipscope.runs.sweep import Step, Summary
    from lipscope.runs.tasks import Expansion

ClearErrors = Callable[[bool], AbstractContextManager[None]]
Debug = Annotated[bool, typer.Option(help="Show the traceback when something goes wrong.")]


def _given(help: str) -> Any:
    """An option that a plan has a default for."""
    return typer.Option(help=help, show_default=False)


class Format(StrEnum):
    """Of exported tables."""

    parquet = "parquet"
    csv = "csv"
    json = "json"


def register(app: typer.Typer, clear_errors: ClearErrors) -> None:
    """Add the commands to the application."""

    @app.command()
    def sweep(
        plan: Annotated[
            Path | None,
            typer.Argument(help="A plan in TOML; without it, the options are the plan.", show_default=False),
        ] = None,
        store: Annotated[Path | None, _given("Where rows are kept; PLAN.db or sweep.db by default.")] = None,
        model: Annotated[list[str] | None, _given("A model; may be repeated.")] = None,
        text: Annotated[list[str] | None, _given("A text; may be repeated.")] = None,
        layers: Annotated[str | None, _given("'all', or indices such as 0,6,-1.")] = None,
        heads: Annotated[str | None, _given("'all', or indices, for scope head.")] = None,
        scope: Annotated[list[str] | None, _given("A scope; may be repeated.")] = None,
        lengths: Annotated[str | None, _given("8,16,32 or 8:512:log or 8:64:8.")] = None,
        inputs: Annotated[int | None, _given("Inputs per length, disjoint in the text.")] = None,
        pack: Annotated[
            bool, typer.Option("--pack", help="Fill each input with documents that do not see each other.")
        ] = False,
        rtol: Annotated[float | None, _given("Relative accuracy of the estimates.")] = None,
        seed: Annotated[int | None, _given("Where inputs lie, and the solver's start.")] = None,
        dtype: Annotated[str | None, _given("float32 or float64.")] = None,
        threads: Annotated[int | None, _given("torch threads of every task.")] = None,
        workers: Annotated[int | None, _given("So many worker processes on this machine.")] = None,
        scheduler: Annotated[str | None, _given("An existing Dask cluster, tcp://host:8786.")] = None,
        retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Also measure tasks that failed before.")] = False,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="Print counts, time and memory, and stop.")] = False,
        debug: Debug = False,
    ) -> None:
        """Measure many models, texts, layers and lengths, and never lose a row. Run it again to go on where it stopped."""
        flags = {
            "models": model, "texts": text, "layers": layers, "heads": heads, "scopes": scope, "lengths": lengths,
            "inputs": inputs, "kind": "packed" if pack else None, "rtol": rtol, "seed": seed, "dtype": dtype,
            "threads": threads,
        }  # fmt: skip
        with clear_errors(debug), gentle_end():
            chosen = _plan(plan, {name: value for name, value in flags.items() if value is not None})
            ledger = store or Path(f"{plan.stem}.db" if plan else "sweep.db")
            if workers is not None and workers < 1:
                raise ValueError(f"--workers must be at least 1, got {workers}")
            if dry_run:
                from lipscope.runs.sweep import dry_run as preview

                with _waiting("looking at models and texts, and measuring a sample"):
                    expansion, left = preview(chosen, ledger, workers=workers or 1, retry_failed=retry_failed)
                _print_estimate(expansion, left, workers or 1, ledger)
                return
            from lipscope.runs.engines import make_engine
            from lipscope.runs.sweep import run_plan
            from lipscope.runs.tasks import expand

            engine = make_engine(scheduler, workers)
            with _waiting("looking at models and texts"):
                expansion = expand(chosen)
            with progress_bar() as progress:
                try:
                    summary = run_plan(
                        expansion, ledger, engine=engine, retry_failed=retry_failed, progress=progress, notice=say
                    )
                except KeyboardInterrupt:
                    say(f"stopped; every finished task is kept in {ledger}. Run the same command again to go on")
                    raise
            _print_summary(summary, ledger)
            if summary.failed:
                raise typer.Exit(1)

    @app.command()
    def export(
        store: Annotated[Path, typer.Argument(help="What `lipscope sweep` wrote; may be in use.", show_default=False)],
        format: Annotated[Format, typer.Option(help="parquet, csv or json.")] = Format.csv,
        out: Annotated[Path | None, typer.Option(help="The file to write; CSV and JSON are printed without it.")] = None,
        all_plans: Annotated[bool, typer.Option("--all", help="Rows of every plan, not only of the last.")] = False,
        debug: Debug = False,
    ) -> None:
        """Write the table of a sweep for other tools, one column per quantity."""
        with clear_errors(debug):
            from lipscope.runs.export import export_table

            content, count = export_table(store, format.value, out, all_plans=all_plans)
            if content is not None:
                typer.echo(content, nl=False)
            else:
                say(f"{count} rows are in {out}")


def _plan(file: Path | None, flags: dict[str, Any]) -> Plan:
    from lipscope.runs.plan import Plan

    if file is not None:
        if flags:
            raise ValueError(f"a plan file says what to measure: leave out {', '.join(_flag(name) for name in flags)}")
        return Plan.read(file)
    if not {"models", "texts"} <= flags.keys():
        raise ValueError("give a plan file, or at least one --model and one --text")
    for name in ("layers", "heads"):
        if flags.get(name, "all") != "all":
            try:
                flags[name] = [int(part) for part in flags[name].split(",")]
            except ValueError:
                raise ValueError(f"--{name} must be 'all' or indices such as 0,6, got {flags[name]!r}") from None
    if "heads" in flags and "scopes" not in flags:
        flags["scopes"] = ["head"]
    return Plan.of(**flags)


def _flag(name: str) -> str:
    return "--pack" if name == "kind" else f"--{name.rstrip('s') if name in ('models', 'texts', 'scopes') else name}"


def say(message: str) -> None:
    """A line on standard error."""
    typer.echo(message, err=True)


@contextmanager
def gentle_end() -> Iterator[None]:
    """A termination request (a queue's time limit, a shutdown) ends like Ctrl-C: all finished tasks are kept."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


@contextmanager
def progress_bar() -> Iterator[Callable[[Step], None]]:
    """A bar on standard error: tasks, failures, and the time left by work and not by count."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left"),
               TimeRemainingColumn(elapsed_when_finished=False))  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=600) as bar:
        line = bar.add_task("starting", total=None)

        def show(step: Step) -> None:
            what = f"{step.tasks}/{step.all_tasks} tasks" + (f", {step.failed} failed" if step.failed else "")
            if step.task is not None:
                what += f" · {step.task.labels['model']} layer {step.task.identity['layer']} n = {step.task.identity['n']}"
            bar.update(line, completed=step.done, total=step.total, description=what)

        yield show


def _print_estimate(expansion: Expansion, left: Estimate, workers: int, store: Path) -> None:
    groups: dict[tuple[str, ...], list[Any]] = {}
    for task in expansion.tasks:
        labels, identity = task.labels, task.identity
        key = (str(labels["model"]), str(labels["text"] or "–"), str(identity["scope"]))
        groups.setdefault(key, []).append(task)
    rows = []
    for (model, source, scope), tasks in groups.items():
        lengths = sorted({task.identity["n"] for task in tasks})
        layers = len({task.identity["layer"] for task in tasks})
        span = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} … {lengths[-1]} ({len(lengths)})"
        rows.append([model, source, scope, str(layers), span, str(len(tasks)), str(sum(t.work.rows for t in tasks))])
    names = ["model", "text", "scope", "layers", "n", "tasks", "rows"]
    jobs = len(expansion.jobs)
    finished = len(expansion.tasks) - left.tasks
    title = f"{len(expansion.tasks)} tasks in {jobs} jobs of one forward pass each; {finished} are in {store} already"
    print_table(names, rows, text=names[:3], title=title)
    where = "in this process" if workers == 1 else f"on {workers} workers"
    typer.echo(
        f"Left: {left.tasks} tasks, {left.rows} rows; about {duration(left.seconds)} {where}, "
        f"about {left.bytes / 2**30:.1f} GiB of memory. The time is scaled up from a sample measured now, or from "
        "tasks in the store; cost model: lipscope.runs.estimate."
    )


def _print_summary(summary: Summary, store: Path) -> None:
    rows = [["tasks of the plan", str(summary.tasks)], ["kept from before", str(summary.kept)],
            ["measured now", str(summary.measured)], ["failed", str(summary.failed)], ["rows", str(summary.rows)],
            ["time", duration(summary.seconds)], ["table digest", summary.digest]]  # fmt: skip
    print_table(["sweep", str(store)], rows, text=["sweep", str(store)])
    reasons: dict[str, list[dict[str, Any]]] = {}
    for failure in summary.failures:
        reasons.setdefault(failure["error"], []).append(failure)
    for reason, failures in list(reasons.items())[:5]:
        first = failures[0]
        place = f"{first['model']}, layer {first['layer']}, scope {first['scope']}, n = {first['n']}"
        typer.echo(f"{len(failures)} failed, the first at {place}: {reason}")
    if summary.failed:
        typer.echo("Run again with --retry-failed to measure them again.")
    typer.echo(f"lipscope export {store} --format parquet --out rows.parquet writes the table.")


def duration(seconds: float) -> str:
    """A time in words."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
