"""Upper bounds for spectral norms that are theorems, not estimates: a power iteration only ever gives a lower bound.

Nonnegative N, any x > 0 (Collatz–Wielandt):   ‖N‖₂² = λ_max(NᵀN) ≤ max_i (NᵀN x)_i / x_i.
Any M (Schatten norms):                        ‖M‖₂ ≤ ‖(MᵀM)^p‖_F^{1/2p},  too large by at most rank^{1/4p}.

Sums over heads: with L = [L_1, …, L_H], R likewise and C = diag(C_1, …, C_H), Σ_h L_h C_h R_hᵀ = L C Rᵀ is at most
‖L‖‖R‖max_h‖C_h‖. That wastes up to ‖L‖‖R‖/‖L_h‖‖R_h‖ when every C_h has few large directions, as covariances under a sharp
softmax have. For **any** U_h, Z_h of k columns, with U = diag(U_1, …, U_H) and Z likewise,

    ‖L C Rᵀ‖ ≤ ρ( UᵀLᵀLU · ZᵀRᵀRZ )^½ + ‖L‖‖R‖ max_h ‖C_h − U_hZ_hᵀ‖

where the first term is of matrices of only H·k rows. Good factors come from a few power steps in single precision; they are
never assumed good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_SMALLEST = 1e-280
# Power steps for a bound by Collatz–Wielandt, at most.
PASSES = 40
# Rows up to which all eigenvalues are computed where the largest is wanted.
DIRECT = 192
# Multiplications of one squaring of the whole batch above which fewer squarings are made.
LARGE = 1 << 23


def nonnegative_norms(N: Tensor) -> tuple[Tensor, Tensor]:
    """Collatz–Wielandt bounds (k,) for the norms of nonnegative matrices (k, m, n), and the x > 0 (k, n) that give them.

    Every x > 0 gives a valid bound; power steps only make it tight. All sums are of nonnegative terms, so each carries a
    relative error of at most (number of terms)·eps, which is added.
    """
    size = _largest(N)
    N = N / size
    norms, x = best_vectors(lambda x: _gram(N, x), N.new_ones(len(N), N.shape[-1]), PASSES, rows=N.shape[-2])
    return size[:, 0, 0] * norms, x


def collatz_wielandt(N: Tensor, x: Tensor) -> Tensor:
    """√(max_i (NᵀN x)_i/x_i) ≥ ‖N‖₂ for fixed x > 0 (k, n): increasing in every entry of N, unlike the best such bound."""
    size = _largest(N)
    N = N / size
    ratio = (_gram(N, x) / x).amax(-1).nan_to_num(math.inf, math.inf)
    return size[:, 0, 0] * ratio.sqrt() * (1 + (sum(N.shape[-2:]) + 8) * torch.finfo(N.dtype).eps)


def _gram(N: Tensor, x: Tensor) -> Tensor:
    return (N.mT @ (N @ x[..., None]))[..., 0]


def _largest(N: Tensor) -> Tensor:
    """The largest entries, to divide by: squares of very small or large entries would leave the range of floats."""
    return N.abs().amax((-2, -1), keepdim=True).clamp_min(_SMALLEST)


def best_vectors(
    grams: Callable[[Tensor], Tensor], x: Tensor, steps: int, *, rows: int | None = None, rtol: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Collatz–Wielandt bounds (k,) for k matrices known by their products NᵀNx alone, each with the x > 0 of its bound.

    ``grams`` maps vectors (k, n), one for each matrix, to the products; ``x`` are positive ones to start from, ``rows`` is
    the number of rows of the matrices, that of columns by default. It ends when no bound falls by ``rtol`` any more.
    """
    best, found = x.new_full((len(x),), math.inf), x
    for step in range(steps):
        y = grams(x)
        ratio = (y / x).amax(-1).nan_to_num(math.inf, math.inf)
        improved = ratio < best * (1 - rtol)
        found = torch.where((ratio < best)[:, None], x, found)
        best, top = torch.minimum(best, ratio), y.amax(-1, keepdim=True)
        going = improved if step > 4 else ratio.isfinite()
        if not bool((going & (top[:, 0] > 0)).any()):
            break
        # The floor keeps x positive on blocks that the leading one outgrows; the ratio is taken after it.
        x = torch.where(top > 0, y / top, x).clamp_min(_SMALLEST)
    return best.sqrt() * (1 + ((rows or x.shape[1]) + x.shape[1] + 8) * torch.finfo(x.dtype).eps), found


