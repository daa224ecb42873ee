"""``lipscope bounds``: every bound that holds for an attention layer, given by its weights or as a layer of a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipscope.cli.options import (
    TOKENS,
    AllowPickle,
    AsJson,
    Debug,
    Dtype,
    Heads,
    KvHeads,
    MaskText,
    Part,
    Scale,
    Softcap,
    Transposed,
    TrustCode,
)
from lipscope.cli.tables import print_table
from lipscope.rounding import interval

if TYPE_CHECKING:
    from lipscope.bounds.table import BoundTable
    from lipscope.models.layer_bounds import LayerBounds

_DEFAULT_TEXT, _DEFAULT_N = "python-docs", 32


def register(app: typer.Typer, one_clear_line: Callable[[bool], AbstractContextManager[None]]) -> None:
    """Add the command to the application.

    Args:
        app: the application.
        one_clear_line: turns an error into one line on standard error.
    """

    @app.command()
    def bounds(
        source: Annotated[
            str,
            typer.Argument(
                help="A model (see `lipscope models`), or a safetensors file with tensors q, k, v, out, as for measure.",
                show_default=False,
            ),
        ],
        layer: Annotated[int | None, typer.Option(help="Model: which layer; negative ones count from the end.")] = None,
        head: Annotated[int | None, typer.Option(help="Model: which head, before W_O; the whole layer by default.")] = None,
        text: Annotated[
            str | None,
            typer.Option(
                help="Model: where to measure σ, a name from `lipscope corpora`, a file or a directory; python-docs when "
                "neither text nor n is given.",
                show_default=False,
            ),
        ] = None,
        n: Annotated[
            int | None,
            typer.Option("--n", help="Number of tokens; without tokens or text: set bounds only.", show_default=False),
        ] = None,
        radius: Annotated[
            float | None,
            typer.Option(
                help="Largest norm R of a token; by default that of the model's normalisation, or of the tokens.",
                show_default=False,
            ),
        ] = None,
        seed: Annotated[int, typer.Option(help="Model: where in the text the tokens lie.")] = 0,
        tokens: Annotated[Path | None, TOKENS] = None,
        heads: Heads = None,
        kv_heads: KvHeads = None,
        transposed: Transposed = False,
        mask: MaskText = None,
        scale: Scale = None,
        softcap: Softcap = None,
        dtype: Dtype = None,
        part: Part = None,
        allow_pickle: AllowPickle = False,
        trust_remote_code: TrustCode = False,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> None:
        """List how large σ could be: for all tokens of norm at most R, and provably at given ones."""
        with one_clear_line(debug):
            weights = {
                "tokens": tokens, "heads": heads, "kv-heads": kv_heads, "transposed": transposed or None, "mask": mask,
                "scale": scale, "softcap": softcap,
            }  # fmt: skip
            model = {
                "layer": layer, "head": head, "text": text, "part": part, "dtype": dtype,
                "allow-pickle": allow_pickle or None, "trust-remote-code": trust_remote_code or None,
            }  # fmt: skip
            if source.endswith(".safetensors") or Path(source).is_file():
                _refuse(model, "models", f"{source} is a file with the weights of one layer")
                _of_weights(source, weights, radius, n, as_json)
            else:
                _refuse(weights, "files with weights", f"{source} is a model")
                _of_model(source, model, radius, n, seed, as_json)


def _refuse(options: dict[str, Any], kind: str, reason: str) -> None:
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise ValueError(f"{', '.join(given)} belong{'s' if len(given) == 1 else ''} to {kind}, but {reason}")


def _of_weights(source: str, given: dict[str, Any], radius: float | None, n: int | None, as_json: bool) -> None:
    from lipscope.attention.io import load_layer, load_tokens
    from lipscope.bounds.table import table

    attention = load_layer(
        Path(source), heads=given["heads"], kv_heads=given["kv-heads"], transposed=bool(given["transposed"]),
        mask=given["mask"], scale=given["scale"], softcap=given["softcap"],
    )  # fmt: skip
    found = table(attention, None if given["tokens"] is None else load_tokens(given["tokens"]), radius, n)
    title = f"Bounds for tokens of norm ≤ {found.radius:.6g}, n = {found.n}"
    if found.sigma is not None:
        title += f"\nmeasured σ ∈ {interval(found.sigma.lower, found.sigma.upper, 6)}"
    _print(found, found, title, as_json)


def _of_model(source: str, given: dict[str, Any], radius: float | None, n: int | None, seed: int, as_json: bool) -> None:
    if given["layer"] is None:
        raise ValueError(f"{source} is a model: say which layer, --layer L")
    from lipscope.cli.models import as_dtype
    from lipscope.models.corpora import read_text
    from lipscope.models.layer_bounds import layer_bounds
    from lipscope.models.load import load
    from lipscope.models.text import chunk_of

    handle = load(
        source, part=given["part"], dtype=as_dtype(given["dtype"]), allow_pickle=bool(given["allow-pickle"]),
        trust_remote_code=bool(given["trust-remote-code"]),
    )  # fmt: skip
    where = handle.layer(given["layer"]).index
    text = given["text"]
    if text is None and n is not None:
        found = layer_bounds(handle, where, head=given["head"], n=n, radius=radius)
        title = found.title()
    else:
        text, n = text or _DEFAULT_TEXT, _DEFAULT_N if n is None else n
        ids = chunk_of(handle, read_text(text), n, seed)
        found = layer_bounds(handle, where, head=given["head"], input_ids=ids, radius=radius)
        title = f"{found.title()}, from {text}"
    if handle.notes:
        title += f"\n{'; '.join(handle.notes)}"
    _print(found, found.table, title, as_json)


def _print(rows: BoundTable | LayerBounds, found: BoundTable, title: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows.to_rows(), indent=2))
        return
    cells = []
    for bound in found.bounds:
        ratio = found.ratio(bound)
        shown = "" if ratio is None else f"{ratio:.4g}"
        cells.append([bound.name, bound.kind, bound.sign, bound.shown(), shown, bound.norm])
    caption = "set: for all tokens of that norm · local: at these tokens · limit: for ever longer tokens\n"
    caption += "≥: tokens of that norm reach it" + ("" if found.sigma is None else " · × σ: bound over measured σ")
    names = ["bound", "kind", "", "value", "× σ", "norm"]
    print_table(names, cells, text=["bound", "kind", "norm"], title=title, caption=caption)
