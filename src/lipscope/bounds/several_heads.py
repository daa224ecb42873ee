"""Certificates of a layer with several heads: block norms, row–column, and the factored form.

J = W_O · diag_h(J_h) · [τW_Q; W_K; W_V], so J is the sum of a mean part, a key part and a query part, σ ≤ mean + key +
query:

    mean   ≤ min( ‖W_O‖‖W_V‖ max_h ‖P^h‖,  ‖P̄‖‖W_OW_V‖ + ‖W_O‖‖W_V‖ max_h ‖P^h − P̄‖ ),   P̄ the mean over the heads
    key²   ≤ max_j ‖Σ_h W_K^hᵀ R_jᵀ( Σ_i κ_i P_ij^h q_i^h q_i^hᵀ )R_j W_K^h‖,    κ_i = ‖Σ_h W_O^h Cov_i^h W_O^hᵀ‖
    query  ≤ max_i ‖Σ_h W_O^h C_i^h R_i τW_Q^h‖

with Cov_i the covariance of the values under row i and C_i that of values and keys (W²/P and W in place of P with a
soft-cap), and R the rotations of rotary embeddings. The sums over heads are bounded by ``spectral_upper``. A strip takes its
heads one after another, so that no more than a fixed number of its matrices is held when it is not kept. Ours; proofs in
docs/theory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds.head_core import HeadCore, Strip, Strips, power_of_two, rotate_back, with_diagonal
from lipscope.bounds.spectral_upper import (
    best_vectors,
    factor,
    factor_pair,
    matrix_norm_upper,
    product_norms,
    quadratic_norms,
)
from lipscope.bounds.weights import HeadWeights, LayerWeights

# heads·n·d_head³ up to which covariances are also taken through W_O.
CHEAP = 1 << 25
# Entries of the d_head × d_head matrices of the key part that are held at a time.
KEY_ENTRIES = 1 << 22


def several_heads(strips: Strips, layer: Attention, weights: LayerWeights, gain: Tensor) -> dict[str, float]:
    """Every certificate of a layer with several heads, without the margin for the rounding of probabilities."""
    rows = _Rows(strips, layer, weights)
    heads, squared, B = range(layer.heads), gain.square(), rows.B * gain
    # Cauchy–Schwarz over the heads with weights ρ: (Σ_h ρ_h e_h)² ≤ (Σ_h ρ_h)(Σ_h ρ_h e_h²).
    together = math.sqrt(float((rows.together * squared).max()))
    apart = sum(math.sqrt(float((column * squared).max())) for column in rows.columns)
    row_column = min(apart, together) + float(B.max())

    def matrices(strip: Strip, names: set[str]) -> dict[str, Tensor]:
        sums = _Sums.of(strip, weights, blocks="N" in names)
        g, average = gain[strip.columns], sums.total / layer.heads
        found = {"average": average * g} if "average" in names else {}
        if not names.isdisjoint(("N", "mean")):
            mean = sums.mean(weights)
            found["mean"] = mean * g
        if "N" in names:
            found["N"] = with_diagonal(torch.minimum(sums.blocks, mean + sums.spreads) * g, strip, B)
        for h in heads:
            if not names.isdisjoint((f"P{h}", f"D{h}")):
                P = strip.core(h).P
                found |= {f"P{h}": P * g, f"D{h}": (P - average).abs() * g}
        return found

    size = power_of_two(float(gain.max()))
    scales = {
        "N": power_of_two(row_column),
        "mean": size * power_of_two(sum(w.value for w in weights.image)),
        "average": size,
    }
    scales |= {f"{kind}{h}": size for h in heads for kind in "PD"}
    # A single strip would hold all matrices at once, and takes the heads one after another instead.
    groups = [["N", "mean", "average"], *([f"P{h}", f"D{h}"] for h in heads)] if strips.single else [list(scales)]
    norms: dict[str, float] = {}
    for group in groups:
        best = best_vectors(strips.grams(matrices, scales), dict.fromkeys(group, torch.ones_like(gain)))
        norms |= {name: scales[name] * value for name, (value, _) in best.items()}
    both = weights.out * weights.values
    means = min(
        norms["mean"],
        both * max(norms[f"P{h}"] for h in heads),
        norms["average"] * weights.total + both * max(norms[f"D{h}"] for h in heads),
    )
    factored = means + _keys(strips, weights, rows.kappa, gain) + float(B.max())
    return {"block_norm": norms["N"], "row_column": row_column, "factored": factored}


class _Sums:
    """Sums over the heads of one strip, of which bounds for the blocks of the layer are made."""

    def __init__(self, strip: Strip, like: Tensor) -> None:
        shape = (strip.rows.stop - strip.rows.start, strip.columns.stop - strip.columns.start)
        self.total, self.means, self.most, self.blocks, self.spreads = (like.new_zeros(shape) for _ in range(5))
        self.least = like.new_ones(shape)

    @classmethod
    def of(cls, strip: Strip, weights: LayerWeights, blocks: bool) -> _Sums:
        """The sums of a strip, those of a single one from the first pass over it."""
        if "sums" in strip.kept:
            kept: _Sums = strip.kept["sums"]
            return kept
        sums = cls(strip, weights.gram_out)
        for h, w in enumerate(weights.image):
            sums.add(strip.core(h), w, blocks)
        return sums

    def add(self, core: HeadCore, w: HeadWeights, blocks: bool = True) -> None:
        """One more head; the block norms only if asked for."""
        self.total += core.P
        self.means.add_(core.P, alpha=w.value)
        torch.minimum(self.least, core.P, out=self.least)
        torch.maximum(self.most, core.P, out=self.most)
        if blocks:
            delta, block = core.block_norms(w)
            self.blocks += block
            self.spreads += delta.mul_(core.W).mul_(core.a)

    def mean(self, weights: LayerWeights) -> Tensor:
        """≥ ‖Σ_h P_ij^h V_h‖: by the triangle inequality, by what all heads share, and through ‖W_O‖‖W_V‖."""
        shared = self.means + self.least * (weights.total - sum(w.value for w in weights.image))
        return torch.minimum(torch.minimum(self.means, shared), weights.out * weights.values * self.most)


class _Rows:
    """First pass: what belongs to rows, and sums over columns.

    Attributes:
        B: ≥ ‖Σ_h B_i^h‖, (n,).
        kappa: κ_i, (n,).
        columns: Σ_i P_ij ρ_i² of every head, (heads, n).
        together: Σ_i (Σ_h ρ_i^h)(Σ_h ρ_i^h P_ij^h), (n,).
    """

    def __init__(self, strips: Strips, layer: Attention, weights: LayerWeights) -> None:
        like = strips.heads[0].q
        self.B, self.kappa, self.together = (like.new_zeros(strips.n) for _ in range(3))
        self.columns = like.new_zeros(layer.heads, strips.n)
        self._images = layer.heads * strips.n * layer.head_width**3 <= CHEAP
        for strip in strips:
            if strips.single:
                strip.kept["sums"] = _Sums(strip, like)
            self._add(strip, weights)

    def _add(self, strip: Strip, weights: LayerWeights) -> None:
        factors: list[tuple[Tensor, ...]] = []
        own, rho_sum = torch.zeros_like(self.B[strip.rows]), torch.zeros_like(self.B[strip.rows])
        weighted = own.new_zeros(len(own), strip.columns.stop - strip.columns.start)
        for h, w in enumerate(weights.image):
            core = strip.core(h)
            factors.append(_covariance_factors(core))
            if "sums" in strip.kept:
                strip.kept["sums"].add(core, w)
            if self._images:
                norms, c = core.covariance_norms(w)
                own += norms
            else:
                c = _head_covariance(core, w, *factors[-1][3:])
            rho = core.rho(c, w)
            self.columns[h, strip.columns] += rho.square() @ core.P
            weighted.addcmul_(rho[:, None], core.P)
            rho_sum += rho
        self.together[strip.columns] += rho_sum @ weighted
        U, Z, C_rest, F, F_rest = (torch.stack(each) for each in zip(*factors, strict=True))
        B = product_norms(weights.gram_out, weights.gram_query, (weights.out, weights.queries), U, Z, C_rest)
        self.B[strip.rows] = torch.minimum(B, own) if self._images else B
        self.kappa[strip.rows] = quadratic_norms(weights.gram_out, weights.out, F, F_rest)


def _covariance_factors(core: HeadCore) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """U, Z with UZᵀ ≈ C_i and the norm of the difference, F with FFᵀ ≈ Cov_i and likewise, in the head's own coordinates."""
    parts = [(*factor_pair(cross), *factor(own)) for _, cross, own in core.moments(None)]
    U, Z, C_rest, F, F_rest = (torch.cat(each) for each in zip(*parts, strict=True))
    C_slack, F_slack = core.moment_slack(None)
    error = core.value_error(None)
    size = core.v.square().sum(-1).max().sqrt() + core.o.square().sum(-1).sqrt()
    return U, Z, C_rest + C_slack, F, F_rest + F_slack + (2 * size + error) * error


