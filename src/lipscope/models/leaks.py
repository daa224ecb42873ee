"""The two instruments of ``check``, and the search for the module that lets a leak through.

**Derivatives.** A random weighting of the outputs that must not see is differentiated in the tokens that must not be seen:
exactly zero, or there is a path. **Substitution.** Those tokens are replaced and the outputs compared, because routing,
dropped tokens and quantised caches leak without a derivative.

A difference counts when rounding does not explain it. Kernels round differently when the shapes or the grouping of a product
change, as they do with the tokens of an expert, and a later layer or a router makes much of little. So what is larger than a
few units in the last place is looked at twice: a module that makes much where all before it is equal bit for bit lets it
through; anything else must be there in float64 too, where rounding is not.

The culprit is the innermost module whose output depends on what it must not see while nothing that it was given does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lipscope.models.anatomy import Event, first_tensor
from lipscope.models.capture import Call, double_throughout
from lipscope.models.seam import plain_experts
from lipscope.models.subject import CannotCheckError, Cut, NoDerivativeError, Seen, Subject, line
from lipscope.models.verdicts import SUBSTITUTION, WITHOUT_PADDING, Leak

# ── the instruments ──

_ROUNDING, _MAYBE = "by rounding: not in float64", "which may be rounding"


def by_derivative(subject: Subject, cuts: Sequence[Cut]) -> tuple[Leak | None, str]:
    """The largest derivative of a watched output in a hidden token, located, and a remark; None when all are exactly zero.

    What rounding may explain is rounding when float64 has none of its size.
    """
    output, leaves, events = subject.traced()
    worst, across, token = 0.0, cuts[0], None
    for cut in cuts:
        gains = _gains(subject, leaves, _watched(subject, cut, (output, events)))
        inside = torch.where(cut.hidden, gains, 0.0)
        size = float(inside.max() / gains.max().clamp_min(torch.finfo(gains.dtype).tiny))
        if size > worst:
            worst, across, token = size, cut, _place(inside)
    if token is None:
        return None, ""
    widest = leaves[0].dtype == torch.float64
    little = worst <= (1e-14 if widest else tolerance(leaves[0].dtype))
    if little and (widest or not _stays(subject, across, worst)):
        return None, f"derivatives of {worst:.1e} of the scale {_MAYBE if widest else _ROUNDING}"
    ends = [end for end in subject.ends(across, (output, events)) if end.shape[:2] == across.watched.shape]
    places = across.watched.nonzero()
    while len(places) > 1 and ends:
        half = torch.zeros_like(across.watched)
        half[tuple(places[: len(places) // 2].T)] = True
        inside_half = float(_gains(subject, leaves, [(end, half) for end in ends])[token]) > 0
        places = places[: len(places) // 2] if inside_half else places[len(places) // 2 :]

    @cache
    def depends(tensor: Tensor) -> bool:
        rows = across.rows(tensor) if tensor.requires_grad else None
        return rows is not None and float(_gains(subject, leaves, [(tensor, rows)])[token]) > 0

    leak = Leak("derivative", worst, (int(places[0][0]), int(places[0][1])), token)
    return described(subject, leak, culprit(events, lambda tensor, _: depends(tensor)), events, across), ""


def _watched(subject: Subject, cut: Cut, seen: Seen) -> list[tuple[Tensor, Tensor]]:
    """The ends of a pass with the rows of each that must not see."""
    return [(end, rows) for end in subject.ends(cut, seen) if (rows := cut.rows(end)) is not None]


def _stays(subject: Subject, cut: Cut, size: float) -> bool:
    """Whether a derivative keeps its size in float64, where rounding is at least 10⁸ times smaller."""
    try:
        with _in_float64(subject.model):
            output, leaves, events = subject.widened().traced()
            gains = _gains(subject, leaves, _watched(subject, cut, (output, events)))
            return float(torch.where(cut.hidden, gains, 0.0).max() / gains.max()) > size / 1024
    except Exception as error:  # whatever its code raises
        told = f"derivatives of {size:.1e} of the scale, {_MAYBE}, and float64 cannot tell: {line(error)}"
        raise CannotCheckError(told) from error


def _gains(subject: Subject, leaves: list[Tensor], ends: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Largest entry, per token (B, n), of the derivative of a random weighting of watched rows; refuses non-finite ones."""
    outputs, weights = list[Tensor](), list[Tensor]()
    for output, rows in ends:
        if output.requires_grad:
            drawn = torch.randn(output.shape, generator=subject.tally.generator).to(output)
            weights.append(drawn * rows.reshape(*rows.shape, *(1 for _ in output.shape[rows.ndim :])).to(output))
            outputs.append(output)
    if not outputs:
        raise NoDerivativeError("the outputs have no derivative")
    subject.tally.backwards += 1
    found = torch.autograd.grad(outputs, leaves, weights, retain_graph=True, allow_unused=True, materialize_grads=True)
    gains = torch.stack([part.abs().reshape(*part.shape[:2], -1).amax(-1) for part in found]).amax(0)
    if not bool(torch.isfinite(gains).all()):
        # Padded rows of some models are NaN, which no weight of zero takes out.
        raise NoDerivativeError("derivatives are not finite")
    return gains


