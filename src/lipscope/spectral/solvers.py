"""``spectral_norm``, and the solvers to choose from: dense SVD, Golub–Kahan, the cheaper of the two, power iteration.

``Dense`` forms the Jacobian: exact, for small problems and for tests. ``Power`` iterates JᵀJ: the textbook method, kept for
comparison. After k steps ‖(JᵀJ)^k v₁‖ ≥ γ·σ^{2k} with the overlap γ of the start with the top right singular vector, hence
σ ≤ (‖(JᵀJ)^k v₁‖ / g(δ))^{1/2k} except with probability δ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lipscope.spectral.basis import as_integers, check_delta, overlap_quantile, random_direction, scaled_norm, unit_rows
from lipscope.spectral.golub_kahan import GolubKahan
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SolverOutput, SpectralNorm, Status, reshape_batch, summarise
from lipscope.spectral.ritz import svd
from lipscope.spectral.scale import at_any_scale, refuse_extreme_scales


@dataclass(frozen=True)
class Dense:
    """Form J (B, M, N) and take its SVD in float64: exact up to rounding, memory B·M·N.

    Attributes:
        k: number of leading singular triplets.
        vectors: also return singular vectors.
    """

    k: int = 1
    vectors: bool = False

    def __post_init__(self) -> None:
        as_integers(self, "k")
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")

    def solve(self, operator: Operator) -> SolverOutput:
        """Leading singular values of every item of ``operator``."""
        M, N = operator.shape
        if self.k > min(M, N):
            raise ValueError(f"k = {self.k} singular values were asked of a {M}×{N} operator")
        return at_any_scale(operator, self._solve)

    def _solve(self, operator: Operator) -> SolverOutput:
        matrices = operator.to_dense().double()
        refuse_extreme_scales(operator, matrices.flatten(1).abs().amax(1))
        if not bool(torch.isfinite(matrices).all()):
            raise FloatingPointError("The Jacobian has NaN or infinite entries at this input; try float64.")
        left, values, right = svd(matrices)
        out = SolverOutput.empty(operator, self.k, self.vectors, "dense", None)
        out.estimate[:] = values[:, 0]
        out.upper[:] = values[:, 0]
        out.singular_values[:] = values[:, : self.k]
        out.status[:] = [Status.EXACT] * operator.batch
        items = torch.arange(operator.batch, device=operator.device)
        leading = right[:, : self.k].to(operator.dtype)
        out.record_energy(items, operator.token_energy(leading[:, 0]))
        if self.vectors:
            out.record_vectors(items, leading, left[:, :, : self.k].transpose(1, 2).to(operator.dtype))
        return out


@dataclass(frozen=True)
class Auto(GolubKahan):
    """Dense SVD when the smaller side of J has at most ``dense_below`` entries, Golub–Kahan otherwise.

    Attributes:
        dense_below: largest min(M, N) solved densely. All other options are those of :class:`GolubKahan`.
    """

    dense_below: int = 128

    def solve(self, operator: Operator, start: Tensor | None = None) -> SolverOutput:
        """Leading singular values of every item of ``operator``, by the cheaper method."""
        if min(operator.shape) <= self.dense_below and max(operator.shape) <= 64 * self.dense_below:
            return Dense(k=self.k, vectors=self.vectors).solve(operator)
        return super().solve(operator, start)


@dataclass(frozen=True)
class Power:
    """Power iteration on JᵀJ, stopped when ‖Jv‖ grows by less than ``rtol`` relative to itself in one step.

    A slow growth does not mean a small error: prefer :class:`GolubKahan`, which needs a fraction of the products.
    """

    rtol: float = 1e-4  # relative growth of ‖Jv‖ at which an item stops
    max_steps: int = 1000  # most operator pairs (J, Jᵀ)
    delta: float = 1e-6  # allowed probability that ``upper`` fails
    vectors: bool = False  # also return the singular vectors
    seed: int = 0  # seed of the start vector

    def __post_init__(self) -> None:
        if not 0 < self.rtol < 1:
            raise ValueError(f"rtol must lie strictly between 0 and 1, got {self.rtol}")
        if self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {self.max_steps}")
        check_delta(self.delta)

    def solve(self, operator: Operator) -> SolverOutput:
        """Largest singular value of every item of ``operator``."""
        return at_any_scale(operator, self._solve)

    def _solve(self, operator: Operator) -> SolverOutput:
        _, N = operator.shape
        out = SolverOutput.empty(operator, 1, self.vectors, "power", self.delta)
        v = random_direction(operator.shape[1], self.seed, operator).expand(operator.batch, N)
        overlap = math.log(overlap_quantile(N, self.delta))
        log_growth = torch.zeros(operator.batch, dtype=torch.float64, device=operator.device)
        previous = torch.zeros_like(log_growth)
        for step in range(1, self.max_steps + 1):
            u = operator.matvec(v)
            theta = scaled_norm(u)
            if step == 1:
                refuse_extreme_scales(operator, theta)
            if not bool(torch.isfinite(theta).all()):
                raise FloatingPointError("A product with the Jacobian returned NaN or infinity: does the map overflow here?")
            u = unit_rows(u, theta)
            w = operator.rmatvec(u)
            growth = scaled_norm(w)
            log_growth = log_growth + theta.log() + growth.log()
            done = (theta - previous) <= self.rtol * theta
            leaving = (done | (step == self.max_steps)) & (out.iterations == 0)
            items = leaving.nonzero()[:, 0]
            if items.numel():
                out.estimate[items] = theta[items]
                out.singular_values[items, 0] = theta[items]
                out.upper[items] = torch.maximum(((log_growth[items] - overlap) / (2 * step)).exp(), theta[items])
                out.iterations[items] = step
                out.residual[items] = scaled_norm(w[items].double() - theta[items, None] * v[items].double())
                for item in items.tolist():
                    out.status[item] = Status.ESTIMATED if bool(done[item]) else Status.MAX_STEPS
                out.record_energy(items, operator.token_energy(v[items]))
                if self.vectors:
                    out.record_vectors(items, v[items, None], u[items, None])
            if bool((out.iterations > 0).all()):
                break
            previous = theta
            v = unit_rows(w, growth)
        return out


class Solver(Protocol):
    """Anything that turns an operator into singular values: ``GolubKahan``, ``Power``, ``Dense``, ``Auto``."""

    def solve(self, operator: Operator) -> SolverOutput:
        """Leading singular values of every batch item."""


def within(solver: Solver, memory: int) -> Solver:
    """The same solver with at most ``memory`` bytes for its Krylov bases."""
    if not isinstance(solver, GolubKahan):
        raise ValueError(f"memory needs a solver that keeps to it, Auto or GolubKahan, got {type(solver).__name__}")
    return replace(solver, memory=min(memory, solver.memory))


def triplets(solver: Solver) -> int:
    """How many singular vectors of either side a solver holds per problem beside its bases; none for the norm alone.

    Several are taken out of the products while the next one is looked for, which makes two more of them.
    """
    k, vectors = getattr(solver, "k", 1), getattr(solver, "vectors", False)
    return k + 2 if k > 1 else int(vectors)


def spectral_norm(operator: Operator, solver: Solver | None = None) -> SpectralNorm:
    """Largest singular value of every item of ``operator``, as an interval.

    Args:
        operator: a batch of linear maps behind the operator protocol.
        solver: how to solve; ``Auto()`` by default.

    Returns:
        A ``SpectralNorm`` with plain numbers when ``operator.batch`` is 1, tensors of length B otherwise.

    Example:
        >>> import torch
        >>> from lipscope.spectral.operator import DenseOperator
        >>> print(spectral_norm(DenseOperator(torch.diag(torch.tensor([3.0, 1.0])))).estimate)
        3.0
    """
    result = summarise((solver or Auto()).solve(operator), operator, scope="operator")
    return reshape_batch(result, () if operator.batch == 1 else (operator.batch,))
