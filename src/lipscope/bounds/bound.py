"""What a bound says: a number, where it holds, where it comes from, and what it was computed from.

A function becomes a bound of the registry by the decorator ``bound``, which says for which layers it holds:

    @bound("refined.masked", masks="causal", needs="radius, n")
    def refined_masked(layer, radius, n): ...

A layer has *features*, a bound allows a set of them; ``lipscope.bounds.registry`` evaluates bounds by name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from torch import Tensor

from lipscope.rounding import round_down, round_up

Kind: TypeAlias = Literal["set", "sup n", "local", "ball", "limit"]
Side: TypeAlias = Literal["upper", "lower"]

CASTIN = "Castin, Ablin, Peyré, How Smooth Is Attention?, ICML 2024"
OURS = "lipscope, docs/theory"


@dataclass(frozen=True, eq=False)
class Bound:
    """One bound for the Lipschitz constant of a map.

    Attributes:
        name: ``source.statement``, e.g. ``"refined.unmasked"``.
        value: the number.
        kind: ``"set"`` (all inputs with tokens in the ball of radius R), ``"local"`` (this very input), ``"ball"`` (all
            inputs within a Frobenius distance of this one), ``"limit"`` (about what σ(rX) tends to as r → ∞) or ``"sup n"``
            (a lower bound for the supremum over all n of such a set, which n tokens need not reach).
        holds_for: the assumptions in words.
        reference: who proved it.
        inputs: the quantities the formula was evaluated at.
        side: ``"upper"`` or ``"lower"``.
        norm: the norm on inputs and outputs; Frobenius unless said otherwise.
        tokens: for a lower bound, an input that attains it.
        exact: of a limit, whether σ tends to the value itself; otherwise the limit is at most that.
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
    exact: bool = False

    def to_row(self) -> dict[str, Any]:
        """A plain dictionary: numbers and strings only."""
        return {
            "name": self.name,
            "side": self.side,
            "kind": self.kind,
            "sign": self.sign,
            "value": self.value,
            "norm": self.norm,
            "holds_for": self.holds_for,
            "reference": self.reference,
            **{f"input_{name}": value for name, value in self.inputs.items()},
        }

    def shown(self, digits: int = 6) -> str:
        """The value rounded to the side on which it stays a bound; a limit that is reached to the nearest."""
        if self.exact:
            return f"{self.value:.{digits}g}"
        return round_up(self.value, digits) if self.side == "upper" else round_down(self.value, digits)

    @property
    def sign(self) -> str:
        """How σ, or its limit, relates to the value: ≤ or ≥ it, or → it where σ tends to the value."""
        return "≥" if self.side == "lower" else "→" if self.exact else "≤"

    def __str__(self) -> str:
        given = ", ".join(
            f"{name} = {value:.6g}" if isinstance(value, float) else f"{name} = {value}"
            for name, value in self.inputs.items()
        )
        return f"{self.name} ({self.kind}): σ {self.sign} {self.shown()}  [{given}] for {self.holds_for}; {self.reference}"


Found: TypeAlias = Bound | Sequence[Bound] | None
Evaluation = TypeVar("Evaluation", bound=Callable[..., Found])

# ``other``: windows, prefixes, padding, packing, tensors, combinations.
MASKS = ("full", "causal", "other")
FEATURES = ("query_bias", "additive", "softcap", "sinks", "rotary", "several_heads")
ARGUMENTS = ("x", "radius", "n")
# More than any machine reads; a closed form holds for any n below it without losing digits.
MOST_TOKENS = 10**15
# One head with plain dot-product scores.
PLAIN = ", ".join(FEATURES)


