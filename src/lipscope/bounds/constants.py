"""The numbers of a layer that set bounds are made of.

For one head and tokens in the ball of radius R:

    a = ‖A‖R²        drift α = ‖A‖R + τ‖W_Kᵀb_Q‖ ≥ ‖∂s_ij/∂x_j‖        β = ‖A‖R (+ τ‖W_Qᵀb_K‖) ≥ ‖∂s_ij/∂x_i‖
    ν = ‖V‖R (+ ‖W_O b_V‖) ≥ ‖v_j‖    half-range h: two scores of one row differ by at most 2h

A key bias is the same for all keys of a row, so it cancels in the softmax, and a value bias cancels in v_j − o_i; the terms
in parentheses appear only where they do not: with sinks, and for the key bias also with a soft-cap or rotary embeddings.

With rotary embeddings ‖A‖ is the largest ‖A_ij‖, A_ij = τW_KᵀR_jᵀR_iW_Q, and a rotated key bias also widens the range of
the scores. For evenly spaced positions R_jᵀR_i depends on i − j, so 2n − 1 norms of d_head × d_head matrices suffice; how
far the tables are from that is measured, and added. Otherwise all pairs are tried while they are few, and in any case

    ‖A_ij‖ ≤ γ²·τ‖W_K‖‖W_Q‖,    γ the largest stretch of a rotation (1 for pure ones)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal, Mask
from lipscope.attention.rotary import Rotation
from lipscope.attention.validation import power_above, times_power
from lipscope.attention.variants import Variant
from lipscope.bounds.spectral_upper import matrix_norm_upper
from lipscope.bounds.weights import HeadWeights, layer_weights, over_heads, rounding_unit, spectral

# Multiplications that may be spent on norms of single A_ij, per head.
_AFFORDABLE = 1 << 30
# Offsets are believed when the tables follow them to this accuracy.
_EVEN = 1e-3


@dataclass(frozen=True)
class RotatedNorms:
    """One head with rotary embeddings, over all pairs of tokens that may meet."""

    interaction: float  # ≥ ‖A_ij‖
    query_bias: float  # ≥ τ‖W_KᵀR_jᵀR_ib_Q‖
    key_bias: float  # ≥ τ‖W_QᵀR_iᵀR_jb_K‖; a rotated key bias does not cancel in the softmax
    bias_score: float  # ≥ τ|b_QᵀR_iᵀR_jb_K|


def rotated_norms(layer: Attention, n: int | None = None) -> tuple[RotatedNorms, ...]:
    """The norms of every head for n tokens (for all positions of the tables when None); computed once per layer and n."""
    known = _CACHE.setdefault(layer, {})
    if n not in known:
        known[n] = tuple(_rotated_head(layer, h, n) for h in range(layer.heads))
    return known[n]


_CACHE: WeakKeyDictionary[Attention, dict[int | None, tuple[RotatedNorms, ...]]] = WeakKeyDictionary()


def _rotated_head(layer: Attention, head: int, n: int | None) -> RotatedNorms:
    assert layer.rotary is not None
    w, single = layer_weights(layer).plain[head], layer.head(head).to(torch.float64)
    causal = isinstance(layer.mask, Causal)
    cos, sin = layer.rotary.cos.detach().double(), layer.rotary.sin.detach().double()
    inputs = [(cos, sin)] if cos.ndim == 2 else list(zip(cos, sin, strict=True))
    found = []
    for c, s in inputs:
        # A table per input is as long as the sequence: with padding, n counts the real places, and these may lie anywhere.
        places = n if cos.ndim == 2 else None
        rotation = Rotation(c[:places], s[:places], layer.rotary.interleaved)
        query = key = score = 0.0
        if single.q_bias is not None:
            query = bias_gradient(w.R_K, single.tau * single.q_bias.detach(), rotation, layer.width)
        if single.k_bias is not None:
            key = bias_gradient(w.R_Q, single.k_bias.detach(), rotation, layer.width)
            if single.q_bias is not None:
                score = bias_gradient(single.tau * single.q_bias.detach()[None], single.k_bias.detach(), rotation)
        found.append((largest_interaction(w, rotation, causal=causal), query, key, score))
    return RotatedNorms(*(max(values) for values in zip(*found, strict=True)))


def largest_interaction(w: HeadWeights, rotation: Rotation, *, causal: bool = False) -> float:
    """An upper bound for max_{i,j} ‖A_ij‖, over j ≤ i if ``causal``: exact up to a few per cent when that is affordable."""
    stretch = max(
        float((rotation.cos.square() + rotation.sin.square()).max()), 1.0 if rotation.cos.shape[-1] < w.R_K.shape[1] else 0.0
    )
    simple = stretch * w.query * spectral(w.R_K) * (1 + 1e-12)
    # W_Q = 0 or W_K = 0.
    if simple == 0.0:
        return 0.0
    relative, deviation = _relative_rotations(rotation, causal, _AFFORDABLE // (12 * max(1, w.R_K.shape[1]) ** 3))
    if relative is None:
        return simple
    # W_Kᵀ(R_jᵀR_i)τW_Q in triangular factors: R_K · rel · R_Qᵀ, a rotated R_Qᵀ read row by row.
    images = relative.apply(w.R_Q.expand(relative.cos.shape[0], *w.R_Q.shape))
    norms = matrix_norm_upper(w.R_K @ images.mT, squarings=6)
    # The products may cancel: what rounding makes of them is relative to their factors.
    rounding = stretch * rounding_unit(w.basis, w.R_K, w.R_Q) * w.sizes[0] * w.sizes[1]
    return min(simple, float(norms.max()) + deviation * w.query * spectral(w.R_K) + rounding)


def bias_gradient(M: Tensor, vector: Tensor, rotation: Rotation, width: int = 0) -> float:
    """The largest of ‖M R_jᵀR_i z‖ over all pairs, at most γ²‖M‖‖z‖ and exact for short tables, rounding included.

    M may stand for a matrix of ``width`` rows, see ``triangle``.
    """
    stretch = max(1.0, float((rotation.cos.square() + rotation.sin.square()).max()))
    if not vector.any():
        return 0.0
    size = spectral(M) * spectral(vector[None])
    simple = stretch * size * (1 + 1e-12)
    relative, deviation = _relative_rotations(rotation, False, _AFFORDABLE // max(1, 4 * M.numel()))
    if relative is None:
        return simple
    # In a unit by a power of two, so that squares stay within the range of floats.
    power = power_above(vector)
    z = relative.apply(times_power(vector, -power).expand(relative.cos.shape[0], 1, len(vector)))[:, 0]
    images = z @ times_power(M, -(further := power_above(M))).mT
    exact = times_power(torch.linalg.vector_norm(images, dim=-1).max() * (1 + 1e-12), power + further, outwards=1)
    unit = rounding_unit(M, vector[None]) + width * torch.finfo(torch.float64).eps
    return min(simple, float(exact) + (deviation + stretch * unit * math.sqrt(min(M.shape))) * size)


def _relative_rotations(rotation: Rotation, causal: bool, limit: int) -> tuple[Rotation | None, float]:
    """Rotations (m, 1, r) that R_jᵀR_i runs through, and how far it may be from them; None when they are too many."""
    c = torch.complex(rotation.cos, rotation.sin)
    n = c.shape[0]
    if n <= min(limit, 1024):
        # Offset o stands for all pairs (t + o, t).
        offsets = c * c[:1].conj()
        deviation = 0.0
        for o in range(n):
            deviation = max(deviation, float((c[o:] * c[: n - o].conj() - offsets[o]).abs().max()))
        if deviation <= _EVEN and (2 - causal) * n <= limit:
            return _as_rotation(offsets if causal else torch.cat([offsets, offsets[1:].conj()]), rotation), deviation
    if n * n <= min(limit, 1 << 12):
        pairs = c[:, None] * c.conj()[None]
        pairs = pairs[torch.ones(n, n, dtype=torch.bool, device=c.device).tril()] if causal else pairs.flatten(0, 1)
        return _as_rotation(pairs, rotation), 0.0
    return None, 0.0


def _as_rotation(numbers: Tensor, rotation: Rotation) -> Rotation:
    return Rotation(numbers.real[:, None].contiguous(), numbers.imag[:, None].contiguous(), rotation.interleaved)


@dataclass(frozen=True)
class HeadConstants:
    """One head."""

    value: float  # ‖V‖, V = W_O W_V
    interaction: float  # ‖A‖, A = τW_KᵀW_Q; the largest over offsets with rotary embeddings
    query_bias: float = 0.0  # τ‖W_Kᵀb_Q‖
    key_bias: float = 0.0  # τ‖W_Qᵀb_K‖ where the key bias does not cancel, else 0
    value_bias: float = 0.0  # ‖W_O b_V‖ where the value bias does not cancel, else 0
    score_range: float = 0.0  # largest difference of the additive bias within a row
    softcap: float = math.inf  # c, or infinity
    orthogonal: bool = True  # ∂s_ij/∂x_j is the same for all j (no soft-cap, no rotary embeddings)
    # τ|b_Qᵀ R b_K| at most, where rotary embeddings keep the key bias in the scores; None without them
    bias_score: float | None = None

    def nu(self, R: float) -> float:
        """ν ≥ ‖v_j‖, up to a shift that cancels."""
        return self.value * R + self.value_bias

    def alpha(self, R: float) -> float:
        """α ≥ ‖∂s_ij/∂x_j‖."""
        return self.interaction * R + self.query_bias

    def beta(self, R: float) -> float:
        """β ≥ ‖∂s_ij/∂x_i‖, up to a shift that cancels."""
        return self.interaction * R + self.key_bias

    def half_range(self, R: float) -> float:
        """The h for which two scores of one row differ by at most 2h; a soft-cap keeps it below c."""
        spread = self.alpha(R) * R
        if self.bias_score is not None:
            spread += self.key_bias * R + self.bias_score
        return min(spread, self.softcap) + self.score_range / 2

    def mean_and_keys(self, R: float, p: float = 2.0) -> float:
        """ρ ≥ ρ_i of the row–column certificate: √(‖V‖² + ν²α²), or ‖V‖ + να when the directions are not orthogonal.

        That is for p = 2; other p interpolate (Riesz–Thorin) between ‖V‖ + 2να at p = 1, ρ, and ‖V‖ + να at p = ∞.
        """
        spread = self.nu(R) * self.alpha(R)
        middle = math.hypot(self.value, spread) if self.orthogonal else self.value + spread
        if p <= 2:
            return math.pow(self.value + 2 * spread, 2 / p - 1) * math.pow(middle, 2 - 2 / p)
        return math.pow(middle, 2 / p) * math.pow(self.value + spread, 1 - 2 / p)

    def queries(self, R: float) -> float:
        """νβ ≥ ‖B_i‖."""
        return self.nu(R) * self.beta(R)


@dataclass(frozen=True)
class Constants:
    """A layer: its heads with W_O inside (``image``), without it (``plain``), and ‖W_O‖."""

    image: tuple[HeadConstants, ...]
    plain: tuple[HeadConstants, ...]
    out: float = 1.0

    @classmethod
    def of_norms(cls, value: float, interaction: float) -> Constants:
        """The paper's setting: one head known by ‖V‖ and ‖A‖ alone."""
        head = HeadConstants(value, interaction)
        return cls((head,), (head,))

    @classmethod
    def of(cls, layer: Attention | Constants, n: int | None = None) -> Constants:
        """The constants of a layer, for the first n positions of rotary embeddings if given; constants pass through."""
        if isinstance(layer, Constants):
            return layer
        weights = layer_weights(layer)
        span = score_range(layer)

        def heads(each: tuple[HeadWeights, ...]) -> tuple[HeadConstants, ...]:
            return tuple(_of_head(layer, w, span) for w in each)

        found = cls(heads(weights.image), heads(weights.plain), weights.out)
        return found if layer.rotary is None else found.with_rotary(rotated_norms(layer, n))

    def with_rotary(self, norms: tuple[RotatedNorms, ...]) -> Constants:
        """The same layer with rotary embeddings, given per head what the rotations make of its norms.

        ``Constants.of`` does this by itself for a layer that has them.
        """

        def rotate(each: tuple[HeadConstants, ...]) -> tuple[HeadConstants, ...]:
            return tuple(
                replace(
                    head, interaction=norm.interaction, query_bias=norm.query_bias, key_bias=norm.key_bias,
                    bias_score=norm.bias_score, orthogonal=False,
                )
                for head, norm in zip(each, norms, strict=True)
            )  # fmt: skip

        return Constants(rotate(self.image), rotate(self.plain), self.out)

    def combine(self, bound: Callable[[HeadConstants], float], p: float = 2.0) -> float:
        """A bound for the whole layer from one for a head, both in the norm (Σ_i‖x_i‖^p)^{1/p}."""
        return over_heads(map(bound, self.plain), self.out, map(bound, self.image), p)


