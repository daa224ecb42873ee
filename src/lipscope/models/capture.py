"""Record each attention layer's call in one forward pass, and replay it on new tokens.

A call keeps everything the model handed over (masks, position embeddings, biases); the KV cache is dropped. Replaying the
host up to W_O gives the map of scope ``attention``, replaying the block gives the scopes around it.

A float64 model stays float64: model code "upcasts" to float32 in softmax, RMSNorm and rotary embeddings, which there rounds
every activation to seven digits. ``double_throughout()`` turns those casts into no-ops for float64 tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its customary name
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from lipscope.models.anatomy import Cut, Layer, Sighting, first_tensor, is_linear, tokens_of, watching
from lipscope.models.seam import CoreCall, observing_core, packed, using_seam
from lipscope.spectral.autodiff import differentiable_attention


@dataclass(frozen=True, eq=False)
class Call:
    """One recorded call of a module; ``tokens`` is the argument that a replay replaces."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: Tensor

    @classmethod
    def record(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Detach the arguments and forget the KV cache."""
        tokens = tokens_of(args, kwargs)
        if tokens is None:
            raise ValueError(f"{type(module).__name__} was called without a floating-point tensor of tokens")
        args, kwargs = tree_map(_keep, (args, kwargs))
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        return cls(module, args, kwargs, tokens.detach())

    def __call__(self, x: Tensor) -> Any:
        """Call the module again with tokens ``x`` in place of the recorded ones, wherever they appear."""
        args, kwargs = self.with_tokens(x)
        return self.module(*args, **kwargs)

    def with_tokens(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with ``x`` in place of the recorded tokens."""
        args = tuple(x if self._is_tokens(value) else value for value in self.args)
        return args, {name: x if self._is_tokens(value) else value for name, value in self.kwargs.items()}

    def repeated(self, times: int) -> Call:
        """The same call for a batch of ``times`` as many inputs: tensors whose first dimension is the batch are repeated."""
        batch = self.tokens.shape[0]

        def grown(value: Tensor) -> Tensor:
            if self._is_tokens(value):
                return tokens
            return value.repeat(times, *(1 for _ in value.shape[1:])) if value.ndim and len(value) == batch > 1 else value

        tokens = self.tokens.repeat(times, *(1 for _ in self.tokens.shape[1:]))
        args, kwargs = tree_map_only(Tensor, grown, (self.args, self.kwargs))
        return Call(self.module, args, kwargs, tokens)

    def in_keys(self) -> Call:
        """The same call of cross-attention, whose ``tokens`` are those that the keys and values are made of."""
        others = [v for v in (*self.args, *self.kwargs.values()) if isinstance(v, Tensor) and v.ndim == self.tokens.ndim]
        [keys] = [v for v in others if v.is_floating_point() and not self._is_tokens(v)]
        return replace(self, tokens=keys)

    def _is_tokens(self, value: Any) -> bool:
        # Self-attention in torch's own words is module(x, x, x): every argument that is this tensor moves with it.
        return isinstance(value, Tensor) and value.shape == self.tokens.shape and value.data_ptr() == self.tokens.data_ptr()


@dataclass(frozen=True, eq=False)
class Recording:
    """What one forward pass left behind."""

    hosts: dict[int, Call]  # the call of every layer's attention host, by layer index
    blocks: dict[int, Call]  # the call of every block
    outputs: dict[int, Tensor]  # the recorded output of every W_O, in the model's token layout
    last_hidden: Tensor  # the model's output
    real: Tensor | None  # True at real tokens, (B, n); None when nothing is padded
    run: Callable[[], Any]  # runs the model on these inputs again
    documents: tuple[int, ...] | None = None  # lengths of the documents packed into each input, or None
    crosses: dict[int, Call] = field(default_factory=dict)  # the call of every cross-attention of a decoder


def record(
    model: nn.Module,
    layers: list[Layer],
    run: Callable[[], Any],
    real: Tensor | None = None,
    documents: tuple[int, ...] | None = None,
) -> Recording:
    """Run the model once on the seam and record every layer's calls."""
    parts = dict.fromkeys(part for layer in layers for part in layer.parts)
    with replaying(model, documents), watching(parts) as events, torch.no_grad():
        output = run()
    calls = {part: [event for event in events if event.module is part] for part in parts}
    seen = [Sighting(layer, *(calls[part][layer.occurrence] for part in layer.parts)) for layer in layers]
    return replace(record_found(seen, output, run), real=real, documents=documents)


def record_found(found: list[Sighting], output: Any, run: Callable[[], Any]) -> Recording:
    """What a pass left behind in which the calls of every layer were seen."""
    hosts: dict[int, Call] = {}
    blocks: dict[int, Call] = {}
    outputs: dict[int, Tensor] = {}
    crosses: dict[int, Call] = {}
    for seen in found:
        for call, into in ((seen.host, hosts), (seen.block, blocks), (seen.cross, crosses)):
            if call is not None:
                into[seen.layer.index] = Call.record(call.module, call.args, call.kwargs)
        assert seen.out.output is not None
        outputs[seen.layer.index] = seen.out.output.detach()
        check_finite(seen.layer, outputs[seen.layer.index])
    return Recording(hosts, blocks, outputs, last_hidden_state(output), None, run, crosses=crosses)


@contextmanager
def replaying(model: nn.Module, documents: tuple[int, ...] | None = None, *, frozen: bool = True) -> Iterator[None]:
    """Everything a replay needs: the seam, frozen parameters, kernels with second derivatives, true float64.

    Inside itself, for the same model and documents, it does nothing: several replays in a row put it up once. Without
    ``frozen``, parameters stay in the graph. It changes the model and registries of transformers, so threads take turns.
    """
    with _TURN, nullcontext() if _replaying[-1:] == [(model, documents, frozen)] else _put_up(model, documents, frozen):
        yield


@contextmanager
def _put_up(model: nn.Module, documents: tuple[int, ...] | None, frozen: bool) -> Iterator[None]:
    parameters = [p for p in model.parameters() if p.requires_grad and frozen]
    for p in parameters:
        p.requires_grad_(False)
    _replaying.append((model, documents, frozen))
    try:
        with using_seam(model), packed(documents), differentiable_attention(), double_throughout(model_dtype(model)):
            yield
    finally:
        _replaying.pop()
        for p in parameters:
            p.requires_grad_(True)


_replaying: list[tuple[nn.Module, tuple[int, ...] | None, bool]] = []
_TURN = RLock()


class ReachedError(Exception):
    """Carries what was looked for out of a forward pass that need not go on."""

    def __init__(self, found: Any) -> None:
        super().__init__()
        self.found = found


def replay_until(call: Call, x: Tensor, cut: Cut) -> Tensor:
    """Replay ``call`` on tokens ``x`` and return the tensor at ``cut``; the rest of the pass is skipped."""

    def here(module: nn.Module, args: Any, rest: Any) -> None:
        tensor = tokens_of(args, rest) if at_input else first_tensor(rest)
        if tensor is not None:
            raise ReachedError(tensor)

    at_input, part = cut.at == "input", cut.module
    hook = part.register_forward_pre_hook(here, with_kwargs=True) if at_input else part.register_forward_hook(here)
    try:
        with hook:
            output = call(x)
            if part not in set(call.module.modules()):  # W_O that takes what the module gives
                part(first_tensor(output))
    except ReachedError as reached:
        tensor: Tensor = reached.found
        return tensor
    raise RuntimeError(f"the replay of {type(call.module).__name__} never reached {type(cut.module).__name__}")


# What a layer's tensors are called: input, weights, k, v or output, and a number that tells the weight matrices apart.
Place = tuple[str, int]


@contextmanager
def touching(layers: Sequence[Layer], touch: Callable[[int, Place, Tensor], Tensor]) -> Iterator[None]:
    """Hand input, weights, keys, values and output of every layer to ``touch``; the pass goes on with what it returns.

    ``touch`` gets the position in ``layers``, the place and the tensor.
    """
    calls: Counter[Any] = Counter()
    running: list[int] = []  # the layer that runs, unless it is none of these
    matrices: list[tuple[nn.Module, str, Any]] = []  # its own

    def layer_at(part: str, module: nn.Module) -> int | None:
        calls[part, module] += 1
        mine = (i for i, x in enumerate(layers) if getattr(x, part) is module and x.occurrence == calls[part, module] - 1)
        return next(mine, None)

    def entering(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer, tokens = layer_at("host", module), tokens_of(args, kwargs)
        if layer is None or tokens is None:
            return None
        running.append(layer)
        held = dict.fromkeys([*module.modules(), layers[layer].out])
        linear = [m for m in held if is_linear(m) or isinstance(m, nn.MultiheadAttention)]
        matrices.extend((m, name, w) for m in linear for name, w in m.named_parameters(recurse=False) if w.ndim == 2)
        # Those of a quantised layer are made when they are asked for, unless it holds some.
        matrices.extend((m, "weight", None) for m in linear if isinstance(getattr(type(m), "weight", None), property))
        for number, (m, name, w) in enumerate(matrices):
            m._parameters[name] = touch(layer, ("weights", number), getattr(m, name) if w is None else w)  # type: ignore[assignment]
        new = touch(layer, ("input", 0), tokens)
        # Self-attention in torch's own words is module(x, x, x).
        return tuple(new if v is tokens else v for v in args), {k: new if v is tokens else v for k, v in kwargs.items()}

    def restore() -> None:
        for m, name, w in matrices:
            m._parameters[name] = w
        matrices.clear()
        running.clear()

    def leaving(module: nn.Module, args: Any, output: Any) -> Any:
        restore()
        layer, found = layer_at("out", module), first_tensor(output)
        if layer is None or found is None:
            return None
        new = touch(layer, ("output", 0), found)
        return new if output is found else type(output)([new, *output[1:]])

    def at_core(call: CoreCall) -> CoreCall:
        if not running:
            return call
        return replace(call, k=touch(running[-1], ("k", 0), call.k), v=touch(running[-1], ("v", 0), call.v))

    with observing_core(at_core), ExitStack() as ending:
        ending.callback(restore)
        for host in {layer.host for layer in layers}:
            ending.enter_context(host.register_forward_pre_hook(entering, with_kwargs=True))
        for out in {layer.out for layer in layers}:
            ending.enter_context(out.register_forward_hook(leaving))
        yield


def last_hidden_state(output: Any) -> Tensor:
    """The last hidden state in a model's output."""
    tensor = getattr(output, "last_hidden_state", None)
    tensor = tensor if isinstance(tensor, Tensor) else first_tensor(output)
    if tensor is None:
        with suppress(KeyError, IndexError, TypeError):
            tensor = first_tensor((output[0],))
    if tensor is None:
        raise ValueError(f"the model returned {type(output).__name__} without a last hidden state")
    return tensor.detach() if not tensor.requires_grad else tensor


def model_dtype(model: nn.Module) -> torch.dtype:
    """Floating type of the model's parameters."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())


def model_device(model: nn.Module) -> torch.device:
    """Where the model computes; the parameters of a streamed one are elsewhere."""
    device: torch.device = getattr(model, "stream_device", None) or next(model.parameters()).device
    return device


class NotFiniteError(FloatingPointError):
    """A layer's activations are NaN or infinite."""

    def __init__(self, layer: Layer) -> None:
        super().__init__(
            f"layer {layer.index} ({layer.name}) produces NaN or infinite values on this input. The weights may be damaged "
            "or the dtype too narrow: try float64."
        )
        self.layer = layer.index


def check_finite(layer: Layer, output: Tensor) -> None:
    """Refuse NaN or infinite activations, naming the layer where they first appear."""
    if not bool(torch.isfinite(output).all()):
        raise NotFiniteError(layer)


def _keep(value: Any) -> Any:
    """Detach tensors; drop KV caches, which would make a replay see the recorded tokens as its past."""
    if isinstance(value, Tensor):
        return value.detach()
    return None if "Cache" in type(value).__name__ else value


class _KeepDouble(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func in _CASTS:
                args = tuple(torch.float64 if value is torch.float32 else value for value in args)
                if kwargs.get("dtype") is torch.float32:
                    kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


_CASTS = {Tensor.to, Tensor.type, Tensor.softmax, Tensor.log_softmax, F.softmax, F.log_softmax, torch.softmax, torch.mean}


def double_throughout(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Inside, casts of float64 tensors to float32 do nothing. Only active when ``dtype`` is float64."""
    return _KeepDouble() if dtype == torch.float64 else nullcontext()
