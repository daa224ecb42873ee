"""``load``: a name, a directory or a module becomes a model that can be measured."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from lipscope.models.handle import Model
from lipscope.models.zoo import load_named


def load(
    model: str | os.PathLike[str] | nn.Module,
    tokenizer: Any = None,
    *,
    part: str | None = None,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    check: bool = True,
) -> Model:
    """Load a model to measure.

    Args:
        model: a name from ``lipscope models`` (``"minilm-l6"``, ``"gpt2-random"``, …), a directory with a saved
            transformers model, a hub name, or a module in eval mode.
        tokenizer: replaces the model's own.
        part: ``"encoder"`` of an encoder–decoder model.
        dtype: float32 or float64; that of the weights by default, float32 for half precision.
        allow_pickle: accept pickled weights, which can run code when opened.
        trust_remote_code: run model code from the hub.
        check: run the self-tests (see ``lipscope.models.selftest``).

    Returns:
        The model, with ``.measure(…)``, ``.layers`` and ``.describe()``.

    Raises:
        FileNotFoundError: when the model is not available; names the ones that are.
        ValueError: when the model cannot be measured.
        SelfTestError: when the model does not behave as the measurement assumes.

    Example:
        >>> import torch, lipscope
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
        >>> model = lipscope.load(layer)
        >>> len(model.layers), model.layers[0].heads
        (1, 2)
    """
    if isinstance(model, Model):
        return model
    if isinstance(model, nn.Module):
        return Model(model, tokenizer, part=part, dtype=dtype, check=check)
    found = load_named(os.fspath(model), allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    return Model(
        found.model, tokenizer or found.tokenizer, name=found.name, notes=found.notes, part=part, dtype=dtype, check=check
    )
