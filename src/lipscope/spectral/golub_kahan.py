"""The Golub–Kahan–Lanczos solver: its options, how a batch is divided to fit into memory, and several values by deflation.

The iteration itself, and why its interval holds, is in ``spectral.bidiagonalisation``.

**Several values.** One start vector sees one copy of a repeated singular value, and hardly more of values that lie close
together. With V and U the right and left singular vectors found so far, the largest singular value of (I − UUᵀ)J(I − VVᵀ) is
the next one of J, copies included. When it does not exceed the least of the k values in hand, these are the k leading ones.

Both sides are projected: with vectors that are off by ε, J(I − VVᵀ) alone keeps ε·σ₁ of what was removed, and both keep
ε²·σ₁. Where U spans the image of V, what is missing has the rank of U, so that the next value is never underestimated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipscope.doors import at_least
from lipscope.spectral.basis import (
    as_integers,
    check_delta,
    pairs_within,
    random_direction,
    scaled_norm,
    together_within,
    unit_rows,
)
from lipscope.spectral.bidiagonalisation import Bidiagonalisation
from lipscope.spectral.operator import DerivedOperator, Operator
from lipscope.spectral.result import SolverOutput, Status
from lipscope.spectral.ritz import svd
from lipscope.spectral.scale import at_any_scale


@dataclass(frozen=True)
class GolubKahan:
    """Golub–Kahan–Lanczos, re-orthogonalised as far as ``memory`` reaches; every batch item stops on its own.

    An item has converged when the estimated relative error of its ``k`` leading Ritz values is below ``rtol``, no larger
    value is further away than that (except with probability 1e-3), and its interval is no wider than ``interval``. The
    error estimate is min(r, r²/2gap)/θ with the residual r = ‖Jᵀu − θv‖ and the gap to the next Ritz value; it is
    relative, so c·f stops where f does. ``lower`` and ``upper`` are valid at every step.

    Attributes:
        rtol: requested relative accuracy of the estimate.
        max_steps: most operator pairs (J, Jᵀ) of one solve of one item. With k > 1 there are several, and vectors of bases
            that were cut take further pairs; ``iterations`` counts all.
        delta: allowed probability that ``upper`` fails.
        k: number of leading singular triplets. Repeated values count as often as they occur: with k > 1 a further solve
            of the deflated operator looks for copies that one start vector cannot see. Values below the rounding of the
            products are noise. The interval is that of the largest; the others come with the error estimate alone.
        vectors: also return singular vectors.
        interval: widest relative interval upper/lower − 1 to stop with. It also guards against a start that happens to be
            almost orthogonal to the top singular vector, which a residual cannot see. None switches the guard off: the
            error estimate alone decides, and the status says ``estimated``.
        seed: seed of the start vector; the same for every item, so results do not depend on how inputs are batched (but
            for rounding).
        memory: bytes for Krylov bases; singular vectors that are found come on top. A batch whose first 32 vectors of both
            sides need more is solved in turns. A problem whose bases grow beyond it keeps what fits, its singular vectors
            come from short recurrences, and several values (k > 1) one by one.
    """

    rtol: float = 1e-4
    max_steps: int = 300
    delta: float = 1e-6
    k: int = 1
    vectors: bool = False
    interval: float | None = 0.1
    seed: int = 0
    memory: int = 1 << 30

    def __post_init__(self) -> None:
        as_integers(self, "max_steps", "k", "seed", "memory")
        if not 0 < self.rtol < 1:
            raise ValueError(f"rtol must lie strictly between 0 and 1, got {self.rtol}")
        check_delta(self.delta)
        if self.interval is not None and not self.interval > 0:
            raise ValueError(f"interval must be positive or None, got {self.interval}")
        at_least(1, k=self.k)
        if self.memory < 1:
            raise ValueError(f"memory must be at least 1 byte, got {self.memory}")
        if self.max_steps < self.k:
            raise ValueError(f"max_steps must be at least 1 and at least k = {self.k}, got {self.max_steps}")

    def solve(self, operator: Operator, start: Tensor | None = None) -> SolverOutput:
        """Leading singular values of every item of ``operator``.

        Args:
            operator: the maps.
            start: directions (B, N) believed close to the top right singular vectors, say those of a nearby problem. Use
                another ``seed`` than the one that found them: the upper end needs a random part independent of ``start``.
        """
        M, N = operator.shape
        if self.k > min(M, N):
            raise ValueError(f"k = {self.k} singular values were asked of a {M}×{N} operator")
        if start is not None and start.shape != (operator.batch, N):
            raise ValueError(f"start has shape {tuple(start.shape)}, but the operator needs {(operator.batch, N)}")
        together = together_within((M, N), operator.dtype.itemsize, self.memory)
        if operator.batch <= together:
            return at_any_scale(operator, lambda maps: self._together(maps, start))
        parts = torch.arange(operator.batch, device=operator.device).split(together)
        starts = [None] * len(parts) if start is None else start.split(together)
        return SolverOutput.cat([self.solve(operator.select(part), one) for part, one in zip(parts, starts, strict=True)])

    def _together(self, operator: Operator, start: Tensor | None) -> SolverOutput:
        if self.k == 1:
            return Bidiagonalisation(self, operator, start).solve(first=True)

        def solve(deflated: Operator, number: int) -> SolverOutput:
            return Bidiagonalisation(self._for_one(number), deflated).solve()

        found = leading(operator, self._first(operator, start), self.rtol, solve)
        return found if self.vectors else replace(found, right=None, left=None)

    def _for_one(self, number: int) -> GolubKahan:
        """The options for one value and its vectors, with a start that does not depend on what was found before."""
        return replace(self, vectors=True, k=1, seed=self.seed + (self.max_steps + 1) * (number + 1))

    def _first(self, operator: Operator, start: Tensor | None) -> SolverOutput:
        """All values at once where whole bases fit; of the items for which they do not, the largest value alone."""
        fitting = pairs_within(operator.shape, operator.batch, operator.dtype.itemsize, self.memory) - 1
        if fitting >= self.max_steps:
            return Bidiagonalisation(replace(self, vectors=True), operator, start, whole=True).solve(first=True)
        found = SolverOutput.empty(operator, self.k, True, "golub_kahan", self.delta)
        if fitting >= self.k:
            # Which of two upper ends counts depends on the first: each may fail with half of the chance.
            short = replace(self, vectors=True, max_steps=fitting, delta=self.delta / 2)
            found = Bidiagonalisation(short, operator, start, whole=True).solve(first=True)
            start = found.vectors[0][:, 0]
        cut = (~found.stopped).nonzero()[:, 0]
        if cut.numel():
            items = operator if cut.numel() == operator.batch else operator.select(cut)
            alone = replace(self._for_one(0), delta=self.delta if fitting < self.k else self.delta / 2)
            one = Bidiagonalisation(alone, items, None if start is None else start[cut])
            found.restart(cut, one.solve(first=fitting < self.k))
        return replace(found, delta=self.delta)


# Length that must remain of a unit vector, without its components along earlier ones, to count as a new direction.
_NEW_DIRECTION = 0.5
# Start of the random directions that stand for vectors of the value zero.
_SEED = 0
# Solves a deflated operator for its largest value, with a start vector of this number.
Solve = Callable[[Operator, int], SolverOutput]


class DeflatedOperator(DerivedOperator):
    """The map (I − UUᵀ)J(I − VVᵀ) for V = ``right`` (B, m, N) and U = ``left`` (B, m, M), orthonormal rows or zero.

    Gains up to ``floor`` ``(B,)`` are what rounding leaves of the directions that were projected out, and count as zero.
    """

    def __init__(self, base: Operator, right: Tensor, left: Tensor, floor: Tensor) -> None:
        super().__init__(base)
        self.right, self.left, self._floor = right, left, floor

    def matvec(self, u: Tensor) -> Tensor:
        return self._above(without(self.base.matvec(without(u, self.right)), self.left), u)

    def rmatvec(self, g: Tensor) -> Tensor:
        return self._above(without(self.base.rmatvec(without(g, self.left)), self.right), g)

    def select(self, items: Tensor) -> DeflatedOperator:
        return DeflatedOperator(self.base.select(items), self.right[items], self.left[items], self._floor[items])

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
    Relative differences of values up to half of ``rtol`` do not count.
    """
    values, (right, left) = found.singular_values, found.vectors
    k = values.shape[1]
    orthonormalise(right)
    orthonormalise(left)
    pending = torch.arange(operator.batch, device=operator.device)
    rest = torch.zeros_like(found.estimate)
    # Every attempt but the last finds a value that counts, or completes the list; rounding may bring a few more.
    for attempt in range(1, 2 * k + 4):
        # Where there are as many values as dimensions nothing is left. Zeros do not count: of a wide map they may belong to
        # directions that it ignores, with others left that it does not.
        positive = values > operator.rounding_errors[:, None] * values.amax(1, keepdim=True)
        pending = pending[positive.sum(1)[pending] < min(operator.shape)]
        if not pending.numel():
            break
        if attempt == 2 * k + 3:
            found.doubt(pending, [Status.MAX_STEPS] * pending.numel())
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
        found.doubt(pending, further.status)
        counts = further.estimate > (1 + rtol / 2) * least + deflated.rounding_errors * largest
        rest[pending] = further.estimate.masked_fill(counts, 0.0)
        # In the place of the least value, which needs no deflation: nothing below the new least counts.
        next_right, next_left = map(
            _new_direction, (vectors[:, 0] for vectors in further.vectors), (deflated.right, deflated.left)
        )
        pending, slot = pending[counts], slot[counts]
        values[pending, slot] = further.estimate[counts]
        right[pending, slot], left[pending, slot] = next_right[counts], next_left[counts]
        del deflated, further, next_right, next_left  # before the next solve needs the room
    return _rotated(operator, found, rest, rtol)


