"""The estimator of the paper's public companion scripts, kept only to be drawn beside the true σ.

Those scripts take the first output of ``torch.func.jvp(f, (X,), (u,))``, which is f(X), where the tangent J·u was meant.
Each step of their power iteration then maps u to Jᵀf(X), and the value they report converges to √‖Jᵀf(X)‖, which is not
the local Lipschitz constant. Whether the published figures came from exactly that revision is unknown.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.measure.sigma import as_layer, check_tokens, working_dtype
from lipscope.spectral.autodiff import TensorMap


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
