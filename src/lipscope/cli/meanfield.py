"""``lipscope meanfield``: what σ and W_2 ratios of one layer do as n grows, for tokens drawn from a fixed law."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipscope.cli.tables import print_table
from lipscope.rounding import round_down, round_up

if TYPE_CHECKING:
    from lipscope.studies.mean_field.study import PlateauStudy


def register(app: typer.Typer, one_clear_line: Callable[[bool], AbstractContextManager[None]]) -> None:
    """Add the command to the application.

    Args:
        app: the application.
        one_clear_line: turns an error into one line on standard error.
    """

    @app.command()
    def meanfield(
        source: Annotated[
            str,
            typer.Argument(
                metavar="MODEL|WEIGHTS",
                help="A model (see `lipscope models`), or a safetensors file with q, k, v, out as for measure.",
                show_default=False,
            ),
        ],
        layer: Annotated[
            int | None, typer.Option(help="Layer of a model, 0 by default; negative ones count from the end.")
        ] = None,
        head: Annotated[int | None, typer.Option(help="One head before W_O; the whole layer by default.")] = None,
        law: Annotated[
            str | None,
            typer.Option(
                help="ball[:R], sphere[:R], gaussian[:S], mixture[:K:R:S], or tokens (those of the text). By default tokens "
                "for a model and sphere for weights; R is the typical norm of the model's tokens, or √d.",
                show_default=False,
            ),
        ] = None,
        lengths: Annotated[str, typer.Option(help="8,16,32 or 8:512:log or 8:64:8.")] = "16:256:log",
        repeats: Annotated[int, typer.Option(help="Independent draws per length.")] = 5,
        seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
        transport_up_to: Annotated[int, typer.Option(help="Longest n with transport distances (about n³ steps).")] = 256,
        rtol: Annotated[float, typer.Option(help="Relative accuracy of σ.")] = 1e-4,
        text: Annotated[str, typer.Option(help="Text that a model reads: a name, a file or a directory.")] = "python-docs",
        text_tokens: Annotated[int, typer.Option(help="Tokens per input that a model reads; four inputs.")] = 64,
        heads: Annotated[int | None, typer.Option(help="Weights: number of query heads.")] = None,
        kv_heads: Annotated[int | None, typer.Option(help="Weights: number of key/value heads.")] = None,
        transposed: Annotated[bool, typer.Option(help="Weights are stored (in, out), as in GPT-2's Conv1D.")] = False,
        mask: Annotated[str, typer.Option(help="Weights: full or causal.")] = "full",
        scale: Annotated[float | None, typer.Option(help="Weights: score scale τ; 1/√dk by default.")] = None,
        softcap: Annotated[float | None, typer.Option(help="Weights: c in c·tanh(s/c).")] = None,
        sink_length: Annotated[
            int | None, typer.Option(help="Number of tokens against which an attention sink counts as one.")
        ] = None,
        out: Annotated[Path | None, typer.Option(help="Directory for study.json, rows.csv, plateau.png and .html.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print the study as JSON instead of a table.")] = False,
        debug: Annotated[bool, typer.Option(help="Show the traceback when something goes wrong.")] = False,
    ) -> None:
        """Study the mean-field limit of one layer: σ and W_2 ratios as n grows, tokens drawn from a fixed law."""
        with one_clear_line(debug):
            from lipscope.attention.io import load_layer
            from lipscope.cli.models import progress_bar
            from lipscope.models.text import parse_lengths
            from lipscope.spectral.solvers import Auto
            from lipscope.studies.mean_field.attention import MeanFieldAttention
            from lipscope.studies.mean_field.study import convergence_study

            chosen, tokens = parse_lengths(lengths), None
            if source.endswith(".safetensors"):
                if layer is not None:
                    raise ValueError(f"--layer {layer} belongs to a model: a weights file holds one layer")
                options = {"kv_heads": kv_heads, "mask": mask, "scale": scale, "softcap": softcap}
                whole = load_layer(Path(source), heads=heads, transposed=transposed, **options)
                name = Path(source).name
                who: dict[str, Any] = {"model": name}
            else:
                from lipscope.models.load import load
                from lipscope.studies.mean_field.model_layer import model_layer

                layer = layer or 0
                handle = load(source)
                whole, tokens = model_layer(handle, layer, text, n=text_tokens, seed=seed)
                name = f"{handle.name}, layer {handle.layer(layer).index}"
                who = {"model": handle.name, "layer": handle.layer(layer).index, "text": text}
            attention = MeanFieldAttention(whole, sink_length)
            if head is not None:
                attention, name = attention.head(head), f"{name}, head {head}"
                who["head"] = head
            with progress_bar() as progress:
                study = convergence_study(
                    attention, _law(law, whole.width, tokens), chosen, repeats=repeats, seed=seed,
                    transport_up_to=transport_up_to, solver=Auto(rtol=rtol, seed=seed), progress=progress,
                )  # fmt: skip
            if out is not None:
                _write(study, out, name, who)
            if as_json:
                typer.echo(json.dumps({"layer": name} | study.to_dict(), indent=2))
            else:
                _print(study, name)


def _law(text: str | None, dimension: int, tokens: Any) -> Any:
    from lipscope.studies.mean_field.laws import Empirical, parse_law

    if text == "tokens" or (text is None and tokens is not None):
        if tokens is None:
            raise ValueError(
                "--law tokens needs a model that reads a text; for weights use ball, sphere, gaussian or mixture"
            )
        return Empirical(tokens)
    typical = dimension**0.5 if tokens is None else float(tokens.square().sum(-1).mean().sqrt())
    return parse_law(text or "sphere", dimension, default_size=typical)


def _write(study: PlateauStudy, directory: Path, name: str, who: dict[str, Any]) -> None:
    from lipscope.studies.mean_field.figures import draw_html, draw_png
    from lipscope.studies.rows import identified, write_rows

    write_rows(identified(study.to_rows(), **who), directory)
    (directory / "study.json").write_text(json.dumps({"layer": name} | study.to_dict(), indent=2), encoding="utf-8")
    title = f"{name}: tokens from {study.law}, mask {study.mask}"
    draw_png(study, directory / "plateau.png", title)
    draw_html(study, directory / "plateau.html", title)
    typer.echo(f"rows and figures are in {directory}", err=True)


def _print(study: PlateauStudy, name: str) -> None:
    nearest, cell = "{:.4g}".format, {"lower": round_down, "upper": round_up, "refined": round_up}
    columns = {"σ": "sigma", "lower": "lower", "upper": "upper", "two samples": "ratio", "insertion": "insertion",
               "largest |x|": "radius", "refined": "bound"}  # fmt: skip
    shown = {title: study.medians(column) for title, column in columns.items()}
    # The interval at a length is the one that holds for all of its draws.
    for title, worst in (("lower", min), ("upper", max)):
        shown[title] = [worst(getattr(row, title) for row in study.rows if row.n == n) for n in study.lengths]
    rows = [
        [str(n), *("–" if (value := shown[title][k]) is None else cell.get(title, nearest)(value) for title in columns)]
        for k, n in enumerate(study.lengths)
    ]
    chances = [row.delta for row in study.rows if row.delta is not None]
    chance = f" (an upper end fails with probability ≤ {max(chances):g})" if chances else ""
    distance = "d_2" if study.mask == "causal" else "W_2"
    print_table(
        ["n", *columns],
        rows,
        title=f"{name}: tokens from {study.law}, mask {study.mask}\nmedians over the draws of each length",
        caption=f"σ of every draw at this n lies between lower and upper{chance}; two samples and insertion are ratios of "
        f"{distance} distances, output over input; refined bounds all of them for every n, at the largest norm drawn",
    )
    for fit in (study.plateau(), study.growth()):
        if fit is not None:
            typer.echo(str(fit))
    typer.echo(study.verdict())
