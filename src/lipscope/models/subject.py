"""What ``check`` looks at: a model on one kind of input, run as its user runs it, and the boundaries that must hold."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.models.anatomy import Event, watching
from lipscope.models.inputs import position_limit, probe_inputs, runner, vocabulary


class CannotCheckError(ValueError):
    """There is nothing to compare; the message says why."""


class NoDerivativeError(CannotCheckError):
    """Derivatives cannot be taken, and substitution looks alone."""


Seen = tuple[Tensor, list[Event]]  # the outputs of one pass, and its module calls
Traced = tuple[Tensor, list[Tensor], list[Event]]  # its outputs, its embedded tokens as leaves, its module calls


@dataclass(frozen=True)
class Cut:
    """A boundary: tokens that must not be seen and outputs that must not see them, both (B, n).

    Where the two differ in shape, ``inside`` are the places beside the hidden tokens that must not see them either. When
    ``whole`` sequences are hidden and watched, that holds for tensors of any shape.
    """

    hidden: Tensor
    watched: Tensor
    inside: Tensor | None = None
    whole: bool = False

    def rows(self, tensor: Tensor | None) -> Tensor | None:
        """Which rows of a tensor inside the model must not depend on the hidden tokens; None where it has none."""
        if tensor is None or tensor.ndim < 2 or not tensor.is_floating_point():
            return None
        places = [rows for rows in (self.watched, self.inside) if rows is not None and rows.shape == tensor.shape[:2]]
        if not places and self.whole and len(tensor) == len(self.watched):
            return self.watched[:, :1].expand(tensor.shape[:2])
        return places[0] if places else None


@dataclass
class Tally:
    """What all subjects of one check share: random numbers, the passes that they took, and whether outputs are constant."""

    generator: torch.Generator
    forwards: int = 0
    backwards: int = 0
    mute: bool = False
    last: tuple[Subject, Traced] | None = None  # the last pass with derivatives


_TOKENS = ("decoder_input_ids", "tokens", "input_ids", "inputs_embeds", "input_features", "input_values", "pixel_values")


@dataclass
class Subject:
    """A model on one kind of input: runs it, with its tokens as a leaf, as often as needed."""

    model: nn.Module
    inputs: dict[str, Any]
    tokens: str  # the argument that holds them: ids (B, n), or floating (B, n, …)
    tally: Tally

    @classmethod
    def all_of(cls, model: nn.Module, n: int, inputs: dict[str, Any] | None, tally: Tally) -> list[Subject]:
        """One sequence of n tokens that is made up, or each of those given, where every tensor has a row for each."""
        config: Any = getattr(model, "config", None)
        if inputs is None:
            room = position_limit(model)
            if room is not None and n > room:
                raise CannotCheckError(f"n = {n} tokens are more than the {room} positions of the model")
            takes_ids = config is not None and getattr(model, "main_input_name", "input_ids") == "input_ids"
            try:
                if config is None and any(getattr(part, "batch_first", True) is False for part in model.modules()):
                    raise ValueError("tokens (n, B, d) of sequence-first layers are not read")
                inputs = {name: rows[:1] for name, rows in probe_inputs(model, max(n, 1) if takes_ids else None).items()}
            except (AttributeError, ValueError) as error:
                raise CannotCheckError(f"no inputs can be made up for {type(model).__name__}: {line(error)}") from error
            if accepts(model, "decoder_input_ids"):
                ids = torch.randint(0, vocabulary(model) or 2, (1, n), generator=tally.generator)
                # Of another length than the encoder's, so that the two are told apart where they share an embedding.
                short = {"input_ids": inputs["input_ids"][:, : max(n - 1, 1)]} if takes_ids else {}
                inputs = inputs | short | {"decoder_input_ids": ids.to(next(model.parameters()).device)}
        tokens = next((known for known in _TOKENS if known in inputs), None)
        if tokens is None:
            raise CannotCheckError(f"none of the inputs holds tokens: {', '.join(inputs)}")
        if _sequence_first(model):
            raise CannotCheckError("tokens (n, B, d) of sequence-first layers are not read: wrap them to take (B, n, d)")
        given = inputs[tokens]
        vectors = tokens == "inputs_embeds" or (
            tokens == "tokens" and isinstance(given, Tensor) and given.is_floating_point()
        )
        if not isinstance(given, Tensor) or given.ndim < 2 + vectors:
            raise CannotCheckError(f"{tokens} must be a tensor {'(B, n, d)' if vectors else '(B, n)'}, one row per sequence")
        for name, value in inputs.items():
            strange = name.startswith("cu_seq") or (name == "position_ids" and isinstance(value, Tensor) and value.ndim > 2)
            if isinstance(value, Tensor) and value.ndim and (strange or len(value) not in (1, len(given))):
                raise CannotCheckError(f"{name} {tuple(value.shape)} has no row per sequence: leave it out")
        if given.shape[1] < 2:
            raise CannotCheckError("a sequence needs at least two tokens, or there is nothing that must not be seen")
        every = torch.ones(given.shape[1], dtype=torch.bool, device=given.device)
        return [cls(model, inputs, tokens, tally).part(row, every) for row in range(len(given))]

    @property
    def named(self) -> list[str]:
        """The arguments that hold tokens, the decoder's first."""
        return [name for name in _TOKENS if name in self.inputs]

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences and positions."""
        given = self.inputs[self.tokens]
        return given.shape[0], given.shape[1]

    @property
    def places(self) -> Tensor:
        """The positions (1, n)."""
        return torch.arange(self.shape[1], device=self.inputs[self.tokens].device)[None]

    def like(self, **inputs: Any) -> Subject:
        """The same model on other inputs; None takes one away."""
        kept = {name: value for name, value in (self.inputs | inputs).items() if value is not None}
        return replace(self, inputs=kept)

    def part(self, row: int, mine: Tensor, **inputs: Any) -> Subject:
        """One sequence, with those of its tokens that are ``mine`` (n,)."""

        def taken(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.ndim:
                return value
            value = value[row : row + 1] if value.shape[0] > 1 else value
            for dim in range(1, value.ndim if "mask" in name else 2):
                if value.ndim > dim and value.shape[dim] == len(mine):
                    value = value.index_select(dim, mine.nonzero()[:, 0])
            return value

        return replace(self, inputs={name: taken(name, value) for name, value in self.inputs.items()}).like(**inputs)

    def run(self) -> Tensor:
        """Outputs (B, n, …)."""
        self.tally.forwards += 1
        return chosen_output(runner(self.model, self.inputs, use_cache=None)())

    @cached_property
    def seen(self) -> Seen:
        """A pass without derivatives."""
        with torch.no_grad(), watching(self.model.modules()) as events:
            return self.run(), events

    def ends(self, cut: Cut, seen: Seen) -> list[Tensor]:
        """Where a pass is watched: its outputs, or where these say nothing, the last tensors (B, n, d) before them."""
        output, (first, *events) = seen
        if not self.tally.mute and cut.rows(output) is not None:
            return [output]
        fit = [e for e in events if e.output is not None and e.output.ndim == 3 and cut.rows(e.output) is not None]
        last = max(fit, key=lambda event: event.exit, default=None)
        behind = () if last is None else (last.output, last.tokens)
        known = {id(given) for given in (output, *first.inputs.values())}
        return [e for e in behind if e is not None and e.ndim == 3 and cut.rows(e) is not None and id(e) not in known]

    def widened(self) -> Subject:
        """The same inputs in float64."""
        floating = {k: v for k, v in self.inputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
        return self.like(**{name: value.double() for name, value in floating.items()})

    def traced(self) -> Traced:
        """A pass with derivatives; the last one is kept."""
        if self.tally.last is None or self.tally.last[0] is not self:
            self.tally.last = None
            self.tally.last = self, self._traced()
        return self.tally.last[1]

    def _traced(self) -> Traced:
        leaves, given, subject = list[Tensor](), self.inputs[self.tokens], self

        def embedded(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            asked = args[0] if args else None
            if isinstance(asked, Tensor) and given.shape == asked.shape == output.shape[:2] and torch.equal(asked, given):
                leaves.append(output.detach().clone().requires_grad_())
                return leaves[-1].clone()  # some models change it in place
            return None

        with torch.enable_grad(), ExitStack() as hooks:
            if given.is_floating_point():
                leaves.append(given.detach().clone().requires_grad_())
                subject = self.like(**{self.tokens: leaves[0]})
            for table in (part for part in self.model.modules() if isinstance(part, nn.Embedding)):
                hooks.enter_context(table.register_forward_hook(embedded))
            events = hooks.enter_context(watching(self.model.modules()))
            output = subject.run()
        if not leaves:
            raise NoDerivativeError("the tokens go through no nn.Embedding")
        return output, leaves, events

    def substituted(self, hidden: Tensor) -> Tensor:
        """The tokens with others in the hidden places."""
        given = self.inputs[self.tokens]
        if given.is_floating_point():
            other = given.flip(1) * 0.5 + torch.randn(given.shape, generator=self.tally.generator).to(given)
        else:
            ids = max(2, vocabulary(self.model) or int(given.max()) + 1)
            other = (given + torch.randint(1, ids, given.shape, generator=self.tally.generator).to(given.device)) % ids
        return torch.where(hidden.reshape(*hidden.shape, *(1 for _ in given.shape[2:])), other, given)


def line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())[:200]


def chosen_output(output: Any) -> Tensor:
    """The logits, else the last hidden state, else the first tensor with places, else the first with sequences."""
    table = output if isinstance(output, dict) else {}
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := table.get(name, getattr(output, name, None)), Tensor):
            return found
    parts = [*table.values()] if table else output if isinstance(output, (tuple, list)) else [output]
    tensors = [part for part in parts if isinstance(part, Tensor) and part.ndim]
    if not tensors:
        raise CannotCheckError("the model returns no tensor, or single numbers alone")
    return next((part for part in tensors if part.ndim > 1), tensors[0])


def accepts(model: nn.Module, argument: str) -> bool:
    """Whether forward has an argument of this name; where it has *args and **kwargs alone, that of the model inside."""
    model = getattr(model, "_orig_mod", model)  # of a compiled one
    known = inspect.signature(model.forward).parameters
    if argument in known or any(one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in known.values()):
        return argument in known
    inside = [part for part in model.children() if hasattr(part, "config")]
    return accepts(inside[0], argument) if inside else True


def _sequence_first(model: nn.Module) -> bool:
    """Whether a module of torch's own takes tokens (n, B, d)."""
    own = type(model).__module__.startswith("torch.nn")
    return own and (getattr(model, "batch_first", True) is False or any(map(_sequence_first, model.children())))
