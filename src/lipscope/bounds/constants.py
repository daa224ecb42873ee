"""The numbers of a layer that set bounds are made of, and how heads combine.

For one head and tokens in the ball of radius R:

    a = ‖A‖R²        drift α = ‖A‖R + τ‖W_Kᵀb_Q‖ ≥ ‖∂s_ij/∂x_j‖        β = ‖A‖R (+ τ‖W_Qᵀb_K‖) ≥ ‖∂s_ij/∂x_i‖
    ν = ‖V‖R (+ ‖W_O b_V‖) ≥ ‖v_j‖    half-range h: two scores of one row differ by at most 2h

A key bias is the same for all keys of a row, so it cancels in the softmax, and a value bias cancels in v_j − o_i; the terms
in parentheses appear only where they do not: with sinks, and for the key bias also with a soft-cap or rotary embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lipscope.attention.layer import Attention
from lipscope.bounds.weights import HeadWeights, layer_weights


@dataclass(frozen=True)
class HeadConstants:
    """One head.

    Attributes:
        value: ‖V‖, V = W_O W_V.
        interaction: ‖A‖, A = τW_KᵀW_Q; the largest over offsets with rotary embeddings.
        query_bias: τ‖W_Kᵀb_Q‖.
        key_bias: τ‖W_Qᵀb_K‖ where the key bias does not cancel, else 0.
        value_bias: ‖W_O b_V‖ where the value bias does not cancel, else 0.
        score_range: largest difference of the additive bias within a row, plus what a rotated key bias adds.
        softcap: c, or infinity.
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
        return min(self.alpha(R) * R, self.softcap) + self.score_range / 2

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
    def of(cls, layer: Attention | Constants) -> Constants:
        """The constants of a layer; constants pass through."""
        if isinstance(layer, Constants):
            return layer
        weights = layer_weights(layer)
        span = score_range(layer)

        def heads(each: tuple[HeadWeights, ...]) -> tuple[HeadConstants, ...]:
            return tuple(_of_head(layer, w, span) for w in each)

        return cls(heads(weights.image), heads(weights.plain), weights.out)

    def with_rotary(self, interactions: tuple[float, ...], key_bias_range: float = 0.0) -> Constants:
        """The same layer with rotary embeddings.

        Args:
            interactions: per head, an upper bound of ‖A_{i−j}‖ over all offsets, see ``rotary_interaction``.
            key_bias_range: 2τ(‖W_Q‖R + ‖b_Q‖)‖b_K‖, since a rotated key bias does not cancel; 0 without key bias.
        """

        def turn(each: tuple[HeadConstants, ...]) -> tuple[HeadConstants, ...]:
            return tuple(
                replace(head, interaction=norm, orthogonal=False, score_range=head.score_range + key_bias_range)
                for head, norm in zip(each, interactions, strict=True)
            )

        return Constants(turn(self.image), turn(self.plain), self.out)

    def combine(self, bound: Callable[[HeadConstants], float]) -> float:
        """min( Σ_h bound(head with W_O), ‖W_O‖·√Σ_h bound(head)² ): both are valid for the whole layer."""
        joint = self.out * math.hypot(*(bound(head) for head in self.plain))
        return min(sum(bound(head) for head in self.image), joint)


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
    if n is None:
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


def additive_length(layer: Attention) -> int | None:
    """The n an additive bias or an explicit mask is made for; None when the layer takes any n."""
    from lipscope.attention.masks import Both, Explicit, Mask

    def explicit(mask: Mask) -> int | None:
        if isinstance(mask, Explicit):
            return int(mask.tensor.shape[-1])
        return explicit(mask.first) or explicit(mask.second) if isinstance(mask, Both) else None

    assert isinstance(layer.mask, Mask)
    return explicit(layer.mask) if layer.bias is None else int(layer.bias.shape[-1])


def _batch(layer: Attention, n: int) -> int:
    from lipscope.attention.masks import Mask

    assert isinstance(layer.mask, Mask)
    sizes = [t.shape[0] for t in (layer.mask.allowed(n), layer.mask.additive(n)) if t is not None]
    return max([1, *sizes, layer.bias.shape[0] if layer.bias is not None and layer.bias.ndim == 4 else 1])


def rotary_interaction(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor, n: int, scale: float) -> float:
    """Largest over offsets |o| < n of τ‖W_Kᵀ Rot(o) W_Q‖ for one head: the ‖A‖ of set bounds with rotary embeddings.

    Args:
        q: W_Q of the head (dk, d).
        k: W_K of the head (dk, d).
        angles: rotation per position of each pair (m, m + dk/2), shape (dk/2,), as in the usual half-split layout.
        n: number of positions.
        scale: τ.

    Returns:
        The norm; always at most τ‖W_K‖‖W_Q‖.
    """
    from lipscope.bounds.weights import spectral, triangle

    R_Q, R_K = triangle(q.double().mT), triangle(k.double().mT)
    half = angles.numel()
    largest = 0.0
    for offset in range(-(n - 1), n):
        cos, sin = torch.cos(offset * angles.double()), torch.sin(offset * angles.double())
        rotation = torch.zeros(2 * half, 2 * half, dtype=torch.float64)
        index = torch.arange(half)
        rotation[index, index] = rotation[index + half, index + half] = cos
        rotation[index, index + half], rotation[index + half, index] = -sin, sin
        largest = max(largest, spectral(R_K @ rotation @ R_Q.mT))
    return abs(scale) * largest
