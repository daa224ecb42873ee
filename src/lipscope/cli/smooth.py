"""The command ``smooth``: rescale the queries and keys of a model's heads, and say what it costs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lipscope.cli import options as opt
from lipscope.cli.options import indices, option
from lipscope.cli.source import look_first
from lipscope.cli.terminal import echo, notice, print_table, show

if TYPE_CHECKING:
    from lipscope.training.smooth import Smoothing


Quantity = StrEnum("Quantity", {"max_logit": "max-logit", "sigma": "sigma"})


def smooth(
    model: opt.ModelName,
    target: Annotated[float, option("What no head may exceed on the text.")],
    text: opt.Text = "python-docs",
    layers: opt.Layers = "all",
    head: opt.HeadChoice = None,
    by: Annotated[Quantity, option("The largest logit of a head, or its σ.", default=True)] = Quantity.max_logit,
    n: opt.N = 128,
    inputs: opt.Inputs = 4,
    seed: opt.Seed = 0,
    out: Annotated[Path | None, option("New directory for the rescaled model; it must not exist.", panel=opt.OUTPUT)] = None,
    top: opt.Top = 20,
    as_json: opt.AsJson = False,
) -> None:
    """Rescale W_Q and W_K of single heads so that their logits, or σ, stay below a target on a text."""
    chosen = indices("layers", layers)
    if head is not None and chosen is None:
        raise ValueError("--head needs --layers: heads are counted within a layer")
    if not target > 0:
        raise ValueError(f"--target must be positive, got {target:g}")
    look_first(model, text, chosen)
    if out is not None and out.exists():
        raise ValueError(f"--out {out} exists, and a checkpoint is never overwritten: choose another directory")
    from lipscope.training.smooth import smooth as run

    which: dict[str, Any] = {"layers": chosen, "heads": indices("head", head)}
    report = run(model, target=target, by=by.value, text=text, n=n, inputs=inputs, seed=seed, **which)
    show(report.to_dict(), as_json, lambda: _print(report, top))
    if out is not None:
        notice(f"saved in {report.save(out)}")


def _print(report: Smoothing, top: int) -> None:
    title = f"{report.name}, {report.method}: {report.by} of every head ≤ {report.target:g}\non {report.text}"
    title += "".join(f"\n{note}" for note in report.notes)
    names = ["layer", "head", "factor", "max logit", "after", "σ", "σ after"]
    shown = sorted(report.changed, key=lambda change: change.factor or 0.0)[:top]
    rows = []
    for change in [*shown, *report.layers]:
        who = [str(change.layer), "all" if change.head is None else str(change.head)]
        factor = "" if change.factor is None else f"{change.factor:.4f}"
        logits = [f"{change.logit_before:.4g}", f"{change.logit_after:.4g}"]
        rows.append([*who, factor, *logits, str(change.sigma_before), str(change.sigma_after)])
    caption = "head: σ of one head before W_O · all: σ of the layer, scope attention · largest over the inputs"
    print_table(names, rows, text=[], title=title, caption=caption)
    if left := len(report.changed) - len(shown):
        echo(f"… and {left} more; --top and --json show them")
    echo(f"{len(report.changed)} of {len(report.heads)} heads rescaled")
    echo(report.cost())
