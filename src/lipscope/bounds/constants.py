"""The numbers of a layer that set bounds are made of, and how heads combine.

For one head and tokens in the ball of radius R:

    a = ‖A‖R²        drift α = ‖A‖R + τ‖W_Kᵀb_Q‖ ≥ ‖∂s_ij/∂x_j‖        β = ‖A‖R (+ τ‖W_Qᵀb_K‖) ≥ ‖∂s_ij/∂x_i‖
    ν = ‖V‖R (+ ‖W_O b_V‖) ≥ ‖v_j‖    half-range h: two scores of one row differ by at most 2h

A key bias is the same for all keys of a row, so it cancels in the softmax, and a value bias cancels in v_j − o_i; the terms
in parentheses appear only where they do not: with sinks, and for the key bias also with a soft-cap or rotary embeddings.
With rotary embeddings ‖A‖ is the largest over pairs of tokens, and a turned key bias also widens the range of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Mask
from lipscope.attention.variants import Variant
from lipscope.bounds.offsets import TurnedNorms, turned_norms
from lipscope.bounds.weights import HeadWeights, layer_weights, over_heads


@dataclass(frozen=True)
class HeadConstants:
    """One head.

    Attributes:
        value: ‖V‖, V = W_O W_V.
        interaction: ‖A‖, A = τW_KᵀW_Q; the largest over offsets with rotary embeddings.
        query_bias: τ‖W_Kᵀb_Q‖.
        key_bias: τ‖W_Qᵀb_K‖ where the key bias does not cancel, else 0.
        value_bias: ‖W_O b_V‖ where the value bias does not cancel, else 0.
        score_range: largest difference of the additive bias within a row.
        softcap: c, or infinity.
        bias_score: τ|b_Qᵀ R b_K| at most, where rotary embeddings keep the key bias in the scores; None without them.
        orthogonal: ∂s_ij/∂x_j is the same for all j (no soft-cap, no rotary embeddings).
    """

    value: float
    interaction: float
    query_bias: float = 0.0
    key_bias: float = 0.0
    value_bias: float = 0.0
    score_range: float = 0.0
    softcap: float = math.inf
    orthogonal: bool = True
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

    def mean_and_keys(self, R: float) -> float:
        """ρ ≥ ρ_i of the row–column certificate: √(‖V‖² + ν²α²), or ‖V‖ + να when the directions are not orthogonal."""
        spread = self.nu(R) * self.alpha(R)
        return math.hypot(self.value, spread) if self.orthogonal else self.value + spread

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
        """The constants of a layer; constants pass through.

        Args:
            layer: the layer.
            n: number of tokens, when only the first n positions of rotary embeddings matter.
        """
        if isinstance(layer, Constants):
            return layer
        weights = layer_weights(layer)
        span = score_range(layer)

        def heads(each: tuple[HeadWeights, ...]) -> tuple[HeadConstants, ...]:
            return tuple(_of_head(layer, w, span) for w in each)

        found = cls(heads(weights.image), heads(weights.plain), weights.out)
        return found if layer.rotary is None else found.with_rotary(turned_norms(layer, n))

    def with_rotary(self, norms: tuple[TurnedNorms, ...]) -> Constants:
        """The same layer with rotary embeddings, given per head what the rotations make of its norms.

        ``Constants.of`` does this by itself for a layer that has them.
        """

        def turn(each: tuple[HeadConstants, ...]) -> tuple[HeadConstants, ...]:
            return tuple(
                replace(
                    head, interaction=norm.interaction, query_bias=norm.query_bias, key_bias=norm.key_bias,
                    bias_score=norm.bias_score, orthogonal=False,
                )
                for head, norm in zip(each, norms, strict=True)
            )  # fmt: skip

        return Constants(turn(self.image), turn(self.plain), self.out)

    def combine(self, bound: Callable[[HeadConstants], float]) -> float:
        """A bound for the whole layer from one for a head."""
        return over_heads(map(bound, self.plain), self.out, map(bound, self.image))


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
