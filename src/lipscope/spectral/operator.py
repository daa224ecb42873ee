"""The operator protocol: a batch of linear maps known only through J·u and Jᵀ·g.

The Jacobian of a map applied to B inputs is block-diagonal over the batch, so B inputs are B independent problems of the
same size that share every matrix product. Solvers see nothing but this class:

    matvec : (B, N) → (B, M)     u ↦ J·u
    rmatvec: (B, M) → (B, N)     g ↦ Jᵀ·g
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from scipy.sparse.linalg import LinearOperator as ScipyLinearOperator


class Operator(ABC):
    """A batch of ``batch`` linear maps R^N → R^M, given by their products and those of their transposes.

    Attributes:
        batch: number of independent maps B.
        input_shape: shape of one input, e.g. ``(n, d)``; N is its product.
        output_shape: shape of one output; M is its product.
        dtype: floating type of the products.
        device: where the products run.
    """

    batch: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __repr__(self) -> str:
        M, N = self.shape
        return f"<{type(self).__name__} of {self.batch} maps R^{N} → R^{M}, {str(self.dtype).removeprefix('torch.')}>"

    @property
    def shape(self) -> tuple[int, int]:
        """``(M, N)``: flattened output and input sizes of one map."""
        return math.prod(self.output_shape), math.prod(self.input_shape)

    @property
    def rounding_error(self) -> float:
        """Relative error to allow for one product in ``dtype``, the largest of all items.

        By default that of inner products as long as the larger side.
        """
        return torch.finfo(self.dtype).eps * float(16 + 4 * max(self.shape) ** 0.5)

    @property
    def rounding_errors(self) -> Tensor:
        """The same of every item, (B,) in float64, by which its interval is widened; by default the largest."""
        return torch.full((self.batch,), self.rounding_error, dtype=torch.float64, device=self.device)

    @property
    def rounding_floor(self) -> Tensor | float:
        """Absolute error to allow for, of every item (B,) or of all: what cancels inside products, however small J is."""
        return 0.0

    @abstractmethod
    def matvec(self, u: Tensor) -> Tensor:
        """Apply J: ``(B, N)`` → ``(B, M)``."""

    @abstractmethod
    def rmatvec(self, g: Tensor) -> Tensor:
        """Apply Jᵀ: ``(B, M)`` → ``(B, N)``."""

    @abstractmethod
    def select(self, items: Tensor) -> Operator:
        """The operator of the listed batch items, in that order; repeats are allowed."""

    def token_energy(self, right: Tensor) -> Tensor | None:
        """Share of each token in unit input directions ``(B, N)``, or None when inputs are not token sequences."""
        if len(self.input_shape) != 2:
            return None
        return right.reshape(-1, *self.input_shape).square().sum(-1)

    def lift_right(self, right: Tensor) -> Tensor:
        """Turn input directions ``(B, N)`` of the operator into directions of the original input."""
        return right.reshape(-1, *self.input_shape)

    def to_dense(self) -> Tensor:
        """The matrices themselves, ``(B, M, N)``, one product per row or column, whichever are fewer."""
        M, N = self.shape
        if N <= M:
            return _apply_to_basis(self.matvec, N, self).movedim(0, -1)
        return _apply_to_basis(self.rmatvec, M, self).movedim(0, -2)

    def to_scipy(self, item: int = 0) -> ScipyLinearOperator:
        """Batch item ``item`` as a SciPy ``LinearOperator``, for independent solvers."""
        from scipy.sparse.linalg import LinearOperator as ScipyLinearOperator

        one = self.select(torch.tensor([item], device=self.device))
        numpy_dtype = torch.empty(0, dtype=self.dtype).numpy().dtype

        def through(product: Callable[[Tensor], Tensor]) -> Callable[[Any], np.ndarray[Any, Any]]:
            def apply(x: Any) -> np.ndarray[Any, Any]:
                row = torch.as_tensor(x, dtype=self.dtype, device=self.device).reshape(1, -1)
                return product(row)[0].cpu().numpy()

            return apply

        return ScipyLinearOperator(
            shape=self.shape, dtype=numpy_dtype, matvec=through(one.matvec), rmatvec=through(one.rmatvec)
        )


class DerivedOperator(Operator):
    """Maps made of those of another operator, ``base``, with their shapes and the rounding of their products."""

    def __init__(self, base: Operator) -> None:
        self.base = base
        self.batch, self.dtype, self.device = base.batch, base.dtype, base.device
        self.input_shape, self.output_shape = base.input_shape, base.output_shape

    @property
    def rounding_error(self) -> float:
        return self.base.rounding_error

    @property
    def rounding_errors(self) -> Tensor:
        """Those of the base, and what this map adds to the largest."""
        return self.base.rounding_errors + (self.rounding_error - self.base.rounding_error)


class DenseOperator(Operator):
    """Explicit matrices ``(B, M, N)`` behind the protocol: for tests, and for Jacobians that are already known."""

    def __init__(self, matrices: Tensor) -> None:
        if matrices.ndim == 2:
            matrices = matrices[None]
        if matrices.ndim != 3:
            raise ValueError(f"matrices must have shape (M, N) or (B, M, N), got {tuple(matrices.shape)}")
        self._matrices = matrices
        self.batch = matrices.shape[0]
        self.output_shape, self.input_shape = (matrices.shape[1],), (matrices.shape[2],)
        self.dtype, self.device = matrices.dtype, matrices.device

    def matvec(self, u: Tensor) -> Tensor:
        return torch.einsum("bmn,bn->bm", self._matrices, u)

    def rmatvec(self, g: Tensor) -> Tensor:
        return torch.einsum("bmn,bm->bn", self._matrices, g)

    def select(self, items: Tensor) -> DenseOperator:
        return DenseOperator(self._matrices[items])

    def to_dense(self) -> Tensor:
        return self._matrices


def _apply_to_basis(product: Callable[[Tensor], Tensor], size: int, operator: Operator) -> Tensor:
    """Stack ``product(e_j)`` for every basis vector e_j, the same for all batch items."""
    images = []
    for j in range(size):
        unit = torch.zeros(operator.batch, size, dtype=operator.dtype, device=operator.device)
        unit[:, j] = 1
        images.append(product(unit))
    return torch.stack(images)
