"""Attention as a map on probability measures.

    unmasked, μ on R^d           F(μ) = (Γ_μ)_# μ          Γ_μ(x) = Σ_h W_O^h ∫ v(y) e^{s(x,y)} dμ(y) / ∫ e^{s(x,y)} dμ(y)
    causal, μ̄ on [0,1] × R^d     F^m(μ̄) = image of μ̄ under (s, x) ↦ (s, Γ_μ̄(s, x)); the integrals run over positions τ ≤ s

On an atomic measure this is finite attention with log w_j added to the scores: P_ij ∝ w_j e^{s_ij}. So a measure turns the
layer into an ordinary ``Attention``, and uniform weights give back the layer itself, bit by bit.

**Ties.** Atoms at one position see each other and themselves (τ ≤ s, not τ < s). With distinct positions i/n that is the
causal mask, and an atom may be written as two halves in the same place without changing anything.

**Derivative.** Moving the atoms of μ = Σ w_i δ_{x_i} by ε_i costs W_2² = Σ w_i‖ε_i‖² (for small ε), and likewise at the
outputs. So the local W_2 constant along the atoms is the largest singular value of

    D_w^{1/2} J D_w^{−1/2},     blocks √(w_i w_j)·k(x_i, x_j) + δ_ij B_i,     J = ∂Γ(x_i)/∂x_j

which for uniform weights is ‖D_X f‖₂. Written with k it depends on the measure alone: splitting an atom into halves repeats
rows and columns, and adds the directions in which the halves move against each other. Those are seen by B_i only, hence

    σ(split) = max( σ, max ‖B_i‖ over the atoms that were split ).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal, Full, MaskFunction
from lipscope.attention.validation import derived
from lipscope.bounds.constants import Constants
from lipscope.measure.sigma import sigma
from lipscope.models.corpora import read_text
from lipscope.models.model import Model
from lipscope.models.text import chunks_of
from lipscope.spectral.operator import DerivedOperator, Operator
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Solver
from lipscope.studies.mean_field.measures import Measure


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
    sink_length: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layer.mask, Full | Causal):
            raise ValueError(
                f"mask {self.layer.mask} has no mean-field meaning: it counts tokens, and a measure has none to count. "
                "Masks that have one: full (measures on R^d) and causal (measures on [0,1] × R^d)"
            )
        for name, words in (("rotary", "rotary embedding"), ("bias", "additive score bias")):
            if getattr(self.layer, name) is not None:
                raise ValueError(
                    f"the {words} of the layer has no mean-field meaning: it belongs to token numbers, not to tokens. Leave "
                    f"it out with dataclasses.replace(layer, {name}=None)"
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

    def finite(self, measure: Measure) -> Attention:
        """The finite layer that the measure makes of it: its value at the atoms is Γ_μ there.

        Differentiable in the points, with the weights held fixed.
        """
        self.check(measure)
        weights, places, mask = measure.weights, measure.positions, self.layer.mask
        if self.sink_length is None:
            log_weights = torch.log(weights / weights.max())
        elif measure.is_uniform:
            log_weights = torch.full_like(weights, math.log(self.sink_length / measure.size))
        else:
            log_weights = torch.log(weights * self.sink_length)
        charged = weights > 0
        if not bool(charged.all()) or (places is not None and bool((places.diff() <= 0).any())):
            s = torch.zeros_like(weights) if places is None else places
            mask = MaskFunction(lambda b, h, q, k: charged[k] & (s[k] <= s[q]), 1, measure.size)
        # The same for every query: a matrix of one row.
        bias = log_weights.masked_fill(~charged, 0.0).expand(measure.size, -1)
        return derived(self.layer, mask=mask, bias=bias if bool(bias.any()) else None)

    def __call__(self, measure: Measure) -> Measure:
        """F(μ), or F^m(μ̄): every atom moves to Γ of it, weights and positions stay.

        An atom of weight zero is moved too where Γ is defined; a causal layer gives 0 to one that no mass precedes.
        """
        return measure.push(self.finite(measure)(measure.points))

    def check(self, measure: Measure) -> None:
        """Refuse a measure with or without positions where the other is needed, or of another dimension."""
        if self.causal and measure.positions is None:
            raise TypeError("a causal layer maps measures with positions; try Measure.from_tokens(X, ordered=True)")
        if not self.causal and measure.positions is not None:
            raise TypeError("a full layer maps measures without positions; try measure.space_marginal()")
        if measure.dimension != self.layer.width:
            raise ValueError(f"measure lives on R^{measure.dimension}, but the layer takes width {self.layer.width}")

    def measure_of(self, X: Tensor) -> Measure:
        """A token sequence as the kind of measure this layer maps."""
        return Measure.from_tokens(X, ordered=self.causal)


class WeightedOperator(DerivedOperator):
    """D_w^{1/2} J D_w^{−1/2} for an operator J on token sequences (n, ·) and weights (B, n), all positive.

    Directions are u_i = √w_i·ε_i, of length ‖ε‖ in the metric of the measure; ``lift_right`` gives back ε, and
    ``token_energy`` is w_i‖ε_i‖².
    """

    def __init__(self, base: Operator, weights: Tensor) -> None:
        if len(base.input_shape) != 2 or len(base.output_shape) != 2 or base.input_shape[0] != base.output_shape[0]:
            raise ValueError(f"base must map n tokens to n tokens, it maps {base.input_shape} to {base.output_shape}")
        roots = weights.to(dtype=base.dtype, device=base.device).sqrt().expand(base.batch, base.input_shape[0])
        if not bool((roots > 0).all()):
            raise ValueError("weights must be positive: drop the atoms of weight zero with measure.support()")
        super().__init__(base)
        self.roots = roots[..., None]

    @property
    def rounding_error(self) -> float:
        """That of the base, and of the two scalings."""
        return self.base.rounding_error + 8 * torch.finfo(self.dtype).eps

    @property
    def rounding_floor(self) -> Tensor | float:
        """That of the base, as much as the scalings enlarge it."""
        return self.base.rounding_floor * (self.roots.amax((1, 2)) / self.roots.amin((1, 2))).double()

    def matvec(self, u: Tensor) -> Tensor:
        """√w_i·(J D_w^{−1/2} u)_i."""
        moved = self.base.matvec((self._inputs(u) / self.roots).flatten(1))
        return (moved.reshape(-1, *self.output_shape) * self.roots).flatten(1)

    def rmatvec(self, g: Tensor) -> Tensor:
        """(Jᵀ D_w^{1/2} g)_j/√w_j."""
        scaled = g.reshape(-1, *self.output_shape) * self.roots
        return (self._inputs(self.base.rmatvec(scaled.flatten(1))) / self.roots).flatten(1)

    def select(self, items: Tensor) -> WeightedOperator:
        return WeightedOperator(self.base.select(items), self.roots[items, :, 0].square())

    def lift_right(self, right: Tensor) -> Tensor:
        """Displacements ε of the atoms, with Σ w_i‖ε_i‖² = 1."""
        return self.base.lift_right((self._inputs(right) / self.roots).flatten(1))

    def to_dense(self) -> Tensor:
        rows = self.roots.expand(-1, -1, self.output_shape[1]).flatten(1)
        columns = self.roots.expand(-1, -1, self.input_shape[1]).flatten(1)
        return self.base.to_dense() * rows[:, :, None] / columns[:, None, :]

    def _inputs(self, u: Tensor) -> Tensor:
        return u.reshape(-1, *self.input_shape)


def mean_field_operator(attention: MeanFieldAttention, measure: Measure, scope: str = "attention") -> WeightedOperator:
    """The derivative of F (or F^m) at a measure, in its metric; one item, or one per head for scope ``head``.

    Atoms of weight zero are dropped: the measure does not know them.
    """
    if scope not in ("attention", "head"):
        raise ValueError(f"unknown scope {scope!r}; scopes of mean-field attention are: attention, head")
    attention.check(measure)
    charged = measure.support()
    return WeightedOperator(attention.finite(charged).operator(charged.points[None], scope), charged.weights)


def local_constant(
    attention: MeanFieldAttention,
    measure: Measure,
    *,
    scope: str = "attention",
    splitting: bool = False,
    solver: Solver | None = None,
) -> SpectralNorm:
    """Local W_2 constant of F at μ (d_2 constant of F^m at μ̄), as an interval.

    sup over displacements of the atoms of (Σ w_i‖δΓ_i‖²)^½ / (Σ w_i‖ε_i‖²)^½. It equals σ(X) = ‖D_X f‖₂ for the uniform
    cloud of X. Where outputs of different atoms coincide, matching them otherwise can only make the output distance smaller,
    so there it is an upper bound for the W_2 ratio.

    Args:
        attention: F or F^m.
        measure: where; with positions for a causal layer.
        scope: ``"attention"``, or ``"head"`` for every head before W_O at once.
        splitting: also let every atom fall apart, as perturbations of a measure may: max(σ, max_i ‖B_i‖).
        solver: ``Auto()`` by default.

    Returns:
        A ``SpectralNorm``; numbers, or tensors (H,) for scope ``head``.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(1, dtype=torch.float64)
        >>> F = MeanFieldAttention(lipscope.Attention(0 * W, W, W, mask="causal"))     # A = 0: the Cesàro mean
        >>> X = torch.zeros(10, 1, dtype=torch.float64)
        >>> round(local_constant(F, F.measure_of(X)).estimate, 3)
        1.41
    """
    operator = mean_field_operator(attention, measure.split() if splitting else measure, scope)
    mask = f"{attention.layer.mask}, mean-field"
    return sigma(operator, solver, scope=scope, mask=mask, shape=() if scope == "attention" else (-1,))


def model_layer(
    model: Model, layer: int, text: str, *, n: int = 64, inputs: int = 4, seed: int = 0
) -> tuple[Attention, Tensor]:
    """A layer of a real model without its sequence length, and the tokens (inputs·n, d), float64, that reach it on a text.

    Refuses a layer without weights in closed form, and one whose positions, score bias or mask count tokens.
    """
    at = model.record(input_ids=chunks_of(model, read_text(text), n, inputs, seed))[layer]
    at.weights()
    if at.at_any_length is None:
        raise ValueError(
            f"layer {at.index} ({at.layer.name}) of {model.name} has no mean-field form: its rotary embeddings, score bias "
            f"or mask ({at.mask}) count tokens, and a measure has none to count"
        )
    return at.at_any_length, at.tokens().double().flatten(0, 1)
