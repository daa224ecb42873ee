"""The blocks of a layer's Jacobian at one input, all heads together: their sizes in closed form, and ‖J‖_F. In float64.

With P the probabilities, W = P times the slope of the soft-cap, q_ij = R_jᵀq_i (R the rotations of rotary embeddings, if
any) and C_i = Σ_l W_il (v_l − o_i) k_lᵀ R_i, everything for every head h, the blocks are

    ∂out_i/∂x_j = Σ_h W_O^h [ P_ij W_V + W_ij (v_j − o_i) q_ijᵀ W_K + δ_ij C_i τW_Q ]^h = M_ij + K_ij + δ_ij Q_i

a mean part, a key part and a query part. Inner products of them are sums over pairs of heads (g, h) of products of numbers,

    ‖M_ij‖_F²    = Σ P_ij^g P_ij^h ⟨W_O^g W_V^g, W_O^h W_V^h⟩
    ‖K_ij‖_F²    = Σ W_ij^g W_ij^h · (v_j − o_i)^gᵀ W_O^gᵀ W_O^h (v_j − o_i)^h · q_ij^gᵀ W_K^g W_K^hᵀ q_ij^h
    ⟨M_ij, K_ij⟩ = Σ P_ij^g W_ij^h · (v_j − o_i)^hᵀ W_O^hᵀ W_O^g W_V^g W_K^hᵀ q_ij^h

and so on, so that no block is formed. ‖Q_i‖_F² is the sum of ⟨C_i^g, W_O^gᵀ W_O^h C_i^h W_Q^h W_Q^gᵀ⟩τ²; for short inputs
without rotations it is cheaper from n×n matrices, since ⟨v_l k_lᵀ, v_m k_mᵀ⟩ is a product of entries of two Gram matrices.

**Behind a normalisation** block (i, j) is multiplied by D_j = diag(g)(C − z_jz_jᵀ/d)/s_j, the derivative of norm(u_j), and

    D_jD_jᵀ = ( diag(g)² − g gᵀ/d − c_j (g∘z_j)(g∘z_j)ᵀ )/s_j²,    c_j = (2 − |z_j|²/d)/d

(g gᵀ for LayerNorm alone): ‖J_ijD_j‖_F² is that of weights with columns times g, less those of J_ij applied to two vectors.

**Rounding.** A probability is off by a relative margin (see ``head_rounding``), and with it v_j − o_i by that margin times
the mean deviation of the row; every other factor by ``unit`` times what it was added up from. So a part A is off by
4·|dA|, where |dA| is the product of the norms of its factors, one of them replaced by its error; and its square besides by
4·unit·|A|'², where |A|' has √(|v_j|² + |o_i|²) in the place of |v_j − o_i|, since squares of differences come from squares.

Rows are evaluated in strips, so that memory grows like n.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple
from functools import cached_property
from weakref import proxy

import torch
from torch import Tensor

from lipscope.attention.core import Point
from lipscope.attention.layer import Attention
from lipscope.attention.norms import NormLinearisation
from lipscope.attention.rotary import Rotation
from lipscope.attention.validation import derived
from lipscope.bounds.head_blocks import HeadBlocks
from lipscope.bounds.head_rounding import ROUNDS, Rounding
from lipscope.bounds.products import Products
from lipscope.bounds.spectral_upper import RANK
from lipscope.bounds.weights import layer_weights

# Entries of the arrays of one strip.
ENTRIES = 1 << 24
# Entries of arrays that a processor keeps close.
CACHED = 1 << 19
# Entries of the scores up to which the norms of blocks of a single head are looked at.
SMALL = 1 << 22


class Blocks:
    """The blocks of one input's Jacobian, a strip of rows at a time."""

    def __init__(
        self,
        layer: Attention,
        x: Tensor,
        *,
        offset: Tensor | None = None,
        products: Products | None = None,
        height: int | None = None,
    ) -> None:
        """A float64 layer at tokens x (n, d), to all of which an offset is to be added; strips have ``height`` rows."""
        (self.n, _), H = x.shape, layer.heads
        # Arrays beside those of a strip are no larger than two of its own.
        self.entries = ENTRIES if height is None else min(ENTRIES, 2 * H * self.n * height)
        self.layer, self.products = layer, products or Products(layer, layer_weights(layer))
        self.weights, self.grams = self.products.weights, self.products
        point, group = Point.of(layer, x[None], offset), H // layer.kv_heads
        self.q = point.q[0]
        self.raw_keys, v = (t[0].repeat_interleave(group, dim=0) for t in (point.k, point.v))
        # Without sinks and soft-cap the deviations v_l − o_i have mean zero, and a common term of the keys cancels in C_i.
        free = layer.softcap is None and layer.sinks is None
        self.k = self.raw_keys - self.raw_keys.mean(1, keepdim=True) if free else self.raw_keys
        self.centre = v.mean(1, keepdim=True)
        self.v = v - self.centre
        if point.shift is not None:
            self.centre = self.centre + point.shift[0].repeat_interleave(group, dim=0)
        self.rotation, gain = layer.rotation(self.n, 1), None
        if self.rotation is not None:
            self.rotation = Rotation(self.rotation.cos[0, 0], self.rotation.sin[0, 0], self.rotation.interleaved)
            gain = max(1.0, float((self.rotation.cos.square() + self.rotation.sin.square()).max().sqrt()))
        self.rule = layer.score_rule(self.n, 1, tiled=True)
        self.rounding = [Rounding.of(w, x, self.rule, gain, offset) for w in self.weights.plain]
        self.margin = max(each.margin for each in self.rounding)
        self.underflow = sum(each.underflow(w, self.n) for each, w in zip(self.rounding, self.weights.image, strict=True))
        eps = torch.finfo(x.dtype).eps
        self.unit = max(each.unit for each in self.rounding) + 8 * (self.n + x.shape[1]) * eps
        # Per head: margin, unit, and the sizes of queries, keys, values and their common term.
        self.rounded = x.new_tensor([astuple(each) for each in self.rounding]).T[:, :, None, None]
        _, _, query, key, value, shift = self.rounded
        *sizes, out = x.new_tensor([(*w.sizes, w.out_size) for w in self.weights.image]).T[:, :, None, None]
        # Per head: ‖W_O‖_F‖W_V‖_F, ‖W_O‖_F‖W_K‖_F, ‖W_O‖_F|τ|‖W_Q‖_F, sizes of queries, keys and v_j − o_i, and ‖W_O‖_F.
        far = 2 * value + (0.0 if layer.sinks is None else 2.0) * shift
        self.factors = torch.stack([*(out * size for size in reversed(sizes)), query, key, far, out])
        # Arrays with a vector for every pair of tokens are made of parts of a strip, but for single heads.
        turning = layer.head_width if H == 1 else min(layer.head_width, max(H, layer.head_width // 8))
        row = self.n * (1 if self.rotation is None else turning)
        self.height = height or self.rows_of(H * max(row, self.v.shape[2] * layer.head_width, RANK**2 * H))

    @property
    def short(self) -> bool:
        """Query parts cost less from n×n matrices than from covariances."""
        return self.rotation is None and self.n**2 <= self.q.shape[2] ** 3

    def rows_of(self, entries: int) -> int:
        """How many rows of so many entries are held at a time."""
        return max(1, self.entries // entries)

    @property
    def single(self) -> bool:
        """One strip has all rows."""
        return self.height >= self.n

    @cached_property
    def _only(self) -> Strip:
        # Not a reference back: in a cycle the arrays of a strip would live until the next garbage collection.
        return Strip(proxy(self), slice(0, self.n))

    def strips(self) -> Iterator[Strip]:
        """All rows, ``height`` at a time; a single strip is kept with all that was computed for it."""
        if self.single:
            yield self._only
            return
        for start in range(0, self.n, self.height):
            yield Strip(self, slice(start, min(self.n, start + self.height)))

    def rotated(self, places: slice) -> Rotation:
        """The rotations of some tokens."""
        assert self.rotation is not None
        return Rotation(self.rotation.cos[places], self.rotation.sin[places], self.rotation.interleaved)

    def turned_back(self, rows: slice, columns: slice) -> Tensor:
        """q_ij, (H, r, c, dk)."""
        return self.rotated(columns).transpose(self.q[:, rows, None].expand(-1, -1, columns.stop - columns.start, -1))


class Strip:
    """Some rows of the scores of all heads, with the columns that they see and their own: arrays are (H, r, c)."""

    def __init__(self, at: Blocks, rows: slice) -> None:
        first, last = at.rule.span(rows, at.n)
        self.at, self.rows, self.columns = at, rows, slice(min(first, rows.start), max(last, rows.stop))
        self.q, self.k, self.v = at.q[:, rows], at.k[:, self.columns], at.v[:, self.columns]
        raw = (self.q @ at.raw_keys[:, self.columns].mT)[None]
        P, W = at.rule.probabilities(raw, (rows, self.columns, at.n))
        self.P, self.W = P[0], W[0]
        self.o, self.sink_share = self.P @ self.v, None
        if at.rule.sinks is not None:
            self.sink_share = at.rule.sink_share(raw, (rows, self.columns, at.n))[0]
            self.o = self.o - self.sink_share * at.centre
        # v_i − o_i of the rows themselves.
        self.delta = self.v[:, rows.start - self.columns.start :][:, : self.o.shape[1]] - self.o

    def own(self, t: Tensor) -> Tensor:
        """The entries (i, i) of matrices (…, r, c)."""
        return t.diagonal(self.rows.start - self.columns.start, -2, -1)

    @cached_property
    def a(self) -> Tensor:
        """q_ij, (H, r, c, dk), or (H, r, 1, dk) without rotations."""
        return self.q[:, :, None] if self.at.rotation is None else self.at.turned_back(self.rows, self.columns)

    def turned(self, y: Tensor) -> Tensor:
        """q_i·R_j y_i for vectors (H, r, dk) of the rows, (H, r, c), or (H, r, 1) without rotations."""
        if self.at.rotation is None:
            return (self.q * y).sum(-1, keepdim=True)
        # R_j y = y∘cos_j + y'∘sin_j, so that sums over coordinates are products with the tables.
        turn, r = self.at.rotated(self.columns), self.at.rotation.cos.shape[-1]
        still, turning = self.q[..., r:] * y[..., r:], self.q[..., :r]
        swapped = Rotation(torch.zeros_like(turn.cos[:1]), torch.ones_like(turn.sin[:1]), turn.interleaved).apply(y[..., :r])
        found = (turning * y[..., :r]) @ turn.cos.mT + (turning * swapped) @ turn.sin.mT
        return found + still.sum(-1, keepdim=True)

    def moments(self, h: int, right: Tensor) -> Tensor:
        """Σ_j W_ij (v_j − o_i) right_jᵀ of head h for vectors (c, ·) of the columns, (r, dv, ·)."""
        sums = self.W[h] @ (self.v[h, :, :, None] * right[:, None]).flatten(1)
        return sums.reshape(*self.o[h].shape, -1).sub_(self.o[h, :, :, None] * (self.W[h] @ right)[:, None])

    def each_covariance(self) -> Iterator[Tensor]:
        """C_i of one head after the other, (r, dv, dk)."""
        for h, k in enumerate(self.k):
            C = self.moments(h, k)
            yield C if self.at.rotation is None else self.at.rotated(self.rows).unsqueeze().transpose(C)

    @cached_property
    def covariances(self) -> Tensor:
        """C_i, (H, r, dv, dk)."""
        return torch.stack(list(self.each_covariance()))

    @cached_property
    def sizes(self) -> tuple[Tensor, Tensor]:
        """How large v_j − o_i may be whatever rounding does, and what its square is added up from, (H, r, c)."""
        squares = self.v.square().sum(-1)[:, None] + self.o.square().sum(-1)[..., None]
        far = (squares - 2 * self.o @ self.v.mT).clamp_min(0).sqrt()
        # What a relative error of probabilities does to v_j − o_i.
        far = far + (self.P * far).sum(-1, keepdim=True)
        if self.at.rule.sinks is not None:
            far = far + (1 - self.P.sum(-1, keepdim=True)).clamp_min(0) * self.at.factors[5]
        return far, squares

    @cached_property
    def errors(self) -> list[tuple[Tensor, Tensor]]:
        """Of M_ij + K_ij, K_ij (r, c) and Q_i (r,): how far each may be off, and what rounding may do to its square."""
        mean, key, query, q_size, k_size, v_size, _ = self.at.factors
        (far, squares), margin, unit = self.sizes, self.at.margin, self.at.unit
        q, k = (torch.linalg.vector_norm(t, dim=-1) for t in (self.q, self.k))
        q, k, ends = q[..., None], k[:, None], squares.sqrt()
        # Sizes of parts, how far they are off, and what their squares are added up from.
        weight, own = self.W * key, self.W * query
        K = [(weight * t).sum(0) for t in (far * q, v_size * q + far * q_size, ends * q)]
        A = [(self.P * mean).sum(0) + t for t in K]
        B = [(own * t).sum((0, 2)) for t in (far * k, v_size * k + far * k_size, ends * k)]
        return [(ROUNDS * (margin * size + unit * most), ROUNDS * unit * terms.square()) for size, most, terms in (A, K, B)]

    @cached_property
    def part_sizes(self) -> tuple[Tensor, Tensor, Tensor]:
        """≥ ‖M_ij + K_ij‖_F and ‖K_ij‖_F (r, c), ≥ ‖Q_i‖_F (r,)."""
        squares = self.square, self.key, self.query
        both, keys, queries = (
            (t.clamp_min(0) + rounding).sqrt() + off for t, (off, rounding) in zip(squares, self.errors, strict=True)
        )
        return both, keys, queries

    @cached_property
    def own_size(self) -> Tensor:
        """≥ ‖M_ii + K_ii + Q_i‖_F (r,)."""
        (off, rounding), _, (own_off, own_rounding) = self.errors
        squares = (self.own(self.square) + self.query + self.own_query).clamp_min(0)
        return (squares + 2 * (self.own(rounding) + own_rounding)).sqrt() + self.own(off) + own_off

    @cached_property
    def image(self) -> HeadBlocks:
        """Every head behind its block of W_O."""
        # Not a reference back, as for the strip itself.
        return HeadBlocks(proxy(self), self.at.weights.image)

    @cached_property
    def head_norms(self) -> Tensor | None:
        """≥ ‖M_ij + K_ij‖ (r, c) of a single head, where n×n matrices are small."""
        return self.image.norms[1][0] if len(self.P) == 1 and self.at.n**2 <= SMALL else None

    @cached_property
    def mean_norms(self) -> Tensor:
        """≥ ‖M_ij‖ (r, c): by the triangle inequality, by what all heads share, and through ‖W_O‖‖W_V‖."""
        weights = self.at.weights
        values = self.P.new_tensor([w.value for w in weights.image])
        shared = self.P.amin(0) * min(0.0, weights.total - float(values.sum()))
        return torch.minimum((self.P * values[:, None, None]).sum(0) + shared, weights.out * weights.values * self.P.amax(0))

    def spread(self, g: int) -> Tensor:
        """(v_j − o_i)^gᵀ W_O^gᵀ W_O^h (v_j − o_i)^h for all h, up to terms that cancel in sums symmetric in g and h."""
        G, v, o = self.at.grams.pairs("oo")[g], self.v, self.o
        oG = o[g] @ G
        return ((v[g] @ G) * v).sum(-1)[:, None] + (oG * o).sum(-1)[..., None] - 2 * (oG @ v.mT)

    @cached_property
    def slopes(self) -> Tensor:
        """q_ij^gᵀ W_K^g W_K^hᵀ q_ij^h for all g and h, (H, H, r, c), or (H, H, r, 1) without rotations."""
        (H, r, dk), at, group = self.q.shape, self.at, len(self.q) // self.at.layer.kv_heads
        if at.rotation is None:
            # From W_Kᵀq, in parts no larger than covariances.
            parts = ((q.mT @ at.grams.side("k")).transpose(0, 1) for q in self.q.mT.split(dk, -1))
            return torch.cat([images @ images.mT for images in parts]).permute(1, 2, 0)[..., None]
        found = self.q.new_zeros(H, H, r, self.k.shape[1])
        step = max(1, CACHED // (H * self.k.shape[1] * dk))
        for start in range(self.rows.start, self.rows.stop, step):
            # Only what these rows see.
            rows = slice(start, min(start + step, self.rows.stop))
            first, last = at.rule.span(rows, at.n)
            a = at.turned_back(rows, slice(first, last))
            part = found[:, :, start - self.rows.start :, first - self.columns.start :][:, :, : a.shape[1], : a.shape[2]]
            for g in range(H):
                # Keys that several heads share are multiplied once; what is before g is known.
                first = g // group * group
                images = a[g].flatten(0, 1) @ at.grams.pairs("kk")[g, first::group]
                inner = images.reshape(-1, 1, *a.shape[1:]) * a[first:].unflatten(0, (-1, group))
                part[g, g:] = part[g:, g] = inner.sum(-1).flatten(0, 1)[g - first :]
        return found

    @cached_property
    def key(self) -> Tensor:
        """‖K_ij‖_F² (r, c), not rounded up."""
        return sum(self.W[g] * (self.W * self.slopes[g] * self.spread(g)).sum(0) for g in range(len(self.W)))  # type: ignore[return-value]

    @cached_property
    def mean(self) -> Tensor:
        """‖M_ij‖_F² (r, c), not rounded up."""
        grams = self.at.grams
        inner = (grams.pairs("oo") * grams.pairs("vv")).sum((-2, -1))
        return ((self.P.flatten(1).mT @ inner).mT * self.P.flatten(1)).sum(0).reshape(self.P.shape[1:])

    def mean_key(self) -> Tensor:
        """2⟨M_ij, K_ij⟩ (r, c)."""
        grams, total = self.at.grams, torch.zeros_like(self.P[0])
        for g in range(len(self.P)):
            N = grams.pairs("oo")[:, g] @ grams.pairs("vk")[g]
            v = self.v @ N if self.at.rotation is None else self.at.rotated(self.columns).apply(self.v @ N)
            inner = self.q @ v.mT - self.turned(self.o @ N)
            total += 2 * self.P[g] * (self.W * inner).sum(0)
        return total

    @cached_property
    def square(self) -> Tensor:
        """‖M_ij + K_ij‖_F² (r, c), not rounded up."""
        return self.mean + self.key + self.mean_key()

    @cached_property
    def query(self) -> Tensor:
        """‖Q_i‖_F² (r,), not rounded up."""
        (oo, qq), W, v, k, o = map(self.at.grams.pairs, ("oo", "qq")), self.W, self.v, self.k, self.o
        total, keys = torch.zeros_like(o[0, :, 0]), W @ k
        # Heads first, then coordinates of values, tokens and coordinates of keys.
        C = None if self.at.short else self.covariances.transpose(1, 2).contiguous()
        for g in range(len(W)):
            # Pairs of heads count twice, but for g itself.
            out = oo[g, g:] * (2 - torch.eye(1, len(W) - g, dtype=o.dtype, device=o.device)[0, :, None, None])
            if C is not None:
                mixed = (C[g:].flatten(1, 2) @ qq[g:, g]).reshape(-1, C[g, 0].numel())
                total += (C[g] * (out.transpose(0, 1).flatten(1) @ mixed).reshape(C[g].shape)).sum((0, 2))
                continue
            kG, oG, key = k[g] @ qq[g, g:] @ k[g:].mT, o[g] @ oo[g], keys[g] @ qq[g]
            total += ((W[g] @ (kG * ((v[g] @ out) @ v[g:].mT))) * W[g:]).sum((0, 2))
            total -= 2 * ((key @ k.mT) * (oG @ v.mT) * W).sum((0, 2))
            total += ((oG * o).sum(-1) * (key * keys).sum(-1)).sum(0)
        return total

    @cached_property
    def own_query(self) -> Tensor:
        """2⟨M_ii + K_ii, Q_i⟩ (r,)."""
        grams, W, v, k, o = self.at.grams, self.W, self.v, self.k, self.o
        rotation = None if self.at.rotation is None else self.at.rotated(self.rows)
        a = self.q if rotation is None else rotation.transpose(self.q)
        P_own, W_own, total, keys = self.own(self.P), self.own(W), torch.zeros_like(o[0, :, 0]), W @ k
        N = grams.pairs("oo").transpose(0, 1) @ grams.pairs("vq")
        if not self.at.short:
            for h, C in enumerate(self.covariances):
                z, y = (W_own[..., None] * self.delta) @ grams.pairs("oo")[:, h], a @ grams.pairs("kq")[:, h]
                sides = z.permute(1, 2, 0) @ y.transpose(0, 1) + (P_own.mT @ N[:, h].flatten(1)).reshape(C.shape)
                total += 2 * (sides * C).sum((1, 2))
            return total
        for g in range(len(W)):
            z, y = self.delta[g] @ grams.pairs("oo")[g], a[g] @ grams.pairs("kq")[g]
            inner = z @ v.mT - (z * o).sum(-1, keepdim=True)
            mean = (W @ ((v @ N[g]) * k).sum(-1)[..., None])[..., 0] - ((o @ N[g]) * keys).sum(-1)
            total += 2 * (P_own[g] * mean.sum(0) + W_own[g] * (W * inner * (y @ k.mT)).sum((0, 2)))
        return total

    def along(self, y: Tensor, weight: Tensor) -> Tensor:
        """Σ_j weight_j ‖J_ij y_j‖² over the strip, for vectors y (n, d)."""
        layer, grams, P, v, o = self.at.layer, self.at.grams, self.P, self.v, self.o
        group = layer.heads // layer.kv_heads
        dq, dk, dv = (t[0] for t in layer.split_heads((y @ layer.qkv.mT)[None]))
        dk, dv = (t.repeat_interleave(group, dim=0)[:, self.columns] for t in (dk, dv))
        dq = dq[:, self.rows] if self.at.rotation is None else self.at.rotated(self.rows).apply(dq[:, self.rows])
        S = self.W * (self.q @ (dk if self.at.rotation is None else self.at.rotated(self.columns).apply(dk)).mT)
        total = torch.zeros_like(P[0])
        for g in range(len(P)):
            moved = dv[g] @ grams.pairs("oo")[g]
            total += P[g] * (P * (moved * dv).sum(-1)[:, None]).sum(0) + S[g] * (S * self.spread(g)).sum(0)
            total += 2 * P[g] * (S * ((moved * v).sum(-1)[:, None] - o @ moved.mT)).sum(0)
        T = self.W * (dq @ self.k.mT)
        rest = self.own(P)[..., None] * dv[:, self.rows.start - self.columns.start :][:, : o.shape[1]]
        rest = rest + self.own(S)[..., None] * self.delta
        query = T @ v - T.sum(-1, keepdim=True) * o
        image = torch.einsum("grx,ghxy->hry", query, grams.pairs("oo"))
        own = (image * (query + 2 * rest)).sum((0, 2))
        return (total @ weight[self.columns]).sum() + own @ weight[self.rows]


def frobenius(at: Blocks, norm: NormLinearisation | None = None) -> tuple[float, float]:
    """‖J‖_F at one input, with a bound for what rounding may have done to it.

    Args:
        at: the blocks at tokens x; with ``norm``, x is what it puts out before its offset.
        norm: the normalisation before attention at its own tokens (1, n, d): J is then that of attention behind it.

    Returns:
        The norm, and the largest error.

    Cost: about H²·n²·(14·d_head + n) + 24·H²·n·d_head² flops for short inputs, and 10·d³ for products of weights, once for
    all inputs; with rotary embeddings, and where n² > d_head³, 2·H²·n²·d_head² + 4·H²·n·d_head³ (docs/theory/certificates).
    """
    x, layer = at.v.new_ones(at.n), at.layer
    scale = x
    if norm is not None:
        # Columns of the weights times g; the products with vectors below take the weights as they are.
        at.grams = Products(derived(layer, q=layer.q * norm.g, k=layer.k * norm.g, v=layer.v * norm.g), at.weights)
        # What was kept for a strip is of other weights.
        at.__dict__.pop("_only", None)
        scale = norm.s[0, :, 0].square().reciprocal()
    total = error = moved = x.new_zeros(())
    most = 1.0 if norm is None else 4 * norm.g.abs().max().square()
    for strip in at.strips():
        columns, rows = scale[strip.columns], scale[strip.rows]
        total = total + (strip.square @ columns).sum() + (strip.query + strip.own_query) @ rows
        (off, rounding), _, (own_off, own_rounding) = strip.errors
        error = error + 2 * most * ((rounding @ columns).sum() + own_rounding @ rows)
        moved = moved + 2 * most * ((off.square() @ columns).sum() + own_off.square() @ rows)
        if norm is not None:
            d = layer.width
            if norm.centred:
                total = total - strip.along(norm.g.expand(at.n, d), scale / d)
            t = norm.z[0].square().sum(-1) / d
            total = total - strip.along(norm.g * norm.z[0], scale * (2 - t) / d)
    squares, rounded = max(0.0, float(total)), float(error)
    value = math.sqrt(squares)
    rounded = max(math.sqrt(squares + rounded) - value, value - math.sqrt(max(0.0, squares - rounded)))
    return value, rounded + math.sqrt(float(moved)) + at.underflow
