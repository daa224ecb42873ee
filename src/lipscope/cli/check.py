"""``check``: does any output of a model depend on a token it must not see?"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from lipscope.cli import options as opt
from lipscope.cli.options import indices, option
from lipscope.cli.terminal import echo, print_table, waiting

if TYPE_CHECKING:
    from lipscope.models.verdicts import Isolation


class Side(StrEnum):
    """Where padding stands."""

    left = "left"
    right = "right"


class Stored(StrEnum):
    """Floating type of the weights."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


def check(
    model: opt.ModelName,
    causal: Annotated[
        bool, option("No output sees a later token; by default what the configuration claims.", "--causal")
    ] = False,
    window: Annotated[int | None, option("No attention layer sees a token so many places back.")] = None,
    documents: Annotated[
        str | None, option("Lengths of packed documents that must not see each other, such as 5,9,4.")
    ] = None,
    padding: Annotated[Side | None, option("Where padding stands that must not be seen.")] = None,
    batch: Annotated[bool, option("Sequences of a batch must not see each other.", default=True)] = True,
    cache: Annotated[bool, option("Decoding with the cache gives the outputs of one pass.", "--cache")] = False,
    n: opt.N = 32,
    attn_implementation: Annotated[str | None, option("The model's attention: eager, sdpa, …; its own by default.")] = None,
    dtype: Annotated[Stored | None, option("Run in this type; that of the weights by default.")] = None,
    allow_pickle: opt.AllowPickle = False,
    trust_remote_code: opt.TrustRemoteCode = False,
    seed: opt.Seed = 0,
    as_json: opt.AsJson = False,
) -> None:
    """Test that no output depends on a token it must not see: later tokens, other documents, padding, batch-mates."""
    from lipscope.models.isolation import check as examine
    from lipscope.models.load import load_named

    with waiting(f"loading {model}"):
        found = load_named(model, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    module = found.model
    if attn_implementation is not None:
        if not hasattr(module, "set_attn_implementation"):
            raise ValueError(f"{model} has no attention implementation to choose")
        cast(Any, module).set_attn_implementation(attn_implementation)
    if dtype is not None:
        import torch

        module = module.to(getattr(torch, dtype.value))
    lengths = None if documents is None else indices("documents", documents)
    side = None if padding is None else padding.value
    with waiting(f"checking {model}"):
        seen = examine(
            module,
            n=n,
            causal=causal or None,
            window=window,
            documents=lengths,
            padding=side,
            batch=batch,
            cache=cache,
            seed=seed,
        )
    if as_json:
        echo(json.dumps([row | {"model": found.name} for row in seen.to_rows()], indent=2), data=True)
    else:
        _print(found.name, seen)
    raise typer.Exit({True: 0, False: 1, None: 2}[seen.held])


def _print(name: str, seen: Isolation) -> None:
    rows = []
    for verdict in seen.verdicts:
        word = {True: "held", False: "BROKEN", None: "not tested"}[verdict.held]
        leak = verdict.leak
        size = "" if leak is None else f"{leak.size:.1e}"
        where = verdict.skipped if leak is None else f"{leak.where}, by {leak.instrument}"
        rows.append([verdict.claim, word, str(verdict.boundaries), size, where])
    names = ["claim", "", "boundaries", "largest leak", "where"]
    title = f"{name}, n = {seen.n}: {seen.forward_passes} forward and {seen.backward_passes} backward passes"
    why = "; ".join(f"{verdict.claim}: {verdict.why}" for verdict in seen.verdicts)
    print_table(names, rows, text=["claim", "", "where"], title=title, caption=f"Claimed by — {why}.")
    for verdict in seen.verdicts:
        if verdict.leak is not None and verdict.leak.picture:
            echo(f"{verdict.claim}: {verdict.leak.module}\n{verdict.leak.picture}")
