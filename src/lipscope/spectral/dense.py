"""Dense SVD of the explicit Jacobian: exact, for small problems and for tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.spectral.golub_kahan import GolubKahan
from lipscope.spectral.operator import Operator
from lipscope.spectral.output import SolverOutput, Status


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
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")

    def solve(self, operator: Operator) -> SolverOutput:
        """Leading singular values of every item of ``operator``."""
        M, N = operator.shape
        if self.k > min(M, N):
            raise ValueError(f"k = {self.k} singular values were asked of a {M}×{N} operator")
        matrices = operator.to_dense().double()
        if not bool(torch.isfinite(matrices).all()):
            raise FloatingPointError("The Jacobian has NaN or infinite entries at this input; try float64.")
        left, values, right = _svd(matrices)
        out = SolverOutput.empty(operator, self.k, self.vectors, "dense", None)
        out.estimate[:] = values[:, 0]
        out.upper[:] = values[:, 0]
        out.singular_values[:] = values[:, : self.k]
        out.converged[:] = True
        out.status[:] = [Status.EXACT] * operator.batch
        items = torch.arange(operator.batch, device=operator.device)
        leading = right[:, : self.k].to(operator.dtype)
        out.record_energy(items, operator.token_energy(leading[:, 0]))
        if self.vectors:
            out.record_vectors(items, leading, left[:, :, : self.k].transpose(1, 2).to(operator.dtype))
        return out


def _svd(matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    try:
        return tuple(torch.linalg.svd(matrices, full_matrices=False))
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # The divide-and-conquer driver fails on some matrices with many equal singular values; the slower one does not.
        from scipy.linalg import svd

        parts = [svd(matrix.cpu().numpy(), full_matrices=False, lapack_driver="gesvd") for matrix in matrices]
        left, values, right = (
            torch.stack([torch.from_numpy(array).to(matrices) for array in arrays]) for arrays in zip(*parts, strict=True)
        )
        return left, values, right


@dataclass(frozen=True)
class Auto:
    """Dense SVD when the smaller side of J has at most ``dense_below`` entries, Golub–Kahan otherwise.

    Attributes:
        rtol: requested relative accuracy of the estimate.
        max_steps: most operator pairs (J, Jᵀ) spent on one item.
        delta: allowed probability that the probabilistic upper bound fails.
        k: number of leading singular triplets.
        vectors: also return singular vectors.
        interval: widest relative interval upper/lower − 1 to stop with, or None.
        seed: seed of the start vector.
        dense_below: largest min(M, N) solved densely.
        memory: bytes for Krylov bases, see :class:`GolubKahan`.
    """

    rtol: float = 1e-4
    max_steps: int = 300
    delta: float = 1e-6
    k: int = 1
    vectors: bool = False
    interval: float | None = 0.1
    seed: int = 0
    dense_below: int = 128
    memory: int = 1 << 30

    def __post_init__(self) -> None:
        self._iterative()  # refuses bad options even when the dense solver would not need them

    def _iterative(self) -> GolubKahan:
        return GolubKahan(self.rtol, self.max_steps, self.delta, self.k, self.vectors, self.interval, self.seed, self.memory)

    def solve(self, operator: Operator) -> SolverOutput:
        """Leading singular values of every item of ``operator``, by the cheaper method."""
        if min(operator.shape) <= self.dense_below and max(operator.shape) <= 64 * self.dense_below:
            return Dense(k=self.k, vectors=self.vectors).solve(operator)
        return self._iterative().solve(operator)
