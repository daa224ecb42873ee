"""What others compute, for comparison: the estimator of the paper's public scripts, and the textbook loop in plain torch.

The scripts take the first output of ``torch.func.jvp(f, (X,), (u,))``, which is f(X), where the tangent J·u was meant. Each
step of their power iteration then maps u to Jᵀf(X), and the value they report converges to √‖Jᵀf(X)‖, which is not the local
Lipschitz constant. Whether the published figures came from exactly that revision is unknown. The textbook loop,

    u ← Jᵀ(J u)/‖Jᵀ(J u)‖,   σ² ≈ ‖Jᵀ J u‖          torch.func.jvp and vjp, one input at a time

gives the time that the usual way would take, and shows what an absolute tolerance does to the number.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal, Full
from lipscope.measure.sigma import as_layer, check_tokens, working_dtype
from lipscope.runs.work import torch_threads
from lipscope.spectral.autodiff import TensorMap

Map = Callable[[Tensor], Tensor]


def companion_estimator(map: Attention | TensorMap, X: Tensor) -> float | Tensor:
    """√‖Jᵀf(X)‖_F: what the companion scripts compute. **Not** the local Lipschitz constant.

    Args:
        map: an ``Attention`` layer (all of it, output bias included) or any torch callable.
        X: tokens (n, d) or (B, n, d).

    Returns:
        A number for (n, d), a tensor (B,) for a batch.
    """
    bare = X.ndim == 2
    measured = as_layer(map, bare=bare)
    tokens = check_tokens(X).to(working_dtype(measured, X))
    operator = measured.operator(tokens)
    layer = map.to(tokens.dtype, tokens.device) if isinstance(map, Attention) else map
    with torch.no_grad():
        f = layer(tokens[0])[None] if bare else layer(tokens)
    value: Tensor = torch.linalg.vector_norm(operator.rmatvec(f.flatten(1)), dim=-1).sqrt()
    return value.item() if bare else value


def plain_forward(layer: Attention, *, dropout: float = 0.0, seed: int = 0) -> Map:
    """The layer on one input (n, d), written out.

    ``dropout`` is the share of attention weights and of outputs set to zero, the others enlarged to match; ``seed`` says
    which, the same for every call, so that the map has a Jacobian.
    """
    if layer.softcap or layer.sinks is not None or layer.bias is not None or layer.kv_heads != layer.heads:
        raise ValueError("plain_forward takes a layer without soft-cap, sinks, score bias and grouped queries")
    if not isinstance(layer.mask, (Full, Causal)):
        raise ValueError(f"plain_forward takes a full or causal mask, got {layer.mask}")
    causal = isinstance(layer.mask, Causal)

    def function(X: Tensor) -> Tensor:
        n = X.shape[-2]
        q, k, v = (
            torch.nn.functional.linear(X, W, b).reshape(n, layer.heads, -1).transpose(0, 1)
            for W, b in ((layer.q, layer.q_bias), (layer.k, layer.k_bias), (layer.v, layer.v_bias))
        )
        scores = layer.tau * q @ k.transpose(1, 2)
        if causal:
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))
        P = torch.softmax(scores, -1)
        generator = torch.Generator().manual_seed(seed)
        joined = (_drop(P, dropout, generator) @ v).transpose(0, 1).reshape(n, -1)
        Y = joined if layer.out is None else torch.nn.functional.linear(joined, layer.out, layer.out_bias)
        return _drop(Y, dropout, generator)

    return function


def power_loop(
    function: Map, X: Tensor, *, rtol: float = 1e-4, atol: float | None = None, steps: int = 100, seed: int = 0
) -> tuple[float, int]:
    """σ at one input (n, d) by power iteration with forward- and reverse-mode products, and the steps taken.

    It stops when σ² changes by less than the share ``rtol`` of itself, or by less than ``atol``, whatever its size.
    """
    u = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed), dtype=X.dtype)
    squared, step = 0.0, 0
    while step < steps:
        step += 1
        u = u / u.norm()
        tangent = torch.func.jvp(function, (X,), (u,))[1]
        pullback: Any = torch.func.vjp(function, X)[1]
        (u,) = pullback(tangent)
        previous, squared = squared, float(u.norm())
        if abs(squared - previous) < (rtol * squared if atol is None else atol):
            break
    return squared**0.5, step


def textbook_seconds(samples: Sequence[tuple[Attention, Tensor]], points: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Time that ``power_loop`` would need for every point, from the time it needs for the samples.

    Work of a step is taken as 16·n·d² + 16·n²·d, as in ``lipscope.runs.estimate``. Counted is the processor's time on one
    thread, as for the tasks of a run: it does not depend on what else the machine does. ``points`` are (n, d) of every
    measured input.
    """
    spent, work, steps = 0.0, 0.0, []
    with torch_threads(1):
        for layer, X in samples:
            start = time.process_time()
            _, taken = power_loop(plain_forward(layer), X)
            spent += time.process_time() - start
            work += _work(*X.shape)
            steps.append(taken)
    total = sum(_work(n, d) for n, d in points)
    return {"seconds": spent * total / work, "samples": len(samples), "sample_seconds": spent, "sample_steps": steps}


def _work(n: int, d: int) -> float:
    return 16.0 * n * d * d + 16.0 * n * n * d


def _drop(values: Tensor, share: float, generator: torch.Generator) -> Tensor:
    if share == 0.0:
        return values
    kept = torch.rand(values.shape, generator=generator) >= share
    return values * kept.to(values) / (1 - share)
