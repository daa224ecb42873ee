"""Certified upper bounds for σ at one input, closed form and deterministic.

With v_j the values, o_i = Σ_j P_ij v_j, W = P times the slope of the soft-cap, and R_i the rotations of rotary
embeddings (the identity without), a_ij = W_KᵀR_jᵀq_i and b_ij = τW_QᵀR_iᵀk_j for turned queries and keys, one head is

    (J ε)_i = Σ_j P_ij W_V ε_j + Σ_j W_ij (v_j − o_i)(a_ij·ε_j) + B_i ε_i        B_i = Σ_j W_ij (v_j − o_i) b_ijᵀ

**Row–column**: σ ≤ √(max_j Σ_i P_ij ρ_i²) + max_i ‖B_i‖, with ρ_i² = ‖W_V‖² + c_i‖a_i‖² and c_i the norm of the
covariance of the values under row i (ρ_i = ‖W_V‖ + √c_i max_j‖a_ij‖ with a soft-cap or rotary embeddings, where a_ij
depends on j).
**Block norms**: σ ≤ ‖N‖₂ with N_ij ≥ ‖∂o_i/∂x_j‖, where for a rank-one update M = W_V + δaᵀ, g = W_V a,

    ‖M‖² ≤ ‖W_V‖² + ½(t + √(t² + 4(‖g‖²‖δ‖² − (g·δ)²))),   t = 2 g·δ + ‖a‖²‖δ‖²

since MMᵀ = W_V W_Vᵀ + gδᵀ + δgᵀ + ‖a‖²δδᵀ and the last three terms live in the span of g and δ.
**Row Gram**: block norms with the directions of the blocks of a row kept, see ``row_gram``.
**Factored** (several heads): heads enter by a maximum, not by a sum, see ``several_heads``.

Computed in float64, one head at a time, for long sequences a strip of rows at a time (``strips``); proofs are in
docs/theory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds import strips
from lipscope.bounds.bound import OURS, Bound, bound
from lipscope.bounds.head_core import HeadCore
from lipscope.bounds.row_gram import row_gram
from lipscope.bounds.several_heads import several_heads
from lipscope.bounds.spectral_upper import nonnegative_norm
from lipscope.bounds.weights import HeadWeights, LayerWeights, layer_weights

if TYPE_CHECKING:
    from lipscope.spectral.result import SpectralNorm


def certified_upper(
    layer: Attention, X: Tensor, scope: str = "attention", *, gains: Tensor | None = None, height: int | None = None
) -> Tensor:
    """A proven upper bound for σ at every input: the least of the certificates above.

    The value covers the rounding of its own float64 computation by four times ``head_core.rounding_margin``, relative; it
    is infinite when that margin exceeds 0.1, that is when float64 does not resolve the scores.

    Args:
        layer: the attention layer: any mask, biases, soft-cap, grouped queries, sinks, rotary embeddings.
        X: tokens (B, n, d).
        scope: ``"attention"`` (all heads and W_O) or ``"head"`` (each head before W_O).
        gains: (B, n), when token j of X is itself a function of its own input with Jacobian of norm gains_j: the bound is
            then for the composition.
        height: rows of the scores that are computed at a time. By default all of them up to 2,048 tokens, which takes a
            dozen n×n matrices; beyond, as many as keep to a fixed memory.

    Returns:
        Float64 bounds of shape (B,), or (B, H) for scope ``"head"``.

    Cost: about 6·H·n²·d_head² + 16·H·n·d_head³ flops (10 instead of 6 with rotary embeddings); beyond 2,048
    tokens half of the first under a causal mask, up to 40 passes over the scores more, and memory that grows like n.

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
                values.append(
                    [min(_one_head(one.head(h), x, w, gain, height).values()) for h, w in enumerate(weights.plain)]
                )
            else:
                values.append(min(_whole_layer(one, x, weights, gain, height).values()))
    return torch.tensor(values, dtype=torch.float64, device=X.device)