def matrix_norm_upper(M: Tensor, squarings: int | None = None, *, symmetric: bool = False, single: bool = False) -> Tensor:
    """Schatten bound for the spectral norms of a batch of matrices (…, a, b): products only, no decomposition.

    With G = MᵀM scaled to unit Frobenius norm and squared s times, ‖M‖₂² ≤ ‖G^{2^s}‖_F^{1/2^s}. Equal singular values
    are the worst case: for 64 of them the bound is 6.7 % too large with s = 4 and 30 % with s = 2.

    Args:
        M: matrices, float64 or float32.
        squarings: s; by default 4, and 2 for large batches, where each squaring costs as much as the matrices themselves.
        symmetric: the matrices are symmetric and positive semidefinite, so that M may stand for G and one product is saved.
        single: compute in float32, twice as fast; the bound is enlarged by the rounding of float32 instead of float64.
    """
    # In the range of the dtype that they come in: float32 holds their entries only once they are divided.
    scale = M.abs().amax((-2, -1)).clamp_min(1e-30 if M.dtype == torch.float32 else _SMALLEST)
    dtype, M = M.dtype, M / scale[..., None, None]
    if single:
        M = M.float()
    smallest = 1e-30 if M.dtype == torch.float32 else _SMALLEST
    G = M if symmetric else M.mT @ M if M.shape[-1] <= M.shape[-2] else M @ M.mT
    terms = M.shape[-1] if symmetric else sum(M.shape[-2:])
    if squarings is None:
        squarings = 4 if G.numel() * G.shape[-1] <= LARGE else 2
    exponent = 1.0
    squarings += symmetric
    log = torch.zeros(G.shape[:-2], dtype=M.dtype, device=M.device)
    for step in range(squarings + 1):
        size = torch.linalg.matrix_norm(G)
        log = log + exponent * torch.log(size)
        if step == squarings:
            break
        G = G * size.clamp_min(smallest).reciprocal()[..., None, None]
        G = G @ G
        exponent /= 2
    # What squares of G ⪰ 0 lose in all is less (docs/theory/certificates.md, Squarings); 64 is for sizes and logarithms.
    rounding = 1 + (max(2 * terms**1.5, terms**2 / 6) + 64) * torch.finfo(M.dtype).eps
    bound: Tensor = scale * torch.exp(log if symmetric else log / 2).to(dtype) * rounding
    return bound


