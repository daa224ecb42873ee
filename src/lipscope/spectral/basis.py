"""Krylov bases: orthonormal vectors that grow one at a time for a batch of problems, and how many of them memory holds.

The recurrence starts from a random direction v₁, uniform on the sphere; ``overlap_quantile`` says how small |⟨v₁, w⟩| may be
assumed to be for any fixed unit vector w.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from lipscope.spectral.operator import Operator

# Most numbers that float32 adds up without losing digits, and norms whose squares it can hold.
_SHORT_SUM, _SAFE_NORMS = 256, (1e-15, 1e15)


class Basis:
    """Orthonormal rows per item, stored in blocks (B, rows, N); at most ``capacity`` of them, and always the newest."""

    CHUNK = 32
    # Blocks of large vectors hold fewer of them, so that growing does not ask for much more than is needed.
    BLOCK_BYTES = 256 << 20

    def __init__(self, batch: int, size: int, like: Tensor, capacity: int | None = None) -> None:
        fitting = self.BLOCK_BYTES // max(1, batch * size * like.element_size())
        if capacity is not None and batch > 1:
            # A block is copied when items leave.
            fitting = min(fitting, max(4, capacity // 8))
        self._block = max(1, min(self.CHUNK, fitting))
        self._capacity = capacity
        self.blocks: list[Tensor] = []
        self._like = like
        self._size = size
        self.count = 0
        self.last: Tensor = like.new_zeros(batch, size)

    @property
    def complete(self) -> bool:
        """Whether every vector is stored."""
        return self._capacity is None or self.count <= self._capacity

    def orthogonalise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Remove the components of x along the basis, and give the norm of the rest too; zero where the basis spans x.

        The recurrence has removed most of them already. Once vectors have been discarded we stop re-orthogonalising: the
        bound on σ (Paige 1980) is for the plain recurrence.
        """
        if not self.complete:
            return x, scaled_norm(x)
        x, removed = self._without(x)
        norm = scaled_norm(x)
        # Where less is left than was removed, rounding is part of it. Twice is enough, or nothing was left (Kahan, Parlett).
        if bool((removed > norm).any()):
            x, _ = self._without(x)
            again = scaled_norm(x)
            norm = again.masked_fill(again < 0.5 * norm, 0.0)
        return x, norm

    def remove(self, x: Tensor) -> Tensor:
        """Remove the components of x along the stored vectors."""
        return self._without(x)[0]

    def _without(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Remove the components of x along the stored vectors; also gives their length together (B,)."""
        row = x.unsqueeze(1)
        # All coefficients of the same x: the correction of one block must not depend on the order of blocks. As a row: with
        # a column the same batched products take several times as long.
        parts = [(torch.bmm(row, Q.mT), Q) for Q in self.stored()]
        for coefficients, Q in parts:
            row = torch.baddbmm(row, coefficients, Q, alpha=-1)
        along = [coefficients.squeeze(1).double() for coefficients, _ in parts] or [x.new_zeros(len(x), 1).double()]
        return row.squeeze(1), scaled_norm(torch.cat(along, 1))

    def append(self, x: Tensor) -> None:
        """Add one vector per item."""
        self.last = x
        if self._capacity is None or self.count < self._capacity:
            block, row = divmod(self.count, self._block)
            if row == 0:
                room = self._block if self._capacity is None else min(self._block, self._capacity - self.count)
                self.blocks.append(self._like.new_empty(x.shape[0], room, self._size))
            self.blocks[block][:, row] = x
            # A view, not a second copy.
            self.last = self.blocks[block][:, row]
        self.count += 1

    def combine(self, rows: Tensor, coefficients: Tensor) -> Tensor:
        """Unit vectors Σ_j coefficients[:, j, c] · q_j of the listed items over the stored vectors, (rows, c, N)."""
        total = self._like.new_zeros(rows.numel(), coefficients.shape[2], self._size)
        everyone = rows.numel() == self.last.shape[0]
        for index, Q in enumerate(self.stored()):
            first = index * self._block
            part = coefficients[:, first : first + Q.shape[1]].transpose(1, 2).to(Q.dtype)
            Q = Q[:, : part.shape[2]]
            total.baddbmm_(part, Q if everyone else Q[rows])
        return torch.nn.functional.normalize(total, dim=-1, eps=torch.finfo(total.dtype).tiny)

    def keep(self, rows: Tensor) -> None:
        """Forget all items but the listed ones."""
        self.last = self.last[rows]
        for index in range(len(self.blocks)):
            self.blocks[index] = self.blocks[index].index_select(0, rows)
        block, row = divmod(self.count - 1, self._block)
        if self.complete:
            self.last = self.blocks[block][:, row]

    def release(self) -> None:
        """Free all vectors but the newest: nothing of this basis is asked for any more."""
        self.last = self.last.clone()
        self.blocks, self._capacity = [], 0

    def stored(self) -> list[Tensor]:
        """The stored vectors, block by block (B, rows, N)."""
        stored = self.count if self._capacity is None else min(self.count, self._capacity)
        return [Q[:, : stored - i * self._block] for i, Q in enumerate(self.blocks) if stored > i * self._block]


def scaled_norm(x: Tensor) -> Tensor:
    """The norm ‖x‖₂ of every row, in float64, without overflow or underflow of the squares."""
    if x.dtype != torch.float64:
        # In parts that are short enough for the sums of float32, which are much faster than those of converted numbers.
        parts = torch.linalg.vector_norm(x.unflatten(-1, (-1, math.gcd(x.shape[-1], _SHORT_SUM))), dim=-1)
        wide: Tensor = torch.linalg.vector_norm(parts.double(), dim=-1)
        if not bool(((wide > _SAFE_NORMS[0]) & (wide < _SAFE_NORMS[1])).all()):
            wide = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
        return wide
    peak = x.abs().amax(-1)
    safe = torch.where(peak > 0, peak, torch.ones_like(peak))
    scaled: Tensor = safe * torch.linalg.vector_norm(x / safe[:, None], dim=-1)
    return scaled


def unit_rows(x: Tensor, norm: Tensor) -> Tensor:
    """Each row over its norm, and zero where the norm is zero. Division, since the inverse of a tiny norm overflows."""
    empty = ~(norm > 0)
    unit = x / norm.masked_fill(empty, 1.0).to(x.dtype)[:, None]
    return unit.masked_fill_(empty[:, None], 0.0) if bool(empty.any()) else unit


# Right vectors kept however small the memory.
FEWEST = 4
# Problems up to this size may exhaust their Krylov space, which the two-sided form handles exactly.
SMALL = 1024


def pairs_within(shape: tuple[int, int], batch: int, element_size: int, memory: int) -> int:
    """How many vectors of both sides fit, for a batch of M×N problems; with M = 0 of the right side alone."""
    return memory // (batch * element_size * sum(shape))


def together_within(shape: tuple[int, int], element_size: int, memory: int) -> int:
    """How many M×N problems are solved together: those whose first vectors of both sides fit, one at least."""
    return max(1, pairs_within(shape, 1, element_size, memory) // Basis.CHUNK)


def one_sided(shape: tuple[int, int], batch: int, element_size: int, memory: int) -> bool:
    """Whether only right vectors are kept: of large problems, and where memory has no room for many of both sides."""
    M, N = shape
    return min(M + 1, N) > SMALL or pairs_within(shape, batch, element_size, memory) < Basis.CHUNK


def capacities(shape: tuple[int, int], batch: int, element_size: int, memory: int) -> tuple[int, int]:
    """How many left and right vectors are kept: both sides of a small problem, the right ones that fit of a large."""
    if one_sided(shape, batch, element_size, memory):
        return 0, max(FEWEST, pairs_within((0, shape[1]), batch, element_size, memory))
    both = pairs_within(shape, batch, element_size, memory)
    return both, both


def random_direction(size: int, seed: int, like: Tensor | Operator) -> Tensor:
    """A vector uniform on the unit sphere of R^size, shape ``(1, size)``, of the dtype and on the device of ``like``.

    It is drawn on the CPU in float64, so that the same seed gives the same direction on every device and in every dtype.
    Every digit of the seed counts: of one with more than 32 bits torch would take the last 32.
    """
    if 0 <= seed < 1 << 32:
        vector = torch.randn(1, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    else:
        generator = np.random.Generator(np.random.Philox(seed % (1 << 128)))
        vector = torch.from_numpy(generator.standard_normal((1, size)))
    unit: Tensor = vector / torch.linalg.vector_norm(vector)
    return unit.to(dtype=like.dtype, device=like.device)


def as_integers(options: object, *names: str) -> None:
    """Make the named options of a solver Python's integers, say of numpy's, which overflow; refuses what is none."""
    for name in names:
        value = getattr(options, name)
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an integer, got {value!r}")
        object.__setattr__(options, name, value.__index__())


def check_delta(delta: float) -> None:
    """Refuse failure probabilities that are none, or too small for the quantile to be computed."""
    if not 0.5e-30 <= delta < 1:  # two solves may share the least one
        raise ValueError(f"delta must be at least 1e-30 and less than 1, got {delta}")


def overlap_quantile(size: int, delta: float) -> float:
    """The g with P[|⟨v₁, w⟩| < g] = delta: the squared overlap follows the Beta(½, (N−1)/2) law."""
    from scipy.special import betaincinv

    if size == 1:
        return 1.0
    return math.sqrt(float(betaincinv(0.5, (size - 1) / 2, delta)))


@cache
def log_overlap(size: int, delta: float, starts: int) -> float:
    """The logarithm of a g below which the product of so many overlaps falls with probability at most their part of delta.

    The parts are 0.9 for one start and 0.1/((R − 1)·R) for R of them: one altogether, whenever one stops to start afresh.
    With F the law of one overlap, −log ∏ F(overlaps) follows the Gamma(R) law, and ∏ F(g_r) ≤ F((∏ g_r)^{1/R})^R since
    log F is concave in log g from three dimensions on; with fewer of them overlaps are larger.
    """
    from scipy.special import gammainccinv

    part = 0.9 if starts == 1 else 0.1 / ((starts - 1) * starts)
    each = math.exp(-float(gammainccinv(starts, delta * part)) / starts)
    return starts * math.log(overlap_quantile(size if starts == 1 else max(size, 3), each))
