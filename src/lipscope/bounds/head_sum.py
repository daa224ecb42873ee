"""Norms of sums over heads, without the sum of the heads' norms.

With W = [W_1; …; W_H] stacked and D = diag(D_1, …, D_H), the sums Σ_h W_hᵀ D_h W_h = WᵀDW and Σ_h U_h C_h W_h = U C W
are at most ‖W‖²max_h‖D_h‖ and ‖U‖‖W‖max_h‖C_h‖. That wastes up to ‖W‖²/‖W_h‖² when every D_h has few large directions,
as covariances under a sharp softmax have. For **any** F_h, U_h, Z_h of k columns

    ‖WᵀDW‖ ≤ ‖Fᵀ(WWᵀ)F‖ + ‖W‖² max_h ‖D_h − F_hF_hᵀ‖
    ‖U C W‖ ≤ ρ( X_UᵀUᵀU X_U · ZᵀWWᵀZ )^½ + ‖U‖‖W‖ max_h ‖C_h − X_{U,h}Z_hᵀ‖

where the first terms are matrices of only H·k rows. Good factors come from a few power steps in single precision; they are
never assumed good.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipscope.bounds.spectral_upper import matrix_norm_upper

# Columns of the factors. Covariances of a sharp softmax are nearly of that rank; more cost more than they bring.
RANK = 4
_SQUARINGS = 1
_TILE = 1 << 23


def factor(D: Tensor) -> tuple[Tensor, Tensor]:
    """F (n, m, k) with FFᵀ close to the positive semidefinite D (n, m, m), and a bound for ‖D − FFᵀ‖."""
    # No entry of a semidefinite matrix exceeds its diagonal.
    scale = D.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None].clamp_min(1e-280)
    rough = (D / scale).float()
    Y = _unit_columns(rough @ rough[..., : min(RANK, D.shape[-1])])
    DY = rough @ Y
    F = _divide(DY, Y.mT @ DY).to(D.dtype) * scale.sqrt()
    return F, matrix_norm_upper(torch.baddbmm(D, F, F.mT, alpha=-1), _SQUARINGS, symmetric=True, single=True)


def factor_pair(C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (n, m, k) and Z (n, l, k) with UZᵀ close to C (n, m, l), and a bound for ‖C − UZᵀ‖."""
    scale = torch.linalg.vector_norm(C, math.inf, dim=(-2, -1), keepdim=True).clamp_min(1e-280)
    rough = (C / scale).float()
    Y = _unit_columns(rough @ (rough.mT @ rough[..., : min(RANK, C.shape[-1])]))
    U = _divide(Y, Y.mT @ Y)
    Z = (rough.mT @ U).to(C.dtype) * scale
    U = U.to(C.dtype)
    return U, Z, matrix_norm_upper(torch.baddbmm(C, U, Z.mT, alpha=-1), _SQUARINGS, single=True)


def _unit_columns(Y: Tensor) -> Tensor:
    unit: Tensor = Y / torch.linalg.vector_norm(Y, dim=-2, keepdim=True).clamp_min(1e-30)
    return unit


def _divide(Y: Tensor, gram: Tensor) -> Tensor:
    """Y L⁻ᵀ with LLᵀ = gram, a little enlarged so that it is definite; 0 where it is not after all, which is valid too."""
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-30)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    L, failed = torch.linalg.cholesky_ex(gram + 1e-6 * size[..., None, None] * eye)
    F = torch.linalg.solve_triangular(L.mT, Y, upper=True, left=False)
    return torch.nan_to_num(torch.where((failed == 0)[..., None, None], F, 0.0), 0.0, 0.0, 0.0)


def projected_gram(gram: Tensor, norm: float, F: Tensor) -> Tensor:
    """Fᵀ(WWᵀ)F for block-diagonal F, (n, H·k, H·k), from WWᵀ (H·m, H·m) and the blocks F (H, n, m, k); norm ≥ ‖W‖.

    A multiple of the identity that covers its rounding is added, so that it is above the exact matrix as a quadratic form.
    """
    H, n, m, k = F.shape
    rows = gram.reshape(H, m, H * m)
    parts = []
    for h in range(H):
        # (H·m, m) @ (m, n·k), then every head's own columns.
        image = rows[h].mT @ F[h].permute(1, 0, 2).reshape(m, n * k)
        image = image.reshape(H, m, n, k).transpose(1, 2)
        parts.append((F.mT @ image).transpose(0, 1).reshape(n, H * k, k))
    K = torch.cat(parts, dim=-1)
    rounding = 8 * H * m * torch.finfo(K.dtype).eps * norm**2 * F.square().sum((-2, -1)).amax(0)
    return (K + K.mT) / 2 + rounding[:, None, None] * torch.eye(H * k, dtype=K.dtype, device=K.device)


def quadratic_norms(gram: Tensor, norm: float, F: Tensor, rest: Tensor) -> Tensor:
    """‖Σ_h W_hᵀD_hW_h‖ (n,) from F (H, n, m, k) and rest (H, n) of ``factor``; ``norm`` ≥ ‖W‖."""
    found = []
    for part in _tiles(F):
        found.append(matrix_norm_upper(projected_gram(gram, norm, F[:, part]), symmetric=True))
    return torch.cat(found) + norm**2 * rest.amax(0)


def product_norms(left: Tensor, right: Tensor, norms: tuple[float, float], U: Tensor, Z: Tensor, rest: Tensor) -> Tensor:
    """‖Σ_h O_h C_h W_h‖ (n,) from ``factor_pair``, with left = OᵀO, right = WWᵀ and norms ≥ (‖O‖, ‖W‖)."""
    found = []
    for part in _tiles(U):
        first, second = projected_gram(left, norms[0], U[:, part]), projected_gram(right, norms[1], Z[:, part])
        # ρ(AB) = ‖LᵀBL‖ for A = LLᵀ, a symmetric matrix, whose rounding is relative to ‖A‖‖B‖; that alone if L is not found.
        L, failed = torch.linalg.cholesky_ex(first)
        size = torch.linalg.matrix_norm(first) * torch.linalg.matrix_norm(second)
        K = L.mT @ second @ L
        norm = matrix_norm_upper((K + K.mT) / 2, symmetric=True)
        norm = norm + 256 * K.shape[-1] * torch.finfo(K.dtype).eps * size
        found.append(torch.where((failed == 0) & torch.isfinite(norm), norm, size).sqrt())
    return torch.cat(found) + norms[0] * norms[1] * rest.amax(0)


def _tiles(F: Tensor) -> list[slice]:
    H, n, _, k = F.shape
    step = max(1, _TILE // (H * k) ** 2)
    return [slice(start, min(n, start + step)) for start in range(0, n, step)]
