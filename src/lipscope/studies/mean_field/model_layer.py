"""A layer of a real model as mean-field attention, with the tokens it receives on a text."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.models.corpora import read_text
from lipscope.models.model import Model
from lipscope.models.text import Chunker


def model_layer(
    model: Model, layer: int, text: str, *, n: int = 64, inputs: int = 4, seed: int = 0
) -> tuple[Attention, Tensor]:
    """The layer without its sequence length: mask in words instead of a tensor, and the tokens that reach it on a text.

    Args:
        model: a loaded model.
        layer: layer index; negative ones count from the end.
        text: a named corpus, a file or a directory.
        n: tokens per input.
        inputs: how many inputs.
        seed: where in the text they lie.

    Returns:
        The layer, and tokens (inputs·n, d) in float64.

    Raises:
        ValueError: when the layer is no plain attention, or its mask or score bias counts tokens.
    """
    if model.tokenizer is None:
        raise ValueError(f"{model.name} has no tokenizer, so it cannot read text {text!r}")
    where = model.layer(layer)
    chunks = Chunker(read_text(text), model.tokenizer).chunks([n], inputs, seed)[n]
    at = model.record(input_ids=torch.tensor(chunks))[where.index]
    attention = at.attention
    if attention is None or attention.rotary is not None:
        raise ValueError(
            f"layer {where.index} ({where.name}) of {model.name} has no mean-field form: its queries, keys and values are "
            "no affine maps of a token alone (rotary embeddings, query and key norms, or code of its own)"
        )
    if where.mask not in ("full", "causal"):
        raise ValueError(f"mask {where.mask} of layer {where.index} has no mean-field meaning: it counts tokens")
    if attention.bias is not None and not bool(attention.bias.any()):
        # An additive mask whose finite part is zero everywhere.
        attention = dataclasses.replace(attention, bias=None)
    tokens = at.tokens().double().flatten(0, 1)
    return attention.with_mask(where.mask), tokens
