"""The attention core without n×n matrices: probabilities are rebuilt tile by tile.

Kept per input: q, k, v, the outputs o, and the largest score and the normaliser of every row, so memory grows like n. With
E_ij = exp(s_ij − peak_i), P = E/total and W = E (times the slope of the soft-cap), each product makes a single pass:

    T = W∘(dQ Kᵀ + Q dKᵀ)              dO_i = ( Σ_j T_ij v_j + Σ_j E_ij dv_j − (Σ_j T_ij) o_i ) / total_i
    G' = G/total,  gS = W∘(G' Vᵀ − ⟨G', O⟩)    gQ_i = Σ_j gS_ij k_j    gK_j = Σ_i gS_ij q_i    gV_j = Σ_i E_ij g'_i

Tiles in which nothing is visible are never visited: half of them under a causal mask, all but a band under a window. When
the E fit into the bytes that the tiling allows they are kept, which spares one product in five and the exponentials.

A ``Tiling`` is in force for a block of code (``using_tiling``), so that it reaches the attention inside a model as well;
``core_at`` asks it whether tiles or matrices are better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from lipscope.attention.core import NEGLIGIBLE, Linearisation, Triple, largest_product
from lipscope.attention.scores import ScoreRule, softcap_size
from lipscope.attention.tiles import Layout, Strip, Term, Tile, make_strips, mask_owners
from lipscope.attention.validation import rows_of


class Workspace:
    """Named tile matrices that are allocated once per product and used again for every tile.

    A matrix of a few MiB that is freed goes back to the system, which hands out zeroed pages for the next one: with hundreds
    of tiles per product this took up to a third of the time.
    """

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """The batched product a·b."""
        return torch.bmm(a, b, out=self.matrix(name, *a.shape[:2], b.shape[2]))

    def matrix(self, name: str, *shape: int) -> Tensor:
        """Uninitialised numbers of this shape."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = self._like.new_empty(size)
        return buffer[:size].view(shape)


@dataclass(frozen=True)
class Tiling:
    """Sizes of tiles and what is kept of them."""

    tile: tuple[int, int] = (256, 512)  # most queries and keys of one tile
    # Bytes of one tile matrix over the items that are worked on together: a few of those stay in the cache while the
    # products are large enough to run at full speed (benchmarks/long_context.py)
    tile_bytes: int = 4 << 20
    keep: int = 256 << 20  # bytes of exponentials that are kept between products
    dense: int = 256 << 20  # bytes of one n×n matrix over all heads and inputs beyond which tiles are used
    shortest_half: int = 512  # tokens from which tiles are faster when a mask hides about half of the entries

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


Kept: TypeAlias = tuple[tuple[tuple[Tensor, Tensor], ...], ...]


