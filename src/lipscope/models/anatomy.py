"""Where the attention of a model is: found by watching one forward pass, not by knowing architectures.

A survey notes every module call and every call of the attention core. From it follow, per layer: the block, the module
whose call is replayed (``host``), the output projection W_O, whether a normalisation comes before attention, and where
the attention branch joins the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from lipscope.models.seam import CoreCall, observing_core
from lipscope.rounding import counted

TimedCore = tuple[int, CoreCall]  # a call of the attention core, after its place in time


@dataclass(frozen=True, eq=False)
class Cut:
    """A place inside a forward pass: the input or the output of a module."""

    module: nn.Module
    at: Literal["input", "output"]


@dataclass(frozen=True, eq=False, repr=False)
class Layer:
    """One attention layer of a model."""

    index: int  # number of its block as the model counts it; where blocks have none, position among the attention layers
    name: str  # name of the block inside the model
    block: nn.Module
    host: nn.Module  # the module whose call is replayed for the attention map; its tokens are what attention sees
    out: nn.Module  # the output projection W_O (for ``nn.MultiheadAttention`` that module itself)
    heads: int
    kv_heads: int | None  # number of key heads, or None when the model does not hand its keys over
    through_seam: bool  # False when the model keeps its own eager attention
    causal: bool  # the layer claims that no token sees its future
    mask: str  # the layer's mask in words
    normed: bool  # a normalisation comes between the block's input and attention
    stream: Cut  # where the residual stream leaves the attention sub-layer
    stream_adds_input: bool  # the block's input is still to be added at ``stream``
    batch_first: bool = True  # tokens are (B, n, d); otherwise (n, B, d)
    occurrence: int = 0  # which call of these modules it is, for models that use one layer several times
    # The normalisation whose output attention sees, of this block or of what comes before it, or None
    norm: nn.Module | None = None
    # Class of a module that is measured as a whole: no softmax attention, no W_O or no number of heads was seen in it
    mixer: str = ""
    cross: tuple[nn.Module, nn.Module] | None = None  # the cross-attention of a decoder's block, and its W_O

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        """The modules whose calls are recorded: host, block, W_O and, of a decoder, cross-attention."""
        return (self.host, self.block, self.out, *(self.cross or ())[:1])

    def __repr__(self) -> str:
        return f"<Layer {self.index}: {self.name}, {self.mixer or counted(self.heads, 'head')}, mask {self.mask}>"


@dataclass(eq=False)
class Event:
    """One module call of the survey, with its place in time."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: Tensor | None
    enter: int
    exit: int = -1
    output: Tensor | None = None

    @property
    def inputs(self) -> dict[Any, Tensor]:
        """Every tensor among its arguments, and in tuples, lists and tables of them, by its place; caches are none."""
        plain = (tuple, list, dict)
        parts, _ = tree_flatten_with_path((self.args, self.kwargs), is_leaf=lambda part: not isinstance(part, plain))
        return {place: part for place, part in parts if isinstance(part, Tensor)}

    def inside(self, other: Event) -> bool:
        """Whether the other call made this one, or is it."""
        return other.enter <= self.enter and self.exit <= other.exit


@dataclass(frozen=True, eq=False)
class Sighting:
    """A layer, and those calls of the survey that are its own."""

    layer: Layer
    host: Event
    block: Event
    out: Event
    cross: Event | None = None


def decoder_of(model: nn.Module) -> nn.Module | None:
    """The decoder of a model that is an encoder and a decoder, or None."""
    towers = [getattr(model, name, None) for name in ("encoder", "decoder")]
    both = all(isinstance(tower, nn.Module) for tower in towers) and getattr(model, "config", None) is not None
    return towers[1] if both else None


