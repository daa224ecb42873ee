"""Which tiles of the n×n scores are visited, and what is hidden inside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from lipscope.attention.scores import ScoreRule


@dataclass(frozen=True, eq=False)
class Tile:
    """One tile in which something is visible: its keys, and what is hidden, (items, groups, rows, columns), or None."""

    columns: slice
    hidden: Tensor | None


@dataclass(frozen=True, eq=False)
class Strip:
    """The tiles of one range of queries."""

    rows: slice
    tiles: tuple[Tile, ...]

    @property
    def area(self) -> int:
        """Visited entries of the score matrix."""
        return _length(self.rows) * sum(_length(tile.columns) for tile in self.tiles)

    def select(self, items: Tensor) -> Strip:
        """The strip as the listed items see it."""
        return replace(
            self,
            tiles=tuple(
                tile if tile.hidden is None or tile.hidden.shape[0] == 1 else replace(tile, hidden=tile.hidden[items])
                for tile in self.tiles
            ),
        )

    def per_head(self, items: int, groups: int) -> Strip:
        """Query heads as items of their own: ``groups`` of them for each item."""

        def flat(hidden: Tensor | None) -> Tensor | None:
            if hidden is None or hidden.shape[:2] == (1, 1):
                return hidden
            return hidden.expand(items, groups, *hidden.shape[2:]).flatten(0, 1)[:, None]

        return replace(self, tiles=tuple(replace(tile, hidden=flat(tile.hidden)) for tile in self.tiles))


@dataclass(frozen=True)
class Layout:
    """Inputs, key heads, and query heads per key head; an item is one key head of one input."""

    inputs: int
    kv_heads: int
    groups: int

    @property
    def items(self) -> int:
        """Independent problems."""
        return self.inputs * self.kv_heads

    def per_item(self, tensor: Tensor) -> Tensor:
        """(1 or B, 1 or H, rows, columns) → (1 or items, 1 or groups, rows, columns)."""
        while tensor.ndim < 4:
            tensor = tensor[None]
        b, h, *rest = tensor.shape
        if (b, h) == (1, 1):
            return tensor
        if h == 1:
            return tensor.repeat_interleave(self.kv_heads, dim=0)
        split = tensor.reshape(b, self.kv_heads, self.groups, *rest)
        return split.expand(self.inputs, -1, -1, -1, -1).flatten(0, 1)


def make_strips(
    rule: ScoreRule, layout: Layout, shape: tuple[int, int], tile: tuple[int, int], device: torch.device
) -> tuple[Strip, ...]:
    """All strips of a score matrix of ``shape``, in tiles of at most ``tile`` queries and keys."""
    n, m = shape
    strips = []
    for start in range(0, n, tile[0]):
        rows = slice(start, min(n, start + tile[0]))
        first, last = rule.span(rows, m)
        tiles = []
        for columns in _even_parts(first, last, tile[1]):
            visible = rule.visible(rows, columns, m, device)
            if visible is None or bool(visible.all()):
                tiles.append(Tile(columns, None))
            elif bool(visible.any()):
                tiles.append(Tile(columns, ~layout.per_item(visible)))
        strips.append(Strip(rows, tuple(tiles)))
    return tuple(strips)


def visited_entries(rule: ScoreRule, n: int, m: int, height: int = 256) -> int:
    """About how many entries of an n×m score matrix are visited in strips of ``height`` queries."""
    total = 0
    for start in range(0, n, height):
        rows = slice(start, min(n, start + height))
        first, last = rule.span(rows, m)
        total += _length(rows) * (last - first)
    return total


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _even_parts(first: int, last: int, largest: int) -> list[slice]:
    """[first, last) in parts of nearly equal size, none larger than ``largest``."""
    count = -(-(last - first) // largest)
    edges = [first + (last - first) * part // max(count, 1) for part in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]
