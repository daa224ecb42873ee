"""One head at one input, in float64: the probabilities, block norms and covariances that certificates are made of.

A ``HeadCore`` holds a strip of rows of the scores with the columns that they see, so that long sequences need no n×n
matrix; for short ones a single strip holds all rows. Every number here is an upper bound of what it stands for, its own
rounding included; see ``head_rounding``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lipscope.attention.core import Point
from lipscope.attention.layer import Attention
from lipscope.attention.rotary import Rotation
from lipscope.attention.scores import ScoreRule
from lipscope.bounds.head_rounding import Rounding
from lipscope.bounds.spectral_upper import Grams, matrix_norm_upper
from lipscope.bounds.weights import HeadWeights

# Entries of scratch memory for the covariances of one block of rows, and columns whose products are formed at a time.
SCRATCH, COLUMNS = 1 << 23, 2048
# Multiplications up to which block norms are computed from the blocks themselves.
SMALL = 1 << 22
# heads·n² up to which all heads of a single strip are kept instead of being evaluated again.
FEW = 1 << 21
_TINY = 1e-300


@dataclass(frozen=True, eq=False)
class HeadRows:
    """One head at one input: projections and rules, from which any strip of rows is evaluated.

    Attributes are those of ``HeadCore``, for all n tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    raw_k: Tensor
    centre: Tensor
    rule: ScoreRule
    softcapped: bool
    sinks: bool
    rounding: Rounding
    rotation: Rotation | None
    weights: HeadWeights

    @classmethod
    def at(cls, single: Attention, x: Tensor, weights: HeadWeights, offset: Tensor | None = None) -> HeadRows:
        """Project tokens x (n, d), to which an offset is to be added, by a one-head layer in float64."""
        point = Point.of(single, x[None], offset)
        q, k, v = (t[0, 0] for t in (point.q, point.k, point.v))
        softcapped, sinks = single.softcap is not None, single.sinks is not None
        mean = v.mean(0)
        centre = mean if point.shift is None else mean + point.shift[0, 0, 0]
        rotation, gain = single.rotation(x.shape[0], 1), None
        if rotation is not None:
            rotation = Rotation(rotation.cos[0, 0], rotation.sin[0, 0], rotation.interleaved)
            gain = max(1.0, float((rotation.cos.square() + rotation.sin.square()).max().sqrt()))
        rule = single.score_rule(x.shape[0], 1, tiled=True)
        rounding = Rounding.of(weights, x, rule, gain, offset)
        shifted = k if softcapped or sinks else k - k.mean(0)
        return cls(q, shifted, v - mean, k, centre, rule, softcapped, sinks, rounding, rotation, weights)

    def columns(self, rows: slice) -> slice:
        """The columns that rows may see, and those of the rows themselves."""
        first, last = self.rule.span(rows, len(self.q))
        return slice(min(first, rows.start), max(last, rows.stop))

    def core(self, rows: slice) -> HeadCore:
        """The strip of these rows."""
        n, columns = len(self.q), self.columns(rows)
        raw = self.q[rows] @ self.raw_k[columns].mT
        P, W = (t[0, 0] for t in self.rule.probabilities(raw[None, None], rows, columns, n))
        v = self.v[columns]
        o, sink_share = P @ v, None
        if self.sinks:
            sink_share = self.rule.sink_share(raw[None, None], rows, columns, n)[0, 0, :, 0]
            o = o - sink_share[:, None] * self.centre
        return HeadCore(
            q=self.q[rows],
            k=self.k[columns],
            v=v,
            o=o,
            P=P,
            W=W if self.softcapped else P,
            sink_share=sink_share,
            centre=self.centre,
            softcapped=self.softcapped,
            rounding=self.rounding,
            rotation=_part(self.rotation, columns),
            row_rotation=_part(self.rotation, rows),
            weights=self.weights,
            rows=rows,
            columns=columns,
            n=n,
        )


def _part(rotation: Rotation | None, places: slice) -> Rotation | None:
    return None if rotation is None else Rotation(rotation.cos[places], rotation.sin[places], rotation.interleaved)


