"""Commands that show: ``report`` and ``view`` a run, ``models`` and ``corpora`` that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lipscope.cli import options as opt
from lipscope.cli.options import option
from lipscope.cli.terminal import echo, notice, print_table

RunPath = Annotated[
    Path, typer.Argument(help="A store of `lipscope sweep`, or what `lipscope scan --out` wrote.", show_default=False)
]


def report(
    run: RunPath,
    other: Annotated[Path | None, typer.Argument(help="A second run to compare with.", show_default=False)] = None,
    out: Annotated[Path, option("The HTML file to write.", default=True)] = Path("report.html"),
    figures: Annotated[Path | None, option("Also write the figures here, as PNG, PDF and SVG.")] = None,
    all_plans: opt.AllPlans = False,
) -> None:
    """Write one HTML file that shows how smooth a model is, where it is not, and why; or compares two runs."""
    from lipscope.report.html import write_report

    page = write_report(run, out, compare=other, all_plans=all_plans)
    if figures is not None:
        from lipscope.report.draw_print import write_figures

        files = write_figures(run, figures, compare=other, all_plans=all_plans)
        notice(f"{len(files)} figures are in {figures}")
    echo(f"The report is in {page.resolve()}")


def view(
    run: RunPath,
    host: Annotated[
        str, option("Address to listen on; others than 127.0.0.1 open it to the network.", default=True)
    ] = "127.0.0.1",
    port: Annotated[int, option("Port; any free one by default.")] = 0,
    open_browser: Annotated[bool, option("Open it in the browser.", "--open")] = False,
) -> None:
    """Serve the report on this machine, with new rows as a sweep finds them, until Ctrl-C."""
    from lipscope.report.server import ReportServer

    with ReportServer(run, host=host, port=port) as server:
        echo(f"The report is at {server.url}")
        echo("It is read-only, and only those who know this address can see it. Ctrl-C ends it.")
        if open_browser:
            import webbrowser

            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            notice("stopped")


def models() -> None:
    """List the named models, and which of them work without a network now."""
    from lipscope.models.load import ZOO

    rows = [(e.name, e.summary, e.size, e.licence, _yes(e.missing is None)) for e in ZOO.values()]
    names = ("name", "model", "download", "licence", "here")
    print_table(names, rows, text=names)
    _advise({e.name: e.missing for e in ZOO.values()})
    echo("Any directory with a saved transformers model, or a hub name such as bert-base-uncased, works too.")


def corpora() -> None:
    """List the named texts, and which of them are on this machine."""
    from lipscope.models.corpora import CORPORA

    rows = [(c.name, c.summary, c.licence, _yes(c.available)) for c in CORPORA.values()]
    names = ("name", "text", "licence", "here")
    print_table(names, rows, text=names)
    _advise({c.name: None if c.available else c.advice for c in CORPORA.values()})
    echo("Any UTF-8 file, a table with a column 'text', or a directory of .txt, .md and .rst files, works too.")


def _yes(available: bool) -> str:
    return "yes" if available else "no"


def _advise(missing: dict[str, str | None]) -> None:
    """One line per absent thing, never folded, so that commands can be copied."""
    for name, advice in missing.items():
        if advice is not None:
            echo(f"To get {name}: {advice}")