def affordable(layer: Attention, n: int, result: SpectralNorm, inputs: int, scope: str) -> bool:
    """Whether the certificate is estimated to cost no more than the measurement that gave ``result`` (a flat batch).

    Small certificates (below about a tenth of a second) always are; an exact result needs none. Float64 counts twice, and
    small batched products run at half the speed of large ones.
    """
    if "probabilistic" not in result.upper_kind:
        return False
    H, dk, d = layer.heads, layer.head_width, layer.width
    pairs = 10 if layer.rotary is not None else 6
    certificate = 4.0 * inputs * H * (pairs * n**2 * dk**2 + 16 * n * dk**3)
    if n > strips.DENSE:
        # The passes of power steps over the scores, each a handful of products of length dk and the exponentials.
        certificate += 4.0 * inputs * H * 40 * n**2 * (8 * dk + 32)
    width = 3 * dk if scope == "head" else d
    pair = 4 * n * width * (layer.q.shape[0] + layer.k.shape[0] + layer.v.shape[0]) + 16 * H * n**2 * dk
    if scope != "head" and layer.out is not None:
        pair += 4 * n * layer.out.numel()
    steps = float(result.iterations.sum()) / (H if scope == "head" else 1)
    return certificate <= max(steps * pair, 1e9)


@bound("certificates.factored", needs="x")
@bound("certificates.row_gram", needs="x", without="several_heads")
@bound("certificates.block_norm", needs="x")
@bound("certificates.row_column", needs="x")
def local_bounds(layer: Attention, x: Tensor, *, height: int | None = None) -> list[Bound]:
    """Every certificate of the whole layer at tokens x (n, d), each as a ``Bound``; ``height`` as in ``certified_upper``."""
    weights = layer_weights(layer)
    with torch.no_grad():
        x = x.detach().double()
        candidates = _whole_layer(layer.to(torch.float64), x, weights, x.new_ones(x.shape[0]), height)
    given = {"n": x.shape[0], "heads": layer.heads}
    return [
        Bound(f"certificates.{name}", value, "local", "this input; any mask and score rule", OURS, given)
        for name, value in candidates.items()
    ]


def _one_head(single: Attention, x: Tensor, w: HeadWeights, gain: Tensor, height: int | None = None) -> dict[str, float]:
    height = _height(len(x), 1, height)
    if height < len(x):
        found, margin = strips.one_head_strips(single, x, w, gain, height)
        return {name: _round_up(value, margin) for name, value in found.items()}
    core = HeadCore.at(single, x, w)
    B, c = core.covariance_norms(w)
    columns = float((core.rho(c, w).square() @ core.P * gain.square()).max())
    block = core.block_norms(w)[1]
    return {
        "row_column": _round_up(math.sqrt(columns) + float((B * gain).max()), core.margin),
        "block_norm": _round_up(nonnegative_norm(block * gain + torch.diag(B * gain)), core.margin),
        "row_gram": _round_up(row_gram(core, w, block, B, gain), core.margin),
    }


def _whole_layer(
    layer: Attention, x: Tensor, weights: LayerWeights, gain: Tensor, height: int | None = None
) -> dict[str, float]:
    """Every certificate of the layer."""
    if layer.heads == 1:
        return _one_head(layer.head(0), x, weights.image[0], gain, height)
    height = _height(len(x), layer.heads, height)
    if height < len(x):
        found, margin = strips.several_heads_strips(layer, x, weights, gain, height)
    else:
        found, margin = several_heads(layer, x, weights, gain)
    return {name: _round_up(value, margin) for name, value in found.items()}


def _height(n: int, heads: int, asked: int | None) -> int:
    return asked or (n if n <= strips.DENSE else strips.strip_height(n, heads))


def _round_up(value: float, margin: float) -> float:
    return value * (1 + 4 * margin) if margin < 0.1 else math.inf
