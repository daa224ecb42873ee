"""σ as a penalty: ⟨u, J(X; W) v⟩ with the top singular pair (u, v) found first and then held fixed.

Where σ is simple, dσ/dW = d⟨u, J v⟩/dW: the pair needs no gradient of its own. A pair that is only nearly converged gives a
lower bound of σ and its gradient.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from lipscope.attention.layer import Attention
from lipscope.attention.operator import AttentionOperator
from lipscope.attention.variants.layer import Variant
from lipscope.facade import check_tokens
from lipscope.regularise.differentiable import bilinear
from lipscope.regularise.graph import GraphOperator
from lipscope.regularise.modes import evaluating, full_precision
from lipscope.spectral.autodiff import TensorMap
from lipscope.spectral.golub_kahan import GolubKahan
from lipscope.spectral.operator import Operator

# Good enough for a direction of descent, at a few products per step.
SOLVER = GolubKahan(rtol=1e-3, interval=None, max_steps=100, vectors=True)


def spectral_penalty(attention: Attention | Variant | TensorMap, X: Tensor, *, solver: GolubKahan | None = None) -> Tensor:
    """σ(X) = ‖J(X)‖₂ as a scalar with a gradient in the weights, the mean over inputs for a batch.

    The tokens count as data: no gradient flows into X. Inside autocast, too, everything is computed in full precision.

    Args:
        attention: an ``Attention`` or ``Variant`` whose tensors require gradients, or any torch callable with parameters
            inside (an ``nn.Module`` that maps tokens to tokens). Modules run in eval mode for the moment, so that dropout
            does not blur σ. An ``Attention`` may be the same object at every step although its tensors change.
        X: tokens (n, d) or (B, n, d); a module needs a batch dimension when its forward does.
        solver: how the singular pair is found; fewer steps give a lower bound of σ.

    Returns:
        A scalar.

    Raises:
        ValueError: when X cannot be measured, or nothing inside requires gradients.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64, requires_grad=True)
        >>> layer = lipscope.Attention(q=torch.zeros(2, 2).double(), k=W, v=W)          # averaging: σ = ‖W_V‖
        >>> penalty = lipscope.regularise.spectral_penalty(layer, torch.randn(5, 2).double())
        >>> penalty.backward()
        >>> round(penalty.item(), 6), round(float(W.grad.norm()), 6)
        (1.0, 1.0)
    """
    batched = check_tokens(X)
    solver = dataclasses.replace(solver or SOLVER, vectors=True)
    with full_precision(X.device):
        values = _sigma(attention, X, batched, solver)
    if not values.requires_grad:
        raise ValueError("nothing in attention requires gradients, so there is nothing to regularise: set requires_grad")
    return values.mean()


def _sigma(attention: Attention | Variant | TensorMap, X: Tensor, batched: Tensor, solver: GolubKahan) -> Tensor:
    """σ of every input, with its graph."""
    if isinstance(attention, Attention):
        if batched.shape[-1] != attention.width:
            raise ValueError(f"X has tokens of width {batched.shape[-1]}, but the layer takes width {attention.width}")
        # A fresh description: what an old one has cached may belong to earlier values of its tensors.
        layer = dataclasses.replace(attention)
        batched = batched.to(layer.q)
        left, right = top_pair(AttentionOperator(layer, batched), solver)
        return bilinear(layer, batched, left, right)
    with evaluating(attention if isinstance(attention, nn.Module) else None):
        return sigma_of_map(_batched(attention, X), batched, solver)


def sigma_of_map(function: TensorMap, X: Tensor, solver: GolubKahan) -> Tensor:
    """σ of every input of a map at X (B, …), with a gradient in whatever parameters the map uses."""
    operator = GraphOperator(function, X)
    return operator.bilinear(*top_pair(operator, solver))


def matrix_norm(matrix: Tensor) -> Tensor:
    """‖M‖₂ of a matrix with the gradient u vᵀ of its top singular pair; the pair itself is detached. Not autocast.

    Example:
        >>> import torch
        >>> M = torch.diag(torch.tensor([3.0, 1.0])).requires_grad_()
        >>> matrix_norm(M).backward()
        >>> M.grad
        tensor([[1., 0.],
                [0., 0.]])
    """
    with full_precision(matrix.device):
        with torch.no_grad():
            U, _, Vh = torch.linalg.svd(matrix.detach(), full_matrices=False)
        norm: Tensor = U[:, 0] @ matrix @ Vh[0]
    return norm


def top_pair(operator: Operator, solver: GolubKahan) -> tuple[Tensor, Tensor]:
    """Left and right top singular vectors, shaped as outputs and inputs, one per item."""
    M, N = operator.shape
    if min(M, N) <= 16:
        # So small that the matrices themselves are cheapest.
        U, _, Vh = torch.linalg.svd(operator.to_dense(), full_matrices=False)
        left, right = U[..., 0], Vh[..., 0, :]
    else:
        output = solver.solve(operator)
        assert output.left is not None
        assert output.right is not None
        left, right = output.left[:, 0], output.right[:, 0]
    return left.reshape(-1, *operator.output_shape), right.reshape(-1, *operator.input_shape)


def _batched(function: Variant | TensorMap, X: Tensor) -> TensorMap:
    if X.ndim == 3:
        return function
    return lambda x: function(x[0])[None]
