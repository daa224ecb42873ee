"""A few Golub–Kahan steps from a singular vector that is almost right: σ along a path of inputs for a few products.

After k steps from v the largest Ritz value θ obeys ‖Jv‖ ≤ θ ≤ σ: a valid lower bound, never below what the start attains.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.spectral.basis import Basis, scaled_norm, unit_rows
from lipscope.spectral.golub_kahan import GolubKahan
from lipscope.spectral.operator import Operator
from lipscope.spectral.ritz import RitzPairs


@dataclass(frozen=True, eq=False)
class TopPair:
    """Approximate top singular triplets of a batch: θ (B,) ≤ σ in float64, unit u (B, M) and v (B, N), θ = ⟨u, Jv⟩."""

    theta: Tensor
    left: Tensor
    right: Tensor

    def select(self, items: Tensor) -> TopPair:
        """Keep the listed items."""
        return TopPair(self.theta[items], self.left[items], self.right[items])


def cold_pair(operator: Operator, *, rtol: float = 1e-3, seed: int = 0) -> TopPair:
    """The top pairs from a random start."""
    output = GolubKahan(rtol=rtol, vectors=True, interval=None, seed=seed).solve(operator)
    assert output.left is not None
    assert output.right is not None
    return TopPair(output.estimate, output.left[:, 0], output.right[:, 0])


def warm_pair(operator: Operator, start: Tensor, steps: int) -> TopPair:
    """The top Ritz pairs after ``steps`` products J·v and one less Jᵀ·u, from unit vectors ``start`` (B, N)."""
    M, N = operator.shape
    steps = min(steps, M, N)
    U, V = Basis(operator.batch, M, start), Basis(operator.batch, N, start)
    V.append(start)
    alpha = torch.zeros(operator.batch, steps, dtype=torch.float64, device=start.device)
    beta = torch.zeros_like(alpha)
    for j in range(steps):
        u = U.remove(operator.matvec(V.last))
        alpha[:, j] = scaled_norm(u)
        U.append(unit_rows(u, alpha[:, j]))
        if j + 1 == steps:
            break  # J V = U B is complete: the last Jᵀ would only tell the residual
        v = V.remove(operator.rmatvec(U.last))
        # What is left after an exhausted recurrence is rounding: it must not become a direction.
        norm = scaled_norm(v)
        beta[:, j] = norm.masked_fill(norm <= 8 * torch.finfo(v.dtype).eps * alpha.amax(1), 0.0)
        V.append(unit_rows(v, beta[:, j]))
    ritz = RitzPairs(alpha, beta, 1)
    assert ritz.left is not None
    rows = torch.arange(operator.batch, device=start.device)
    right, left = V.combine(rows, ritz.right[:, :, :1])[:, 0], U.combine(rows, ritz.left[:, :, :1])[:, 0]
    return TopPair(ritz.values[:, 0], left, right)