def _of_head(layer: Attention, w: HeadWeights, span: float) -> HeadConstants:
    sinks, bent = layer.sinks is not None, layer.softcap is not None
    return HeadConstants(
        value=w.value,
        interaction=w.interaction,
        query_bias=w.query_bias,
        key_bias=w.key_bias if sinks or bent else 0.0,
        value_bias=w.value_bias if sinks else 0.0,
        score_range=span,
        softcap=math.inf if layer.softcap is None else layer.softcap,
        orthogonal=not bent,
    )


def score_range(layer: Attention) -> float:
    """Largest difference of the additive terms between two keys that one query sees."""
    n = additive_length(layer)
    if n is None or (layer.bias is None and mask_of(layer).additive(n) is None):
        return 0.0
    rule = layer.score_rule(n, _batch(layer, n))
    if rule.additive is None:
        return 0.0
    high = low = rule.additive.double()
    if rule.allowed is not None:
        high = high.masked_fill(~rule.allowed, -math.inf)
        low = low.masked_fill(~rule.allowed, math.inf)
    span = high.amax(-1) - low.amin(-1)
    return float(span[torch.isfinite(span)].max().clamp_min(0)) if bool(torch.isfinite(span).any()) else 0.0


def additive_length(layer: Attention | Variant) -> int | None:
    """The n that an additive bias, an explicit mask or rotary tables per input are made for; None for any n."""
    if isinstance(layer, Variant):
        return mask_of(layer).length
    if layer.rotary is not None and layer.rotary.cos.ndim == 3:
        return int(layer.rotary.cos.shape[1])
    return mask_of(layer).length if layer.bias is None else int(layer.bias.shape[-1])


def mask_of(layer: Attention | Variant) -> Mask:
    """The layer's mask object."""
    assert isinstance(layer.mask, Mask)
    return layer.mask


def _batch(layer: Attention, n: int) -> int:
    mask = mask_of(layer)
    sizes = [t.shape[0] for t in (mask.allowed(n), mask.additive(n)) if t is not None]
    return max([1, *sizes, layer.bias.shape[0] if layer.bias is not None and layer.bias.ndim == 4 else 1])
