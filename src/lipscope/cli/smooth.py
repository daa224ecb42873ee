"""The command ``smooth``: rescale the queries and keys of a model's heads, and say what it costs. Heavy imports inside."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipscope.cli.options import AsJson, Debug, ModelName
from lipscope.cli.tables import print_table
from lipscope.rounding import round_down, round_up

if TYPE_CHECKING:
    from lipscope.training.rescale.report import HeadChange, Smoothing

ClearErrors = Callable[[bool], AbstractContextManager[None]]


class Quantity(StrEnum):
    """What the target is for."""

    max_logit = "max-logit"
    sigma = "sigma"


def register(app: typer.Typer, clear_errors: ClearErrors) -> None:
    """Add the command to the application."""

    @app.command()
    def smooth(
        model: ModelName,
        target: Annotated[float, typer.Option(help="What no head may exceed on the text.", show_default=False)],
        text: Annotated[str, typer.Option(help="A name from `lipscope corpora`, a file, or a directory.")] = "python-docs",
        layer: Annotated[int | None, typer.Option(help="One layer; all by default.", show_default=False)] = None,
        head: Annotated[int | None, typer.Option(help="One head of it; all by default.", show_default=False)] = None,
        by: Annotated[Quantity, typer.Option(help="The largest logit of a head, or its σ.")] = Quantity.max_logit,
        n: Annotated[int, typer.Option(help="Tokens of one calibration input.")] = 128,
        inputs: Annotated[int, typer.Option(help="Calibration inputs, disjoint in the text.")] = 4,
        seed: Annotated[int, typer.Option(help="Where in the text the inputs lie.")] = 0,
        out: Annotated[
            Path | None, typer.Option(help="New directory for the rescaled model; it must not exist.", show_default=False)
        ] = None,
        top: Annotated[int, typer.Option(help="Lines of the table.")] = 20,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> None:
        """Rescale W_Q and W_K of single heads so that their logits, or σ, stay below a target on a text."""
        with clear_errors(debug):
            if head is not None and layer is None:
                raise ValueError("--head needs --layer: heads are counted within a layer")
            if out is not None and out.exists():
                raise ValueError(f"--out {out} exists, and a checkpoint is never overwritten: choose another directory")
            from lipscope.training.rescale.smooth import smooth as run

            report = run(
                model, target=target, by=by.value, text=text, n=n, inputs=inputs, seed=seed,
                layers=None if layer is None else [layer], heads=None if head is None else [head],
            )  # fmt: skip
            if as_json:
                typer.echo(json.dumps(report.to_dict(), indent=1))
            else:
                _print(report, top)
            if out is not None:
                typer.echo(f"saved in {report.save(out)}", err=True)


def _print(report: Smoothing, top: int) -> None:
    title = f"{report.name}, {report.method}: {report.by} of every head ≤ {report.target:g}\non {report.text}"
    title += "".join(f"\n{note}" for note in report.notes)
    names = ["layer", "head", "factor", "max logit", "after", "σ lower", "upper", "after: lower", "upper "]
    shown = sorted(report.changed, key=lambda change: change.factor or 0.0)[:top]
    rows = [_row(change) for change in [*shown, *report.layers]]
    caption = "head: σ of one head before W_O · all: σ of the layer, scope attention · largest over the inputs"
    print_table(names, rows, text=[], title=title, caption=caption)
    left = len(report.changed) - len(shown)
    if left:
        typer.echo(f"… and {left} more; --top and --json show them")
    typer.echo(f"{len(report.changed)} of {len(report.heads)} heads rescaled")
    typer.echo(report.cost())


def _row(change: HeadChange) -> list[str]:
    return [
        str(change.layer),
        "all" if change.head is None else str(change.head),
        "" if change.factor is None else f"{change.factor:.4f}",
        f"{change.logit_before:.4g}",
        f"{change.logit_after:.4g}",
        round_down(change.sigma_before.lower),
        round_up(change.sigma_before.upper),
        round_down(change.sigma_after.lower),
        round_up(change.sigma_after.upper),
    ]
