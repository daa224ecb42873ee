"""Bounds that hold for all inputs with tokens in the ball B_R, and what σ tends to as R → ∞; proofs in docs/theory.

One head without biases, a = ‖A‖R², q = e^{−2a}. Castin, Ablin and Peyré, *How Smooth Is Attention?* (ICML 2024):

    Theorem 3.3   σ ≤ √3‖V‖(a²(4n+1) + n)^½                  masked and unmasked
    Theorem 3.5   W_p-Lipschitz constant ≤ ‖V‖(1+3a)e^{2a}    unmasked, any number of tokens

Ours (``refined``), sharper for all parameters: the row–column certificate with c_i ≤ ‖V‖²R², ‖a_i‖ ≤ ‖A‖R gives

    σ ≤ ‖V‖( √(1+a²)·√κ + a ),     κ ≥ largest column sum of P

A row that sees m keys has entries of at most 1/(1 + (m−1)q), so κ is a sum over the rows that see a column:

    unmasked   κ = n/(1 + (n−1)q)            ≤ min(n, e^{2a})
    causal     κ = Σ_{i≤n} 1/(1 + (i−1)q)    ≤ min(n, e^{2a}H_n)
    any mask   κ = max_j Σ_{i sees j} 1/(1 + (m_i−1)q)

Causal, free of n: ‖P‖₂ ≤ 2e^a (rearrangement and Hardy's inequality) gives σ ≤ ‖V‖((2 + 2^{5/3}a)e^a + a). The bounds
``refined.unmasked`` and ``refined.masked`` also take the exponent p of the norm (Σ_i‖x_i‖^p)^{1/p}, for n = ∞ that of W_p or
d_p: e^{2a/p} stands in the place of e^a. With biases, soft-cap and sinks the same proofs give the forms below; they reduce
to the above without. Where a bound takes ``Constants``, those may be ``Constants.of_norms(‖V‖, ‖A‖)``; where n may be
infinite, the bound is for every n.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Mask, MaskLike, as_mask
from lipscope.bounds.bound import CASTIN, OURS, Bound, bound, conjugate, norm_name, refuse_others
from lipscope.bounds.constants import Constants, HeadConstants
from lipscope.bounds.weights import layer_weights, over_heads, rounding_unit, spectral, triangle

_NEWHOUSE = "Newhouse et al., Training Transformers with Enforced Lipschitz Constants, arXiv 2507.13338, 2025"


@bound("castin2024.general", needs="radius, n")
def castin2024_general(layer: Attention | Constants, radius: float, n: int) -> Bound:
    """Theorem 3.3: √3(n‖V‖² + 4n ν²α² + ν²β²)^½ for tokens in B_R, any mask; √3‖V‖(a²(4n+1) + n)^½ without biases.

    Frobenius norms. The form with biases is ours, by the same proof.
    """

    def head(c: HeadConstants) -> float:
        keys = c.nu(radius) * c.alpha(radius)
        # No square of a norm is formed: it may leave the range of floats.
        return math.sqrt(3) * math.hypot(math.sqrt(n) * c.value, 2 * math.sqrt(n) * keys, c.queries(radius))

    value = Constants.of(layer, n).combine(head)
    return _bound("castin2024.general", value, radius, n, "any mask", f"{CASTIN}, Theorem 3.3")


@bound("castin2024.meanfield", needs="radius", masks="full", without="additive")
def castin2024_meanfield(layer: Attention | Constants, radius: float, *, p: float = 2.0) -> Bound:
    """Theorem 3.5: (‖V‖ + 2να + νβ)e^{2h} for tokens in B_R, unmasked, every n; ‖V‖(1+3a)e^{2a} without biases.

    It bounds the Lipschitz constant for the Wasserstein distance W_p, hence σ for p = 2. One head has the same bound for
    every p; several heads are joined by a root of squares for p ≥ 2 only, so that p < 2 gives a larger one.
    """
    refuse_others("castin2024.meanfield", layer)
    norm = norm_name(p)

    def head(c: HeadConstants) -> float:
        inner = c.value + c.nu(radius) * (2 * c.alpha(radius)) + c.queries(radius)
        return times(inner, exp(2 * c.half_range(radius)))

    value = Constants.of(layer).combine(head, p)
    return _bound("castin2024.meanfield", value, radius, None, "unmasked", f"{CASTIN}, Theorem 3.5", norm)


@bound("refined.unmasked", needs="radius, n", masks="full")
def refined_unmasked(layer: Attention | Constants, radius: float, n: float = math.inf, *, p: float = 2.0) -> Bound:
    """The bound ρ√κ + νβ with κ = n/(1 + (n−1)e^{−2h}); ‖V‖(√(1+a²)·√κ + a) without biases.

    κ ≤ min(n, e^{2a}): the √n regime, the plateau e^a, and the border between them. For another p it is ρ_pκ^{1/p} + νβ in
    the norm (Σ_i‖x_i‖^p)^{1/p}, ρ_p between ‖V‖ + 2να at p = 1, ρ at p = 2 and ‖V‖ + να at p = ∞. For n = ∞ it bounds the
    W_p-Lipschitz constant of mean-field attention. Tokens in B_R, no mask. Ours.
    """
    refuse_others("refined.unmasked", layer)
    norm = norm_name(p)

    def head(c: HeadConstants) -> float:
        h = c.half_range(radius)
        column = exp(2 * h) if math.isinf(n) else n / (1 + (n - 1) * exp(-2 * h))
        return times(c.mean_and_keys(radius, p), root(column, p)) + c.queries(radius)

    return _bound("refined.unmasked", _combined(layer, n, head, p), radius, n, "unmasked", norm=norm)


@bound("refined.masked", needs="radius, n", masks="causal")
def refined_masked(layer: Attention | Constants, radius: float, n: float = math.inf, *, p: float = 2.0) -> Bound:
    """The bound min(ρ√κ, (2‖V‖ + 2^{5/3}να)e^h) + νβ, κ = Σ_{i≤n} 1/(1 + (i−1)e^{−2h}), for the causal mask.

    Without biases: ‖V‖(min{√(1+a²)√κ, (2 + 2^{5/3}a)e^a} + a). The second member does not depend on n. With another p it
    is in the norm (Σ_i‖x_i‖^p)^{1/p}, for n = ∞ that of d_p, and infinite there for p = 1. Tokens in B_R. Ours.
    """
    refuse_others("refined.masked", layer)
    norm = norm_name(p)

    def head(c: HeadConstants) -> float:
        h = c.half_range(radius)
        column = times(c.mean_and_keys(radius, p), root(causal_column_sum(n, h), p))
        return min(column, causal_gain(c, radius, exp(2 * h), p)) + c.queries(radius)

    return _bound("refined.masked", _combined(layer, n, head, p), radius, n, "causal mask", norm=norm)


@bound("refined.visibility", needs="radius, n", superseded="full, causal", longest=1 << 17)
def refined_visibility(layer: Attention | Constants, radius: float, n: int, mask: MaskLike = None) -> Bound:
    """The bound ρ√κ + νβ with κ = max_j Σ_{i sees j} 1/(1 + (m_i−1)e^{−2h}), m_i the number of keys row i sees; any mask.

    Or (2‖V‖ + 2^{5/3}να)√G·e^h + νβ where at most G·m rows see no more than m keys, for every m: G = 1 for a prefix before
    a causal mask. Frobenius norms, tokens in B_R. Ours. ``mask`` is by default the layer's own.
    """
    if isinstance(layer, Attention) and mask is None:
        mask = layer.mask
    rule, constants = as_mask(mask), Constants.of(layer, n)
    ranges = sorted({c.half_range(radius) for c in (*constants.image, *constants.plain)})
    sums, crowding = _largest_columns(rule, n, ranges)
    columns = dict(zip(ranges, sums, strict=True))

    def head(c: HeadConstants) -> float:
        h = c.half_range(radius)
        free = causal_gain(c, radius, crowding * exp(2 * h))
        return min(c.mean_and_keys(radius) * math.sqrt(columns[h]), free) + c.queries(radius)

    value = constants.combine(head)
    return _bound("refined.visibility", value, radius, n, f"mask {rule}", mask=str(rule))


@bound("block_inf.max_token", needs="radius")
def block_inf_max_token(layer: Attention | Constants, radius: float, n: int | None = None) -> Bound:
    """The bound ‖V‖ + να + νβ in the norm max_i‖x_i‖ on both sides, any mask and n; ‖V‖(1+2a) without biases.

    Row i moves by at most Σ_j P_ij(‖V‖ + ‖v_j − o_i‖‖a_i‖)‖ε_j‖ + ‖B_i‖‖ε_i‖, and Σ_j P_ij‖v_j − o_i‖ ≤ ν. The outputs of
    the heads are joined token by token, so that a root of squares over heads is valid in this norm too. n matters for rotary
    embeddings only. Ours.
    """

    def head(c: HeadConstants) -> float:
        return c.value + c.nu(radius) * c.alpha(radius) + c.queries(radius)

    value = Constants.of(layer, n).combine(head)
    return _bound("block_inf.max_token", value, radius, None, "any mask", norm="max_i‖x_i‖")


@bound("block_inf.frobenius", needs="radius, n")
def block_inf_frobenius(layer: Attention | Constants, radius: float, n: int) -> Bound:
    """The bound √n(‖V‖ + να + νβ) for Frobenius norms: ‖Y‖_F ≤ √n·max_i‖y_i‖ and max_i‖x_i‖ ≤ ‖X‖_F. Any mask. Ours."""
    value = math.sqrt(n) * block_inf_max_token(layer, radius, n).value
    return _bound("block_inf.frobenius", value, radius, n, "any mask")


@bound("newhouse2025.attention", needs="radius", without="query_bias, softcap, sinks, rotary")
def newhouse2025_attention(layer: Attention, radius: float, *, scale: float = 3.0) -> Bound:
    """The bound behind Lipschitz-constrained training, in root-mean-square norms: Newhouse et al. (2025).

    (s/3) Σ_h ‖W_O^h‖‖W_V^h‖(1 + 2τd_head‖W_Q^h‖‖W_K^h‖r²) with ‖x‖_rms = ‖x‖/√d, ‖W‖_rms = ‖W‖·√(d_in/d_out), r = R/√d; any
    mask, any n. With τ = 1/d_head and s = 1 it is the published constant; ``scale`` = 3 leaves the layer's output as it is.
    In rms norms the width ratios cancel between neighbouring factors, so it equals the bound ``block_inf.max_token`` with
    ‖W_OW_V‖ and ‖A‖ replaced by products of norms.
    """
    weights = layer_weights(layer)
    d, dk, dv, d_out = layer.width, layer.head_width, layer.value_width, layer.output_width
    r = radius / math.sqrt(d)
    total = 0.0
    for h, w in enumerate(weights.plain):
        single = layer.head(h).to(weights.plain[h].R_K.dtype)
        key = spectral(triangle(single.k.detach().mT)) * math.sqrt(d / dk)
        query = w.query / abs(layer.tau) * math.sqrt(d / dk) if layer.tau else 0.0
        value = w.value * math.sqrt(d / dv)
        out = weights.image[h].out * math.sqrt(dv / d_out)
        total += out * value * (1 + 2 * abs(layer.tau) * dk * (query * r) * (key * r))
    value = scale / 3 * total
    return _bound("newhouse2025.attention", value, radius, None, "any mask", _NEWHOUSE, "max_i‖x_i‖/√d", scale=scale)


@bound("large_radius.limit", needs="x", without="softcap, sinks")
def large_radius_limit(layer: Attention, x: Tensor) -> Bound | None:
    """What σ(rX) tends to as r → ∞ for one head: ‖V‖√(max_j #{i : argmax_l s_il = j}); for several, a bound of the limit.

    When every row has a unique largest score, P tends to the 0–1 matrix of the choices and all covariances vanish. The
    scores are those of r²·x_jᵀAx_i alone: biases are outgrown. With A ≠ 0 this is so for almost every X and any mask,
    without soft-cap and sinks; None where a largest score is not unique, as with W_Q = 0. The limit for several heads is the
    norm of their sum, at most the sum of their norms. Regime of Castin et al.; formula derived in docs/theory.
    """
    n = x.shape[0]
    bare = replace(layer, q_bias=None, k_bias=None, v_bias=None)
    q, k, _ = bare.to(torch.float64).project(x.detach().double()[None])
    k = k.repeat_interleave(layer.heads // layer.kv_heads, dim=1)
    scores = (q @ k.mT)[0]
    allowed = layer.score_rule(n, 1).allowed
    if allowed is not None:
        scores = scores.masked_fill(~allowed[0], -math.inf)
    top = scores.topk(min(2, n), dim=-1)
    sees = torch.isfinite(top.values[..., 0])
    # Differences that rounding could make do not decide; it is relative to terms that may cancel.
    weights, tokens = layer_weights(layer), torch.linalg.vector_norm(x.detach().double(), dim=-1)
    sizes = torch.tensor([w.sizes[0] * w.sizes[1] for w in weights.plain], dtype=tokens.dtype, device=tokens.device)
    rounding = rounding_unit(layer.q, layer.k) * sizes[:, None] * tokens * tokens.max()
    if not bool((top.values[..., 0] - top.values[..., -1] > rounding)[sees].all()) and n > 1:
        return None
    counts = [torch.bincount(i[s], minlength=n).max() for i, s in zip(top.indices[..., 0], sees, strict=True)]
    plain, image = (
        [w.value * math.sqrt(int(c)) for w, c in zip(each, counts, strict=True)] for each in (weights.plain, weights.image)
    )
    one = layer.heads == 1
    where = f"{'' if one else 'the limit of '}σ(rX) as r → ∞, almost every X, any mask, A ≠ 0"
    value = image[0] if one else over_heads(plain, weights.out, image)
    return Bound("large_radius.limit", value, "limit", where, CASTIN, {"n": n, "heads": layer.heads}, exact=one)


def causal_gain(c: HeadConstants, radius: float, top: float, p: float = 2.0) -> float:
    """The bound p'(‖V‖ + min(2, (2p')^{1/(2p−1)})να)·top^{1/p} for the terms of the keys, for every n; p' = p/(p−1).

    It holds where row i has no entry above top/i, as under the causal mask with top = e^{2h}; (2‖V‖ + 2^{5/3}να)√top for
    p = 2. Rearrangement and Hardy's inequality give ‖P‖_p ≤ p'·top^{1/p}, Hölder's with q = p' + 1 the second factor.
    """
    spread = c.nu(radius) * c.alpha(radius)
    hardy = conjugate(p)
    return times(c.value + min(2.0, (2 * hardy) ** (1 / (2 * p - 1))) * spread, hardy * root(top, p))


def causal_column_sum(n: float, h: float) -> float:
    """κ = Σ_{i≤n} 1/(1 + (i−1)e^{−2h}) ≥ every column sum of a causal P whose scores vary by at most 2h within a row."""
    if math.isinf(n):
        return math.inf
    q = exp(-2 * h)
    head = min(int(n), 100_000)
    total = float((1 / (1 + q * torch.arange(head, dtype=torch.float64))).sum())
    # The tail from above: a convex function is at most its mean over an interval around the place. log1p keeps all digits
    # when (n − head)q is small, and the sum is n when q vanishes.
    if n > head:
        total += math.log1p((n - head) * q / (1 + (head - 0.5) * q)) / q if q else n - head
    return total * (1 + 1e-12)


def exp(x: float) -> float:
    """e^x, infinite instead of an overflow error."""
    return math.exp(x) if x < 700 else math.inf


def root(x: float, p: float) -> float:
    """x^{1/p}."""
    return math.sqrt(x) if p == 2 else x ** (1 / p)


def times(x: float, y: float) -> float:
    """x·y, and 0 for 0·∞: a head without values moves nothing, however sharp it is."""
    return x * y if x else 0.0


# Rows of a mask looked at together.
_ROWS = 512


def _largest_columns(mask: Mask, n: int, ranges: Sequence[float]) -> tuple[list[float], float]:
    """κ = max_j Σ_{i sees j} 1/(1 + (m_i−1)e^{−2h}) for every h of ``ranges``, a strip of rows at a time; and G."""
    everything = slice(0, n)
    decay = torch.tensor([math.exp(-2 * h) for h in ranges], dtype=torch.float64)
    sums = torch.zeros(1, 1, n, len(ranges), dtype=torch.float64)
    strips = []
    for start in range(0, n, _ROWS):
        rows = slice(start, min(n, start + _ROWS))
        seen = mask.sees(rows, everything, n)
        seen = torch.ones(1, 1, rows.stop - start, n) if seen is None else seen
        # A row that sees nothing is zero, and as good as one that sees everything.
        seen_by = seen.sum(-1, keepdim=True).double()
        strips.append(seen_by.masked_fill(seen_by == 0, n))
        counts = seen_by.clamp_min(1)
        sums = sums.to(seen.device) + seen.double().mT @ (1 / (1 + (counts - 1) * decay.to(counts)))
    kth = torch.cat(strips, dim=2).sort(2).values.flatten(2)
    crowding = (torch.arange(1, n + 1, dtype=torch.float64, device=kth.device) / kth).max()
    return [float(value) for value in sums.amax((0, 1, 2))], float(crowding)


def _combined(layer: Attention | Constants, n: float, head: Callable[[HeadConstants], float], p: float) -> float:
    return Constants.of(layer, None if math.isinf(n) else int(n)).combine(head, p)


def _bound(
    name: str,
    value: float,
    radius: float,
    n: float | None,
    where: str,
    reference: str = OURS,
    norm: str = "Frobenius",
    **further: float | str,
) -> Bound:
    """A set bound for n tokens in B_R; for n None or infinite, for any number of them."""
    length = "any n" if n is None or math.isinf(n) else f"n = {n:g}" if isinstance(n, float) else f"n = {n}"
    given: dict[str, Any] = {"R": radius} if n is None else {"R": radius, "n": n}
    return Bound(
        name, value, "set", f"tokens of norm ≤ {radius:g}, {length}, {where}", reference, given | further, norm=norm
    )
