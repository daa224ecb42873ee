"""How much memory σ of a model's layers takes beside its weights, known before the run starts.

Beside what ``attention.memory`` counts there is the recorded pass, 3 tensors per layer, and for scopes that go through
autograd what their blocks keep for the backward pass, about 34 tensors of the size of the tokens per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lipscope.attention.masks import as_mask
from lipscope.attention.memory import (
    SOLVER_ROOM,
    MemoryPlan,
    first_fitting,
    matrix_bytes,
    plan_memory,
    read_bytes,
    typical_bases,
    ways,
)
from lipscope.attention.scores import ScoreRule
from lipscope.attention.tiled import prefers_tiles
from lipscope.attention.tiles import visited_entries
from lipscope.attention.tiling import Tiling, current_tiling, using_tiling
from lipscope.models.handle import Model

AUTOGRAD_SCOPES = ("norm+attention", "attention+residual", "block", "model")
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
        expected peak 10.6 MiB above the weights: n×n matrices 2 MiB, tokens 3.88 MiB, Krylov bases 4.75 MiB
    """
    where, width, size = handle.layer(layer), token_width(handle, layer), handle.dtype.itemsize
    recorded = RECORDED * len(handle.layers) * n * width * size
    attention = handle.attention(layer, handle.probe_recording) if scope in ("attention", "head") else None
    if attention is not None and not _named(where.mask):
        attention = None
    plans = []
    for together, alone, tiling in ways(inputs) if limit is not None else [(inputs, False, current_tiling())]:
        with using_tiling(tiling):
            if attention is not None:
                plan = plan_memory(attention.with_mask(where.mask), n, dtype=handle.dtype, inputs=together, scope=scope)
            else:
                plan = _through_autograd(handle, n, together, scope, layer, tiling)
        plans.append(replace(plan, tokens=plan.tokens + together * recorded, alone=alone, tiling=tiling))
    if limit is None:
        return plans[0]
    return first_fitting(plans, n, n * width * size, limit)


def plan_layers(
    handle: Model,
    n: int,
    layers: Sequence[int],
    *,
    inputs: int = 1,
    scope: str = "attention",
    memory: int | str | None = None,
) -> MemoryPlan:
    """The plan of the layer that takes most among the listed ones, within ``memory`` (bytes, or a size such as "4GiB")."""
    limit = None if memory is None else read_bytes(memory)
    kinds = {(where.mask, where.heads, where.kv_heads): i for i in layers for where in [handle.layer(i)]}
    plans = [plan_scan(handle, n, inputs=inputs, scope=scope, limit=limit, layer=i) for i in kinds.values()]
    return max(plans, key=lambda plan: (plan.alone, plan.total))


def batch_size(n: int, inputs: int, batch_tokens: int = 4096, pack: bool = False) -> int:
    """Inputs of n tokens in one forward pass of a scan."""
    return 1 if pack else min(inputs, max(1, batch_tokens // n))


def token_width(handle: Model, layer: int) -> int:
    """Width d of the tokens that a layer's attention sees."""
    return int(handle.probe_recording.hosts[handle.layer(layer).index].tokens.shape[-1])


def _through_autograd(handle: Model, n: int, inputs: int, scope: str, layer: int, tiling: Tiling) -> MemoryPlan:
    where, width, size = handle.layer(layer), token_width(handle, layer), handle.dtype.itemsize
    layers = len(handle.layers) if scope == "model" else 1
    mask = as_mask(where.mask) if _named(where.mask) else as_mask(None)
    rule, heads = ScoreRule(mask=mask), inputs * where.heads
    # A model that keeps its own attention forms its n×n matrices whatever we do.
    tiled = where.through_seam and prefers_tiles(rule, heads, n, n, handle.probe_recording.last_hidden)
    groups = where.heads // (where.kv_heads or where.heads)
    matrices = matrix_bytes(tiling, tiled, heads * visited_entries(rule, n, n), heads * n * n, groups, size)
    vectors = inputs * n * width * size
    tokens = (BLOCK_ACTIVATIONS * layers + 6) * vectors
    bases = typical_bases(vectors, vectors, SOLVER_ROOM)
    return MemoryPlan(layers * matrices, tokens, bases, tiled, tiling, False, SOLVER_ROOM)


def _named(mask: str) -> bool:
    return mask in ("full", "causal") or mask.startswith("window")
