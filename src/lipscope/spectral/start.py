"""The random start, and what may be assumed of it: |⟨v₁, w⟩| for v₁ uniform on the sphere and any fixed unit vector w."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipscope.spectral.operator import Operator


def random_direction(size: int, seed: int, like: Tensor | Operator) -> Tensor:
    """A vector uniform on the unit sphere of R^size, shape ``(1, size)``, of the dtype and on the device of ``like``.

    It is drawn on the CPU in float64, so that the same seed gives the same direction on every device and in every dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(1, size, generator=generator, dtype=torch.float64)
    unit: Tensor = vector / torch.linalg.vector_norm(vector)
    return unit.to(dtype=like.dtype, device=like.device)


def random_unit_vector(operator: Operator, seed: int) -> Tensor:
    """A random direction of the operator's inputs, ``(1, N)``."""
    return random_direction(operator.shape[1], seed, operator)


def check_delta(delta: float) -> None:
    """Refuse failure probabilities that are none, or too small for the quantile to be computed."""
    if not 1e-30 <= delta < 1:
        raise ValueError(f"delta must be at least 1e-30 and less than 1, got {delta}")


def overlap_quantile(size: int, delta: float) -> float:
    """The g with P[|⟨v₁, w⟩| < g] = delta: the squared overlap follows the Beta(½, (N−1)/2) law."""
    from scipy.special import betaincinv

    if size == 1:
        return 1.0
    return math.sqrt(float(betaincinv(0.5, (size - 1) / 2, delta)))
