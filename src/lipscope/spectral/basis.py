"""Orthonormal bases that grow one vector at a time, for a batch of problems."""

from __future__ import annotations

import torch
from torch import Tensor


class Basis:
    """Orthonormal rows per item, stored (B, capacity, N) and grown in chunks."""

    CHUNK = 32

    def __init__(self, batch: int, size: int, like: Tensor) -> None:
        self._store = like.new_empty(batch, self.CHUNK, size)
        self.count = 0

    @property
    def last(self) -> Tensor:
        """The newest vector of every item, (B, N)."""
        return self._store[:, self.count - 1]

    def orthogonalise(self, x: Tensor) -> Tensor:
        """Remove the components of x along the basis; the recurrence has removed most of them already."""
        if self.count == 0:
            return x
        Q = self._store[:, : self.count]
        coefficients = torch.bmm(Q, x.unsqueeze(-1))
        return torch.baddbmm(x.unsqueeze(-1), Q.transpose(1, 2), coefficients, alpha=-1).squeeze(-1)

    def append(self, x: Tensor) -> None:
        """Add one vector per item."""
        if self.count == self._store.shape[1]:
            self._store = torch.cat([self._store, torch.empty_like(self._store[:, : self.CHUNK])], dim=1)
        self._store[:, self.count] = x
        self.count += 1

    def combine(self, rows: Tensor, coefficients: Tensor) -> Tensor:
        """Unit vectors Σ_j coefficients[:, j, c] · q_j of the listed items, shape (rows, c, N)."""
        Q = self._store[rows, : coefficients.shape[1]]
        vectors = torch.bmm(coefficients.transpose(1, 2).to(Q.dtype), Q)
        return torch.nn.functional.normalize(vectors, dim=-1, eps=torch.finfo(Q.dtype).tiny)

    def keep(self, rows: Tensor) -> None:
        """Forget all items but the listed ones."""
        kept = self._store.new_empty(rows.numel(), *self._store.shape[1:])
        kept[:, : self.count] = self._store[rows, : self.count]
        self._store = kept


def scaled_norm(x: Tensor) -> Tensor:
    """‖x‖₂ of every row, in float64, without overflow or underflow of the squares."""
    if x.dtype != torch.float64:
        wide: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
        return wide
    peak = x.abs().amax(-1)
    safe = torch.where(peak > 0, peak, torch.ones_like(peak))
    scaled: Tensor = safe * torch.linalg.vector_norm(x / safe[:, None], dim=-1)
    return scaled


def unit_rows(x: Tensor, norm: Tensor) -> Tensor:
    """Each row over its norm, and zero where the norm is zero. Division, since the inverse of a tiny norm overflows."""
    safe = torch.where(norm > 0, norm, torch.ones_like(norm)).to(x.dtype)
    return torch.where((norm > 0)[:, None], x / safe[:, None], torch.zeros_like(x))
