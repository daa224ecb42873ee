"""Upper bounds for spectral norms that are theorems, not estimates: a power iteration only ever gives a lower bound.

Nonnegative N, any x > 0 (Collatz–Wielandt):   ‖N‖₂² = λ_max(NᵀN) ≤ max_i (NᵀN x)_i / x_i.
Any M (Schatten norms):                        ‖M‖₂ ≤ ‖(MᵀM)^p‖_F^{1/2p},  too large by at most rank^{1/4p}.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

_SMALLEST = 1e-280
# Multiplications of one squaring of the whole batch above which fewer squarings are made.
_LARGE = 1 << 23


def nonnegative_norm(N: Tensor, steps: int = 40) -> float:
    """Collatz–Wielandt bound for the spectral norm of a nonnegative matrix, after a few power steps for x.

    Every x > 0 gives a valid bound; power steps only make it tight. All sums are of nonnegative terms, so each carries a
    relative error of at most (number of terms)·eps, which is added.

    Example:
        >>> import torch
        >>> round(nonnegative_norm(torch.ones(3, 3, dtype=torch.float64)), 9)
        3.0
    """
    return _best_vector(N, steps)[0]


def perron_vector(N: Tensor, steps: int = 40) -> Tensor:
    """The x > 0 at which ``nonnegative_norm`` found its bound, close to the leading right singular vector."""
    return _best_vector(N, steps)[1]


def collatz_wielandt(N: Tensor, x: Tensor) -> float:
    """√(max_i (NᵀN x)_i/x_i) ≥ ‖N‖₂ for a fixed x > 0: increasing in every entry of N, unlike the best such bound."""
    size = _largest(N)
    N = N / size
    ratio = float((N.mT @ (N @ x) / x).max())
    return size * math.sqrt(ratio) * _rounding(N) if math.isfinite(ratio) else math.inf


def _best_vector(N: Tensor, steps: int) -> tuple[float, Tensor]:
    size = _largest(N)
    N = N / size
    start = {"N": N.new_ones(N.shape[1])}
    best, x = best_vectors(lambda vectors: {"N": N.mT @ (N @ vectors["N"])}, start, steps, rows=N.shape[0])["N"]
    return size * best, x


# NᵀNx for several nonnegative matrices N, by name.
Grams: TypeAlias = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def best_vectors(
    grams: Grams, start: dict[str, Tensor], steps: int = 40, *, rows: int | None = None
) -> dict[str, tuple[float, Tensor]]:
    """Collatz–Wielandt bounds for matrices known by their products NᵀNx alone, each with the x > 0 at which it was found.

    ``start`` has a positive x for every matrix; ``rows`` is their number of rows, that of columns by default.
    """
    vectors, found = dict(start), {name: (math.inf, x) for name, x in start.items()}
    for step in range(steps):
        for name, y in (grams(vectors) if vectors else {}).items():
            x, best = vectors.pop(name), found[name][0]
            ratio = float((y / x).max())
            if not math.isfinite(ratio):
                continue
            improved = ratio < best * (1 - 1e-6)
            if ratio < best:
                found[name] = ratio, x
            top = float(y.max())
            if top == 0.0 or (step > 4 and not improved):
                continue
            # The floor keeps x positive on blocks that the leading one outgrows; the ratio is taken after it.
            vectors[name] = (y / top).clamp_min(_SMALLEST)
    return {
        name: (math.sqrt(ratio) * (1 + ((rows or len(x)) + len(x) + 8) * torch.finfo(x.dtype).eps), x)
        for name, (ratio, x) in found.items()
    }


def _largest(N: Tensor) -> float:
    """The largest entry, to divide by: squares of very small or large entries would leave the range of floats."""
    return max(float(N.abs().max()), _SMALLEST)


def _rounding(N: Tensor) -> float:
    return 1 + (sum(N.shape) + 8) * torch.finfo(N.dtype).eps


def matrix_norm_upper(M: Tensor, squarings: int | None = None, *, symmetric: bool = False, single: bool = False) -> Tensor:
    """Schatten bound for the spectral norms of a batch of matrices (…, a, b): products only, no decomposition.

    With G = MᵀM scaled to unit Frobenius norm and squared s times, ‖M‖₂² ≤ ‖G^{2^s}‖_F^{1/2^s}. Equal singular values
    are the worst case: for 64 of them the bound is 6.7 % too large with s = 4 and 30 % with s = 2.

    Args:
        M: matrices, float64.
        squarings: s; by default 4, and 2 for large batches, where each squaring costs as much as the matrices themselves.
        symmetric: the matrices are symmetric, so that M may stand for G and one product is saved.
        single: compute in float32, twice as fast; the bound is enlarged by the rounding of float32 instead of float64.
    """
    scale = torch.linalg.vector_norm(M, math.inf, dim=(-2, -1)).clamp_min(_SMALLEST)
    dtype, M = M.dtype, M / scale[..., None, None]
    smallest = _SMALLEST
    if single:
        M, smallest = M.float(), 1e-30
    G = M if symmetric else M.mT @ M if M.shape[-1] <= M.shape[-2] else M @ M.mT
    terms = sum(M.shape[-2:])
    if squarings is None:
        squarings = 4 if G.numel() * G.shape[-1] <= _LARGE else 2
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
    # A square of a matrix of unit Frobenius norm is off by terms·eps, and its own norm is at least 1/√rank.
    rounding = 1 + (4 * terms**1.5 + 64) * torch.finfo(M.dtype).eps
    bound: Tensor = scale * torch.exp(log if symmetric else log / 2).to(dtype) * rounding
    return bound
