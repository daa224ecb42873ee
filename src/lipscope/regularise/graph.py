"""A map evaluated once, with its graph kept: products with J for the solver, and ⟨u, Jv⟩ with a graph to the weights.

    Jᵀg = ∂⟨g, f(X)⟩/∂X        Jv = ∂⟨Jᵀg, v⟩/∂g        ⟨u, Jv⟩ = ⟨∂⟨u, f(X)⟩/∂X, v⟩

``AutodiffOperator`` does the same with checks of the map and frozen weights; inside a training step there is time for
neither the checks nor a second evaluation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.spectral.autodiff import TensorMap, differentiable_attention
from lipscope.spectral.operator import Operator


class GraphOperator(Operator):
    """Input Jacobian of ``function`` at X (B, …), on one graph that also leads to the parameters inside the function.

    Args:
        function: maps (B, …) to (B, …), items independently, by operations with second derivatives.
        X: the point; no gradient flows into it.
    """

    def __init__(self, function: TensorMap, X: Tensor) -> None:
        self.batch, self.dtype, self.device = X.shape[0], X.dtype, X.device
        with differentiable_attention(), torch.enable_grad():
            self._X = X.detach().clone().requires_grad_()
            self._Y = function(self._X)
            self._g = torch.zeros_like(self._Y).requires_grad_()
            (self._pullback,) = torch.autograd.grad(self._Y, self._X, self._g, create_graph=True)
        self.input_shape, self.output_shape = tuple(X.shape[1:]), tuple(self._Y.shape[1:])

    def matvec(self, u: Tensor) -> Tensor:
        """J·u."""
        (product,) = torch.autograd.grad(self._pullback, self._g, u.reshape(self._X.shape), retain_graph=True)
        return product.reshape(self.batch, -1)

    def rmatvec(self, g: Tensor) -> Tensor:
        """Jᵀ·g."""
        (product,) = torch.autograd.grad(self._Y, self._X, g.reshape(self._Y.shape), retain_graph=True)
        return product.reshape(self.batch, -1)

    def select(self, items: Tensor) -> Operator:
        """The listed items, by products with the whole batch."""
        return _Part(self, items)

    def bilinear(self, left: Tensor, right: Tensor) -> Tensor:
        """⟨u, J v⟩ of every item, (B,), differentiable in the parameters; u and v are held fixed."""
        with torch.enable_grad():
            cotangent = left.detach().reshape(self._Y.shape).to(self._Y)
            (slope,) = torch.autograd.grad(self._Y, self._X, cotangent, create_graph=True)
            return (slope * right.detach().reshape(slope.shape).to(slope)).flatten(1).sum(-1)


class _Part(Operator):
    """Some items, each at most once, of a graph operator."""

    def __init__(self, parent: GraphOperator, items: Tensor) -> None:
        self._parent, self._items, self.batch = parent, items, int(items.numel())
        self.input_shape, self.output_shape = parent.input_shape, parent.output_shape
        self.dtype, self.device = parent.dtype, parent.device

    def matvec(self, u: Tensor) -> Tensor:
        return self._parent.matvec(self._spread(u))[self._items]

    def rmatvec(self, g: Tensor) -> Tensor:
        return self._parent.rmatvec(self._spread(g))[self._items]

    def select(self, items: Tensor) -> Operator:
        return _Part(self._parent, self._items[items])

    def _spread(self, x: Tensor) -> Tensor:
        full = x.new_zeros(self._parent.batch, x.shape[1])
        full[self._items] = x
        return full
