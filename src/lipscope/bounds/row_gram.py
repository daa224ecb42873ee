"""The row-Gram certificate: block norms, but with the directions of the blocks of a row kept.

Row i of the Jacobian of a head is [M_i1 … M_in] plus B_i on the diagonal. For any weights ω_ij > 0, by Cauchy–Schwarz,

    ‖Σ_j M_ij ε_j + B_i ε_i‖² ≤ λ_i( Σ_j ‖ε_j‖²/ω_ij + ‖ε_i‖²/ω_i ),    λ_i = ‖Σ_j ω_ij M_ijM_ijᵀ + ω_i B_iB_iᵀ‖

Sum over i and exchange the sums: σ² ≤ max_j ( Σ_i λ_i/ω_ij + λ_j/ω_j ). With N_ij ≥ ‖M_ij‖, N_i ≥ ‖B_i‖, any x > 0 and
the weights ω_ij = x_j/N_ij, ω_i = x_i/N_i, the triangle inequality gives λ_i ≤ (Nx)_i and the bound becomes
Collatz–Wielandt's for the block norms; the norm of the sum itself is smaller, since the blocks of a row point in
different directions. With g_ij = Va_ij,

    Σ_j ω_ij M_ijM_ijᵀ = (Σ_j ω_ijP_ij²)VVᵀ + X_i + X_iᵀ + Σ_j ω_ijW_ij²‖a_ij‖²δ_ijδ_ijᵀ,    X_i = Σ_j ω_ijP_ijW_ij g_ijδ_ijᵀ

is a matrix as small as a head. Ours; proof in docs/theory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipscope.bounds.head_core import HeadCore
from lipscope.bounds.spectral_upper import matrix_norm_upper, perron_vector
from lipscope.bounds.weights import HeadWeights

TINY = 1e-280


def row_gram(core: HeadCore, w: HeadWeights, block: Tensor, B: Tensor, gain: Tensor, rounds: int = 2) -> float:
    """A bound for σ of one head, without the margin for the rounding of probabilities.

    Args:
        core: the head at one input.
        w: its weights.
        block: ≥ ‖M_ij‖, (n, n).
        B: ≥ ‖B_i‖, (n,).
        gain: (n,), norms of the maps before the tokens.
        rounds: choices of x: the leading vector of the block norms, then what the bound itself suggests.

    Returns:
        The least bound of the rounds.
    """
    total = block * gain + torch.diag(B * gain)
    x = perron_vector(total)
    best = math.inf
    eps = (2 * len(x) + 8) * torch.finfo(x.dtype).eps
    for _ in range(rounds):
        x = (x / x.max()).clamp_min(1e-100)
        weights = torch.where(block > 0, x * gain / block.clamp_min(TINY), 0.0)
        own = torch.where(B > 0, x * gain / B.clamp_min(TINY), 0.0)
        rows = torch.minimum(row_norms(core, w, weights, own, B), total @ x)
        columns = total.mT @ rows
        value = float((columns / x).max()) * (1 + eps)
        if not math.isfinite(value):
            break
        best = min(best, math.sqrt(value))
        x = columns
        if float(x.max()) == 0:
            break
    return best


def row_norms(core: HeadCore, w: HeadWeights, weights: Tensor, own: Tensor, B: Tensor) -> Tensor:
    """λ_i for every row, its rounding included."""
    v, o = core.seen(w)
    P, W, a = core.P, core.W, core.a
    mean = (weights * P.square()).sum(-1)
    mixed, spread = weights * P * W, weights * W.square() * a.square()
    VV = w.V @ w.V.mT
    crosses = _cross_terms(core, w, mixed, v, o)
    found = []
    for part, cross, moment in core.moments(w, spread):
        gram = mean[part, None, None] * VV + moment + own[part, None, None] * (cross @ cross.mT)
        if crosses is not None:
            gram = gram + crosses[part] + crosses[part].mT
        found.append(matrix_norm_upper(gram, symmetric=True))
    v_size = float(torch.linalg.vector_norm(v, dim=-1).max() + torch.linalg.vector_norm(o, dim=-1).max())
    size = mean * w.value**2 + 2 * (mixed * a).sum(-1) * w.value * v_size + spread.sum(-1) * v_size**2
    return torch.cat(found) + core.margin * (size + own * B.square())


def _cross_terms(core: HeadCore, w: HeadWeights, mixed: Tensor, v: Tensor, o: Tensor) -> Tensor | None:
    """X_i = Σ_j mixed_ij g_ij δ_ijᵀ for every row."""
    if core.turn is None:
        h = mixed @ v - mixed.sum(-1, keepdim=True) * o
        return (core.q @ w.VK.mT)[:, :, None] * h[:, None, :]
    found = []
    for part, G in core.pair_images(w.VK, core.q):
        G = G * mixed[part, :, None]
        found.append(G.mT @ v - G.sum(1)[:, :, None] * o[part, None, :])
    return torch.cat(found)
