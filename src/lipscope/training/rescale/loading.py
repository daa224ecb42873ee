"""A named model with its language-model head, where it has one: the loss on a text needs it, σ does not."""

from __future__ import annotations

from pathlib import Path

from lipscope.models.checkpoints import Loaded
from lipscope.models.load import load_named

_HEADS = {
    "LMHeadModel": "AutoModelForCausalLM",
    "ForCausalLM": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
}


def load_with_head(name: str) -> Loaded:
    """A zoo model, a directory or a hub name, with the head that its checkpoint says it was saved with."""
    loaded = load_named(name)
    config = getattr(loaded.model, "config", None)
    architectures = getattr(config, "architectures", None) or [""]
    auto = next((auto for ending, auto in _HEADS.items() if architectures[0].endswith(ending)), None)
    source = getattr(loaded.model, "name_or_path", "")
    # Weights from another file format come without their head.
    if auto is None or not source or (Path(source).is_dir() and not any(Path(source).glob("*.safetensors"))):
        return loaded
    import transformers
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model = getattr(transformers, auto).from_pretrained(
            source, dtype=loaded.model.dtype, local_files_only=True, use_safetensors=True
        )
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    return Loaded(model.eval(), loaded.tokenizer, loaded.name, loaded.notes)
