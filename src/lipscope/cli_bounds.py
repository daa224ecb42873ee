"""``lipscope bounds``: every bound that holds for an attention layer given by its weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lipscope.cli_tables import print_table

if TYPE_CHECKING:
    from lipscope.bounds.table import BoundTable


def register(app: typer.Typer, one_clear_line: Callable[[bool], AbstractContextManager[None]]) -> None:
    """Add the command to the application.

    Args:
        app: the application.
        one_clear_line: turns an error into one line on standard error.
    """

    @app.command()
    def bounds(
        weights: Annotated[
            Path,
            typer.Argument(
                help="safetensors file with tensors q, k, v, out (as in nn.Linear) or a fused qkv, as for measure.",
                show_default=False,
            ),
        ],
        tokens: Annotated[
            Path | None, typer.Option(help="safetensors file with one tensor (n, d): adds local bounds and σ itself.")
        ] = None,
        radius: Annotated[
            float | None, typer.Option(help="Largest norm R of a token; that of the tokens when they are given.")
        ] = None,
        n: Annotated[int | None, typer.Option("--n", help="Number of tokens, when none are given.")] = None,
        heads: Annotated[
            int | None, typer.Option(help="Number of query heads; else the file's metadata 'heads', else 1.")
        ] = None,
        kv_heads: Annotated[int | None, typer.Option(help="Number of key/value heads (grouped queries).")] = None,
        transposed: Annotated[bool, typer.Option(help="Weights are stored (in, out), as in GPT-2's Conv1D.")] = False,
        mask: Annotated[str, typer.Option(help="full, causal, window:W, prefix:P, packed:L1,L2, pad-left:K, …")] = "full",
        scale: Annotated[float | None, typer.Option(help="Score scale τ; 1/√dk by default.")] = None,
        softcap: Annotated[float | None, typer.Option(help="c in c·tanh(s/c).")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print rows as JSON instead of a table.")] = False,
        debug: Annotated[bool, typer.Option(help="Show the traceback when something goes wrong.")] = False,
    ) -> None:
        """List how large σ could be: on all tokens of norm at most R, and provably at given tokens."""
        with one_clear_line(debug):
            from lipscope.attention.files import load_layer, load_tokens
            from lipscope.bounds.table import table

            layer = load_layer(
                weights, heads=heads, kv_heads=kv_heads, transposed=transposed, mask=mask, scale=scale, softcap=softcap
            )
            found = table(layer, None if tokens is None else load_tokens(tokens), radius, n)
            if as_json:
                typer.echo(json.dumps(found.to_rows(), indent=2))
            else:
                _print(found)


def _print(found: BoundTable) -> None:
    title = f"Bounds for tokens of norm ≤ {found.radius:.6g}, n = {found.n}"
    if found.sigma is not None:
        title += f"\nmeasured σ ∈ [{float(found.sigma.lower):.6g}, {float(found.sigma.upper):.6g}]"
    rows = []
    for bound in found.bounds:
        ratio = found.ratio(bound)
        sign = "≥" if bound.side == "lower" else "→" if bound.kind == "limit" else "≤"
        shown = "" if ratio is None else f"{ratio:.4g}"
        rows.append([bound.name, bound.kind, sign, f"{bound.value:.6g}", shown, bound.norm])
    print_table(["bound", "kind", "", "value", "× σ", "norm"], rows, text=["bound", "kind", "norm"], title=title)
