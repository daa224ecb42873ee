"""Bounds for attention that is not a softmax of dot products: L2, cosine, QK-normalised, sigmoid and Sinkhorn.

**Softmax of bounded features** (L2, scaled-cosine and QK-normalised attention; ours). One head, o_i = Σ_j P_ij ṽ_j with
scores s_ij of token-wise features, on a set of tokens where

    λ ≥ ‖Dṽ_j‖    ν ≥ ‖ṽ_j‖    α ≥ ‖∂s_ij/∂x_j‖    β ≥ ‖∂s_ij/∂x_i‖    scores of one row differ by at most 2h

gives σ ≤ (λ + να)·√κ + νβ, κ = max_j Σ_{i sees j} 1/(1 + (m_i − 1)e^{−2h}), m_i the number of keys row i sees. It is the
row–column certificate: a row of P has entries of at most 1/(1 + (m_i − 1)e^{−2h}), so κ bounds the column sums of P.

    L2          λ = ‖V‖, ν = ‖V‖R, V = W_O W_V A      α = 4t‖W_Q‖²R    β = 2t‖W_Q‖²R    h = 2t‖W_Q‖²R²
    cosine      λ = ν'‖W_O‖‖W_V‖ε^{−½}, ν = ν'‖W_O‖   α = τ‖W_K‖ε^{−½}    β = τ‖W_Q‖ε^{−½}    h = τ     (no radius)
    QK-norm     λ = ‖W_O W_V‖, ν = ‖W_O W_V‖R         α, β, h as for cosine

**Sigmoid** (Ramapuram et al. 2024). With P_ij = sigmoid(s_ij), σ_∞ = n·sup sigmoid and σ'_∞ = n·sup sigmoid' over the
scores, A = τW_KᵀW_Q:

    σ ≤ ‖V‖( σ_∞ + 2σ'_∞‖A‖·(1/n)Σ_i|x_i|² )

since ‖P‖ ≤ n·max P, and ‖(sigmoid'∘dS)XVᵀ‖_F ≤ sup sigmoid'·‖dS‖_F‖X‖‖V‖ with ‖dS‖_F ≤ 2‖A‖‖X‖·‖ε‖_F. On a ball the
scores lie within b ± ‖A‖R²; with b = −log n, σ_∞ and σ'_∞ are at most e^{‖A‖R²}, whatever n.

**Sinkhorn** (ours): rows and columns of P add up to one, so σ ≤ ‖V‖(1 + 2‖A‖R²) for every number of tokens. Softmax
attention has no bound of this kind: there columns of P add up to anything between 0 and n. Proofs: docs/theory/variants.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from lipscope.attention.variants import (
    CosineAttention,
    DotProductVariant,
    L2Attention,
    QKNormAttention,
    SigmoidAttention,
    SinkhornAttention,
    Variant,
)
from lipscope.bounds.bound import OURS, Bound, bound
from lipscope.bounds.weights import HeadWeights, layer_weights, over_heads, rounding_unit, spectral

_KIM = "Kim, Papamakarios, Mnih, The Lipschitz Constant of Self-Attention, ICML 2021, Theorem 3.2 (power 4 of ‖W_Q‖)"
_QI = "Qi, Wang, Chen, Shi, Zhang, LipsFormer, ICLR 2023, Theorem 1"
_NAIR = "Nair, Softmax is 1/2-Lipschitz: A tight bound across all ℓp norms, 2025, Theorem 2"
_RAMAPURAM = "Ramapuram et al., Theory, Analysis, and Best Practices for Sigmoid Self-Attention, ICLR 2025, as restated here"


@bound("kim2021.l2mha", needs="n", masks="full", scores="l2")
def kim2021_l2mha(layer: L2Attention, n: int) -> Bound:
    """L2 attention is Lipschitz on the whole space: √n·t(4W₀((n−1)/e) + 1)(Σ_h ‖W_Q^h‖⁴‖W_V^h‖²)^½‖W_O‖, t = 1/√d_head.

    W₀ is the Lambert function. The power 4 comes from A = tW_QᵀW_Q, which is quadratic in W_Q; with power 2 the inequality
    is false. Nothing is assumed of the tokens. Frobenius norms, unmasked; without W_O the heads are joined as they are.
    """
    from scipy.special import lambertw

    spread = 4 * float(lambertw((n - 1) / math.e).real) + 1
    heads = zip(layer.q.chunk(layer.heads), layer.v.chunk(layer.heads), strict=True)
    value = over_heads((spectral(Q) ** 2 * spectral(V) for Q, V in heads), _out(layer))
    return _everywhere("kim2021.l2mha", math.sqrt(n) * layer.t * spread * value, "L2", n, _KIM)


@bound("qi2023.scsa", needs="n", masks="full", scores="cosine")
def qi2023_scsa(layer: CosineAttention, n: int) -> Bound:
    """Cosine attention is Lipschitz on the whole space: ν'ε^{−½}(2n(n−1)τ‖W_K‖ + 2(n−1)τ‖W_Q‖ + 2n‖W_V‖).

    Frobenius norms, unmasked. Published for one head; several heads are joined by the root of squares times ‖W_O‖.
    """

    def head(query: float, key: float, value: float) -> float:
        return 2 * n * (n - 1) * layer.tau * key + 2 * (n - 1) * layer.tau * query + 2 * n * value

    return _everywhere("qi2023.scsa", _cosine(layer, head), "cosine", n, _QI)


@bound("nair2025.scsa", needs="n", masks="full", scores="cosine")
def nair2025_scsa(layer: CosineAttention, n: int) -> Bound:
    """The bound of ``qi2023.scsa`` with ½ in the place of (n−1)/n: ν'ε^{−½}(n²τ‖W_K‖ + nτ‖W_Q‖ + 2n‖W_V‖).

    The ½ is the Lipschitz constant of the softmax. Heads are joined as in ``qi2023.scsa``.
    """

    def head(query: float, key: float, value: float) -> float:
        return n**2 * layer.tau * key + n * layer.tau * query + 2 * n * value

    return _everywhere("nair2025.scsa", _cosine(layer, head), "cosine", n, _NAIR)


@bound("bounded_scores.softmax", needs="radius, n", scores="l2, cosine, qk-norm")
def bounded_scores_softmax(layer: Variant, radius: float, n: int) -> Bound:
    """The bound (λ + να)√κ + νβ summed over heads, or ‖W_O‖ times the root of squares without W_O, whichever is less.

    Frobenius norms, any mask. For scaled-cosine attention it does not depend on the radius: it holds on the whole space.
    Without a mask κ ≤ min(n, e^{2h}), so for cosine and QK-normalised attention it is bounded in n. Ours.

    Example:
        >>> import torch
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> layer = CosineAttention(q=W, k=W, v=W, tau=1.0, eps=1.0)
        >>> near, far = (bounded_scores_softmax(layer, radius, 10**6).value for radius in (1.0, 1e9))
        >>> near == far <= 2 * 2.7183 + 1
        True
    """

    def head(h: int, out: Tensor | None) -> float:
        limits = _limits(layer, h, out, radius)
        return limits.bound(_column_sum(layer, n, limits.half_range, h))

    heads = range(layer.heads)
    blocks = None if layer.out is None else layer.out.detach().double().chunk(layer.heads, dim=1)
    image = None if blocks is None else [head(h, blocks[h]) for h in heads]
    value = over_heads((head(h, None) for h in heads), _out(layer), image)
    where = "all tokens" if isinstance(layer, CosineAttention) else f"tokens of norm ≤ {radius:g}"
    holds_for = f"{layer.kind} attention, {where}, n = {n}, mask {layer.mask}"
    return Bound("bounded_scores.softmax", value, "set", holds_for, OURS, {"R": radius, "n": n})


@bound("ramapuram2024.local", needs="x", scores="sigmoid")
def ramapuram2024_local(layer: SigmoidAttention, x: Tensor) -> Bound:
    """Sigmoid attention at tokens x (n, d): ‖V‖(σ_∞ + 2σ'_∞‖A‖·(1/n)Σ_i|x_i|²), heads summed; any mask, Frobenius norms."""
    X = x.detach().double()
    n = X.shape[0]
    precise = layer.to(torch.float64)
    with torch.no_grad():
        q, k, _ = (feature.value for feature in precise.features(X[None]))
        # Scores may cancel: what rounding makes of them is relative to their terms.
        sizes = torch.tensor([w.sizes[0] * w.sizes[1] for w in layer_weights(layer.scaled).plain], dtype=torch.float64)
        off = (4 * rounding_unit(layer.q, layer.k) * sizes * spectral(X) ** 2)[:, None, None]
        least, P = (precise.weights(q @ k.mT + change)[0] for change in (-off, off))
    highest = n * P.amax((-1, -2)) * (1 + 1e-12)
    middle = torch.minimum(P, torch.maximum(least, torch.full_like(P, 0.5)))
    steepest = n * (middle * (1 - middle)).amax((-1, -2)) * (1 + 1e-12)
    moment = float(X.square().sum() / n)

    def head(h: int, w: HeadWeights) -> float:
        return w.value * (float(highest[h]) + 2 * float(steepest[h]) * w.interaction * moment)

    value = _dot_product(layer, head)
    return Bound("ramapuram2024.local", value, "local", "sigmoid attention, this input; any mask", _RAMAPURAM, {"n": n})


@bound("ramapuram2024.ball", needs="radius, n", scores="sigmoid")
def ramapuram2024_ball(layer: SigmoidAttention, radius: float, n: int) -> Bound:
    """Sigmoid attention on B_R: ‖V‖(σ_∞ + 2σ'_∞‖A‖R²) with suprema over scores within b ± ‖A‖R²; any mask.

    Frobenius norms.
    """
    shift = layer.shift_at(n)

    def head(h: int, w: HeadWeights) -> float:
        a = w.interaction * radius * radius
        # The slope of the sigmoid is largest at 0, and falls to both sides.
        nearest = min(max(0.0, shift - a), shift + a)
        slope = _sigmoid(nearest) * _sigmoid(-nearest)
        return w.value * n * (_sigmoid(shift + a) + 2 * slope * a)

    value, given = _dot_product(layer, head), {"R": radius, "n": n, "shift": shift}
    holds_for = f"sigmoid attention, tokens of norm ≤ {radius:g}, n = {n}, any mask"
    return Bound("ramapuram2024.ball", value, "set", holds_for, _RAMAPURAM, given)


@bound("sinkhorn.doubly_stochastic", needs="radius", masks="full", scores="sinkhorn")
def sinkhorn_doubly_stochastic(layer: SinkhornAttention, radius: float) -> Bound:
    """Sinkhorn attention on B_R: ‖V‖(1 + 2‖A‖R²), heads summed or ‖W_O‖ times the root of squares; every n, no mask.

    Frobenius norms. Ours.

    Example:
        >>> import torch
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> round(sinkhorn_doubly_stochastic(SinkhornAttention(q=W, k=W, v=W, scale=1.0), 2.0).value, 9)
        9.0
    """

    def head(h: int, w: HeadWeights) -> float:
        return w.value * (1 + 2 * w.interaction * radius * radius)

    holds_for = f"Sinkhorn attention, tokens of norm ≤ {radius:g}, any n"
    return Bound("sinkhorn.doubly_stochastic", _dot_product(layer, head), "set", holds_for, OURS, {"R": radius})


@dataclass(frozen=True)
class _Limits:
    """What the features of one head can do on a set of tokens; the letters are those of the module."""

    lam: float
    nu: float
    alpha: float
    beta: float
    half_range: float

    def bound(self, column: float) -> float:
        """(λ + να)√κ + νβ."""
        return (self.lam + self.nu * self.alpha) * math.sqrt(column) + self.nu * self.beta


def _limits(layer: Variant, head: int, out: Tensor | None, radius: float) -> _Limits:
    def block(M: Tensor) -> Tensor:
        return M.detach().double().chunk(layer.heads)[head]

    def product(*factors: Tensor) -> float:
        # Products may cancel: what rounding makes of them is relative to their factors.
        sizes = (math.sqrt(min(M.shape)) * spectral(M) for M in factors)
        return spectral(reduce(torch.matmul, factors)) + rounding_unit(*factors) * math.prod(sizes)

    through, left = (1.0, ()) if out is None else (spectral(out), (out,))
    query = spectral(block(layer.q))
    if isinstance(layer, L2Attention):
        Q = block(layer.q)
        size, sharp = layer.t * product(*left, block(layer.v), Q.mT, Q), layer.t * query * query
        return _Limits(size, size * radius, 4 * sharp * radius, 2 * sharp * radius, 2 * sharp * radius * radius)
    if isinstance(layer, CosineAttention):
        root, tau = layer.eps**-0.5, layer.tau
        lam, nu = layer.nu * through * spectral(block(layer.v)) * root, layer.nu * through
    elif isinstance(layer, QKNormAttention):
        root, tau = layer.eps**-0.5, layer.cosine_scale
        lam = product(*left, block(layer.v))
        nu = lam * radius
    else:
        raise TypeError(f"layer must be an L2, cosine or QK-normalised layer, got {layer.kind}")
    return _Limits(lam, nu, tau * spectral(block(layer.k)) * root, tau * query * root, tau)


def _column_sum(layer: Variant, n: int, half_range: float, head: int) -> float:
    """κ, from the mask and the range of the scores."""
    q = math.exp(-2 * min(half_range, 300.0))
    seen = layer.visible(n)
    if seen is None:
        return n / (1 + (n - 1) * q)
    seen = seen[:, head if seen.shape[1] > 1 else 0]
    share = 1 / (1 + (seen.sum(-1, keepdim=True).double() - 1) * q)
    return float((seen * share).sum(-2).max())


def _dot_product(layer: DotProductVariant, head: Callable[[int, HeadWeights], float]) -> float:
    """Heads of a layer whose scores are dot products, joined."""
    weights = layer_weights(layer.scaled)
    plain, image = ([head(h, w) for h, w in enumerate(each)] for each in (weights.plain, weights.image))
    return over_heads(plain, weights.out, image)


def _cosine(layer: CosineAttention, head: Callable[[float, float, float], float]) -> float:
    """ν' ε^{−½} ‖W_O‖ times the root of squares of ``head(‖W_Q^h‖, ‖W_K^h‖, ‖W_V^h‖)``."""
    norms = ([spectral(block) for block in M.chunk(layer.heads)] for M in (layer.q, layer.k, layer.v))
    return layer.nu / math.sqrt(layer.eps) * over_heads((head(*each) for each in zip(*norms, strict=True)), _out(layer))


def _out(layer: Variant) -> float:
    return 1.0 if layer.out is None else spectral(layer.out)


def _everywhere(name: str, value: float, attention: str, n: int, reference: str) -> Bound:
    return Bound(name, value, "set", f"{attention} attention, all tokens, n = {n}, unmasked", reference, {"n": n})


def _sigmoid(s: float) -> float:
    return 1 / (1 + math.exp(-s)) if s > -700 else 0.0
