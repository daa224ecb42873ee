"""Self-tests on load: a model that fails one would be measured wrongly, so it is refused with the reason.

1. Causality: a layer that claims to be causal leaks exactly 0 from future tokens.
2. Determinism: the map and its products are bit-identical when repeated (dropout is off).
3. Replay: a layer replayed at the recorded tokens gives the recorded output, and the whole model on our attention core
   gives what it gives with its own attention.
4. Heads: the sum over heads of W_O^h o^h, plus b_O, is the module's output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lipscope.measure.scopes import CROSS_SCOPES
from lipscope.models.affine import torch_attention
from lipscope.models.anatomy import Layer, first_tensor, tokens_of
from lipscope.models.capture import Recording
from lipscope.models.scopes import real_rows

if TYPE_CHECKING:
    from lipscope.models.recorded import Recorded, RecordedLayer


class SelfTestError(RuntimeError):
    """A model does not behave as the measurement assumes."""


def check_layers(recorded: Recorded) -> None:
    """Test every layer at the recorded tokens, while the model replays; a ``SelfTestError`` names the layer and the test."""
    for layer in (recorded[where.index] for where in recorded.model.every):
        heads: list[Tensor | None] = []
        with layer.layer.out.register_forward_pre_hook(
            lambda _, args, kwargs, heads=heads: heads.append(tokens_of(args, kwargs)), with_kwargs=True
        ):
            y = check_map(layer.map("attention"), layer.tokens(), layer.layer)
        check_replay(y, recorded, layer.layer)
        check_head_sum(layer, y, heads[-1])
        for scope in CROSS_SCOPES if layer.layer.cross else ():
            check_map(layer.map(scope), layer.tokens(scope), replace(layer.layer, causal=False))


def check_map(function: Callable[[Tensor], Tensor], x: Tensor, layer: Layer) -> Tensor:
    """The map and Jᵀg, twice, must agree to the last bit, and a causal one must not leak; returns the map's value.

    In a layer that claims to be causal, cotangents stand on single tokens, and Jᵀg must vanish, exactly, on every later one:
    on the first, the middle and the last but one, another one for every input of the batch.
    """
    (batch, n), tokens = x.shape[:2], []
    if layer.causal and n > 1:
        tokens = list(dict.fromkeys([n - 2, min(n // 2, n - 2), 0]))
        tokens += tokens[: -len(tokens) % batch]
    results = []
    for _ in range(2):
        point = x.detach().clone().requires_grad_(True)
        with torch.enable_grad():
            y = function(point)
        results.append((y, _pullback(y, point, tokens[:batch], layer)))
    (first, gradient), (second, again) = results
    if not torch.equal(first, second) or not torch.equal(gradient, again):
        difference = float((first - second).detach().abs().max())
        raise SelfTestError(
            f"{_name(layer)} gives another answer when repeated (difference {difference:.3g}): "
            "dropout or another random operation is on. Call .eval() on the model."
        )
    for k in range(batch, len(tokens), batch):
        _pullback(y, point, tokens[k : k + batch], layer)
    return second.detach()


def _pullback(y: Tensor, x: Tensor, tokens: list[int], layer: Layer) -> Tensor:
    """Jᵀg of a cotangent on one token of every input, where there are ``tokens``; refuses what reaches later tokens."""
    g = torch.ones_like(y)
    if tokens:
        g.zero_()
        for b, i in enumerate(tokens):
            g[b, i] = torch.linspace(-1, 2, y.shape[-1], dtype=y.dtype, device=y.device)
    gradient = torch.autograd.grad(y, x, g, retain_graph=True, allow_unused=True)[0] if y.requires_grad else None
    if gradient is None:
        raise SelfTestError(
            f"{_name(layer)} has no derivative in its tokens: the model hands them over on a way that lipscope cannot "
            "follow, so it cannot be measured"
        )
    for b, i in enumerate(tokens):
        leak = float(gradient[b, i + 1 :].abs().max())
        if leak:
            raise SelfTestError(
                f"{_name(layer)} claims to be causal, but output token {i} depends on later tokens (leak {leak:.3g}). The "
                "causal mask is lost on the way to the attention core; σ would be that of another map."
            )
    return gradient


def check_replay(y: Tensor, recording: Recording, layer: Layer) -> None:
    """The replayed output must be the recorded one."""
    recorded = _in_rows(recording.outputs[layer.index], y, layer)
    _require_close(
        real_rows(y, recording.real), real_rows(recorded, recording.real), 64 * torch.finfo(y.dtype).eps,
        f"{_name(layer)}: replaying the recorded call does not give the recorded output (difference {{:.3g}}). The layer "
        "keeps state between calls, or takes its tokens from an argument that was not recognised.",
    )  # fmt: skip


def check_own_attention(recording: Recorded, own: Tensor) -> None:
    """The model on our core must agree with the model on its own attention, whose last hidden state is ``own``."""
    real = recording.real if recording.real is not None and recording.real.shape == own.shape[:2] else None
    _require_close(
        real_rows(recording.last_hidden, real), real_rows(own, real), 1e-4 if own.dtype == torch.float32 else 1e-9,
        f"{type(recording.model.model).__name__} on the lipscope attention core differs from the model with its own "
        "attention (difference {:.3g}): its attention has an ingredient that the attention interface does not hand over.",
    )  # fmt: skip


def check_head_sum(at: RecordedLayer, y: Tensor, heads: Tensor | None) -> None:
    """Σ_h W_O^h o^h + b_O = attention output: the heads, which entered W_O side by side, are cut where they should be."""
    layer, real = at.layer, at.recorded.real
    if layer.mixer:
        return
    message = (
        f"{_name(layer)}: the sum over its {layer.heads} heads differs from the module's output by {{:.3g}}, so the heads "
        "are not consecutive slices of the output projection's input; per-head numbers would be wrong."
    )
    if isinstance(layer.out, nn.MultiheadAttention):
        total = torch_attention(layer, at.call)(at.tokens())
    else:
        assert heads is not None
        width = heads.shape[-1]
        if width % layer.heads:
            raise SelfTestError(f"{_name(layer)}: {layer.heads} heads do not divide the width {width} of W_O")
        with torch.no_grad():
            # Each head alone, and none, in one call.
            alone = heads.new_zeros(layer.heads + 1, *heads.shape)
            for h, columns in enumerate(torch.arange(width, device=heads.device).split(width // layer.heads)):
                alone[h, ..., columns] = heads[..., columns]
            project: Callable[[Tensor], Any] = layer.out
            images = first_tensor(project(alone.flatten(0, 1)))
            assert images is not None
            images = images.unflatten(0, (layer.heads + 1, -1))
            total = _in_rows(images.sum(0) - layer.heads * images[-1], y, layer)
    _require_close(real_rows(total, real), real_rows(y, real), 4096 * torch.finfo(y.dtype).eps, message)


def _in_rows(output: Tensor, like: Tensor, layer: Layer) -> Tensor:
    """What W_O gave, in the model's layout of tokens, shaped like the output of the map."""
    return (output if layer.batch_first or output.ndim != 3 else output.transpose(0, 1)).reshape(like.shape)


def _require_close(a: Tensor, b: Tensor, tolerance: float, message: str) -> None:
    scale = float(b.abs().max()) if b.numel() else 0.0
    difference = float((a - b).abs().max()) if b.numel() else 0.0
    if not difference <= tolerance * max(scale, torch.finfo(b.dtype).tiny):
        raise SelfTestError(message.format(difference))


def _name(layer: Layer) -> str:
    return f"layer {layer.index} ({layer.name or type(layer.host).__name__})"
