"""Commands that show: ``report`` and ``view`` a run, ``describe`` a model, ``models`` and ``corpora`` that are known."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lipscope.cli import options as opt
from lipscope.cli.options import Loading, option
from lipscope.cli.source import load_model, look_first
from lipscope.cli.terminal import echo, notice, print_table, waiting
from lipscope.rounding import counted, duration
from lipscope.runs.run import no_run

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
    _look_first(run, other)
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
    _look_first(run)
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


def _look_first(*runs: Path | None) -> None:
    for run in runs:
        if run is not None and not run.exists():
            raise FileNotFoundError(no_run(run))


def describe(model: opt.ModelName, loading: Loading = Loading()) -> None:
    """Say what a model is to lipscope: its layers and masks, what can be measured of it, and what that takes."""
    look_first(model)
    import time

    from lipscope.measure.scopes import SCOPES
    from lipscope.models.inputs import position_limit, probe_inputs
    from lipscope.models.media import how_to_ask, reads_text
    from lipscope.models.memory import plan_layers
    from lipscope.runs.tasks import task_work

    with waiting(f"loading {model}"):
        handle = load_model(model, loading)
    echo(handle.describe())
    echo("Scopes (--scope):")
    for scope in SCOPES:
        try:
            if scope != "head" or handle.layers[0].mixer:  # heads of attention are always there
                handle.probe_recording[handle.layers[0].index].map(scope)
            echo(f"  {scope}: yes")
        except (ValueError, NotImplementedError) as error:
            echo(f"  {scope}: no, {error}")
    if not reads_text(handle):
        n = handle.probe_recording[handle.layers[0].index].tokens().shape[1]
        [shape] = [tuple(tensor.shape[1:]) for tensor in handle.probe_inputs.values()]
        echo(f"{how_to_ask(handle)}. An input of shape {shape} is n = {n}.")
        return
    if getattr(handle.model, "main_input_name", "") != "input_ids":
        return
    layers, limit = [layer.index for layer in handle.layers], position_limit(handle.model)
    setting = {"layer": layers[0], "scope": "attention"}
    lengths = [n for n in (32, 128, 512, 2048, 8192) if limit is None or n <= limit]
    recorded = handle.record(probe_inputs(handle.model, lengths[0]))
    for _ in range(2):  # the first one also looks at the layer
        start = time.perf_counter()
        count = len(recorded[layers[0]].rows("attention", heads=None))
    pace = (time.perf_counter() - start) / task_work(handle, setting, n=lengths[0], inputs=count).flops
    rows = []
    for n in lengths:
        plan = plan_layers(handle, n, layers, inputs=1, scope="attention")
        seconds = pace * task_work(handle, setting, n=n, inputs=1).flops * len(handle.layers)
        rows.append([str(n), f"{plan.total / 2**20:,.0f} MiB", duration(seconds)])
    caption = f"scaled up from one layer at n = {lengths[0]}, measured now; memory beside the weights, as planned"
    title = f"σ of all {counted(len(handle.layers), 'layer')} on one input, scope attention, takes about"
    print_table(["n", "memory", "time"], rows, title=title, caption=caption)


def models() -> None:
    """List the named models, and which of them work without a network now."""
    from lipscope.models.load import ZOO

    known = {e.name: ([e.summary, e.size, e.licence], e.missing) for e in ZOO.values()}
    _list(["name", "model", "download", "licence", "here"], known)
    echo("Any directory with a saved transformers model, or a hub name such as bert-base-uncased, works too.")


def corpora() -> None:
    """List the named texts, and which of them are on this machine."""
    from lipscope.models.corpora import CORPORA

    known = {c.name: ([c.summary, c.licence], None if c.available else c.advice) for c in CORPORA.values()}
    _list(["name", "text", "licence", "here"], known)
    echo("Any UTF-8 file, a table with a column 'text', or a directory of .txt, .md and .rst files, works too.")


def _list(names: list[str], known: dict[str, tuple[list[str], str | None]]) -> None:
    """A table, then one line per absent thing, never folded, so that commands can be copied."""
    rows = [[name, *about, "yes" if advice is None else "no"] for name, (about, advice) in known.items()]
    print_table(names, rows, text=names)
    for name, (_, advice) in known.items():
        if advice is not None:
            echo(f"To get {name}: {advice}")
