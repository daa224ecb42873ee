"""Maps of any scale: products keep their digits when their arguments are multiplied by a power of two, which is exact.

In float32 values below 1e-38 lose digits and sums beyond 3e38 are infinite, in float64 below 1e-308 and beyond 1.8e308.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lipscope.spectral.operator import DerivedOperator, Operator
from lipscope.spectral.result import SolverOutput

# Sizes of a product with a unit vector that need no scaling, and the largest exponent of a factor.
_RANGE = {torch.float32: (1e-25, 1e25, 100.0), torch.float64: (1e-250, 1e250, 1000.0)}


class ExtremeScaleError(ArithmeticError):
    """Products of these maps would lose digits; they keep them with factors 2^exponent, (B,)."""

    def __init__(self, exponent: Tensor) -> None:
        super().__init__("the map is too large or too small for its dtype")
        self.exponent = exponent


class ScaledOperator(DerivedOperator):
    """The maps 2^e·J of every item, e = ``exponent`` (B,), of which ``items`` are kept.

    What vanishes may do so between numbers that are not small: a factor with which a product overflows is halved.
    """

    def __init__(self, base: Operator, exponent: Tensor, items: Tensor | None = None) -> None:
        super().__init__(base)
        self.exponent, self._items = exponent, torch.arange(base.batch, device=base.device) if items is None else items
        self._factor = torch.exp2(exponent[self._items]).to(base.dtype)[:, None]

    def matvec(self, u: Tensor) -> Tensor:
        return self._in_range(self.base.matvec(self._factor * u))

    def rmatvec(self, g: Tensor) -> Tensor:
        return self._in_range(self.base.rmatvec(self._factor * g))

    def select(self, items: Tensor) -> ScaledOperator:
        return ScaledOperator(self.base.select(items), self.exponent, self._items[items])

    def _in_range(self, product: Tensor) -> Tensor:
        beyond = self._items[~torch.isfinite(product).all(1)]
        if bool((self.exponent[beyond] > 0).any()):
            less = self.exponent.clone()
            less[beyond] = torch.minimum(less, (less / 2).floor())[beyond]
            raise ExtremeScaleError(less)
        return product


def refuse_extreme_scales(operator: Operator, size: Tensor) -> None:
    """Raise when the size (B,) of first products is too large, too small or zero for some maps; scaled ones may be zero."""
    if isinstance(operator, ScaledOperator):
        return
    least, most, largest = _RANGE[operator.dtype]
    size = size.nan_to_num(torch.inf, posinf=torch.inf)
    exponent = (-size.log2().round()).clamp(-largest, largest).masked_fill((size > least) & (size < most), 0.0)
    if bool(exponent.any()):
        raise ExtremeScaleError(exponent)


def at_any_scale(operator: Operator, solve: Callable[[Operator], SolverOutput]) -> SolverOutput:
    """What ``solve`` says of the maps, by way of scaled ones where it refuses their scale."""
    if operator.dtype not in _RANGE:
        raise ValueError(f"products must be in float32 or float64, got {operator.dtype}: other types have too few digits")
    maps, found = operator, None
    while found is None:
        try:
            found = solve(maps)
        except ExtremeScaleError as error:
            maps = ScaledOperator(operator, error.exponent)
    if isinstance(maps, ScaledOperator):
        for values in (found.estimate, found.upper, found.residual, found.singular_values.T):
            values *= torch.exp2(-maps.exponent)
        if not bool(torch.isfinite(found.upper).all()):
            raise FloatingPointError("σ is beyond the largest number of float64: rescale the map")
    return found
