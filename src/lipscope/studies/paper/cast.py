"""Who plays whom: the paper's models where they can be had, and what stands in for them where they cannot.

A stand-in keeps its own name everywhere. Random models are drawn here and always there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lipscope.models.load import ZOO, load_named
from lipscope.runs.plan import ModelChoice
from lipscope.studies.paper.causal_bert import LOADER, SUFFIX

BERT, GPT2 = "bert-base-uncased", "gpt2"
_STANDS_FOR_BERT = ("minilm-l6",)
_STANDS_FOR_GPT2 = ("smollm2-135m", "gpt2-mini")

Family = Literal["bert", "gpt2"]


@dataclass(frozen=True)
class Member:
    """One model of the run.

    Attributes:
        choice: how it is loaded.
        name: how rows call it.
        family: ``"bert"`` (read in both directions) or ``"gpt2"`` (causal by nature).
        weights: ``"random"`` or ``"pretrained"``.
        masked: a causal mask was put on a model of BERT's kind.
        stands_for: the paper's model that it replaces, or None when it is that model.
    """

    choice: ModelChoice
    name: str
    family: Family
    weights: Literal["random", "pretrained"]
    masked: bool = False
    stands_for: str | None = None

    @property
    def title(self) -> str:
        """For captions: what it is, and for whom it stands."""
        stand = f" for {self.stands_for}" if self.stands_for else ""
        return f"{self.name}{stand}"


@dataclass(frozen=True)
class Cast:
    """All models of a run.

    Attributes:
        members: the models, in the order of the figures.
        absent: sentences on models that could not be had and have no stand-in.
    """

    members: tuple[Member, ...]
    absent: tuple[str, ...] = ()

    def named(self, name: str) -> Member | None:
        """The member whose rows carry this name."""
        return next((member for member in self.members if member.name == name), None)


def find_cast(bert: str | None = None, gpt2: str | None = None) -> Cast:
    """The models of a run.

    Args:
        bert: a directory or hub name to use for the pretrained BERT; ``bert-base-uncased`` from the cache or the hub by
            default, and a stand-in where that cannot be had.
        gpt2: likewise for ``gpt2``.

    Raises:
        FileNotFoundError: when a model that was asked for by name cannot be had.
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
