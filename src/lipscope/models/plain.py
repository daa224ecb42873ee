"""The analytic fast path: a layer whose projections are the same affine map for every token is an ``Attention``.

Found by probing, not by architecture: the host is replayed on the tokens 0, e_1, …, e_d and the core tells which q, k and
v came out. If W x + b then reproduces q, k and v at the recorded tokens, and W_O the output, the layer is plain. Rotary
embeddings and QK-norm fail that test and take the general path.
"""

from __future__ import annotations

import contextlib
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lipscope.attention.layer import Attention
from lipscope.attention.masks import as_mask
from lipscope.models.anatomy import Layer
from lipscope.models.capture import Call, Recording, replaying
from lipscope.models.seam import CoreCall, observing_core


class _CoreReachedError(Exception):
    """Stops a replay at the attention core."""


AffineParts: TypeAlias = list[tuple[Tensor, Tensor]]


def plain_attention(
    model: nn.Module, layer: Layer, recording: Recording, known: dict[int, AffineParts | None] | None = None
) -> Attention | None:
    """The layer as an ``Attention`` that equals it at the recorded tokens, or None when it is not plain.

    Args:
        model: the model.
        layer: one of its layers.
        recording: a recorded forward pass.
        known: projections found before, by layer index; filled in. They are checked at the new tokens all the same.
    """
    call = recording.hosts[layer.index]
    if isinstance(layer.out, nn.MultiheadAttention):
        return torch_attention(layer, call)
    if not layer.through_seam or not layer.batch_first:
        return None
    known = {} if known is None else known
    at_tokens = core_call(model, call, call.tokens, recording.documents)
    if layer.index not in known:
        known[layer.index] = _probe(model, call)
    parts = known[layer.index]
    if parts is None or not _reproduces(parts, at_tokens, call.tokens):
        return None
    (q, bq), (k, bk), (v, bv) = parts
    out, out_bias = _matrix(layer.out)
    rule = at_tokens.rule
    attention = Attention(
        q, k, v, out, heads=at_tokens.q.shape[1], kv_heads=at_tokens.k.shape[1],
        q_bias=bq, k_bias=bk, v_bias=bv, out_bias=out_bias, scale=1.0,
        mask=_visible(rule.allowed, recording.real, call.tokens),
        softcap=rule.softcap, bias=rule.additive, sinks=rule.sinks,
    )  # fmt: skip
    recorded = recording.outputs[layer.index].reshape(*call.tokens.shape[:2], -1)
    return attention if _agree(attention(call.tokens), recorded, recording.real) else None


def torch_attention(layer: Layer, call: Call) -> Attention:
    """A recorded call of ``nn.MultiheadAttention`` as an ``Attention``."""
    module = layer.out
    assert isinstance(module, nn.MultiheadAttention)
    tokens = call.tokens if layer.batch_first else call.tokens.transpose(0, 1)
    B, n = tokens.shape[:2]
    bound: dict[str, Any] = dict(zip(("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask"), call.args))  # noqa: B905
    bound |= call.kwargs
    mask = as_mask("causal" if bound.get("is_causal") and bound.get("attn_mask") is None else None)
    if bound.get("attn_mask") is not None:
        given = bound["attn_mask"]
        # torch writes True for "hidden", and (B·H, n, n) for masks per head.
        given = ~given if given.dtype == torch.bool else given
        mask = mask & as_mask(given.reshape(B, module.num_heads, n, n) if given.ndim == 3 else given)
    padding = bound.get("key_padding_mask")
    if padding is not None:
        seen = ~padding if padding.dtype == torch.bool else padding == 0
        mask = mask & as_mask(seen[:, None, None, :].expand(B, 1, n, n))
    return Attention.from_torch(module, mask=mask)


def core_call(model: nn.Module, call: Call, tokens: Tensor, documents: tuple[int, ...] | None = None) -> CoreCall:
    """What the attention core receives when ``call`` is replayed on ``tokens``."""
    seen: list[CoreCall] = []

    def observe(core: CoreCall) -> None:
        seen.append(core)
        raise _CoreReachedError

    with replaying(model, documents), observing_core(observe), torch.no_grad(), contextlib.suppress(_CoreReachedError):
        call(tokens)
    return seen[0]


def _probe(model: nn.Module, call: Call) -> AffineParts | None:
    """(W, b) of the scaled queries, keys and values, from probes with unit tokens, whether or not they are affine."""
    B, n, d = call.tokens.shape
    # Probes in the size of the activations, so that a normalisation in between cannot look affine.
    size = float(call.tokens.abs().max()) or 1.0
    probes = size * torch.eye(d + 1, d).roll(1, 0).to(call.tokens)
    rounds = -(-probes.shape[0] // (B * n))
    padded = torch.cat([probes, probes.new_zeros(rounds * B * n - probes.shape[0], d)]).reshape(rounds, B, n, d)
    images: list[list[Tensor]] = [[], [], []]
    for tokens in padded:
        core = core_call(model, call, tokens)
        for image, t in zip(images, (core.q, core.k, core.v), strict=True):
            if t.shape[0] != B or t.shape[2] != n:
                return None
            image.append(_token_rows(t))
    parts = []
    for image in images:
        rows = torch.cat(image)[: d + 1]
        parts.append((((rows[1:] - rows[0]) / size).mT.contiguous(), rows[0]))
    return parts


def _reproduces(parts: AffineParts, at_tokens: CoreCall, tokens: Tensor) -> bool:
    """Whether W x + b is what the core received."""
    flat = tokens.flatten(0, 1)
    return all(
        _close(flat @ weight.mT + bias, _token_rows(t))
        for (weight, bias), t in zip(parts, (at_tokens.q, at_tokens.k, at_tokens.v), strict=True)
    )


def _token_rows(t: Tensor) -> Tensor:
    """(B, H, n, dh) → (B·n, H·dh)."""
    return t.transpose(1, 2).flatten(2).flatten(0, 1)


def _matrix(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    weight = weight.detach()
    if type(module).__name__ == "Conv1D":
        weight = weight.mT
    return weight, bias.detach() if isinstance(bias, Tensor) else None


def _visible(allowed: Tensor | None, real: Tensor | None, tokens: Tensor) -> Tensor | None:
    """The mask as a tensor (B, H, n, n); padding tokens see nothing, so their outputs are zero."""
    n = tokens.shape[1]
    if real is not None:
        both = (real[:, :, None] & real[:, None, :])[:, None]
        allowed = both if allowed is None else allowed & both
    return None if allowed is None else allowed.expand(*allowed.shape[:-2], n, n)


def _agree(actual: Tensor, recorded: Tensor, real: Tensor | None) -> bool:
    if real is not None:
        actual, recorded = actual[real], recorded[real]
    return _close(actual, recorded)


def _close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= 4096 * torch.finfo(b.dtype).eps * max(float(b.abs().max()), 1e-30)
