"""The same weights through every kind of attention, so that they can be compared.

Biases, rotary embeddings, sinks and score biases of a layer are left out: what differs between the members of a family is
the rule that makes attention weights of inner products, and nothing else. A layer whose scale τ is not 1/√dk (models often
come with τ inside W_Q) is read as one with W_Q·τ√dk and 1/√dk, which is the same attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Full
from lipscope.attention.sinkhorn import SinkhornAttention
from lipscope.attention.variants import CosineAttention, L2Attention, QKNormAttention, SigmoidAttention, Variant

VARIANTS = ("dot-product", "1/d-scaled", "soft-capped", "qk-norm", "cosine", "l2", "sigmoid", "sinkhorn")

# The soft-cap of Gemma 2 for attention logits.
SOFTCAP = 50.0


def variant(name: str, layer: Attention, **options: Any) -> Attention | Variant:
    """One kind of attention with the weights of ``layer``.

    Args:
        name: one of ``VARIANTS``.
        layer: where W_Q, W_K, W_V, W_O and the mask come from; its biases and other extras are left out.
        **options: parameters of the kind, such as ``softcap``, ``tau``, ``nu``, ``eps``, ``shift``.

    Returns:
        An ``Attention`` for dot products, a ``Variant`` otherwise.

    Raises:
        ValueError: when there is no such kind, or its mask or parameters do not fit.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> variant("l2", lipscope.Attention(W, W, W)).kind
        'l2'
    """
    keys, values = _ungrouped(layer.k, layer), _ungrouped(layer.v, layer)
    queries = layer.q if layer.scale is None else layer.q * (layer.scale * math.sqrt(layer.head_width))
    shared: dict[str, Any] = {"q": queries, "v": values, "out": layer.out, "heads": layer.heads, "mask": layer.mask}
    if name in ("dot-product", "1/d-scaled", "soft-capped"):
        scale = 1 / layer.head_width if name == "1/d-scaled" else None
        options = {"scale": scale, "softcap": SOFTCAP if name == "soft-capped" else None} | options
        return Attention(k=keys, **shared, **options)
    if name == "l2":
        return L2Attention(**shared, **options)
    kinds: dict[str, Any] = {
        "qk-norm": QKNormAttention, "cosine": CosineAttention, "sigmoid": SigmoidAttention, "sinkhorn": SinkhornAttention,
    }  # fmt: skip
    if name not in kinds:
        raise ValueError(f"there is no attention {name!r}; kinds are: {', '.join(VARIANTS)}")
    made: Variant = kinds[name](k=keys, **shared, **options)
    return made


def family(
    layer: Attention, names: Sequence[str] = VARIANTS, options: dict[str, dict[str, Any]] | None = None
) -> dict[str, Attention | Variant]:
    """All kinds of attention with the weights of ``layer``; those that do not take its mask are left out."""
    kept = [name for name in names if name != "sinkhorn" or isinstance(layer.mask, Full)]
    return {name: variant(name, layer, **(options or {}).get(name, {})) for name in kept}


def _ungrouped(weights: Tensor, layer: Attention) -> Tensor:
    """One block of rows per query head."""
    shared = weights.reshape(layer.kv_heads, -1, layer.width)
    return shared.repeat_interleave(layer.heads // layer.kv_heads, dim=0).flatten(0, 1)
