"""``spectral_norm``, and the solvers to choose from: dense SVD, Golub–Kahan, the cheaper of the two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from lipscope.doors import at_least
from lipscope.spectral.basis import as_integers
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
        at_least(1, k=self.k)

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


class Solver(Protocol):
    """Anything that turns an operator into singular values: ``GolubKahan``, ``Dense``, ``Auto``."""

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
