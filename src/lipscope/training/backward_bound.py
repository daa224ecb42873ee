"""A lower bound of σ that costs nothing: the backward pass of training multiplies by Jᵀ anyway.

With x the tokens that attention sees, y its output after W_O and g = dL/dy, the part of dL/dx that comes through attention
is Jᵀg, hence

    ‖Jᵀg‖ / ‖g‖ ≤ σ          (whole tensors: all tokens of one input; the largest over the inputs of the batch)

J is block-diagonal over the batch, so every input gives a bound of its own. The ratio of a single token, ‖(Jᵀg)_i‖/‖g_i‖,
is **not** a bound: other tokens send their gradient to i as well. What comes through attention alone is read at the query,
key and value projections, whose inputs get a view of x each. The order in which gradients are added up stays the same, so
training does too, to the last bit. With dropout the bound is for the map as this step ran it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from lipscope.models.anatomy import Cut, Layer, first_tensor, is_linear, tokens_of, watching
from lipscope.models.capture import Recording, model_dtype, replay_until, replaying
from lipscope.models.inputs import probe_inputs
from lipscope.models.model import Model
from lipscope.training.attach import OwnHook


@dataclass(eq=False)
class _Passage:
    """One forward pass through a layer: what its backward pass has brought so far."""

    entries: int = 0
    arrived: int = 0
    gx: Tensor | None = None
    gy: Tensor | None = None


_LIVE: WeakSet[LayerGain] = WeakSet()


class LayerGain:
    """Watches one layer: hooks on its projections and on W_O, and the largest gain since it was last asked.

    A call of ``host`` begins a passage, the modules ``entries`` take x, ``out`` gives y. An error inside a hook goes to
    ``failed``: it must not reach the backward pass of training. ``then``, if given, gets dL/dx and dL/dy of every passage.
    """

    def __init__(
        self,
        layer: Layer,
        entries: Sequence[nn.Module],
        failed: Callable[[Exception], None],
        then: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        self.index, self.batch_dim, self.entries = layer.index, 0 if layer.batch_first else 1, len(entries)
        self.failed, self._then = failed, then or self._keep_largest
        self.watching = True
        _LIVE.add(self)
        self._passage: _Passage | None = None
        self._largest: Tensor | None = None
        self._hooks = [
            layer.host.register_forward_pre_hook(OwnHook(layer.host, self._begin)),
            *(entry.register_forward_pre_hook(OwnHook(entry, self._enter), with_kwargs=True) for entry in entries),
            layer.out.register_forward_hook(OwnHook(layer.out, self._leave)),
        ]

    def _begin(self, args: Any) -> None:
        if self.watching:
            self._passage = _Passage()

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        x, passage = tokens_of(args, kwargs), self._passage
        if not self.watching or passage is None or x is None or not (torch.is_grad_enabled() and x.requires_grad):
            return None
        view = x.view_as(x)
        passage.entries += 1
        view.register_hook(lambda g: self._take(passage, g))
        replaced = tuple(view if value is x else value for value in args)
        return replaced, {name: view if value is x else value for name, value in kwargs.items()}

    def _leave(self, args: Any, output: Any) -> None:
        y, passage = first_tensor(output), self._passage
        if not self.watching:
            return
        self._passage = None
        if y is not None and passage is not None and passage.entries == self.entries and y.requires_grad:
            y.register_hook(lambda g: self._open(passage, g))

    def _open(self, passage: _Passage, g: Tensor) -> None:
        """The gradient at y comes before those at the projections."""
        if not self.watching:
            return
        try:
            passage.gy, passage.gx, passage.arrived = g.detach(), None, 0
        except Exception as error:
            # Gradients of many outputs at once (is_grads_batched) are no tensors that can be kept.
            self.failed(error)

    def _take(self, passage: _Passage, g: Tensor) -> None:
        if passage.gy is None or not self.watching:
            return
        try:
            passage.gx = g.detach() if passage.gx is None else passage.gx + g.detach()
            passage.arrived += 1
            if passage.arrived == passage.entries:
                self._then(passage.gx, passage.gy)
                passage.gx = passage.gy = None
        except Exception as error:
            self.failed(error)

    def _keep_largest(self, gx: Tensor, gy: Tensor) -> None:
        gain = largest_gain(gx, gy, self.batch_dim)
        self._largest = gain if self._largest is None else torch.maximum(self._largest, gain)

    def collect(self) -> Tensor | None:
        """The largest gain since the last call; None when no gradient came through."""
        gain, self._largest = self._largest, None
        return gain

    def remove(self) -> None:
        """Take the hooks off the model."""
        self.watching = False
        for hook in self._hooks:
            hook.remove()


def largest_gain(gx: Tensor, gy: Tensor, batch_dim: int = 0) -> Tensor:
    """The largest ‖gx_b‖/‖gy_b‖ over the inputs b, each with all its tokens; 0 where no gradient comes.

    Example:
        >>> gy = torch.tensor([[[3.0, 4.0]], [[0.0, 1.0]]])
        >>> float(largest_gain(torch.full_like(gy, 1.0), gy))
        1.4142135623730951
    """
    # The squares of small gradients vanish in float32; Metal has nothing wider.
    wide = torch.float32 if gx.device.type == "mps" else torch.float64
    if gx.ndim == gy.ndim == 3 and gx.shape[batch_dim] == gy.shape[batch_dim]:
        dims: tuple[int, ...] | None = (1, 2) if batch_dim == 0 else (0, 2)
    else:
        # Inputs laid end to end: all of them together.
        dims = None
    up, down = (torch.linalg.vector_norm(g, dim=dims, dtype=wide) for g in (gx, gy))
    ratio = up / down
    # An overflowed step (loss scaling) has no gradients to compare.
    return torch.where(torch.isfinite(ratio), ratio, torch.zeros_like(ratio)).amax()


@contextmanager
def paused() -> Iterator[None]:
    """Inside, passes are not training: whoever watches now, other monitors too, does not see them."""
    watching = [gain for gain in _LIVE if gain.watching]
    for gain in watching:
        gain.watching = False
    try:
        yield
    finally:
        for gain in watching:
            gain.watching = True


def watched_layers(
    handle: Model, live: nn.Module, chosen: Sequence[int], failed: Callable[[Exception], None]
) -> list[LayerGain]:
    """A ``LayerGain`` on the ``live`` model for every chosen layer whose gradients can be told apart."""
    names = {module: name for name, module in handle.model.named_modules()}
    recording, gains = handle.record(probe_inputs(handle.model)), []
    for layer in map(handle.layer, chosen):
        shared = sum(other.host is layer.host for other in handle.layers) > 1
        entries = [] if shared else entry_modules(handle.model, layer, recording)
        if entries and separable(handle.model, layer, entries, recording, failed):
            host, out, *inside = (live.get_submodule(names[module]) for module in (layer.host, layer.out, *entries))
            gains.append(LayerGain(replace(layer, host=host, out=out), inside, failed))
    return gains


def entry_modules(model: nn.Module, layer: Layer, recording: Recording) -> list[nn.Module]:
    """The projections inside a layer's host that take its tokens: where a gradient leaves attention."""
    if isinstance(layer.out, nn.MultiheadAttention):
        return [layer.out]
    call = recording.hosts[layer.index]
    x = call.tokens.clone()
    with replaying(model, recording.documents), watching(layer.host.modules()) as events, torch.no_grad():
        replay_until(call, x, Cut(layer.out, "output"))
    calls = ((event.module, event.tokens) for event in events if event.tokens is not None and is_linear(event.module))
    parts = dict.fromkeys(part for part, t in calls if t.data_ptr() == x.data_ptr() and t.numel() == x.numel())
    # Of a composite linear map (a low-rank adapter, say) its parts: one view for all of them would add up their gradients
    # before those of others, and training would not stay the same to the last bit. Dropout would come between x and a part.
    composite = [part for part in parts if sum(inner in parts for inner in part.modules()) > 1]
    if any(isinstance(inner, nn.Dropout) and inner.p > 0 for part in composite for inner in part.modules()):
        return []
    return [part for part in parts if part not in composite]


