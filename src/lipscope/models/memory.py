"""How much memory σ of a model's layers takes beside its weights, known before the run starts.

Beside what ``attention.memory`` counts there is the recorded pass, 3 tensors per layer, and for scopes that go through
autograd what their blocks keep for the backward pass, about 34 tensors of the size of the tokens per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lipscope.attention.masks import as_mask
from lipscope.attention.scores import ScoreRule
from lipscope.attention.tiled import Tiling, current_tiling, prefers_tiles, using_tiling
from lipscope.measure.memory import (
    SOLVER_ROOM,
    MemoryPlan,
    first_fitting,
    matrix_bytes,
    plan_memory,
    read_bytes,
    triplet_bytes,
    typical_bases,
    ways,
)
from lipscope.models.affine import core_call
from lipscope.models.model import Model

BLOCK_ACTIVATIONS = 34
RECORDED = 3


def plan_scan(
    handle: Model, n: int, *, inputs: int = 1, scope: str = "attention", limit: int | None = None, layer: int = 0
) -> MemoryPlan:
    """What σ of one layer at n tokens takes in a scan, within ``limit`` bytes; see ``plan_memory``.

    Args:
        handle: the model.
        n: number of tokens.
        inputs: sequences in one forward pass.
        scope: what is measured.
        limit: bytes that may be used above the weights.
        layer: index of the layer.

    Returns:
        The plan; ``alone`` means one input per forward pass.

    Raises:
        MemoryError: when ``limit`` is too small.

    Example:
        >>> import lipscope
        >>> print(plan_scan(lipscope.load("gpt2-mini"), 128))
        expected peak 9.38 MiB above the weights: n×n matrices 2 MiB, tokens 4.38 MiB, Krylov bases 3 MiB
    """
    plans = _ways_of(handle, n, inputs, scope, layer, limited=limit is not None)
    return plans[0] if limit is None else first_fitting(plans, n, _vector(handle, n, layer), limit)


def plan_layers(
    handle: Model,
    n: int,
    layers: Sequence[int],
    *,
    inputs: int = 1,
    scope: str = "attention",
    memory: float | str | None = None,
    triplets: int = 0,
) -> MemoryPlan:
    """One plan for all of the listed layers, within ``memory`` (bytes, or a size such as "4GiB").

    Layers of several kinds, say with and without a sliding window, are computed with the same tiling, so a way of doing it
    counts with what it takes for the layer that takes most, and for recording those that are not listed. ``triplets``
    singular vectors of either side are held per input.
    """
    limit = None if memory is None else read_bytes(memory)
    kinds = {_kind(handle, i): i for i in layers}.values()
    each = [_ways_of(handle, n, inputs, scope, i, triplets, limited=limit is not None) for i in kinds]
    recorded = {_kind(handle, i): i for i in range(len(handle.layers))}.values()
    plans = []
    for same_way in zip(*each, strict=True):
        worst = max(same_way, key=lambda plan: plan.fixed)
        together = 1 if worst.alone else inputs
        passing = max(_through_autograd(handle, n, together, "attention", i, worst.tiling).matrices for i in recorded)
        bases = max(plan.bases for plan in same_way)
        plans.append(replace(worst, matrices=max(worst.matrices, passing), bases=bases))
    return plans[0] if limit is None else first_fitting(plans, n, max(_vector(handle, n, i) for i in kinds), limit)


def _ways_of(
    handle: Model, n: int, inputs: int, scope: str, layer: int, triplets: int = 0, *, limited: bool
) -> list[MemoryPlan]:
    """What σ of one layer takes by every way of doing it; only by the usual one when memory is not limited."""
    where = handle.layer(layer)
    attention = handle.probe_recording[layer].attention if scope in ("attention", "head") else None
    if attention is not None and not _named(where.mask):
        attention = None
    plans = []
    for together, alone, tiling in ways(inputs) if limited else [(inputs, False, current_tiling())]:
        with using_tiling(tiling):
            if attention is not None:
                same_mask = attention.with_mask(where.mask)
                plan = plan_memory(same_mask, n, dtype=handle.dtype, inputs=together, scope=scope, triplets=triplets)
            else:
                plan = _through_autograd(handle, n, together, scope, layer, tiling, triplets)
        tokens = plan.tokens + recorded_bytes(handle, n, together)
        plans.append(replace(plan, tokens=tokens, alone=alone, tiling=tiling))
    return plans


def _kind(handle: Model, layer: int) -> tuple[object, ...]:
    """What the cost of a layer depends on."""
    where = handle.layer(layer)
    return where.mask, where.heads, where.kv_heads, where.through_seam, token_width(handle, layer)


def _vector(handle: Model, n: int, layer: int) -> int:
    """Bytes of one Krylov vector."""
    return n * token_width(handle, layer) * handle.dtype.itemsize


def batch_size(n: int, inputs: int, batch_tokens: int = 4096, pack: bool = False) -> int:
    """Inputs of n tokens in one forward pass of a scan."""
    return 1 if pack else min(inputs, max(1, batch_tokens // n))


def recorded_bytes(handle: Model, n: int, inputs: int = 1) -> int:
    """Bytes of a recorded pass of so many inputs of n tokens."""
    width = max(token_width(handle, i) for i in range(len(handle.layers)))
    return RECORDED * len(handle.layers) * inputs * n * width * handle.dtype.itemsize


def token_width(handle: Model, layer: int) -> int:
    """Width d of the tokens that a layer's attention sees."""
    return int(handle.probe_recording.hosts[handle.layer(layer).index].tokens.shape[-1])


def _through_autograd(
    handle: Model, n: int, inputs: int, scope: str, layer: int, tiling: Tiling, triplets: int = 0
) -> MemoryPlan:
    where, width, size = handle.layer(layer), token_width(handle, layer), handle.dtype.itemsize
    layers = len(handle.layers) if scope == "model" else 1
    mask = as_mask(where.mask) if _named(where.mask) else as_mask(None)
    rule, heads = ScoreRule(mask=mask, softcap=_softcap(handle, layer)), inputs * where.heads
    # A model that keeps its own attention forms its n×n matrices whatever we do.
    with using_tiling(tiling):
        tiled = where.through_seam and prefers_tiles(rule, heads, n, n, handle.probe_recording.last_hidden)
    groups = where.heads // (where.kv_heads or where.heads)
    matrices = matrix_bytes(tiling, tiled, rule, heads, n, groups, size)
    tokens = (BLOCK_ACTIVATIONS * layers + 6) * inputs * n * width * size
    bases = typical_bases((n * width, n * width), inputs, size, SOLVER_ROOM)
    vectors = triplet_bytes(inputs * triplets, 2 * n * width, size)
    return MemoryPlan(layers * matrices, tokens, bases, vectors, tiled, tiling, False, SOLVER_ROOM)


def _softcap(handle: Model, layer: int) -> float | None:
    where = handle.layer(layer)
    if not where.through_seam:
        return None
    host = handle.probe_recording.hosts[where.index]
    return core_call(handle.model, host, host.tokens).rule.softcap


def _named(mask: str) -> bool:
    return mask in ("full", "causal") or mask.startswith("window")
