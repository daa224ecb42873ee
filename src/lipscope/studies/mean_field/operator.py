"""The derivative of mean-field attention in the metric of the measure.

Moving the atoms of μ = Σ w_i δ_{x_i} by ε_i costs W_2² = Σ w_i‖ε_i‖² (for small ε), and likewise at the outputs. So the
local W_2 constant along the atoms is the largest singular value of

    D_w^{1/2} J D_w^{−1/2},     blocks √(w_i w_j)·k(x_i, x_j) + δ_ij B_i,     J = ∂Γ(x_i)/∂x_j

which for uniform weights is ‖D_X f‖₂. Written with k it depends on the measure alone: splitting an atom into halves repeats
rows and columns, and adds the directions in which the halves move against each other. Those are seen by B_i only, hence

    σ(split) = max( σ, max ‖B_i‖ over the atoms that were split ).
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.attention.operators import AttentionOperator, HeadOperator
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SpectralNorm, reshape_batch, summarise
from lipscope.spectral.solvers import Auto, Solver
from lipscope.studies.mean_field.attention import AnyMeasure, MeanFieldAttention


class WeightedOperator(Operator):
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
        self.base, self.roots = base, roots[..., None]
        self.batch, self.input_shape, self.output_shape = base.batch, base.input_shape, base.output_shape
        self.dtype, self.device = base.dtype, base.device

    @property
    def rounding_error(self) -> float:
        """That of the base, and of the two scalings."""
        return self.base.rounding_error + 8 * torch.finfo(self.dtype).eps

    def matvec(self, u: Tensor) -> Tensor:
        """√w_i·(J D_w^{−1/2} u)_i."""
        moved = self.base.matvec((self._inputs(u) / self.roots).flatten(1))
        return (moved.reshape(-1, *self.output_shape) * self.roots).flatten(1)

    def rmatvec(self, g: Tensor) -> Tensor:
        """(Jᵀ D_w^{1/2} g)_j/√w_j."""
        scaled = g.reshape(-1, *self.output_shape) * self.roots
        return (self._inputs(self.base.rmatvec(scaled.flatten(1))) / self.roots).flatten(1)

    def select(self, items: Tensor) -> WeightedOperator:
        """Keep the listed items."""
        return WeightedOperator(self.base.select(items), self.roots[items, :, 0].square())

    def lift_right(self, right: Tensor) -> Tensor:
        """Displacements ε of the atoms, with Σ w_i‖ε_i‖² = 1."""
        return self.base.lift_right((self._inputs(right) / self.roots).flatten(1))

    def to_dense(self) -> Tensor:
        """The base's matrices, rows and columns scaled."""
        rows = self.roots.expand(-1, -1, self.output_shape[1]).flatten(1)
        columns = self.roots.expand(-1, -1, self.input_shape[1]).flatten(1)
        return self.base.to_dense() * rows[:, :, None] / columns[:, None, :]

    def _inputs(self, u: Tensor) -> Tensor:
        return u.reshape(-1, *self.input_shape)


def mean_field_operator(attention: MeanFieldAttention, measure: AnyMeasure, scope: str = "attention") -> WeightedOperator:
    """The derivative of F (or F^m) at a measure, in its metric; one item, or one per head for scope ``head``.

    Atoms of weight zero are dropped: the measure does not know them.
    """
    if scope not in ("attention", "head"):
        raise ValueError(f"unknown scope {scope!r}; scopes of mean-field attention are: attention, head")
    attention.check(measure)
    charged = measure.support()
    kind = AttentionOperator if scope == "attention" else HeadOperator
    return WeightedOperator(kind(attention.finite(charged), charged.points[None]), charged.weights)


def local_constant(
    attention: MeanFieldAttention,
    measure: AnyMeasure,
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
    attention.check(measure)
    charged = measure.support()
    operator = mean_field_operator(attention, charged.split() if splitting else charged, scope)
    result = summarise(
        (solver or Auto()).solve(operator),
        operator,
        scope=scope,
        mask="causal, mean-field" if attention.causal else "full, mean-field",
    )
    return reshape_batch(result, () if scope == "attention" else (attention.layer.heads,))
