"""A model's layers at recorded tokens: each *is* a layer, with tokens, an operator, a σ, a certificate and rows.

    recorded = model.record(text="to be or not to be")
    recorded[3].sigma("head")

What a layer turns out to be at these tokens (an ``Attention`` in closed form, the normalisation before it, what its
attention looks like) is found once and kept as long as the recording. In its rows set bounds stand beside σ: how large σ
could be for any tokens as long as these, and for any input of the model at all.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lipscope.attention.core import Linearisation, ungroup_queries
from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal, Full, Mask, Packed, as_mask, same_mask
from lipscope.attention.norms import Normalisation
from lipscope.attention.operators import HeadOperator
from lipscope.attention.row_statistics import row_statistics
from lipscope.bounds.registry import least
from lipscope.doors import checked
from lipscope.measure.columns import COLUMNS
from lipscope.measure.scopes import CROSS_SCOPES, LAYER_SCOPES, Certificate, check_scope
from lipscope.measure.sigma import head_items, sigma
from lipscope.models.affine import comes_from, core_call, plain_attention
from lipscope.models.anatomy import Layer
from lipscope.models.capture import Call, Recording, replaying
from lipscope.models.scopes import HeadsOperator, scope_map, scope_tokens
from lipscope.models.seam import CoreCall
from lipscope.rounding import counted
from lipscope.spectral.autodiff import AutodiffOperator, TensorMap
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SIZES, SpectralNorm
from lipscope.spectral.solvers import Solver

if TYPE_CHECKING:
    from lipscope.models.model import Model


@checked
@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Recorded(Recording):
    """One forward pass of a model; ``recorded[i]`` is its i-th attention layer at these tokens."""

    model: Model
    # The weights may have changed since the model was loaded, so its layers are described from this pass alone
    fresh: bool = False
    _layers: dict[int, RecordedLayer] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.model.layers)

    def __repr__(self) -> str:
        return f"<Recorded pass of {self.model.name}: {counted(len(self), 'attention layer')}>"

    def __getitem__(self, layer: int) -> RecordedLayer:
        where = self.model.layer(layer)
        if where.index not in self._layers:
            if self.model.stream is not None:
                self.forget()
                self.hosts[where.index]  # moves the pass there, before anything is found out about the layer
            self._layers[where.index] = RecordedLayer(self, where)
        return self._layers[where.index]

    def forget(self) -> None:
        """Let go of what was found out about layers."""
        self._layers.clear()

    def __iter__(self) -> Iterator[RecordedLayer]:
        return (self[layer.index] for layer in self.model.layers)

    def rows(
        self,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        scope: str = "attention",
        solver: Solver | None = None,
        certificate: Certificate = None,
    ) -> list[dict[str, Any]]:
        """One row per layer, head and input; see ``RecordedLayer.rows``."""
        check_scope(scope)
        chosen = self.model.check_layers(layers, scope)
        how: dict[str, Any] = {"heads": heads, "solver": solver, "certificate": certificate}
        return [row for layer in chosen for row in self[layer].rows(scope, **how)]


@checked
class RecordedLayer:
    """One attention layer of a model at recorded tokens."""

    def __init__(self, recorded: Recorded, layer: Layer) -> None:
        self.recorded, self.layer = recorded, layer
        self.model, self.index, self.heads = recorded.model, layer.index, layer.heads

    def __repr__(self) -> str:
        return f"<RecordedLayer {self.index} of {self.model.name}, {counted(self.heads, 'head')}>"

    @property
    def call(self) -> Call:
        """The recorded call of the attention module."""
        return self.recorded.hosts[self.index]

    @cached_property
    def mask(self) -> str:
        """Who sees whom, in words."""
        mask, documents = self.layer.mask, self.recorded.documents
        mask = mask if self.recorded.real is None else f"{mask}&padding"
        return mask if documents is None else f"{mask}&packed:" + ",".join(map(str, documents))

    def tokens(self, scope: str = "attention") -> Tensor:
        """The recorded tokens (B, n, d) at which the map of a scope is measured."""
        return scope_tokens(self.layer, self.recorded, scope)

    def map(self, scope: str = "attention") -> TensorMap:
        """The map of a scope, batch first, with everything else as recorded."""
        return scope_map(self.model.model, self.layer, self.recorded, scope, self.model.every)

    def core(self, tokens: Tensor | None = None, *, graph: bool = False, frozen: bool = True) -> CoreCall:
        """What the attention core receives at the recorded tokens, or at others: q, k, v and the rule; see ``core_call``."""
        tokens = self.call.tokens if tokens is None else tokens
        return core_call(self.model.model, self.call, tokens, self.recorded.documents, graph=graph, frozen=frozen)

    def joined_heads(self, tokens: Tensor, *, frozen: bool = True) -> Tensor:
        """The heads at other tokens, side by side before W_O (B, n, H·dv), by operations with second derivatives."""
        core, real = self.core(tokens, graph=True, frozen=frozen), self.recorded.real
        outputs = Linearisation.at(core.q, core.k, core.v, core.rule).o
        joined = ungroup_queries(outputs, core.q.shape[1]).transpose(1, 2).flatten(2)
        return joined if real is None else joined * real[..., None].to(joined)

    @cached_property
    def attention(self) -> Attention | None:
        """The layer as an ``Attention`` in closed form when it provably is one at these tokens, else None."""
        return self._describe()

    def weights(self) -> Attention:
        """The layer as an ``Attention``; refuses a model that keeps its own attention, or normalises queries and keys."""
        if self.attention is None:
            raise ValueError(
                f"layer {self.index} of {self.model.name} has no weights in closed form: its queries, keys and values are "
                "not known as affine maps of the tokens (the model keeps its own attention, or normalises queries and "
                "keys). σ itself can be measured with lipscope scan, and worst words searched with lipscope attack "
                "--method tokens"
            )
        return self.attention

    @cached_property
    def at_any_length(self) -> Attention | None:
        """The layer for any number of tokens, full or causal; None when positions, score biases or its mask count tokens."""
        found = self.attention
        if found is None or found.rotary is not None or self.layer.mask not in ("full", "causal"):
            return None
        if found.bias is not None and bool(found.bias.any()):
            return None
        # An additive mask whose finite part is zero everywhere is no bias.
        return dataclasses.replace(found, bias=None).with_mask(self.layer.mask)

    @cached_property
    def norm(self) -> Normalisation | None:
        """The LayerNorm or RMSNorm whose output attention sees, or None; it bounds every token's norm."""
        return self.model.normalisation(self.layer, self.call.tokens, fresh=self.recorded.fresh)

    @cached_property
    def norm_before(self) -> Normalisation | None:
        """The normalisation of scope ``norm+attention``, when nothing else lies between the block's input and attention."""
        norm = self.norm
        known = norm is not None and comes_from(norm, self.tokens("norm+attention"), self.tokens("attention"))
        return norm if known else None

    @cached_property
    def statistics(self) -> dict[str, Tensor]:
        """Per input and head: mean row entropy (nats), largest logit, mean attention to the first token and to sinks.

        Empty when the model does not hand over its queries and keys. Rows need ``attention`` too: it is found from the same
        replay, whose queries, keys and values are large, and not kept.
        """
        real = self.recorded.real
        with replaying(self.model.model, self.recorded.documents):  # once for all replays
            core = self.core() if self.layer.through_seam else None
            if "attention" not in vars(self) and not self.recorded.fresh:
                self.attention = self._describe(core)
        if core is not None:
            q, k, v, rule = core.q, core.k, core.v, core.rule
        elif isinstance(self.layer.out, nn.MultiheadAttention):
            attention, X = self.weights(), self.tokens()
            q, k, v = attention.project(X)
            rule = attention.score_rule(X.shape[1], X.shape[0], tiled=True)
        else:
            return {}
        B, _, n, _ = q.shape
        rows = torch.ones(B, n, dtype=torch.bool, device=q.device) if real is None else real
        weight = (rows / rows.sum(-1, keepdim=True))[:, None].to(q)
        found = row_statistics(q, k, v, rule, rows.int().argmax(-1))
        return {
            "entropy": (found.entropy * weight).sum(-1),
            "max_logit": found.max_logit.masked_fill(~rows[:, None], float("-inf")).amax(-1),
            "sink_mass": ((found.on_token + found.on_sink) * weight).sum(-1),
        }

    def _describe(self, core: CoreCall | None = None) -> Attention | None:
        known = None if self.recorded.fresh else self.model.projections(self.layer)
        found = plain_attention(self.model.model, self.layer, self.recorded, known, core)
        if found is None or self.recorded.fresh:
            return found
        return self.model.remembered(self.index, self._with_named_mask(found))

    def operator(self, scope: str = "attention", *, analytic: bool = True) -> Operator:
        """The Jacobian of a scope, one item per input (and head); if ``analytic``, in closed form where one is known."""
        check_scope(scope)
        hidden_heads = scope == "head" and isinstance(self.layer.out, nn.MultiheadAttention)
        if scope in ("attention", "head") and (analytic or hidden_heads) and self.attention is not None:
            return self.attention.operator(self.tokens(scope).contiguous(), scope)
        start = self.recorded[self.model.every[0].index] if scope == "model" else self
        return AutodiffOperator(start.map(scope), start.tokens(scope).contiguous())

    def sigma(
        self,
        scope: str = "attention",
        *,
        heads: Sequence[int] | None = None,
        solver: Solver | None = None,
        analytic: bool = True,
        certificate: Certificate = None,
        memory: int | None = None,
        typical: bool | None = None,
    ) -> SpectralNorm:
        """σ at the recorded tokens, of shape (B,), or (B, heads) for scope ``head``.

        With ``analytic`` the closed-form Jacobian of layers that are known as an ``Attention`` is used. ``certificate`` also
        computes the certified upper end, with matrices of at most ``memory`` bytes, and reports the least; by default when
        the layer has one that costs no more than the measurement. ``typical`` asks for ‖J‖_F, by default unless
        ``certificate`` is False: the closed form beside a certificate, otherwise an estimate.
        """
        chosen = self.model.check_heads(self.index, heads) if check_scope(scope) == "head" else None
        operator = self.operator(scope, analytic=analytic)
        if chosen is not None:
            if isinstance(operator, HeadOperator):
                items = head_items(operator.batch // self.heads, self.heads, chosen)
                operator = operator.select(items.to(operator.device))
            else:
                operator = HeadsOperator.of(operator, chosen, self.heads)
        known = certificate is not False and scope in LAYER_SCOPES
        found = sigma(
            operator,
            solver,
            scope=scope,
            mask="full" if scope in CROSS_SCOPES else self.mask,
            shape=None if chosen is None else (operator.batch // len(chosen), len(chosen)),
            layer=self.attention if known else None,
            X=self.tokens(scope),
            norm=self.norm_before if known and scope == "norm+attention" else None,
            heads=chosen,
            certificate=certificate,
            memory=memory,
            typical=typical,
        )
        real = self.recorded.real
        return found if real is None else per_real_token(found, real)

    def rows(
        self,
        scope: str = "attention",
        *,
        heads: Sequence[int] | None = None,
        solver: Solver | None = None,
        certificate: Certificate = None,
        memory: int | None = None,
        typical: bool | None = None,
        first_input: int = 0,
    ) -> list[dict[str, Any]]:
        """Rows with the columns of ``lipscope.measure.columns``: σ, bounds, and what attention looks like there.

        ``first_input`` is the index of the recording's first input among those of its length; the rest as for ``sigma``.
        """
        model, real = self.model, self.recorded.real
        shape: dict[str, Tensor] = {}
        if scope in LAYER_SCOPES:
            if model.stream is not None:  # what comes after attention is not called again
                model.stream.release(but=self.layer.host)
            shape = self.statistics
        start = time.perf_counter()
        how: dict[str, Any] = {"solver": solver, "certificate": certificate, "memory": memory, "typical": typical}
        measured = self.sigma(scope, heads=heads, **how).to_rows()
        seconds = (time.perf_counter() - start) / len(measured)
        chosen = model.check_heads(self.index, heads) if scope == "head" else None
        radius_max, radius_rms, lengths = _token_norms(self.tokens(scope), real)
        anywhere, bounds = None, [dict[str, float | None]()] * len(measured)
        if scope in ("head", "attention"):
            anywhere = norm_radius(self.norm)
            if self.attention is not None:
                bounds = _bounds(self.attention, real, lengths, radius_max, anywhere, chosen)
        rows = []
        for row, bound in zip(measured, bounds, strict=True):
            b = row["input"]
            h = None if chosen is None else chosen[row["head"]]
            statistics = {
                name: float(values[b, h] if h is not None else values[b].mean() if name != "max_logit" else values[b].max())
                for name, values in shape.items()
            }
            about = {"model": model.name, "layer": self.index, "head": h, "n": lengths[b], "input": first_input + b}
            norms = {"radius_max": radius_max[b], "radius_rms": radius_rms[b], "radius_norm": anywhere}
            found = row | bound | statistics | about | norms | {"seconds": seconds, "notes": "; ".join(model.notes)}
            rows.append({name: found.get(name) for name in COLUMNS})
        return rows

    def _with_named_mask(self, attention: Attention) -> Attention:
        """The same map with a named mask where the tensor is one, so that bounds made for it apply at every length."""
        n = self.call.tokens.shape[1 if self.layer.batch_first else 0]
        mask = attention.mask
        assert isinstance(mask, Mask)
        additive = mask.additive(n)
        if additive is not None and bool(additive.any()):
            return attention
        candidates: list[Mask] = [Full(), Causal()]
        if self.layer.mask.startswith("window"):
            candidates.append(as_mask(self.layer.mask))
        if self.recorded.documents is not None:
            candidates.append(Packed(self.recorded.documents, causal=self.layer.causal))
        named = next((candidate for candidate in candidates if same_mask(candidate, mask, n)), None)
        return attention if named is None else attention.with_mask(named)


# Whose set bounds a row shows.
SOURCES = ("refined", "castin2024")


@lru_cache(maxsize=256)
def norm_radius(norm: Normalisation | None) -> float | None:
    """The largest norm a normalised token can have, None without normalisation."""
    return None if norm is None else norm.image_radius()


def _bounds(
    attention: Attention,
    real: Tensor | None,
    lengths: Sequence[int],
    radii: Sequence[float],
    anywhere: float | None,
    heads: Sequence[int] | None,
) -> list[dict[str, float | None]]:
    """Columns ``refined`` and ``castin2024``, and both with ``_global``, of every row, ordered (input, head).

    Each is the least of its source's set bounds that hold for the layer's mask and score rule, at the largest token norm of
    that input, and at the largest norm ``anywhere`` that the layer's normalisation can put out.
    """
    singles = [attention] if heads is None else [attention.each_head[h] for h in heads]
    rows = []
    known: dict[tuple[int, int], dict[str, float | None]] = {}
    for b, (length, radius) in enumerate(zip(lengths, radii, strict=True)):
        for which, layer in enumerate(singles):
            one = layer if real is None else layer.for_input(b)
            # Padded, real tokens may stand at any position, so that all offsets of the sequence count.
            n = length if real is None or one.rotary is None else real.shape[1]
            # Without padding all inputs of a recording have the same length and mask.
            key = (which, 0 if real is None else b)
            if anywhere is not None and key not in known:
                known[key] = {f"{source}_global": least(source, one, anywhere, n) for source in SOURCES}
            rows.append({source: least(source, one, radius, n) for source in SOURCES} | known.get(key, {}))
    return rows


def per_real_token(result: SpectralNorm, real: Tensor) -> SpectralNorm:
    """With the typical gain of the tokens that are ``real`` (B, n): padding, which moves nothing, is no input."""
    share = real.double().mean(1).sqrt().reshape(-1, *[1] * (len(result.batch_shape) - 1))
    gains: dict[str, Any] = {name: value / share for name in SIZES[:3] if isinstance(value := getattr(result, name), Tensor)}
    return dataclasses.replace(result, **gains)


def _token_norms(tokens: Tensor, real: Tensor | None) -> tuple[list[float], list[float], list[int]]:
    norms = tokens.norm(dim=-1)
    seen = [row if real is None else row[real[b]] for b, row in enumerate(norms)]
    rms = [float(row.square().mean().sqrt()) for row in seen]
    return [float(row.max()) for row in seen], rms, [row.numel() for row in seen]
