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
    """A boundary: tokens that must not be seen, outputs that must not see them, both (B, n)."""

    hidden: Tensor
    watched: Tensor


@dataclass
class Subject:
    """A model on one kind of input: runs it, with its tokens as a leaf, as often as needed."""

    model: nn.Module
    inputs: dict[str, Any]
    tokens: str  # the argument that holds them: ids (B, n), or floating (B, n, …)
    generator: torch.Generator
    forwards: int = 0
    backwards: int = 0
    kernel_noise: float = 0.0

    @property
    def shape(self) -> tuple[int, int]:
        """Sequences and positions."""
        given = self.inputs[self.tokens]
        return given.shape[0], given.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        found: torch.device = self.inputs[self.tokens].device
        return found

    @property
    def vocabulary(self) -> int:
        """Number of different ids."""
        return max(2, int(getattr(getattr(self.model, "config", None), "vocab_size", 0) or 0))

    def like(self, **inputs: Any) -> Subject:
        """The same model on other inputs; passes are counted together by whoever asks."""
        kept = {name: value for name, value in (self.inputs | inputs).items() if value is not None}
        return replace(self, inputs=kept, forwards=0, backwards=0)

    def run(self, tokens: Tensor | None = None) -> Tensor:
        """Outputs (B, n, …) in float64 or the model's type."""
        self.forwards += 1
        given = self.inputs if tokens is None else self.inputs | {self.tokens: tokens}
        return chosen_output(runner(self.model, given)())

    @contextmanager
    def leaf(self) -> Iterator[list[Tensor]]:
        """Passes inside have their embedded tokens in the list, as leaves of the graph."""
        leaves: list[Tensor] = []
        given = self.inputs[self.tokens]
        if given.is_floating_point():
            leaves.append(given.detach().clone().requires_grad_())
            before, self.inputs = self.inputs, self.inputs | {self.tokens: leaves[0]}
            try:
                with torch.enable_grad():
                    yield leaves
            finally:
                self.inputs = before
            return

        def embedded(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            asked = args[0] if args else None
            if isinstance(asked, Tensor) and asked.shape == given.shape and torch.equal(asked, given) and not leaves:
                leaves.append(output.detach().clone().requires_grad_())
                return leaves[0].clone()  # some models change it in place
            return None

        handles = [part.register_forward_hook(embedded) for part in self.model.modules() if isinstance(part, nn.Embedding)]
        try:
            with torch.enable_grad():
                yield leaves
        finally:
            for handle in handles:
                handle.remove()

    def substituted(self, hidden: Tensor) -> Tensor:
        """The tokens with others in the hidden places."""
        given = self.inputs[self.tokens]
        if given.is_floating_point():
            other = given.flip(1) * 0.5 + torch.randn(given.shape, generator=self.generator).to(given)
        else:
            step = torch.randint(1, self.vocabulary, given.shape, generator=self.generator).to(given.device)
            other = (given + step) % self.vocabulary
        return torch.where(hidden.reshape(*hidden.shape, *(1 for _ in given.shape[2:])), other, given)


def doubled(value: Any) -> Any:
    """An argument for one sequence, for two alike."""
    return torch.cat([value, value]) if isinstance(value, Tensor) and value.ndim and value.shape[0] == 1 else value


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
    worst: Leak | None = None
    with subject.leaf() as leaves, watching(subject.model.modules()) as events:
        output = subject.run()
        if not leaves:
            return None  # tokens do not go through an embedding: substitution alone speaks
        for cut in cuts:
            leak, at = derivative_leak(subject, output, leaves[0], cut)
            if leak is None or (worst is not None and leak.size <= worst.size):
                continue

            def depends(tensor: Tensor, at: Cut = at) -> bool:
                return _depends(subject, tensor, leaves[0], at)

            worst = described(subject, leak, culprit(events, depends), at)
    return worst


def derivative_leak(subject: Subject, output: Tensor, leaf: Tensor, cut: Cut) -> tuple[Leak | None, Cut]:
    """The largest derivative across a boundary, and the boundary narrowed to its token; None when it is zero."""
    gains = _gains(subject, output, leaf, cut.watched)
    if not bool(torch.isfinite(gains).all()):
        # Padded rows of some models are NaN, which no weight of zero takes out: substitution alone speaks.
        return None, cut
    inside = torch.where(cut.hidden, gains, 0.0)
    size = float(inside.max() / gains.max().clamp_min(torch.finfo(gains.dtype).tiny))
    if not size > torch.finfo(leaf.dtype).eps:
        return None, cut
    token = _place(inside)
    row = _bisect_output(subject, output, leaf, cut.watched, token)
    hidden = torch.zeros_like(cut.hidden)
    hidden[token] = True
    return Leak("derivative", size, row, token), Cut(hidden, cut.watched)


def _gains(subject: Subject, output: Tensor, leaf: Tensor, watched: Tensor) -> Tensor:
    """Largest entry, per token (B, n), of the derivative of a random weighting of the watched outputs."""
    weights = torch.randn(output.shape, generator=subject.generator).to(output)
    weights = weights * watched.reshape(*watched.shape, *(1 for _ in output.shape[watched.ndim :])).to(output)
    subject.backwards += 1
    (found,) = torch.autograd.grad(output, leaf, weights, retain_graph=True, allow_unused=True, materialize_grads=True)
    return found.abs().flatten(2).amax(-1)


def _depends(subject: Subject, tensor: Tensor, leaf: Tensor, cut: Cut) -> bool:
    """Whether the watched part of an inner tensor (B, n, …) has a derivative in the hidden tokens."""
    if not tensor.requires_grad or tensor.shape[:2] != leaf.shape[:2] or not tensor.is_floating_point():
        return False
    if tensor is leaf:
        return bool((cut.hidden & cut.watched).any())
    return bool((_gains(subject, tensor, leaf, cut.watched)[cut.hidden] > 0).any())


def _bisect_output(
    subject: Subject, output: Tensor, leaf: Tensor, watched: Tensor, token: tuple[int, int]
) -> tuple[int, int]:
    """One watched output that depends on a token."""
    rows = watched.nonzero()
    while len(rows) > 1:
        half = rows[: len(rows) // 2]
        part = torch.zeros_like(watched)
        part[tuple(half.T)] = True
        rows = half if float(_gains(subject, output, leaf, part)[token]) > 0 else rows[len(rows) // 2 :]
    return int(rows[0][0]), int(rows[0][1])


def seen_pass(subject: Subject, tokens: Tensor | None = None) -> tuple[Tensor, list[Event]]:
    """The outputs of one pass, and its module calls."""
    with torch.no_grad(), watching(subject.model.modules()) as events:
        return subject.run(tokens), events


def by_substitution(subject: Subject, cuts: Sequence[Cut], output: Tensor, before: list[Event]) -> Leak | None:
    """The largest change of a watched output of a pass when hidden tokens are replaced; None when rounding explains it."""
    worst: Leak | None = None
    for cut in cuts:
        changed, after = seen_pass(subject, subject.substituted(cut.hidden))
        leak = difference(subject, output, changed, cut.watched, "substitution")
        if leak is None or (worst is not None and leak.size <= worst.size):
            continue
        worst = located(subject, leak, before, after, cut, lambda tensor: tensor)
    return worst


def located(
    subject: Subject, leak: Leak, before: list[Event], after: list[Event], cut: Cut, pick: Callable[[Tensor], Tensor]
) -> Leak:
    """A leak seen by comparing two passes, with the first module that differs; ``pick`` takes what they have in common."""
    if len(before) != len(after):
        return leak
    pairs: dict[int, Any] = {}
    for old, new in zip(before, after, strict=True):
        pairs |= {id(old.tokens): (old.tokens, new.tokens), id(old.output): (old.output, new.output)}

    def differs(tensor: Tensor) -> bool:
        one, other = pairs[id(tensor)]
        if other is None or other.ndim < 2 or not other.is_floating_point():
            return False
        other = pick(other)
        if one.shape != other.shape or one.shape[:2] != cut.watched.shape:
            return False
        return difference(subject, one, other, cut.watched, "") is not None

    return described(subject, leak, culprit(before, differs), cut)


def difference(subject: Subject, one: Tensor, other: Tensor, watched: Tensor, instrument: str) -> Leak | None:
    """The largest relative difference of watched outputs, when rounding does not explain it."""
    apart = (one.double() - other.double()).abs().reshape(*watched.shape, -1).amax(-1)
    apart = torch.where(watched, apart, 0.0)
    refuse_non_finite(apart)
    scale = float(torch.where(watched, one.double().abs().reshape(*watched.shape, -1).amax(-1), 0.0).max())
    size = float(apart.max()) / scale if scale else 0.0
    if not size > max(_tolerance(one.dtype), 4 * subject.kernel_noise):
        return None
    return Leak(instrument, size, _place(apart), None)


def refuse_random(subject: Subject) -> None:
    """Refuse a model whose outputs differ from one pass to the next."""
    with torch.no_grad():
        once, twice = subject.run(), subject.run()
    refuse_non_finite(once)
    if not torch.equal(once, twice):
        reason = "dropout is on: call model.eval() first" if subject.model.training else "it draws random numbers as it runs"
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
        if tensor is None or tensor.ndim < 2:
            return False
        if id(tensor) not in known:
            known[id(tensor)] = depends(tensor)
        return known[id(tensor)]

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


def described(subject: Subject, leak: Leak, event: Event | None, cut: Cut) -> Leak:
    """The leak with the module that lets it through: its name and class, its layer, and what its outputs depend on."""
    if event is None:
        return leak
    place = next(name for name, module in subject.model.named_modules() if module is event.module)
    name = f"{place} ({type(event.module).__name__})" if place else type(event.module).__name__
    number = getattr(event.module, "layer_idx", None)
    inside = _NUMBER.search(place)
    layer = number if isinstance(number, int) else int(inside[1]) if inside else None
    return replace(leak, module=name, layer=layer, picture=_picture(subject, event, leak, cut))


_ROWS = 8


def _picture(subject: Subject, event: Event, leak: Leak, cut: Cut) -> str:
    """Which tokens a few outputs of one module depend on, measured, around the leak; and the mask that it received."""
    tokens = event.tokens
    if tokens is None or tokens.ndim != 3 or tokens.shape[:2] != cut.watched.shape:
        return ""
    batch, row = leak.output
    column = (leak.token or _place(cut.hidden.float()))[1]
    n = tokens.shape[1]
    shown = sorted({row, column, *(int(i) for i in torch.linspace(0, n - 1, min(n, _ROWS)).round())})
    try:
        call = Call.record(event.module, event.args, event.kwargs)
        leaf = tokens.detach().clone().requires_grad_()
        with torch.enable_grad():
            output = first_tensor(call(leaf))
    except Exception:  # a module that cannot be called again has no picture
        return ""
    if output is None or output.shape[:2] != leaf.shape[:2] or not output.requires_grad:
        return ""
    lines = [f"what it sees, one line per output ({', '.join(map(str, shown))}):"]
    for i in shown:
        only = torch.zeros_like(cut.watched)
        only[batch, i] = True
        seen = _gains(subject, output, leaf, only)[batch] > 0
        lines.append(f"{i:>5} " + " ".join("■" if bool(seen[j]) else "·" for j in shown))
    mask = next((v for k, v in event.kwargs.items() if "mask" in k and isinstance(v, Tensor)), None)
    lines.append(
        "it received no mask" if mask is None else f"it received a mask of shape {tuple(mask.shape)}, {str(mask.dtype)[6:]}"
    )
    return "\n".join(lines)
