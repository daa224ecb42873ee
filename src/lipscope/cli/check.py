"""``check``: does any output of a model depend on a token it must not see?"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lipscope.cli import options as opt
from lipscope.cli.options import as_dtype, numbers, option
from lipscope.cli.source import look_first
from lipscope.cli.terminal import echo, print_table, show, waiting

if TYPE_CHECKING:
    from lipscope.models.verdicts import Isolation


Side = StrEnum("Side", ["left", "right", "none"])
Stored = StrEnum("Stored", ["float32", "float64", "bfloat16", "float16"])


def check(
    model: opt.ModelName,
    causal: Annotated[bool | None, option("No output sees a later token; by default what the configuration claims.")] = None,
    window: Annotated[
        int | None, option("No attention layer sees a token so many places back; 0 tests none that is claimed.")
    ] = None,
    documents: Annotated[
        str | None, option("Lengths of packed documents that must not see each other, such as 5,9,4.")
    ] = None,
    padding: Annotated[Side | None, option("Where padding stands that must not be seen; none tests none.")] = None,
    batch: Annotated[bool, option("Sequences of a batch must not see each other.", default=True)] = True,
    cache: Annotated[bool, option("Decoding with the cache gives the outputs of one pass.", "--cache")] = False,
    use_cache: Annotated[bool | None, option("What the model is told; nothing by default, as when you call it.")] = None,
    n: Annotated[int | None, option("Number of tokens, 32 by default or as many as the documents have.", "--n")] = None,
    attn_implementation: Annotated[str | None, option("eager, sdpa, …; its own by default.", panel=opt.FOR_A_MODEL)] = None,
    dtype: Annotated[
        Stored | None,
        option("Run in float32, float64, bfloat16 or float16; in that of the weights by default.", metavar="TYPE"),
    ] = None,
    allow_pickle: opt.AllowPickle = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    seed: opt.Seed = 0,
    as_json: opt.AsJson = False,
    out: Annotated[Path | None, option("Also write what was found as one HTML file.", panel=opt.OUTPUT)] = None,
) -> None:
    """Test that no output depends on a token it must not see: later tokens, other documents, padding, batch-mates."""
    look_first(model)
    from lipscope.models.isolation import check as examine
    from lipscope.models.load import load_named
    from lipscope.models.refusals import refuse_kernels_of_the_hub

    with waiting(f"loading {model}"):
        found = load_named(model, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    module = found.model
    if attn_implementation is not None:
        if not hasattr(module, "set_attn_implementation"):
            raise ValueError(f"{model} has no attention implementation to choose")
        refuse_kernels_of_the_hub(attn_implementation)
        try:
            cast(Any, module).set_attn_implementation(attn_implementation)
        except (ValueError, ImportError) as error:
            raise ValueError(f"--attn-implementation {attn_implementation!r} is none of {model}: {error}") from None
    module = module if dtype is None else module.to(as_dtype(dtype))
    lengths = None if documents is None else numbers("documents", documents, "lengths such as 5,9,4")
    side = None if padding is None else padding.value
    claims: dict[str, Any] = {"causal": causal, "window": window, "documents": lengths, "padding": side}
    with waiting(f"checking {model}"):
        seen = examine(module, n=n, **claims, batch=batch, cache=cache, use_cache=use_cache, seed=seed)
    seen = replace(seen, name=found.name)
    show(seen.to_rows(), as_json, lambda: _print(seen))
    if out is not None:
        from lipscope.runs.writing import write_file

        echo(f"The page is in {write_file(out, _page(seen)).resolve()}", err=as_json)
    raise typer.Exit({True: 0, False: 1, None: 2}[seen.held])


_NAMES = ("claim", "", "boundaries", "largest leak", "where")


def _rows(seen: Isolation) -> list[list[str]]:
    rows = []
    for verdict in seen.verdicts:
        leak = verdict.leak
        size = "" if leak is None else f"{leak.size:.1e}"
        found = "" if leak is None else f"{leak.where}, by {leak.instrument}"
        where = "; ".join(filter(None, (found, verdict.skipped or verdict.remark)))
        rows.append([verdict.claim, verdict.word, str(verdict.boundaries), size, where])
    return rows


def _print(seen: Isolation) -> None:
    why = "; ".join(f"{verdict.claim}: {verdict.why}" for verdict in seen.verdicts)
    text = [_NAMES[0], _NAMES[1], _NAMES[4]]
    print_table(_NAMES, _rows(seen), text=text, title=seen.title, caption=f"Claimed by — {why}.")
    for verdict in seen.verdicts:
        if verdict.leak is not None and verdict.leak.picture:
            echo(f"{verdict.claim}: {verdict.leak.module}\n{verdict.leak.picture}")


def _page(seen: Isolation) -> str:
    from lipscope.report.html import Document, Section, Table

    word = {True: "No", False: "Yes", None: "That could not be tested"}[seen.held]
    why = [f"{verdict.claim}: {verdict.why}" for verdict in seen.verdicts]
    sections = [
        Section("What was tested", table=Table(_NAMES, _rows(seen))),
        *(Section(f"{v.claim}: {v.leak.where}", code=v.leak.picture) for v in seen.verdicts if v.leak is not None),
        Section("Who claims it", bullets=why),
    ]
    title = f"Does an output of {seen.name} see a token that it must not?"
    return Document(title, [f"{word}. {seen.title}."], sections).to_html(Path())