def separable(
    model: nn.Module,
    layer: Layer,
    entries: Sequence[nn.Module],
    recording: Recording,
    failed: Callable[[Exception], None],
) -> bool:
    """Whether, in a backward pass through the whole block, the gradients at the entries add up to Jᵀ·dL/dy.

    They do not when x reaches attention on another way, or when a projection feeds something else as well.
    """
    host, block = recording.hosts[layer.index], recording.blocks[layer.index]
    passages: list[tuple[Tensor, Tensor]] = []
    trial = LayerGain(layer, entries, failed, then=lambda gx, gy: passages.append((gx, gy)))
    try:
        with replaying(model, recording.documents), torch.enable_grad():
            u = block.tokens.clone().requires_grad_(True)
            result = first_tensor(block(u))
            if result is None:
                return False
            weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(result)
            torch.autograd.grad((result * weights).sum(), u, allow_unused=True)
            if len(passages) != 1:
                return False
            ((gx, gy),) = passages
            x = host.tokens.clone().requires_grad_(True)
            (expected,) = torch.autograd.grad(replay_until(host, x, Cut(layer.out, "output")), x, gy)
    finally:
        trial.remove()
    allowance = 4096 * torch.finfo(model_dtype(model)).eps * float(expected.abs().max())
    return float((gx.reshape(-1) - expected.reshape(-1)).abs().max()) <= allowance
