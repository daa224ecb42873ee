"""How much memory one σ of a layer takes beside its weights, known before the run starts.

Beside the n×n matrices (or the tiles that stand for them) a solve holds a few copies of the projections and of the tokens,
and the Krylov bases, of which the solver keeps what it is given room for:

    peak ≈ bytes per number · n·( 3·(dq + dk + dv) + 4·heads·dv + 10·d ) + matrices + bases

(dq, dk, dv: widths over all heads). The counts are those of ``attention.cost``, fitted to measured peaks. Singular vectors
that a solver is asked for, or takes out to find the next ones, count twice: they are copied to be handed over.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.scores import ScoreRule
from lipscope.attention.tiled import SMALL, Tiling, current_tiling, exponentials, prefers_tiles, using_tiling
from lipscope.attention.tiles import visited_entries
from lipscope.measure.cost import OUTPUTS, PROJECTIONS, TOKENS, TYPICAL_PAIRS
from lipscope.rounding import show_bytes
from lipscope.spectral.basis import FEWEST, one_sided, together_within

# Where autograd computes the products: blocks keep activations for the backward pass.
AUTOGRAD_SCOPES = ("norm+attention", "attention+residual", "block", "model")
# Vectors of the Krylov bases that a typical solve needs.
TYPICAL_VECTORS = 24
# What the solver takes for its bases when nobody limits it.
SOLVER_ROOM = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one batch of σ is expected to take, and how it keeps to them.

    Attributes:
        matrices: n×n matrices, or tiles and what is kept of them.
        tokens: copies of tokens and projections.
        bases: Krylov bases.
        vectors: singular vectors beside them, where several are looked for or they are asked for.
        tiled: whether n×n matrices are avoided.
        tiling: sizes of the tiles.
        alone: inputs are measured one after the other.
        room: most bytes for Krylov bases; the solver's ``memory``.
    """

    matrices: int
    tokens: int
    bases: int
    vectors: int
    tiled: bool
    tiling: Tiling
    alone: bool
    room: int

    @property
    def total(self) -> int:
        """Expected peak above the weights."""
        return self.fixed + self.bases

    @property
    def fixed(self) -> int:
        """All of it but the bases, which are made to fit."""
        return self.matrices + self.tokens + self.vectors

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside, products are computed as planned."""
        with using_tiling(self.tiling):
            yield

    def __str__(self) -> str:
        kind = "tiles" if self.tiled else "n×n matrices"
        vectors = f", singular vectors {show_bytes(self.vectors)}" if self.vectors else ""
        return (
            f"expected peak {show_bytes(self.total)} above the weights: {kind} {show_bytes(self.matrices)}, "
            f"tokens {show_bytes(self.tokens)}, Krylov bases {show_bytes(self.bases)}{vectors}"
        )


def plan_memory(
    layer: Attention,
    n: int,
    *,
    dtype: torch.dtype = torch.float32,
    inputs: int = 1,
    limit: int | None = None,
    scope: str = "attention",
    triplets: int = 0,
) -> MemoryPlan:
    """What one batch of σ at n tokens takes, and how to stay within ``limit`` bytes.

    When memory is short, in this order: inputs one after the other, tiles instead of n×n matrices, no kept exponentials,
    smaller tiles, fewer Krylov vectors.

    Args:
        layer: the layer.
        n: number of tokens.
        dtype: dtype of the computation.
        inputs: sequences in the batch.
        limit: bytes that may be used above the weights.
        scope: ``"attention"`` or ``"norm+attention"``, or ``"head"``.
        triplets: singular vectors of either side that are held per input; see ``spectral.norm.triplets``.

    Returns:
        The plan; give ``plan.room`` to the solver as its ``memory``, and compute inside ``plan.in_force()``.

    Raises:
        MemoryError: when ``limit`` is too small even for the fewest vectors.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(768)
        >>> layer = lipscope.Attention(q=W, k=W, v=W, out=W, heads=12, mask="causal")
        >>> print(plan_memory(layer, 4096))
        expected peak 596 MiB above the weights: tiles 32 MiB, tokens 276 MiB, Krylov bases 288 MiB
    """
    returned = inputs * triplets
    if limit is None:
        return _plan(layer, n, dtype, inputs, scope, current_tiling(), SOLVER_ROOM, returned)
    candidates = [
        _plan(layer, n, dtype, together, scope, tiling, SOLVER_ROOM, returned, alone=alone)
        for together, alone, tiling in ways(inputs)
    ]
    return first_fitting(candidates, n, _vector(layer, n, scope) * torch.finfo(dtype).bits // 8, limit)


def first_fitting(plans: Sequence[MemoryPlan], n: int, vector: int, limit: int) -> MemoryPlan:
    """The first plan whose usual bases fit into ``limit`` bytes beside the rest, else the first whose fewest vectors do.

    Args:
        plans: ways to do it, the fastest first.
        n: number of tokens, for the refusal.
        vector: bytes of one Krylov vector.
        limit: bytes that may be used.

    Raises:
        MemoryError: when nothing fits.
    """
    for enough in (TYPICAL_VECTORS, FEWEST):
        for plan in plans:
            left = limit - plan.fixed
            if left >= enough * vector:
                return replace(plan, bases=min(plan.bases, left), room=min(plan.room, left))
    least = min(plan.fixed for plan in plans) + FEWEST * vector
    raise MemoryError(
        f"n = {n} tokens need at least {show_bytes(least)} above the weights, but memory is limited to {show_bytes(limit)}"
    )


def ways(inputs: int) -> Iterator[tuple[int, bool, Tiling]]:
    """Inputs together, whether that is one after the other, and tilings; the fastest way first."""
    usual = current_tiling()
    if inputs > 1:
        yield inputs, False, usual
    alone = inputs > 1
    for tiling in (usual, replace(usual, dense=0), replace(usual, dense=0, keep=0), SMALL):
        yield 1, alone, tiling


def _vector(layer: Attention, n: int, scope: str) -> int:
    """Numbers of one Krylov vector: the tokens, or the reduced coordinates of one head."""
    width = layer.width
    return n * (min(width, 2 * layer.head_width + layer.value_width) if scope == "head" else width)


def _plan(
    layer: Attention,
    n: int,
    dtype: torch.dtype,
    inputs: int,
    scope: str,
    tiling: Tiling,
    room: int,
    triplets: int,
    alone: bool = False,
) -> MemoryPlan:
    size = torch.finfo(dtype).bits // 8
    rows = layer.q.shape[0] + layer.k.shape[0] + layer.v.shape[0]
    items = inputs
    if scope == "head":
        items, rows = inputs * layer.heads, layer.heads * (2 * layer.head_width + layer.value_width)
    N, M = _vector(layer, n, scope), n * (layer.value_width if scope == "head" else layer.output_width)
    vectors = triplet_bytes(triplets * (items // inputs), M + n * layer.width, size)
    held = PROJECTIONS * rows + OUTPUTS * layer.heads * layer.value_width
    tokens = inputs * n * size * held + TOKENS * items * N * size
    rule = (layer.for_input(0) if inputs == 1 else layer).score_rule(n, inputs, tiled=True)
    heads = inputs * layer.heads
    with using_tiling(tiling):
        tiled = prefers_tiles(rule, heads, n, n, torch.empty(0, dtype=dtype))
    matrices = matrix_bytes(tiling, tiled, rule, heads, n, layer.heads // layer.kv_heads, size, several=items > 1)
    if rule.additive is not None and (layer.bias is None or not _same_storage(rule.additive, layer.bias)):
        # Read off an additive mask, with what it hides beside it.
        matrices += rule.additive.numel() * (size + 1)
    bases = typical_bases((M, N), items, size, room)
    return MemoryPlan(matrices, tokens, bases, vectors, tiled, tiling, alone, room)


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def triplet_bytes(triplets: int, numbers: int, element_size: int) -> int:
    """Bytes of so many singular vectors of both sides together, and of a copy."""
    return 2 * triplets * numbers * element_size


def typical_bases(shape: tuple[int, int], items: int, element_size: int, room: int) -> int:
    """Bytes of the Krylov bases of a typical solve of M×N problems: both bases where both are kept, else the right one."""
    M, N = shape
    together = min(items, together_within(shape, element_size, room))
    if one_sided(shape, together, element_size, room):
        return min(TYPICAL_VECTORS * together * N * element_size, room)
    return (TYPICAL_PAIRS + 1) * together * (M + N) * element_size


def matrix_bytes(
    tiling: Tiling,
    tiled: bool,
    rule: ScoreRule,
    heads: int,
    n: int,
    groups: int,
    element_size: int,
    *,
    several: bool = False,
) -> int:
    """Bytes of the n×n matrices of so many ``heads`` (over all inputs), or of tiles and what is kept of them.

    Args:
        tiling: sizes of the tiles.
        tiled: whether there are tiles.
        rule: mask and soft-cap.
        heads: query heads times inputs.
        n: number of tokens.
        groups: query heads per key head.
        element_size: bytes per number.
        several: whether several items are solved together; those that take longer are copied when others are done.
    """
    if not tiled:
        # Raw scores, probabilities and two on their way; with a soft-cap also its values, slope and weights.
        return (1 + 3 * exponentials(rule.softcap)) * heads * n * n * element_size
    kept = exponentials(rule.softcap) * heads * visited_entries(rule, n, n) * element_size
    if kept > tiling.keep:
        kept = 0
    elif several:
        # The caller's, those of a copy with at most three quarters of them, and those of the next copy.
        kept = kept * 37 // 16
    return tiling.scratch(groups, element_size) + kept


_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def read_bytes(size: float | str) -> int:
    """A size such as ``4GiB``, ``512 MiB`` or ``2.5gb`` in bytes; a number is one already.

    Raises:
        TypeError: when it is neither a number nor text.
        ValueError: when it is not a positive, whole number of bytes.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", size)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"memory must be a size such as 4GiB or 512MiB, got {size!r}")
        count = int(float(match[1]) * _UNITS[match[2].lower()])
    elif isinstance(size, bool) or not hasattr(size, "__float__"):
        raise TypeError(f"memory must be a number of bytes or a size such as 4GiB, got {size!r}")
    elif not math.isfinite(size) or size != int(size):
        raise ValueError(f"memory must be a whole number of bytes, got {size!r}")
    else:
        count = int(size)
    if count < 1:
        raise ValueError(f"memory must be at least 1 byte, got {size!r}")
    return count
