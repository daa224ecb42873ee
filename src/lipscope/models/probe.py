"""A small input any model accepts: for the survey and the self-tests on load."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lipscope.models.capture import model_dtype

_PROBE_TOKENS = 8


def probe_inputs(model: nn.Module, n: int | None = None) -> dict[str, Any]:
    """Keyword arguments for one short forward pass, drawn from a fixed seed.

    Args:
        model: the model.
        n: number of tokens; a few by default.

    Raises:
        ValueError: when the model takes an input of an unknown kind, or its number of tokens cannot be chosen.
    """
    short = _PROBE_TOKENS if n is None else n
    generator = torch.Generator().manual_seed(0)
    config = getattr(model, "config", None)
    dtype, device = model_dtype(model), next(model.parameters()).device

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)

    if config is None:
        widths = [part.embed_dim for part in model.modules() if isinstance(part, nn.MultiheadAttention)]
        if not widths:
            raise ValueError(
                f"{type(model).__name__} is neither a transformers model nor a torch module with nn.MultiheadAttention "
                "inside; measure it as a map with lipscope.local_lipschitz(module, X)"
            )
        batch_first = all(part.batch_first for part in model.modules() if isinstance(part, nn.MultiheadAttention))
        shape = (2, short) if batch_first else (short, 2)
        return {"tokens": gaussian(*shape, widths[0])}
    kind = getattr(model, "main_input_name", "input_ids")
    if n is not None and kind != "input_ids":
        raise ValueError(f"{type(model).__name__} takes {kind}, so its number of tokens cannot be chosen")
    match kind:
        case "input_ids":
            short = min(short, position_limit(model) or short)
            low = min(10, config.vocab_size - 1)
            return {"input_ids": torch.randint(low, config.vocab_size, (2, short), generator=generator).to(device)}
        case "pixel_values":
            size = config.image_size if isinstance(config.image_size, int) else max(config.image_size)
            return {"pixel_values": gaussian(1, config.num_channels, size, size)}
        case "input_features":
            return {"input_features": gaussian(1, config.num_mel_bins, 2 * config.max_source_positions)}
        case "input_values":
            samples = _PROBE_TOKENS
            for stride, kernel in zip(reversed(config.conv_stride), reversed(config.conv_kernel), strict=True):
                samples = (samples - 1) * stride + kernel
            return {"input_values": gaussian(1, samples)}
        case other:
            raise ValueError(f"{type(model).__name__} takes {other}, an input that lipscope does not know how to probe")


def position_limit(model: nn.Module) -> int | None:
    """The most tokens the model has positions for, or None when it has no such limit."""
    config = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if not isinstance(limit, int) or limit <= 0 or getattr(config, "model_type", "") == "t5":
        return None
    return limit - first_position(model)


def first_position(model: nn.Module) -> int:
    """The position id of the first token: 0, except in models that count from the padding index."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", "") not in _SHIFTED_POSITIONS:
        return 0
    return int(getattr(config, "pad_token_id", 1) or 0) + 1


_SHIFTED_POSITIONS = ("roberta", "xlm-roberta", "camembert", "mpnet")