@dataclass(frozen=True, eq=False)
class Entry:
    """One line of the registry."""

    name: str
    # What computes it from a layer and the arguments it needs; under several names, all of their bounds
    function: Callable[..., Found]
    # Arguments without which it cannot be evaluated: ``x`` (tokens), ``radius`` (R), ``n`` (their number)
    needs: tuple[str, ...]
    takes: tuple[str, ...]  # those and the optional ones
    masks: frozenset[str]  # masks it holds for
    # What the layer may use besides plain dot-product scores; key and value biases are always allowed
    features: frozenset[str]
    required: frozenset[str]  # those of them that the layer must have
    side: Side
    # The kinds of attention it is about: ``"dot"`` (softmax of scaled dot products) or those of ``Variant``
    scores: tuple[str, ...]
    superseded: frozenset[str]  # masks for which a cheaper bound of the same source gives the same number
    longest: int  # most tokens it is evaluated for

    @property
    def source(self) -> str:
        """Where the bound comes from: its name up to the dot."""
        return self.name.partition(".")[0]

    def at(self, layer: Any, **given: Any) -> list[Bound]:
        """The bounds that the function finds for a layer, with what it takes of the given arguments."""
        if (given.get("n") or 0) > self.longest:
            return []
        found = self.function(layer, **{name: given[name] for name in self.takes if given.get(name) is not None})
        return [] if found is None else [found] if isinstance(found, Bound) else list(found)


# Every bound by name, in the order in which they are defined.
ENTRIES: dict[str, Entry] = {}


def bound(
    name: str,
    *,
    needs: str,
    masks: str = ", ".join(MASKS),
    without: str = "",
    only: str = "",
    side: Side = "upper",
    scores: str = "dot",
    superseded: str = "",
    longest: int = MOST_TOKENS,
) -> Callable[[Evaluation], Evaluation]:
    """Enter a function of a layer into the registry; lists are words separated by commas.

    Args:
        name: ``source.statement``.
        needs: arguments of the function besides the layer that must be given: of ``x``, ``radius`` and ``n``.
        masks: masks it holds for, of ``full``, ``causal`` and ``other``.
        without: features that a layer must not have.
        only: features that a layer must have.
        side: upper or lower.
        scores: ``dot``, or the kinds of ``Variant`` it is about, which have no feature but several heads.
        superseded: masks for which a cheaper bound of the same source gives the same number.
        longest: most tokens it is evaluated for, where that takes work with every pair of them.

    Returns:
        A decorator that leaves the function as it is. It may return one bound, several, or None where it says nothing.
    """
    allowed = (*FEATURES[-1:],) if scores != "dot" else FEATURES

    def register(function: Evaluation) -> Evaluation:
        if name in ENTRIES and ENTRIES[name].function.__module__ != function.__module__:
            raise ValueError(f"bound {name!r} is defined twice")
        parameters = inspect.signature(function).parameters
        ENTRIES[name] = Entry(
            name=name,
            function=function,
            needs=_words(needs, ARGUMENTS),
            takes=tuple(argument for argument in ARGUMENTS if argument in parameters),
            masks=frozenset(_words(masks, MASKS)),
            features=frozenset(allowed).difference(_words(without, FEATURES)),
            required=frozenset(_words(only, FEATURES)),
            side=side,
            scores=_words(scores),
            superseded=frozenset(_words(superseded, MASKS)),
            longest=longest,
        )
        return function

    return register


def refuse_others(name: str, layer: Any) -> None:
    """Refuse a layer that bound ``name`` does not hold for; called by bounds with arguments that the registry does not pass.

    Norms and matrices that stand for a layer pass: they say nothing of its mask and scores.
    """
    from lipscope.attention.layer import Attention
    from lipscope.bounds.registry import require

    if isinstance(layer, Attention):
        require(name, layer)


def norm_name(p: float) -> str:
    """The norm (Σ_i‖x_i‖^p)^{1/p} of tokens in words; refuses p below 1."""
    if not p >= 1:
        raise ValueError(f"p must be at least 1, got {p:g}")
    return "Frobenius" if p == 2 else f"(Σ_i‖x_i‖^{p:g})^(1/{p:g})"


def conjugate(p: float) -> float:
    """The p' with 1/p + 1/p' = 1, Hardy's constant: 2 for p = 2, infinite for p = 1."""
    return math.inf if p == 1 else 1 / (1 - 1 / p)


def _words(text: str, known: Sequence[str] | None = None) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    for word in words:
        if known is not None and word not in known:
            raise ValueError(f"{word!r} is none of {', '.join(known)}")
    return words