def _head_covariance(core: HeadCore, w: HeadWeights, F: Tensor, rest: Tensor) -> Tensor:
    """c_i through W_O by way of ‖W_O‖, from the factors of the covariances."""
    c = matrix_norm_upper(F.mT @ F, symmetric=True) + rest
    if core.sink_share is not None and not core.softcapped:
        c = c + core.sink_share * core.outputs().square().sum(-1)
    return w.out**2 * c


def _keys(strips: Strips, weights: LayerWeights, kappa: Tensor, gain: Tensor) -> float:
    """The key part of the factored certificate: columns in blocks, the rows that see them strip by strip."""
    worst = 0.0
    step = max(1, KEY_ENTRIES // strips.heads[0].q.shape[1] ** 2)
    for start in range(0, strips.n, step):
        block = slice(start, min(strips.n, start + step))
        found = [_key_factors(strips, h, kappa, block) for h in range(len(strips.heads))]
        F, rest = (torch.stack(each) for each in zip(*found, strict=True))
        norms = quadratic_norms(weights.gram_key, weights.keys, F, rest)
        worst = max(worst, float((norms * gain[block].square()).max()))
    return math.sqrt(worst)


def _key_factors(strips: Strips, h: int, kappa: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    head = strips.heads[h]
    dk = head.q.shape[1]
    Q, total = head.q.new_zeros(block.stop - block.start, dk * dk), head.q.new_zeros(block.stop - block.start)
    for strip in strips:
        first, last = head.rule.span(strip.rows, strips.n)
        if last <= block.start or first >= block.stop:
            continue
        core, columns = strip.core(h), strip.columns
        low, high = max(block.start, columns.start), min(block.stop, columns.stop)
        P = core.P[:, low - columns.start : high - columns.start]
        outer = (core.q[:, :, None] * core.q[:, None, :]).flatten(1)
        part, weighted = slice(low - block.start, high - block.start), (P * kappa[strip.rows, None]).mT
        Q[part].addmm_(weighted, outer)
        total[part] += weighted.sum(-1)
    Q = Q.reshape(-1, dk, dk)
    Q = rotate_back(head.rotation, rotate_back(head.rotation, Q, block).mT, block)
    F, rest = factor(Q)
    # Queries are off by ``error``: Σ w ‖q‖·error ≤ √(Σ w ‖q‖²)·√(Σ w)·error.
    trace, error = Q.diagonal(dim1=-2, dim2=-1).sum(-1), 2 * head.rounding.unit * head.rounding.query
    return F, rest + head.rounding.margin * trace + (2 * (trace * total).sqrt() + total * error) * error
