"""Certified upper bounds for σ at one input, closed form and deterministic.

With v_j the values, o_i = Σ_j P_ij v_j, W = P times the slope of the soft-cap, a_i = τW_Kᵀq_i, b_j = τW_Qᵀk_j, one head is

    (J ε)_i = Σ_j P_ij W_V ε_j + Σ_j W_ij (v_j − o_i)(a_i·ε_j) + B_i ε_i        B_i = Σ_j W_ij (v_j − o_i) b_jᵀ

**Row–column**: σ ≤ √(max_j Σ_i P_ij ρ_i²) + max_i ‖B_i‖, with ρ_i² = ‖W_V‖² + c_i‖a_i‖² and c_i the norm of the covariance
of the values under row i (ρ_i = ‖W_V‖ + √c_i‖a_i‖ with a soft-cap).
**Block norms**: σ ≤ ‖N‖₂ with N_ij ≥ ‖∂o_i/∂x_j‖, where for a rank-one update M = W_V + δaᵀ, g = W_V a,

    ‖M‖² ≤ ‖W_V‖² + ½(t + √(t² + 4(‖g‖²‖δ‖² − (g·δ)²))),   t = 2 g·δ + ‖a‖²‖δ‖²

since MMᵀ = W_V W_Vᵀ + gδᵀ + δgᵀ + ‖a‖²δδᵀ and the last three terms live in the span of g and δ.
**Factored** (several heads): the map (dQ, dK, dV) ↦ heads is block diagonal, so heads enter by a maximum, not by a sum:

    σ ≤ ‖W_O‖( ‖W_V‖ max_h √(max_j Σ_i P_ij) + ‖W_K‖ max_h √(max_j Σ_i P_ij c_i‖q_i‖²) + τ‖W_Q‖ max_{h,i} ‖C_i‖ )

with C_i the covariance of values and keys. Computed in float64, one head at a time; proofs are in docs/theory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds.bound import OURS, Bound
from lipscope.bounds.head_core import HeadCore
from lipscope.bounds.spectral_upper import nonnegative_norm
from lipscope.bounds.weights import HeadWeights, LayerWeights, layer_weights

if TYPE_CHECKING:
    from lipscope.spectral.result import SpectralNorm

# heads·n·d_head³ up to which covariances are also taken through W_O.
_CHEAP = 1 << 25
# Tokens beyond which no certificate is computed unasked: a dozen n×n matrices stay below 2 GiB.
_LONGEST = 4096


def certified_upper(layer: Attention, X: Tensor, scope: str = "attention", *, gains: Tensor | None = None) -> Tensor:
    """A proven upper bound for σ at every input: the least of the certificates above.

    The value covers the rounding of its own float64 computation by four times ``head_core.rounding_margin``, relative; it
    is infinite when that margin exceeds 0.1, that is when float64 does not resolve the scores.

    Args:
        layer: the attention layer: any mask, biases, soft-cap, grouped queries, sinks.
        X: tokens (B, n, d).
        scope: ``"attention"`` (all heads and W_O) or ``"head"`` (each head before W_O).
        gains: (B, n), when token j of X is itself a function of its own input with Jacobian of norm gains_j: the bound is
            then for the composition.

    Returns:
        Float64 bounds of shape (B,), or (B, H) for scope ``"head"``.

    Cost: about 4·H·n²·d_head² + 16·H·n·d_head³ flops; memory a dozen n×n matrices, whatever the number of heads.

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
    values: list[Any] = []
    with torch.no_grad():
        precise = layer.to(torch.float64)
        for b, x in enumerate(X.detach().double()):
            one = precise.for_input(b)
            gain = x.new_ones(x.shape[0]) if gains is None else gains[b].to(x)
            if scope == "head":
                values.append([min(_one_head(one.head(h), x, w, gain).values()) for h, w in enumerate(weights.plain)])
            else:
                values.append(min(_whole_layer(one, x, weights, gain).values()))
    return torch.tensor(values, dtype=torch.float64, device=X.device)


def affordable(layer: Attention, n: int, result: SpectralNorm, inputs: int, scope: str) -> bool:
    """Whether the certificate is estimated to cost no more than the measurement that gave ``result`` (a flat batch).

    Small certificates (below about a tenth of a second) always are; an exact result needs none. Float64 counts twice, and
    small batched products run at half the speed of large ones.
    """
    if "probabilistic" not in result.upper_kind or n > _LONGEST or layer.rotary is not None:
        return False
    H, dk, d = layer.heads, layer.head_width, layer.width
    certificate = 4.0 * inputs * H * (4 * n**2 * dk**2 + 16 * n * dk**3)
    width = 3 * dk if scope == "head" else d
    pair = 4 * n * width * (layer.q.shape[0] + layer.k.shape[0] + layer.v.shape[0]) + 16 * H * n**2 * dk
    if scope != "head" and layer.out is not None:
        pair += 4 * n * layer.out.numel()
    steps = float(result.iterations.sum()) / (H if scope == "head" else 1)
    return certificate <= max(steps * pair, 1e9)