def by_substitution(subject: Subject, cuts: Sequence[Cut]) -> tuple[Leak | None, str]:
    """The largest change of a watched output when hidden tokens are replaced, and a remark; None when it is rounding."""
    worst, remark = None, ""
    for cut in cuts:
        other = subject.like(**{subject.tokens: subject.substituted(cut.hidden)})
        leak, noted = agreed(subject, other, cut, SUBSTITUTION)
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
        told = f"{size}, {_MAYBE}, and float64 cannot tell: {line(error)}"
        if leak.size <= tolerance(subjects[0].seen[0].dtype):
            return None, told
        raise CannotCheckError(told) from error
    return wide, "" if wide is not None else f"{size} {_ROUNDING}"


@contextmanager
def _in_float64(model: nn.Module) -> Iterator[None]:
    """Inside, the numbers of a model are float64; afterwards they are what they were, bit for bit."""
    usual = torch.get_default_dtype()
    before = [(part, part.data) for part in (*model.parameters(), *model.buffers()) if part.is_floating_point()]
    try:
        for part, numbers in before:
            part.data = numbers.double()
        torch.set_default_dtype(torch.float64)  # of numbers that code makes without saying of which type
        with double_throughout(torch.float64), plain_experts(model):
            yield
    finally:
        torch.set_default_dtype(usual)
        for part, numbers in before:
            part.data = numbers


