"""How many Krylov vectors fit into a given memory, and of which sides."""

from __future__ import annotations

from lipscope.spectral.basis import Basis

# Right vectors kept however small the memory.
FEWEST = 4
# A recurrence may exhaust a space of so many dimensions, and then counts on both bases.
SMALL = 1024


def pairs_within(shape: tuple[int, int], batch: int, element_size: int, memory: int) -> int:
    """How many vectors of both sides fit, for a batch of M×N problems."""
    return memory // (batch * element_size * sum(shape))


def right_within(shape: tuple[int, int], batch: int, element_size: int, memory: int) -> int:
    """How many right vectors alone fit."""
    return memory // (batch * element_size * shape[1])


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
        return 0, max(FEWEST, right_within(shape, batch, element_size, memory))
    both = pairs_within(shape, batch, element_size, memory)
    return both, both
