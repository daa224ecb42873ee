"""Who plays whom: the paper's models where they can be had, and what stands in for them where they cannot.

A stand-in keeps its own name everywhere. Randomly initialised models are built locally and are always available. Models of
BERT's kind also appear under a causal mask: the same weights, and no token sees its future. The last functions say which
layers of a model an experiment looks at, and give their weights.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lipscope.attention.layer import Attention
from lipscope.models.checkpoints import Loaded, mark_drawn, not_in_checkpoint
from lipscope.models.load import ZOO, load_named
from lipscope.models.model import Model
from lipscope.runs.plan import ModelChoice

LOADER = "causal-bert"  # registered, so that plans may name it
SUFFIX = "-causal"
FIRST_AND_MIDDLE = "first and middle"

BERT, GPT2 = "bert-base-uncased", "gpt2"
_STANDS_FOR_BERT = ("minilm-l6",)
_STANDS_FOR_GPT2 = ("smollm2-135m", "gpt2-mini")

Family = Literal["bert", "gpt2"]


@dataclass(frozen=True)
class Member:
    """One model of the run."""

    choice: ModelChoice
    name: str  # how rows call it
    family: Family  # ``"bert"`` (read in both directions) or ``"gpt2"`` (causal by nature)
    weights: Literal["random", "pretrained"]  # ``"random"`` or ``"pretrained"``
    masked: bool = False  # a causal mask was put on a model of BERT's kind
    stands_for: str | None = None  # the paper's model that it replaces, or None when it is that model

    @property
    def title(self) -> str:
        """For captions: what it is, and for whom it stands."""
        stand = f" for {self.stands_for}" if self.stands_for else ""
        return f"{self.name}{stand}"


@dataclass(frozen=True)
class Cast:
    """All models of a run."""

    members: tuple[Member, ...]  # the models, in the order of the figures
    absent: tuple[str, ...] = ()  # sentences on models that could not be had and have no stand-in


def find_cast(bert: str | None = None, gpt2: str | None = None) -> Cast:
    """The models of a run.

    ``bert`` and ``gpt2`` are directories or hub names of the pretrained models, which must then be there; by default
    ``bert-base-uncased`` and ``gpt2`` from the cache or the hub, and stand-ins where they cannot be had.
    """
    members = [
        Member(ModelChoice("bert-random"), "bert-random", "bert", "random"),
        Member(ModelChoice("bert-random", loader=LOADER), "bert-random" + SUFFIX, "bert", "random", masked=True),
        Member(ModelChoice("gpt2-random"), "gpt2-random", "gpt2", "random"),
    ]
    absent = []
    for asked, wanted, stand_ins, family in ((bert, BERT, _STANDS_FOR_BERT, "bert"), (gpt2, GPT2, _STANDS_FOR_GPT2, "gpt2")):
        found = _pretrained(asked, wanted, stand_ins)
        if not found:
            absent.append(f"{wanted} is not on this machine, and nothing that could stand in for it is installed")
        for name, label, stands_for in found:
            members.append(Member(ModelChoice(name), label, family, "pretrained", stands_for=stands_for))  # type: ignore[arg-type]
            if family == "bert":
                members.append(
                    Member(ModelChoice(name, loader=LOADER), label + SUFFIX, "bert", "pretrained", True, stands_for)
                )
    return Cast(tuple(members), tuple(absent))


def _pretrained(asked: str | None, wanted: str, stand_ins: tuple[str, ...]) -> list[tuple[str, str, str | None]]:
    """(what to load, its name in rows, whom it stands for)."""
    if asked is not None:
        return [(asked, load_named(asked).name, None)]
    try:
        return [(wanted, load_named(wanted).name, None)]
    except (FileNotFoundError, ValueError, OSError):
        there = [name for name in stand_ins if name in ZOO and ZOO[name].missing is None]
        return [(name, name, wanted) for name in there]


def causal_bert(name: str, dtype: torch.dtype | None = None) -> Model:
    """A model of BERT's kind under a causal mask, what ``transformers`` calls a BERT decoder.

    Loading runs the self-tests, one of which asks that nothing leaks from later tokens, exactly.
    """
    found = masked(load_named(name))
    return Model(found.model, found.tokenizer, name=found.name, notes=found.notes, dtype=dtype)


def masked(found: Loaded) -> Loaded:
    """The same weights in a model that masks the future."""
    config: Any = getattr(found.model, "config", None)
    if getattr(config, "is_decoder", None) is not False:
        raise ValueError(f"{found.name} is no bidirectional model of BERT's kind, so it has no causal form")
    from transformers.initialization import no_init_weights

    causal = copy.deepcopy(config)
    causal.is_decoder = True
    # No weights are drawn: they would be replaced at once. What draws all the same leaves the generator as it was.
    with torch.random.fork_rng(devices=[]), no_init_weights():
        # In the dtype of the weights before they are copied: half of their digits would be lost otherwise.
        model = type(found.model)(causal).to(next(found.model.parameters()).dtype)
    model.load_state_dict(found.model.state_dict())
    mark_drawn(model, not_in_checkpoint(found.model))
    notes = (*found.notes, "a causal mask that the model was not trained with")
    return Loaded(model.eval(), found.tokenizer, found.name + SUFFIX, notes)


def chosen_layers(count: int, which: str | int) -> tuple[int, ...]:
    """Layer indices: the paper's layers 0 and 6 of 12 are the first and the middle one; or so many evenly spread ones.

    Example:
        >>> chosen_layers(12, FIRST_AND_MIDDLE), chosen_layers(6, FIRST_AND_MIDDLE), chosen_layers(30, 4)
        ((0, 6), (0, 3), (0, 10, 19, 29))
    """
    if which == FIRST_AND_MIDDLE:
        return tuple(dict.fromkeys((0, count // 2)))
    wanted = min(int(which), count)
    return tuple(dict.fromkeys(round(i * (count - 1) / max(1, wanted - 1)) for i in range(wanted)))


def weights_of(handle: Model, layer: int) -> Attention | None:
    """The layer as an ``Attention`` for any number of tokens; None when its weights alone do not make it one.

    One object for all lengths: the norms of weights that bounds compute are kept with the object that holds the weights.
    """
    return handle.probe_recording[layer].at_any_length
