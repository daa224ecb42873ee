"""The two obvious ways to measure σ with torch alone, written plainly: what lipscope is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor

import lipscope


def forward(layer: lipscope.Attention, X: Tensor, causal: bool) -> Tensor:
    """The layer on one input (n, d), as anyone would write it."""
    n, H = X.shape[0], layer.heads
    q, k, v = ((X @ W.T).reshape(n, H, -1).transpose(0, 1) for W in (layer.q, layer.k, layer.v))
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
    return (torch.softmax(scores, -1) @ v).transpose(0, 1).reshape(n, -1) @ layer.out.T


def power_loop(
    function,
    X: Tensor,
    *,
    tolerance: float = 1e-4,
    steps: int = 100,
    seed: int = 0,
    done: Callable[[float], bool] | None = None,
) -> tuple[float, int]:
    """Power iteration with forward- and reverse-mode products; returns σ and the steps.

    It stops on an absolute tolerance on σ², as scripts do, or when ``done`` says that σ is good enough.
    """
    u = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed), dtype=X.dtype)
    previous, step = 0.0, 0
    while step < steps:
        step += 1
        u = u / u.norm()
        _, tangent = torch.func.jvp(function, (X,), (u,))
        _, pullback = torch.func.vjp(function, X)
        (u,) = pullback(tangent)
        squared = float(u.norm())
        if abs(squared - previous) < tolerance if done is None else done(squared**0.5):
            break
        previous = squared
    return squared**0.5, step


def scipy_over_autograd(function, X: Tensor) -> float:
    """SciPy's svds with products by autograd on one cached graph."""
    x = X.clone().requires_grad_()
    Y = function(x)
    g = torch.zeros_like(Y, requires_grad=True)
    (pullback,) = torch.autograd.grad(Y, x, g, create_graph=True)

    def matvec(u):
        u = torch.as_tensor(u, dtype=X.dtype).reshape(X.shape)
        return torch.autograd.grad(pullback, g, u, retain_graph=True)[0].flatten().numpy()

    def rmatvec(w):
        w = torch.as_tensor(w, dtype=X.dtype).reshape(Y.shape)
        return torch.autograd.grad(Y, x, w, retain_graph=True)[0].flatten().numpy()

    dtype = torch.empty(0, dtype=X.dtype).numpy().dtype
    operator = LinearOperator((Y.numel(), X.numel()), matvec=matvec, rmatvec=rmatvec, dtype=dtype)
    return float(svds(operator, k=1, return_singular_vectors=False, tol=1e-4, random_state=0)[0])
