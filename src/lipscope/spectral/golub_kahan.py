"""Golub–Kahan–Lanczos bidiagonalisation, batched, with a two-sided interval for the largest singular value.

After k steps from a unit vector v₁ drawn uniformly on the sphere, J V_k = U_k B_k with B_k upper bidiagonal (diagonal α,
superdiagonal β) and Jᵀ U_k = V_k B_kᵀ + β_k v_{k+1} e_kᵀ. The largest singular value θ₁ of B_k is a **lower** bound for σ.

**Upper bound** (the idea of Hochstenbach, *Probabilistic upper bounds for the matrix two-norm*, J. Sci. Comput. 57, 2013):
v_{k+1} = q_k(JᵀJ) v₁ has norm one, with q_k(t) = ∏ᵢ(t − θᵢ²) / ∏ⱼ αⱼβⱼ, so γ·q_k(σ²) ≤ 1 where γ = |⟨v₁, top right
singular vector⟩|. Except with probability δ, γ ≥ g(δ), and then σ² is at most the root t > θ₁² of q_k(t) = 1/g(δ). The
failure event does not depend on k, so the bound holds at a stopping time chosen by looking at the iterates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.spectral.operator import Operator
from lipscope.spectral.output import SolverOutput, Status
from lipscope.spectral.start import overlap_quantile, random_unit_vector

_BASIS_CHUNK = 32


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
        k: number of leading singular triplets.
        vectors: also return singular vectors.
        interval: widest relative interval upper/lower − 1 to stop with. It also guards against a start that happens to be
            almost orthogonal to the top singular vector, which a residual cannot see. None switches the guard off.
        seed: seed of the start vector; the same for every item, so results do not depend on how inputs are batched.
        memory: bytes the Krylov bases of one sub-batch may take; larger batches are solved in turns.
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
        if not 0 < self.delta < 1:
            raise ValueError(f"delta must lie strictly between 0 and 1, got {self.delta}")
        if self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {self.max_steps}")
        if self.interval is not None and not self.interval > 0:
            raise ValueError(f"interval must be positive or None, got {self.interval}")
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")

    def solve(self, operator: Operator) -> SolverOutput:
        """Leading singular values of every item of ``operator``."""
        M, N = operator.shape
        if self.k > min(M, N):
            raise ValueError(f"k = {self.k} singular values were asked of a {M}×{N} operator")
        basis_bytes = (M + N) * _BASIS_CHUNK * torch.finfo(operator.dtype).bits // 8
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
        self.overlap = overlap_quantile(N, config.delta)
        start = random_unit_vector(operator, config.seed)
        self.V = _Basis(start.expand(operator.batch, N))
        self.U = _Basis.empty(operator.batch, M, start)
        # Bidiagonal entries in float64 whatever the operator's dtype: the small problem is never the weak link.
        self.alpha = start.new_zeros(operator.batch, self.steps, dtype=torch.float64)
        self.beta = torch.zeros_like(self.alpha)
        self.output = SolverOutput.empty(operator, config.k, config.vectors, "golub_kahan", config.delta)

    def solve(self) -> SolverOutput:
        for step in range(1, self.steps + 1):
            self._extend(step)
            if self._worth_checking(step):
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
        self.alpha[:, j] = _append_normalised(self.U, u, self.alpha.amax(1))

        v = self.operator.rmatvec(self.U.last) - self.alpha[:, j, None].to(u.dtype) * self.V.last
        v = self.V.orthogonalise(v)
        self.beta[:, j] = _append_normalised(self.V, v, self.alpha.amax(1))

    def _worth_checking(self, step: int) -> bool:
        """Small SVDs of many items cost as much as the products, so large batches are checked every fourth step."""
        if step < self.config.k:
            return False
        return step == self.steps or self.active.numel() <= 64 or step % 4 == 0

    def _retire_converged(self, step: int) -> None:
        if not bool(torch.isfinite(self.alpha + self.beta).all()):
            raise FloatingPointError(_NON_FINITE)
        ritz = _RitzPairs(self.alpha[:, :step], self.beta[:, :step], self.config.k)
        done = ritz.relative_error(self.operator.rounding) <= self.config.rtol
        if self.config.interval is not None:
            everyone = torch.arange(done.numel(), device=done.device)
            done &= self._upper(ritz, everyone, step) <= (1 + self.config.interval) * ritz.values[:, 0]
        if step == self.whole_space:
            done = torch.ones_like(done)
        recorded = self.output.iterations[self.active] > 0
        leaving = torch.ones_like(done) if step == self.steps else done
        self._record(step, ritz, (leaving & ~recorded).nonzero()[:, 0], done)

        staying = (~(leaving | recorded)).nonzero()[:, 0]
        # Copying bases costs about one product: compact only when it saves a quarter of the work.
        if staying.numel() <= 0.75 * self.active.numel():
            self._keep(staying)

    def _record(self, step: int, ritz: _RitzPairs, rows: Tensor, done: Tensor) -> None:
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

    def _upper(self, ritz: _RitzPairs, rows: Tensor, step: int) -> Tensor:
        return polynomial_upper_bound(ritz.values[rows], self.alpha[rows, :step], self.beta[rows, :step], self.overlap)

    def _keep(self, rows: Tensor) -> None:
        self.active = self.active[rows]
        if rows.numel() == 0:
            return
        self.operator = self.operator.select(rows)
        self.alpha, self.beta = self.alpha[rows], self.beta[rows]
        self.U.keep(rows)
        self.V.keep(rows)


class _Basis:
    """Orthonormal rows per item, stored (B, capacity, N) and grown in chunks."""

    def __init__(self, first: Tensor) -> None:
        self._store = first.new_empty(first.shape[0], _BASIS_CHUNK, first.shape[1])
        self._store[:, 0] = first
        self.count = 1

    @classmethod
    def empty(cls, batch: int, size: int, like: Tensor) -> _Basis:
        basis = cls(like.new_zeros(batch, size))
        basis.count = 0
        return basis

    @property
    def last(self) -> Tensor:
        return self._store[:, self.count - 1]

    def orthogonalise(self, x: Tensor) -> Tensor:
        """Remove the components of x along the basis; the recurrence has removed most of them already."""
        if self.count == 0:
            return x
        Q = self._store[:, : self.count]
        coefficients = torch.bmm(Q, x.unsqueeze(-1))
        return torch.baddbmm(x.unsqueeze(-1), Q.transpose(1, 2), coefficients, alpha=-1).squeeze(-1)

    def append(self, x: Tensor) -> None:
        if self.count == self._store.shape[1]:
            self._store = torch.cat([self._store, torch.empty_like(self._store[:, :_BASIS_CHUNK])], dim=1)
        self._store[:, self.count] = x
        self.count += 1

    def combine(self, rows: Tensor, coefficients: Tensor) -> Tensor:
        """Unit vectors Σ_j coefficients[:, j, c] · q_j of the listed items, shape (rows, c, N)."""
        Q = self._store[rows, : coefficients.shape[1]]
        vectors = torch.bmm(coefficients.transpose(1, 2).to(Q.dtype), Q)
        return torch.nn.functional.normalize(vectors, dim=-1, eps=torch.finfo(Q.dtype).tiny)

    def keep(self, rows: Tensor) -> None:
        kept = self._store.new_empty(rows.numel(), *self._store.shape[1:])
        kept[:, : self.count] = self._store[rows, : self.count]
        self._store = kept


class _RitzPairs:
    """Singular values of the small bidiagonals, their vectors, and the residuals ‖Jᵀu − θv‖ = β_k·|last entry of x|."""

    def __init__(self, alpha: Tensor, beta: Tensor, k: int) -> None:
        B = torch.diag_embed(alpha)
        if alpha.shape[1] > 1:
            B = B + torch.diag_embed(beta[:, :-1], offset=1)
        left, values, right_t = torch.linalg.svd(B)
        self.k = k
        self.values: Tensor = values
        self.left, self.right = left, right_t.transpose(1, 2)
        self.residual: Tensor = beta[:, -1:] * left[:, -1, :].abs()

    def relative_error(self, rounding: float) -> Tensor:
        """Estimated relative error of the k leading values: the largest of min(r, r²/2gap)/θ over them."""
        k, values = self.k, self.values
        r, theta = self.residual[:, :k], values[:, :k]
        following = torch.nn.functional.pad(values, (0, 1))[:, 1 : k + 1]
        # With a single Ritz value nothing is known of the gap yet.
        gap = (theta - following) if values.shape[1] > k else torch.zeros_like(theta)
        tiny = torch.finfo(torch.float64).tiny
        # Of the symmetric form [[0, J], [Jᵀ, 0]] the unit vector (u, v)/√2 has residual r/√2: hence the factor ½.
        refined = r.square() / (2 * gap).clamp_min(tiny)
        error = torch.minimum(r, refined) / theta.clamp_min(tiny)
        exhausted = r <= rounding * values[:, :1]
        return error.masked_fill(exhausted, 0.0).amax(-1)


def polynomial_upper_bound(ritz: Tensor, alpha: Tensor, beta: Tensor, overlap: float) -> Tensor:
    """The root t ≥ θ₁² of ∏(t − θᵢ²) = ∏ αⱼβⱼ / overlap, as √t: an upper bound for σ when γ ≥ overlap.

    The left side increases in t beyond θ₁², so bisection in the relative distance finds the root; logarithms keep the
    products in range.
    """
    scale = ritz[:, :1].clamp_min(torch.finfo(torch.float64).tiny)
    roots = (ritz / scale).square()
    target = (alpha.clamp_min(0) / scale).log().sum(-1) + (beta / scale).log().sum(-1)
    target = target - torch.tensor(overlap, dtype=torch.float64).log().to(target)
    degree = ritz.shape[1]
    # (t − 1)^degree ≤ ∏(t − rootsᵢ), so this exponent brackets the root from above.
    high = (target / degree).clamp(min=-80.0)
    low = torch.full_like(high, -80.0)
    for _ in range(64):
        middle = (low + high) / 2
        t = 1 + middle.exp()
        value = torch.log((t[:, None] - roots).clamp_min(torch.finfo(torch.float64).tiny)).sum(-1)
        above = value >= target
        high = torch.where(above, middle, high)
        low = torch.where(above, low, middle)
    upper = scale[:, 0] * (1 + high.exp()).sqrt()
    return torch.where(ritz[:, 0] > 0, upper, torch.zeros_like(upper))


def _append_normalised(basis: _Basis, x: Tensor, scale: Tensor) -> Tensor:
    """Append x/‖x‖ and return ‖x‖ in float64.

    A norm at the rounding level of ``scale`` means that the Krylov space is exhausted (it is invariant, and a random
    start makes it contain the top singular vector): zero is appended and returned, and the recurrence ends there.
    """
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    norm = norm.masked_fill(norm <= 8 * torch.finfo(x.dtype).eps * scale, 0.0)
    inverse = torch.where(norm > 0, 1 / norm, 0.0)
    basis.append(x * inverse.to(x.dtype)[:, None])
    return norm


_NON_FINITE = (
    "A product with the Jacobian returned NaN or infinity. Most likely the map overflows at this input in the chosen "
    "dtype: check the input and the weights for extreme values, or compute in float64."
)
