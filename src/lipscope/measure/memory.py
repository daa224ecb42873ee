"""How much memory one σ of a layer takes beside its weights, known before the run starts.

Beside the n×n matrices (or the tiles that stand for them) a solve holds a few copies of the projections and of the tokens,
and the Krylov bases, of which the solver keeps what it is given room for:

    peak ≈ bytes per number · n·( 3·(dq + dk + dv) + 4·heads·dv + 10·d ) + matrices + bases

(dq, dk, dv: widths over all heads). The counts are fitted to measured peaks. Where autograd computes the products, what it
keeps of the map takes the place of projections and outputs. Singular vectors that a solver is asked for, or takes out to
find the next ones, count twice: they are copied to be handed over.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.scores import ScoreRule
from lipscope.attention.tiled import SMALL, Tiling, current_tiling, exponentials, prefers_tiles, using_tiling
from lipscope.attention.tiles import visited_entries
from lipscope.measure.scopes import CROSS_SCOPES
from lipscope.rounding import show_bytes
from lipscope.spectral.basis import FEWEST, one_sided, together_within

# Where autograd computes the products: blocks keep activations for the backward pass.
AUTOGRAD_SCOPES = ("norm+attention", "attention+residual", "block", "model", *CROSS_SCOPES)
# Operator pairs of a typical solve: the mean over the inputs of benchmarks/local_lipschitz.py.
TYPICAL_PAIRS = 18
# Copies of the projections, of the heads' outputs and of the tokens at the peak of a solve; fitted to measurements.
_PROJECTIONS, _OUTPUTS, _TOKENS = 3, 4, 13
# Tensors of the size of the tokens that a product by autograd makes beside what is kept.
_STEP = 6
# Vectors of the Krylov bases that a typical solve needs.
TYPICAL_VECTORS = 24
# The C library's heap keeps holes between large blocks (n×n matrices, activations) that are freed and taken again: measured
# peaks were up to 1.5 times what the blocks hold, and differ by a third from run to run.
HOLES = 1.6
# What the solver takes for its bases when nobody limits it.
SOLVER_ROOM = 1 << 30
# Numbers of two settings of the GNU C library, and blocks from which on it never keeps what is freed.
_TRIM, _MMAP, _LARGE = -1, -3, 32 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one batch of σ is expected to take, and how it keeps to them."""

    matrices: int  # n×n matrices, or tiles and what is kept of them
    tokens: int  # copies of tokens and projections
    bases: int  # Krylov bases
    vectors: int  # singular vectors beside them, where several are looked for or they are asked for
    tiled: bool  # whether n×n matrices are avoided
    tiling: Tiling  # sizes of the tiles
    alone: bool  # inputs are measured one after the other
    room: int  # most bytes for Krylov bases; the solver's ``memory``

    @property
    def total(self) -> int:
        """Expected peak above the weights."""
        return self.fixed + self.bases

    @property
    def fixed(self) -> int:
        """All of it but the bases, which are made to fit."""
        return self.matrices + self.tokens + self.vectors

    def __str__(self) -> str:
        kind = "tiles" if self.tiled else "n×n matrices"
        vectors = f", singular vectors {show_bytes(self.vectors)}" if self.vectors else ""
        return (
            f"expected peak {show_bytes(self.total)} above the weights: {kind} {show_bytes(self.matrices)}, "
            f"tokens {show_bytes(self.tokens)}, Krylov bases {show_bytes(self.bases)}{vectors}"
        )


@dataclass(frozen=True)
class Shape:
    """What the memory of a solve depends on, beside the number of tokens."""

    width: int  # token dimension d
    output_width: int  # dimension of the outputs
    heads: int
    kv_heads: int
    key_width: int  # d_k of one head
    value_width: int  # d_v of one head
    dtype: torch.dtype
    rule: Callable[[int, int], ScoreRule]  # mask and soft-cap of so many tokens and inputs
    activations: int = 0  # tensors of the size of the tokens that autograd keeps; 0 for products in closed form
    layers: int = 1  # attention layers in the map
    tileable: bool = True  # whether n×n matrices can be avoided
    additive: Tensor | None = None  # an additive mask that the layer holds already, or None

    @classmethod
    def of(cls, layer: Attention, dtype: torch.dtype) -> Shape:
        """The shape of a layer whose products are computed in closed form."""

        def rule(n: int, inputs: int) -> ScoreRule:
            return (layer.for_input(0) if inputs == 1 else layer).score_rule(n, inputs, tiled=True)

        return cls(
            width=layer.width,
            output_width=layer.output_width,
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            key_width=layer.head_width,
            value_width=layer.value_width,
            dtype=dtype,
            rule=rule,
            additive=layer.bias,
        )

    @property
    def element_size(self) -> int:
        """Bytes per number."""
        return torch.finfo(self.dtype).bits // 8

    def numbers(self, n: int, scope: str) -> tuple[int, int]:
        """(M, N): entries of an output and of a Krylov vector: the tokens, or the reduced coordinates of one head."""
        if scope == "head":
            return n * self.value_width, n * min(self.width, 2 * self.key_width + self.value_width)
        return n * self.output_width, n * self.width


@dataclass(frozen=True)
class Strategy:
    """One way to compute a batch of σ."""

    inputs: int  # how many together
    tiling: Tiling  # sizes of the tiles
    alone: bool = False  # whether inputs are measured one after the other


def strategies(inputs: int) -> Iterator[Strategy]:
    """The ways to compute σ of so many inputs, the fastest first."""
    usual = current_tiling()
    if inputs > 1:
        yield Strategy(inputs, usual)
    for tiling in (usual, replace(usual, dense=0), replace(usual, dense=0, keep=0), SMALL):
        yield Strategy(1, tiling, alone=inputs > 1)


