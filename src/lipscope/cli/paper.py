"""The command ``paper``: the paper's experiments in one go. Heavy imports happen inside it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipscope.cli.sweep import duration, gentle_end, progress_bar, say
from lipscope.cli.tables import print_table

if TYPE_CHECKING:
    from lipscope.runs.engines import Engine
    from lipscope.studies.paper.run import Reproduction

ClearErrors = Callable[[bool], AbstractContextManager[None]]


def register(app: typer.Typer, clear_errors: ClearErrors) -> None:
    """Add the command to the application."""

    @app.command()
    def paper(
        out: Annotated[Path, typer.Option(help="Where rows, figures and pages go.", show_default=False)],
        full: Annotated[
            bool, typer.Option("--full/--quick", help="All lengths and inputs of the paper, or a sample of them.")
        ] = False,
        bert: Annotated[
            str | None, typer.Option(help="Directory or hub name of the pretrained BERT.", show_default="bert-base-uncased")
        ] = None,
        gpt2: Annotated[
            str | None, typer.Option(help="Directory or hub name of the pretrained GPT-2.", show_default="gpt2")
        ] = None,
        threads: Annotated[int | None, typer.Option(help="torch threads of every task.", show_default="1")] = None,
        workers: Annotated[
            int | None,
            typer.Option(help="Worker processes on this machine; 1 is this process.", show_default="2 with Dask, else 1"),
        ] = None,
        scheduler: Annotated[str | None, typer.Option(help="An existing Dask cluster, tcp://host:8786.")] = None,
        retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Also measure tasks that failed before.")] = False,
        debug: Annotated[bool, typer.Option(help="Show the traceback when something goes wrong.")] = False,
    ) -> None:
        """Measure the experiments of “How Smooth Is Attention?” again: σ beside the estimator of the public scripts.

        Run it again to go on where it stopped.
        """
        with clear_errors(debug), gentle_end():
            from lipscope.studies.paper.plan import MODES
            from lipscope.studies.paper.run import STORE, reproduce

            for name, count in (("workers", workers), ("threads", threads)):
                if count is not None and count < 1:
                    raise ValueError(f"--{name} must be at least 1, got {count}")
            if out.exists() and not out.is_dir():
                raise ValueError(f"--out must be a directory, but {out} is a file")
            settings = MODES["full" if full else "quick"]
            if threads is not None:
                settings = dataclasses.replace(settings, threads=threads)
            with progress_bar() as progress:
                try:
                    done = reproduce(
                        out, settings, bert=bert, gpt2=gpt2, engine=_engine(scheduler, workers),
                        retry_failed=retry_failed, progress=progress, notice=say,
                    )  # fmt: skip
                except KeyboardInterrupt:
                    say(f"stopped; every finished task is kept in {out / STORE}. Run the same command again to go on")
                    raise
            _print(done)
            if done.summary.failed:
                raise typer.Exit(1)


def _engine(scheduler: str | None, workers: int | None) -> Engine:
    """Two processes of one thread each use two cores better than one process of two threads."""
    from lipscope.runs.engines import make_engine

    if scheduler is None and workers is None and find_spec("distributed") is not None:
        workers = min(2, os.cpu_count() or 1)
    return make_engine(scheduler, None if workers == 1 else workers)


def _print(done: Reproduction) -> None:
    from lipscope.studies.paper.analysis import fit_table
    from lipscope.studies.paper.pages import exponent_table
    from lipscope.studies.paper.plan import ADVERSARIAL

    table = exponent_table([row for row in fit_table(done.rows) if row.curve.experiment != ADVERSARIAL])
    if table.rows:
        # Two columns for each estimator: the fit, and the interval of its exponent.
        cells = [[row[0], row[1], row[3], row[5], row[7]] for row in table.rows]
        names = ["model", "layer", "inputs", "α of σ", "α of companion"]
        print_table(
            names, cells, text=["model", "inputs"], title="σ ~ n^α, 95 % intervals; the companion estimator is not σ"
        )
    s = done.summary
    typer.echo(f"{s.rows} rows; {s.measured} tasks measured now in {duration(s.seconds)}, {s.kept} kept from before.")
    for failure in s.failures[:3]:
        typer.echo(f"failed: {failure['model']}, layer {failure['layer']}, n = {failure['n']}: {failure['error']}")
    if done.textbook:
        typer.echo(
            f"The textbook loop would need about {duration(done.textbook['seconds'])} for the {done.textbook['points']} "
            f"values of σ on real text (scaled up from {done.textbook['samples']} inputs measured now)."
        )
    typer.echo(f"Read {done.directory / 'FINDINGS.md'} (or findings.html) and {done.directory / 'reproduction.md'}.")
