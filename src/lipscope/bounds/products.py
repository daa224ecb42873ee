"""Products of a layer's weights that certificates at several inputs share, as wide as all heads together: for one call."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds.weights import LayerWeights, triangle

# Row panels in which a symmetric product is computed: with four, five eighths of the whole.
_PANELS = 4


class Products:
    """What is derived from the weights of a float64 layer, when it is asked for; pairs of heads (g, h) are (H, H, ·, ·)."""

    def __init__(self, layer: Attention, weights: LayerWeights) -> None:
        self.layer, self.weights = layer, weights
        H, width, out = layer.heads, layer.value_width, layer.out
        out = torch.eye(H * width, dtype=layer.q.dtype, device=layer.q.device) if out is None else out
        self.sides = {
            "q": (layer.tau * layer.q).reshape(H, -1, layer.width),
            "k": layer.k.reshape(layer.kv_heads, -1, layer.width),
            "v": layer.v.reshape(layer.kv_heads, -1, layer.width),
            "o": out.mT.reshape(H, width, -1),
        }
        self.outputs, self.query_weights = self.sides["o"].mT, self.sides["q"].mT  # W_O^h (H, d_out, dv), τW_Q^hᵀ (H, d, dk)
        self.key_weights = self._each(self.sides["k"]).mT  # W_K^hᵀ likewise
        self._known: dict[str, Tensor] = {}

    def _each(self, t: Tensor, dim: int = 0) -> Tensor:
        """Of keys and values that several heads share, one for every head."""
        shared = self.layer.heads // t.shape[dim]
        return t if shared == 1 else t.repeat_interleave(shared, dim)

    def pairs(self, names: str) -> Tensor:
        """``"oo"``: W_O^gᵀW_O^h, ``"kk"``: W_K^gW_K^hᵀ, ``"vq"``: W_V^g·τW_Q^hᵀ, and so on, kept for the next time."""
        if names in self._known:
            return self._known[names]
        a, b = (self.sides[name] for name in names)
        left, right = a.flatten(0, 1), b.flatten(0, 1).mT
        # What several heads share is multiplied once, and of a symmetric product little more than one half.
        gram, step = left.new_empty(len(left), right.shape[1]), -(-len(left) // _PANELS) if a is b else len(left)
        for start in range(0, len(left), step):
            rows, rest = slice(start, start + step), slice(start, None)
            gram[rows, rest] = left[rows] @ right[:, rest]
            if a is b:
                gram[rest, rows] = gram[rows, rest].mT
        heads = gram.reshape(*a.shape[:2], *b.shape[:2]).transpose(1, 2).contiguous()
        self._known[names] = self._each(self._each(heads), 1)
        return self._known[names]

    @cached_property
    def root(self) -> Tensor | None:
        """R with RᵀR = W_OᵀW_O, at most as tall as wide; None without W_O."""
        return None if self.layer.out is None else triangle(self.layer.out)

    @cached_property
    def balanced(self) -> list[Tensor]:
        """Gram matrices (H·dv, H·dv) of U_h√S_h and Y_h√S_h, with W_O^hW_V^h = U_hS_hY_hᵀ."""
        (Q, R), (Y, T) = (torch.linalg.qr(t) for t in (self.outputs, self._each(self.sides["v"]).mT))
        U, S, Z = torch.linalg.svd(R @ T.mT, full_matrices=False)
        sides = (t * S.sqrt()[:, None] for t in (Q @ U, Y @ Z.mT))
        padded = (torch.nn.functional.pad(t, (0, self.layer.value_width - S.shape[-1])) for t in sides)
        return [t.mT @ t for t in (t.transpose(0, 1).flatten(1) for t in padded)]
