"""Commands for models and texts: ``models``, ``corpora``, ``scan``, ``tokens``. Heavy imports happen inside them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipscope.cli.options import AllowPickle, AsJson, Debug, Dtype, Memory, ModelName, Part, Precision, TrustCode
from lipscope.cli.tables import print_table
from lipscope.rounding import interval, round_down, round_up, span

if TYPE_CHECKING:
    from lipscope.models.tokens import TokenView
    from lipscope.runs.scan import Scan

ClearErrors = Callable[[bool], AbstractContextManager[None]]


def register(app: typer.Typer, clear_errors: ClearErrors) -> None:
    """Add the commands to the application."""

    @app.command()
    def models() -> None:
        """List the named models, and which of them work without a network now."""
        from lipscope.models.load import ZOO

        rows = [(e.name, e.summary, e.size, e.licence, _yes(e.missing is None)) for e in ZOO.values()]
        names = ("name", "model", "download", "licence", "here")
        print_table(names, rows, text=names)
        _advise({e.name: e.missing for e in ZOO.values()})
        typer.echo("Any directory with a saved transformers model, or a hub name such as bert-base-uncased, works too.")

    @app.command()
    def corpora() -> None:
        """List the named texts, and which of them are on this machine."""
        from lipscope.models.corpora import CORPORA

        rows = [(c.name, c.summary, c.licence, _yes(c.available)) for c in CORPORA.values()]
        names = ("name", "text", "licence", "here")
        print_table(names, rows, text=names)
        _advise({c.name: None if c.available else c.advice for c in CORPORA.values()})
        typer.echo("Any UTF-8 file, a table with a column 'text', or a directory of .txt, .md and .rst files, works too.")

    @app.command()
    def scan(
        model: ModelName,
        text: Annotated[str, typer.Option(help="A name from `lipscope corpora`, a file, or a directory.")] = "python-docs",
        layers: Annotated[str, typer.Option(help="'all', or indices such as 0,6,-1.")] = "all",
        heads: Annotated[bool, typer.Option("--heads", help="Measure every head on its own (scope head).")] = False,
        lengths: Annotated[str, typer.Option(help="8,16,32 or 8:512:log or 8:64:8.")] = "16:128:log",
        inputs: Annotated[int, typer.Option(help="Inputs per length, disjoint in the text.")] = 4,
        scope: Annotated[
            str | None,
            typer.Option(help="head, attention, norm+attention, attention+residual, block or model.", show_default=False),
        ] = None,
        pack: Annotated[
            bool, typer.Option("--pack", help="Fill each input with documents that do not see each other.")
        ] = False,
        rtol: Annotated[float, typer.Option(help="Relative accuracy of the estimates.")] = 1e-3,
        seed: Annotated[int, typer.Option(help="Where in the text the inputs lie, and the solver's start.")] = 0,
        certificate: Annotated[
            bool | None,
            typer.Option(help="Also compute certified upper ends; by default where they are cheap.", show_default=False),
        ] = None,
        dtype: Dtype = None,
        memory: Memory = None,
        part: Part = None,
        out: Annotated[
            Path | None, typer.Option(help="Directory for rows.csv, rows.json, fits.csv, run.json and tokens.json.")
        ] = None,
        tokens: Annotated[
            int | None,
            typer.Option(help="Worst layers or heads to look at token by token; 3 with --out, else 0.", show_default=False),
        ] = None,
        as_json: AsJson = False,
        as_csv: Annotated[bool, typer.Option("--csv", help="Print the rows as CSV.")] = False,
        top: Annotated[int, typer.Option(help="Lines of the table.")] = 20,
        allow_pickle: AllowPickle = False,
        trust_remote_code: TrustCode = False,
        debug: Debug = False,
    ) -> None:
        """Measure σ of a model's layers, or heads, on a text."""
        with clear_errors(debug):
            from lipscope.models.load import load
            from lipscope.runs.scan import scan as run
            from lipscope.spectral.solvers import Auto

            chosen = _parse_layers(layers)
            # Elsewhere a view takes a pass per column of the Jacobian: only when it is asked for.
            cheap = out is not None and not pack and scope in (None, "head", "attention")
            looks = (3 if cheap else 0) if tokens is None else tokens
            handle = load(
                model, part=part, dtype=as_dtype(dtype), allow_pickle=allow_pickle, trust_remote_code=trust_remote_code
            )
            _announce(handle, lengths, chosen, inputs, scope or ("head" if heads else "attention"), memory, pack)
            with progress_bar() as progress:
                result = run(
                    handle, text, layers=chosen, heads=heads, lengths=lengths, inputs=inputs, scope=scope,
                    solver=Auto(rtol=rtol, seed=seed), seed=seed, pack=pack, certificate=certificate,
                    tokens=looks, memory=memory, progress=progress,
                )  # fmt: skip
            if out is not None:
                options = {
                    "text": text, "layers": layers, "heads": heads, "lengths": lengths, "inputs": inputs, "scope": scope,
                    "pack": pack, "rtol": rtol, "seed": seed, "certificate": certificate, "dtype": dtype, "part": part,
                    "allow-pickle": allow_pickle, "trust-remote-code": trust_remote_code, "tokens": looks,
                    "memory": memory, "out": out,
                }  # fmt: skip
                _write(result, out, command_line(["scan", model], options))
            if as_json:
                typer.echo(result.to_json())
            elif as_csv:
                typer.echo(result.csv_text(), nl=False)
            else:
                _print_scan(result, text, top)

    @app.command()
    def tokens(
        model: ModelName,
        text: Annotated[str, typer.Option(help="The text itself.", show_default=False)],
        layer: Annotated[int, typer.Option(help="Layer index; negative ones count from the end.")] = 0,
        scope: Annotated[str, typer.Option(help="attention, norm+attention, attention+residual, block.")] = "attention",
        head: Annotated[int | None, typer.Option(help="One head before W_O (scope head).", show_default=False)] = None,
        pairs: Annotated[int, typer.Option(help="How many pairs of tokens to list.")] = 8,
        part: Part = None,
        allow_pickle: AllowPickle = False,
        trust_remote_code: TrustCode = False,
        debug: Debug = False,
    ) -> None:
        """Show which tokens carry the worst direction of a layer, and which pairs influence each other most."""
        with clear_errors(debug):
            from lipscope.models.load import load
            from lipscope.models.tokens import token_view

            handle = load(model, part=part, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
            _print_tokens(token_view(handle, text, layer, scope=scope, head=head), handle.name, pairs)


def _parse_layers(text: str) -> list[int] | None:
    if text == "all":
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--layers must be 'all' or indices such as 0,6, got {text!r}") from None


def command_line(words: list[str], options: dict[str, Any]) -> str:
    """The command that does the same again: every option that has a value."""
    line = ["lipscope", *words]
    for name, value in options.items():
        if value is True:
            line.append(f"--{name}")
        elif value is False and name == "certificate":
            line.append("--no-certificate")
        elif value not in (None, False):
            line += [f"--{name}", str(value)]
    return shlex.join(line)


# Tokens from which a scan is long enough to say beforehand what it takes.
_LONG = 2048


def _announce(
    handle: Any, lengths: str, layers: list[int] | None, inputs: int, scope: str, memory: str | None, pack: bool
) -> None:
    """Say on standard error what memory the longest inputs are expected to take, when that was limited or they are long."""
    from lipscope.models.memory import batch_size, plan_layers
    from lipscope.models.text import parse_lengths

    n = max(parse_lengths(lengths))
    if memory is not None or n >= _LONG:
        batch = batch_size(n, inputs, pack=pack)
        plan = plan_layers(handle, n, handle.check_layers(layers, scope), inputs=batch, scope=scope, memory=memory)
        typer.echo(f"n = {n}: {plan}", err=True)


def as_dtype(precision: Precision | None) -> Any:
    """The torch dtype of a ``--dtype`` option."""
    import torch

    return None if precision is None else getattr(torch, precision.value)


def _yes(available: bool) -> str:
    return "yes" if available else "no"


def _advise(missing: dict[str, str | None]) -> None:
    """One line per absent thing, never folded, so that commands can be copied."""
    for name, advice in missing.items():
        if advice is not None:
            typer.echo(f"To get {name}: {advice}")


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on standard error with the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("left"), TimeRemainingColumn())  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("recording", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def _write(result: Scan, directory: Path, command: str) -> None:
    import torch

    from lipscope.runs.scan_files import write_scan
    from lipscope.runs.work import environment

    write_scan(result, directory, command=command, environment=environment(torch.get_num_threads()))
    typer.echo(f"rows are in {directory}", err=True)


def _print_scan(result: Scan, text: str, top: int) -> None:
    first = result.rows[0]
    summaries = result.worst()
    fits = result.fit() if len({row["n"] for row in result.rows}) >= 3 else {}
    by_head = summaries[0]["head"] is not None
    title = f"σ of {first['model']} on {text}, largest first\nscope {first['scope']} · mask {first['mask']} · "
    title += first["dtype"] + (f"\n{first['notes']}" if first["notes"] else "")
    caption = "σ of every input at this n lies between lower and upper"
    chances = [row["delta"] for row in result.rows if row["delta"] is not None]
    caption += f"; an upper end fails with probability ≤ {max(chances):g}" if chances else ""
    names = ["layer", *(["head"] if by_head else []), "n", "median σ", "lower", "upper", "|x|", "entropy", "on first"]
    rows = []
    for s in summaries[:top]:
        cells = [str(s["layer"]), *([str(s["head"])] if by_head else []), str(s["n"])]
        cells += [f"{s['median']:.4g}", round_down(s["lower"]), round_up(s["upper"]), f"{s['radius_rms']:.3g}"]
        cells += ["–" if s[name] is None else f"{s[name]:.2f}" for name in ("entropy", "sink_mass")]
        if fits:
            fit = fits[(s["layer"], s["head"])]
            cells.append(span(fit.alpha_low, fit.alpha_high, decimals=2))
        rows.append(cells)
    print_table([*names, *(["α (σ ~ n^α)"] if fits else [])], rows, title=title, caption=caption)
    ever = [row["refined_global"] for row in result.rows if row["refined_global"] is not None]
    if ever:
        typer.echo(
            f"Whatever the input, σ stays below {round_up(max(ever))} here: the set bound at the normalisation's radius."
        )
    if len(summaries) > top:
        typer.echo(f"… and {len(summaries) - top} more; --top, --csv and --out show them")
    if not all(row["converged"] for row in result.rows):
        typer.echo("Some estimates did not converge; their intervals are valid but wide.")


def _print_tokens(view: TokenView, name: str, pairs: int) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    r = view.result
    where = f"layer {view.layer}" + ("" if view.head is None else f", head {view.head}")
    console.print(f"{name}, {where}, scope {r.scope}: σ ∈ {interval(r.lower, r.upper)}, estimate {r.estimate:.4g}")
    console.print("Share of each token in the worst direction (the redder, the more):")
    line, peak = Text(), float(view.energy.max()) or 1.0
    for token, share in zip(view.tokens, view.energy.tolist(), strict=True):
        cold = int(255 * (1 - share / peak))
        line.append(f"{token}", style=f"black on rgb(255,{cold},{cold})")
        line.append(f"{share:.0%} " if share >= 0.05 else " ", style="bold")
    console.print(line)
    console.print("Strongest influence of one token on another, ‖∂out_i/∂x_j‖₂:")
    for i, j, value in view.strongest_pairs(pairs):
        console.print(Text(f"  {value:8.4g}  moving {view.tokens[j]!r} ({j}) moves the output at {view.tokens[i]!r} ({i})"))
