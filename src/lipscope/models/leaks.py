"""The two instruments of ``check``, and the search for the module that lets a leak through.

**Derivatives.** A random weighting of the outputs that must not see is differentiated in the tokens that must not be seen:
exactly zero, or there is a path. **Substitution.** Those tokens are replaced and the outputs compared, because routing,
dropped tokens and quantised caches leak without a derivative.

A difference counts when rounding does not explain it. Kernels round differently when the shapes or the grouping of a product
change, as they do with the tokens of an expert, and a later layer or a router makes much of little. So what is larger than a
few units in the last place is looked at twice: a module that makes much where all before it is equal bit for bit lets it
through; anything else must be there in float64 too, where rounding is not.

The culprit is the innermost module whose output depends on what it must not see while its input does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.models.anatomy import Event, first_tensor, watching
from lipscope.models.capture import Call, double_throughout
from lipscope.models.inputs import runner
from lipscope.models.seam import plain_experts
from lipscope.models.verdicts import Leak


class CannotCheckError(ValueError):
    """There is nothing to compare; the message says why."""


Seen = tuple[Tensor, list[Event]]  # the outputs of one pass, and its module calls


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
    """What all subjects of one check share: random numbers, and the passes that they took."""

    generator: torch.Generator
    forwards: int = 0
    backwards: int = 0


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

    def run(self) -> Tensor:
        """Outputs (B, n, …)."""
        self.tally.forwards += 1
        return chosen_output(runner(self.model, self.inputs)())

    @cached_property
    def seen(self) -> Seen:
        """A pass without derivatives."""
        with torch.no_grad(), watching(self.model.modules()) as events:
            return self.run(), events

    def widened(self) -> Subject:
        """The same inputs in float64."""
        floating = {k: v for k, v in self.inputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
        return self.like(**{name: value.double() for name, value in floating.items()})

    def traced(self) -> tuple[Tensor, Tensor, list[Event]]:
        """A pass with derivatives: its outputs, its embedded tokens as a leaf of the graph, and its module calls."""
        leaves, given, subject = list[Tensor](), self.inputs[self.tokens], self

        def embedded(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            asked = args[0] if args else None
            if isinstance(asked, Tensor) and asked.shape == given.shape and torch.equal(asked, given) and not leaves:
                leaves.append(output.detach().clone().requires_grad_())
                return leaves[0].clone()  # some models change it in place
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
            raise CannotCheckError("the tokens go through no nn.Embedding")
        return output, leaves[0], events

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
    output, leaf, events = subject.traced()
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
        return None
    places = across.watched.nonzero()
    while len(places) > 1:
        half = torch.zeros_like(across.watched)
        half[tuple(places[: len(places) // 2].T)] = True
        inside_half = float(_gains(subject, output, leaf, half)[token]) > 0
        places = places[: len(places) // 2] if inside_half else places[len(places) // 2 :]

    def depends(tensor: Tensor) -> bool:
        rows = across.rows(tensor) if tensor.requires_grad else None
        return rows is not None and float(_gains(subject, tensor, leaf, rows)[token]) > 0

    leak, event = Leak("derivative", worst, (int(places[0][0]), int(places[0][1])), token), culprit(events, depends)
    return leak if event is None else described(subject, leak, event, events, across)


def _gains(subject: Subject, output: Tensor, leaf: Tensor, watched: Tensor) -> Tensor:
    """Largest entry, per token (B, n), of the derivative of a random weighting of the watched outputs."""
    weights = torch.randn(output.shape, generator=subject.tally.generator).to(output)
    weights = weights * watched.reshape(*watched.shape, *(1 for _ in output.shape[watched.ndim :])).to(output)
    subject.tally.backwards += 1
    (found,) = torch.autograd.grad(output, leaf, weights, retain_graph=True, allow_unused=True, materialize_grads=True)
    return found.abs().reshape(*found.shape[:2], -1).amax(-1)


def by_substitution(subject: Subject, cuts: Sequence[Cut]) -> tuple[Leak | None, str]:
    """The largest change of a watched output when hidden tokens are replaced, and a remark; None when it is rounding."""
    worst, remark = None, ""
    for cut in cuts:
        other = subject.like(**{subject.tokens: subject.substituted(cut.hidden)})
        leak, noted = agreed(subject, other, cut, "substitution")
        worst = max((found for found in (worst, leak) if found is not None), key=lambda found: found.size, default=None)
        remark = remark or noted
    return worst, remark


def agreed(
    one: Subject, other: Subject, cut: Cut, instrument: str, pick: Callable[[Tensor], Tensor] = Tensor.detach
) -> tuple[Leak | None, str]:
    """Whether two inputs give the same outputs; ``pick`` takes from the second pass what both have in common."""
    return judged(lambda first, second: compared(first, first.seen, second.seen, cut, instrument, pick), one, other)


def judged(test: Callable[..., tuple[Leak | None, bool]], *subjects: Subject) -> tuple[Leak | None, str]:
    """The leak that a comparison of passes finds, or None with a remark when it is rounding: when float64 has none of it."""
    leak, sudden = test(*subjects)
    if leak is None or sudden:
        return leak, ""
    size = f"outputs differ by {leak.size:.1e} of the scale"
    try:
        with _in_float64(subjects[0].model):
            wide, _ = test(*(subject.widened() for subject in subjects))
    except Exception as error:  # whatever its code raises
        raise CannotCheckError(f"{size}, which may be rounding, and float64 cannot tell: {line(error)}") from error
    return wide, "" if wide is not None else f"{size} by rounding: not in float64"


@contextmanager
def _in_float64(model: nn.Module) -> Iterator[None]:
    """Inside, the numbers of a model are float64; afterwards they are what they were, bit for bit."""
    before = [(part, part.data) for part in (*model.parameters(), *model.buffers()) if part.is_floating_point()]
    try:
        for part, numbers in before:
            part.data = numbers.double()
        with double_throughout(torch.float64), plain_experts(model):
            yield
    finally:
        for part, numbers in before:
            part.data = numbers


def compared(
    subject: Subject, one: Seen, other: Seen, cut: Cut, instrument: str, pick: Callable[[Tensor], Tensor]
) -> tuple[Leak | None, bool]:
    """A difference of watched outputs beyond a few units in the last place, with the first module that differs.

    Also whether that module makes much where all before it is equal bit for bit, as rounding does not.
    """
    (output, before), (_, after) = one, other
    leak = difference(output, pick(other[0]), cut.watched, instrument)
    if leak is None or len(before) != len(after):
        return leak, False
    pairs: dict[int, tuple[Tensor | None, Tensor | None]] = {}
    for old, new in zip(before, after, strict=True):
        pairs |= {id(old.tokens): (old.tokens, new.tokens), id(old.output): (old.output, new.output)}

    def steps(tensor: Tensor | None) -> float | None:
        """The difference over what rounding explains; None where there is nothing to compare."""
        old, new = pairs[id(tensor)]
        rows = cut.rows(old)
        if rows is None or old is None or new is None or new.ndim < 2 or pick(new).shape != old.shape:
            return None
        return apart(old, pick(new), rows)[0] / _tolerance(old.dtype)

    event = culprit(before, lambda tensor: (steps(tensor) or 0.0) > 1)
    if event is None:
        return leak, False
    # A call inside it that cannot be compared may be a router, which flips by rounding of its own.
    earlier = [(steps(call.output), call) for call in before if call.exit < event.exit]
    equal = not any((size is None and call.inside(event)) or 0 < (size or 0) <= 1 for size, call in earlier)
    return described(subject, leak, event, before, cut), equal and (steps(event.output) or 0) > _SUDDEN


def difference(one: Tensor, other: Tensor, watched: Tensor, instrument: str) -> Leak | None:
    """The largest relative difference of watched outputs, when it is more than a few units in the last place."""
    size, place = apart(one, other, watched)
    return Leak(instrument, size, place, None) if size > _tolerance(one.dtype) else None


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
        whole = torch.ones(1, 1, dtype=torch.bool, device=once.device)
        if difference(once.reshape(1, 1, -1), twice.reshape(1, 1, -1), whole, "") is None:  # some kernels add in any order
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


_SUDDEN = 4  # times that: no rounding inside one module


def line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())[:200]


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
        first = next((event for event in _made_by(at, events) if leaks(event.output)), None)
        if first is None or leaks(first.tokens):
            break
        at = first
    return at


def _made_by(outer: Event, events: list[Event]) -> Iterator[Event]:
    """The calls that one call made itself, one after the other."""
    free = outer.enter
    for event in events:
        if free < event.enter < outer.exit:
            yield event
            free = event.exit


_ROWS = 8


def described(subject: Subject, leak: Leak, event: Event, events: list[Event], cut: Cut) -> Leak:
    """The leak with the module that lets it through: its name and class, its layer, and what its outputs depend on."""
    place = next(name for name, module in subject.model.named_modules() if module is event.module)
    name = f"{place} ({type(event.module).__name__})" if place else type(event.module).__name__
    calls = [other for other in events if other.module is event.module]
    name += f", call {calls.index(event) + 1} of {len(calls)}" if len(calls) > 1 else ""
    layer = getattr(event.module, "layer_idx", None)
    if not isinstance(layer, int):
        layer = next((int(part) for part in place.split(".") if part.isdigit()), None)
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