def _rotated(operator: Operator, found: SolverOutput, rest: Tensor, rtol: float) -> SolverOutput:
    """The singular triplets of J on the space of the right vectors: those of values close together were found mixed.

    With R = Jᵀu − θv for each of them, J is [[Θ, R], [0, D]] in bases that begin with the left and right vectors, and ‖D‖ is
    at most the largest value of the ``rest`` (B,). The values of J differ from those of Θ and D by at most ‖R‖, and where θ
    exceeds ‖D‖ by a gap, by about ‖R‖²/2gap: where that is more than ``rtol`` they are estimates.
    """
    right, left = found.vectors
    complete(right, _SEED)
    for j, v in enumerate(right.unbind(1)):
        left[:, j] = operator.matvec(v)
    turned, values, turns = svd(left.mT.double())
    left[:] = turned.mT.to(left.dtype)
    right[:] = turns.to(right.dtype) @ right
    del turned  # before the products need the room
    pairs = zip(left.unbind(1), right.unbind(1), values.to(right.dtype).unbind(1), strict=True)
    residuals = torch.stack(
        [scaled_norm(torch.addcmul(operator.rmatvec(u), theta[:, None], v, value=-1)) for u, v, theta in pairs], 1
    )
    r, gap = scaled_norm(residuals)[:, None], (values - (1 + rtol) * rest[:, None]).clamp_min(0)
    error = torch.minimum(r, r * (r / (2 * gap).clamp_min(torch.finfo(torch.float64).tiny)))
    shown = (error <= rtol * values + 4 * operator.rounding_errors[:, None] * values[:, :1]).all(1)
    everyone = torch.arange(operator.batch, device=operator.device)
    found.doubt(everyone, [Status.EXACT if ok else Status.ESTIMATED for ok in shown.tolist()])
    found.record_energy(everyone, operator.token_energy(right[:, 0]))
    found.iterations += values.shape[1]
    estimate = torch.maximum(found.estimate, values[:, 0])
    upper = torch.maximum(found.upper, estimate)
    return replace(found, estimate=estimate, upper=upper, singular_values=values, residual=residuals[:, 0])