def local_bounds(layer: Attention, x: Tensor) -> list[Bound]:
    """Every certificate of the whole layer at tokens x (n, d), each as a ``Bound``."""
    weights = layer_weights(layer)
    with torch.no_grad():
        x = x.detach().double()
        candidates = _whole_layer(layer.to(torch.float64), x, weights, x.new_ones(x.shape[0]))
    given = {"n": x.shape[0], "heads": layer.heads}
    return [
        Bound(f"certificates.{name}", value, "local", "this input; any mask and score rule", OURS, given)
        for name, value in candidates.items()
    ]


def _one_head(single: Attention, x: Tensor, w: HeadWeights, gain: Tensor) -> dict[str, float]:
    core = HeadCore.at(single, x, w)
    B, c = core.covariance_norms(w)
    B = B * gain
    columns = float((core.rho(c, w).square() @ core.P * gain.square()).max())
    block = core.block_norms(w)[1] * gain
    return {
        "row_column": _round_up(math.sqrt(columns) + float(B.max()), core.margin),
        "block_norm": _round_up(nonnegative_norm(block + torch.diag(B)), core.margin),
    }


def _whole_layer(layer: Attention, x: Tensor, weights: LayerWeights, gain: Tensor) -> dict[str, float]:
    """Every certificate of the layer: row–column when it is cheap, block norms, and the factored one."""
    if layer.heads == 1:
        return _one_head(layer.head(0), x, weights.image[0], gain)
    total = _Heads(x, gain, images=layer.heads * x.shape[0] * layer.head_width**3 <= _CHEAP)
    for h, w in enumerate(weights.image):
        total.add(HeadCore.at(layer.head(h), x, w), w)
    return total.certificates(weights)


class _Heads:
    """Running sums and maxima over the heads: a fixed number of n×n matrices."""

    def __init__(self, x: Tensor, gain: Tensor, images: bool) -> None:
        n = x.shape[0]
        self.gain, self.images = gain, images
        self.blocks, self.means, self.spreads, self.most, self.weighted = (x.new_zeros(n, n) for _ in range(5))
        self.least = x.new_ones(n, n)
        self.B, self.rho, self.C = (x.new_zeros(n) for _ in range(3))
        self.row_column = self.columns = self.keys = self.margin = 0.0

    def add(self, core: HeadCore, w: HeadWeights) -> None:
        P, a = core.P, core.a[:, None]
        delta, block = core.block_norms(w)
        self.margin = max(self.margin, core.margin)
        self.blocks += block
        self.means.add_(P, alpha=w.value)
        self.spreads += delta.mul_(core.W).mul_(a)
        torch.minimum(self.least, P, out=self.least)
        torch.maximum(self.most, P, out=self.most)

        C, c = core.covariance_norms(None)
        self.columns = max(self.columns, float((P.sum(0) * self.gain.square()).max()))
        self.keys = max(self.keys, float(((c * core.q.square().sum(-1)) @ P * self.gain.square()).max()))
        self.C = torch.maximum(self.C, C)
        B = w.out * w.query * C
        if self.images:
            image, c = core.covariance_norms(w)
            B = torch.minimum(B, image)
            rho = core.rho(c, w)
            self.row_column += math.sqrt(float((rho.square() @ P * self.gain.square()).max()))
            self.weighted.addcmul_(rho[:, None], P)
            self.rho += rho
        self.B += B

    def certificates(self, weights: LayerWeights) -> dict[str, float]:
        # Σ_h P^h V_h in three ways: by the triangle inequality, by what all heads share, and through ‖W_O‖‖W_V‖.
        shared = self.means + self.least * (weights.total - sum(w.value for w in weights.image))
        mean = torch.minimum(torch.minimum(self.means, shared), weights.out * weights.values * self.most)
        # Σ_h W_O^h C^h W_Q^h is W_O times a block-diagonal matrix times W_Q.
        B = torch.minimum(self.B, weights.out * weights.queries * self.C) * self.gain
        N = torch.minimum(self.blocks, mean + self.spreads) * self.gain + torch.diag(B)
        factored = weights.values * math.sqrt(self.columns) + weights.keys * math.sqrt(self.keys)
        found = {
            "block_norm": nonnegative_norm(N),
            "factored": weights.out * factored + float(B.max()),
        }
        if self.images:
            # Cauchy–Schwarz over the heads with weights ρ: (Σ_h ρ_h e_h)² ≤ (Σ_h ρ_h)(Σ_h ρ_h e_h²).
            together = math.sqrt(float((self.rho @ self.weighted * self.gain.square()).max()))
            found["row_column"] = min(self.row_column, together) + float(B.max())
        return {name: _round_up(value, self.margin) for name, value in found.items()}


def _round_up(value: float, margin: float) -> float:
    return value * (1 + 4 * margin) if margin < 0.1 else math.inf