def _ritz_value(S: Tensor, steps: int = 64) -> float:
    """The largest Ritz value of a symmetric matrix: at most its norm."""
    start = torch.randn(len(S), dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(S)
    steps, value = min(steps, len(S)), 0.0
    Q, T = S.new_empty(steps, len(S)), torch.zeros(steps, steps, dtype=torch.float64)
    Q[0] = start / start.norm()
    for k in range(steps):
        y = S @ Q[k]
        T[k, k] = Q[k] @ y
        for _ in range(2):
            y = y - (Q[: k + 1] @ y) @ Q[: k + 1]
        size = float(y.norm())
        last = k + 1 == steps or size <= 1e-12 * float(T[k, k].abs())
        if last or k % 8 == 7:
            before, value = value, float(torch.linalg.eigvalsh(T[: k + 1, : k + 1])[-1])
            if last or value - before <= 1e-9 * value:
                break
        T[k, k + 1] = T[k + 1, k] = size
        Q[k + 1] = y / size
    return value


def top_eigenvalue(S: Tensor) -> float:
    """An upper bound for the largest eigenvalue of a positive semidefinite matrix S, by a relative 1e-6 too large at most.

    Of large matrices a Ritz value θ is enlarged a little and c·I − S ⪰ 0 verified: when a Cholesky factorisation of it runs
    to its end in floating point, no eigenvalue is below −(m + 2)·eps·trace (Rump 2006), whatever θ is. Else from all of
    them, rounded up by a relative 2e-12.
    """
    m, eps = len(S), torch.finfo(S.dtype).eps
    if m > DIRECT:
        theta = _ritz_value(S)
        for slack in (2e-7, 1e-6) if 1e-200 < theta < 1e200 else ():
            c = theta * (1 + slack)
            rest = -S
            rest.diagonal().add_(c)
            if not int(torch.linalg.cholesky_ex(rest).info):
                return c * (1 + (m + 8) * m * eps)
    return max(0.0, float(torch.linalg.eigvalsh(S)[-1])) * (1 + 2e-12)


# Columns of the factors. Covariances of a sharp softmax are nearly of that rank; more cost more than they bring.
RANK = 4


def sum_norms(left: Tensor, C: Iterable[Tensor], right: Tensor, norm: float) -> Tensor:
    """Upper bounds for ‖Σ_h L_h C_h R_hᵀ‖, (n,).

    Args:
        left: L_h, (H, ·, m), float64.
        C: (n, m, l) of one head after the other.
        right: R_h, (H, ·, l); the same tensor as ``left`` for positive semidefinite C.
        norm: an upper bound for ‖L‖‖R‖.
    """
    definite, eps = left is right, torch.finfo(left.dtype).eps
    U, Z, rest = (torch.stack(t) for t in zip(*(_factors(each, definite) for each in C), strict=True))
    first, second = _projected(left, U), _projected(right, Z) if not definite else None
    # A multiple of the identity covers what rounding has taken from products and projections.
    off = 8 * (left.shape[1] + right.shape[1] + U.shape[-2] + Z.shape[-2]) * eps
    sizes = [(W.square().sum((-2, -1))[:, None] * F.square().sum((-2, -1))).sum(0) for W, F in ((left, U), (right, Z))]
    if second is None:
        return matrix_norm_upper(first, symmetric=True) + off * sizes[0] + norm * rest.amax(0)
    # ρ(AB) = ‖KᵀBK‖ for A = KKᵀ, a symmetric matrix; at most the product of the norms where A has no such factor.
    one = torch.eye(first.shape[-1], dtype=left.dtype, device=left.device)
    K, failed = torch.linalg.cholesky_ex(first + (off * sizes[0] + _SMALLEST)[:, None, None] * one)
    product = K.mT @ second @ K
    found = matrix_norm_upper((product + product.mT) / 2, symmetric=True) + 16 * len(one) * off * sizes[0] * sizes[1]
    found = torch.where((failed == 0) & torch.isfinite(found), found, sizes[0] * sizes[1] * (1 + off))
    return found.sqrt() + norm * rest.amax(0)


def _projected(W: Tensor, F: Tensor) -> Tensor:
    """The Gram matrices of the columns W_hF_h of all heads, (n, H·k, H·k)."""
    images = torch.stack([f.mT @ w.mT for w, f in zip(W, F, strict=True)], 1).flatten(1, 2)
    return images @ images.mT


def _factors(C: Tensor, definite: bool) -> tuple[Tensor, Tensor, Tensor]:
    """U (…, m, k) and Z (…, l, k) with UZᵀ close to C (…, m, l), the same if that is definite; and bounds for ‖C − UZᵀ‖."""
    scale = C.abs().amax((-2, -1), keepdim=True).clamp_min(_SMALLEST)
    rough = (C / scale).float()
    Y = rough @ (rough.mT @ rough[..., : min(RANK, C.shape[-1])])
    Y = Y / torch.linalg.vector_norm(Y, dim=-2, keepdim=True).clamp_min(1e-30)
    U = _divided(Y, Y.mT @ Y)
    Z = rough.mT @ U
    if definite:
        U = Z = _divided(Z, U.mT @ Z)
    # What single precision does to C and to the product.
    size, left, right = (torch.linalg.matrix_norm(t) for t in (rough, U, Z))
    off = 4 * torch.finfo(Z.dtype).eps * (size + RANK * left * right)
    rest = scale[..., 0, 0] * (matrix_norm_upper(rough - U @ Z.mT, 1) + off)
    unit = scale.sqrt() if definite else torch.ones_like(scale)
    return U.to(C.dtype) * unit, Z.to(C.dtype) * (scale / unit), rest


def _divided(Y: Tensor, gram: Tensor) -> Tensor:
    """Y L⁻ᵀ with LLᵀ = gram, a little enlarged so that it is definite; 0 where it is not after all, which is valid too."""
    size = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-30)
    L, failed = torch.linalg.cholesky_ex(gram + 1e-6 * size[..., None, None] * torch.eye(gram.shape[-1]).to(gram))
    F = torch.linalg.solve_triangular(L.mT, Y, upper=True, left=False)
    return torch.nan_to_num(torch.where((failed == 0)[..., None, None], F, 0.0), 0.0, 0.0, 0.0)
