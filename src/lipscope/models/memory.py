"""How much memory σ of a model's layers takes beside its weights, known before the run starts.

Beside what ``measure.memory`` counts there is the recorded pass, 3 tensors per layer. For scopes that go through autograd,
the graph of a product and of its adjoint holds about 64 tensors of the size of the tokens around attention, and about 200
with the feed-forward part of a block, a second graph with other last digits included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lipscope.attention.masks import as_mask
from lipscope.attention.scores import ScoreRule
from lipscope.attention.tiled import current_tiling, using_tiling
from lipscope.attention.validation import derived
from lipscope.measure.memory import MemoryPlan, Shape, Strategy, first_fitting, read_bytes, solve_plan, strategies
from lipscope.models.anatomy import Layer
from lipscope.models.model import Model

# Tensors of the size of the tokens, per attention layer; fitted to measured peaks.
ATTENTION_ACTIVATIONS, BLOCK_ACTIVATIONS = 64, 200
RECORDED = 3
# What the heap of the C library keeps of a pass and its certificates, more or less from run to run; nothing under a limit.
HEAP = 6 << 20


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

    One tiling serves all layers, also where some have a sliding window and others not, so every strategy is charged with
    its most expensive layer, and with recording the rest. ``triplets`` singular vectors of either side are held per input.

    Raises:
        MemoryError: when ``memory`` is too small.

    Example:
        >>> import lipscope
        >>> print(plan_layers(lipscope.load("gpt2-mini"), 128, [0]))
        expected peak 18.2 MiB above the weights: n×n matrices 3.2 MiB, tokens 12 MiB, Krylov bases 3 MiB
    """
    limit = None if memory is None else read_bytes(memory)
    kinds = {_kind(handle, where): where for where in map(handle.layer, layers)}.values()
    shapes = [_shape(handle, scope, where, n) for where in kinds]
    every = {_kind(handle, where): where for where in handle.layers}.values()
    recorded = [_through_autograd(handle, "attention", where) for where in every]
    plans = []
    for strategy in strategies(inputs) if limit is not None else [Strategy(inputs, current_tiling())]:
        with using_tiling(strategy.tiling):
            each = [solve_plan(shape, n, strategy, scope, strategy.inputs * triplets) for shape in shapes]
            passing = max(solve_plan(shape, n, strategy).matrices for shape in recorded)
        worst = max(each, key=lambda plan: plan.fixed)
        plans.append(
            replace(
                worst,
                matrices=max(worst.matrices, passing),
                tokens=worst.tokens + recorded_bytes(handle, n, strategy.inputs),
                bases=max(plan.bases for plan in each),
            )
        )
    if limit is None:
        return replace(plans[0], tokens=plans[0].tokens + HEAP)
    vector = n * max(shape.width for shape in shapes) * handle.dtype.itemsize
    return first_fitting(plans, n, vector, limit)


def _shape(handle: Model, scope: str, where: Layer, n: int) -> Shape:
    """A layer in closed form where its scope and mask allow it, else through autograd; for n tokens."""
    attention = handle.probe_recording[where.index].attention if scope in ("attention", "head") else None
    if attention is None or not _named(where.mask):
        return _through_autograd(handle, scope, where)
    attention, bias = attention.with_mask(where.mask), attention.bias
    if bias is None:
        return Shape.of(attention, handle.dtype)
    # That of the probe is for its few tokens. One for n tokens comes with the recorded pass: it is charged for here.
    attention = derived(attention, bias=bias[..., :1, :1].expand(*bias.shape[:-2], n, n))
    return replace(Shape.of(attention, handle.dtype), additive=None)


def _through_autograd(handle: Model, scope: str, where: Layer) -> Shape:
    width, layers = token_width(handle, where), len(handle.layers) if scope == "model" else 1
    each = BLOCK_ACTIVATIONS if scope in ("block", "model") else ATTENTION_ACTIVATIONS
    softcap = handle.probe_recording[where.index].core().rule.softcap if where.through_seam else None
    rule = ScoreRule(mask=as_mask(where.mask if _named(where.mask) else None), softcap=softcap)
    return Shape(
        width=width,
        output_width=width,
        heads=where.heads,
        kv_heads=where.kv_heads or where.heads,
        key_width=width // where.heads,
        value_width=width // where.heads,
        dtype=handle.dtype,
        rule=lambda n, inputs: rule,
        activations=each * layers,
        layers=layers,
        # A model that keeps its own attention forms its n×n matrices whatever we do.
        tileable=where.through_seam,
    )


def _kind(handle: Model, where: Layer) -> tuple[object, ...]:
    """What the cost of a layer depends on."""
    return where.mask, where.heads, where.kv_heads, where.through_seam, token_width(handle, where)


def _named(mask: str) -> bool:
    return mask in ("full", "causal") or mask.startswith("window")


def batch_size(n: int, inputs: int, batch_tokens: int = 4096, pack: bool = False, asked: int = 0) -> int:
    """Inputs of n tokens in one forward pass of a scan: as many as are asked for, else as hold so many tokens."""
    return 1 if pack else min(inputs, asked or max(1, batch_tokens // n))


def recorded_bytes(handle: Model, n: int, inputs: int = 1) -> int:
    """Bytes of a recorded pass of so many inputs of n tokens."""
    width = max(token_width(handle, layer) for layer in handle.layers)
    return RECORDED * len(handle.every) * inputs * n * width * handle.dtype.itemsize


def token_width(handle: Model, layer: Layer) -> int:
    """Width d of the tokens that a layer's attention sees."""
    return int(handle.probe_recording.hosts[layer.index].tokens.shape[-1])
