"""The obvious ways to measure σ, written plainly: what lipscope is compared with.

With torch alone: power iteration with forward- and reverse-mode products, SciPy over autograd. On lipscope's own products:
power iteration, and random projection with subspace iteration (Halko, Martinsson, Tropp 2011; ``torch.svd_lowrank``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor

import lipscope
from lipscope.spectral.basis import random_direction
from lipscope.spectral.operator import Operator


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


def scipy_over_autograd(function, X: Tensor) -> tuple[float, float]:
    """SciPy's svds with products by autograd on one cached graph; returns σ and the pairs of products."""
    x = X.clone().requires_grad_()
    Y = function(x)
    g = torch.zeros_like(Y, requires_grad=True)
    (pullback,) = torch.autograd.grad(Y, x, g, create_graph=True)

    products = []

    def matvec(u):
        products.append("J")
        u = torch.as_tensor(u, dtype=X.dtype).reshape(X.shape)
        return torch.autograd.grad(pullback, g, u, retain_graph=True)[0].flatten().numpy()

    def rmatvec(w):
        products.append("Jᵀ")
        w = torch.as_tensor(w, dtype=X.dtype).reshape(Y.shape)
        return torch.autograd.grad(Y, x, w, retain_graph=True)[0].flatten().numpy()

    dtype = torch.empty(0, dtype=X.dtype).numpy().dtype
    operator = LinearOperator((Y.numel(), X.numel()), matvec=matvec, rmatvec=rmatvec, dtype=dtype)
    value = float(svds(operator, k=1, return_singular_vectors=False, tol=1e-4, random_state=0)[0])
    return value, len(products) / 2


def power_until(operator: Operator, reference: Tensor, accuracy: float, steps: int = 400) -> tuple[Tensor, int]:
    """Power iteration on JᵀJ for all items together, stopped by an oracle once all are within ``accuracy``."""
    v = random_direction(operator.shape[1], 0, operator).expand(operator.batch, -1)
    sigma = torch.zeros(operator.batch)
    step = 0
    while step < steps:
        step += 1
        u = operator.matvec(v)
        sigma = u.norm(dim=1).double()
        if bool(((sigma / reference - 1).abs() <= accuracy).all()):
            break
        w = operator.rmatvec(u)
        v = w / w.norm(dim=1, keepdim=True)
    return sigma, step


def projection_until(
    operator: Operator, reference: Tensor, accuracy: float, columns: int = 6, rounds: int = 60
) -> tuple[Tensor, int]:
    """Random projection with subspace iteration, as ``torch.svd_lowrank`` does it, stopped by an oracle likewise.

    Args:
        operator: every input ``columns`` times in a row, so that one product handles all columns of all inputs.
        reference: σ of every input.
        accuracy: relative accuracy at which the oracle stops it.
        columns: width of the random matrix; 6 is the default of ``torch.svd_lowrank``.
        rounds: most rounds.

    Returns:
        The estimates, and how many pairs of products each input took.
    """
    M, N = operator.shape
    inputs = operator.batch // columns
    Q = torch.randn(inputs, columns, N, generator=torch.Generator().manual_seed(0), dtype=operator.dtype)
    sigma = torch.zeros(inputs)
    done = 0
    while done < rounds:
        done += 1
        Q = torch.linalg.qr(Q.mT).Q.mT
        Y = operator.matvec(Q.reshape(-1, N)).reshape(inputs, columns, M)
        sigma = torch.linalg.matrix_norm(Y.double(), 2)
        if bool(((sigma / reference - 1).abs() <= accuracy).all()):
            break
        Y = torch.linalg.qr(Y.mT).Q.mT
        Q = operator.rmatvec(Y.reshape(-1, M)).reshape(inputs, columns, N)
    return sigma, done * columns
