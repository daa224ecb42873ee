"""L2 attention is Lipschitz on the whole space: Kim, Papamakarios, Mnih, *The Lipschitz Constant of Self-Attention* (2021).

L2 multi-head attention with tied queries and keys: P_ij ∝ exp(−‖W_Q x_i − W_Q x_j‖²/√(d/H)), head h is
Σ_j P_ij W_V A x_j with A = W_QᵀW_Q/√(d/H), then W_O over the joined heads. The bound needs no radius.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lipscope.attention.variants import L2Attention
from lipscope.bounds.bound import Bound

_SOURCE = "Kim, Papamakarios, Mnih, The Lipschitz Constant of Self-Attention, ICML 2021, Theorem 3.2 (power 4 of ‖W_Q‖)"


def l2mha(q: Sequence[Tensor], v: Sequence[Tensor], out: Tensor, n: int) -> Bound:
    """(√n/√(d/H))(4W₀((n−1)/e) + 1)(Σ_h ‖W_Q^h‖⁴‖W_V^h‖²)^½‖W_O‖, on the whole space, Frobenius norms, unmasked.

    W₀ is the Lambert function. The power 4 comes from A = W_QᵀW_Q/√(d/H), which is quadratic in W_Q; with power 2 the
    inequality is false. Nothing is assumed of the tokens.

    Args:
        q: W_Q of every head, (d/H, d).
        v: W_V of every head, (·, d), applied to A x.
        out: W_O, (d_out, joined heads).
        n: number of tokens.

    Returns:
        A set bound valid on the whole space.

    Raises:
        ValueError: when there are not as many value matrices as query matrices.
    """
    from scipy.special import lambertw

    if len(q) != len(v) or not q:
        raise ValueError(f"one W_V per W_Q is needed, got {len(q)} query and {len(v)} value matrices")
    d, heads = q[0].shape[1], len(q)

    def norm(M: Tensor) -> float:
        return float(torch.linalg.matrix_norm(M.detach().double(), 2))

    spread = 4 * float(lambertw((n - 1) / math.e).real) + 1
    weights = math.sqrt(sum(norm(Q) ** 4 * norm(V) ** 2 for Q, V in zip(q, v, strict=True)))
    value = math.sqrt(n) / math.sqrt(d / heads) * spread * weights * norm(out)
    return Bound("kim2021.l2mha", value, "set", f"L2 attention, all tokens, n = {n}, unmasked", _SOURCE, {"n": n})


def of_layer(layer: L2Attention, n: int) -> Bound:
    """``l2mha`` of a layer; without W_O the heads are joined as they are.

    Args:
        layer: the layer, unmasked.
        n: number of tokens.

    Returns:
        A set bound valid on the whole space.
    """
    out = torch.eye(layer.output_width, dtype=torch.float64) if layer.out is None else layer.out
    values, heads = layer.v.chunk(layer.heads), layer.q.chunk(layer.heads)
    # The theorem's √(d/H) is the width of a head: t = 1/√dk inside the layer, whatever d is.
    found = l2mha(heads, values, out, n)
    factor = math.sqrt(layer.width / layer.heads) * layer.t
    return Bound(found.name, found.value * factor, found.kind, found.holds_for, found.reference, found.inputs)
