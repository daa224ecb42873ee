"""Weights in the layouts that others store, as the fields of an ``Attention``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def torch_weights(module: nn.MultiheadAttention) -> dict[str, Any]:
    """Copies of the weights of an ``nn.MultiheadAttention``, as arguments of ``Attention.from_fused``.

    Raises:
        TypeError: when it is another module.
        ValueError: when it is not plain self-attention, or has dropout switched on.
    """
    if not isinstance(module, nn.MultiheadAttention):
        raise TypeError(f"from_torch takes an nn.MultiheadAttention, got {type(module).__name__}")
    if not module._qkv_same_embed_dim:
        raise ValueError("from_torch needs self-attention: kdim and vdim must equal embed_dim")
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError("from_torch does not support add_bias_kv or add_zero_attn")
    if module.training and module.dropout > 0:
        raise ValueError(f"module is in training mode with dropout {module.dropout}: call .eval() first")
    assert module.in_proj_weight is not None
    return {
        "qkv": _copy(module.in_proj_weight),
        "out": _copy(module.out_proj.weight),
        "heads": module.num_heads,
        "qkv_bias": None if module.in_proj_bias is None else _copy(module.in_proj_bias),
        "out_bias": None if module.out_proj.bias is None else _copy(module.out_proj.bias),
    }


def split_fused(
    qkv: Tensor, out: Tensor | None, heads: int, kv_heads: int, qkv_bias: Tensor | None, transposed: bool
) -> dict[str, Any]:
    """Queries, keys and values out of one stacked matrix; see ``Attention.from_fused``."""
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    if transposed:
        qkv, out = qkv.mT, None if out is None else out.mT
    parts = heads + 2 * (kv_heads or heads)
    if qkv.shape[0] % parts:
        raise ValueError(
            f"qkv has {qkv.shape[0]} output rows, which {parts} heads (queries, keys and values) do not divide"
            + ("" if transposed else "; GPT-2's Conv1D weights need transposed=True")
        )
    dh = qkv.shape[0] // parts
    sizes = [heads * dh, (kv_heads or heads) * dh, (kv_heads or heads) * dh]
    q, k, v = qkv.split(sizes)
    if qkv_bias is not None and qkv_bias.shape != (qkv.shape[0],):
        raise ValueError(f"qkv_bias has shape {tuple(qkv_bias.shape)}, but qkv has {qkv.shape[0]} output rows")
    biases = (None, None, None) if qkv_bias is None else qkv_bias.split(sizes)
    return {"q": q, "k": k, "v": v, "out": out, "q_bias": biases[0], "k_bias": biases[1], "v_bias": biases[2]}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
