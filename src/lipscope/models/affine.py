"""The analytic fast path: a layer whose projections are affine, up to rotations by position, is an ``Attention``.

Found by probing, not by architecture: the host is replayed on the tokens 0, e_1, …, e_d, and on one token at all positions,
and the core tells which q, k and v came out. If R_t(W x_t + b) then reproduces q, k and v at the recorded tokens, and W_O
the output, the layer is an ``Attention``. QK-norm fails that test and takes the general path.

Rotary embeddings: if every token is z, the core receives R_t(W z + b) at position t. When R_t rotates (and perhaps
stretches) pairs of coordinates, it is one complex number per pair, the same for all heads, for queries and for keys and for
every z, so few samples determine it and many check it. Which coordinates form a pair, and how many are rotated, is tried
out. Only R_t R_s⁻¹ can be known: W is found in the frame of the first position, which changes no score.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.attention.layer import Attention
from lipscope.attention.masks import MaskLike, RealTokens, as_mask
from lipscope.attention.norms import LayerNorm, Normalisation, RMSNorm
from lipscope.attention.rotary import Rotary, joined_pairs, pair_parts
from lipscope.attention.scores import ScoreRule
from lipscope.models.anatomy import Layer
from lipscope.models.capture import Call, ReachedError, Recording, replaying
from lipscope.models.seam import CoreCall, observing_core

# Heads and places that are enough to tell layouts apart; the tables themselves are fitted to all.
_HEADS, _PLACES = 8, 64


@dataclass(frozen=True)
class Layout:
    """The first ``width`` coordinates are turned; pairs are neighbours, or lie half the width apart."""

    width: int
    interleaved: bool

    def pairs(self, t: Tensor) -> Tensor:
        """(…, dk) → complex (…, width/2)."""
        return torch.complex(*(part.contiguous() for part in pair_parts(t[..., : self.width], self.interleaved)))

    def fit(self, seen: Tensor, reference: Tensor) -> Tensor:
        """The complex numbers c_t, (B, n, width/2), with seen_t ≈ c_t·reference, by least squares over the samples.

        ``seen`` (samples, B, n, dk) is what the core received, ``reference`` (samples, dk) the same before it was turned.
        """
        before = self.pairs(reference)
        weight = before.abs().square().sum(0)
        # A pair that is zero before it is turned (pruned or zero weights) shows no rotation, and any will do.
        shown = weight > (100 * torch.finfo(reference.dtype).eps) ** 2 * weight.amax()
        numbers = (before.conj()[:, None, None] * self.pairs(seen)).sum(0) / torch.where(shown, weight, 1.0)
        return torch.where(shown, numbers, torch.ones_like(numbers))

    def error(self, seen: Tensor, reference: Tensor) -> float:
        """How far ``seen`` is from a turned ``reference``, the coordinates that stay included."""
        turned = self.fit(seen, reference) * self.pairs(reference)[:, None, None]
        moving = (turned - self.pairs(seen)).abs().amax()
        still = (seen[..., self.width :] - reference[:, None, None, self.width :]).abs()
        return max(float(moving), float(still.amax()) if still.numel() else 0.0)

    def table(self, numbers: Tensor) -> Rotary:
        """The rotations as tables, (n, r) when all inputs share them."""
        if bool((numbers == numbers[:1]).all()):
            numbers = numbers[0]
        cos, sin = (joined_pairs(t, t, self.interleaved) for t in (numbers.real, numbers.imag))
        return Rotary(cos, sin, self.interleaved)


def find_layout(seen: Tensor, reference: Tensor, allowed: float) -> Layout | None:
    """The layout that explains what was seen with the smallest error, None when every error exceeds ``allowed``."""
    samples, _, n, dk = seen.shape
    heads = torch.linspace(0, samples - 1, min(samples, _HEADS)).long().unique()
    places = torch.linspace(0, n - 1, min(n, _PLACES)).long().unique()
    few, before = seen[heads][:, :, places], reference[heads]
    candidates = [Layout(width, woven) for width in range(dk - dk % 2, 0, -2) for woven in (False, True)]
    if not candidates:
        return None
    best = min(candidates, key=lambda layout: layout.error(few, before))
    return best if best.error(seen, reference) <= allowed else None


@dataclass(frozen=True, eq=False)
class AffineParts:
    """(W, b) of the scaled queries, the keys and the values, and how positions turn queries and keys, if they do."""

    q: tuple[Tensor, Tensor]
    k: tuple[Tensor, Tensor]
    v: tuple[Tensor, Tensor]
    layout: Layout | None


def plain_attention(
    model: nn.Module,
    layer: Layer,
    recording: Recording,
    known: dict[int, AffineParts | None] | None = None,
    core: CoreCall | None = None,
) -> Attention | None:
    """The layer as an ``Attention`` that equals it at the recorded tokens, or None when it is not plain.

    ``known`` are projections found before, by layer index; they are checked at the new tokens all the same, and new ones are
    filled in. ``core`` is what the core receives at the recorded tokens, where that is known already.
    """
    call = recording.hosts[layer.index]
    if isinstance(layer.out, nn.MultiheadAttention):
        return torch_attention(layer, call)
    if not layer.through_seam or not layer.batch_first:
        return None
    known = {} if known is None else known
    at_tokens = core or core_call(model, call, call.tokens, recording.documents)
    for last in (False, True):
        if layer.index not in known:
            known[layer.index] = find_projections(model, call)
        parts = known[layer.index]
        rotary = _rotations(model, call, parts)
        if _reproduces(parts, rotary, at_tokens, call.tokens):
            break
        if last or not _looked_unturned(model, call, parts):
            return None
        del known[layer.index]
    if parts is None or not isinstance(getattr(layer.out, "weight", None), Tensor):
        return None
    out, out_bias = matrix_of(layer.out)
    rule = at_tokens.rule
    attention = Attention(
        parts.q[0], parts.k[0], parts.v[0], out, heads=at_tokens.q.shape[1], kv_heads=at_tokens.k.shape[1],
        q_bias=parts.q[1], k_bias=parts.k[1], v_bias=parts.v[1], out_bias=out_bias, scale=1.0,
        mask=_visible(rule, recording.real, call.tokens),
        softcap=rule.softcap, bias=rule.additive, sinks=rule.sinks, rotary=rotary,
    )  # fmt: skip
    actual, recorded = attention(call.tokens), recording.outputs[layer.index].reshape(*call.tokens.shape[:2], -1)
    if recording.real is not None:
        actual, recorded = actual[recording.real], recorded[recording.real]
    return attention if _close(actual, recorded) else None


def torch_attention(layer: Layer, call: Call) -> Attention:
    """A recorded call of ``nn.MultiheadAttention`` as an ``Attention``."""
    module = layer.out
    assert isinstance(module, nn.MultiheadAttention)
    tokens = call.tokens if layer.batch_first else call.tokens.transpose(0, 1)
    B, n = tokens.shape[:2]
    bound = inspect.signature(module.forward).bind(*call.args, **call.kwargs).arguments
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


def core_call(
    model: nn.Module,
    call: Call,
    tokens: Tensor,
    documents: tuple[int, ...] | None = None,
    *,
    graph: bool = False,
    frozen: bool = True,
) -> CoreCall:
    """What the attention core receives when the recorded ``call`` is replayed on other ``tokens``.

    ``graph`` keeps the graph that leads from the tokens to the core, ``frozen`` leaves the parameters out of it.
    """

    def observe(core: CoreCall) -> None:
        raise ReachedError(core)

    with replaying(model, documents, frozen=frozen), observing_core(observe), torch.set_grad_enabled(graph):
        try:
            call(tokens)
        except ReachedError as reached:
            core: CoreCall = reached.found
            return core
    raise RuntimeError(f"the replay of {type(call.module).__name__} never reached its attention core")


def find_projections(model: nn.Module, call: Call) -> AffineParts | None:
    """The projections from probes with unit tokens, affine or not; None when positions do more than turn pairs."""
    B, n, d = call.tokens.shape
    # Probes in the size of the activations, so that a normalisation in between cannot look affine.
    size = float(call.tokens.abs().max()) or 1.0
    probes = size * torch.eye(d + 1, d).roll(1, 0).to(call.tokens)
    rounds = -(-probes.shape[0] // (B * n))
    padded = torch.cat([probes, probes.new_zeros(rounds * B * n - probes.shape[0], d)]).reshape(rounds, B, n, d)
    with replaying(model):
        seen = _everywhere(model, call)
        if seen is None:
            return None
        reference = seen[:, 0, 0]
        layout = turn = None
        if not _close(seen, reference[:, None, None].expand_as(seen)):
            layout = find_layout(seen, reference, _allowance(seen))
            if layout is None:
                return None
            turn = layout.table(layout.fit(seen, reference)).rotation(n, B)
        images: list[list[Tensor]] = [[], [], []]
        for core in _cores(model, call, padded):
            for image, t, turned in zip(images, (core.q, core.k, core.v), (True, True, False), strict=True):
                if turn is not None and turned:
                    t = turn.inverse(t)
                # (B, H, n, dh) → (B·n, H·dh)
                image.append(t.transpose(1, 2).flatten(2).flatten(0, 1))
    rows = (torch.cat(image)[: d + 1] for image in images)
    q, k, v = ((((row[1:] - row[0]) / size).mT.contiguous(), row[0]) for row in rows)
    return AffineParts(q, k, v, layout)


def _cores(model: nn.Module, call: Call, padded: Tensor) -> Iterator[CoreCall]:
    """What the core receives for every round of probes (rounds, B, n, d), all in one replay where the module allows it."""
    rounds, B = padded.shape[:2]
    try:
        wide = core_call(model, call.repeated(rounds), padded.flatten(0, 1))
        parts = [t.unflatten(0, (rounds, B)) for t in (wide.q, wide.k, wide.v)]
    except (RuntimeError, ValueError, IndexError, TypeError):
        # An argument whose first dimension only looked like that of the batch.
        yield from (core_call(model, call, tokens) for tokens in padded)
        return
    for q, k, v in zip(*parts, strict=True):
        yield replace(wide, q=q, k=k, v=v)


def _looked_unturned(model: nn.Module, call: Call, parts: AffineParts | None) -> bool:
    """Whether places matter here although they did not where the projections were found: a single token has no others."""
    if parts is None or parts.layout is not None or call.tokens.shape[:2].numel() == 1:
        return False
    seen = _everywhere(model, call)
    return seen is not None and not _close(seen, seen[:, :1, :1].expand_as(seen))


def _everywhere(model: nn.Module, call: Call) -> Tensor | None:
    """Queries and keys of all heads, (samples, B, n, dk), for one token at all places; None when values see the place."""
    B, n, _ = call.tokens.shape
    samples = []
    for z in _constant_tokens(call):
        core = core_call(model, call, z.expand_as(call.tokens).contiguous())
        for t in (core.q, core.k, core.v):
            if t.shape[0] != B or t.shape[2] != n:
                return None
        if core.q.shape[-1] != core.k.shape[-1] or not _close(core.v, core.v[:1, :, :1].expand_as(core.v)):
            return None
        samples += [core.q.transpose(0, 1), core.k.transpose(0, 1)]
    return torch.cat(samples)


def _constant_tokens(call: Call) -> Tensor:
    """Two tokens in the size of the activations, drawn from a fixed seed."""
    tokens = call.tokens
    size = float(tokens.square().mean().sqrt()) or 1.0
    drawn = torch.randn(2, tokens.shape[-1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return size * drawn.to(tokens)


def _rotations(model: nn.Module, call: Call, parts: AffineParts | None) -> Rotary | None:
    """The rotations at the places of this call, in the frame in which the projections were found."""
    if parts is None or parts.layout is None:
        return None
    seen = _everywhere(model, call)
    if seen is None:
        return None
    projections, dk = (parts.q, parts.k), seen.shape[-1]
    before = [(weight @ z + bias).reshape(-1, dk) for z in _constant_tokens(call) for weight, bias in projections]
    return parts.layout.table(parts.layout.fit(seen, torch.cat(before)))


def _reproduces(parts: AffineParts | None, rotary: Rotary | None, at_tokens: CoreCall, tokens: Tensor) -> bool:
    """Whether W x + b, turned, is what the core received."""
    if parts is None or (parts.layout is None) != (rotary is None):
        return False
    B, n, _ = tokens.shape
    turn = None if rotary is None else rotary.rotation(n, B)
    for (weight, bias), t, turned in (
        (parts.q, at_tokens.q, True), (parts.k, at_tokens.k, True), (parts.v, at_tokens.v, False),
    ):  # fmt: skip
        projected = (tokens @ weight.mT + bias).reshape(B, n, t.shape[1], -1).transpose(1, 2)
        if turn is not None and turned:
            projected = turn.apply(projected)
        if projected.shape != t.shape or not _close(projected, t):
            return False
    return True


def normalisation_of(module: nn.Module, like: Tensor) -> Normalisation | None:
    """The module as a ``LayerNorm`` or ``RMSNorm``, or None when it is neither; ``like`` has tokens (…, d) of its kind."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    gain = weight.detach() if isinstance(weight, Tensor) else like.new_ones(like.shape[-1])
    offset = bias.detach() if isinstance(bias, Tensor) else None
    if gain.shape != like.shape[-1:]:
        return None
    eps = next((float(value) for name in _EPSILONS if isinstance(value := getattr(module, name, None), (int, float))), 0.0)
    candidates: list[Normalisation] = [LayerNorm(gain, offset, eps)]
    if offset is None:
        # Gemma stores g − 1.
        candidates += [RMSNorm(gain, eps), RMSNorm(1 + gain, eps)]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 4, like.shape[-1], generator=generator, dtype=torch.float64).to(like)
    # Large, ordinary, off-centre and tiny tokens: the last ones show ε.
    probes = torch.cat([100 * noise, noise, noise + 3, 1e-3 * noise], dim=1)
    with torch.no_grad():
        wanted = module(probes)
        return next((norm for norm in candidates if _close(norm(probes), wanted)), None)


