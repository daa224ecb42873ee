"""Norms of sums over heads, without the sum of the heads' norms.

With W = [W_1; …; W_H] stacked and D = diag(D_1, …, D_H), the sums Σ_h W_hᵀ D_h W_h = WᵀDW and Σ_h U_h C_h W_h = U C W
are at most ‖W‖²max_h‖D_h‖ and ‖U‖‖W‖max_h‖C_h‖. That wastes up to ‖W‖²/‖W_h‖² when every D_h has few large directions,
as covariances under a sharp softmax have. For **any** F_h, U_h, Z_h of k columns

    ‖WᵀDW‖ ≤ ‖Fᵀ(WWᵀ)F‖ + ‖W‖² max_h ‖D_h − F_hF_hᵀ‖
    ‖U C W‖ ≤ ρ( X_UᵀUᵀU X_U · ZᵀWWᵀZ )^½ + ‖U‖‖W‖ max_h ‖C_h − X_{U,h}Z_hᵀ‖

where the first terms are matrices of only H·k rows. Good factors come from a few power steps; they are never assumed good.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.bounds.spectral_upper import matrix_norm_upper

# Columns of the factors. Covariances of a sharp softmax are nearly of that rank; more cost more than they bring.
RANK = 8
_TILE = 1 << 23


def factor(D: Tensor) -> tuple[Tensor, Tensor]:
    """F (…, m, k) with FFᵀ close to the positive semidefinite D (…, m, m), and a bound for ‖D − FFᵀ‖."""
    Y = D @ (D @ _start(D))
    Y = Y / torch.linalg.vector_norm(Y, dim=-2, keepdim=True).clamp_min(1e-280)
    DY = D @ Y
    F = _divide(DY, Y.mT @ DY)
    return F, matrix_norm_upper(D - F @ F.mT, symmetric=True)


def factor_pair(C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (…, m, k) and Z (…, l, k) with UZᵀ close to C (…, m, l), and a bound for ‖C − UZᵀ‖."""
    Y = C @ (C.mT @ (C @ _start(C)))
    Y = Y / torch.linalg.vector_norm(Y, dim=-2, keepdim=True).clamp_min(1e-280)
    U = _divide(Y, Y.mT @ Y)
    Z = C.mT @ U
    return U, Z, matrix_norm_upper(C - U @ Z.mT)


def _start(M: Tensor) -> Tensor:
    size = M.shape[-1]
    drawn = torch.randn(size, min(RANK, size), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn.to(M)


def _divide(Y: Tensor, gram: Tensor) -> Tensor:
    """Y L⁻ᵀ with LLᵀ = gram, a little enlarged so that it is definite."""
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-280)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    L, failed = torch.linalg.cholesky_ex(gram + 1e-12 * size[..., None, None] * eye)
    F = torch.linalg.solve_triangular(L.mT, Y, upper=True, left=False)
    # Where it is not definite after all, no directions are taken out: still valid, only not as sharp.
    good = (failed == 0) & torch.isfinite(F).all(-1).all(-1)
    return torch.where(good[..., None, None], F, torch.zeros_like(F))


def projected_gram(gram: Tensor, F: Tensor) -> Tensor:
    """Fᵀ(WWᵀ)F for block-diagonal F, (n, H·k, H·k), from WWᵀ (H·m, H·m) and the blocks F (H, n, m, k)."""
    H, n, m, k = F.shape
    rows = gram.reshape(H, m, H * m)
    parts = []
    for h in range(H):
        # (H·m, m) @ (m, n·k), then every head's own columns.
        image = rows[h].mT @ F[h].permute(1, 0, 2).reshape(m, n * k)
        image = image.reshape(H, m, n, k).transpose(1, 2)
        parts.append((F.mT @ image).transpose(0, 1).reshape(n, H * k, k))
    return torch.cat(parts, dim=-1)


def quadratic_norms(gram: Tensor, norm: float, F: Tensor, rest: Tensor) -> Tensor:
    """‖Σ_h W_hᵀD_hW_h‖ (n,) from F (H, n, m, k) and rest (H, n) of ``factor``; ``norm`` ≥ ‖W‖."""
    found = []
    for part in _tiles(F):
        K = projected_gram(gram, F[:, part])
        found.append(matrix_norm_upper((K + K.mT) / 2, symmetric=True))
    return torch.cat(found) + norm**2 * rest.amax(0)


def product_norms(left: Tensor, right: Tensor, norms: tuple[float, float], U: Tensor, Z: Tensor, rest: Tensor) -> Tensor:
    """‖Σ_h O_h C_h W_h‖ (n,) from ``factor_pair``, with left = OᵀO, right = WWᵀ and norms ≥ (‖O‖, ‖W‖)."""
    found = []
    for part in _tiles(U):
        first, second = projected_gram(left, U[:, part]), projected_gram(right, Z[:, part])
        # The Schatten bound of a matrix that stands for itself bounds the spectral radius of any square matrix.
        found.append(matrix_norm_upper(first @ second, symmetric=True).sqrt())
    return torch.cat(found) + norms[0] * norms[1] * rest.amax(0)


def _tiles(F: Tensor) -> list[slice]:
    H, n, _, k = F.shape
    step = max(1, _TILE // (H * k) ** 2)
    return [slice(start, min(n, start + step)) for start in range(0, n, step)]
