"""The certificates of long sequences: the same numbers, a strip of rows at a time, so that no n×n matrix is ever held.

What a certificate needs of a row (B_i, c_i, ρ_i, κ_i) is found in one pass over the strips, column sums are added up on the
way, and a bound by Collatz–Wielandt needs one pass per power step, NᵀNx = Σ_strips N_sᵀ(N_s x). A strip is computed again
in every pass; memory is a few strips of all heads, and grows like n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds.head_core import HeadCore, HeadRows, turn_back
from lipscope.bounds.head_sum import factor, product_norms, quadratic_norms
from lipscope.bounds.row_gram import TINY, row_norms
from lipscope.bounds.several_heads import CHEAP, covariance_factors, head_covariance, mean_blocks
from lipscope.bounds.spectral_upper import Grams, best_vectors
from lipscope.bounds.weights import HeadWeights, LayerWeights

# Entries of one matrix of a strip over all heads, and columns whose d_head × d_head matrices are held at a time.
_STRIP, _COLUMNS = 1 << 23, 1024
# Tokens up to which n×n matrices are held, and how many of them.
DENSE, _WHOLE = 2048, 20


def strip_height(n: int, heads: int) -> int:
    """Rows of a strip, so that its matrices over all heads stay within a fixed memory."""
    return min(n, max(16, _STRIP // (n * heads)))


def height_within(n: int, heads: int, memory: int) -> int | None:
    """Rows of a strip whose matrices take at most ``memory`` bytes, 16 at least; None when n×n matrices do not take more."""
    if n <= DENSE and _WHOLE * 8 * n * n <= memory:
        return None
    return min(strip_height(n, heads), max(16, memory // ((4 * heads + _WHOLE) * 8 * n)))


@dataclass(frozen=True, eq=False)
class Strips:
    """All heads at one input, evaluated strip by strip."""

    heads: tuple[HeadRows, ...]
    n: int
    height: int

    @classmethod
    def at(cls, singles: list[Attention], x: Tensor, weights: tuple[HeadWeights, ...], height: int) -> Strips:
        """Project tokens x (n, d) by one-head layers in float64."""
        heads = tuple(HeadRows.at(single, x, w) for single, w in zip(singles, weights, strict=True))
        return cls(heads, len(x), height)

    def __iter__(self) -> Iterator[list[HeadCore]]:
        for start in range(0, self.n, self.height):
            yield self.at_rows(slice(start, min(self.n, start + self.height)))

    def at_rows(self, rows: slice) -> list[HeadCore]:
        """One strip of every head, all with the same columns."""
        return [head.core(rows) for head in self.heads]

    def grams(self, matrices: Callable[[list[HeadCore], set[str]], dict[str, Tensor]]) -> Grams:
        """NᵀNx of the nonnegative matrices whose strips ``matrices`` gives by name, in one pass for all of them."""

        def apply(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
            found = {name: torch.zeros_like(x) for name, x in vectors.items()}
            for cores in self:
                columns = cores[0].columns
                strip = matrices(cores, set(vectors))
                for name, x in vectors.items():
                    found[name][columns] += strip[name].mT @ (strip[name] @ x[columns])
            return found

        return apply


def one_head_strips(
    single: Attention, x: Tensor, w: HeadWeights, gain: Tensor, height: int
) -> tuple[dict[str, float], float]:
    """Every certificate of one head at tokens x (n, d), and the margin they are to be enlarged by."""
    strips = Strips.at([single], x, (w,), height)
    n = len(x)
    B, columns = x.new_zeros(n), x.new_zeros(n)
    for (core,) in strips:
        B[core.rows], c = core.covariance_norms(w)
        columns[core.columns] += core.rho(c, w).square() @ core.P

    def total(cores: list[HeadCore], names: set[str]) -> dict[str, Tensor]:
        (core,) = cores
        return {"N": _with_diagonal(core.block_norms(w)[1] * gain[core.columns], core, B * gain)}

    value, perron = best_vectors(strips.grams(total), {"N": x.new_ones(n)})["N"]
    found = {
        "row_column": math.sqrt(float((columns * gain.square()).max())) + float((B * gain).max()),
        "block_norm": value,
        "row_gram": _row_gram(strips, w, B, gain, perron),
    }
    return found, strips.heads[0].margin


def _row_gram(strips: Strips, w: HeadWeights, B: Tensor, gain: Tensor, x: Tensor, rounds: int = 2) -> float:
    """See ``row_gram.row_gram``; a pass for every choice of x."""
    best = math.inf
    eps = (2 * len(x) + 8) * torch.finfo(x.dtype).eps
    for _ in range(rounds):
        x = (x / x.max()).clamp_min(1e-100)
        sums = torch.zeros_like(x)
        own = torch.where(B > 0, x * gain / B.clamp_min(TINY), 0.0)
        for (core,) in strips:
            block = core.block_norms(w)[1]
            scaled = (x * gain)[core.columns]
            weights = torch.where(block > 0, scaled / block.clamp_min(TINY), 0.0)
            total = _with_diagonal(block * gain[core.columns], core, B * gain)
            rows = torch.minimum(row_norms(core, w, weights, own[core.rows], B[core.rows]), total @ x[core.columns])
            sums[core.columns] += total.mT @ rows
        value = float((sums / x).max()) * (1 + eps)
        if not math.isfinite(value):
            break
        best = min(best, math.sqrt(value))
        x = sums
        if float(x.max()) == 0:
            break
    return best


def _with_diagonal(strip: Tensor, core: HeadCore, diagonal: Tensor) -> Tensor:
    """The strip with ``diagonal`` (n,) added to the entries (i, i)."""
    strip = strip.clone()
    strip.diagonal(core.rows.start - core.columns.start).add_(diagonal[core.rows])
    return strip


@dataclass(eq=False)
class _Rows:
    """First pass over several heads: what belongs to rows, and sums over columns."""

    B: Tensor
    kappa: Tensor
    columns: Tensor
    together: Tensor
    margin: float = field(default=0.0)


def several_heads_strips(
    layer: Attention, x: Tensor, weights: LayerWeights, gain: Tensor, height: int
) -> tuple[dict[str, float], float]:
    """Every certificate of a layer with several heads at tokens x (n, d), and the margin they are to be enlarged by."""
    strips = Strips.at([layer.head(h) for h in range(layer.heads)], x, weights.image, height)
    rows = _first_pass(strips, layer, weights)
    B, H = rows.B * gain, layer.heads

    def matrices(cores: list[HeadCore], names: set[str]) -> dict[str, Tensor]:
        g = gain[cores[0].columns]
        mean = mean_blocks([core.P for core in cores], weights)
        average = torch.stack([core.P for core in cores]).mean(0)
        found = {"mean": mean * g, "average": average * g}
        for h, core in enumerate(cores):
            found |= {f"P{h}": core.P * g, f"D{h}": (core.P - average).abs() * g}
        if "N" in names:
            blocks, spreads = torch.zeros_like(mean), torch.zeros_like(mean)
            for core, w in zip(cores, weights.image, strict=True):
                delta, block = core.block_norms(w)
                blocks += block
                spreads += delta.mul_(core.W).mul_(core.a)
            found["N"] = _with_diagonal(torch.minimum(blocks, mean + spreads) * g, cores[0], B)
        return found

    names = ["N", "mean", "average", *(f"{kind}{h}" for h in range(H) for kind in "PD")]
    best = best_vectors(strips.grams(matrices), dict.fromkeys(names, torch.ones_like(B)))
    norms = {name: value for name, (value, _) in best.items()}
    both = weights.out * weights.values
    means = min(
        norms["mean"],
        both * max(norms[f"P{h}"] for h in range(H)),
        norms["average"] * weights.total + both * max(norms[f"D{h}"] for h in range(H)),
    )
    squared = gain.square()
    apart = sum(math.sqrt(float((column * squared).max())) for column in rows.columns)
    found = {
        "block_norm": norms["N"],
        "row_column": min(apart, math.sqrt(float((rows.together * squared).max()))) + float(B.max()),
        "factored": means + _keys(strips, weights, rows.kappa, gain) + float(B.max()),
    }
    return found, rows.margin


def _first_pass(strips: Strips, layer: Attention, weights: LayerWeights) -> _Rows:
    n, like = strips.n, strips.heads[0].q
    rows = _Rows(like.new_zeros(n), like.new_zeros(n), like.new_zeros(layer.heads, n), like.new_zeros(n))
    rows.margin = max(head.margin for head in strips.heads)
    images = layer.heads * n * layer.head_width**3 <= CHEAP
    for cores in strips:
        part, columns = cores[0].rows, cores[0].columns
        factors = [covariance_factors(core) for core in cores]
        U, Z, C_rest, F, F_rest = (torch.stack(each) for each in zip(*factors, strict=True))
        B = product_norms(weights.gram_out, weights.gram_query, (weights.out, weights.queries), U, Z, C_rest)
        own, rho_sum, weighted = torch.zeros_like(B), torch.zeros_like(B), torch.zeros_like(cores[0].P)
        for h, (core, w) in enumerate(zip(cores, weights.image, strict=True)):
            if images:
                norms, c = core.covariance_norms(w)
                own += norms
            else:
                c = head_covariance(core, w, F[h], F_rest[h])
            rho = core.rho(c, w)
            rows.columns[h, columns] += rho.square() @ core.P
            weighted.addcmul_(rho[:, None], core.P)
            rho_sum += rho
        rows.together[columns] += rho_sum @ weighted
        rows.B[part] = torch.minimum(B, own) if images else B
        rows.kappa[part] = quadratic_norms(weights.gram_out, weights.out, F, F_rest)
    return rows


def _keys(strips: Strips, weights: LayerWeights, kappa: Tensor, gain: Tensor) -> float:
    """The key part of the factored certificate: columns in blocks, the rows that see them strip by strip."""
    worst = 0.0
    for start in range(0, strips.n, _COLUMNS):
        block = slice(start, min(strips.n, start + _COLUMNS))
        found = [_key_factors(strips, h, kappa, block) for h in range(len(strips.heads))]
        F, rest = (torch.stack(each) for each in zip(*found, strict=True))
        norms = quadratic_norms(weights.gram_key, weights.keys, F, rest)
        worst = max(worst, float((norms * gain[block].square()).max()))
    return math.sqrt(worst)


def _key_factors(strips: Strips, h: int, kappa: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    head = strips.heads[h]
    dk = head.q.shape[1]
    Q = head.q.new_zeros(block.stop - block.start, dk * dk)
    for start in range(0, strips.n, strips.height):
        rows = slice(start, min(strips.n, start + strips.height))
        first, last = head.rule.span(rows, strips.n)
        if last <= block.start or first >= block.stop:
            continue
        core = head.core(rows)
        low, high = max(block.start, core.columns.start), min(block.stop, core.columns.stop)
        P = core.P[:, low - core.columns.start : high - core.columns.start]
        outer = (core.q[:, :, None] * core.q[:, None, :]).flatten(1)
        Q[low - block.start : high - block.start].addmm_((P * kappa[rows, None]).mT, outer)
    Q = Q.reshape(-1, dk, dk)
    Q = turn_back(head.turn, turn_back(head.turn, Q, block).mT, block)
    F, rest = factor(Q)
    return F, rest + head.margin * Q.diagonal(dim1=-2, dim2=-1).sum(-1)