def solve_plan(shape: Shape, n: int, strategy: Strategy, scope: str = "attention", triplets: int = 0) -> MemoryPlan:
    """The bytes of a solve that holds ``triplets`` singular vectors of either side: the only place that counts them."""
    size, inputs, tiling = shape.element_size, strategy.inputs, strategy.tiling
    items = inputs * (shape.heads if scope == "head" and not shape.activations else 1)
    M, N = shape.numbers(n, scope if not shape.activations else "attention")
    if shape.activations:
        tokens = int(HOLES * (shape.activations + _STEP) * inputs * n * shape.width * size)
    else:
        keys = shape.heads if scope == "head" else shape.kv_heads
        rows = (shape.heads + keys) * shape.key_width + keys * shape.value_width
        held = _PROJECTIONS * rows + _OUTPUTS * shape.heads * shape.value_width
        tokens = inputs * n * size * held + _TOKENS * items * N * size
        # The joined projections [τW_Q; W_K; W_V], and two copies of W_Q on the way to them.
        tokens += (rows + 2 * shape.heads * shape.key_width) * shape.width * size
    rule = shape.rule(n, inputs)
    heads = inputs * shape.heads
    with using_tiling(tiling):
        tiled = shape.tileable and prefers_tiles(rule, heads, n, n, torch.empty(0, dtype=shape.dtype))
    groups = shape.heads // shape.kv_heads
    several = items > 1 and not shape.activations
    matrices = shape.layers * matrix_bytes(tiling, tiled, rule, heads, n, groups, size, several=several)
    if rule.additive is not None and (shape.additive is None or not _same_storage(rule.additive, shape.additive)):
        # Read off an additive mask, with what it hides beside it.
        matrices += rule.additive.numel() * (size + 1)
    # Both sides of every triplet, and a copy.
    vectors = 2 * triplets * (items // inputs) * (M + n * shape.width) * size
    bases = typical_bases((M, N), items, size, SOLVER_ROOM)
    return MemoryPlan(matrices, tokens, bases, vectors, tiled, tiling, strategy.alone, SOLVER_ROOM)


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
    """What one batch of σ at n tokens takes, and how to stay within ``limit`` bytes above the weights.

    ``triplets`` singular vectors of either side are held per input; see ``spectral.solvers.triplets``. Give ``plan.room`` to
    the solver as its ``memory``, and compute inside ``within_memory(limit, plan.tiling)``.

    When memory is short, in this order: inputs one after the other, tiles instead of n×n matrices, no kept exponentials,
    smaller tiles, fewer Krylov vectors.

    Raises:
        MemoryError: when ``limit`` is too small even for the fewest vectors.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(768)
        >>> layer = lipscope.Attention(q=W, k=W, v=W, out=W, heads=12, mask="causal")
        >>> print(plan_memory(layer, 4096))
        expected peak 643 MiB above the weights: tiles 32 MiB, tokens 323 MiB, Krylov bases 288 MiB
    """
    shape = Shape.of(layer, dtype)
    if limit is None:
        return solve_plan(shape, n, Strategy(inputs, current_tiling()), scope, inputs * triplets)
    plans = [solve_plan(shape, n, strategy, scope, inputs * triplets) for strategy in strategies(inputs)]
    return first_fitting(plans, n, shape.numbers(n, scope)[1] * shape.element_size, limit)


def first_fitting(plans: Sequence[MemoryPlan], n: int, vector: int, limit: int) -> MemoryPlan:
    """The first plan with usual bases within ``limit`` bytes, else the first with the fewest vectors, else a MemoryError."""
    for enough in (TYPICAL_VECTORS, FEWEST):
        for plan in plans:
            left = limit - plan.fixed
            if left >= enough * vector:
                return replace(plan, bases=min(plan.bases, left), room=min(plan.room, left))
    least = min(plan.fixed for plan in plans) + FEWEST * vector
    raise MemoryError(
        f"n = {n} tokens need at least {show_bytes(least)} above the weights, but memory is limited to {show_bytes(limit)}"
    )


@contextmanager
def within_memory(limit: int, tiling: Tiling) -> Iterator[None]:
    """Inside, products are computed in these tiles, and freed blocks of more than 1/32 of ``limit`` bytes are given back.

    The GNU C library would keep them, with holes between them: peaks were up to 2.6 times what the blocks hold, and
    different from run to run. Other libraries are left as they are.
    """
    _return_blocks(min(_LARGE, max(1 << 17, limit // 32)))
    try:
        with using_tiling(tiling):
            yield
    finally:
        _return_blocks(_LARGE)


def _return_blocks(size: int) -> None:
    with suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP, size)
        library.mallopt(_TRIM, 2 * size)


def _same_storage(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


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

    There are ``groups`` query heads per key head. Where ``several`` items are solved together, those that take longer are
    copied when others are done.
    """
    if not tiled:
        # Raw scores, probabilities and two on their way; with a soft-cap also its values, slope and weights.
        counted = (1 + 3 * exponentials(rule.softcap)) * heads * n * n * element_size
        return int(HOLES * counted)
    kept = exponentials(rule.softcap) * heads * visited_entries(rule, n, n) * element_size
    if kept > tiling.keep:
        kept = 0
    elif several:
        # At the peak three sets are alive: all items, a compacted copy (≤ ¾), and the copy of that (≤ 9/16): 37/16.
        kept = kept * 37 // 16
    return tiling.scratch(groups, element_size) + kept


_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def read_bytes(size: float | str) -> int:
    """A size such as ``4GiB``, ``512 MiB`` or ``2.5gb`` in bytes; a number is one already. It must be positive and whole."""
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
