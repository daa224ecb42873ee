"""The key and query parts of all heads together, for heads that have few large directions each; and what that would bring.

    ‖K‖² ≤ max_j ‖Σ_h W_K^hᵀ R_jᵀ( Σ_i κ_i W_ij^h q_i^h q_i^hᵀ )R_j W_K^h‖        ‖Q‖ ≤ max_i ‖Σ_h W_O^h C_i^h τW_Q^h‖
    κ_i  = ‖Σ_h W_O^h( Σ_j W_ij (v_j − o_i)(v_j − o_i)ᵀ )^h W_O^hᵀ‖

where sums over heads are bounded by ``spectral_upper.sum_norms``. They take n·d_head³ operations per head, and are the least
where heads act in different directions. Power steps tell what they are about, at a tenth of the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lipscope.bounds.blocks import Blocks, Strip
from lipscope.bounds.head_rounding import ROUNDS
from lipscope.bounds.spectral_upper import RANK, sum_norms


def joined_parts(at: Blocks, gain: Tensor) -> float:
    """A bound for ‖K‖ + ‖Q‖."""
    (H, n, dk), worst = at.q.shape, 0.0
    kappa, queries = torch.zeros_like(gain), torch.zeros_like(gain)
    for strip in at.strips():
        kappa[strip.rows], queries[strip.rows] = value_norms(strip), query_norms(strip)
    step = at.rows_of(H * max(dk**2, RANK**2 * H))
    for start in range(0, n, step):
        norms = _key_norms(at, kappa, slice(start, min(n, start + step)))
        worst = max(worst, float((norms * gain[start : start + step]).max()))
    return worst + float((queries * gain).max())


def estimate(at: Blocks, gain: Tensor, steps: int = 2) -> float:
    """About what ``joined_parts`` would give, from below and in float32: nothing that a bound may be made of."""
    W_O, W_Q, W_K = (at.grams.side(name).mT.float() for name in "oqk")
    generator = torch.Generator().manual_seed(0)

    def powers(product: Callable[[Tensor], Tensor], count: int, width: int) -> Tensor:
        y = torch.randn(count, width, generator=generator).to(W_O)
        for _ in range(steps):
            y = product(torch.nn.functional.normalize(y, dim=-1))
        sizes: Tensor = torch.linalg.vector_norm(y, dim=-1)
        return sizes

    def turned(t: Tensor, places: slice, back: bool = False) -> Tensor:
        if at.rotation is None:
            return t
        rotation = at.rotated(places)
        return rotation.transpose(t).float() if back else rotation.apply(t).float()

    def strips() -> Iterator[Any]:
        for strip in at.strips():
            rough = {name: getattr(strip, name).float() for name in "Wqkvo"}
            yield SimpleNamespace(rows=strip.rows, columns=strip.columns, **rough)

    def values(strip: Any, y: Tensor) -> Tensor:
        z = _into(W_O, y)
        found: Tensor = strip.W * (z @ strip.v.mT - (z * strip.o).sum(-1, keepdim=True))
        return found

    def moved(strip: Any, t: Tensor) -> Tensor:
        return _out_of(W_O, t @ strip.v - t.sum(-1, keepdim=True) * strip.o)

    def covariance(strip: Any, y: Tensor) -> Tensor:
        return moved(strip, values(strip, y))

    def query(strip: Any, y: Tensor) -> Tensor:
        t = strip.W * (turned(_into(W_Q, y), strip.rows) @ strip.k.mT)
        return _out_of(W_Q, turned(values(strip, moved(strip, t)) @ strip.k, strip.rows, True))

    def key(y: Tensor) -> Tensor:
        z = turned(_into(W_K, y), slice(0, at.n))
        total = torch.zeros_like(z)
        for strip in strips():
            t = strip.W * kappa[strip.rows, None] * (strip.q @ z[:, strip.columns].mT)
            total[:, strip.columns] += t.mT @ strip.q
        return _out_of(W_K, turned(total, slice(0, at.n), True))

    kappa, queries = W_O.new_zeros(2, at.n)
    for strip in strips():
        kappa[strip.rows] = powers(partial(covariance, strip), strip.o.shape[1], W_O.shape[1])
        queries[strip.rows] = powers(partial(query, strip), strip.o.shape[1], at.layer.width).sqrt()
    return float((powers(key, at.n, at.layer.width).sqrt() * gain).max() + (queries * gain).max())


def _into(weights: Tensor, y: Tensor) -> Tensor:
    """W_hᵀy for every head, (H, r, m)."""
    images: Tensor = (y @ weights.transpose(0, 1).flatten(1)).reshape(len(y), len(weights), -1).transpose(0, 1)
    return images


def _out_of(weights: Tensor, t: Tensor) -> Tensor:
    """Σ_h W_h t_h, (r, d)."""
    return t.transpose(0, 1).flatten(1) @ weights.mT.flatten(0, 1)


def query_norms(strip: Strip) -> Tensor:
    """≥ ‖Q_i‖ (r,)."""
    grams, weights = strip.at.grams, strip.at.weights
    # They are kept where others need them too.
    C = strip.each_covariance() if strip.at.short else strip.covariances
    norms = sum_norms(grams.side("o").mT, C, grams.side("q").mT, weights.out * weights.queries)
    off, rounding = strip.errors[2]
    return norms + off + rounding.sqrt()


def value_norms(strip: Strip) -> Tensor:
    """≥ κ_i (r,)."""
    at, (far, squares), v_size, out = strip.at, strip.sizes, strip.at.factors[5], strip.at.factors[6]
    rest = (strip.W @ strip.v) - strip.W.sum(-1, keepdim=True) * strip.o
    second = (strip.moments(h, v).sub_(rest[h, :, :, None] * strip.o[h, :, None]) for h, v in enumerate(strip.v))
    W_O = at.grams.side("o").mT
    norms = sum_norms(W_O, second, W_O, at.weights.out**2)
    # Rounding of the sums, and what the deviations are off by.
    norms = norms + ROUNDS * at.unit * (strip.W * squares * out.square()).sum((0, 2))
    off = ((at.margin * far + at.unit * v_size) * out).square()
    return (norms.sqrt() + ROUNDS * (strip.W * off).sum((0, 2)).sqrt()).square()


def _key_norms(at: Blocks, kappa: Tensor, block: slice) -> Tensor:
    """≥ ‖Σ_h W_Kᵀ R_jᵀ (Σ_i κ_i W_ij q_i q_iᵀ) R_j W_K‖^½ for tokens j of a block."""
    H, _, dk = at.q.shape
    W_K, sums = at.grams.side("k").mT, at.q.new_zeros(H, block.stop - block.start, dk * dk)
    total = torch.zeros_like(sums[..., 0])
    for strip in at.strips():
        first, low = strip.columns.start, max(block.start, strip.columns.start)
        high = min(block.stop, strip.columns.stop)
        if low < high:
            here = slice(low - block.start, high - block.start)
            weights = (strip.W * kappa[strip.rows, None])[..., low - first : high - first].mT
            for h, q in enumerate(strip.q):
                sums[h, here] += weights[h] @ (q[..., None] * q[:, None]).flatten(1)
            total[:, here] += weights.sum(-1)
    second = sums.reshape(H, -1, dk, dk)
    if at.rotation is not None:
        turned = at.rotated(block).unsqueeze()
        second = turned.transpose(turned.transpose(second).mT)
    norms = sum_norms(W_K, second, W_K, at.weights.keys**2)
    key_size = at.q.new_tensor([w.sizes[1] for w in at.weights.image])[:, None]
    q_size = at.factors[3, :, 0]
    trace = second.diagonal(dim1=-2, dim2=-1).sum(-1)
    norms = norms + ROUNDS * at.unit * (key_size.square() * trace).sum(0)
    return norms.sqrt() + ROUNDS * at.unit * ((key_size * q_size).square() * total).sum(0).sqrt()
