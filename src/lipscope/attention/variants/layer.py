"""What all variants share: weights, a mask, features that meet in an n×n core, heads that are joined by W_O.

    P = weights(⟨q̃_i, k̃_j⟩)      o_i = Σ_j P_ij ṽ_j      out = concat_h(o^h) W_Oᵀ

Variants have no biases. Their weights may carry gradients: calling a variant is differentiable in weights and tokens.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol, Self, TypeAlias, cast

import torch
from torch import Tensor

from lipscope.attention.core import Triple
from lipscope.attention.described import Described
from lipscope.attention.layer import Attention
from lipscope.attention.masks import Full, Mask, MaskLike, as_mask
from lipscope.attention.variants.features import Feature

Features: TypeAlias = tuple[Feature, Feature, Feature]


class Core(Protocol):
    """The n×n part at one point: outputs (B, H, n, dv) and the two products of its Jacobian."""

    @property
    def o(self) -> Tensor:
        """The outputs."""
        ...

    @property
    def score_size(self) -> float:
        """Largest size of a score, for the rounding allowance."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Floating type."""
        ...

    def finite(self) -> dict[str, Tensor]:
        """What must be finite for the products to make sense."""
        ...

    def jvp(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """DO for perturbations of the features."""
        ...

    def vjp(self, g: Tensor) -> Triple:
        """Its transpose."""
        ...

    def select(self, items: Tensor) -> Core:
        """Keep the listed batch items."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True)
class Variant(Described, ABC):
    """A multi-head attention layer whose scores or weights are not those of ``Attention``; calling it applies it.

    Attributes:
        q: query weights, ``(heads·dk, d)``.
        v: value weights, ``(heads·dv, d)``.
        out: output weights, ``(d_out, heads·dv)``; None leaves the heads concatenated.
        heads: number of heads.
        mask: who sees whom: a mask object, a short string such as ``"causal"``, or a tensor.
    """

    q: Tensor
    v: Tensor
    out: Tensor | None = None
    heads: int = 1
    mask: MaskLike = None

    kind: ClassVar[str]
    masks: ClassVar[tuple[type[Mask], ...]] = (Mask,)
    numbers: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", as_mask(self.mask))
        if not isinstance(self.mask, self.masks):
            raise ValueError(f"mask {self.mask} does not fit {self.kind} attention: it takes mask full only")
        for name in self.numbers:
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        # The plain layer on the same weights says what does not fit together.
        _ = self.plain

    @property
    def key_weights(self) -> Tensor:
        """W_K, ``(heads·dk, d)``; tied to W_Q where a variant has no keys of its own."""
        return cast(Tensor, getattr(self, "k", self.q))

    @cached_property
    def plain(self) -> Attention:
        """Dot-product attention with the same weights."""
        return Attention(self.q, self.key_weights, self.v, self.out, self.heads, mask=self.mask)

    @property
    def head_width(self) -> int:
        """Dimension dk of one query or key."""
        return self.q.shape[0] // self.heads

    @property
    def output_width(self) -> int:
        """Dimension of one output token."""
        return self.v.shape[0] if self.out is None else self.out.shape[0]

    def with_mask(self, mask: MaskLike) -> Self:
        """The same layer under another mask."""
        return dataclasses.replace(self, mask=mask)

    @abstractmethod
    def features(self, X: Tensor) -> Features:
        """Queries, keys and values of tokens (B, n, d)."""

    @abstractmethod
    def outputs(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Head outputs (B, H, n, dv) by plain torch operations that can be differentiated as often as one likes."""

    @abstractmethod
    def linearise(self, q: Tensor, k: Tensor, v: Tensor) -> Core:
        """The core at features q̃, k̃, ṽ, for products with its Jacobian."""

    def visible(self, n: int) -> Tensor | None:
        """True where query i sees key j, (·, ·, n, n); None for everywhere."""
        mask = cast(Mask, self.mask)
        if isinstance(mask, Full):
            return None
        additive = mask.additive(n)
        if additive is not None and bool(additive.any()):
            raise ValueError(f"mask {mask} adds to scores, and {self.kind} attention takes masks that hide or show only")
        allowed = mask.allowed(n)
        return None if allowed is None else allowed.to(self.device)

    def merge_heads(self, o: Tensor) -> Tensor:
        """Head outputs (B, H, n, dv) → tokens (B, n, d_out)."""
        joined = o.transpose(1, 2).flatten(2)
        return joined if self.out is None else joined @ self.out.mT

    def __call__(self, X: Tensor) -> Tensor:
        """Apply the layer to tokens (n, d) or (B, n, d)."""
        batched = X if X.ndim == 3 else X[None]
        Y = self.merge_heads(self.outputs(*(feature.value for feature in self.features(batched))))
        return Y if X.ndim == 3 else Y[0]
