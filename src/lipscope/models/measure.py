"""From a recorded forward pass to rows: one row per layer, head and input, each with its interval and its circumstances."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.attention.core import Linearisation, ungroup_queries
from lipscope.models.capture import Recording
from lipscope.models.handle import Model
from lipscope.models.plain import core_call
from lipscope.models.scopes import scope_tokens
from lipscope.spectral.norm import Solver


def measure_recording(
    handle: Model,
    recording: Recording,
    *,
    layer: int,
    scope: str = "attention",
    heads: Sequence[int] | None = None,
    solver: Solver | None = None,
    first_input: int = 0,
) -> list[dict[str, Any]]:
    """Rows of one layer: σ as an interval, token norms, and what attention looks like there."""
    start = time.perf_counter()
    result = handle.solve(layer, recording, scope, heads=heads, solver=solver)
    rows = result.to_rows()
    seconds = (time.perf_counter() - start) / len(rows)
    chosen = handle.check_heads(layer, heads) if scope == "head" else None
    radius_max, radius_rms, lengths = _token_norms(scope_tokens(handle.layer(layer), recording, scope), recording.real)
    shape = attention_statistics(handle, layer, recording) if scope in ("head", "attention", "norm+attention") else {}
    finished = []
    for row in rows:
        b = row["input"]
        h = None if chosen is None else chosen[row["head"]]
        statistics = {
            name: float(values[b, h] if h is not None else values[b].mean() if name != "max_logit" else values[b].max())
            for name, values in shape.items()
        }
        finished.append(
            {
                "model": handle.name, "layer": handle.layer(layer).index, "head": h, "scope": scope, "mask": row["mask"],
                "n": lengths[b], "input": first_input + b, "document": None,
                "lower": row["lower"], "estimate": row["estimate"], "upper": row["upper"],
                "upper_kind": row["upper_kind"], "delta": row["delta"],
                "radius_max": radius_max[b], "radius_rms": radius_rms[b],
                "entropy": statistics.get("entropy"), "max_logit": statistics.get("max_logit"),
                "sink_mass": statistics.get("sink_mass"), "iterations": row["iterations"], "status": row["status"],
                "converged": row["converged"], "solver": row["solver"], "dtype": row["dtype"], "seconds": seconds,
                "notes": "; ".join(handle.notes),
            }
        )  # fmt: skip
    return finished


def attention_statistics(handle: Model, layer: int, recording: Recording) -> dict[str, Tensor]:
    """Per input and head: mean row entropy (nats), largest logit, mean attention to the first token and to sinks.

    Empty when the model does not hand over its queries and keys.
    """
    where = handle.layer(layer)
    if where.through_seam:
        host = recording.hosts[where.index]
        call = core_call(handle.model, host, host.tokens, recording.documents)
        core, rule, heads = Linearisation.at(call.q, call.k, call.v, call.rule), call.rule, call.q.shape[1]
    elif isinstance(where.out, nn.MultiheadAttention):
        plain = handle.attention(layer, recording)
        assert plain is not None
        X = scope_tokens(where, recording, "attention")
        core, rule, heads = plain.linearise(X), plain.score_rule(X.shape[1], X.shape[0]), plain.heads
    else:
        return {}
    P = ungroup_queries(core.P, heads)
    scores = ungroup_queries(core.q @ core.k.transpose(-1, -2), heads)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if rule.additive is not None:
        scores = scores + rule.additive
    B, H, n, _ = P.shape
    rows = torch.ones(B, n, dtype=torch.bool, device=P.device) if recording.real is None else recording.real
    weight = (rows / rows.sum(-1, keepdim=True))[:, None].to(P)
    entropy = -torch.special.xlogy(P, P).sum(-1)
    first = rows.int().argmax(-1)
    on_first = P.gather(-1, first[:, None, None, None].expand(B, H, n, 1))[..., 0]
    on_sink = (1 - P.sum(-1)).clamp_min(0) if rule.sinks is not None else torch.zeros_like(on_first)
    visible = (P > 0) & rows[:, None, :, None]
    return {
        "entropy": (entropy * weight).sum(-1),
        "max_logit": scores.masked_fill(~visible, float("-inf")).amax((-1, -2)),
        "sink_mass": ((on_first + on_sink) * weight).sum(-1),
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
