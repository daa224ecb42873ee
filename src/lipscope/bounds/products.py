"""Products of a layer's weights that certificates at several inputs share, as wide as all heads together: for one call."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds.weights import LayerWeights

# Least rows of a panel of a symmetric product; with four panels five eighths of it are computed.
PANEL = 64


class Products:
    """What is derived from the weights of a float64 layer, when it is asked for; pairs of heads (g, h) are (H, H, ·, ·)."""

    def __init__(self, layer: Attention, weights: LayerWeights) -> None:
        self.layer, self.weights = layer, weights
        self._known: dict[str, Tensor] = {}

    @cached_property
    def _sides(self) -> dict[str, Tensor]:
        layer, (H, shared, width) = self.layer, (self.layer.heads, self.layer.kv_heads, self.layer.value_width)
        out = torch.eye(H * width, dtype=layer.q.dtype, device=layer.q.device) if layer.out is None else layer.out
        sides = {"q": (layer.tau * layer.q, H), "k": (layer.k, shared), "v": (layer.v, shared), "o": (out.mT, H)}
        return {name: t.unflatten(0, (count, -1)) for name, (t, count) in sides.items()}

    def side(self, name: str) -> Tensor:
        """The weights of every head, also where several share them, (H, ·, d): τW_Q, W_K, W_V or W_Oᵀ."""
        t = self._sides[name]
        return t if len(t) == self.layer.heads else t.repeat_interleave(self.layer.heads // len(t), 0)

    def pairs(self, names: str) -> Tensor:
        """``"oo"``: W_O^gᵀW_O^h, ``"kk"``: W_K^gW_K^hᵀ, ``"vq"``: W_V^g·τW_Q^hᵀ, and so on, kept for the next time."""
        if names in self._known:
            return self._known[names]
        a, b = (self._sides[name] for name in names)
        left, right = a.flatten(0, 1), b.flatten(0, 1).mT
        # What several heads share is multiplied once, and of a symmetric product little more than one half.
        gram, step = left.new_empty(len(left), right.shape[1]), max(PANEL, len(left) // 4) if a is b else len(left)
        for start in range(0, len(left), step):
            rows, rest = slice(start, start + step), slice(start + step, None)
            gram[rows, start:] = left[rows] @ right[:, start:]
            if a is b:
                gram[rest, rows] = gram[rows, rest].mT
        heads = gram.reshape(*a.shape[:2], *b.shape[:2]).transpose(1, 2).contiguous()
        for dim, shared in enumerate(self.layer.heads // count for count in heads.shape[:2]):
            heads = heads if shared == 1 else heads.repeat_interleave(shared, dim)
        return self._known.setdefault(names, heads)

    @cached_property
    def root(self) -> Tensor | None:
        """The upper triangle R with RᵀR = W_OᵀW_O, at most as tall as wide; None without W_O."""
        return None if self.layer.out is None else torch.linalg.qr(self.layer.out, mode="r").R
