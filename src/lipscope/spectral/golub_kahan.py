"""Golub–Kahan–Lanczos bidiagonalisation, batched, with a two-sided interval for the largest singular value.

After k steps from a unit vector v₁ drawn uniformly on the sphere, J V_k = U_k B_k with B_k upper bidiagonal (diagonal α,
superdiagonal β) and Jᵀ U_k = V_k B_kᵀ + β_k v_{k+1} e_kᵀ. The largest singular value θ₁ of B_k is a **lower** bound for σ.

**Upper bound** (the idea of Hochstenbach, *Probabilistic upper bounds for the matrix two-norm*, J. Sci. Comput. 57, 2013):
v_{k+1} = q_k(JᵀJ) v₁ has norm one, with q_k(t) = ∏ᵢ(t − θᵢ²) / ∏ⱼ αⱼβⱼ, so γ·q_k(σ²) ≤ 1 where γ = |⟨v₁, top right
singular vector⟩|. Except with probability δ, γ ≥ g(δ), and then σ² is at most the root t > θ₁² of q_k(t) = 1/g(δ). The
failure event does not depend on k, so the bound holds at a stopping time chosen by looking at the iterates.

**Exhaustion.** When β_k vanishes to rounding, the Krylov space is invariant and says nothing more. The iteration goes on
from a fresh random vector orthogonal to it: the rest of the space gets its own recurrence and its own bound, with half of
the failure probability left, and σ is at most the larger of that bound and the values already found.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.spectral.basis import Basis, scaled_norm, unit_rows
from lipscope.spectral.operator import Operator
from lipscope.spectral.output import SolverOutput, Status
from lipscope.spectral.ritz import RitzPairs, polynomial_upper_bound
from lipscope.spectral.start import check_delta, overlap_quantile, random_unit_vector


@dataclass(frozen=True)
class GolubKahan:
    """Golub–Kahan–Lanczos with full re-orthogonalisation; every batch item stops on its own.

    An item stops when the estimated relative error of its ``k`` leading Ritz values is below ``rtol`` and its interval is
    no wider than ``interval``. The error estimate is min(r, r²/2gap)/θ with the residual r = ‖Jᵀu − θv‖ and the gap to
    the next Ritz value; it is relative, so c·f stops where f does. ``lower`` and ``upper`` are valid at every step.

    Attributes:
        rtol: requested relative accuracy of the estimate.
        max_steps: most operator pairs (J, Jᵀ) spent on one item.
        delta: allowed probability that ``upper`` fails.
        k: number of leading singular triplets. A singular value that is repeated may be found once only: one start
            vector sees one copy. ``Dense`` counts copies.
        vectors: also return singular vectors.
        interval: widest relative interval upper/lower − 1 to stop with. It also guards against a start that happens to be
            almost orthogonal to the top singular vector, which a residual cannot see. None switches the guard off.
        seed: seed of the start vector; the same for every item, so results do not depend on how inputs are batched (but
            for rounding).
        memory: bytes that the first 32 vectors of the Krylov bases of one sub-batch may take; larger batches are solved
            in turns.
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
        if not 0 < self.rtol < 1:
            raise ValueError(f"rtol must lie strictly between 0 and 1, got {self.rtol}")
        check_delta(self.delta)
        if self.interval is not None and not self.interval > 0:
            raise ValueError(f"interval must be positive or None, got {self.interval}")
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")
        if self.max_steps < self.k:
            raise ValueError(f"max_steps must be at least 1 and at least k = {self.k}, got {self.max_steps}")

    def solve(self, operator: Operator) -> SolverOutput:
        """Leading singular values of every item of ``operator``."""
        M, N = operator.shape
        if self.k > min(M, N):
            raise ValueError(f"k = {self.k} singular values were asked of a {M}×{N} operator")
        basis_bytes = (M + N) * Basis.CHUNK * torch.finfo(operator.dtype).bits // 8
        turn = max(1, self.memory // basis_bytes)
        if operator.batch <= turn:
            return _Run(self, operator).solve()
        items = torch.arange(operator.batch, device=operator.device)
        return SolverOutput.cat([_Run(self, operator.select(part)).solve() for part in items.split(turn)])


class _Run:
    """One batched bidiagonalisation: the growing bases, and the items that have not converged yet."""

    def __init__(self, config: GolubKahan, operator: Operator) -> None:
        self.config = config
        self.operator = operator
        M, N = operator.shape
        # With fewer outputs than inputs it takes one step more than M to see the whole space: v_{M+1} is still news.
        self.whole_space = min(M + 1, N)
        self.steps = min(config.max_steps, self.whole_space)
        self.active = torch.arange(operator.batch, device=operator.device)
        start = random_unit_vector(operator, config.seed)
        self.V = Basis(operator.batch, N, start)
        self.U = Basis(operator.batch, M, start)
        self.V.append(start.expand(operator.batch, N))
        # Bidiagonal entries in float64 whatever the operator's dtype: the small problem is never the weak link.
        self.alpha = start.new_zeros(operator.batch, self.steps, dtype=torch.float64)
        self.beta = torch.zeros_like(self.alpha)
        # Where the recurrence of each item last started afresh, and how often it did.
        self.fresh = torch.zeros(operator.batch, dtype=torch.int64, device=operator.device)
        self.restarts = torch.zeros_like(self.fresh)
        # The bounds of recurrences that have ended.
        self.known = torch.full_like(self.alpha[:, 0], torch.inf)
        self.output = SolverOutput.empty(operator, config.k, config.vectors, "golub_kahan", config.delta)

    def solve(self) -> SolverOutput:
        for step in range(1, self.steps + 1):
            self._extend(step)
            # Every other step: small SVDs of many items cost as much as the products.
            if step == self.steps or (step >= self.config.k and step % 2 == 0):
                self._retire_converged(step)
                if self.active.numel() == 0:
                    break
        return self.output

    def _extend(self, step: int) -> None:
        """One operator pair: append u_step and v_{step+1} to the bases."""
        j = step - 1
        u = self.operator.matvec(self.V.last)
        if j > 0:
            u = u - self.beta[:, j - 1, None].to(u.dtype) * self.U.last
        u = self.U.orthogonalise(u)
        self.alpha[:, j] = norm = self._norm_or_zero(u)
        self.U.append(unit_rows(u, norm))

        v = self.operator.rmatvec(self.U.last) - self.alpha[:, j, None].to(u.dtype) * self.V.last
        v = self.V.orthogonalise(v)
        self.beta[:, j] = norm = self._norm_or_zero(v)
        v = unit_rows(v, norm)
        exhausted = norm == 0
        if bool(exhausted.any()):
            everyone = torch.arange(exhausted.numel(), device=exhausted.device)
            self.known = torch.where(exhausted, torch.minimum(self.known, self._current(everyone, step)), self.known)
            v = torch.where(exhausted[:, None], self._fresh_direction(step), v)
            self.fresh = torch.where(exhausted, step, self.fresh)
            self.restarts = self.restarts + exhausted.long()
        self.V.append(v)

    def _norm_or_zero(self, x: Tensor) -> Tensor:
        """‖x‖, or zero when it is at the rounding level of what the recurrence has seen."""
        norm = scaled_norm(x)
        return norm.masked_fill(norm <= self._negligible(x.dtype), 0.0)

    def _negligible(self, dtype: torch.dtype) -> Tensor:
        return 8 * torch.finfo(dtype).eps * torch.maximum(self.alpha.amax(1), self.beta.amax(1))

    def _fresh_direction(self, step: int) -> Tensor:
        """A random direction orthogonal to the basis so far; zero when the basis spans the space."""
        x = random_unit_vector(self.operator, self.config.seed + step).expand(self.operator.batch, -1)
        for _ in range(2):
            x = self.V.orthogonalise(x)
        norm = scaled_norm(x)
        return unit_rows(x, norm.masked_fill(norm <= 1e-3 / self.operator.shape[1] ** 0.5, 0.0))

    def _retire_converged(self, step: int) -> None:
        if not bool(torch.isfinite(self.alpha + self.beta).all()):
            raise FloatingPointError(_NON_FINITE)
        ritz = RitzPairs(self.alpha[:, :step], self.beta[:, :step], self.config.k)
        done = ritz.relative_error(self.operator.rounding) <= self.config.rtol
        candidates = done.nonzero()[:, 0]
        if self.config.interval is not None and candidates.numel():
            widest = (1 + self.config.interval) * ritz.values[candidates, 0]
            done[candidates] = self._upper(ritz, candidates, step) <= widest
        if step == self.whole_space:
            done = torch.ones_like(done)
        recorded = self.output.iterations[self.active] > 0
        leaving = torch.ones_like(done) if step == self.steps else done
        self._record(step, ritz, (leaving & ~recorded).nonzero()[:, 0], done)

        staying = (~(leaving | recorded)).nonzero()[:, 0]
        # Copying bases costs about one product: compact only when it saves a quarter of the work.
        if staying.numel() <= 0.75 * self.active.numel():
            self._keep(staying)

    def _upper(self, ritz: RitzPairs, rows: Tensor, step: int) -> Tensor:
        """The least upper bound known for the listed rows, after ``step`` steps."""
        values = ritz.values[rows, 0]
        if step == self.whole_space:
            return values
        # What was found before the current recurrence began lies in its complement and counts too.
        bound = torch.minimum(self.known[rows], torch.maximum(self._current(rows, step), values))
        return torch.maximum(bound, values)

    def _current(self, rows: Tensor, step: int) -> Tensor:
        """The bound of the current recurrences. The r-th may fail with probability δ/2^{r+1}, together at most δ."""
        N, most = self.operator.shape[1], int(self.restarts[rows].max())
        overlap = [overlap_quantile(N, self.config.delta / 2 ** (r + 1)) for r in range(most + 1)]
        return polynomial_upper_bound(
            self.alpha[rows, :step],
            self.beta[rows, :step],
            first=self.fresh[rows],
            overlap=torch.tensor(overlap, dtype=torch.float64, device=rows.device)[self.restarts[rows]],
            floor=self._negligible(self.operator.dtype)[rows],
        )

    def _record(self, step: int, ritz: RitzPairs, rows: Tensor, done: Tensor) -> None:
        """Write the results of the rows that stop now; they are never touched again."""
        if rows.numel() == 0:
            return
        items = self.active[rows]
        out, k = self.output, self.config.k
        values = ritz.values[rows]
        out.estimate[items] = values[:, 0]
        out.upper[items] = self._upper(ritz, rows, step)
        out.singular_values[items] = values[:, :k]
        out.iterations[items] = step
        out.residual[items] = ritz.residual[rows, 0]
        out.converged[items] = done[rows]
        for item, ok in zip(items.tolist(), done[rows].tolist(), strict=True):
            out.status[item] = Status.CONVERGED if ok else Status.MAX_STEPS

        wanted = k if self.config.vectors else 1
        right = self.V.combine(rows, ritz.right[rows, :, :wanted])
        out.record_energy(items, self.operator.token_energy(right[:, 0]))
        if self.config.vectors:
            out.record_vectors(items, right, self.U.combine(rows, ritz.left[rows, :, :wanted]))

    def _keep(self, rows: Tensor) -> None:
        self.active = self.active[rows]
        if rows.numel() == 0:
            return
        self.operator = self.operator.select(rows)
        self.alpha, self.beta = self.alpha[rows], self.beta[rows]
        self.fresh, self.restarts, self.known = self.fresh[rows], self.restarts[rows], self.known[rows]
        self.U.keep(rows)
        self.V.keep(rows)


_NON_FINITE = (
    "A product with the Jacobian returned NaN or infinity. Most likely the map overflows at this input: check the input and "
    "the weights for extreme values, compute in float64, or rescale."
)
