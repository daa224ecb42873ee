"""An independent, slow, obvious attention in torch, and dense Jacobians by autograd: the oracle of the tests.

It shares no code with ``lipscope``: scores, masks and heads are written out, keys are repeated for grouped queries, hidden
rows are zeroed by hand.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention(layer, X: Tensor, visible: Tensor, additive: Tensor | float = 0.0, item: int = 0) -> Tensor:
    """The layer on one input (n, d), heads concatenated and through W_O; ``visible`` is (n, n) or (H, n, n).

    ``item`` is the place in the batch, for rotary tables that differ between inputs.
    """
    outputs = [head(layer, h, X, visible, additive, item) for h in range(layer.heads)]
    joined = torch.cat(outputs, dim=-1)
    if layer.out is not None:
        joined = joined @ layer.out.T
    return joined + (0 if layer.out_bias is None else layer.out_bias)


def head(layer, h: int, X: Tensor, visible: Tensor, additive: Tensor | float = 0.0, item: int = 0) -> Tensor:
    """Head h on one input, before W_O."""
    g = h // (layer.heads // layer.kv_heads)
    dk, dv = layer.q.shape[0] // layer.heads, layer.v.shape[0] // layer.kv_heads

    def project(W, b, i, width):
        part = slice(i * width, (i + 1) * width)
        return X @ W[part].T + (0 if b is None else b[part])

    q, k = project(layer.q, layer.q_bias, h, dk), project(layer.k, layer.k_bias, g, dk)
    v = project(layer.v, layer.v_bias, g, dv)
    if layer.rotary is not None:
        R = rotations(layer.rotary, X.shape[0], dk, item)
        q, k = torch.einsum("nab,nb->na", R, q), torch.einsum("nab,nb->na", R, k)
    scale = dk**-0.5 if layer.scale is None else layer.scale
    s = scale * torch.einsum("id,jd->ij", q, k)
    if layer.softcap is not None:
        s = layer.softcap * torch.tanh(s / layer.softcap)
    if layer.bias is not None:
        s = s + (layer.bias if layer.bias.ndim == 2 else layer.bias.reshape(-1, *layer.bias.shape[-2:])[h])
    s = s + (additive[h].to(s) if isinstance(additive, Tensor) else additive)
    seen = visible if visible.ndim == 2 else visible[h]
    rows = []
    for i in range(X.shape[0]):
        columns = seen[i].nonzero()[:, 0]
        if len(columns) == 0:
            rows.append(0 * X[i].sum() + torch.zeros(dv, dtype=X.dtype))
            continue
        logits = s[i, columns]
        if layer.sinks is not None:
            logits = torch.cat([logits, layer.sinks[h : h + 1]])
        p = torch.softmax(logits, dim=0)[: len(columns)]
        rows.append(p @ v[columns])
    return torch.stack(rows)


def rotations(rotary, n: int, dk: int, item: int = 0) -> Tensor:
    """Rotary embeddings as explicit matrices (n, dk, dk), entry by entry."""
    cos, sin = (t if t.ndim == 2 else t[item if t.shape[0] > 1 else 0] for t in (rotary.cos, rotary.sin))
    r = cos.shape[1]
    R = torch.eye(dk, dtype=cos.dtype).repeat(n, 1, 1)
    for i in range(n):
        for m in range(r // 2):
            a, b = (2 * m, 2 * m + 1) if rotary.interleaved else (m, m + r // 2)
            R[i, a, a] = R[i, b, b] = cos[i, a]
            R[i, a, b], R[i, b, a] = -sin[i, a], sin[i, a]
    return R


def jacobian(function, X: Tensor) -> Tensor:
    """Dense Jacobian (M, N) of a function of one input."""
    J = torch.autograd.functional.jacobian(function, X, vectorize=True)
    return J.reshape(-1, X.numel())
