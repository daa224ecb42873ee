"""The two instruments of ``check``, and the search for the module that lets a leak through.

**Derivatives.** A random weighting of the outputs that must not see is differentiated in the tokens that must not be seen:
exactly zero, or there is a path. **Substitution.** Those tokens are replaced and the outputs compared, because routing,
dropped tokens and quantised caches leak without a derivative. A difference counts when it is larger than what rounding and
the model's own repetition explain.

The culprit is the innermost module whose output depends on what it must not see while its input does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.models.anatomy import Event, first_tensor, watching
from lipscope.models.capture import Call
from lipscope.models.inputs import runner
from lipscope.models.verdicts import Leak


class CannotCheckError(ValueError):
    """There is nothing to compare; the message says why."""


@dataclass(frozen=True)
class Cut:
    """A boundary: tokens that must not be seen and outputs that must not see them, both (B, n).

    Where the two differ in shape, ``inside`` are the places beside the hidden tokens that must not see them either.
    """

    hidden: Tensor
    watched: Tensor
    inside: Tensor | None = None

    def rows(self, tensor: Tensor | None) -> Tensor | None:
        """Which rows of a tensor inside the model must not depend on the hidden tokens; None where it has none."""
        if tensor is None or tensor.ndim < 2 or not tensor.is_floating_point():
            return None
        places = (rows for rows in (self.watched, self.inside) if rows is not None)
        return next((rows for rows in places if rows.shape == tensor.shape[:2]), None)


@dataclass
class Tally:
    """What all subjects of one check share: the passes that they took, random numbers, and how much kernels round."""

    generator: torch.Generator
    forwards: int = 0
    backwards: int = 0
    kernel_noise: float = 0.0


@dataclass
class Subject:
    """A model on one kind of input: runs it, with its tokens as a leaf, as often as needed."""

    model: nn.Module
    inputs: dict[str, Any]
    tokens: str  # the argument that holds them: ids (B, n), or floating (B, n, …)
    tally: Tally

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

    def run(self, tokens: Tensor | None = None) -> Tensor:
        """Outputs (B, n, …)."""
        self.tally.forwards += 1
        given = self.inputs if tokens is None else self.inputs | {self.tokens: tokens}
        return chosen_output(runner(self.model, given)())

    def watched_run(self, tokens: Tensor | None = None) -> tuple[Tensor, list[Event]]:
        """The outputs of one pass without derivatives, and its module calls."""
        with torch.no_grad(), watching(self.model.modules()) as events:
            return self.run(tokens), events

    @cached_property
    def seen(self) -> tuple[Tensor, list[Event]]:
        """A pass on the tokens as they are."""
        return self.watched_run()

    @contextmanager
    def leaf(self) -> Iterator[list[Tensor]]:
        """Passes inside have their embedded tokens in the list, as leaves of the graph."""
        leaves: list[Tensor] = []
        given = self.inputs[self.tokens]

        def embedded(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            asked = args[0] if args else None
            if isinstance(asked, Tensor) and asked.shape == given.shape and torch.equal(asked, given) and not leaves:
                leaves.append(output.detach().clone().requires_grad_())
                return leaves[0].clone()  # some models change it in place
            return None

        before, handles = self.inputs, []
        if given.is_floating_point():
            leaves.append(given.detach().clone().requires_grad_())
            self.inputs = before | {self.tokens: leaves[0]}
        else:
            tables = (part for part in self.model.modules() if isinstance(part, nn.Embedding))
            handles = [part.register_forward_hook(embedded) for part in tables]
        try:
            with torch.enable_grad():
                yield leaves
        finally:
            self.inputs = before
            for handle in handles:
                handle.remove()

    def substituted(self, hidden: Tensor) -> Tensor:
        """The tokens with others in the hidden places."""
        given = self.inputs[self.tokens]
        if given.is_floating_point():
            other = given.flip(1) * 0.5 + torch.randn(given.shape, generator=self.tally.generator).to(given)
        else:
            ids = max(2, int(getattr(getattr(self.model, "config", None), "vocab_size", 0) or 0))
            other = (given + torch.randint(1, ids, given.shape, generator=self.tally.generator).to(given.device)) % ids
        return torch.where(hidden.reshape(*hidden.shape, *(1 for _ in given.shape[2:])), other, given)


def chosen_output(output: Any) -> Tensor:
    """The logits, else the last hidden state, else the first tensor."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := getattr(output, name, None), Tensor):
            return found
    found = first_tensor(output)
    if found is None:
        raise CannotCheckError("the model returns no tensor")
    return found


