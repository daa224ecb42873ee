"""Options and arguments of the commands, each written once: an option means the same in every command that has it.

A command takes a group of options (a frozen dataclass) as one parameter; ``lipscope.cli.main.as_command`` spreads it out for
the parser.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

FOR_A_MODEL, FOR_WEIGHTS, OUTPUT = "For a model", "For weights (a file, or random)", "Output"


Precision = StrEnum("Precision", ["float32", "float64"])


def option(help: str, *names: str, panel: str | None = None, default: bool | str = False, metavar: str | None = None) -> Any:
    """An option; its default is shown when ``default`` is True, or is described by it.

    A short ``metavar`` leaves room for long names: on 80 columns the parser would cut them.
    """
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=default, metavar=metavar)


def as_certificate(word: str) -> Any:
    """What ``certificate=`` takes in Python: a rung, or False for none."""
    from lipscope.measure.scopes import check_certificate

    try:
        return word != "none" and check_certificate(word)
    except ValueError:
        raise typer.BadParameter(f"{word!r} is not one of none, fast, tight, verified") from None


# What is measured.
Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|WEIGHTS|random",
        help="A model as for scan; a safetensors file with the weights of one layer as for measure; or random weights.",
        show_default=False,
    ),
]
ModelName = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A name from `lipscope models`, a directory, or a hub name.", show_default=False),
]
Tokens = Annotated[Path | None, option("safetensors file with one tensor of shape (n, d) or (B, n, d).", panel=FOR_WEIGHTS)]
Layer = Annotated[int | None, option("Which layer, 0 by default; negative ones count from the end.", panel=FOR_A_MODEL)]
Layers = Annotated[str, option("'all', or indices such as 0,6,-1.", default=True)]
Head = Annotated[int | None, option("One head, before W_O; the whole layer by default.")]
HeadChoice = Annotated[str | None, option("Which heads of the layers, I[,J]; all by default.")]
PerHead = Annotated[bool, option("Measure every head on its own (scope head).", "--per-head")]
Scope = Annotated[
    str | None,
    option("head, attention, norm+attention, attention+residual, block or model; cross-queries, cross-keys of a decoder."),
]
Radius = Annotated[
    float | None,
    option(
        "Largest norm R of a token. By default what the model's own normalisation allows, or else the largest norm among "
        "the tokens."
    ),
]

# What is read.
CORPUS = "A name from `lipscope corpora`, a file, or a directory."
Text = Annotated[str, option(CORPUS, default=True)]
TextOrNone = Annotated[str | None, option(f"{CORPUS[:-1]}; python-docs by default.")]
Say = Annotated[str | None, option("The words themselves, instead of a text.")]
N = Annotated[int, option("Number of tokens.", "--n", default=True)]
NOrNone = Annotated[int | None, option("Number of tokens taken from the text, 32 by default.", "--n")]
LENGTHS = "Numbers of tokens: 8,16,32 or 8:512:log or 8:64:8."
Lengths = Annotated[str, option(LENGTHS, default=True)]
LengthsOrNone = Annotated[str | None, option(f"{LENGTHS[:-1]}; 16:128:log by default, all of a clip or image.")]
Inputs = Annotated[int, option("Inputs per length, disjoint in the text.", default=True)]
BatchSize = Annotated[
    int | None,
    option("Inputs in one forward pass; as many as have 4,096 tokens by default. Rows depend on it in their last bits."),
]
Audio = Annotated[Path | None, option("Instead of a text: a WAV file, for a model that hears.")]
Image = Annotated[Path | None, option("Instead of a text: an image file, for a model that sees.")]
Features = Annotated[Path | None, option("Instead of a text: safetensors file with what the model's processor makes.")]
Pack = Annotated[bool, option("Fill each input with documents that do not see each other.", "--pack")]
Seed = Annotated[int, option("Seed of everything drawn: where in a text the inputs lie, and starts.", default=True)]

# How.
Rtol = Annotated[float, option("Relative accuracy of the estimates.", default=True)]
Dtype = Annotated[Precision | None, option("Compute in float32 or float64.", metavar="TYPE")]
Memory = Annotated[str | None, option("Most memory above the weights, such as 4GiB: re-plans or refuses, and says so.")]
Certificate = Annotated[
    Any,
    typer.Option(
        parser=as_certificate,
        metavar="none|fast|tight|verified",
        help="Also compute certified upper ends; fast ones by default, where they are cheap.",
        show_default=False,
    ),
]
Threads = Annotated[int | None, option("torch threads of every task, 1 by default.")]
Workers = Annotated[int | None, option("So many worker processes on this machine.")]
Scheduler = Annotated[str | None, option("An existing Dask cluster, tcp://host:8786.")]
RetryFailed = Annotated[bool, option("Also measure tasks that failed before.", "--retry-failed")]

Tokenizer = Annotated[
    str | None, option("Another tokenizer than the model's own: a directory or a name.", panel=FOR_A_MODEL)
]

Part = Annotated[str | None, option("'encoder' or 'decoder' of an encoder–decoder model.", panel=FOR_A_MODEL)]
Revision = Annotated[str | None, option("Branch, tag or commit of a hub model.", panel=FOR_A_MODEL)]
Device = Annotated[str | None, option("cpu, cuda, cuda:1, mps, or auto.", panel=FOR_A_MODEL)]

# What may run.
AllowPickle = Annotated[
    bool, option("Accept pickled weights, which can run code when opened.", "--allow-pickle", panel=FOR_A_MODEL)
]
TrustRemoteCode = Annotated[
    bool, option("Run the code that a model or its tokenizer brings.", "--trust-remote-code", panel=FOR_A_MODEL)
]

# What comes out.
Top = Annotated[int, option("Lines of the table.", panel=OUTPUT, default=True)]
AsJson = Annotated[bool, option("Print rows as JSON instead of a table.", "--json", panel=OUTPUT)]
AsCsv = Annotated[bool, option("Print rows as CSV instead of a table.", "--csv", panel=OUTPUT)]
AllPlans = Annotated[bool, option("Of a store: rows of every plan, not only of the last.", "--all")]
VIEWS = "How many of the worst layers or heads to look at token by token"
Quiet = Annotated[bool, option("Say nothing but the result and what went wrong.", "--quiet", panel=OUTPUT)]
Debug = Annotated[bool, option("Show the traceback when something goes wrong.", "--debug", panel=OUTPUT)]


class Group:
    """Options that belong together; its subclasses are frozen dataclasses."""

    def settings(self, group: type[Group] | None = None) -> dict[str, Any]:
        """The options by name: all, or those that come from one group."""
        return {f.name: getattr(self, f.name) for f in fields(group or self)}  # type: ignore[arg-type]

    def given(self, group: type[Group] | None = None) -> list[str]:
        """Those that differ from their defaults, as they are spelled."""
        changed = [f.name for f in fields(group or self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return [f"--{name.replace('_', '-')}" for name in changed]


@dataclass(frozen=True)
class Loading(Group):
    """How a model is loaded."""

    part: Part = None
    dtype: Annotated[Precision | None, option("Compute in float32 or float64.", panel=FOR_A_MODEL, metavar="TYPE")] = None
    tokenizer: Tokenizer = None
    allow_pickle: AllowPickle = False
    trust_remote_code: TrustRemoteCode = False
    revision: Revision = None
    attn_implementation: Annotated[
        str | None, option("The model's own attention that self-tests compare with: eager or sdpa.", panel=FOR_A_MODEL)
    ] = None
    device: Device = None


@dataclass(frozen=True)
class Weights(Group):
    """How the tensors of a weights file make a layer."""

    heads: Annotated[
        int | None, option("Number of query heads; else the file's metadata 'heads', else 1.", panel=FOR_WEIGHTS)
    ] = None
    kv_heads: Annotated[int | None, option("Number of key/value heads (grouped queries).", panel=FOR_WEIGHTS)] = None
    transposed: Annotated[
        bool, option("Weights are stored (in, out), as in GPT-2's Conv1D.", "--transposed", panel=FOR_WEIGHTS)
    ] = False
    mask: Annotated[
        str | None,
        option("full (the default), causal, window:W, prefix:P, packed:L1,L2, pad-left:K, …", panel=FOR_WEIGHTS),
    ] = None
    scale: Annotated[float | None, option("Score scale τ; 1/√dk by default.", panel=FOR_WEIGHTS)] = None
    softcap: Annotated[float | None, option("c in c·tanh(s/c).", panel=FOR_WEIGHTS)] = None


@dataclass(frozen=True)
class _Place(Group):
    layer: Layer = None


@dataclass(frozen=True)
class Target(Loading, Weights, _Place):
    """What belongs to a ``Source``: the options of a model, of a weights file, and of random weights."""

    width: Annotated[int | None, option("Token width d of random weights, 16 by default.", panel=FOR_WEIGHTS)] = None


def indices(name: str, text: str | None) -> list[int] | None:
    """``"0,6,-1"`` as numbers; ``"all"`` and None as None."""
    return None if text in (None, "all") else numbers(name, text, "'all' or indices such as 0,6")


def numbers(name: str, text: str, such: str) -> list[int]:
    """``"5,9,4"`` as numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{name} must be {such}, got {text!r}") from None


def as_dtype(precision: StrEnum | None) -> Any:
    """The torch dtype of a precision."""
    import torch

    return None if precision is None else getattr(torch, precision.value)
