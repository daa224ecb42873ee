"""A layer's ``Attention`` with its mask called by name, and remembered: bounds compute the norms of a layer once.

The model hands over masks as tensors. A tensor that is the full, causal, windowed or packed mask of its length is replaced
by that mask, so that bounds made for it apply, and so that one description serves all lengths.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal, Full, Mask, Packed, as_mask, same_mask
from lipscope.models.anatomy import Layer
from lipscope.models.capture import Recording


def with_named_mask(attention: Attention, layer: Layer, recording: Recording) -> Attention:
    """The same map at the recorded tokens, with a named mask where the tensor is one."""
    n = recording.hosts[layer.index].tokens.shape[1 if layer.batch_first else 0]
    mask = attention.mask
    assert isinstance(mask, Mask)
    additive = mask.additive(n)
    if additive is not None and bool(additive.any()):
        return attention
    candidates: list[Mask] = [Full(), Causal()]
    if layer.mask.startswith("window"):
        candidates.append(as_mask(layer.mask))
    if recording.documents is not None:
        candidates.append(Packed(recording.documents, causal=layer.causal))
    for candidate in candidates:
        if same_mask(candidate, mask, n):
            return attention.with_mask(candidate)
    return attention


def remembered(attention: Attention, known: dict[int, Attention], index: int) -> Attention:
    """The object known under ``index`` when it describes the same layer, else ``attention``, which is then known."""
    before = known.get(index)
    if before is not None and _same_value(before, attention):
        return before
    known[index] = attention
    return attention


def _same_value(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        return all(_same_value(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a))
    return bool(a == b)
