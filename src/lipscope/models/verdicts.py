"""What ``check`` says: one verdict per claim, and of a broken one the leak and the module that lets it through."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from lipscope.rounding import Shown

SUBSTITUTION, WITHOUT_PADDING = "substitution", "comparison without padding"


@dataclass(frozen=True)
class Leak:
    """An output that depends on a token it must not see."""

    instrument: str  # derivative, substitution, or comparison with the same tokens alone or without a cache
    size: float  # relative to the derivative in tokens that may be seen, or to the largest output
    output: tuple[int, int]  # which sequence, which position
    token: tuple[int, int] | None  # the one it depends on; None where many were replaced at once
    module: str | None = None  # the first module that lets it through, by name and class
    layer: int | None = None  # its layer, as the model counts
    picture: str = ""  # what that module's outputs depend on, and the mask that it received

    @property
    def where(self) -> str:
        """The place in words."""
        place = f"output {self.output[1]}"
        if self.token is not None:
            same = self.token[0] == self.output[0]
            place += f" sees token {self.token[1]}" + ("" if same else f" of sequence {self.token[0]}")
        module = "" if self.module is None else f" in {self.module}"
        return place + module


@dataclass(frozen=True)
class Verdict:
    """What was found about one claim."""

    claim: str  # causal, window 4, documents, padding left, batch, cache
    why: str  # who claims it
    boundaries: int  # how many boundaries were tested
    leak: Leak | None  # the largest leak, or None
    remark: str = ""  # what limits the test, such as an instrument that could not look
    skipped: str = ""  # why it could not be tested, or nothing

    @property
    def held(self) -> bool | None:
        """Whether the claim was seen to hold; None where it could not be tested."""
        return None if self.skipped else self.leak is None

    @property
    def word(self) -> str:
        """That in words."""
        return {True: "held", False: "BROKEN", None: "not tested"}[self.held]


@dataclass(frozen=True, repr=False)
class Isolation(Shown):
    """The verdicts on a model.

    Attributes:
        name: the model.
        n: number of tokens of a sequence.
        verdicts: one per claim.
        forward_passes: how many passes it took, each of one or two sequences.
        backward_passes: and how many backward ones.
    """

    name: str
    n: int
    verdicts: tuple[Verdict, ...]
    forward_passes: int
    backward_passes: int

    @property
    def held(self) -> bool | None:
        """Whether every claim held; None when one could not be tested, or there was none."""
        found = [verdict.held for verdict in self.verdicts]
        return False if False in found else None if None in found or not found else True

    def to_rows(self) -> list[dict[str, Any]]:
        """One flat dictionary per claim."""
        blank = dict.fromkeys(part.name for part in fields(Leak))
        return [
            {"model": self.name, "n": self.n, "claim": v.claim, "why": v.why, "held": v.held, "boundaries": v.boundaries}
            | (blank if v.leak is None else vars(v.leak))
            | {"remark": v.remark or None, "skipped": v.skipped or None}
            for v in self.verdicts
        ]

    @property
    def title(self) -> str:
        """What was checked, and what it took."""
        return f"{self.name}, n = {self.n}: {self.forward_passes} forward and {self.backward_passes} backward passes"

    def __str__(self) -> str:
        lines = [self.title]
        for verdict in self.verdicts:
            lines.append(f"  {verdict.claim}: {verdict.word} ({verdict.why})")
            if verdict.skipped or verdict.remark:
                lines.append(f"    {verdict.skipped or verdict.remark}")
            if (leak := verdict.leak) is not None:
                lines.append(f"    {leak.where}: {leak.size:.1e} of the scale, seen by {leak.instrument}")
                lines += [f"    {line}" for line in leak.picture.splitlines()]
        return "\n".join(lines)
