"""Products of a layer's weights that certificates at several inputs share, as wide as all heads together: for one call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds.weights import LayerWeights, triangle


@dataclass(frozen=True, eq=False)
class Grams:
    """Products of the weights of every pair of heads (g, h), each (H, H, ·, ·), of a float64 layer."""

    out: Tensor  # W_O^gᵀ W_O^h
    keys: Tensor  # W_K^g W_K^hᵀ
    queries: Tensor  # τ²W_Q^g W_Q^hᵀ
    values: Tensor  # W_V^g W_V^hᵀ
    value_key: Tensor  # W_V^g W_K^hᵀ
    value_query: Tensor  # W_V^g τW_Q^hᵀ
    key_query: Tensor  # W_K^g τW_Q^hᵀ
    outputs: Tensor  # W_O^h, (H, d_out, dv)
    query_weights: Tensor  # τW_Q^hᵀ, (H, d, dk)
    key_weights: Tensor  # W_K^hᵀ likewise

    @classmethod
    def of(cls, layer: Attention) -> Grams:
        """Keys and values that several heads share are multiplied once."""
        H = layer.heads
        q, k, v = (t.reshape(count, -1, layer.width) for t, count in
                   ((layer.tau * layer.q, H), (layer.k, layer.kv_heads), (layer.v, layer.kv_heads)))  # fmt: skip

        def pairs(a: Tensor, b: Tensor) -> Tensor:
            gram = (a.flatten(0, 1) @ b.flatten(0, 1).mT).reshape(*a.shape[:2], *b.shape[:2]).transpose(1, 2)
            return gram.repeat_interleave(H // len(a), 0).repeat_interleave(H // len(b), 1)

        width = layer.value_width
        out = torch.eye(H * width, dtype=q.dtype, device=q.device) if layer.out is None else layer.out
        heads = out.mT.reshape(H, width, -1)
        sides = heads.mT, q.mT, k.mT.repeat_interleave(H // len(k), 0)
        return cls(pairs(heads, heads), pairs(k, k), pairs(q, q), pairs(v, v), pairs(v, k), pairs(v, q), pairs(k, q), *sides)


class Products:
    """What is derived from the weights of a float64 layer, when it is asked for."""

    def __init__(self, layer: Attention, weights: LayerWeights) -> None:
        self.layer, self.weights = layer, weights

    @cached_property
    def grams(self) -> Grams:
        """Inner products of the weights of every pair of heads."""
        return Grams.of(self.layer)

    @cached_property
    def root(self) -> Tensor | None:
        """R with RᵀR = W_OᵀW_O, at most as tall as wide; None without W_O."""
        return None if self.layer.out is None else triangle(self.layer.out)

    @cached_property
    def balanced(self) -> list[Tensor]:
        """Gram matrices (H·dv, H·dv) of U_h√S_h and Y_h√S_h, with W_O^hW_V^h = U_hS_hY_hᵀ."""
        layer, width = self.layer, self.layer.value_width
        values = layer.v.reshape(layer.kv_heads, width, -1).repeat_interleave(layer.heads // layer.kv_heads, 0)
        (Q, R), (Y, T) = (torch.linalg.qr(t) for t in (self.grams.outputs, values.mT))
        U, S, Z = torch.linalg.svd(R @ T.mT, full_matrices=False)
        sides = (t * S.sqrt()[:, None] for t in (Q @ U, Y @ Z.mT))
        padded = (torch.nn.functional.pad(t, (0, width - S.shape[-1])).transpose(0, 1).flatten(1) for t in sides)
        return [t.mT @ t for t in padded]
