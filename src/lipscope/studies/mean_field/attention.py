"""Attention as a map on probability measures.

    unmasked, μ on R^d           F(μ) = (Γ_μ)_# μ          Γ_μ(x) = Σ_h W_O^h ∫ v(y) e^{s(x,y)} dμ(y) / ∫ e^{s(x,y)} dμ(y)
    causal, μ̄ on [0,1] × R^d     F^m(μ̄) = image of μ̄ under (s, x) ↦ (s, Γ_μ̄(s, x)); the integrals run over positions τ ≤ s

On an atomic measure this is finite attention with log w_j added to the scores: P_ij ∝ w_j e^{s_ij}. So a measure turns the
layer into an ordinary ``Attention``, and uniform weights give back the layer itself, bit by bit.

**Ties.** Atoms at one position see each other and themselves (τ ≤ s, not τ < s). With distinct positions i/n that is the
causal mask, and an atom may be written as two halves in the same place without changing anything.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias, overload

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal, Full, Mask
from lipscope.bounds.constants import Constants
from lipscope.studies.mean_field.measures import Measure, PositionedMeasure

AnyMeasure: TypeAlias = Measure | PositionedMeasure


@dataclass(frozen=True, eq=False)
class MeanFieldAttention:
    """A layer as a map on measures: F for an unmasked layer, F^m for a causal one.

    Biases, soft-cap and grouped queries keep their meaning. An attention sink does not: it is one token beside n others,
    and a measure has no n. Give ``sink_length`` to let it weigh as much as one token among that many.

    Attributes:
        layer: the layer; computed in float64.
        sink_length: number of tokens against which a sink counts as one; needed with sinks only.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> F = MeanFieldAttention(lipscope.Attention(W, W, W))
        >>> X = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
        >>> bool((F(Measure.from_tokens(X)).points == F.layer(X)).all())
        True
    """

    layer: Attention
    sink_length: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layer, Attention):
            raise TypeError(f"layer must be a lipscope.Attention, got {type(self.layer).__name__}")
        if not isinstance(self.layer.mask, Full | Causal):
            raise ValueError(
                f"mask {self.layer.mask} has no mean-field meaning: it counts tokens, and a measure has none to count. "
                "Masks that have one: full (measures on R^d) and causal (measures on [0,1] × R^d)"
            )
        if self.layer.rotary is not None:
            raise ValueError(
                "rotary embeddings have no mean-field meaning: they turn tokens by their number. Leave them out with "
                "dataclasses.replace(layer, rotary=None)"
            )
        if self.layer.bias is not None:
            raise ValueError(
                f"the additive score bias of shape {tuple(self.layer.bias.shape)} has no mean-field meaning: it belongs to "
                "token numbers, not to tokens. Leave it out with dataclasses.replace(layer, bias=None)"
            )
        if (self.layer.sinks is None) != (self.sink_length is None):
            raise ValueError(
                "sinks need sink_length, the number of tokens against which a sink counts as one: its share depends on n"
                if self.sink_length is None
                else "sink_length belongs to layers with sinks, and this one has none"
            )
        if self.sink_length is not None and self.sink_length < 1:
            raise ValueError(f"sink_length must be at least 1, got {self.sink_length}")
        object.__setattr__(self, "layer", self.layer.to(dtype=torch.float64))

    @property
    def causal(self) -> bool:
        """Whether this is F^m, on measures with positions."""
        return isinstance(self.layer.mask, Causal)

    @cached_property
    def constants(self) -> Constants:
        """The norms of the layer that set bounds are made of."""
        return Constants.of(self.layer)

    def head(self, index: int) -> MeanFieldAttention:
        """One head before W_O."""
        return MeanFieldAttention(self.layer.head(index), self.sink_length)

    def finite(self, measure: AnyMeasure) -> Attention:
        """The finite layer that the measure makes of it: its value at the atoms is Γ_μ there.

        Differentiable in the points, with the weights held fixed.
        """
        self.check(measure)
        weights, positions = measure.weights, measure.positions if isinstance(measure, PositionedMeasure) else None
        if self.sink_length is None:
            log_weights = torch.log(weights / weights.max())
        elif measure.is_uniform:
            log_weights = torch.full_like(weights, math.log(self.sink_length / measure.size))
        else:
            log_weights = torch.log(weights * self.sink_length)
        return dataclasses.replace(self.layer, mask=Reweighted(log_weights, positions))

    @overload
    def __call__(self, measure: Measure) -> Measure: ...

    @overload
    def __call__(self, measure: PositionedMeasure) -> PositionedMeasure: ...

    def __call__(self, measure: AnyMeasure) -> AnyMeasure:
        """F(μ), or F^m(μ̄): every atom moves to Γ of it, weights and positions stay.

        An atom of weight zero is moved too where Γ is defined; a causal layer gives 0 to one that no mass precedes.
        """
        return self.image(measure)

    def image(self, measure: AnyMeasure) -> AnyMeasure:
        """The same as a call, for a measure of either kind."""
        return measure.push(self.finite(measure)(measure.points))

    def check(self, measure: AnyMeasure) -> None:
        """Refuse a measure of the wrong kind or dimension."""
        wanted = PositionedMeasure if self.causal else Measure
        if not isinstance(measure, wanted):
            advice = "PositionedMeasure.from_tokens(X)" if self.causal else "measure.space_marginal()"
            raise TypeError(
                f"a {'causal' if self.causal else 'full'} layer maps a {wanted.__name__}, got {type(measure).__name__}; "
                f"try {advice}"
            )
        if measure.dimension != self.layer.width:
            raise ValueError(f"measure lives on R^{measure.dimension}, but the layer takes width {self.layer.width}")

    def measure_of(self, X: Tensor) -> AnyMeasure:
        """A token sequence as the kind of measure this layer maps."""
        return PositionedMeasure.from_tokens(X) if self.causal else Measure.from_tokens(X)


@dataclass(frozen=True, eq=False)
class Reweighted(Mask):
    """Log-weights on the keys, and the order of positions: how a measure looks to the softmax.

    Attributes:
        log_weights: log w_j up to a constant (n,); −inf hides an atom of weight zero.
        positions: s_i when only τ ≤ s is visible, or None.
    """

    log_weights: Tensor
    positions: Tensor | None = None

    def sees(self, rows: slice, columns: slice, n: int) -> Tensor | None:
        """Atoms that carry mass, at positions not later than the query's."""
        self._check(n)
        charged = torch.isfinite(self.log_weights)
        if self.positions is None:
            return None if bool(charged.all()) else charged[None, None, None, columns]
        return ((self.positions[None, columns] <= self.positions[rows, None]) & charged[columns])[None, None]

    def additive(self, n: int) -> Tensor | None:
        """The finite log-weights, the same for every query; None when all atoms weigh the same."""
        self._check(n)
        if not bool(self.log_weights.any()):
            return None
        return self.log_weights.masked_fill(~torch.isfinite(self.log_weights), 0.0)[None, None, None]

    def _check(self, n: int) -> None:
        if n != len(self.log_weights):
            raise ValueError(f"the measure has {len(self.log_weights)} atoms but the input has n = {n} tokens")

    def __str__(self) -> str:
        return "measure" if self.positions is None else "measure&causal"