def compared(
    subject: Subject, one: Seen, other: Seen, cut: Cut, instrument: str, pick: Callable[[Tensor], Tensor]
) -> tuple[Leak | None, bool]:
    """A difference of watched outputs beyond a few units in the last place, with the first module that differs.

    Also whether that module makes much where all before it is equal bit for bit, as rounding does not.
    """
    (output, before), (_, after) = one, other
    same = len(before) == len(after)
    # By tensor, and by call and place: a module may hand on another's tensor in one pass, and its own in the other.
    pairs: dict[Any, tuple[Tensor | None, Tensor | None]] = {}
    for old, new in sorted(zip(before, after, strict=True), key=lambda pair: pair[0].exit) if same else ():
        given = new.inputs
        found = {place: (was, given.get(place)) for place, was in old.inputs.items()} | {None: (old.output, new.output)}
        pairs |= {id(pair[0]): pair for pair in found.values()} | {(old, place): pair for place, pair in found.items()}
    pairs[id(output)] = (output, other[0])

    def gap(key: Any) -> Leak | None:
        """How far the two passes are apart in one of their tensors; None where there is nothing to compare."""
        old, new = pairs.get(key, (None, None))
        rows = cut.rows(old)
        if rows is None or old is None or new is None or new.ndim < 2 or pick(new).shape != old.shape:
            return None
        if old is not output and not bool(torch.isfinite(old).all() & torch.isfinite(new).all()):
            return None  # a mask
        return Leak(instrument, *apart(old, pick(new), rows), None)

    @cache
    def steps(key: Any) -> float | None:
        """That over what rounding explains."""
        old, found = pairs.get(key, (None, None))[0], gap(key)
        return None if old is None or found is None else found.size / tolerance(old.dtype)

    # Where shapes are the same, half precision that differs at all is looked at in float64.
    least = 0 if instrument == SUBSTITUTION and tolerance(output.dtype) > 1e-3 else 1
    leak = next((gap(id(end)) for end in subject.ends(cut, one) if (steps(id(end)) or 0.0) > least), None)
    if leak is None or not same:
        return leak, False
    event = culprit(before, lambda _, key: (steps(key) or 0.0) > 1)
    # A call inside it that cannot be compared may be a router, which flips by rounding of its own.
    earlier = [(steps((call, None)), call) for call in before if call.exit < event.exit]
    equal = not any((size is None and call.inside(event)) or 0 < (size or 0) <= 1 for size, call in earlier)
    equal &= instrument != WITHOUT_PADDING  # rotations by position are others there, and outputs the same
    # Where shapes are the same, little is left to rounding.
    sudden = (steps((event, None)) or 0) > (1 if instrument == SUBSTITUTION else _SUDDEN)
    return described(subject, leak, event, before, cut), equal and sudden


def apart(one: Tensor, other: Tensor, watched: Tensor) -> tuple[float, tuple[int, int]]:
    """The largest difference of watched outputs relative to the largest of them, and its place."""
    # Equal numbers beyond a quarter of the largest float say "never", as a mask does, and have no part in the scale.
    never = (one == other) & (one.abs() > min(torch.finfo(one.dtype).max, torch.finfo(torch.float32).max) / 4)
    one, other = (value.masked_fill(never & value.isfinite(), 0) for value in (one, other))
    gap, scale = (
        torch.where(watched, value.double().abs().reshape(*watched.shape, -1).amax(-1), 0.0)
        for value in (one.double() - other.double(), one)
    )
    refuse_non_finite(gap)
    return float(gap.max()) / max(float(scale.max()), 1e-300), _place(gap)


def refuse_unsteady(subject: Subject, many: Subject) -> None:
    """Refuse a model that gives other outputs after a pass on other tokens, or the same ones whatever the tokens."""
    refuse_non_finite(subject.seen[0])
    rows = torch.ones(len(subject.seen[0]), 1, dtype=torch.bool, device=subject.seen[0].device)
    signal = True
    with suppress(Exception):  # what does not run on several sequences says so where it is tested
        output, count = many.seen[0], many.shape[0]
        all_of_them = Cut(~rows, rows.expand(count, 1), whole=True)
        subject.tally.mute = len(output) == count and bool((output == output[:1]).all())
        signal = not subject.tally.mute or any(bool((end != end[:1]).any()) for end in many.ends(all_of_them, many.seen))
    if not signal:
        raise CannotCheckError("the outputs are the same for other tokens, so no leak would be seen in them")
    # Some kernels add in any order.
    leak, _ = compared(subject, subject.seen, replace(subject).seen, Cut(~rows, rows, whole=True), "", Tensor.detach)
    if leak is None:
        return
    one, same, other = (_seeded(subject, seed) for seed in (0, 0, 1))
    reason = f"{leak.module} draws random numbers"
    training = [name or "the model" for name, part in subject.model.named_modules() if part.training]
    alike = [float((one - drawn).abs().max() / one.abs().max()) <= tolerance(one.dtype) for drawn in (same, other)]
    if alike != [True, False]:
        reason = f"{leak.module} keeps state between calls"
    elif training:
        more = f" and {len(training) - 1} more modules are" if len(training) > 1 else " is"
        reason = f"dropout is on, as {training[0]}{more} in training mode: call model.eval() first"
    raise CannotCheckError(f"the same input gives different outputs, so nothing can be compared: {reason}")


