"""Certified upper bounds for σ at one input, closed form and deterministic.

With v_j the values, o_i = Σ_j P_ij v_j, W = P times the slope of the soft-cap, a_i = τW_Kᵀq_i, b_j = τW_Qᵀk_j, one head is

    (J ε)_i = Σ_j P_ij W_V ε_j + Σ_j W_ij (v_j − o_i)(a_i·ε_j) + B_i ε_i        B_i = Σ_j W_ij (v_j − o_i) b_jᵀ

**Row–column**: σ ≤ √(max_j Σ_i P_ij ρ_i²) + max_i ‖B_i‖, with ρ_i² = ‖W_V‖² + c_i‖a_i‖² and c_i the norm of the covariance
of the values under row i (ρ_i = ‖W_V‖ + √c_i‖a_i‖ with a soft-cap).
**Block norms**: σ ≤ ‖N‖₂ with N_ij ≥ ‖∂o_i/∂x_j‖, where for a rank-one update M = W_V + δaᵀ, g = W_V a,

    ‖M‖² ≤ ‖W_V‖² + ½(t + √(t² + 4(‖g‖²‖δ‖² − (g·δ)²))),   t = 2 g·δ + ‖a‖²‖δ‖²

since MMᵀ = W_V W_Vᵀ + gδᵀ + δgᵀ + ‖a‖²δδᵀ and the last three terms live in the span of g and δ.

Everything is computed in float64, one head at a time and without n×n×d memory; proofs are in docs/theory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds.bound import OURS, Bound
from lipscope.bounds.spectral_upper import matrix_norm_upper, nonnegative_norm
from lipscope.bounds.weights import HeadWeights, LayerWeights, layer_weights

# Entries of scratch memory for the covariances of one block of rows.
_SCRATCH = 1 << 23


@dataclass(frozen=True, eq=False)
class HeadPieces:
    """The quantities of one head at one input from which the certificates are assembled; all are upper bounds.

    Attributes:
        P: probabilities (n, n).
        W: P times the slope of the soft-cap, P itself without one.
        delta: ‖v_j − o_i‖, (n, n).
        a: ‖a_i‖, (n,).
        block: ‖∂o_i/∂x_j‖ without the B term, (n, n).
        rho: ρ_i, (n,).
        B: ‖B_i‖, (n,).
        margin: relative rounding margin.
    """

    P: Tensor
    W: Tensor
    delta: Tensor
    a: Tensor
    block: Tensor
    rho: Tensor
    B: Tensor
    margin: float

    def row_column(self) -> float:
        """√(max_j Σ_i P_ij ρ_i²) + max_i ‖B_i‖."""
        return math.sqrt(float((self.rho.square() @ self.P).max())) + float(self.B.max())

    def block_norm(self) -> float:
        """Collatz–Wielandt bound for the norm of the matrix of block norms."""
        return nonnegative_norm(self.block + torch.diag(self.B))


def certified_upper(layer: Attention, X: Tensor, scope: str = "attention") -> Tensor:
    """A proven upper bound for σ at every input: the least of the row–column and the block-norm certificates.

    The value covers the rounding of its own float64 computation by the relative margin of ``rounding_margin``. It is
    infinite when the scores are so large that float64 resolves nothing.

    Args:
        layer: the attention layer, any mask, bias, soft-cap, grouped queries, sinks.
        X: tokens (B, n, d).
        scope: ``"attention"`` (all heads and W_O) or ``"head"`` (each head before W_O).

    Returns:
        Float64 bounds of shape (B,), or (B, H) for scope ``"head"``.

    Cost: about 4·H·n²·d_head² + 8·H·n·d_head³ flops; memory a few n×n matrices, whatever the number of heads.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> layer = lipscope.Attention(q=0 * W, k=W, v=W)
        >>> round(float(certified_upper(layer, torch.randn(1, 5, 2, dtype=torch.float64))), 6)
        1.0
    """
    if scope not in ("attention", "head"):
        raise ValueError(f"no certificate for scope {scope!r}; there are certificates for: attention, head")
    weights = layer_weights(layer)
    with torch.no_grad():
        precise = layer.to(torch.float64)
        values = []
        for b, x in enumerate(X.double()):
            one = precise.for_input(b)
            values.append(_per_head(one, x, weights) if scope == "head" else [_whole_layer(one, x, weights)])
    result = torch.tensor(values, dtype=torch.float64, device=X.device)
    return result if scope == "head" else result[:, 0]


def local_bounds(layer: Attention, x: Tensor) -> list[Bound]:
    """The row–column and block-norm certificates of the whole layer at tokens x (n, d), each as a ``Bound``."""
    weights = layer_weights(layer)
    with torch.no_grad():
        candidates = _candidates(layer.to(torch.float64), x.double(), weights)
    given = {"n": x.shape[0], "heads": layer.heads}
    return [
        Bound(f"certificates.{name}", value, "local", "this input, any mask and score rule", OURS, given)
        for name, value in candidates.items()
    ]


def _per_head(layer: Attention, x: Tensor, weights: LayerWeights) -> list[float]:
    values = []
    for h, w in enumerate(weights.plain):
        pieces = head_pieces(layer.head(h), x, w)
        values.append(_round_up(min(pieces.row_column(), pieces.block_norm()), pieces.margin))
    return values


def _whole_layer(layer: Attention, x: Tensor, weights: LayerWeights) -> float:
    return min(_candidates(layer, x, weights).values())


def _candidates(layer: Attention, x: Tensor, weights: LayerWeights) -> dict[str, float]:
    """Every certificate of the whole layer.

    The block norms of the heads add up. Their mean parts Σ_h P^h_ij W_O^h W_V^h are bounded in two more ways, by what all
    heads share and by what one head has most, P_min‖ΣV_h‖ + Σ(P^h − P_min)‖V_h‖ and P_max‖W_O‖‖W_V‖; the least entry counts.
    """
    n = x.shape[0]
    zeros = x.new_zeros(n, n)
    blocks, means, covariances, most, weighted = (zeros.clone() for _ in range(5))
    least = zeros + 1
    B, rho = x.new_zeros(n), x.new_zeros(n)
    columns, margin = 0.0, 0.0
    for h, w in enumerate(weights.image):
        pieces = head_pieces(layer.head(h), x, w)
        margin = max(margin, pieces.margin)
        blocks += pieces.block
        means += w.value * pieces.P
        covariances += pieces.W * pieces.delta * pieces.a[:, None]
        torch.minimum(least, pieces.P, out=least)
        torch.maximum(most, pieces.P, out=most)
        weighted += pieces.rho[:, None] * pieces.P
        rho += pieces.rho
        B += pieces.B
        columns += math.sqrt(float((pieces.rho.square() @ pieces.P).max()))
    individual = sum(w.value for w in weights.image)
    shared = means + least * (weights.total - individual)
    mean = torch.minimum(torch.minimum(means, shared), weights.out * weights.values * most)
    N = torch.minimum(blocks, mean + covariances) + torch.diag(B)
    # Cauchy–Schwarz over the heads with weights ρ: (Σ_h ρ_h e_h)² ≤ (Σ_h ρ_h)(Σ_h ρ_h e_h²).
    columns = min(columns, math.sqrt(float((rho @ weighted).max())))
    return {
        "row_column": _round_up(columns + float(B.max()), margin),
        "block_norm": _round_up(nonnegative_norm(N), margin),
    }


def _round_up(value: float, margin: float) -> float:
    return value * (1 + 4 * margin) if margin < 0.1 else math.inf


def rounding_margin(weights: HeadWeights, x: Tensor) -> float:
    """Relative error of a probability, and hence of every sum of nonnegative terms built on it.

    A score is two products of length d and one of length dk, so its error is at most (2d + dk)·eps times
    |τ|‖W_Q‖_F‖W_K‖_F (‖x‖ + ‖b_Q‖/‖W_Q‖_F)(‖x‖ + ‖b_K‖/‖W_K‖_F); the exponential and the normalisation double it, and a
    further factor 2 and 8(n + d) units cover the remaining sums.
    """
    n, d = x.shape
    size = float(torch.linalg.vector_norm(x, dim=-1).max())
    scores = weights.score_scale * (size + weights.query_shift) * (size + weights.key_shift)
    eps = torch.finfo(torch.float64).eps
    return eps * (4 * (2 * d + weights.R_K.shape[1]) * scores + 8 * (n + d))


def head_pieces(single: Attention, x: Tensor, w: HeadWeights) -> HeadPieces:
    """Evaluate one head (a one-head layer in float64) at tokens x (n, d)."""
    core = single.linearise(x[None])
    q, k, v, P, W = (t[0, 0] for t in (core.q, core.k, core.v, core.P, core.W))
    margin = rounding_margin(w, x)
    bent, sinks = single.softcap is not None, single.sinks is not None
    if w.R_O is not None:
        v = v @ w.R_O.mT
    k = k @ w.R_Q.mT
    # Differences of values do not see a common shift; without sinks and soft-cap neither do those of keys.
    centre = v.mean(0)
    v = v - centre
    o = P @ v
    missing = (1 - P.sum(-1, keepdim=True)) if sinks else None
    if missing is not None:
        o = o - missing * centre
    if not (bent or sinks):
        k = k - k.mean(0)
    a = torch.linalg.vector_norm(q @ w.R_K.mT, dim=-1)
    delta2, block = _block_norms(q @ w.VK.mT, a, v, o, P, W if bent else None, w, margin)
    v_size, k_size = (float(torch.linalg.vector_norm(t, dim=-1).max()) for t in (v, k))
    v_size += float(torch.linalg.vector_norm(centre)) if sinks else 0.0
    B, c = _covariances(P, W, v, k, o, bent)
    if missing is not None and not bent:
        # The sink is one more token, with value 0: it must be counted for the deviations to have mean zero.
        c = c + missing[:, 0] * (o + centre).square().sum(-1)
    # Cancellation in a covariance is relative to the second moments it is the difference of.
    B, c = B + margin * v_size * k_size, c + 4 * margin * v_size**2
    rho = w.value + c.sqrt() * a if bent else (w.value**2 + c * a.square()).sqrt()
    return HeadPieces(P, W, delta2.sqrt(), a, block, rho, B, margin)


def _block_norms(
    g: Tensor, a: Tensor, v: Tensor, o: Tensor, P: Tensor, W: Tensor | None, w: HeadWeights, margin: float
) -> tuple[Tensor, Tensor]:
    """‖v_j − o_i‖² and P_ij‖W_V + s_ij(v_j − o_i)a_iᵀ‖, s the slope of the soft-cap, rounded up."""
    v2, o2 = v.square().sum(-1), o.square().sum(-1)
    spread = (v2[None, :] + o2[:, None]) * margin
    delta2 = (v2[None, :] + o2[:, None] - 2 * o @ v.mT).clamp_min(0).add_(spread)
    inner = g @ v.mT - (g * o).sum(-1, keepdim=True)
    slack = 2 * torch.linalg.vector_norm(g, dim=-1)[:, None] * (spread * margin).sqrt()
    s = a.square()[:, None]
    g2 = g.square().sum(-1)[:, None]
    if W is not None:
        slope = W / P.clamp_min(1e-300)
        inner, slack, s, g2 = inner * slope, slack * slope, s * slope.square(), g2 * slope.square()
    trace = 2 * (inner + slack) + s * delta2
    determinant = (g2 * delta2 * (1 + margin) - (inner.abs() - slack).clamp_min(0).square()).clamp_min(0)
    growth = (trace + (trace.square() + 4 * determinant).sqrt()) / 2
    return delta2, P * (w.value**2 + growth.clamp_min(0)).sqrt()


def _covariances(
    P: Tensor, W: Tensor, v: Tensor, k: Tensor, o: Tensor, bent: bool
) -> tuple[Tensor, Tensor]:
    """‖B_i‖ and c_i for every row, a block of rows at a time."""
    n, r, m = v.shape[0], v.shape[1], k.shape[1]
    vk, vv = (v[:, :, None] * k[:, None, :]).flatten(1), (v[:, :, None] * v[:, None, :]).flatten(1)
    rows = max(1, _SCRATCH // max(r * m, r * r))
    B, c = [], []
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        Wi, oi = W[part], o[part]
        cross = (Wi @ vk).reshape(-1, r, m) - oi[:, :, None] * (Wi @ k)[:, None, :]
        U = Wi.square() / P[part].clamp_min(1e-300) if bent else P[part]
        mean = oi[:, :, None] * (U @ v)[:, None, :]
        own = oi[:, :, None] * oi[:, None, :] * U.sum(-1)[:, None, None]
        B.append(matrix_norm_upper(cross))
        c.append(matrix_norm_upper((U @ vv).reshape(-1, r, r) - mean - mean.mT + own, symmetric=True))
    return torch.cat(B), torch.cat(c)