def find_layers(model: nn.Module, run: Callable[[], Any]) -> tuple[list[Sighting], Any]:
    """The attention layers of ``model`` in the order in which ``run()`` calls them, and what it returned.

    Of an encoder–decoder model these are the decoder's, with their cross-attention. Refuses a model without any.
    """
    decoder = decoder_of(model)
    for _ in range(2):  # twice where none was seen: BigBird puts its attention in place when it is first called
        tick = count(1).__next__
        cores: list[TimedCore] = []
        with observing_core(partial(_note, cores, tick)), watching(model.modules(), tick) as events, torch.no_grad():
            output = run()
        if decoder is not None:
            [whole] = [event for event in events if event.module is decoder]
            events = [event for event in events if event.inside(whole)]
            cores = [(time, call) for time, call in cores if whole.enter < time < whole.exit]
        if attentions := _attention_calls(events, cores):
            break
    names = {module: name for name, module in model.named_modules()}
    elements = {child for part in model.modules() if isinstance(part, nn.ModuleList) for child in part}
    if len({id(event) for event, _ in attentions}) < len(attentions):
        raise NotImplementedError("a module calls the attention core several times")
    # The self-tests give a decoder and its encoder different numbers of tokens.
    crossing = [pair for pair in attentions if decoder and pair[1] and pair[1][1].k.shape[-2] != pair[1][1].q.shape[-2]]
    attentions = [pair for pair in attentions if pair not in crossing]
    mixers = _mixers(events, attentions, [part for part in model.modules() if isinstance(part, nn.ModuleList)])
    attentions = sorted([*attentions, *((event, None) for event in mixers)], key=lambda pair: pair[0].enter)
    if not attentions:
        raise ValueError(
            f"{type(model).__name__} has no self-attention that could be found: no call went through the transformers "
            "attention interface, no submodule is an attention module with an output projection, and no block mixes tokens"
        )
    described = [
        _describe(i, event, core, events, attentions, names, elements, mixers) for i, (event, core) in enumerate(attentions)
    ]
    return _numbered([_with_cross(seen, crossing, events) for seen in described]), output


def _with_cross(seen: Sighting, crossing: list[tuple[Event, TimedCore | None]], events: list[Event]) -> Sighting:
    """The sighting with the cross-attention of its block, where it has one that holds its W_O."""
    for event, core in crossing:
        out = _output_projection(event, core, events)
        if event.inside(seen.block) and out is not None and out.inside(event):
            return replace(seen, layer=replace(seen.layer, cross=(event.module, out.module)), cross=event)
    return seen


def _note(cores: list[TimedCore], tick: Callable[[], int], call: CoreCall) -> None:
    cores.append((tick(), call))


def _numbered(found: list[Sighting]) -> list[Sighting]:
    """The layers with the numbers of their blocks in the model's list, where every one has a number of its own."""
    numbers = [next((int(part) for part in reversed(seen.layer.name.split(".")) if part.isdigit()), -1) for seen in found]
    if numbers[0] < 0 or numbers != sorted(set(numbers)):
        return found
    return [replace(seen, layer=replace(seen.layer, index=k)) for seen, k in zip(found, numbers, strict=True)]


@contextmanager
def watching(parts: Iterable[nn.Module], tick: Callable[[], int] | None = None) -> Iterator[list[Event]]:
    """Every call of these modules, in the order in which they begin."""
    events: list[Event] = []
    stack: list[Event] = []
    tick = tick or count(1).__next__

    def entering(module: nn.Module, args: Any, kwargs: Any) -> None:
        stack.append(Event(module, args, kwargs, tokens_of(args, kwargs), tick()))
        events.append(stack[-1])

    def leaving(module: nn.Module, args: Any, output: Any) -> None:
        event = stack.pop()
        event.exit, event.output = tick(), first_tensor(output)

    with ExitStack() as hooks:
        for part in parts:
            hooks.enter_context(part.register_forward_pre_hook(entering, with_kwargs=True))
            hooks.enter_context(part.register_forward_hook(leaving))
        yield events


def _attention_calls(events: list[Event], cores: list[TimedCore]) -> list[tuple[Event, TimedCore | None]]:
    """Self-attention calls: by the seam if it saw any, else torch's own module, else by name."""
    if cores:
        latest = events[::-1]
        around = (next(e for e in latest if e.module is call.module and e.enter < time < e.exit) for time, call in cores)
        return list(zip(around, cores, strict=True))
    torch_modules = [e for e in events if isinstance(e.module, nn.MultiheadAttention)]
    if torch_modules:
        return [(event, None) for event in torch_modules]
    return [
        (event, None)
        for event in events
        if _is_attention(event.module)
        and not any(_is_attention(part) for part in event.module.modules() if part is not event.module)
        and any(is_linear(part) for part in event.module.modules())
    ]


def _mixers(events: list[Event], attentions: list[tuple[Event, Any]], lists: list[nn.ModuleList]) -> list[Event]:
    """Of blocks beside those with attention, and of all where none has any, the first call that lets tokens meet."""
    beside = [each for each in lists if any(a.inside(e) for a, _ in attentions for e in events if e.module in set(each))]
    chosen = beside or sorted(lists, key=len)[-1:]
    found: list[Event] = []
    for block in (e for e in events if any(e.module in set(each) for each in chosen)):
        if any(a.inside(block) or block.inside(a) for a in [*(a for a, _ in attentions), *found]):
            continue
        inner = [e for e in events if e.inside(block) and e is not block]
        outermost = [e for e in inner if not any(e.inside(other) for other in inner if other is not e)]
        found += [e for e in outermost if _mixes(e)][:1]
    return found


