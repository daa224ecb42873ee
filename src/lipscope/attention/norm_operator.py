"""Scope ``norm+attention``: the Jacobian of u ↦ attention(Norm(u)), J = J_attention(Norm(u)) · D Norm(u)."""

from __future__ import annotations

from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.norms import Normalisation, NormLinearisation
from lipscope.attention.operator import AttentionOperator
from lipscope.spectral.operator import Operator


class NormAttentionOperator(Operator):
    """Input Jacobian of a pre-norm attention layer, without residual, at tokens u of shape (B, n, d)."""

    def __init__(self, layer: Attention, norm: Normalisation, X: Tensor) -> None:
        self._setup(AttentionOperator(layer, norm(X)), norm.linearise(X))

    def _setup(self, attention: AttentionOperator, norm: NormLinearisation) -> None:
        self.attention, self.norm = attention, norm
        self.batch = attention.batch
        self.input_shape, self.output_shape = attention.input_shape, attention.output_shape
        self.dtype, self.device = attention.dtype, attention.device

    @property
    def rounding(self) -> float:
        """See ``AttentionOperator.rounding``; the normalisation is one more product."""
        return 2 * self.attention.rounding

    def matvec(self, u: Tensor) -> Tensor:
        """J·u for u of shape (B, n·d)."""
        return self.attention.matvec(self.norm.jvp(u.reshape(self.batch, *self.input_shape)).flatten(1))

    def rmatvec(self, g: Tensor) -> Tensor:
        """Jᵀ·g for g of shape (B, n·d_out)."""
        return self.norm.vjp(self.attention.rmatvec(g).reshape(self.batch, *self.input_shape)).flatten(1)

    def select(self, items: Tensor) -> NormAttentionOperator:
        """Keep the listed inputs."""
        kept = object.__new__(NormAttentionOperator)
        kept._setup(self.attention.select(items), self.norm.select(items))
        return kept