@dataclass(frozen=True, eq=False, kw_only=True)
class HeadCore:
    """One head evaluated at one input: r rows of its scores and c columns, all n of both when it is the only strip."""

    q: Tensor  # scaled queries (r, dk)
    k: Tensor  # keys (c, dk), shifted by their mean where a shift does not matter
    v: Tensor  # values (c, dv), shifted by their mean
    o: Tensor  # outputs Σ_j P_ij v_j, shifted likewise
    P: Tensor  # probabilities (r, c)
    W: Tensor  # P times the slope of the soft-cap
    sink_share: Tensor | None  # share of the sink in every row (r,), or None
    centre: Tensor  # the mean that was taken from the values
    softcapped: bool
    rounding: Rounding
    rotation: Rotation | None  # the rotations R_j of rotary embeddings at the columns, or None; q and k are rotated already
    row_rotation: Rotation | None  # those at the rows
    weights: HeadWeights
    rows: slice  # which rows of the scores
    columns: slice  # which columns; the rows see nothing outside
    n: int  # number of tokens

    @classmethod
    def at(cls, single: Attention, x: Tensor, weights: HeadWeights) -> HeadCore:
        """Evaluate a one-head layer in float64 at tokens x (n, d), all rows."""
        return HeadRows.at(single, x, weights).core(slice(0, len(x)))

    @property
    def margin(self) -> float:
        """Relative rounding margin of a probability."""
        return self.rounding.margin

    def value_error(self, w: HeadWeights | None) -> Tensor:
        """What rounding may do to ‖v_j − o_i‖ seen through the output weights, for every row."""
        size = self.P.new_full((len(self.P),), self.rounding.value)
        if self.sink_share is not None:
            size = size + self.sink_share * self.rounding.shift
        return 2 * self.rounding.unit * (1.0 if w is None else w.out) * size

    @property
    def gradient_error(self) -> float:
        """What rounding may do to ‖a_ij‖."""
        return 2 * self.rounding.unit * self.rounding.query * self.weights.sizes[1]

    @property
    def orthogonal(self) -> bool:
        """∂s_ij/∂x_j is the same for all j: no soft-cap, no rotary embeddings."""
        return not self.softcapped and self.rotation is None

    @cached_property
    def a(self) -> Tensor:
        """‖a_ij‖, a_ij = W_KᵀR_jᵀq_i with τ inside q: (r, 1), or (r, c) with rotary embeddings; rounding included."""
        R_K, error = self.weights.R_K, self.gradient_error
        if self.rotation is None:
            norms: Tensor = torch.linalg.vector_norm(self.q @ R_K.mT, dim=-1, keepdim=True) + error
            return norms
        return torch.cat([torch.linalg.vector_norm(Y, dim=-1) + error for _, Y in self.pair_images(R_K, self.q)])

    def pair_images(self, M: Tensor, t: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """M R_jᵀ t_i for all pairs, (rows i, columns j, rows of M), a block of rows at a time."""
        n, count = t.shape[0], self.k.shape[0]
        step = max(1, SCRATCH // (count * M.shape[0]))
        pieces = _pieces(count)
        rotated = [self.rotated(M, piece).flatten(0, 1).mT for piece in pieces] if len(pieces) == 1 else None
        for start in range(0, n, step):
            part = slice(start, min(n, start + step))
            images = t.new_empty(part.stop - part.start, count, M.shape[0])
            for which, piece in enumerate(pieces):
                right = self.rotated(M, piece).flatten(0, 1).mT if rotated is None else rotated[which]
                images[:, piece] = (t[part] @ right).reshape(len(images), -1, M.shape[0])
            yield part, images

    def query_gradients(self, w: HeadWeights, shift: Tensor) -> tuple[Tensor, Tensor]:
        """‖b_ij‖ and ‖b_ij − R_Q R_iᵀ shift_i‖, b_ij = τW_QᵀR_iᵀk_j, for all pairs, with rotary embeddings."""
        norms, spreads = torch.empty_like(self.P), torch.empty_like(self.P)
        for i, M in enumerate(self.rotated(w.R_Q)):
            b = self.k @ M.mT
            norms[i] = torch.linalg.vector_norm(b, dim=-1)
            spreads[i] = torch.linalg.vector_norm(b - M @ shift[i], dim=-1)
        return norms, spreads

    def rotated(self, M: Tensor, piece: slice | None = None) -> Tensor:
        """M R_jᵀ for every column j (of a piece), (columns, rows of M, dk)."""
        assert self.rotation is not None
        piece = piece or slice(0, len(self.k))
        return Rotation(self.rotation.cos[piece, None], self.rotation.sin[piece, None], self.rotation.interleaved).apply(
            M.expand(piece.stop - piece.start, *M.shape)
        )

    def projected_norm(self, t: Tensor, M: Tensor) -> float:
        """‖t Mᵀ‖, or the largest ‖t R_j Mᵀ‖ over tokens with rotary embeddings."""
        if self.rotation is None:
            return float(torch.linalg.matrix_norm(t @ M.mT, 2))
        rotated = self.rotated(M)
        return float(matrix_norm_upper(rotated @ (t.mT @ t) @ rotated.mT, symmetric=True).max().sqrt())

    def block_norms(self, w: HeadWeights) -> tuple[Tensor, Tensor]:
        """‖W_O(v_j − o_i)‖ and P_ij‖W_O W_V + s_ij W_O(v_j − o_i)a_iᵀ‖ for all pairs, s the slope of the soft-cap."""
        v, o, margin, P = *self.through_output(w), self.margin, self.P
        size = v.square().sum(-1)[None, :] + o.square().sum(-1)[:, None]
        delta2 = torch.addmm(size, o, v.mT, alpha=-2).clamp_min_(0).add_(size, alpha=margin)
        if self.rotation is None:
            g = self.q @ w.VK.mT
            inner = g @ v.mT - (g * o).sum(-1, keepdim=True)
            g2 = g.square().sum(-1, keepdim=True)
        else:
            inner, g2 = torch.empty_like(P), torch.empty_like(P)
            for part, G in self.pair_images(w.VK, self.q):
                g2[part] = G.square().sum(-1)
                inner[part] = (G @ o[part, :, None])[..., 0].neg_() + (G * v).sum(-1)
        g_error, error = w.out * w.sizes[2] * self.gradient_error, self.value_error(w)[:, None]
        delta2 = delta2.sqrt_().add_(error).square_()
        slack = 2 * (margin * g2.sqrt() + g_error) * size.sqrt_() + g2.sqrt() * error
        a2, g2 = self.a.square(), (g2.sqrt() * (1 + margin) + g_error).square()
        if self.softcapped:
            slope = self.W / P.clamp_min(_TINY)
            inner, slack = inner * slope, slack * slope
            a2, g2 = a2 * slope.square(), g2 * slope.square()
        trace = 2 * (inner + slack) + a2 * delta2
        determinant = (g2 * delta2 - inner.abs().sub_(slack).clamp_min_(0).square_()).clamp_min_(0)
        growth = (trace + (trace.square() + 4 * determinant).sqrt_()) / 2
        norms = (w.value**2 + growth.clamp_min_(0)).sqrt_()
        delta = delta2.sqrt_()
        if self.n**2 * w.V.numel() * w.V.shape[0] <= SMALL:
            norms = torch.minimum(norms, self._exact_blocks(w, v, o, delta))
        return delta, P * norms

    def _exact_blocks(self, w: HeadWeights, v: Tensor, o: Tensor, delta: Tensor) -> Tensor:
        """‖W_O W_V + s_ij W_O(v_j − o_i)a_iᵀ‖ for all pairs from the matrices themselves, when they are few and small."""
        pairs = self.rotation is not None
        a = torch.cat([Y for _, Y in self.pair_images(w.K, self.q)]) if pairs else (self.q @ w.K.mT)[:, None]
        update = v[None] - o[:, None]
        if self.softcapped:
            update = update * (self.W / self.P.clamp_min(_TINY))[..., None]
        M = w.V + update[..., None] * a[..., None, :]
        rest = w.value_error + self.value_error(w)[:, None] * self.a + delta * self.gradient_error
        return matrix_norm_upper(M, squarings=5) + self.margin * (w.value + delta * self.a) + rest

    def covariance_norms(self, w: HeadWeights | None) -> tuple[Tensor, Tensor]:
        """‖B_i‖ and c_i seen through the weights of the head, or ‖C_i‖ and c_i in the head's own coordinates.

        B_i = W_O C_i τW_Q with C_i = Σ_j W_ij (v_j − o_i) k_jᵀ, and c_i = ‖Σ_j P_ij s_ij² (v_j − o_i)(v_j − o_i)ᵀ‖.
        """
        parts = []
        for _, cross, own in self.moments(w):
            parts.append((matrix_norm_upper(cross), matrix_norm_upper(own, symmetric=True)))
        B, c = (torch.cat(norms) for norms in zip(*parts, strict=True))
        if self.sink_share is not None and not self.softcapped:
            # The sink is one more token, with value 0: it must be counted for the deviations to have mean zero.
            sink = self.outputs() if w is None or w.R_O is None else self.outputs() @ w.R_O.mT
            c = c + self.sink_share * sink.square().sum(-1)
        # Cancellation in a covariance is relative to the second moments it is the difference of.
        slack_B, slack_c = self.moment_slack(w)
        return B + slack_B, ((c + slack_c).sqrt() + self.value_error(w)).square()

    def outputs(self) -> Tensor:
        """The outputs o_i themselves, the common term of the values included."""
        return self.P @ self.v + self.P.sum(-1, keepdim=True) * self.centre

    def value_sizes(self, w: HeadWeights | None) -> Tensor:
        """Sizes of the terms of v_j − o_i, the largest that every row sees, through the output weights."""
        v, o = self.through_output(w)
        size: Tensor = self._largest(v) + torch.linalg.vector_norm(o, dim=-1)
        if self.sink_share is not None:
            size = size + self.sink_share * (1.0 if w is None else w.out) * torch.linalg.vector_norm(self.centre)
        return size

    def _largest(self, t: Tensor) -> Tensor:
        """The largest norm of a vector (c, ·) among those that every row sees."""
        norms = torch.linalg.vector_norm(t, dim=-1).expand_as(self.P)
        largest: Tensor = norms.masked_fill(self.P == 0, 0.0).amax(-1)
        return largest

    def moment_slack(self, w: HeadWeights | None) -> tuple[Tensor, Tensor]:
        """What rounding may add to the norms of the two kinds of ``moments``, per row, from what the row sees."""
        k = self.k if w is None or self.rotation is not None else self.k @ w.R_Q.mT
        v_size, k_size, k_error = self.value_sizes(w), self._largest(k), 2 * self.rounding.unit
        k_error *= self.rounding.key * (1.0 if w is None else w.sizes[0])
        if self.row_rotation is not None:
            k_size = k_size * (self.row_rotation.cos.square() + self.row_rotation.sin.square()).amax(-1).sqrt().clamp_min(
                1.0
            )
            k_size = k_size * (1.0 if w is None else w.query)
        mass, error = self.P.sum(-1), self.value_error(w)
        return mass * (self.margin * v_size * k_size + error * k_size + v_size * k_error), mass * self.margin * v_size**2

    def moments(self, w: HeadWeights | None, U: Tensor | None = None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """B_i, or C_iR_i without weights, and Σ_j U_ij (v_j − o_i)(v_j − o_i)ᵀ, a block of rows at a time.

        U is W²/P = P·s² by default, s the slope of the soft-cap.
        """
        v, o = self.through_output(w)
        k = self.k if w is None or self.rotation is not None else self.k @ w.R_Q.mT
        n, r, m = len(self.P), v.shape[1], k.shape[1]
        if U is None:
            U = self.W.square() / self.P.clamp_min(_TINY) if self.softcapped else self.W
        step = max(1, SCRATCH // (r * max(r, m)))
        for start in range(0, n, step):
            part = slice(start, min(n, start + step))
            Wi, Ui, oi = self.W[part], U[part], o[part]
            crosses, squares = v.new_zeros(len(oi), r * m), v.new_zeros(len(oi), r * r)
            for piece in _pieces(len(v)):
                vj, kj = v[piece], k[piece]
                crosses.addmm_(Wi[:, piece], (vj[:, :, None] * kj[:, None, :]).flatten(1))
                squares.addmm_(Ui[:, piece], (vj[:, :, None] * vj[:, None, :]).flatten(1))
            cross = torch.baddbmm(crosses.reshape(-1, r, m), oi[:, :, None], (Wi @ k)[:, None, :], alpha=-1)
            if self.rotation is not None:
                cross = rotate_back(self.row_rotation, cross, part)
                cross = cross if w is None else cross @ w.R_Q.mT
            # Σ U(v−o)(v−o)ᵀ = Σ U v vᵀ − o(Uv − ½|U|o)ᵀ − (Uv − ½|U|o)oᵀ
            shift = Ui @ v - oi * Ui.sum(-1, keepdim=True) / 2
            left, right = torch.stack([oi, shift], dim=-1), torch.stack([shift, oi], dim=1)
            yield part, cross, torch.baddbmm(squares.reshape(-1, r, r), left, right, alpha=-1)

    def rho(self, c: Tensor, w: HeadWeights) -> Tensor:
        """ρ_i: √(‖V‖² + c_i‖a_i‖²), or ‖V‖ + √c_i max_j‖a_ij‖ when the gradients a_ij depend on j."""
        # What a row does not see has no share in its covariance.
        a = self.a[:, 0] if self.rotation is None else self.a.masked_fill(self.P == 0, 0.0).amax(-1)
        return (w.value**2 + c * a.square()).sqrt() if self.orthogonal else w.value + c.sqrt() * a

    def through_output(self, w: HeadWeights | None) -> tuple[Tensor, Tensor]:
        """Values and outputs through W_O."""
        if w is None or w.R_O is None:
            return self.v, self.o
        return self.v @ w.R_O.mT, self.o @ w.R_O.mT


def rotate_back(rotation: Rotation | None, M: Tensor, part: slice) -> Tensor:
    """M_i R_i for matrices M (places i of ``part``, ·, dk); M without rotations."""
    if rotation is None:
        return M
    return Rotation(rotation.cos[part, None], rotation.sin[part, None], rotation.interleaved).transpose(M)


def _pieces(count: int) -> list[slice]:
    return [slice(start, min(count, start + COLUMNS)) for start in range(0, count, COLUMNS)]


class Strip:
    """Some rows of the scores of all heads, all with the same columns; what was computed for it is kept with it."""

    def __init__(self, heads: tuple[HeadRows, ...], rows: slice, keep: bool) -> None:
        self._heads, self._cores, self._keep = heads, dict[int, HeadCore](), keep
        self.rows, self.columns, self.kept = rows, heads[0].columns(rows), dict[str, Any]()

    def core(self, head: int) -> HeadCore:
        """One head on these rows."""
        core = self._cores.get(head) or self._heads[head].core(self.rows)
        if self._keep:
            self._cores[head] = core
        return core


class Strips:
    """All heads of a layer at tokens x (n, d), a strip of rows at a time.

    A strip is computed again in every pass over them, and memory is that of one strip of all heads. A single strip lives
    as long as this object; its cores are kept if there are few of them.
    """

    def __init__(
        self, layer: Attention, x: Tensor, weights: tuple[HeadWeights, ...], height: int, offset: Tensor | None = None
    ) -> None:
        """Project tokens in float64 by a float64 layer, for strips of ``height`` rows."""
        self.heads = tuple(HeadRows.at(layer.head(h), x, w, offset) for h, w in enumerate(weights))
        self.n, self.height = len(x), min(height, len(x))
        self.margin = max(head.rounding.margin for head in self.heads)
        self.underflow = sum(head.rounding.underflow(w, len(x)) for head, w in zip(self.heads, weights, strict=True))
        self._only = [Strip(self.heads, slice(0, self.n), keep=len(weights) * self.n**2 <= FEW)] if self.single else []

    @property
    def single(self) -> bool:
        """One strip has all rows."""
        return self.height == self.n

    def __iter__(self) -> Iterator[Strip]:
        yield from self._only
        for start in range(0, 0 if self.single else self.n, self.height):
            yield Strip(self.heads, slice(start, min(self.n, start + self.height)), keep=True)

    def grams(self, matrices: Callable[[Strip, set[str]], dict[str, Tensor]], scales: dict[str, float]) -> Grams:
        """Products NᵀNx/s² of the nonnegative matrices N whose strips ``matrices`` gives by name, one pass for all of them.

        Scales s, powers of two near the largest entry, keep the squares of entries within the range of floats. Of a single
        strip every matrix is formed once: the first call asks for all of them.
        """
        held: dict[str, Tensor] = {}

        def apply(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
            if self.single:
                if not held:
                    held.update({name: N.div_(scales[name]) for name, N in matrices(self._only[0], set(vectors)).items()})
                return {name: held[name].mT @ (held[name] @ x) for name, x in vectors.items()}
            found = {name: torch.zeros_like(x) for name, x in vectors.items()}
            for strip in self:
                part = matrices(strip, set(vectors))
                for name, x in vectors.items():
                    image = part[name] @ x[strip.columns] / scales[name]
                    found[name][strip.columns] += part[name].mT @ image / scales[name]
            return found

        return apply


def power_of_two(size: float) -> float:
    """The power of two above a positive number; 1 for 0 and infinity."""
    return math.ldexp(1.0, math.frexp(size)[1]) if math.isfinite(size) else 1.0


def with_diagonal(matrix: Tensor, strip: Strip, diagonal: Tensor) -> Tensor:
    """A strip of an n×n matrix, with ``diagonal`` (n,) added in place to its entries (i, i)."""
    matrix.diagonal(strip.rows.start - strip.columns.start).add_(diagonal[strip.rows])
    return matrix
