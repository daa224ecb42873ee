"""Several singular values: what was found is taken out, and the rest is asked again until it has nothing larger.

One start vector sees one copy of a repeated singular value, and values that lie close together nearly so. With V the right
singular vectors found so far, the largest singular value of J(I − VVᵀ) is the next one of J, copies included (Courant and
Fischer; with vectors that are off by ε it is off by O(ε²)). When it does not exceed the least of the k values in hand, these
are the k leading ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lipscope.spectral.basis import scaled_norm, unit_rows
from lipscope.spectral.operator import Operator
from lipscope.spectral.output import SolverOutput

# Length that a unit vector must have left beside those found before to count as a new direction.
_NEWS = 0.5
# How a rest is solved for its largest value, with a start vector of this number.
Solve = Callable[[Operator, int], SolverOutput]


class Rest(Operator):
    """J restricted to what is orthogonal to given directions ``(B, m, N)``, orthonormal rows for every item.

    Gains up to ``floor`` ``(B,)`` are what rounding leaves of the directions that were taken out, and count as zero.
    """

    def __init__(self, operator: Operator, directions: Tensor, floor: Tensor) -> None:
        self._operator, self._directions, self._floor = operator, directions, floor
        self.batch, self.dtype, self.device = operator.batch, operator.dtype, operator.device
        self.input_shape, self.output_shape = operator.input_shape, operator.output_shape

    @property
    def rounding(self) -> float:
        """That of the whole operator."""
        return self._operator.rounding

    def matvec(self, u: Tensor) -> Tensor:
        """J·u for the part of u that is left."""
        return self._above(self._operator.matvec(without(u, self._directions)), u)

    def rmatvec(self, g: Tensor) -> Tensor:
        """What is left of Jᵀ·g."""
        return self._above(without(self._operator.rmatvec(g), self._directions), g)

    def select(self, items: Tensor) -> Rest:
        """Keep the listed items."""
        return Rest(self._operator.select(items), self._directions[items], self._floor[items])

    def _above(self, product: Tensor, x: Tensor) -> Tensor:
        noise = scaled_norm(product) <= self._floor * scaled_norm(x)
        return product.masked_fill(noise[:, None], 0.0)


def without(x: Tensor, directions: Tensor) -> Tensor:
    """Rows x (B, N) minus their components along orthonormal directions (B, m, N)."""
    row = x.unsqueeze(1)
    return torch.baddbmm(row, torch.bmm(row, directions.mT), directions, alpha=-1).squeeze(1)


def orthonormal(rows: Tensor) -> Tensor:
    """Rows (B, m, N) made orthonormal one after the other; those that earlier ones span become zero.

    The vectors of vanishing singular values may be anything, and a projection must not take a direction out twice.
    """
    result = torch.zeros_like(rows)
    for j in range(rows.shape[1]):
        result[:, j] = _news(rows[:, j], result[:, :j])
    return result


def _news(x: Tensor, directions: Tensor) -> Tensor:
    """The unit direction in which x (B, N) leaves orthonormal directions (B, m, N); zero where they span it."""
    row = without(without(x, directions), directions)
    norm = scaled_norm(row)
    return unit_rows(row, norm.masked_fill(norm <= _NEWS, 0.0))


def leading(operator: Operator, found: SolverOutput, k: int, rtol: float, solve: Solve) -> SolverOutput:
    """The k leading singular triplets, from those that a first solve has found.

    Args:
        operator: the maps.
        found: at most k triplets of every item, with their vectors.
        k: how many are wanted.
        rtol: relative differences that do not count.
        solve: the solver for the largest value of what is left.
    """
    assert found.right is not None
    assert found.left is not None
    values, right, left = found.singular_values.clone(), found.right.clone(), found.left.clone()
    pending, taken = torch.arange(operator.batch, device=operator.device), orthonormal(found.right)
    attempt = 0
    # Every attempt but the last finds a value that counts, or completes the list; rounding may bring a few more.
    while pending.numel() and taken.shape[1] < min(operator.shape):
        attempt += 1
        noise = operator.rounding * values[pending].amax(1)
        everyone = pending.numel() == operator.batch
        floor = 4 * torch.finfo(operator.dtype).eps * values[pending].amax(1)
        rest = solve(Rest(operator if everyone else operator.select(pending), taken, floor), attempt)
        assert rest.right is not None
        assert rest.left is not None
        next_right = _news(rest.right[:, 0], taken)[:, None]
        missing = k - values.shape[1]
        larger = rest.estimate > (1 + rtol) * values[pending].amin(1) + noise
        larger |= missing > 0
        found.iterations[pending] += rest.iterations
        found.doubt(pending, rest.converged)
        if missing > 0:
            values = torch.cat([values, rest.estimate[:, None]], 1)
            right, left = torch.cat([right, next_right], 1), torch.cat([left, rest.left], 1)
        else:
            rows = pending[larger]
            values[rows], right[rows], left[rows] = _best(
                torch.cat([values[rows], rest.estimate[larger, None]], 1),
                torch.cat([right[rows], next_right[larger]], 1),
                torch.cat([left[rows], rest.left[larger]], 1),
                k,
            )
        pending, taken = pending[larger], torch.cat([taken[larger], next_right[larger]], 1)
        if attempt > 2 * k + 2:
            found.doubt(pending, torch.zeros_like(larger[larger]))
            break
    values, right, left = _best(values, right, left, k)
    estimate = torch.maximum(found.estimate, values[:, 0])
    return replace(
        found, estimate=estimate, upper=torch.maximum(found.upper, estimate), singular_values=values, right=right, left=left
    )  # fmt: skip


def _best(values: Tensor, right: Tensor, left: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest values of every item in falling order, with their vectors."""
    values, order = values.sort(dim=1, descending=True, stable=True)
    order = order[:, :k, None]
    return (
        values[:, :k],
        right.gather(1, order.expand(-1, -1, right.shape[2])),
        left.gather(1, order.expand(-1, -1, left.shape[2])),
    )
