"""One head at one input, in float64: the probabilities, block norms and covariances that certificates are made of.

A ``HeadCore`` holds a strip of rows of the scores with the columns that they see, so that long sequences need no n×n
matrix; for short ones a single strip holds all rows. Every number here is an upper bound of what it stands for, its own
rounding included; see ``rounding_margin``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.rotary import Rotation
from lipscope.attention.scores import ScoreRule, tile_of
from lipscope.bounds.spectral_upper import Grams, matrix_norm_upper
from lipscope.bounds.weights import HeadWeights

# Entries of scratch memory for the covariances of one block of rows, and columns whose products are formed at a time.
SCRATCH, COLUMNS = 1 << 23, 2048
# Multiplications up to which block norms are computed from the blocks themselves.
SMALL = 1 << 22
# heads·n² up to which all heads of a single strip are kept instead of being evaluated again.
FEW = 1 << 21
_TINY = 1e-300
# A probability below e^−_UNDERFLOW is zero in float64; rows of an additive term looked at together.
_UNDERFLOW, _ROWS = 750.0, 256


def rounding_margin(weights: HeadWeights, x: Tensor, rule: ScoreRule, gain: float = 1.0) -> float:
    """Relative error of a probability, and hence of every sum of nonnegative terms built on it.

    A score is two products of length d and one of length dk, so its error is at most (2d + dk)·eps times
    |τ|‖W_Q‖_F‖W_K‖_F (‖x‖ + ‖b_Q‖/‖W_Q‖_F)(‖x‖ + ‖b_K‖/‖W_K‖_F); the exponential and the normalisation double it, and a
    further factor 2 and 8(n + d) units cover the remaining sums. Rotations of norm at most ``gain`` enlarge a score by its
    square, and add a few products. Adding a term B_ij, and the peak that is taken away, round once each.
    """
    n, d = x.shape
    size = float(torch.linalg.vector_norm(x, dim=-1).max())
    scores = gain**2 * weights.score_scale * (size + weights.query_shift) * (size + weights.key_shift)
    eps = torch.finfo(torch.float64).eps
    return eps * (4 * (2 * d + weights.R_K.shape[1] + 8) * scores + 8 * (n + d) + 4 * additive_size(rule, n, scores))


def additive_size(rule: ScoreRule, n: int, scores: float) -> float:
    """Largest additive term of an entry whose probability may differ from zero, when scores without it are ≤ ``scores``.

    Entry (i, j) is compared with the largest visible term of its row: with B_ij < max_l B_il − 2·scores − 750, P_ij is zero.
    """
    if rule.additive is None:
        return 0.0
    everything, largest = slice(0, n), 0.0
    for start in range(0, n, _ROWS):
        rows = slice(start, min(n, start + _ROWS))
        B = tile_of(rule.additive, rows, everything)
        visible = rule.visible(rows, everything, n, B.device)
        seen = B if visible is None else torch.where(visible, B, float("-inf"))
        matters = (seen > float("-inf")) & (seen >= seen.amax(-1, keepdim=True) - (2 * scores + _UNDERFLOW))
        largest = max(largest, float(torch.where(matters, seen.abs(), 0.0).amax()))
    return largest


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
    margin: float
    rotation: Rotation | None
    weights: HeadWeights

    @classmethod
    def at(cls, single: Attention, x: Tensor, weights: HeadWeights) -> HeadRows:
        """Project tokens x (n, d) by a one-head layer in float64."""
        q, k, v = (t[0, 0] for t in single.project(x[None]))
        softcapped, sinks = single.softcap is not None, single.sinks is not None
        centre = v.mean(0)
        rotation, gain = single.rotation(x.shape[0], 1), 1.0
        if rotation is not None:
            rotation = Rotation(rotation.cos[0, 0], rotation.sin[0, 0], rotation.interleaved)
            gain = max(1.0, float((rotation.cos.square() + rotation.sin.square()).max().sqrt()))
        rule = single.score_rule(x.shape[0], 1, tiled=True)
        margin = rounding_margin(weights, x, rule, gain)
        shifted = k if softcapped or sinks else k - k.mean(0)
        return cls(q, shifted, v - centre, k, centre, rule, softcapped, sinks, margin, rotation, weights)

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
            sink_share = (1 - P.sum(-1)).clamp_min(0)
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
            margin=self.margin,
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
    margin: float  # relative rounding margin
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
    def orthogonal(self) -> bool:
        """∂s_ij/∂x_j is the same for all j: no soft-cap, no rotary embeddings."""
        return not self.softcapped and self.rotation is None

    @cached_property
    def a(self) -> Tensor:
        """‖a_ij‖, a_ij = W_KᵀR_jᵀq_i with τ inside q: (r, 1), or (r, c) with rotary embeddings."""
        R_K = self.weights.R_K
        if self.rotation is None:
            norms: Tensor = torch.linalg.vector_norm(self.q @ R_K.mT, dim=-1, keepdim=True)
            return norms
        return torch.cat([torch.linalg.vector_norm(Y, dim=-1) for _, Y in self.pair_images(R_K, self.q)])

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
        slack = 2 * margin * g2.sqrt() * size.sqrt_()
        a2, g2 = self.a.square(), g2 * (1 + margin)
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
        return matrix_norm_upper(M, squarings=5) + self.margin * (w.value + delta * self.a)

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
            sink = self.through_output(w)[1] + (self.centre if w is None or w.R_O is None else self.centre @ w.R_O.mT)
            c = c + self.sink_share * sink.square().sum(-1)
        # Cancellation in a covariance is relative to the second moments it is the difference of.
        slack_B, slack_c = self.moment_slack(w)
        return B + slack_B, c + slack_c

    def moment_slack(self, w: HeadWeights | None) -> tuple[Tensor, Tensor]:
        """What rounding may add to the norms of the two kinds of ``moments``, per row, from what the row sees."""
        v, o = self.through_output(w)
        k = self.k if w is None or self.rotation is not None else self.k @ w.R_Q.mT

        def largest(t: Tensor) -> Tensor:
            norms: Tensor = torch.linalg.vector_norm(t, dim=-1)
            return norms.expand_as(self.P).masked_fill(self.P == 0, 0.0).amax(-1)

        v_size, k_size = largest(v) + torch.linalg.vector_norm(o, dim=-1), largest(k)
        if self.row_rotation is not None:
            k_size = k_size * (self.row_rotation.cos.square() + self.row_rotation.sin.square()).amax(-1).sqrt().clamp_min(
                1.0
            )
            k_size = k_size * (1.0 if w is None else w.query)
        return self.margin * v_size * k_size, self.margin * v_size**2

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

    def __init__(self, layer: Attention, x: Tensor, weights: tuple[HeadWeights, ...], height: int) -> None:
        """Project tokens in float64 by a float64 layer, for strips of ``height`` rows."""
        self.heads = tuple(HeadRows.at(layer.head(h), x, w) for h, w in enumerate(weights))
        self.n, self.height = len(x), min(height, len(x))
        self.margin = max(head.margin for head in self.heads)
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
