"""How n×n scores are cut into tiles, and when: sizes that were measured to be fast, and smaller ones where memory is short.

A tiling is in force for a block of code (``using_tiling``), so that it reaches the attention inside a model as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Tiling:
    """Sizes of tiles and what is kept of them.

    Attributes:
        tile: most queries and keys of one tile.
        tile_bytes: bytes of one tile matrix over the items that are worked on together: a few of those stay in the cache
            while the products are large enough to run at full speed (benchmarks/long_context.py).
        keep: bytes of exponentials that are kept between products.
        dense: bytes of one n×n matrix over all heads and inputs beyond which tiles are used.
        shortest_half: tokens from which tiles are faster when a mask hides about half of the entries.
    """

    tile: tuple[int, int] = (256, 512)
    tile_bytes: int = 4 << 20
    keep: int = 256 << 20
    dense: int = 256 << 20
    shortest_half: int = 512

    def scratch(self, groups: int, element_size: int) -> int:
        """Bytes that the matrices of one tile take while it is worked on, for ``groups`` query heads per key head."""
        return 8 * max(self.tile_bytes, self.tile[0] * self.tile[1] * groups * element_size)


# The tiling for memory that is short: about 8 times less scratch, and products at about half the speed.
SMALL = Tiling(tile=(128, 128), tile_bytes=512 << 10, keep=0, dense=0)

_current: ContextVar[Tiling | None] = ContextVar("tiling", default=None)
_usual = Tiling()


def current_tiling() -> Tiling:
    """The tiling in force."""
    return _current.get() or _usual


@contextmanager
def using_tiling(tiling: Tiling) -> Iterator[None]:
    """Inside, products use this tiling.

    Example:
        >>> with using_tiling(Tiling(keep=0)):
        ...     current_tiling().keep
        0
    """
    token = _current.set(tiling)
    try:
        yield
    finally:
        _current.reset(token)
