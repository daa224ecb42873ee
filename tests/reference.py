"""An independent, slow, obvious attention in torch, and dense Jacobians by autograd: the oracle of the tests.

It shares no code with ``lipscope``: scores, masks and heads are written out, keys are repeated for grouped queries, hidden
rows are zeroed by hand.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention(layer, X: Tensor, visible: Tensor, additive: Tensor | float = 0.0) -> Tensor:
    """The layer on one input (n, d), heads concatenated and through W_O; ``visible`` is (n, n) or (H, n, n)."""
    outputs = [head(layer, h, X, visible, additive) for h in range(layer.heads)]
    joined = torch.cat(outputs, dim=-1)
    if layer.out is not None:
        joined = joined @ layer.out.T
    return joined + (0 if layer.out_bias is None else layer.out_bias)


def head(layer, h: int, X: Tensor, visible: Tensor, additive: Tensor | float = 0.0) -> Tensor:
    """Head h on one input, before W_O."""
    g = h // (layer.heads // layer.kv_heads)
    dk, dv = layer.q.shape[0] // layer.heads, layer.v.shape[0] // layer.kv_heads

    def project(W, b, i, width):
        part = slice(i * width, (i + 1) * width)
        return X @ W[part].T + (0 if b is None else b[part])

    q, k = project(layer.q, layer.q_bias, h, dk), project(layer.k, layer.k_bias, g, dk)
    v = project(layer.v, layer.v_bias, g, dv)
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


def jacobian(function, X: Tensor) -> Tensor:
    """Dense Jacobian (M, N) of a function of one input."""
    J = torch.autograd.functional.jacobian(function, X)
    return J.reshape(-1, X.numel())