def _seeded(subject: Subject, seed: int) -> Tensor:
    """A pass with these random numbers; those of others go on as they were."""
    before = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(), torch.no_grad():
            for start in (random.seed, np.random.seed, torch.manual_seed):
                start(seed)
            return subject.run()
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def refuse_non_finite(values: Tensor) -> None:
    """Refuse outputs that cannot be compared."""
    if not bool(torch.isfinite(values).all()):
        raise CannotCheckError("the outputs hold NaN or infinite values, so nothing can be compared")


def tolerance(dtype: torch.dtype) -> float:
    """What rounding explains when shapes inside the pass change: 64 units in the last place, 8 in half precision."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)  # code of models often works in float32 inside
    return 64 * eps if eps < 1e-5 else 8 * eps


_SUDDEN = 4  # times that: no rounding inside one module


def _place(values: Tensor) -> tuple[int, int]:
    at = int(values.flatten().argmax())
    return at // values.shape[1], at % values.shape[1]


# ── who lets it through ──


def culprit(events: list[Event], depends: Callable[[Tensor, tuple[Event, Any]], bool]) -> Event:
    """The innermost call whose output (place None) depends on what it must not see while nothing that it was given does."""
    at = events[0]
    while True:
        made = ((event, event.output) for event in _made_by(at, events))
        first = next((event for event, output in made if output is not None and depends(output, (event, None))), None)
        if first is None or any(depends(given, (first, place)) for place, given in first.inputs.items()):
            return at
        at = first


def _made_by(outer: Event, events: list[Event]) -> Iterator[Event]:
    """The calls that one call made itself, one after the other; in place of one without a tensor, those that it made."""
    free = outer.enter
    for event in events:
        if free < event.enter < outer.exit and event.output is not None:
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
    if event.tokens is None or event.tokens.ndim != 3 or event.tokens.shape[:2] != cut.hidden.shape:
        return ""
    batch, row = leak.output
    column = (leak.token or _place(cut.hidden.float()))[1]
    n = cut.hidden.shape[1]
    shown = sorted({row, column, *(int(i) for i in torch.linspace(0, n - 1, min(n, _ROWS)).round())} & {*range(n)})
    try:
        again = Again(event)
        leaf = again.tokens.clone().requires_grad_()
        with torch.enable_grad():
            output = again(leaf)
        if output is None or output.shape[:2] != leaf.shape[:2]:
            return ""
        seen = []
        for i in shown:
            only = torch.zeros_like(cut.hidden)
            only[batch, i] = True
            seen.append(_gains(subject, [leaf], [(output, only)])[batch] > 0)
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


class Again(nn.Module):
    """A recorded call, as a module on its tokens: all tensors (B, n, …) that it was given, side by side."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.call = Call.record(event.module, event.args, event.kwargs)
        shape, dtype = self.call.tokens.shape[:2], self.call.tokens.dtype  # rotations by position may be of a wider type
        given = (part for part in event.inputs.values() if part.dtype == dtype and part.ndim > 2 and part.shape[:2] == shape)
        # Self-attention in torch's own words is module(x, x, x).
        self.parts = {(part.data_ptr(), part.shape): part.detach() for part in given}
        self.tokens = torch.cat([part.flatten(2) for part in self.parts.values()], -1)

    def forward(self, tokens: Tensor) -> Tensor | None:
        """The output."""
        pieces = tokens.split([part[0, 0].numel() for part in self.parts.values()], -1)
        new = {key: piece.reshape(key[1]) for key, piece in zip(self.parts, pieces, strict=True)}
        args, kwargs = tree_map_only(
            Tensor, lambda part: new.get((part.data_ptr(), part.shape), part), (self.call.args, self.call.kwargs)
        )
        return first_tensor(self.call.module(*args, **kwargs))


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
