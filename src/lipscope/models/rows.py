"""From a layer at recorded tokens to rows: one per head and input, each with its interval and its circumstances.

Beside σ stand set bounds: how large σ could be for any tokens as long as these, and for any input of the model at all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.norms import Normalisation
from lipscope.bounds.registry import least
from lipscope.measure.columns import COLUMNS

if TYPE_CHECKING:
    from lipscope.models.recorded import RecordedLayer

# Whose set bounds a row shows.
SOURCES = ("refined", "castin2024")


def layer_rows(layer: RecordedLayer, scope: str, *, first_input: int = 0, **how: Any) -> list[dict[str, Any]]:
    """Rows of one layer with the columns of ``COLUMNS``; ``how`` goes to ``RecordedLayer.sigma``."""
    model, real = layer.model, layer.recorded.real
    looked_at = scope in ("head", "attention", "norm+attention")
    if looked_at:
        layer.observe()
    start = time.perf_counter()
    measured = layer.sigma(scope, **how).to_rows()
    seconds = (time.perf_counter() - start) / len(measured)
    chosen = model.check_heads(layer.index, how.get("heads")) if scope == "head" else None
    radius_max, radius_rms, lengths = _token_norms(layer.tokens(scope), real)
    shape = layer.statistics if looked_at else {}
    anywhere, bounds = None, [dict[str, float | None]()] * len(measured)
    if scope in ("head", "attention"):
        anywhere = norm_radius(layer.norm)
        if layer.attention is not None:
            bounds = _bounds(layer.attention, real, lengths, radius_max, anywhere, chosen)
    rows = []
    for row, bound in zip(measured, bounds, strict=True):
        b = row["input"]
        h = None if chosen is None else chosen[row["head"]]
        statistics = {
            name: float(values[b, h] if h is not None else values[b].mean() if name != "max_logit" else values[b].max())
            for name, values in shape.items()
        }
        about = {"model": model.name, "layer": layer.index, "head": h, "n": lengths[b], "input": first_input + b}
        norms = {"radius_max": radius_max[b], "radius_rms": radius_rms[b], "radius_norm": anywhere}
        found = row | bound | statistics | about | norms | {"seconds": seconds, "notes": "; ".join(model.notes)}
        rows.append({name: found.get(name) for name in COLUMNS})
    return rows


def norm_radius(norm: Normalisation | None) -> float | None:
    """The largest norm a normalised token can have, None without normalisation."""
    if norm is None:
        return None
    if norm not in _RADII:
        _RADII[norm] = norm.image_radius()
    return _RADII[norm]


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
    singles = [attention] if heads is None else [_heads(attention)[h] for h in heads]
    rows = []
    known: dict[tuple[str, int, int], float | None] = {}
    for b, (n, radius) in enumerate(zip(lengths, radii, strict=True)):
        for which, layer in enumerate(singles):
            one = layer if real is None else layer.for_input(b)
            if real is not None and one.rotary is not None:
                # Real tokens may stand at any position, so that all offsets of the padded sequence count.
                n = real.shape[1]
            columns: dict[str, float | None] = {}
            for source in SOURCES:
                columns[source] = least(source, one, radius, n)
                # Without padding all inputs of a recording have the same length and mask.
                key = (source, which, 0 if real is None else b)
                if anywhere is not None and key not in known:
                    known[key] = least(source, one, anywhere, n)
                columns[f"{source}_global"] = known.get(key)
            rows.append(columns)
    return rows


def _heads(attention: Attention) -> list[Attention]:
    """The heads alone, the same objects every time: bounds keep the norms of a layer's weights."""
    if attention not in _HEADS:
        _HEADS[attention] = [attention.head(h) for h in range(attention.heads)]
    return _HEADS[attention]


_RADII: WeakKeyDictionary[Normalisation, float] = WeakKeyDictionary()
_HEADS: WeakKeyDictionary[Attention, list[Attention]] = WeakKeyDictionary()


def _token_norms(tokens: Tensor, real: Tensor | None) -> tuple[list[float], list[float], list[int]]:
    norms = tokens.norm(dim=-1)
    largest, rms, lengths = [], [], []
    for b in range(norms.shape[0]):
        seen = norms[b] if real is None else norms[b][real[b]]
        largest.append(float(seen.max()))
        rms.append(float(seen.square().mean().sqrt()))
        lengths.append(int(seen.numel()))
    return largest, rms, lengths
