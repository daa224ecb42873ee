"""From a recorded forward pass to rows: one row per layer, head and input, each with its interval and its circumstances."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.attention.row_statistics import row_statistics
from lipscope.measure.columns import COLUMNS
from lipscope.models.affine import core_call
from lipscope.models.bound_columns import NO_BOUNDS, bound_columns, norm_radius
from lipscope.models.capture import Recording
from lipscope.models.model import Model
from lipscope.models.scopes import scope_tokens
from lipscope.spectral.solvers import Solver


def measure_recording(
    handle: Model,
    recording: Recording,
    *,
    layer: int,
    scope: str = "attention",
    heads: Sequence[int] | None = None,
    solver: Solver | None = None,
    certificate: bool | None = None,
    memory: int | None = None,
    first_input: int = 0,
) -> list[dict[str, Any]]:
    """Rows of one layer, with the columns of ``COLUMNS``: σ as an interval, bounds, and what attention looks like there.

    Args:
        handle: the model.
        recording: a recorded forward pass.
        layer: index of the layer.
        scope: what to measure.
        heads: head indices for scope ``head``, all by default.
        solver: ``Auto()`` by default.
        certificate: see ``Model.solve``.
        memory: likewise.
        first_input: index of the recording's first input among those of its length.
    """
    start = time.perf_counter()
    result = handle.solve(layer, recording, scope, heads=heads, solver=solver, certificate=certificate, memory=memory)
    measured = result.to_rows()
    seconds = (time.perf_counter() - start) / len(measured)
    where = handle.layer(layer)
    chosen = handle.check_heads(layer, heads) if scope == "head" else None
    radius_max, radius_rms, lengths = _token_norms(scope_tokens(where, recording, scope), recording.real)
    shape = attention_statistics(handle, layer, recording) if scope in ("head", "attention", "norm+attention") else {}
    anywhere, bounds = None, [NO_BOUNDS] * len(measured)
    if scope in ("head", "attention"):
        anywhere = norm_radius(handle.normalisation(layer, recording))
        attention = handle.attention(layer, recording)
        if attention is not None:
            bounds = bound_columns(attention, recording, lengths, radius_max, anywhere, chosen)
    rows = []
    for row, bound in zip(measured, bounds, strict=True):
        b = row["input"]
        h = None if chosen is None else chosen[row["head"]]
        statistics = {
            name: float(values[b, h] if h is not None else values[b].mean() if name != "max_logit" else values[b].max())
            for name, values in shape.items()
        }
        found = row | bound | statistics | {
            "model": handle.name, "layer": where.index, "head": h, "n": lengths[b], "input": first_input + b,
            "radius_max": radius_max[b], "radius_rms": radius_rms[b], "radius_norm": anywhere, "seconds": seconds,
            "notes": "; ".join(handle.notes),
        }  # fmt: skip
        rows.append({name: found.get(name) for name in COLUMNS})
    return rows


def attention_statistics(handle: Model, layer: int, recording: Recording) -> dict[str, Tensor]:
    """Per input and head: mean row entropy (nats), largest logit, mean attention to the first token and to sinks.

    Empty when the model does not hand over its queries and keys.
    """
    where = handle.layer(layer)
    if where.through_seam:
        host = recording.hosts[where.index]
        call = core_call(handle.model, host, host.tokens, recording.documents)
        q, k, v, rule = call.q, call.k, call.v, call.rule
    elif isinstance(where.out, nn.MultiheadAttention):
        plain = handle.attention(layer, recording)
        assert plain is not None
        X = scope_tokens(where, recording, "attention")
        q, k, v = plain.project(X)
        rule = plain.score_rule(X.shape[1], X.shape[0], tiled=True)
    else:
        return {}
    B, _, n, _ = q.shape
    rows = torch.ones(B, n, dtype=torch.bool, device=q.device) if recording.real is None else recording.real
    weight = (rows / rows.sum(-1, keepdim=True))[:, None].to(q)
    found = row_statistics(q, k, v, rule, rows.int().argmax(-1))
    return {
        "entropy": (found.entropy * weight).sum(-1),
        "max_logit": found.max_logit.masked_fill(~rows[:, None], float("-inf")).amax(-1),
        "sink_mass": ((found.on_token + found.on_sink) * weight).sum(-1),
    }


def _token_norms(tokens: Tensor, real: Tensor | None) -> tuple[list[float], list[float], list[int]]:
    norms = tokens.norm(dim=-1)
    largest, rms, lengths = [], [], []
    for b in range(norms.shape[0]):
        seen = norms[b] if real is None else norms[b][real[b]]
        largest.append(float(seen.max()))
        rms.append(float(seen.square().mean().sqrt()))
        lengths.append(int(seen.numel()))
    return largest, rms, lengths
