"""The Jacobian of a variant: token-wise derivatives of the features around the n×n core, all in closed form.

J·u = W_O · DO(Dq̃·u, Dk̃·u, Dṽ·u)        Jᵀ·g = Dq̃ᵀ gq + Dk̃ᵀ gk + Dṽᵀ gv,   (gq, gk, gv) = DOᵀ(W_Oᵀ g)
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.attention.operator import check_finite, rounding_allowance
from lipscope.attention.variants.layer import Variant
from lipscope.spectral.operator import Operator


class VariantOperator(Operator):
    """Input Jacobian of a variant (all heads and W_O) at tokens X of shape (B, n, d)."""

    def __init__(self, layer: Variant, X: Tensor) -> None:
        if X.shape[-1] != layer.width:
            raise ValueError(f"X has tokens of width {X.shape[-1]}, but the layer takes width {layer.width}")
        with torch.no_grad():
            self.features = layer.features(X)
            self.core = layer.linearise(*(feature.value for feature in self.features))
        check_finite(self.core)
        self.layer, self.X = layer, X
        self.batch, self.n = X.shape[0], X.shape[1]
        self.input_shape, self.output_shape = (self.n, layer.width), (self.n, layer.output_width)
        self.dtype, self.device = layer.dtype, layer.device
        self._rounding = rounding_allowance(self.core, layer.width)

    @property
    def rounding(self) -> float:
        """Allowance that grows with the scores, whose rounding the exponential turns into relative error."""
        return self._rounding

    def matvec(self, u: Tensor) -> Tensor:
        """J·u for u of shape (B, n·d)."""
        with torch.no_grad():
            U = u.reshape(self.batch, self.n, self.layer.width)
            q, k, v = self.features
            return self.layer.merge_heads(self.core.jvp(q.jvp(U), k.jvp(U), v.jvp(U))).flatten(1)

    def rmatvec(self, g: Tensor) -> Tensor:
        """Jᵀ·g for g of shape (B, n·d_out)."""
        with torch.no_grad():
            tokens = g.reshape(self.batch, self.n, self.layer.output_width)
            joined = tokens if self.layer.out is None else tokens @ self.layer.out
            split = joined.reshape(self.batch, self.n, self.layer.heads, -1).transpose(1, 2).contiguous()
            parts = zip(self.features, self.core.vjp(split), strict=True)
            return torch.stack([feature.vjp(cotangent) for feature, cotangent in parts]).sum(0).flatten(1)

    def select(self, items: Tensor) -> VariantOperator:
        """Keep the listed inputs."""
        kept = object.__new__(VariantOperator)
        kept.__dict__.update(self.__dict__)
        q, k, v = self.features
        kept.features = (q.select(items), k.select(items), v.select(items))
        kept.core, kept.X, kept.batch = self.core.select(items), self.X[items], int(items.numel())
        return kept