# ── the instruments ──


def by_derivative(subject: Subject, cuts: Sequence[Cut]) -> Leak | None:
    """The largest derivative of a watched output in a hidden token, located; None when all are exactly zero."""
    with subject.leaf() as leaves, watching(subject.model.modules()) as events:
        output = subject.run()
        if not leaves:
            raise CannotCheckError("the tokens go through no nn.Embedding")
        leak, cut = derivative_leak(subject, output, leaves[0], cuts)
        if leak is None:
            return None

        def depends(tensor: Tensor) -> bool:
            rows = cut.rows(tensor) if tensor.requires_grad else None
            return rows is not None and bool((_gains(subject, tensor, leaves[0], rows)[cut.hidden] > 0).any())

        return described(subject, leak, culprit(events, depends), events, cut)


def derivative_leak(subject: Subject, output: Tensor, leaf: Tensor, cuts: Sequence[Cut]) -> tuple[Leak | None, Cut]:
    """The largest derivative across these boundaries, and its boundary, narrowed to the token; None when all are zero."""
    worst, across, token = torch.finfo(leaf.dtype).eps, cuts[0], None
    for cut in cuts:
        gains = _gains(subject, output, leaf, cut.watched)
        if not bool(torch.isfinite(gains).all()):
            # Padded rows of some models are NaN, which no weight of zero takes out.
            raise CannotCheckError("derivatives are not finite")
        inside = torch.where(cut.hidden, gains, 0.0)
        size = float(inside.max() / gains.max().clamp_min(torch.finfo(gains.dtype).tiny))
        if size > worst:
            worst, across, token = size, cut, _place(inside)
    if token is None:
        return None, across
    rows = across.watched.nonzero()
    while len(rows) > 1:
        half = torch.zeros_like(across.watched)
        half[tuple(rows[: len(rows) // 2].T)] = True
        inside_half = float(_gains(subject, output, leaf, half)[token]) > 0
        rows = rows[: len(rows) // 2] if inside_half else rows[len(rows) // 2 :]
    hidden = torch.zeros_like(across.hidden)
    hidden[token] = True
    return Leak("derivative", worst, (int(rows[0][0]), int(rows[0][1])), token), replace(across, hidden=hidden)


def _gains(subject: Subject, output: Tensor, leaf: Tensor, watched: Tensor) -> Tensor:
    """Largest entry, per token (B, n), of the derivative of a random weighting of the watched outputs."""
    weights = torch.randn(output.shape, generator=subject.tally.generator).to(output)
    weights = weights * watched.reshape(*watched.shape, *(1 for _ in output.shape[watched.ndim :])).to(output)
    subject.tally.backwards += 1
    (found,) = torch.autograd.grad(output, leaf, weights, retain_graph=True, allow_unused=True, materialize_grads=True)
    return found.abs().reshape(*found.shape[:2], -1).amax(-1)


def by_substitution(subject: Subject, cuts: Sequence[Cut]) -> Leak | None:
    """The largest change of a watched output when hidden tokens are replaced; None when rounding explains it."""
    output, before = subject.seen
    worst: tuple[Leak, list[Event], Cut] | None = None
    for cut in cuts:
        changed, after = subject.watched_run(subject.substituted(cut.hidden))
        leak = difference(subject, output, changed, cut.watched, "substitution")
        if leak is not None and (worst is None or leak.size > worst[0].size):
            worst = leak, after, cut
    return worst and located(subject, worst[0], before, *worst[1:], lambda tensor: tensor)


def located(
    subject: Subject, leak: Leak, before: list[Event], after: list[Event], cut: Cut, pick: Callable[[Tensor], Tensor],
    slack: float = 1.0,
) -> Leak:  # fmt: skip
    """A leak seen by comparing two passes, with the first module that differs; ``pick`` takes what they have in common."""
    if len(before) != len(after):
        return leak
    pairs: dict[int, tuple[Tensor | None, Tensor | None]] = {}
    for old, new in zip(before, after, strict=True):
        pairs |= {id(old.tokens): (old.tokens, new.tokens), id(old.output): (old.output, new.output)}

    def differs(tensor: Tensor) -> bool:
        one, other = pairs[id(tensor)]
        rows = cut.rows(one)
        if rows is None or one is None or other is None or other.ndim < 2 or pick(other).shape != one.shape:
            return False
        return difference(subject, one, pick(other), rows, "", slack) is not None

    return described(subject, leak, culprit(before, differs), before, cut)


def difference(
    subject: Subject, one: Tensor, other: Tensor, watched: Tensor, instrument: str, slack: float = 1.0
) -> Leak | None:
    """The largest relative difference of watched outputs, when rounding does not explain it."""
    size, place = apart(one, other, watched)
    if not size > max(slack * _tolerance(one.dtype), 4 * subject.tally.kernel_noise):
        return None
    return Leak(instrument, size, place, None)


def apart(one: Tensor, other: Tensor, watched: Tensor) -> tuple[float, tuple[int, int]]:
    """The largest difference of watched outputs relative to the largest of them, and its place."""
    gap, scale = (
        torch.where(watched, value.double().abs().reshape(*watched.shape, -1).amax(-1), 0.0)
        for value in (one.double() - other.double(), one)
    )
    refuse_non_finite(gap)
    return float(gap.max()) / max(float(scale.max()), 1e-300), _place(gap)


def refuse_random(subject: Subject) -> None:
    """Refuse a model whose outputs differ from one pass to the next."""
    once = subject.seen[0]
    with torch.no_grad():
        twice = subject.run()
        refuse_non_finite(once)
        if torch.equal(once, twice):
            return
        state = torch.equal(twice, subject.run())
    training = [name or "the model" for name, part in subject.model.named_modules() if part.training]
    reason = "it draws random numbers as it runs"
    if state:
        reason = "it keeps something of the pass before"
    elif training:
        more = f" and {len(training) - 1} more modules are" if len(training) > 1 else " is"
        reason = f"dropout is on, as {training[0]}{more} in training mode: call model.eval() first"
    raise CannotCheckError(f"the same input gives different outputs, so nothing can be compared: {reason}")


def refuse_non_finite(values: Tensor) -> None:
    """Refuse outputs that cannot be compared."""
    if not bool(torch.isfinite(values).all()):
        raise CannotCheckError("the outputs hold NaN or infinite values, so nothing can be compared")


def _tolerance(dtype: torch.dtype) -> float:
    """What rounding explains when shapes inside the pass change: 64 units in the last place, 8 in half precision."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # code of models often works in float32 inside
    return 64 * eps if eps < 1e-5 else 8 * eps


def _place(values: Tensor) -> tuple[int, int]:
    at = int(values.flatten().argmax())
    return at // values.shape[1], at % values.shape[1]


# ── who lets it through ──


def culprit(events: list[Event], depends: Callable[[Tensor], bool]) -> Event | None:
    """The innermost call whose output depends on what it must not see while its input does not."""
    known: dict[int, bool] = {}

    def leaks(tensor: Tensor | None) -> bool:
        if tensor is not None and id(tensor) not in known:
            known[id(tensor)] = depends(tensor)
        return tensor is not None and known[id(tensor)]

    # The whole model, unless it wraps its output.
    at = next((event for event in events if leaks(event.output)), None)
    while at is not None:
        inside = _made_by(at, events)
        first = _first([event.output for event in inside], leaks)
        if first is None or leaks(inside[first].tokens):
            break
        at = inside[first]
    return at


def _made_by(outer: Event, events: list[Event]) -> list[Event]:
    """The calls that one call made itself, one after the other."""
    found, free = list[Event](), outer.enter
    for event in events:
        if free < event.enter < outer.exit:
            found.append(event)
            free = event.exit
    return found


def _first(outputs: list[Tensor | None], leaks: Callable[[Tensor | None], bool]) -> int | None:
    """The first of several outputs that leaks. Long lists are bisected: on a residual stream a leak stays."""
    low, high = 0, len(outputs) - 1
    while high - low > _ROWS:
        middle = (low + high) // 2
        low, high = (low, middle) if leaks(outputs[middle]) else (middle + 1, high)
    return next((k for k in (*range(low, high + 1), *range(len(outputs))) if leaks(outputs[k])), None)


_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_ROWS = 8


def described(subject: Subject, leak: Leak, event: Event | None, events: list[Event], cut: Cut) -> Leak:
    """The leak with the module that lets it through: its name and class, its layer, and what its outputs depend on."""
    if event is None:
        return leak
    place = next(name for name, module in subject.model.named_modules() if module is event.module)
    name = f"{place} ({type(event.module).__name__})" if place else type(event.module).__name__
    calls = [other for other in events if other.module is event.module]
    name += f", call {calls.index(event) + 1} of {len(calls)}" if len(calls) > 1 else ""
    number = getattr(event.module, "layer_idx", None)
    inside = _NUMBER.search(place)
    layer = number if isinstance(number, int) else int(inside[1]) if inside else None
    return replace(leak, module=name, layer=layer, picture=_picture(subject, event, leak, cut))


def _picture(subject: Subject, event: Event, leak: Leak, cut: Cut) -> str:
    """What a few outputs of one module depend on, measured, around the leak; beside it the mask that it received."""
    tokens = event.tokens
    if tokens is None or tokens.ndim != 3 or tokens.shape[:2] != cut.hidden.shape:
        return ""
    batch, row = leak.output
    column = (leak.token or _place(cut.hidden.float()))[1]
    n = tokens.shape[1]
    shown = sorted({row, column, *(int(i) for i in torch.linspace(0, n - 1, min(n, _ROWS)).round())} & {*range(n)})
    try:
        leaf = tokens.detach().clone().requires_grad_()
        with torch.enable_grad():
            output = first_tensor(Call.record(event.module, event.args, event.kwargs)(leaf))
        if output is None or output.shape[:2] != leaf.shape[:2]:
            return ""
        seen = []
        for i in shown:
            only = torch.zeros_like(cut.hidden)
            only[batch, i] = True
            seen.append(_gains(subject, output, leaf, only)[batch] > 0)
    except Exception:  # a module that cannot be called again, or has no derivative, has no picture
        return ""
    mask = _received(event, batch, n)
    lines = [f"what its outputs depend on{', and the mask that it received' if mask is not None else ''}"]
    lines.append(f"(outputs down, tokens across: {', '.join(map(str, shown))})")
    for i, depends in zip(shown, seen, strict=True):
        blocks = [depends] if mask is None else [depends, mask[i]]
        lines.append(f"{i:>5} " + "     ".join(" ".join("■" if bool(part[j]) else "·" for j in shown) for part in blocks))
    if mask is None:
        said = ", and says is_causal" if getattr(event.module, "is_causal", False) else ""
        lines.append(f"it received no mask{said}")
    return "\n".join(lines)


def _received(event: Event, batch: int, n: int) -> Tensor | None:
    """The mask among the arguments of a module call for one sequence, True where a token may be seen (n, n), or None."""
    named = [value for name, value in event.kwargs.items() if "mask" in name]
    square = [value for value in event.args if isinstance(value, Tensor) and value.ndim == 4]
    for value in (*named, *square):
        if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[-1] == n and value.shape[-2] in (1, n, len(value)):
            # Of an additive mask, what hides: the least number of a type, or −10,000.
            allowed = value > -1000 if value.is_floating_point() and bool((value <= 0).all()) else value.bool()
            if value.dtype == torch.bool and type(event.module).__module__.startswith("torch.nn"):
                allowed = ~value  # torch marks what is hidden
            one = allowed[min(batch, len(allowed) - 1)] if allowed.shape != (n, n) else allowed
            return one.reshape(-1, *one.shape[-2:])[0].expand(n, n) if one.ndim > 1 else one.expand(n, n)
    return None
