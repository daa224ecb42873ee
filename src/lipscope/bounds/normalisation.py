"""Behind its own normalisation a layer's tokens have bounded norm, so set bounds become global constants.

LayerNorm: ``‖y‖ ≤ √d‖g‖_∞ + ‖β‖``, RMSNorm: ``‖y‖ ≤ √d‖g‖_∞``; ``image_radius`` gives the exact radius. The map u ↦ Norm(u)
itself has local norm at most ``‖g‖_∞/s``, which is exact at most once per token; see ``attention/norms.py``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipscope.attention.norms import Normalisation
from lipscope.bounds.bound import OURS, Bound


def radius(norm: Normalisation) -> Bound:
    """R: the largest norm a normalised token can have, max ‖g∘z + β‖ over ‖z‖ ≤ √d (Σz = 0 for LayerNorm).

    Args:
        norm: a ``LayerNorm`` or ``RMSNorm``.

    Returns:
        A bound whose value is R, to be used as ``radius`` of the set bounds.
    """
    return Bound("normalisation.radius", norm.image_radius(), "set", "every input token", OURS,
                 {"d": norm.weight.numel()}, norm="‖y_i‖")  # fmt: skip


def simple_radius(norm: Normalisation) -> float:
    """√d‖g‖_∞ + ‖β‖, the closed form; never smaller than ``radius``."""
    size = math.sqrt(norm.weight.numel()) * float(norm.weight.abs().max())
    return size + (0.0 if norm.bias is None else float(torch.linalg.vector_norm(norm.bias)))


def local(norm: Normalisation, u: Tensor) -> Bound:
    """max_i ‖D Norm(u_i)‖₂ at tokens u (n, d): the exact Lipschitz constant of the normalisation at this input.

    Args:
        norm: a ``LayerNorm`` or ``RMSNorm``.
        u: tokens (n, d).

    Returns:
        A local bound; times a bound for attention at Norm(u) it bounds scope ``norm+attention``.
    """
    value = float(norm.linearise(u.detach().double()[None]).local_norm().max())
    return Bound("normalisation.local", value, "local", "this input", OURS, {"n": u.shape[0]})
