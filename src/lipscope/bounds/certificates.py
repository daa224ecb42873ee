"""Certified upper bounds for σ at one input, closed form and deterministic.

With v_j the values, o_i = Σ_j P_ij v_j, W = P times the slope of the soft-cap, and R_i the rotations of rotary
embeddings (the identity without), a_ij = W_KᵀR_jᵀq_i and b_ij = τW_QᵀR_iᵀk_j for rotated queries and keys, one head is

    (J ε)_i = Σ_j P_ij W_V ε_j + Σ_j W_ij (v_j − o_i)(a_ij·ε_j) + B_i ε_i        B_i = Σ_j W_ij (v_j − o_i) b_ijᵀ

**Row–column**: σ ≤ √(max_j Σ_i P_ij ρ_i²) + max_i ‖B_i‖, with ρ_i² = ‖W_V‖² + c_i‖a_i‖² and c_i the norm of the
covariance of the values under row i (ρ_i = ‖W_V‖ + √c_i max_j‖a_ij‖ with a soft-cap or rotary embeddings, where a_ij
depends on j).
**Block norms**: σ ≤ ‖N‖₂ with N_ij ≥ ‖∂o_i/∂x_j‖, where for a rank-one update M = W_V + δaᵀ, g = W_V a,

    ‖M‖² ≤ ‖W_V‖² + ½(t + √(t² + 4(‖g‖²‖δ‖² − (g·δ)²))),   t = 2 g·δ + ‖a‖²‖δ‖²

since MMᵀ = W_V W_Vᵀ + gδᵀ + δgᵀ + ‖a‖²δδᵀ and the last three terms live in the span of g and δ.
**Row Gram**: block norms with the directions of the blocks of a row kept. For any weights ω_ij > 0, by Cauchy–Schwarz,

    ‖Σ_j M_ij ε_j + B_i ε_i‖² ≤ λ_i( Σ_j ‖ε_j‖²/ω_ij + ‖ε_i‖²/ω_i ),    λ_i = ‖Σ_j ω_ij M_ijM_ijᵀ + ω_i B_iB_iᵀ‖

Sum over i and exchange the sums: σ² ≤ max_j ( Σ_i λ_i/ω_ij + λ_j/ω_j ). With N_ij ≥ ‖M_ij‖, N_i ≥ ‖B_i‖, any x > 0 and
the weights ω_ij = x_j/N_ij, ω_i = x_i/N_i, the triangle inequality gives λ_i ≤ (Nx)_i and the bound becomes
Collatz–Wielandt's for the block norms; the norm of the sum itself is smaller, since the blocks of a row point in
different directions. With g_ij = Va_ij,

    Σ_j ω_ij M_ijM_ijᵀ = (Σ_j ω_ijP_ij²)VVᵀ + X_i + X_iᵀ + Σ_j ω_ijW_ij²‖a_ij‖²δ_ijδ_ijᵀ,    X_i = Σ_j ω_ijP_ijW_ij g_ijδ_ijᵀ

is a matrix as small as a head.
**Factored** (several heads): heads enter by a maximum, not by a sum, see ``several_heads``.

Everything is computed in float64, a strip of rows of the scores at a time: what belongs to a row (B_i, c_i, ρ_i) is found
in one pass over the strips, column sums are added up on the way, and a bound by Collatz–Wielandt needs one pass per power
step, NᵀNx = Σ_strips N_sᵀ(N_s x). Short sequences are one strip, of which every matrix is formed once. Ours; proofs in
docs/theory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.validation import balanced, times_power
from lipscope.bounds.bound import OURS, Bound, bound
from lipscope.bounds.head_core import HeadCore, Strip, Strips, power_of_two, with_diagonal
from lipscope.bounds.several_heads import several_heads
from lipscope.bounds.spectral_upper import best_vectors, matrix_norm_upper
from lipscope.bounds.weights import HeadWeights, LayerWeights, layer_weights

if TYPE_CHECKING:
    from lipscope.spectral.result import SpectralNorm

# Entries of one matrix of a strip over all heads.
STRIP = 1 << 23
# Tokens up to which a single strip has all rows, and how many n×n matrices that takes.
DENSE, _MATRICES = 2048, 20
_TINY = 1e-280


def certified_upper(
    layer: Attention,
    X: Tensor,
    scope: str = "attention",
    *,
    gains: Tensor | None = None,
    offset: Tensor | None = None,
    height: int | None = None,
) -> Tensor:
    """A proven upper bound for σ at every input: the least of the certificates above.

    The value covers the rounding of its own float64 computation, see ``head_rounding``; it is infinite when the relative
    margin of probabilities exceeds 0.1, that is when float64 does not resolve the scores.

    Args:
        layer: the attention layer: any mask, biases, soft-cap, grouped queries, sinks, rotary embeddings.
        X: tokens (B, n, d).
        scope: ``"attention"`` (all heads and W_O) or ``"head"`` (each head before W_O).
        gains: (B, n), when token j of X is itself a function of its own input with Jacobian of norm gains_j: the bound is
            then for the composition.
        offset: (d,), to be added to all tokens.
        height: rows of the scores that are computed at a time. By default all of them up to 2,048 tokens, which takes a
            dozen n×n matrices; beyond, as many as keep to a fixed memory.

    Returns:
        Float64 bounds of shape (B,), or (B, H) for scope ``"head"``.

    Cost: about 6·H·n²·d_head² + 16·H·n·d_head³ flops (10 instead of 6 with rotary embeddings); beyond 2,048
    tokens half of the first under a causal mask, up to 40 passes over the scores more, and memory that grows like n.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> layer = lipscope.Attention(q=0 * W, k=W, v=W)
        >>> round(float(certified_upper(layer, torch.randn(1, 5, 2, dtype=torch.float64))), 6)
        1.0
    """
    if scope not in ("attention", "head"):
        raise ValueError(f"no certificate for scope {scope!r}; there are certificates for: attention, head")
    offset, heads = None if offset is None else offset.double(), scope == "head"
    layer, X, offset, power = balanced(layer, X.detach().double(), offset, heads=heads)
    if gains is not None:
        scale = power_of_two(float(gains.max()))
        gains, power = gains.to(X) / scale, power + math.frexp(scale)[1] - 1
    weights = layer_weights(layer)
    values: list[Any] = []
    with torch.no_grad():
        precise = layer.to(torch.float64)
        for b, x in enumerate(X):
            one = precise.for_input(b)
            gain = x.new_ones(x.shape[0]) if gains is None else gains[b]
            if heads:
                found = [_alone(one.head(h), x, w, gain, offset, height) for h, w in enumerate(weights.plain)]
            else:
                found = [min(_whole_layer(one, x, weights, gain, offset, height).values())]
            values.append(found)
    bounds: Tensor = times_power(torch.tensor(values, dtype=torch.float64, device=X.device), power, outwards=1)
    return bounds if heads else bounds[:, 0]


def _alone(single: Attention, x: Tensor, w: HeadWeights, gain: Tensor, offset: Tensor | None, height: int | None) -> float:
    """The least certificate of one head, whose own scale may be far from that of the others."""
    scaled, x, offset, power = balanced(single, x, offset)
    w = w if scaled is single else layer_weights(scaled).plain[0]
    value = min(_one_head(scaled, x, w, gain, offset, height).values())
    return float(times_power(torch.tensor(value, dtype=torch.float64), power, outwards=1))


def affordable(layer: Attention, n: int, result: SpectralNorm, inputs: int, scope: str) -> bool:
    """Whether the certificate is estimated to cost no more than the measurement that gave ``result`` (a flat batch).

    Small certificates (below about a tenth of a second) always are; an exact result needs none. Float64 counts twice, and
    small batched products run at half the speed of large ones.
    """
    if "probabilistic" not in result.upper_kind:
        return False
    H, dk, d = layer.heads, layer.head_width, layer.width
    pairs = 10 if layer.rotary is not None else 6
    certificate = 4.0 * inputs * H * (pairs * n**2 * dk**2 + 16 * n * dk**3)
    if n > DENSE:
        # The passes of power steps over the scores, each a handful of products of length dk and the exponentials.
        certificate += 4.0 * inputs * H * 40 * n**2 * (8 * dk + 32)
    width = 3 * dk if scope == "head" else d
    pair = 4 * n * width * (layer.q.shape[0] + layer.k.shape[0] + layer.v.shape[0]) + 16 * H * n**2 * dk
    if scope != "head" and layer.out is not None:
        pair += 4 * n * layer.out.numel()
    steps = float(result.iterations.sum()) / (H if scope == "head" else 1)
    return certificate <= max(steps * pair, 1e9)


@bound("certificates.factored", needs="x", only="several_heads")
@bound("certificates.row_gram", needs="x", without="several_heads")
@bound("certificates.block_norm", needs="x")
@bound("certificates.row_column", needs="x")
def local_bounds(layer: Attention, x: Tensor, *, height: int | None = None) -> list[Bound]:
    """Every certificate of the whole layer at tokens x (n, d), each as a ``Bound``; ``height`` as in ``certified_upper``."""
    layer, x, _, power = balanced(layer, x.detach().double())
    weights = layer_weights(layer)
    with torch.no_grad():
        candidates = _whole_layer(layer.to(torch.float64), x, weights, x.new_ones(x.shape[0]), None, height)
    given = {"n": x.shape[0], "heads": layer.heads}
    values = times_power(torch.tensor(list(candidates.values()), dtype=torch.float64), power, outwards=1).tolist()
    return [
        Bound(f"certificates.{name}", value, "local", "this input; any mask and score rule", OURS, given)
        for name, value in zip(candidates, values, strict=True)
    ]


def strip_height(n: int, heads: int) -> int:
    """Rows of a strip, so that its matrices over all heads stay within a fixed memory."""
    return min(n, max(16, STRIP // (n * heads)))


def height_within(n: int, heads: int, memory: int) -> int | None:
    """Rows of a strip whose matrices take at most ``memory`` bytes, 16 at least; None when n×n matrices do not take more."""
    if n <= DENSE and _MATRICES * 8 * n * n <= memory:
        return None
    return min(strip_height(n, heads), max(16, memory // ((4 * heads + _MATRICES) * 8 * n)))


def _whole_layer(
    layer: Attention, x: Tensor, weights: LayerWeights, gain: Tensor, offset: Tensor | None, height: int | None
) -> dict[str, float]:
    """Every certificate of the layer."""
    if layer.heads == 1:
        return _one_head(layer, x, weights.image[0], gain, offset, height)
    strips = Strips(layer, x, weights.image, _height(len(x), layer.heads, height), offset)
    return _round_up(several_heads(strips, layer, weights, gain), strips, gain)


def _one_head(
    single: Attention, x: Tensor, w: HeadWeights, gain: Tensor, offset: Tensor | None, height: int | None
) -> dict[str, float]:
    """Every certificate of a layer of one head."""
    strips = Strips(single, x, (w,), _height(len(x), 1, height), offset)
    B, columns = x.new_zeros(len(x)), x.new_zeros(len(x))
    for strip in strips:
        core = strip.core(0)
        B[strip.rows], c = core.covariance_norms(w)
        columns[strip.columns] += core.rho(c, w).square() @ core.P
    row_column = math.sqrt(float((columns * gain.square()).max())) + float((B * gain).max())
    # No entry of N exceeds twice the row–column bound.
    scale = power_of_two(row_column)

    def total(strip: Strip, names: set[str]) -> dict[str, Tensor]:
        return {"N": with_diagonal(_blocks(strip, w) * gain[strip.columns], strip, B * gain)}

    value, perron = best_vectors(strips.grams(total, {"N": scale}), {"N": torch.ones_like(gain)})["N"]
    found = {"row_column": row_column, "block_norm": scale * value, "row_gram": _row_gram(strips, w, B, gain, perron)}
    return _round_up(found, strips, gain)


def _blocks(strip: Strip, w: HeadWeights) -> Tensor:
    """≥ ‖M_ij‖ on a strip of one head."""
    if "blocks" not in strip.kept:
        strip.kept["blocks"] = strip.core(0).block_norms(w)[1]
    blocks: Tensor = strip.kept["blocks"]
    return blocks


def _row_gram(strips: Strips, w: HeadWeights, B: Tensor, gain: Tensor, x: Tensor, rounds: int = 2) -> float:
    """The least row-Gram bound over some choices of x, without the margin for the rounding of probabilities.

    The first x is the leading vector of the block norms, the next what the bound itself suggests.
    """
    best = math.inf
    eps = (2 * len(x) + 8) * torch.finfo(x.dtype).eps
    for _ in range(rounds):
        x = (x / x.max()).clamp_min(1e-100)
        sums = torch.zeros_like(x)
        own = torch.where(B > 0, x * gain / B.clamp_min(_TINY), 0.0)
        for strip in strips:
            block, rows, columns = _blocks(strip, w), strip.rows, strip.columns
            weights = torch.where(block > 0, (x * gain)[columns] / block.clamp_min(_TINY), 0.0)
            total = with_diagonal(block * gain[columns], strip, B * gain)
            norms = _row_norms(strip.core(0), w, weights, own[rows], B[rows])
            sums[columns] += total.mT @ torch.minimum(norms, total @ x[columns])
        value = float((sums / x).max()) * (1 + eps)
        if not math.isfinite(value):
            break
        best = min(best, math.sqrt(value))
        x = sums
        if float(x.max()) == 0:
            break
    return best


def _row_norms(core: HeadCore, w: HeadWeights, weights: Tensor, own: Tensor, B: Tensor) -> Tensor:
    """λ_i for every row, its rounding included."""
    v, o = core.through_output(w)
    P, W, a = core.P, core.W, core.a
    mean = (weights * P.square()).sum(-1)
    mixed, spread = weights * P * W, weights * W.square() * a.square()
    VV = w.V @ w.V.mT
    crosses = _cross_terms(core, w, mixed, v, o)
    found = []
    for part, cross, moment in core.moments(w, spread):
        gram = mean[part, None, None] * VV + moment + own[part, None, None] * (cross @ cross.mT)
        gram = gram + crosses[part] + crosses[part].mT
        found.append(matrix_norm_upper(gram, symmetric=True))
    v_size = core.value_sizes(w)
    size = mean * w.value**2 + 2 * (mixed * a).sum(-1) * w.value * v_size + spread.sum(-1) * v_size**2
    # ‖M Mᵀ‖ moves by 2‖M‖‖dM‖ to first order, M_ij by at most P_ij times the error of V and W_ij times ``moved``.
    moved = core.value_error(w)[:, None] * a + v_size[:, None] * core.gradient_error
    error = 2 * w.value * (mean * w.value_error + (mixed * moved).sum(-1))
    error = error + 2 * v_size * (mixed * a * w.value_error + weights * W.square() * a * moved).sum(-1)
    slack = 2 * own * B * core.moment_slack(w)[0]
    return torch.cat(found) + core.margin * (size + own * B.square()) + 2 * error + slack


def _cross_terms(core: HeadCore, w: HeadWeights, mixed: Tensor, v: Tensor, o: Tensor) -> Tensor:
    """X_i = Σ_j mixed_ij g_ij δ_ijᵀ for every row."""
    if core.rotation is None:
        h = mixed @ v - mixed.sum(-1, keepdim=True) * o
        return (core.q @ w.VK.mT)[:, :, None] * h[:, None, :]
    found = []
    for part, G in core.pair_images(w.VK, core.q):
        G = G * mixed[part, :, None]
        found.append(G.mT @ v - G.sum(1)[:, :, None] * o[part, None, :])
    return torch.cat(found)


def _height(n: int, heads: int, asked: int | None) -> int:
    return asked or (n if n <= DENSE else strip_height(n, heads))


def _round_up(found: dict[str, float], strips: Strips, gain: Tensor) -> dict[str, float]:
    margin, least = strips.margin, strips.underflow * float(gain.max())
    return {name: value * (1 + 4 * margin) + least if margin < 0.1 else math.inf for name, value in found.items()}
