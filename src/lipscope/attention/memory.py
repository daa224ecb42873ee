"""How much memory one σ of a layer takes beside its weights, known before the run starts.

Beside the n×n matrices (or the tiles that stand for them) a solve holds a few copies of the projections and of the tokens,
and the Krylov bases, of which the solver keeps what it is given room for:

    peak ≈ bytes per number · n·( 3·(dq + dk + dv) + 4·heads·dv + 6·d ) + matrices + bases

(dq, dk, dv: widths over all heads). The counts were fitted to measured peaks (benchmarks/long_context.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from lipscope.attention.layer import Attention
from lipscope.attention.tiled import KEEP, prefers_tiles
from lipscope.attention.tiles import visited_entries

# Vectors of the Krylov bases that a typical solve needs, and the fewest that the solver keeps.
TYPICAL_VECTORS, FEWEST_VECTORS = 24, 4
_TILES = 64 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one σ is expected to take.

    Attributes:
        matrices: n×n matrices, or tiles and what is kept of them.
        tokens: copies of tokens and projections.
        bases: Krylov bases.
        tiled: whether n×n matrices are avoided.
    """

    matrices: int
    tokens: int
    bases: int
    tiled: bool

    @property
    def total(self) -> int:
        """Expected peak above the weights."""
        return self.matrices + self.tokens + self.bases

    def __str__(self) -> str:
        kind = "tiles" if self.tiled else "n×n matrices"
        return (
            f"expected peak {show_bytes(self.total)} above the weights: {kind} {show_bytes(self.matrices)}, "
            f"tokens {show_bytes(self.tokens)}, Krylov bases {show_bytes(self.bases)}"
        )


def plan_memory(
    layer: Attention, n: int, *, dtype: torch.dtype = torch.float32, inputs: int = 1, limit: int | None = None
) -> MemoryPlan:
    """What one batch of σ at n tokens takes, within ``limit`` bytes by keeping fewer Krylov vectors if need be.

    Args:
        layer: the layer.
        n: number of tokens.
        dtype: dtype of the computation.
        inputs: sequences solved together.
        limit: bytes that may be used above the weights.

    Returns:
        The plan; give ``plan.bases`` to the solver as its ``memory``.

    Raises:
        MemoryError: when ``limit`` is too small even for the fewest vectors.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(768)
        >>> layer = lipscope.Attention(q=W, k=W, v=W, out=W, heads=12, mask="causal")
        >>> print(plan_memory(layer, 4096))
        expected peak 580 MiB above the weights: tiles 64 MiB, tokens 228 MiB, Krylov bases 288 MiB
    """
    size = torch.finfo(dtype).bits // 8
    rows = layer.q.shape[0] + layer.k.shape[0] + layer.v.shape[0]
    vector = inputs * n * layer.width * size
    tokens = inputs * n * size * (3 * rows + 4 * layer.heads * layer.value_width) + 6 * vector
    rule = layer.score_rule(n, inputs, tiled=True)
    heads = inputs * layer.heads
    tiled = prefers_tiles(rule, heads, n, n, torch.empty(0, dtype=dtype))
    visited = heads * size * visited_entries(rule, n, n)
    matrices = _TILES + (visited if visited <= KEEP else 0) if tiled else 4 * heads * n * n * size
    typical = TYPICAL_VECTORS * vector
    if limit is None or matrices + tokens + typical <= limit:
        return MemoryPlan(matrices, tokens, typical, tiled)
    left = limit - matrices - tokens
    if left < FEWEST_VECTORS * vector:
        least = matrices + tokens + FEWEST_VECTORS * vector
        raise MemoryError(
            f"n = {n} tokens need about {show_bytes(least)} above the weights, but memory is limited to {show_bytes(limit)}"
        )
    return MemoryPlan(matrices, tokens, left, tiled)


_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def read_bytes(text: str) -> int:
    """A size such as ``4GiB``, ``512 MiB`` or ``2.5gb`` in bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"memory must be a size such as 4GiB or 512MiB, got {text!r}")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def show_bytes(count: int) -> str:
    """Bytes for people, in binary units."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
