"""The command line: parses, calls, prints. Heavy imports happen inside the commands, so that --help answers at once."""

from __future__ import annotations

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipscope import __version__
from lipscope.cli import attack as cli_attack
from lipscope.cli import bounds as cli_bounds
from lipscope.cli import compare as cli_compare
from lipscope.cli import meanfield as cli_meanfield
from lipscope.cli import models as cli_models
from lipscope.cli import paper as cli_paper
from lipscope.cli import report as cli_report
from lipscope.cli import smooth as cli_smooth
from lipscope.cli import sweep as cli_sweep
from lipscope.cli.options import TOKENS, AsJson, Debug, Dtype, Heads, KvHeads, MaskText, Memory, Scale, Softcap, Transposed
from lipscope.cli.tables import print_table
from lipscope.rounding import round_down, round_up

if TYPE_CHECKING:
    from torch import Tensor

    from lipscope.attention.layer import Attention
    from lipscope.spectral.result import SpectralNorm

app = typer.Typer(
    name="lipscope",
    help="How smooth is attention? Measure the local Lipschitz constant σ(X) = ‖J(X)‖₂ of attention, as an interval.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


class Scope(StrEnum):
    """What is measured."""

    attention = "attention"
    head = "head"


def _version(value: bool) -> None:
    if value:
        typer.echo(f"lipscope {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """How smooth is attention? Measure the local Lipschitz constant σ(X) = ‖J(X)‖₂ of attention, as an interval."""


@app.command()
def measure(
    weights: Annotated[
        Path,
        typer.Argument(
            help="safetensors file with tensors q, k, v, out (as in nn.Linear) or a fused qkv; optional q_bias, k_bias, "
            "v_bias, qkv_bias, out_bias, bias, sinks.",
            show_default=False,
        ),
    ],
    tokens: Annotated[Path, TOKENS],
    heads: Heads = None,
    kv_heads: KvHeads = None,
    transposed: Transposed = False,
    mask: MaskText = None,
    scope: Annotated[Scope, typer.Option(help="The whole layer, or each head before W_O.")] = Scope.attention,
    scale: Scale = None,
    softcap: Softcap = None,
    rtol: Annotated[float, typer.Option(help="Relative accuracy of the estimate.")] = 1e-4,
    delta: Annotated[float, typer.Option(help="Allowed failure probability of the upper end.")] = 1e-6,
    interval: Annotated[float, typer.Option(help="Go on until upper/lower − 1 is at most this.")] = 0.1,
    max_steps: Annotated[int, typer.Option(help="Most operator pairs (J, Jᵀ) per input.")] = 300,
    seed: Annotated[int, typer.Option(help="Seed of the random start.")] = 0,
    dtype: Dtype = None,
    memory: Memory = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure σ of an attention layer given by its weights, at given tokens."""
    with _one_clear_line(debug):
        import torch

        from lipscope.attention.io import load_layer, load_tokens
        from lipscope.measure.sigma import local_lipschitz
        from lipscope.spectral.solvers import Auto

        layer = load_layer(
            weights, heads=heads, kv_heads=kv_heads, transposed=transposed, mask=mask, scale=scale, softcap=softcap
        )
        X, precision = load_tokens(tokens), None if dtype is None else getattr(torch, dtype.value)
        if memory is not None or X.shape[-2] >= _LONG:
            _announce(layer, X, precision, scope.value, memory)
        result = local_lipschitz(
            layer,
            X,
            scope=scope.value,
            solver=Auto(rtol=rtol, delta=delta, interval=interval, max_steps=max_steps, seed=seed),
            dtype=precision,
            memory=memory,
        )
        if as_json:
            typer.echo(json.dumps(result.to_rows(), indent=2))
        else:
            _print_result(result)


# Tokens from which a run is long enough to say beforehand what it takes.
_LONG = 2048


def _announce(layer: Attention, X: Tensor, dtype: Any, scope: str, memory: str | None) -> None:
    """Say on standard error what memory the run is expected to take; refuses when that is more than there may be."""
    from lipscope.measure.memory import plan_memory, read_bytes
    from lipscope.measure.sigma import working_dtype

    plan = plan_memory(
        layer, X.shape[-2], dtype=dtype or working_dtype(layer, X), inputs=1 if X.ndim == 2 else X.shape[0],
        limit=None if memory is None else read_bytes(memory), scope=scope,
    )  # fmt: skip
    typer.echo(f"n = {X.shape[-2]}: {plan}", err=True)


def _print_result(result: SpectralNorm) -> None:
    rows = result.to_rows()
    about = f"scope {result.scope} · mask {result.mask} · n = {result.tokens} · {result.dtype}"
    if result.dtype != result.input_dtype:
        about += f" (from {result.input_dtype})"
    index = [name for name in ("input", "head") if name in rows[0]]
    cells = [
        [
            *(str(row[name]) for name in index),
            round_down(row["lower"], 6),
            f"{row['estimate']:.6g}",
            round_up(row["upper"], 6),
            str(row["iterations"]),
            row["status"],
        ]
        for row in rows
    ]
    title = f"Local Lipschitz constant σ\n{about}"
    names = [*index, "lower", "estimate", "upper", "steps", "status"]
    print_table(names, cells, text=["status"], title=title, caption=_caption(result))
    if not all(row["converged"] for row in rows):
        typer.echo(result.message)


def _caption(result: SpectralNorm) -> str:
    kinds = " or ".join(dict.fromkeys(row["upper_kind"] for row in result.to_rows()))
    if "probabilistic" in kinds:
        return f"lower is attained; upper is {kinds}, a probabilistic one fails with probability ≤ {result.delta:g}"
    return f"{kinds}, up to the rounding allowance {result.rounding:.1e}"


class _one_clear_line:  # noqa: N801 - reads as a statement: with _one_clear_line(debug)
    """Turn an error into one line on standard error and exit code 2; --debug lets the traceback through."""

    def __init__(self, debug: bool) -> None:
        self.debug = debug

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or self.debug or not isinstance(error, Exception) or isinstance(error, typer.Exit):
            return
        message = " ".join(str(error).split()) or type(error).__name__
        typer.echo(f"lipscope: {message}", err=True)
        raise typer.Exit(2)


cli_bounds.register(app, _one_clear_line)
cli_models.register(app, _one_clear_line)
cli_meanfield.register(app, _one_clear_line)
cli_sweep.register(app, _one_clear_line)
cli_attack.register(app, _one_clear_line)
cli_paper.register(app, _one_clear_line)
cli_report.register(app, _one_clear_line)
cli_smooth.register(app, _one_clear_line)
cli_compare.register(app, _one_clear_line)


def main() -> None:
    """Entry point of the ``lipscope`` command."""
    # Libraries that talk about missing kernels would drown the one clear line.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        typer.echo("lipscope: interrupted", err=True)
        sys.exit(130)
    except Exception as error:
        # The parser's own complaints (an unknown option, a missing argument) know how to put themselves into words.
        if not hasattr(error, "format_message"):
            raise
        if message := " ".join(error.format_message().split()):  # empty when the help was printed instead
            typer.echo(f"lipscope: {message}", err=True)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)