def _mixes(event: Event) -> bool:
    """Whether the output at a token depends on another one, for a call from tokens (B, n, d) to as many."""
    tokens, output = event.tokens, event.output
    if tokens is None or output is None or tokens.ndim != 3 or tokens.shape[:2] != output.shape[:2] or tokens.shape[1] < 2:
        return False

    def other(value: Any) -> Any:
        return moved if value is tokens else None if "Cache" in type(value).__name__ else value

    moved, project = tokens.clone(), event.module
    moved[:, 0] += moved[:, 1]
    with torch.no_grad():
        changed = first_tensor(project(*map(other, event.args), **{name: other(v) for name, v in event.kwargs.items()}))
    return changed is not None and not _close(changed[:, 1:], output[:, 1:])


def _describe(
    index: int,
    event: Event,
    core: TimedCore | None,
    events: list[Event],
    attentions: list[tuple[Event, TimedCore | None]],
    names: dict[nn.Module, str],
    elements: set[nn.Module],
    mixers: list[Event],
) -> Sighting:
    heads = core[1].q.shape[1] if core else _head_count(event.module)
    projection = None if event in mixers or heads is None else _output_projection(event, core, events)
    out = projection or event
    host = min((e for e in events if event.inside(e) and out.inside(e)), key=lambda e: e.exit - e.enter)
    label = f"layer {index} ({type(event.module).__name__})"
    if not same(host.tokens, event.tokens) and same(out.tokens, event.output):
        host = event  # something smaller does not hold both, but W_O takes what the attention module gives
    if host.tokens is None or event.tokens is None or not same(host.tokens, event.tokens):
        raise ValueError(
            f"{label}: the output projection is outside the attention module, and nothing smaller than "
            f"{type(host.module).__name__} holds both, so the attention map cannot be separated from the block"
        )
    block = _block(host, events, [e for e, _ in attentions], elements)
    u = block.tokens if block.tokens is not None else host.tokens
    normed = not same(u, host.tokens)
    stream, adds_input = _stream(u, host.tokens, out, block, events, normed)
    kind = type(event.module).__name__
    mask, causal = (f"no softmax attention seen ({kind})", False) if event in mixers else _mask(event, core)
    layer = Layer(
        index=index,
        name=names.get(block.module, ""),
        block=block.module,
        host=host.module,
        out=out.module,
        heads=heads or 1 if projection else 1,
        kv_heads=core[1].k.shape[1] if core else None,
        through_seam=core is not None,
        causal=causal,
        mask=mask,
        normed=normed,
        stream=stream,
        stream_adds_input=adds_input,
        batch_first=bool(getattr(event.module, "batch_first", True)),
        occurrence=sum(earlier.module is event.module for earlier, _ in attentions[:index]),
        norm=_norm_before(host, events),
        mixer="" if projection else kind,
    )
    return Sighting(layer, host, block, out)


def _norm_before(host: Event, events: list[Event]) -> nn.Module | None:
    """The last normalisation whose output *is* attention's tokens.

    In a pre-norm block that is its own, in a post-norm block the one that closes the block before (or the embedding).
    """
    names = (e for e in events if "norm" in type(e.module).__name__.lower())
    found = [e for e in names if e.exit < host.enter and same(e.output, host.tokens)]
    return max(found, key=lambda e: e.exit).module if found else None


def _output_projection(event: Event, core: TimedCore | None, events: list[Event]) -> Event | None:
    """The last linear map inside the attention module, or the first one that takes the module's output.

    Where the core is not seen, the last one inside may belong to something else, as DeBERTa's of relative positions do.
    """
    if isinstance(event.module, nn.MultiheadAttention):
        return event
    start = core[0] if core else event.enter
    linear: list[Event] = []
    for e in events:
        # The parts of a composite linear map (a low-rank adapter, say) are not projections of their own.
        if is_linear(e.module) and not (linear and e.inside(linear[-1])):
            linear.append(e)
    within = [e for e in linear if e.enter > start and e.inside(event)]
    after = next((e for e in linear if e.enter > event.exit and same(e.tokens, event.output)), None)
    if within and (core or after is None or same(within[-1].output, event.output)):
        return within[-1]
    return after


