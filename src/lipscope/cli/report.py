"""Commands that show: ``report`` and ``view``. Heavy imports happen inside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipscope.cli.options import Debug

if TYPE_CHECKING:
    from lipscope.runs.run import Run

ClearErrors = Callable[[bool], AbstractContextManager[None]]
_TOKENS = 3

RunPath = Annotated[
    Path, typer.Argument(help="A store of `lipscope sweep`, or what `lipscope scan --out` wrote.", show_default=False)
]
Tokens = Annotated[
    int | None,
    typer.Option(
        help="Of a store: look at so many of the worst layers or heads token by token. By default 3, where that is quick.",
        show_default=False,
    ),
]


def register(app: typer.Typer, clear_errors: ClearErrors) -> None:
    """Add the commands to the application."""

    @app.command()
    def report(
        run: RunPath,
        other: Annotated[Path | None, typer.Argument(help="A second run to compare with.", show_default=False)] = None,
        out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
        figures: Annotated[
            Path | None, typer.Option(help="Also write the figures here, as PNG, PDF and SVG.", show_default=False)
        ] = None,
        tokens: Tokens = None,
        all_plans: Annotated[bool, typer.Option("--all", help="Of a store: rows of every plan, not only the last.")] = False,
        debug: Debug = False,
    ) -> None:
        """Write one HTML file that shows how smooth a model is, where it is not, and why; or compares two runs."""
        with clear_errors(debug):
            from lipscope.report.html import save_page
            from lipscope.report.settings import report_data
            from lipscope.runs.run import load_run

            paths = [run] if other is None else [run, other]
            runs = [_with_tokens(load_run(path, all_plans=all_plans), tokens) for path in paths]
            data = report_data(runs)
            page = save_page(data, out)
            if figures is not None:
                from lipscope.report.draw_print import write_figures

                files = write_figures(data, figures)
                typer.echo(f"{len(files)} figures are in {figures}", err=True)
            typer.echo(f"The report is in {page.resolve()}")

    @app.command()
    def view(
        run: RunPath,
        host: Annotated[
            str, typer.Option(help="Address to listen on; others than 127.0.0.1 open it to the network.")
        ] = "127.0.0.1",
        port: Annotated[int, typer.Option(help="Port; any free one by default.", show_default=False)] = 0,
        tokens: Tokens = 0,
        open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
        debug: Debug = False,
    ) -> None:
        """Serve the report on this machine, with new rows as a sweep finds them, until Ctrl-C."""
        with clear_errors(debug):
            from lipscope.report.server import ReportServer
            from lipscope.runs.run import load_run

            views = list(_with_tokens(load_run(run), tokens).views) if tokens else []
            with ReportServer(run, host=host, port=port, tokens=views) as server:
                typer.echo(f"The report is at {server.url}")
                typer.echo("It is read-only, and only those who know this address can see it. Ctrl-C ends it.")
                if open_browser:
                    import webbrowser

                    webbrowser.open(server.url)
                try:
                    server.serve_forever()
                except KeyboardInterrupt:
                    typer.echo("stopped", err=True)


def _with_tokens(run: Run, count: int | None) -> Run:
    """Token views for a sweep, where they are not there yet and the models are at hand."""
    from lipscope.report.token_views import measure_views

    if count is not None and count < 0:
        raise ValueError(f"--tokens must be at least 0, got {count}")
    if run.tasks is None or run.views or count == 0:
        return run

    def say(line: str) -> None:
        typer.echo(line, err=True)

    views = measure_views(run, _TOKENS if count is None else count, every_scope=count is not None, say=say)
    return dataclasses.replace(run, views=views)
