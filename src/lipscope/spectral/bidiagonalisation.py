"""Golub–Kahan–Lanczos bidiagonalisation, batched, with a two-sided interval for the largest singular value.

After k steps from a unit vector v₁ drawn uniformly on the sphere, J V_k = U_k B_k with B_k upper bidiagonal (diagonal α,
superdiagonal β) and Jᵀ U_k = V_k B_kᵀ + β_k v_{k+1} e_kᵀ. The largest singular value θ₁ of B_k is a **lower** bound for σ.

**Upper bound** (after Hochstenbach, J. Sci. Comput. 57, 2013): v_{k+1} = q_k(JᵀJ) v₁ has norm one, with
q_k(t) = ∏ᵢ(t − θᵢ²) / ∏ⱼ αⱼβⱼ, so γ·q_k(σ²) ≤ 1 where γ = |⟨v₁, top right singular vector⟩|. Except with probability δ,
γ ≥ g(δ), and then σ² is at most the root t > θ₁² of q_k(t) = 1/g(δ), at every step at once. The same bound with a chance of
``OVERSIGHT`` says when no larger value is further away than ``rtol``.

Where the Krylov space is exhausted the iteration goes on from fresh random vectors; a direction w that is given is mixed
with the random one, v₁ ∝ w + r. ``docs/theory/solver.md`` has the statements and their proofs.

**One side.** Large problems keep the right basis only. Left vectors that are not kept orthogonal lose it by a factor β/α per
step, without limit where values cluster above a null space, so there are none: JᵀJ V = V T + v_{k+1} b_k e_kᵀ with T
tridiagonal from the gains ‖J vⱼ‖. T knows JᵀJ up to the rounding of the products, which is all that the largest value needs.
If the remainder is pure rounding error the recurrence continues with it; it cannot tell that error from a perturbation of J.

**Memory.** Of the right basis no more vectors are kept than ``memory`` allows; from there on the recurrence runs without
re-orthogonalisation. Ghost copies of converged values then appear, but, up to rounding, no value beyond σ (Paige 1980). The
top vector is found afterwards, by short recurrences in the memory of the bases.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipscope.spectral.basis import Basis, capacities, log_overlap, pairs_within, random_direction, scaled_norm, unit_rows
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SolverOutput, Status
from lipscope.spectral.ritz import RitzPairs, polynomial_upper_bound
from lipscope.spectral.scale import refuse_extreme_scales

if TYPE_CHECKING:
    from lipscope.spectral.golub_kahan import GolubKahan


class Bidiagonalisation:
    """One batched bidiagonalisation: the growing bases, and the items that have not converged yet.

    Args:
        start: directions (B, N) to start from, mixed with a random one.
        whole: keep every vector of both sides. The caller has seen to it that ``max_steps`` of them fit.
        pure: start from unit vectors ``start`` alone, so that the upper bound is none, and keep every right vector.
    """

    def __init__(
        self,
        config: GolubKahan,
        operator: Operator,
        start: Tensor | None = None,
        *,
        whole: bool = False,
        pure: bool = False,
    ) -> None:
        self.config, self.pure = config, pure
        self.problem = operator
        # Shrinks to the items that have not converged.
        self.operator = operator
        M, N = operator.shape
        self.steps = min(config.max_steps, N)
        self.active = torch.arange(operator.batch, device=operator.device)
        first, self.mixing = self._start(start, pure)
        # With k > 1 ghost copies of converged values (lost orthogonality) would be counted as new singular values, so both
        # bases must be kept in full.
        assert whole or pure or config.k == 1
        left, right = self.steps if whole else 0, self.steps + 1
        if not (whole or pure):
            left, right = capacities((M, N), operator.batch, operator.dtype.itemsize, config.memory)
        self.V = Basis(operator.batch, N, first, right)
        self.U = Basis(operator.batch, M, first, left) if left else None
        self.V.append(first)
        # v_{j−1} beside V.last = v_j.
        self.before = torch.zeros_like(self.V.last)
        # Entries of the small matrix in float64 whatever the operator's dtype: the small problem is never the weak link.
        self.alpha = first.new_zeros(operator.batch, self.steps, dtype=torch.float64)
        self.beta = torch.zeros_like(self.alpha)
        # The step at which the recurrence of each item was last restarted, and how often it was.
        self.fresh = torch.zeros(operator.batch, dtype=torch.int64, device=operator.device)
        self.restarts = torch.zeros_like(self.fresh)
        # The bounds when a recurrence last ended, with the chances delta and OVERSIGHT to fail.
        self.known = self.alpha.new_full((operator.batch, 2), torch.inf)
        self.output = SolverOutput.empty(operator, config.k, config.vectors, "golub_kahan", config.delta)
        # Items whose basis was cut, and their top vectors over the part that was kept.
        self.unfinished: list[tuple[Tensor, Tensor]] = []

    @property
    def one_sided(self) -> bool:
        """Whether there are right vectors only."""
        return self.U is None

    def _start(self, given: Tensor | None, pure: bool) -> tuple[Tensor, Tensor]:
        """Unit start vectors (B, N), and by how much mixing shortened their random part."""
        B, N = self.operator.batch, self.operator.shape[1]
        if given is not None and pure:
            return given, torch.ones(B, dtype=torch.float64, device=given.device)
        random = random_direction(N, self.config.seed, self.operator).expand(B, N)
        if given is None or N < _FEW_INPUTS:
            return random, torch.ones(B, dtype=torch.float64, device=random.device)
        given = given.to(random)
        mixed = unit_rows(given, scaled_norm(given)) + random
        norm = scaled_norm(mixed)
        # Opposite directions, in so many dimensions an event of probability below 1e-45.
        nothing = norm < 1e-3
        norm = norm.masked_fill(nothing, 1.0)
        return torch.where(nothing[:, None], random, unit_rows(mixed, norm)), 1 / norm

    def solve(self, *, first: bool = False) -> SolverOutput:
        """Leading singular values of every item; on a ``first`` look at these maps their scale may turn out extreme."""
        for step in range(1, self.steps + 1):
            self._extend(step)
            if first and step == 1:
                refuse_extreme_scales(self.operator, self.alpha[:, 0])
            # Small SVDs of many items cost as much as the products, and those of many steps more.
            often = max(1 if step >= 12 else 2, step // 32)
            due = step in (self.steps, self.operator.shape[0] + 1) or step % often == 0
            if step >= self.config.k and (due or bool((self.fresh == step).any())):
                self._retire_converged(step)
                if self.active.numel() == 0:
                    break
        if self.unfinished and (self.config.vectors or self.output.token_energy is not None):
            self._finish()
        return self.output

    def _extend(self, step: int) -> None:
        """One operator pair: the next entries of the small matrix, and v_{step+1}."""
        j = step - 1
        v, norm = self._one_sided_pair(j) if self.U is None else self._two_sided_pair(j, self.U)
        self.beta[:, j] = norm
        v = unit_rows(v, norm)
        exhausted = norm == 0
        if bool(exhausted.any()):
            v = torch.where(exhausted[:, None], self._fresh_direction(step), v)
            self.fresh = torch.where(exhausted, step, self.fresh)
            self.restarts = self.restarts + exhausted.long()
        self.before = self.V.last
        self.V.append(v)

    def _two_sided_pair(self, j: int, U: Basis) -> tuple[Tensor, Tensor]:
        """First α_j u_j = J v_j − β_{j−1} u_{j−1}, then Jᵀu_j − α_j v_j with its length; orthogonal to all before."""
        u = self.operator.matvec(self.V.last)
        if j > 0:
            u = torch.addcmul(u, self.beta[:, j - 1, None].to(u.dtype), U.last, value=-1)
        u, norm = U.orthogonalise(u)
        self.alpha[:, j] = norm = norm.masked_fill(norm <= self._negligible(), 0.0)
        U.append(unit_rows(u, norm))
        v = self.operator.rmatvec(U.last)
        v, norm = self.V.orthogonalise(torch.addcmul(v, self.alpha[:, j, None].to(v.dtype), self.V.last, value=-1))
        return v, norm.masked_fill(norm <= self._negligible(), 0.0)

    def _one_sided_pair(self, j: int) -> tuple[Tensor, Tensor]:
        """First α_j = ‖J v_j‖, then (JᵀJ v_j − α_j² v_j − α_{j−1}β_{j−1} v_{j−1}) / α_j with its length, orthogonal to V."""
        u = self.operator.matvec(self.V.last)
        self.alpha[:, j] = gain = scaled_norm(u)
        v = self.operator.rmatvec(unit_rows(u, gain))
        v = torch.addcmul(v, gain[:, None].to(v.dtype), self.V.last, value=-1)
        if j > 0:
            # β_{j−1} ≤ α_j but for rounding, which must not be divided by a gain that is less.
            share = (self.beta[:, j - 1] / gain.masked_fill(gain == 0, torch.inf)).clamp_max(1.0)
            coupling = self.alpha[:, j - 1] * share
            v = torch.addcmul(v, coupling[:, None].to(v.dtype), self.before, value=-1)
        v, norm = self.V.orthogonalise(v)
        if not self.V.complete:
            # A direction that is rounding error would not be orthogonal to the vectors that were discarded.
            largest = self._largest().clamp_min(torch.finfo(torch.float64).tiny)
            norm = norm.masked_fill((gain / largest) * norm <= self._negligible(), 0.0)
        return v, norm

    def _largest(self) -> Tensor:
        return torch.maximum(self.alpha.amax(1), self.beta.amax(1))

    def _negligible(self) -> Tensor:
        """Norms up to this level are rounding errors of the recurrence; in a bound they count as this much."""
        level, largest = 8 * torch.finfo(self.operator.dtype).eps, self._largest()
        cut = self.one_sided and not self.V.complete
        return self.operator.rounding_errors.clamp_min(level) * largest if cut else level * largest

    def _fresh_direction(self, step: int) -> Tensor:
        """A random direction orthogonal to the basis so far; zero when the basis spans the space."""
        N, fresh = self.operator.shape[1], torch.zeros_like(self.V.last)
        # What is left of a draw may be too short to be told from rounding; its length says nothing of its direction.
        for draw in range(4):
            seed = self.config.seed + (step + draw * 0x9E3779B1) % (1 << 32)
            x = random_direction(N, seed, self.operator).expand(self.operator.batch, -1)
            x = self.V.remove(self.V.remove(x))
            norm = scaled_norm(x)
            x = unit_rows(x, norm.masked_fill(norm <= 1e-3 / N**0.5, 0.0))
            fresh = torch.where(fresh.any(1, keepdim=True), fresh, x)
            if step >= N or bool(fresh.any(1).all()):
                break
        return fresh

    def _retire_converged(self, step: int) -> None:
        if not bool(torch.isfinite(self.alpha + self.beta).all()):
            raise FloatingPointError(_NON_FINITE)
        ritz = RitzPairs(self.alpha[:, :step], self.beta[:, :step], self.config.k, one_sided=self.one_sided)
        rounding, asked = self.operator.rounding_errors, self.config.interval
        settled = ritz.relative_error(rounding) <= self.config.rtol
        shown, ended = self._exhaustive(step), self.fresh == step
        bounds = torch.full_like(self.known, torch.inf)
        rows = (settled | ended | (step == self.steps)).nonzero()[:, 0]
        if rows.numel():
            bounds[rows] = self._upper(ritz, rows, step)
            self.known = torch.where(ended[:, None], bounds, self.known)
            # Nothing narrower than the rounding of the products can be had.
            widths = torch.maximum(4 * rounding[:, None], bounds.new_tensor([asked or torch.inf, self.config.rtol]))
            shown |= settled & (bounds <= (1 + widths) * ritz.values[:, :1]).all(1)
        # Without a guard the estimate alone decides; many starts that find nothing new tell all that rounding lets be told.
        stopped = shown | settled & ((self.restarts >= _MOST_STARTS) | (asked is None))
        recorded = self.output.iterations[self.active] > 0
        leaving = torch.ones_like(stopped) if step == self.steps else stopped
        leaves = (leaving & ~recorded).nonzero()[:, 0]
        self._record(step, ritz, leaves, bounds[leaves, 0], stopped.long() + shown.long())

        staying = (~(leaving | recorded)).nonzero()[:, 0]
        # Copying bases costs about one product: compact only when it saves a quarter of the work.
        if staying.numel() <= 0.75 * self.active.numel():
            self._keep(staying)

    def _exhaustive(self, step: int) -> Tensor:
        """Whether the bases span all that matters, which they do only while every vector is kept.

        That is all inputs, or all outputs after M + 1 steps of one recurrence, whose v_{M+1} is still a new direction.
        """
        M, N = self.operator.shape
        outputs = (self.restarts == 0) | ((self.restarts == 1) & (self.fresh == step))
        if self.U is None or step <= M:
            outputs = torch.zeros_like(outputs)
        return (outputs | (step == N)) & self.V.complete

    def _upper(self, ritz: RitzPairs, rows: Tensor, step: int) -> Tensor:
        """The least upper bounds known for the listed rows after ``step`` steps, with the chances delta and OVERSIGHT."""
        values, N = ritz.values[rows], self.operator.shape[1]
        # A start without a step says nothing.
        starts = (self.restarts[rows] + (self.fresh[rows] < step)).tolist()
        bounds = [
            polynomial_upper_bound(
                values,
                self.alpha[rows, :step],
                self.beta[rows, :step],
                log_overlap=values.new_tensor([log_overlap(N, chance, R) for R in starts]) + self.mixing[rows].log(),
                floor=self._negligible()[rows],
                one_sided=self.one_sided,
            )
            for chance in (self.config.delta, OVERSIGHT)
        ]
        bound = torch.minimum(self.known[rows], torch.stack(bounds, 1)).maximum(values[:, :1])
        return torch.where(self._exhaustive(step)[rows, None], values[:, :1], bound)

    def _record(self, step: int, ritz: RitzPairs, rows: Tensor, upper: Tensor, grade: Tensor) -> None:
        """Write the results of the rows that stop now, with the status of their grade; they are never touched again."""
        if rows.numel() == 0:
            return
        items = self.active[rows]
        out, k = self.output, self.config.k
        values = ritz.values[rows]
        out.estimate[items] = values[:, 0]
        out.upper[items] = upper
        out.singular_values[items] = values[:, :k]
        out.iterations[items] = step
        out.residual[items] = ritz.residual[rows, 0]
        for item, number in zip(items.tolist(), grade[rows].tolist(), strict=True):
            out.status[item] = (Status.MAX_STEPS, Status.ESTIMATED, Status.CONVERGED)[number]

        wanted = k if self.config.vectors else 1
        right = self.V.combine(rows, ritz.right[rows, :, :wanted])
        if not self.V.complete:
            self.unfinished.append((items, right))
            return
        out.record_energy(items, self.operator.token_energy(right[:, 0]))
        if self.config.vectors:
            out.record_vectors(items, right, None if self.pure else self._left(rows, ritz, right))

    def _left(self, rows: Tensor, ritz: RitzPairs, right: Tensor) -> Tensor:
        """Left vectors of the listed rows: from their basis, or as images of the right ones where it was not kept."""
        if self.U is not None and self.U.complete:
            assert ritz.left is not None
            return self.U.combine(rows, ritz.left[rows, :, : right.shape[1]])
        # One product of all items: a selection of some would copy what the operator holds.
        everyone = right.new_zeros(self.operator.batch, right.shape[2])
        everyone[rows] = right[:, 0]
        return _unit_image(self.operator, everyone)[rows]

    def _finish(self) -> None:
        """The top vectors of items whose basis was cut: short recurrences, each from the best vector so far.

        They start when all items have stopped, in the memory that the bases leave.
        """
        for basis in (self.U, self.V):
            if basis is not None:
                basis.release()
        self.before = self.V.last  # no view of what was released
        items, right = (torch.cat(parts) for parts in zip(*self.unfinished, strict=True))
        items, order = items.sort()
        right, self.unfinished = right[order], []
        operator = self.operator = self.problem if items.numel() == self.problem.batch else self.problem.select(items)
        fitting = pairs_within((0, operator.shape[1]), operator.batch, operator.dtype.itemsize, self.config.memory)
        # Vectors that are handed out need a residual below rtol: few steps see too little of the spectrum for the gap, by
        # which the error of a value is judged. They are looked for longer, and the result says when that was not enough.
        rtol = self.config.rtol**2 / 2 if self.config.vectors else self.config.rtol
        short = replace(self.config, k=1, vectors=True, interval=None, max_steps=max(2, fitting - 1), rtol=rtol)
        rounds = self.config.max_steps // short.max_steps if self.config.vectors else 0
        close = operator.rounding_errors.clamp_min(self.config.rtol)
        for number in range(max(_MOST_RECURRENCES, rounds)):
            found = Bidiagonalisation(short, operator, right[:, 0], pure=True).solve()
            right = found.vectors[0]
            better = torch.maximum(self.output.estimate[items], found.estimate)
            self.output.estimate[items] = better
            self.output.upper[items] = torch.maximum(self.output.upper[items], better)
            self.output.singular_values[items, 0] = better
            self.output.iterations[items] += found.iterations
            self.output.residual[items] = found.residual + (better - found.estimate)  # of this pair with that value
            below = found.estimate < (1 - close) * better
            converged = found.stopped & ~below
            # What was kept of the basis may hold nothing of the top vector, and then leads to another one.
            lost = below & (found.residual <= close * better)
            del found  # and its vectors, before the next recurrence
            if bool(converged.all()):
                break
            if bool(lost.any()):
                right[lost] = random_direction(operator.shape[1], self.config.seed + self.steps + number, operator)
        self.output.record_energy(items, operator.token_energy(right[:, 0]))
        if self.config.vectors:
            self.output.doubt(items, [Status.EXACT if ok else Status.MAX_STEPS for ok in converged.tolist()])
            self.output.record_vectors(items, right, _unit_image(operator, right[:, 0]))

    def _keep(self, rows: Tensor) -> None:
        self.active = self.active[rows]
        if rows.numel() == 0:
            return
        self.operator = self.operator.select(rows)
        self.alpha, self.beta = self.alpha[rows], self.beta[rows]
        self.fresh, self.restarts, self.known = self.fresh[rows], self.restarts[rows], self.known[rows]
        self.mixing, self.before = self.mixing[rows], self.before[rows]
        for basis in (self.U, self.V):
            if basis is not None:
                basis.keep(rows)


def _unit_image(operator: Operator, right: Tensor) -> Tensor:
    """The image J·v over its length, as left vectors (B, 1, M) of the right vectors v (B, N)."""
    image = operator.matvec(right)
    return unit_rows(image, scaled_norm(image))[:, None]


# Below this many inputs the space is soon exhausted, and a warm start saves nothing.
_FEW_INPUTS = 16
# Chance, over the random start, that a value which is called converged is further than rtol from σ.
OVERSIGHT = 1e-3
# Most starts in one space that is exhausted again and again.
_MOST_STARTS = 32
# Most short recurrences spent on finding the top vector afterwards.
_MOST_RECURRENCES = 20

_NON_FINITE = (
    "A product with the Jacobian returned NaN or infinity. Most likely the map overflows at this input: check the input and "
    "the weights for extreme values, compute in float64, or rescale."
)