@dataclass(frozen=True, eq=False)
class TiledLinearisation:
    """The attention core at one point: the products of ``Linearisation`` in memory that grows like n.

    Shapes, with I = B·Hkv items and G query heads for each: queries (I, G, n, dk) with the scale inside, keys (I, m, dk),
    values (I, m, dv), outputs (I, G, n, dv), peak and scale = 1/total (I, G, n, 1). A row that sees nothing has scale 0.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    outputs: Tensor
    peak: Tensor
    scale: Tensor
    layout: Layout
    strips: tuple[Strip, ...]
    mask_owners: Tensor
    softcap: float | None
    additive: Term | None
    score_size: float
    tile_bytes: int
    kept: Kept | None = None

    @classmethod
    def at(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rule: ScoreRule,
        *,
        tiling: Tiling | None = None,
        shift: Tensor | None = None,
        size: float = 0.0,
    ) -> TiledLinearisation:
        """Linearise at scaled queries q (B, H, n, dk), keys k (B, Hkv, m, dk), values v (B, Hkv, m, dv); see ``core_at``."""
        q, k, v, tiling = q.detach(), k.detach(), v.detach(), tiling or current_tiling()
        (B, H, n, dk), (kv_heads, m) = q.shape, k.shape[1:3]
        layout = Layout(B, kv_heads, H // kv_heads)
        strips = make_strips(rule, (n, m), tiling.tile, q.device)
        additive = None if rule.additive is None else Term.of(rule.additive, layout)
        size = softcap_size(max(size, largest_product(q, k)), rule.softcap)
        queries = q.reshape(layout.items, layout.groups, n, dk).contiguous()
        rows = queries.new_zeros(*queries.shape[:3], 1)
        core = cls(
            queries, k.reshape(layout.items, m, dk).contiguous(), v.reshape(layout.items, m, v.shape[-1]).contiguous(),
            queries.new_zeros(*queries.shape[:3], v.shape[-1]), rows, rows, layout, strips,
            mask_owners(rule, layout, m, q.device), rule.softcap, additive, size, tiling.tile_bytes,
        )  # fmt: skip
        core = core._normalised(rule.sinks, shift)
        if B * core._exponential_count * q.element_size() <= tiling.keep:
            core = replace(core, kept=core._exponentials())
        size += core._additive_size()
        return replace(core, score_size=size + rule.sink_size(size))

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the products."""
        return self.queries.dtype

    @property
    def scratch(self) -> int:
        """Numbers that one input of the batch takes beside its tokens."""
        return 0 if self.kept is None else self._exponential_count

    @property
    def _exponential_count(self) -> int:
        """Entries of E, and of W where a soft-cap makes it another matrix, of one input."""
        heads = self.layout.kv_heads * self.layout.groups
        return exponentials(self.softcap) * heads * sum(strip.area for strip in self.strips)

    @property
    def o(self) -> Tensor:
        """Outputs in the layout of ``Linearisation``, (B, Hkv, G·n, dv)."""
        return self._grouped(self.outputs)

    def finite(self) -> dict[str, Tensor]:
        """What must be finite for the products to make sense."""
        return {"scores": self.peak, "values": self.outputs, "queries": self.queries, "keys": self.keys}

    def per_head(self, heads: int) -> TiledLinearisation:
        """Every one of the query heads as an input of its own, ordered (input, head)."""
        layout = self.layout
        assert heads == layout.kv_heads * layout.groups
        additive = self.additive
        if additive is not None:
            additive = replace(additive, owners=layout.owners_per_head(additive.owners))

        def own(t: Tensor) -> Tensor:
            return t.flatten(0, 1)[:, None]

        def shared(t: Tensor) -> Tensor:
            return t if layout.groups == 1 else t.repeat_interleave(layout.groups, dim=0)

        return replace(
            self, queries=own(self.queries), keys=shared(self.keys), values=shared(self.values), outputs=own(self.outputs),
            peak=own(self.peak), scale=own(self.scale), layout=Layout(layout.items * layout.groups, 1, 1),
            mask_owners=layout.owners_per_head(self.mask_owners), additive=additive,
            kept=self._kept(lambda t: t.reshape(t.shape[0] * layout.groups, -1, t.shape[-1])),
        )  # fmt: skip

    def select(self, items: Tensor) -> TiledLinearisation:
        """Keep the listed inputs."""
        wide = self.layout.kv_heads
        index = (items[:, None] * wide + torch.arange(wide, device=items.device)).flatten()
        additive = None if self.additive is None else rows_of(self.additive, index, "owners")
        layout, kept = replace(self.layout, inputs=int(items.numel())), self._kept(lambda t: t[index])
        names = ("queries", "keys", "values", "outputs", "peak", "scale", "mask_owners")
        return rows_of(self, index, *names, layout=layout, additive=additive, kept=kept)

    def jvp(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """The perturbation dO (B, Hkv, G·n, dv) for those of the scaled queries (B, Hkv, G·n, dk), keys and values."""
        dq, dk, dv = dq.reshape(self.queries.shape), dk.reshape(self.keys.shape), dv.reshape(self.values.shape)
        dv = dv.contiguous()
        result, space = torch.empty_like(self.outputs), Workspace(self.queries)
        for items in self.item_parts():
            # dQ Kᵀ + Q dKᵀ as one product with a longer inner dimension.
            left = torch.cat([dq[items], self.queries[items]], dim=-1)
            right = torch.cat([self.keys[items], dk[items]], dim=-1).mT
            for s, strip in enumerate(self.strips):
                rows = _stacked(left, strip)
                total = rows.new_zeros(*rows.shape[:2], self.values.shape[-1])
                row = rows.new_zeros(*rows.shape[:2], 1)
                for t, tile in enumerate(strip.tiles):
                    E, W = self._tile(items, s, t, space)
                    T = space.product("T", rows, right[:, :, tile.columns]).mul_(W)
                    row += T.sum(-1, keepdim=True)
                    total.baddbmm_(T, self.values[items, tile.columns]).baddbmm_(E, dv[items, tile.columns])
                total.addcmul_(row, _stacked(self.outputs[items], strip), value=-1)
                target = result[items, :, strip.rows]
                target.copy_(total.reshape(target.shape))
        return self._grouped(result.mul_(self.scale))

    def vjp(self, g: Tensor) -> Triple:
        """The cotangents (gQ (B, Hkv, G·n, dk), gK, gV) for one, g (B, Hkv, G·n, dv) of O."""
        scaled = g.reshape(self.outputs.shape) * self.scale
        inner = (scaled * self.outputs).sum(-1, keepdim=True)
        gq, gk, gv = torch.empty_like(self.queries), torch.zeros_like(self.keys), torch.zeros_like(self.values)
        space = Workspace(self.queries)
        for items in self.item_parts():
            transposed = self.values[items].mT
            for s, strip in enumerate(self.strips):
                rows, q = _stacked(scaled[items], strip), _stacked(self.queries[items], strip)
                constant = _stacked(inner[items], strip)
                total = torch.zeros_like(q)
                for t, tile in enumerate(strip.tiles):
                    E, W = self._tile(items, s, t, space)
                    gS = space.product("T", rows, transposed[:, :, tile.columns]).sub_(constant).mul_(W)
                    total.baddbmm_(gS, self.keys[items, tile.columns])
                    gk[items, tile.columns].baddbmm_(gS.mT, q)
                    gv[items, tile.columns].baddbmm_(E.mT, rows)
                target = gq[items, :, strip.rows]
                target.copy_(total.reshape(target.shape))
        B, kv_heads = self.layout.inputs, self.layout.kv_heads
        return self._grouped(gq), gk.reshape(B, kv_heads, *gk.shape[1:]), gv.reshape(B, kv_heads, *gv.shape[1:])

    def _normalised(self, sinks: Tensor | None, shift: Tensor | None) -> TiledLinearisation:
        """Fill in peak, scale and outputs, by a running maximum, sum and product over the tiles of each strip."""
        shape, space = self.peak.shape, Workspace(self.queries)
        peak, total = self.peak.new_full(shape, float("-inf")), self.peak.new_zeros(shape)
        if sinks is not None:
            peak = sinks.to(peak).reshape(1, self.layout.kv_heads, self.layout.groups, 1, 1)
            sink = peak.expand(self.layout.inputs, -1, -1, shape[2], 1).reshape(shape)
            peak, total = sink.clone(), torch.ones_like(sink)
        outputs = torch.zeros_like(self.outputs)
        for items in self.item_parts():
            for strip in self.strips:
                top, mass = peak[items, :, strip.rows], total[items, :, strip.rows]
                target = outputs[items, :, strip.rows]
                for tile in strip.tiles:
                    scores, _ = self.scores(items, strip, tile, space)
                    new = torch.maximum(top, scores.amax(-1, keepdim=True))
                    safe = new.masked_fill(new == float("-inf"), 0.0)
                    E, shrink = scores.sub_(safe).exp_(), torch.exp(top - safe)
                    mass.mul_(shrink).add_(E.sum(-1, keepdim=True))
                    added = space.product("output", E.flatten(1, 2), self.values[items, tile.columns])
                    target.mul_(shrink).add_(added.reshape(target.shape))
                    top.copy_(new)
        scale = torch.where(total > 0, 1 / total, torch.zeros_like(total))
        outputs.mul_(scale)
        if sinks is not None and shift is not None:
            outputs -= (sink - peak).exp() * scale * shift.reshape(self.layout.items, 1, 1, -1)
        return replace(self, peak=peak.masked_fill(peak == float("-inf"), 0.0), scale=scale, outputs=outputs)

    def mass(self, heads: int) -> Tensor:
        """See ``Linearisation``; heads that share a key head are counted together."""
        columns, rows = torch.zeros_like(self.keys[..., :1]), torch.zeros_like(self.scale)
        space = Workspace(self.queries)
        for items in self.item_parts():
            for s, strip in enumerate(self.strips):
                scale = _stacked(self.scale[items], strip)
                for t, tile in enumerate(strip.tiles):
                    E, _ = self._tile(items, s, t, space)
                    columns[items, tile.columns].baddbmm_(E.mT, scale)
                    rows[items, :, strip.rows] += (E.sum(-1, keepdim=True) * scale).reshape(rows[items, :, strip.rows].shape)
        found = (rows.amax((2, 3)) * columns.amax((1, 2))[:, None]).sqrt()
        return found.reshape(self.layout.inputs, heads)

    def _additive_size(self) -> float:
        """The largest additive term among the scores that matter; see ``NEGLIGIBLE``."""
        largest = 0.0
        if self.additive is None:
            return largest
        space = Workspace(self.queries)
        for items in self.item_parts():
            for s, strip in enumerate(self.strips):
                scale = _stacked(self.scale[items], strip)
                for t, tile in enumerate(strip.tiles):
                    matters = self._tile(items, s, t, space)[0] * scale > NEGLIGIBLE
                    matters = matters.reshape(len(matters), self.layout.groups, -1, matters.shape[-1])
                    term = self.additive.tile(strip.rows, tile.columns, items)
                    largest = max(largest, float(torch.where(matters, term.abs(), 0.0).amax()))
        return largest

    def _exponentials(self) -> Kept:
        """The matrices E and W of every tile, over all items."""
        everyone = slice(0, self.layout.items)
        # Every tile has memory of its own.
        return tuple(
            tuple(self._rebuilt(everyone, strip, tile, Workspace(self.queries)) for tile in strip.tiles)
            for strip in self.strips
        )

    def _kept(self, change: Callable[[Tensor], Tensor]) -> Kept | None:
        """What is kept, changed; where W is E it stays one matrix."""
        if self.kept is None:
            return None
        return tuple(tuple((e := change(E), e if W is E else change(W)) for E, W in row) for row in self.kept)

    def _tile(self, items: slice, s: int, t: int, space: Workspace) -> tuple[Tensor, Tensor]:
        """The matrices E and W of one tile, (items, G·rows, columns)."""
        if self.kept is None:
            return self._rebuilt(items, self.strips[s], self.strips[s].tiles[t], space)
        E, W = self.kept[s][t]
        return E[items], W[items]

    def _rebuilt(self, items: slice, strip: Strip, tile: Tile, space: Workspace) -> tuple[Tensor, Tensor]:
        scores, slope = self.scores(items, strip, tile, space)
        E = scores.sub_(self.peak[items, :, strip.rows]).exp_().flatten(1, 2)
        return E, E if slope is None else slope.mul_(E)

    def scores(self, items: slice, strip: Strip, tile: Tile, space: Workspace) -> tuple[Tensor, Tensor | None]:
        """Scores (items, G, rows, columns) with −inf where hidden, and the slope of the soft-cap, stacked like E."""
        raw = space.product("scores", _stacked(self.queries[items], strip), self.keys[items, tile.columns].mT)
        slope = None
        if self.softcap is not None:
            inner = raw.div_(self.softcap)
            # As in ``tanh_slope``, in place: its temporaries would be as large as what is kept of the tile.
            slope = torch.abs(inner, out=space.matrix("slope", *inner.shape)).mul_(-2).exp_()
            below = torch.add(slope, 1, out=space.matrix("below", *inner.shape)).square_()
            slope.mul_(4).div_(below)
            raw = inner.tanh_().mul_(self.softcap)
        scores = raw.reshape(raw.shape[0], self.layout.groups, -1, raw.shape[-1])
        if self.additive is not None:
            scores += self.additive.tile(strip.rows, tile.columns, items)
        if tile.visible is not None:
            hidden = ~tile.visible.at(self.mask_owners[items])
            # A sum runs over all heads several times faster than a mask that they share.
            scores += scores.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        return scores, slope

    def item_parts(self) -> Iterator[slice]:
        """Items worked on together: as many as keep one tile matrix within its bytes, at least one."""
        largest = max((strip.area // max(1, len(strip.tiles)) for strip in self.strips), default=1)
        together = max(1, self.tile_bytes // max(1, largest * self.layout.groups * self.queries.element_size()))
        for start in range(0, self.layout.items, together):
            yield slice(start, min(self.layout.items, start + together))

    def _grouped(self, t: Tensor) -> Tensor:
        return t.reshape(self.layout.inputs, self.layout.kv_heads, -1, t.shape[-1])


AnyLinearisation: TypeAlias = Linearisation | TiledLinearisation


def core_at(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: ScoreRule,
    *,
    tiled: bool | None = None,
    shift: Tensor | None = None,
    size: float = 0.0,
    tiling: Tiling | None = None,
) -> AnyLinearisation:
    """The core at scaled queries (B, H, n, dk), keys (B, Hkv, m, dk) and values (B, Hkv, m, dv), from n×n matrices or tiles.

    Tiles are used by default when the matrices would be large, or half hidden; values may lack a ``shift``, see
    ``Linearisation.at``; ``tiling`` is by default the one in force.
    """
    if tiled is None:
        tiled = prefers_tiles(rule, q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q)
    if tiled:
        return TiledLinearisation.at(q, k, v, rule, tiling=tiling, shift=shift, size=size)
    return Linearisation.at(q, k, v, rule, shift=shift, size=size)


def prefers_tiles(rule: ScoreRule, heads: int, queries: int, keys: int, like: Tensor) -> bool:
    """Whether tiles beat n×n matrices of so many heads (over all inputs): these are large, or half of them is hidden."""
    if heads * queries * keys * like.element_size() > current_tiling().dense:
        return True
    if queries != keys or queries < current_tiling().shortest_half:
        return False
    corner = rule.visible(slice(0, queries // 4), slice(queries // 2, queries), queries, like.device)
    return corner is not None and not bool(corner.any())


def exponentials(softcap: float | None) -> int:
    """Matrices that are kept of every tile: E, and with a soft-cap W beside it."""
    return 1 if softcap is None else 2


def _stacked(t: Tensor, strip: Strip) -> Tensor:
    """Rows of one strip, query heads of an item stacked: (items, G, n, d) → (items, G·rows, d)."""
    return t[:, :, strip.rows].flatten(1, 2)