def _block(host: Event, events: list[Event], attentions: list[Event], elements: set[nn.Module]) -> Event:
    """The outermost list element (else the outermost module) around ``host`` with this attention alone inside."""
    around = [e for e in events if host.inside(e) and sum(a.inside(e) for a in attentions) == 1]
    listed = [e for e in around if e.module in elements]
    return (listed or around)[0]


def _stream(u: Tensor, x: Tensor, out: Event, block: Event, events: list[Event], normed: bool) -> tuple[Cut, bool]:
    """Where the residual stream continues after attention.

    Follow the branch through dropout and a normalisation of its own (Gemma-2, OLMo-2) to the first module that takes
    something else: the stream itself, or, in a parallel block, the block's input again.
    """
    branch, cut = [out.output], Cut(out.module, "output")
    for event in events:
        if event.enter <= out.exit or not event.inside(block) or event.tokens is None:
            continue
        if any(same(event.tokens, tensor) for tensor in branch):
            branch.append(event.output)
            if any(True for _ in event.module.parameters()):
                cut = Cut(event.module, "output")
        elif same(event.tokens, u) or same(event.tokens, x):
            break
        else:
            post_norm = not normed and "norm" in type(event.module).__name__.lower()
            last = branch[-1]
            joined = last is not None and last.numel() == u.numel() and _close(event.tokens, u + last.reshape(u.shape))
            return Cut(event.module, "output" if post_norm and joined else "input"), False
    return cut, True


def _mask(event: Event, core: TimedCore | None) -> tuple[str, bool]:
    """The mask in words, and whether the layer claims to be causal."""
    claims = bool(getattr(event.module, "is_causal", False))
    if core is not None:
        allowed, window = core[1].rule.allowed, core[1].window
        causal = claims or _hides_future(allowed)
        kind = "causal" if causal else "full"
        return f"window:{window}" + ("" if causal else ":both") if window else kind, causal
    mask = mask_of(event.args, event.kwargs)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask > torch.finfo(torch.float32).min / 2
    elif mask is not None and mask.shape[-2] == mask.shape[-1] and not mask.diagonal(dim1=-2, dim2=-1).any():
        mask = ~mask  # no token sees itself, so True says what is hidden (MPT)
    causal = claims or _hides_future(mask)
    # Its own code may hide more than the mask it was given (GPT-Neo's local layers do).
    return ("causal" if causal else "full") + " (the model's own)", causal


def _hides_future(allowed: Tensor | None) -> bool:
    return allowed is not None and allowed.shape[-1] > 1 and not bool(allowed.triu(1).any())


def _head_count(module: nn.Module) -> int | None:
    """The number of heads, where it is written on the module."""
    names, owners = ("num_heads", "num_attention_heads", "n_heads", "n_head"), (module, getattr(module, "config", None))
    found = [count for name in names for owner in owners if isinstance(count := getattr(owner, name, None), int)]
    return found[0] if found else None


def _is_attention(module: nn.Module) -> bool:
    return "attention" in type(module).__name__.lower()


def is_linear(module: nn.Module) -> bool:
    """Whether the module is an affine map of its input: ``nn.Linear``, GPT-2's ``Conv1D``, their kin, and these adapted."""
    name, base = type(module).__name__, getattr(module, "base_layer", None)
    known = isinstance(module, nn.Linear) or name == "Conv1D" or name.endswith("Linear")
    return known or (isinstance(base, nn.Module) and is_linear(base))


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tokens among the arguments of a module call: ``hidden_states``, else the first floating tensor."""
    given = (kwargs.get("hidden_states"), *args, *kwargs.values())
    return next((value for value in given if isinstance(value, Tensor) and value.is_floating_point()), None)


def mask_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """A four-dimensional mask among the arguments of a module call."""
    named = [kwargs.get("attention_mask"), kwargs.get("mask")]
    square = [v for v in args if isinstance(v, Tensor) and v.ndim == 4 and v.shape[-1] == v.shape[-2]]
    return next((v for v in (*named, *square) if isinstance(v, Tensor) and v.ndim == 4), None)


def first_tensor(output: Any) -> Tensor | None:
    """The first tensor of a module's output: the output itself, or the head of a tuple."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    return first if isinstance(first, Tensor) else None


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal entry by entry, whatever the shape (some blocks flatten batch and tokens)."""
    return a is not None and b is not None and a.numel() == b.numel() and torch.equal(a.reshape(-1), b.reshape(-1))


def _close(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and torch.allclose(a.reshape(-1), b.reshape(-1), rtol=1e-4, atol=1e-6)
