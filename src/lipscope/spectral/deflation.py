"""Several singular values by deflation: project out the triplets found, and solve again until nothing larger is left.

One start vector sees one copy of a repeated singular value, and hardly more of values that lie close together. With V and
U the right and left singular vectors found so far, the largest singular value of (I − UUᵀ)J(I − VVᵀ) is the next one of J,
copies included. When it does not exceed the least of the k values in hand, these are the k leading ones.

Both sides are projected: with vectors that are off by ε, J(I − VVᵀ) alone keeps ε·σ₁ of what was removed, and both keep
ε²·σ₁. Where U spans the image of V, what is missing has the rank of U, so that the next value is never underestimated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lipscope.spectral.basis import random_direction, scaled_norm, unit_rows
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SolverOutput

# Length that must remain of a unit vector, without its components along earlier ones, to count as a new direction.
_NEW_DIRECTION = 0.5
# Start of the random directions that stand for vectors of the value zero.
_SEED = 0
# Solves a deflated operator for its largest value, with a start vector of this number.
Solve = Callable[[Operator, int], SolverOutput]


class DeflatedOperator(Operator):
    """The map (I − UUᵀ)J(I − VVᵀ) for V = ``right`` (B, m, N) and U = ``left`` (B, m, M), orthonormal rows or zero.

    Gains up to ``floor`` ``(B,)`` are what rounding leaves of the directions that were projected out, and count as zero.
    """

    def __init__(self, operator: Operator, right: Tensor, left: Tensor, floor: Tensor) -> None:
        self._operator, self.right, self.left, self._floor = operator, right, left, floor
        self.batch, self.dtype, self.device = operator.batch, operator.dtype, operator.device
        self.input_shape, self.output_shape = operator.input_shape, operator.output_shape

    @property
    def rounding_error(self) -> float:
        """That of the whole operator."""
        return self._operator.rounding_error

    def matvec(self, u: Tensor) -> Tensor:
        """The deflated J·u."""
        return self._above(without(self._operator.matvec(without(u, self.right)), self.left), u)

    def rmatvec(self, g: Tensor) -> Tensor:
        """The deflated Jᵀ·g."""
        return self._above(without(self._operator.rmatvec(without(g, self.left)), self.right), g)

    def select(self, items: Tensor) -> DeflatedOperator:
        """Keep the listed items."""
        return DeflatedOperator(self._operator.select(items), self.right[items], self.left[items], self._floor[items])

    def _above(self, product: Tensor, x: Tensor) -> Tensor:
        noise = scaled_norm(product) <= self._floor * scaled_norm(x)
        return product.masked_fill(noise[:, None], 0.0) if bool(noise.any()) else product


def without(x: Tensor, directions: Tensor) -> Tensor:
    """Rows x (B, N) minus their components along orthonormal directions (B, m, N)."""
    row = x.unsqueeze(1)
    return torch.baddbmm(row, torch.bmm(row, directions.mT), directions, alpha=-1).squeeze(1)


def orthonormalise(rows: Tensor) -> None:
    """Make rows (B, m, N) orthonormal, one after the other and in place; those that earlier ones span become zero.

    The vectors of vanishing singular values may be anything, and a projection must not remove a direction twice.
    """
    for j in range(rows.shape[1]):
        rows[:, j] = _new_direction(rows[:, j], rows[:, :j])


def complete(rows: Tensor, seed: int) -> None:
    """Put random directions orthogonal to all others in the place of zero rows of (B, m, N), m ≤ N.

    Where the rows that are there span all that a map does not send to zero, these are singular vectors of the value zero.
    """
    for j in range(rows.shape[1]):
        empty = ~rows[:, j].any(-1)
        if bool(empty.any()):
            x = random_direction(rows.shape[2], seed + j, rows).expand_as(rows[:, j])
            # However little of it is left, the second pass makes it as orthogonal as the first would have made a long one.
            for _ in range(2):
                x = without(x, rows)
                x = unit_rows(x, scaled_norm(x))
            rows[:, j] = torch.where(empty[:, None], x, rows[:, j])


def _new_direction(x: Tensor, directions: Tensor) -> Tensor:
    """The unit direction in which x (B, N) leaves orthonormal directions (B, m, N); zero where they span it."""
    row = without(without(x, directions), directions)
    norm = scaled_norm(row)
    return unit_rows(row, norm.masked_fill(norm <= _NEW_DIRECTION, 0.0))


def leading(operator: Operator, found: SolverOutput, rtol: float, solve: Solve) -> SolverOutput:
    """The k leading singular triplets, from those that a first solve has found and the solver for a deflated operator.

    ``found`` holds k triplets of every item, those that are not known yet with the value −∞ and zero vectors; it is used up.
    Relative differences of values up to ``rtol`` do not count.
    """
    values, (right, left) = found.singular_values, found.vectors
    k = values.shape[1]
    orthonormalise(right)
    orthonormalise(left)
    pending = torch.arange(operator.batch, device=operator.device)
    # Every attempt but the last finds a value that counts, or completes the list; rounding may bring a few more.
    for attempt in range(1, 2 * k + 4):
        # Where there are as many values as dimensions nothing is left. Zeros do not count: of a wide map they may belong to
        # directions that it ignores, with others left that it does not.
        positive = values > operator.rounding_error * values.amax(1, keepdim=True)
        pending = pending[positive.sum(1)[pending] < min(operator.shape)]
        if not pending.numel():
            break
        if attempt == 2 * k + 3:
            found.doubt(pending, torch.zeros_like(pending, dtype=torch.bool))
            break
        everyone = pending.numel() == operator.batch
        largest, (least, slot) = values[pending].amax(1), values[pending].min(1)
        deflated = DeflatedOperator(
            operator if everyone else operator.select(pending),
            right if everyone else right[pending],
            left if everyone else left[pending],
            4 * torch.finfo(operator.dtype).eps * largest,
        )
        further = solve(deflated, attempt)
        found.iterations[pending] += further.iterations
        found.doubt(pending, further.converged)
        counts = further.estimate > (1 + rtol) * least + operator.rounding_error * largest
        # In the place of the least value, which needs no deflation: nothing below the new least counts.
        next_right, next_left = map(
            _new_direction, (vectors[:, 0] for vectors in further.vectors), (deflated.right, deflated.left)
        )
        pending, slot = pending[counts], slot[counts]
        values[pending, slot] = further.estimate[counts]
        right[pending, slot], left[pending, slot] = next_right[counts], next_left[counts]
        del deflated, further, next_right, next_left  # before the next solve needs the room
    return _in_order(operator, found)


def _in_order(operator: Operator, found: SolverOutput) -> SolverOutput:
    """The triplets of every item with falling values, and what the result says of the first of them."""
    values, order = found.singular_values.sort(dim=1, descending=True, stable=True)
    for vectors in found.vectors:
        vectors[:] = vectors.gather(1, order[:, :, None].expand_as(vectors))
        complete(vectors, _SEED)
    everyone = torch.arange(operator.batch, device=operator.device)
    found.record_energy(everyone, operator.token_energy(found.vectors[0][:, 0]))
    estimate = torch.maximum(found.estimate, values[:, 0])
    return replace(found, estimate=estimate, upper=torch.maximum(found.upper, estimate), singular_values=values)