def comes_from(norm: Normalisation, u: Tensor, tokens: Tensor) -> bool:
    """Whether ``tokens`` are ``norm(u)``, up to rounding."""
    return u.shape == tokens.shape and _close(norm(u), tokens)


_EPSILONS = ("eps", "variance_epsilon", "epsilon")


def same_value(a: Any, b: Any) -> bool:
    """Whether two descriptions hold the same numbers."""
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        return all(same_value(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    return bool(a == b)


def matrix_of(module: nn.Module) -> tuple[Tensor, Tensor | None]:
    """(W, b) of a linear map: as they are stored, or with its adapters by what it makes of unit vectors."""
    weight, bias = module.weight, module.bias
    assert isinstance(weight, Tensor)
    weight = weight.detach()
    if type(module).__name__ == "Conv1D" or type(getattr(module, "base_layer", None)).__name__ == "Conv1D":
        weight = weight.mT
    if hasattr(module, "base_layer"):
        with torch.no_grad():
            offset = module(weight.new_zeros(1, weight.shape[1]))
            weight = (module(torch.eye(weight.shape[1]).to(weight)) - offset).mT
        return weight, offset[0]
    return weight, bias.detach() if isinstance(bias, Tensor) else None


def _visible(rule: ScoreRule, real: Tensor | None, tokens: Tensor) -> MaskLike:
    """The mask as a rule, or as a tensor (B, H, n, n); padding tokens see nothing, so their outputs are zero."""
    n, allowed = tokens.shape[1], rule.allowed
    if rule.mask is not None:
        mask = rule.mask if allowed is None else rule.mask & allowed.expand(*allowed.shape[:-2], n, n)
        return mask if real is None else mask & RealTokens(real.cpu())
    if real is not None:
        both = (real[:, :, None] & real[:, None, :])[:, None]
        allowed = both if allowed is None else allowed & both
    return None if allowed is None else allowed.expand(*allowed.shape[:-2], n, n)


def _close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= _allowance(b)


def _allowance(b: Tensor) -> float:
    return 4096 * torch.finfo(b.dtype).eps * max(float(b.abs().max()), 1e-30)
