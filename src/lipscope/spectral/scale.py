"""Maps of any scale: products keep their digits when their arguments are multiplied by a power of two, which is exact.

In float32 values below 1e-38 lose digits and sums beyond 3e38 are infinite, in float64 below 1e-308 and beyond 1.8e308.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SolverOutput

# Sizes of a product with a unit vector that need no scaling, and the largest exponent of a factor.
_RANGE = {torch.float32: (1e-25, 1e25, 100.0), torch.float64: (1e-250, 1e250, 1000.0)}


class ExtremeScaleError(ArithmeticError):
    """Products of these maps would lose digits; they keep them with factors 2^exponent, (B,)."""

    def __init__(self, exponent: Tensor) -> None:
        super().__init__("the map is too large or too small for its dtype")
        self.exponent = exponent


class ScaledOperator(Operator):
    """The maps 2^e·J of every item, e = ``exponent`` (B,)."""

    def __init__(self, operator: Operator, exponent: Tensor) -> None:
        self._operator, self._exponent = operator, exponent
        self._factor = torch.exp2(exponent).to(operator.dtype)[:, None]
        self.batch, self.dtype, self.device = operator.batch, operator.dtype, operator.device
        self.input_shape, self.output_shape = operator.input_shape, operator.output_shape

    @property
    def rounding_error(self) -> float:
        """That of the maps themselves."""
        return self._operator.rounding_error

    def matvec(self, u: Tensor) -> Tensor:
        """The product 2^e·J·u."""
        return self._operator.matvec(self._factor * u)

    def rmatvec(self, g: Tensor) -> Tensor:
        """The product 2^e·Jᵀ·g."""
        return self._operator.rmatvec(self._factor * g)

    def select(self, items: Tensor) -> ScaledOperator:
        """Keep the listed items."""
        return ScaledOperator(self._operator.select(items), self._exponent[items])

    def token_energy(self, right: Tensor) -> Tensor | None:
        """That of the maps themselves."""
        return self._operator.token_energy(right)


def refuse_extreme_scales(operator: Operator, size: Tensor) -> None:
    """Raise when the size (B,) of first products is too large, too small or zero for some maps; scaled ones may be zero."""
    least, most, largest = _RANGE[operator.dtype]
    size = size.nan_to_num(torch.inf, posinf=torch.inf)
    exponent = (-size.log2().round()).clamp(-largest, largest).masked_fill((size > least) & (size < most), 0.0)
    if bool(exponent.any()) and not isinstance(operator, ScaledOperator):
        raise ExtremeScaleError(exponent)


def at_any_scale(operator: Operator, solve: Callable[[Operator], SolverOutput]) -> SolverOutput:
    """What ``solve`` says of the maps, by way of scaled ones where it refuses their scale."""
    if operator.dtype not in _RANGE:
        raise ValueError(f"products must be in float32 or float64, got {operator.dtype}: other types have too few digits")
    try:
        return solve(operator)
    except ExtremeScaleError as error:
        factor = torch.exp2(-error.exponent)
        found = solve(ScaledOperator(operator, error.exponent))
    for values in (found.estimate, found.upper, found.residual, found.singular_values.T):
        values *= factor
    if not bool(torch.isfinite(found.upper).all()):
        raise FloatingPointError("σ is beyond the largest number of float64: rescale the map")
    return found
