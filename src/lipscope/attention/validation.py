"""What an ``Attention`` refuses: shapes, types and numbers that do not fit together."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lipscope.attention.rotary import Rotary

if TYPE_CHECKING:
    from lipscope.attention.layer import Attention


def validate(layer: Attention) -> None:
    """Refuse inconsistent shapes, naming the argument and the two sizes that disagree."""
    for name in ("q", "k", "v"):
        if not isinstance(getattr(layer, name), Tensor):
            raise TypeError(f"{name} must be a torch tensor, got {type(getattr(layer, name)).__name__}")
    for name in ("heads", "kv_heads"):
        if not isinstance(getattr(layer, name), int):
            raise TypeError(f"{name} must be an integer, got {getattr(layer, name)!r}")
    tensors = {
        field.name: value for field in dataclasses.fields(layer) if isinstance(value := getattr(layer, field.name), Tensor)
    }
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
        if (tensor.dtype, tensor.device) != (layer.dtype, layer.device):
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, but q is {layer.dtype} on {layer.device}")
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name} holds NaN or infinite values")
    for name in ("q", "k", "v"):
        if tensors[name].ndim != 2 or 0 in tensors[name].shape:
            raise ValueError(f"{name} must be a non-empty matrix, got shape {tuple(tensors[name].shape)}")
        if tensors[name].shape[1] != layer.width:
            raise ValueError(f"{name} takes tokens of width {tensors[name].shape[1]}, but q takes width {layer.width}")
    if layer.heads < 1:
        raise ValueError(f"heads must be at least 1, got {layer.heads}")
    if layer.kv_heads < 1 or layer.heads % layer.kv_heads:
        raise ValueError(f"kv_heads = {layer.kv_heads} must be a positive divisor of heads = {layer.heads}")
    for name, count in (("q", layer.heads), ("k", layer.kv_heads), ("v", layer.kv_heads)):
        if tensors[name].shape[0] % count:
            raise ValueError(f"{name} has {tensors[name].shape[0]} rows, which {count} heads do not divide")
    if layer.k.shape[0] != layer.kv_heads * layer.head_width:
        raise ValueError(
            f"k has {layer.k.shape[0]} rows, but kv_heads × query width = {layer.kv_heads} × {layer.head_width} "
            f"= {layer.kv_heads * layer.head_width}"
        )
    joined = layer.heads * layer.value_width
    if layer.out is not None and (layer.out.ndim != 2 or layer.out.shape[1] != joined):
        raise ValueError(f"out has shape {tuple(layer.out.shape)}, but the heads joined have width {joined}")
    expected = {"q_bias": layer.q.shape[0], "k_bias": layer.k.shape[0], "v_bias": layer.v.shape[0]}
    expected |= {"out_bias": layer.output_width, "sinks": layer.heads}
    for name, size in expected.items():
        if name in tensors and tensors[name].shape != (size,):
            raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, but ({size},) is needed")
    if layer.bias is not None:
        shape = tuple(layer.bias.shape)
        if len(shape) not in (2, 3, 4) or shape[-1] != shape[-2]:
            raise ValueError(f"bias must be (n, n), (heads, n, n) or (B, heads, n, n), got {shape}")
        if len(shape) > 2 and shape[-3] not in (1, layer.heads):
            raise ValueError(f"bias is for {shape[-3]} heads, but the layer has heads = {layer.heads}")
    if layer.rotary is not None:
        if not isinstance(layer.rotary, Rotary):
            raise TypeError(f"rotary must be a lipscope.Rotary, got {type(layer.rotary).__name__}")
        if layer.rotary.width > layer.head_width:
            raise ValueError(f"rotary turns {layer.rotary.width} coordinates, but queries have width {layer.head_width}")
        if (layer.rotary.dtype, layer.rotary.cos.device) != (layer.dtype, layer.device):
            raise ValueError(
                f"rotary is {layer.rotary.dtype} on {layer.rotary.cos.device}, but q is {layer.dtype} on {layer.device}"
            )
    if layer.softcap is not None and not 0 < layer.softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite (None for no cap), got {layer.softcap}")
    if layer.scale is not None and not math.isfinite(layer.scale):
        raise ValueError(f"scale must be finite, got {layer.scale}")
