"""The scopes of a model's layer as maps on tokens (B, n, d), and their Jacobian operators.

| scope              | from                 | to                                                          |
|--------------------|----------------------|-------------------------------------------------------------|
| head               | attention's tokens   | one head's output o^h, before W_O                           |
| attention          | attention's tokens   | all heads and W_O; no residual, no normalisation            |
| norm+attention     | the block's tokens   | the same, through the normalisation before attention        |
| attention+residual | the block's tokens   | the residual stream after attention (post-norm: normalised) |
| block              | the block's tokens   | the block's output                                          |
| model              | the first block's    | the model's last hidden state                               |
| cross-queries      | the decoder's tokens | a decoder's cross-attention and its W_O                     |
| cross-keys         | the encoder's tokens | the same                                                    |

Outputs at padding tokens are set to zero, so σ is that of the unpadded sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.measure.scopes import CROSS_SCOPES, check_scope
from lipscope.models.anatomy import Cut, Layer
from lipscope.models.capture import Call, Recording, last_hidden_state, replay_until, replaying
from lipscope.spectral.autodiff import TensorMap
from lipscope.spectral.operator import DerivedOperator, Operator


def scope_tokens(layer: Layer, recording: Recording, scope: str) -> Tensor:
    """The recorded tokens (B, n, d) at which a scope's map is measured."""
    if scope in CROSS_SCOPES:
        return cross_call(layer, recording, scope).tokens
    call = recording.hosts[layer.index] if scope in ("head", "attention") else recording.blocks[layer.index]
    return _batch_first(call.tokens, layer)


def cross_call(layer: Layer, recording: Recording, scope: str) -> Call:
    """The recorded call of a decoder layer's cross-attention, whose tokens are the decoder's or the encoder's."""
    if layer.cross is None:
        raise ValueError(
            f"layer {layer.index} ({layer.name}) has no cross-attention, so scope {scope} does not exist for it; it is for "
            "the decoder of an encoder–decoder model (part='decoder', --part decoder)"
        )
    call = recording.crosses[layer.index]
    return call if scope == "cross-queries" else call.in_keys()


def scope_map(model: nn.Module, layer: Layer, recording: Recording, scope: str, layers: list[Layer]) -> TensorMap:
    """The map of ``scope`` around ``layer``, batch first, with everything else as recorded.

    Scope ``head`` gives all heads, (B, n, H·dv); see ``HeadsOperator``. Scope ``model`` starts at the first layer.
    """
    host, block = recording.hosts[layer.index], recording.blocks[layer.index]
    inner: TensorMap
    match scope:
        case "attention":
            inner = partial(replay_until, host, cut=Cut(layer.out, "output"))
        case "head":
            if layer.mixer:
                raise ValueError(f"layer {layer.index} ({layer.name}) is a {layer.mixer} without heads; use scope attention")
            if isinstance(layer.out, nn.MultiheadAttention):
                raise ValueError("nn.MultiheadAttention does not show its heads; they are measured from its weights")
            inner = partial(replay_until, host, cut=Cut(layer.out, "input"))
        case "norm+attention":
            if not layer.normed:
                raise ValueError(
                    f"layer {layer.index} ({layer.name}) has no normalisation before attention, so scope norm+attention "
                    "does not exist for it; use attention, attention+residual or block"
                )
            inner = partial(replay_until, block, cut=Cut(layer.out, "output"))
        case "attention+residual":
            branch = partial(replay_until, block, cut=layer.stream)
            inner = (lambda x: x + branch(x).reshape(x.shape)) if layer.stream_adds_input else branch
        case "block":
            inner = partial(replay_until, block, cut=Cut(layer.block, "output"))
        case "cross-queries" | "cross-keys":
            call = cross_call(layer, recording, scope)
            assert layer.cross is not None
            inner = partial(replay_until, call, cut=Cut(layer.cross[1], "output"))
        case "model":
            inner = _model_map(model, layers[0], recording)
        case _:
            raise ValueError(f"no map for scope {check_scope(scope)!r}")

    def function(x: Tensor) -> Tensor:
        with replaying(model, recording.documents):
            y = _batch_first(inner(_batch_first(x, layer)), layer)
        y = y.reshape(*(y if scope == "cross-keys" else x).shape[:2], -1)
        return y if recording.real is None else y * recording.real[..., None].to(y)

    return function


class HeadsOperator(DerivedOperator):
    """One head of every item of ``base``, whose outputs are all heads side by side, (n, H·dv): rows of its Jacobians."""

    def __init__(self, base: Operator, head: Tensor, heads: int) -> None:
        super().__init__(base)
        n, width = base.output_shape
        if width % heads:
            raise ValueError(f"{heads} heads do not divide the {width} inputs of the output projection")
        self.head, self.heads, self.output_shape = head, heads, (n, width // heads)

    @classmethod
    def of(cls, base: Operator, chosen: Sequence[int], heads: int) -> HeadsOperator:
        """The chosen heads of every item of ``base``, ordered (item, head)."""
        items = torch.arange(base.batch, device=base.device).repeat_interleave(len(chosen))
        return cls(base.select(items), torch.tensor(chosen, device=base.device).repeat(base.batch), heads)

    def matvec(self, u: Tensor) -> Tensor:
        """The head's columns of J·u."""
        n, dv = self.output_shape
        image = self.base.matvec(u).reshape(-1, n, self.heads, dv)
        return image[torch.arange(self.batch, device=self.device), :, self.head].flatten(1)

    def rmatvec(self, g: Tensor) -> Tensor:
        """Jᵀ of a cotangent that is zero on the other heads."""
        n, dv = self.output_shape
        full = g.new_zeros(self.batch, n, self.heads, dv)
        full[torch.arange(self.batch, device=self.device), :, self.head] = g.reshape(-1, n, dv)
        return self.base.rmatvec(full.flatten(1))

    def select(self, items: Tensor) -> HeadsOperator:
        return HeadsOperator(self.base.select(items), self.head[items], self.heads)


def _model_map(model: nn.Module, first: Layer, recording: Recording) -> TensorMap:
    """From the tokens that enter the first block to the last hidden state."""

    def function(x: Tensor) -> Tensor:
        calls = count()

        def entering(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            return Call.record(module, args, kwargs).with_tokens(x) if next(calls) == 0 else None

        with first.block.register_forward_pre_hook(entering, with_kwargs=True):
            return last_hidden_state(recording.run())

    return function


def _batch_first(tokens: Tensor, layer: Layer) -> Tensor:
    return tokens if layer.batch_first or tokens.ndim != 3 else tokens.transpose(0, 1)


def real_rows(values: Tensor, real: Tensor | None) -> Tensor:
    """Rows of real tokens, flattened over the batch."""
    return values.flatten(0, 1) if real is None else values[real.to(torch.bool)]
