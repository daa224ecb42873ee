"""From a layer at recorded tokens to rows: one per head and input, each with its interval and its circumstances."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lipscope.measure.columns import COLUMNS
from lipscope.models.bound_columns import NO_BOUNDS, bound_columns, norm_radius

if TYPE_CHECKING:
    from lipscope.models.recorded import RecordedLayer


def layer_rows(layer: RecordedLayer, scope: str, *, first_input: int = 0, **how: Any) -> list[dict[str, Any]]:
    """Rows of one layer with the columns of ``COLUMNS``; ``how`` goes to ``RecordedLayer.sigma``."""
    recorded, model = layer.recorded, layer.model
    looked_at = scope in ("head", "attention", "norm+attention")
    if looked_at:
        layer.observe()
    start = time.perf_counter()
    measured = layer.sigma(scope, **how).to_rows()
    seconds = (time.perf_counter() - start) / len(measured)
    chosen = model.check_heads(layer.index, how.get("heads")) if scope == "head" else None
    radius_max, radius_rms, lengths = _token_norms(layer.tokens(scope), recorded.real)
    shape = layer.statistics if looked_at else {}
    anywhere, bounds = None, [NO_BOUNDS] * len(measured)
    if scope in ("head", "attention"):
        anywhere = norm_radius(layer.norm)
        if layer.attention is not None:
            bounds = bound_columns(layer.attention, recorded, lengths, radius_max, anywhere, chosen)
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


def _token_norms(tokens: Tensor, real: Tensor | None) -> tuple[list[float], list[float], list[int]]:
    norms = tokens.norm(dim=-1)
    largest, rms, lengths = [], [], []
    for b in range(norms.shape[0]):
        seen = norms[b] if real is None else norms[b][real[b]]
        largest.append(float(seen.max()))
        rms.append(float(seen.square().mean().sqrt()))
        lengths.append(int(seen.numel()))
    return largest, rms, lengths
