"""Which tiles of the n×n scores are visited, what is visible inside them, and which terms of the scores belong to whom.

Masks and additive terms come as (inputs or 1) × (heads or 1) matrices. They are never repeated for the items that share
them: an item knows the index of its matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from lipscope.attention.scores import ScoreRule, tile_of


@dataclass(frozen=True, eq=False)
class Visible:
    """What is visible inside a tile: factors (matrices or 1, rows or 1, columns or 1), True where all of them are.

    Inputs that differ by their padding share one matrix and have rows and columns of their own, which take
    rows + columns instead of rows × columns entries for each of them.
    """

    factors: tuple[Tensor, ...]

    @classmethod
    def of(cls, visible: Tensor) -> Visible:
        """From (inputs or 1, heads or 1, rows, columns), not True everywhere."""
        own = visible.flatten(0, 1)
        if len(own) > 1:
            found = own.any(0, keepdim=True), own.any(2, keepdim=True), own.any(1, keepdim=True)
            if torch.equal(own, reduce(torch.logical_and, found)):
                return cls(tuple(factor for factor in found if not bool(factor.all())))
        return cls((own,))

    def at(self, matrices: Tensor) -> Tensor:
        """For items with these matrices (items, 1 or groups): (1 or items, 1 or groups, rows or 1, columns or 1)."""
        return reduce(torch.logical_and, (_chosen(factor, matrices) for factor in self.factors))


@dataclass(frozen=True, eq=False)
class Term:
    """An additive term of the scores: its matrices (m, rows or 1, columns or 1), and whose they are (items, 1 or groups)."""

    matrices: Tensor
    owners: Tensor

    @classmethod
    def of(cls, additive: Tensor, layout: Layout) -> Term:
        """From a tensor that broadcasts to (inputs, heads, rows, columns)."""
        additive = _four_dimensional(additive)
        # One matrix that is shown many times stays one.
        for dim in (0, 1):
            if additive.shape[dim] > 1 and additive.stride(dim) == 0:
                additive = additive.narrow(dim, 0, 1)
        b, h = additive.shape[:2]
        return cls(additive.flatten(0, 1), layout.owners(b, h, additive.device))

    def tile(self, rows: slice, columns: slice, items: slice) -> Tensor:
        """The tile for items, (1 or items, 1 or groups, rows or 1, columns or 1)."""
        return _chosen(tile_of(self.matrices, rows, columns), self.owners[items])


@dataclass(frozen=True, eq=False)
class Tile:
    """One tile in which something is visible: its keys, and what is visible of them, or None for everything."""

    columns: slice
    visible: Visible | None


@dataclass(frozen=True, eq=False)
class Strip:
    """The tiles of one range of queries."""

    rows: slice
    tiles: tuple[Tile, ...]

    @property
    def area(self) -> int:
        """Visited entries of the score matrix."""
        return _length(self.rows) * sum(_length(tile.columns) for tile in self.tiles)


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

    def owners(self, inputs: int, heads: int, device: torch.device) -> Tensor:
        """Which of (inputs or 1) × (heads or 1) matrices belongs to whom: (items, 1 or groups)."""
        item = torch.arange(self.items, device=device)[:, None]
        found = torch.zeros_like(item)
        if heads > 1:
            found = item % self.kv_heads * self.groups + torch.arange(self.groups, device=device)
        return found + heads * (item // self.kv_heads) if inputs > 1 else found

    def owners_per_head(self, owners: Tensor) -> Tensor:
        """The same when every query head is an item of its own."""
        return owners.expand(self.items, self.groups).reshape(-1, 1)


def make_strips(rule: ScoreRule, shape: tuple[int, int], tile: tuple[int, int], device: torch.device) -> tuple[Strip, ...]:
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
                tiles.append(Tile(columns, Visible.of(_four_dimensional(visible))))
        strips.append(Strip(rows, tuple(tiles)))
    return tuple(strips)


def mask_owners(rule: ScoreRule, layout: Layout, m: int, device: torch.device) -> Tensor:
    """Which matrix of the mask over m keys belongs to whom: (items, 1 or groups)."""
    first = slice(0, 1)
    visible = rule.visible(first, first, m, device)
    inputs, heads = (1, 1) if visible is None else _four_dimensional(visible).shape[:2]
    return layout.owners(inputs, heads, device)


def visited_entries(rule: ScoreRule, n: int, m: int, height: int = 256) -> int:
    """About how many entries of an n×m score matrix are visited in strips of ``height`` queries."""
    total = 0
    for start in range(0, n, height):
        rows = slice(start, min(n, start + height))
        first, last = rule.span(rows, m)
        total += _length(rows) * (last - first)
    return total


def _chosen(matrices: Tensor, owners: Tensor) -> Tensor:
    return matrices[None] if len(matrices) == 1 else matrices[owners]


def _four_dimensional(tensor: Tensor) -> Tensor:
    return tensor[(None,) * (4 - tensor.ndim)]


def _length(part: slice) -> int:
    return int(part.stop - part.start)


def _even_parts(first: int, last: int, largest: int) -> list[slice]:
    """Cut [first, last) into parts of nearly equal size, none larger than ``largest``."""
    count = -(-(last - first) // largest)
    edges = [first + (last - first) * part // max(count, 1) for part in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]
