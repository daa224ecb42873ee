"""Options and arguments that several commands share, so that they are called and explained the same everywhere."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Precision(StrEnum):
    """Floating type of the computation."""

    float32 = "float32"
    float64 = "float64"


# Attention layers given by their weights.
TOKENS = typer.Option(help="safetensors file with one tensor of shape (n, d) or (B, n, d).", show_default=False)
Heads = Annotated[int | None, typer.Option(help="Number of query heads; else the file's metadata 'heads', else 1.")]
KvHeads = Annotated[int | None, typer.Option(help="Number of key/value heads (grouped queries).")]
Transposed = Annotated[bool, typer.Option(help="Weights are stored (in, out), as in GPT-2's Conv1D.")]
MaskText = Annotated[
    str | None, typer.Option(help="full (the default), causal, window:W, prefix:P, packed:L1,L2, pad-left:K, …")
]
Scale = Annotated[float | None, typer.Option(help="Score scale τ; 1/√dk by default.")]
Softcap = Annotated[float | None, typer.Option(help="c in c·tanh(s/c).")]

# Models.
ModelName = Annotated[
    str, typer.Argument(help="A name from `lipscope models`, a directory, or a hub name.", show_default=False)
]
AllowPickle = Annotated[bool, typer.Option(help="Accept pickled weights, which can run code when opened.")]
TrustCode = Annotated[bool, typer.Option(help="Run model code from the hub.")]
Part = Annotated[str | None, typer.Option(help="'encoder' of an encoder–decoder model.")]

# Everything.
Memory = Annotated[
    str | None,
    typer.Option(help="Most memory above the weights, such as 4GiB: re-plans or refuses, and says so.", show_default=False),
]
Dtype = Annotated[Precision | None, typer.Option(help="Compute in this precision.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print rows as JSON instead of a table.")]
Debug = Annotated[bool, typer.Option(help="Show the traceback when something goes wrong.")]
