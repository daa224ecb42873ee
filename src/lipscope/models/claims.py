"""What a model claims by its configuration: causality, with a first look at whether it holds, and sliding windows."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.models.capture import last_hidden_state
from lipscope.models.inputs import runner
from lipscope.models.leaks import apart, tolerance
from lipscope.models.subject import CannotCheckError, Subject, Tally, accepts


def _text_config(model: nn.Module) -> Any:
    """The configuration of the part that reads tokens, or None."""
    config = getattr(model, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def claims_causality(model: nn.Module) -> str | None:
    """Why a model is taken to be causal: what its configuration says, or its name; None when it is not."""
    config = _text_config(model)
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", None) is False:
        return None
    if getattr(config, "is_encoder_decoder", False):
        return "the decoder of an encoder–decoder model" if accepts(model, "decoder_input_ids") else None
    if getattr(config, "is_decoder", False):
        return "is_decoder in the configuration"
    from transformers.models.auto import modeling_auto as auto

    kind, whole = (str(getattr(part, "model_type", "")) for part in (config, getattr(model, "config", None)))
    causal = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    causal |= {*getattr(auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", ())}
    if {kind, whole} & {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *_BOTH_WAYS}:
        return None
    names = [type(model).__name__, *(getattr(config, "architectures", None) or ())]
    name = kind if {kind, kind.removesuffix("_text"), whole} & causal else next(filter(_CAUSAL, names), None)
    return name and f"{name} is a causal language model"


_CAUSAL = re.compile("ForCausalLM$").search
_BOTH_WAYS = ("diffusion_gemma", "paligemma", "pi0", "xlnet")  # language models whose prompts see themselves, or all tokens


def own_pass(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, str | None]:
    """The last hidden state with the model's own attention, and why it should be causal where it is not, else None.

    A model that claims causality reads its sequences twice in one batch, the second time with other tokens from a place on
    that is another one in every sequence, and never the middle, where blocks of tokens end.
    """
    claim = claims_causality(model)
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    if claim is None or name not in inputs or inputs[name].shape[1] < 2:
        return last_hidden_state(runner(model, inputs)()), None
    subject = Subject(model, inputs, name, Tally(torch.Generator().manual_seed(0)))
    rows, n = subject.shape
    starts = (n // 2 - 1 + 2 * torch.arange(rows, device=subject.places.device)).clamp(1, n - 1)
    later = subject.places >= starts[:, None]
    both = {key: torch.cat([v, subject.substituted(later) if key == name else v]) for key, v in inputs.items()}
    own, changed = last_hidden_state(runner(model, both)()).chunk(2)
    try:
        return own, claim if apart(own, changed, ~later)[0] > tolerance(own.dtype) else None
    except CannotCheckError:  # non-finite outputs are refused elsewhere, by name
        return own, None


def claimed_windows(model: nn.Module, window: int | None) -> tuple[int, set[nn.Module]]:
    """How far attention looks back, and in which modules: all when a window is asked for, else as the configuration says."""
    config = _text_config(model)
    local = getattr(config, "attention_layers", None)  # of GPT-Neo; images have a window_size of their own
    kinds = getattr(config, "layer_types", None) or local
    wide = window if window is not None else getattr(config, "window_size" if local else "sliding_window", None)
    claimed = getattr(config, "use_sliding_window", True) is not False and (not kinds or bool({*kinds} & {*_SLIDING}))
    if not isinstance(wide, int) or (window is None and not claimed):
        return 0, set()
    found = set()
    for name, module in model.named_modules():
        number = getattr(module, "layer_idx", getattr(module, "layer_id", None))
        sliding = isinstance(number, int) and (not kinds or kinds[number] in _SLIDING)
        words = f"{name.rpartition('.')[2]} {type(module).__name__}".lower()
        if ("attn" in words or "attention" in words) and (window is not None or sliding):
            found.add(module)
    return wide, found


_SLIDING = ("sliding_attention", "local")
