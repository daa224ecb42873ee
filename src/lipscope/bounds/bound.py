"""What a bound says: a number, where it holds, where it comes from, and what it was computed from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor

from lipscope.rounding import round_down, round_up

Kind: TypeAlias = Literal["set", "local", "ball", "limit"]
Side: TypeAlias = Literal["upper", "lower"]


@dataclass(frozen=True, eq=False)
class Bound:
    """One bound for the Lipschitz constant of a map.

    Attributes:
        name: ``source.statement``, e.g. ``"refined.unmasked"``.
        value: the number.
        kind: ``"set"`` (all inputs with tokens in the ball of radius R), ``"local"`` (this very input), ``"ball"`` (all
            inputs within a Frobenius distance of this one) or ``"limit"`` (the value σ(rX) tends to as r → ∞).
        holds_for: the assumptions in words.
        reference: who proved it.
        inputs: the quantities the formula was evaluated at.
        side: ``"upper"`` or ``"lower"``.
        norm: the norm on inputs and outputs; Frobenius unless said otherwise.
        tokens: for a lower bound, an input that attains it.
    """

    name: str
    value: float
    kind: Kind
    holds_for: str
    reference: str
    inputs: dict[str, Any] = field(default_factory=dict)
    side: Side = "upper"
    norm: str = "Frobenius"
    tokens: Tensor | None = None

    def to_row(self) -> dict[str, Any]:
        """A plain dictionary: numbers and strings only."""
        return {
            "name": self.name,
            "side": self.side,
            "kind": self.kind,
            "value": self.value,
            "norm": self.norm,
            "holds_for": self.holds_for,
            "reference": self.reference,
            **{f"input_{name}": value for name, value in self.inputs.items()},
        }

    def shown(self, digits: int = 6) -> str:
        """The value rounded to the side on which it stays a bound; a limit to the nearest."""
        if self.kind == "limit":
            return f"{self.value:.{digits}g}"
        return round_up(self.value, digits) if self.side == "upper" else round_down(self.value, digits)

    @property
    def sign(self) -> str:
        """How σ relates to the value: ≤ or ≥ it, or → it in a limit."""
        return "≥" if self.side == "lower" else "→" if self.kind == "limit" else "≤"

    def __str__(self) -> str:
        given = ", ".join(f"{name} = {value:.6g}" if isinstance(value, float) else f"{name} = {value}"
                          for name, value in self.inputs.items())  # fmt: skip
        return f"{self.name} ({self.kind}): σ {self.sign} {self.shown()}  [{given}] for {self.holds_for}; {self.reference}"


CASTIN = "Castin, Ablin, Peyré, How Smooth Is Attention?, ICML 2024"
OURS = "lipscope, docs/theory"
