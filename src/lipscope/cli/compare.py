"""``lipscope compare-attention``: every kind of attention with the same weights on the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipscope.cli.options import AsJson, Debug, Heads, KvHeads, Transposed
from lipscope.cli.tables import print_table
from lipscope.rounding import interval, round_down, round_up

if TYPE_CHECKING:
    from lipscope.studies.variants import Comparison


def register(app: typer.Typer, one_clear_line: Callable[[bool], AbstractContextManager[None]]) -> None:
    """Add the command to the application."""

    @app.command("compare-attention")
    def compare_attention(
        source: Annotated[
            str,
            typer.Argument(
                metavar="[MODEL|WEIGHTS|random]",
                help="A model on a text, a safetensors file with q, k, v, out as for measure, or random weights.",
            ),
        ] = "random",
        layer: Annotated[int | None, typer.Option(help="Layer of a model, 0 by default.")] = None,
        n: Annotated[int, typer.Option("--n", help="Number of tokens at which σ and the bounds are given.")] = 32,
        lengths: Annotated[str, typer.Option(help="Lengths for the growth in n: 8,16,32 or 8:128:log.")] = "8,16,32,64,128",
        radius: Annotated[
            float | None,
            typer.Option(help="Norm R of the tokens; √d for random tokens, their own for a model.", show_default=False),
        ] = None,
        inputs: Annotated[int, typer.Option(help="Inputs per length.")] = 4,
        search: Annotated[int, typer.Option(help="Ascent steps for the worst σ on the ball; 0 for none.")] = 60,
        kinds: Annotated[
            str | None,
            typer.Option(help="Comma-separated kinds, all by default: dot-product, 1/d-scaled, soft-capped, qk-norm, "
                              "cosine, l2, sigmoid, sinkhorn.", show_default=False),
        ] = None,
        softcap: Annotated[float, typer.Option(help="c of soft-capped attention.")] = 50.0,
        eps: Annotated[float, typer.Option(help="ε of the normalisation in qk-norm and cosine.")] = 1e-2,
        tau: Annotated[float, typer.Option(help="τ of cosine attention.")] = 12.0,
        mask: Annotated[
            str | None, typer.Option(help="full or causal; that of the model, or full, by default.", show_default=False)
        ] = None,
        text: Annotated[str, typer.Option(help="Text that a model reads: a name, a file or a directory.")] = "python-docs",
        width: Annotated[int, typer.Option(help="Random weights: token width d.")] = 16,
        heads: Heads = None,
        kv_heads: KvHeads = None,
        transposed: Transposed = False,
        seed: Annotated[int, typer.Option(help="Seed of random weights, tokens and search.")] = 0,
        out: Annotated[
            Path | None, typer.Option(help="Directory for the rows, comparison.json and comparison.png.", show_default=False)
        ] = None,
        as_csv: Annotated[bool, typer.Option("--csv", help="Print rows as CSV instead of a table.")] = False,
        as_json: AsJson = False,
        debug: Debug = False,
    ) -> None:  # fmt: skip
        """Compare the smoothness of attention variants: σ, growth in n and R, the worst found, and bounds."""
        with one_clear_line(debug):
            from lipscope.attention.family import VARIANTS
            from lipscope.cli.models import progress_bar
            from lipscope.models.text import parse_lengths
            from lipscope.studies.variants import compare

            chosen = parse_lengths(lengths)
            weights, tokens, name, who = _source(
                source, layer, max([n, *chosen]), inputs, text, seed, mask, width, heads, kv_heads, transposed
            )
            options: dict[str, dict[str, Any]] = {
                "soft-capped": {"softcap": softcap}, "qk-norm": {"eps": eps}, "cosine": {"eps": eps, "tau": tau},
            }  # fmt: skip
            names = VARIANTS if kinds is None else tuple(part.strip() for part in kinds.split(","))
            with progress_bar() as progress:
                found = compare(
                    weights, n=n, radius=radius, tokens=tokens, lengths=chosen, inputs=inputs, search=search, names=names,
                    options=options, seed=seed, progress=progress,
                )  # fmt: skip
            if out is not None:
                _write(found, out, name, who)
            if as_json:
                typer.echo(json.dumps({"weights": name} | found.to_dict(), indent=2))
            elif as_csv:
                typer.echo(_csv(found), nl=False)
            else:
                _print(found, name)


def _source(
    source: str, layer: int | None, longest: int, inputs: int, text: str, seed: int, mask: str | None, width: int,
    heads: int | None, kv_heads: int | None, transposed: bool,
) -> tuple[Any, Any, str, dict[str, Any]]:  # fmt: skip
    """The layer, given tokens or None, a name, and who it is in rows."""
    is_model = source != "random" and not source.endswith(".safetensors")
    if layer is not None and not is_model:
        raise ValueError(f"--layer {layer} belongs to a model: {source} holds one layer")
    if source == "random":
        from lipscope.studies.variants import random_layer

        name = f"random weights, d = {width}"
        return random_layer(width, heads=heads or 2, mask=mask, seed=seed), None, name, {"model": name}
    if not is_model:
        from lipscope.attention.io import load_layer

        found = load_layer(Path(source), heads=heads, kv_heads=kv_heads, transposed=transposed, mask=mask)
        return found, None, Path(source).name, {"model": Path(source).name}
    import torch

    from lipscope.models.corpora import read_text
    from lipscope.models.load import load
    from lipscope.models.text import Chunker
    from lipscope.studies.worst_case.model_layer import layer_at_text

    handle = load(source)
    handle.check_lengths([longest])
    pieces = Chunker(read_text(text), handle.tokenizer).chunks([longest], inputs, seed)[longest]
    seen = [layer_at_text(handle, layer or 0, torch.tensor(piece)) for piece in pieces]
    attention = seen[0].attention if mask is None else seen[0].attention.with_mask(mask)
    who = {"model": handle.name, "layer": handle.layer(layer or 0).index, "text": text}
    return attention, torch.stack([s.activations for s in seen]), f"{handle.name}, layer {who['layer']}", who


def _csv(found: Comparison) -> str:
    import csv
    import io

    rows = found.summary()
    file = io.StringIO()
    writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _write(found: Comparison, directory: Path, name: str, who: dict[str, Any]) -> None:
    from lipscope.studies.rows import identified, write_rows
    from lipscope.studies.variants_figures import draw

    write_rows(identified(found.to_rows(), **who), directory)
    (directory / "comparison.json").write_text(json.dumps({"weights": name} | found.to_dict(), indent=2), encoding="utf-8")
    draw(found, directory / "comparison.png", f"{name}, mask {found.mask}")
    typer.echo(f"rows and figure are in {directory}", err=True)


def _print(found: Comparison, name: str) -> None:
    def exponent(row: dict[str, Any], label: str) -> str:
        if row[f"growth_{label}"] is None:
            return "–"
        ends = interval(row[f"growth_{label}_low"], row[f"growth_{label}_high"], decimals=2)
        return f"{row[f'growth_{label}']:.2f} {ends}"

    rows = [
        [row["attention"], f"{row['sigma']:.4g}", interval(row["lower"], row["upper"]), exponent(row, "n"),
         exponent(row, "radius"), "–" if row["worst_found"] is None else round_down(row["worst_found"]),
         "–" if row["bound"] is None else round_up(row["bound"]), row["bound_name"] or "none known"]
        for row in found.summary()
    ]  # fmt: skip
    left_out = f"; left out for mask {found.mask}: {', '.join(found.left_out)}" if found.left_out else ""
    without = f", without {', '.join(found.without)}" if found.without else ""
    print_table(
        ["attention", "σ", "interval", "exponent in n", "exponent in R", "worst found", "bound", "by"],
        rows,
        text=["attention", "by"],
        whole=["by"],
        title=f"{name}{without}: {found.tokens}, n = {found.n}, R = {found.radius:.4g}, mask {found.mask}",
        caption="σ is the median over the inputs, and all of them lie in the interval; exponents of power laws with 95 % "
        f"intervals over inputs; worst found and bound are for all tokens of norm ≤ R{left_out}",
    )
