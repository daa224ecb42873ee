"""``spectral_norm``: the one verb of this package."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from lipscope.spectral.dense import Auto
from lipscope.spectral.golub_kahan import GolubKahan
from lipscope.spectral.operator import Operator
from lipscope.spectral.output import SolverOutput
from lipscope.spectral.result import SpectralNorm, reshape_batch, summarise


class Solver(Protocol):
    """Anything that turns an operator into singular values: ``GolubKahan``, ``Power``, ``Dense``, ``Auto``."""

    def solve(self, operator: Operator) -> SolverOutput:
        """Leading singular values of every batch item."""
        ...


def within(solver: Solver, memory: int) -> Solver:
    """The same solver with at most ``memory`` bytes for its Krylov bases."""
    if not isinstance(solver, Auto | GolubKahan):
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
        >>> import torch, lipscope
        >>> print(lipscope.spectral_norm(lipscope.DenseOperator(torch.diag(torch.tensor([3.0, 1.0])))).estimate)
        3.0
    """
    result = summarise((solver or Auto()).solve(operator), operator, scope="operator")
    return reshape_batch(result, () if operator.batch == 1 else (operator.batch,))
