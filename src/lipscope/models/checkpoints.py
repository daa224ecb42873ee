"""Saved models from a directory or from the hub: safetensors only, pickles and foreign code only when allowed."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from safetensors import SafetensorError

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Loaded:
    """A model as it comes from its source."""

    model: nn.Module  # in eval mode
    tokenizer: Any  # its tokenizer, or None
    name: str  # how rows call it
    notes: tuple[str, ...] = ()  # remarks every row carries


class NotReachableError(FileNotFoundError):
    """A model that is neither here nor to be had."""


def from_directory(directory: Path, *, allow_pickle: bool, trust_remote_code: bool) -> Loaded:
    """A directory written by ``save_pretrained``; refuses one without a model, and pickled weights that are not allowed."""
    if not (directory / "config.json").exists():
        raise ValueError(f"{directory} holds no config.json, so it is not a saved transformers model")
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'} is not JSON: {error}") from None
    _refuse_quantised(str(directory), config)
    if not any(directory.glob("*.safetensors")):
        pickled = [p.name for p in sorted(directory.iterdir()) if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        if not pickled:
            raise ValueError(f"{directory} holds no weights (*.safetensors)")
        if not allow_pickle:
            raise ValueError(
                f"{directory} holds its weights as a pickle ({pickled[0]}), which can run code when it is opened. Convert "
                "it to safetensors, or allow it with allow_pickle=True (--allow-pickle)"
            )
    try:
        model = auto_model(directory, use_safetensors=None if allow_pickle else True, trust_remote_code=trust_remote_code)
    except SafetensorError as error:
        raise ValueError(f"the weights in {directory} are damaged: {error}") from None
    try:
        tokenizer = auto_tokenizer(directory)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    return Loaded(model, tokenizer, directory.name)


def from_hub(name: str, *, allow_pickle: bool, trust_remote_code: bool) -> Loaded:
    """A model of the hub, from the cache when it is there.

    Raises:
        NotReachableError: when it is not in the cache and the hub cannot be reached, or has no such model.
        ValueError: when it has pickled weights only and those are not allowed.
    """
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options["use_safetensors"] = None if allow_pickle else True
    local = _in_cache(name)
    if not local and not _hub_is_reachable():
        raise NotReachableError(
            f"model {name!r} is neither a known name, nor a directory, nor in the Hugging Face cache, and the hub cannot be "
            "reached"
        )
    try:
        from transformers import PretrainedConfig

        _refuse_quantised(name, PretrainedConfig.get_config_dict(name, local_files_only=local)[0])
        model = auto_model(name, local_files_only=local, **options)
        tokenizer = auto_tokenizer(name, local_files_only=local)
    except OSError as error:
        if "safetensors" in str(error) and not allow_pickle:
            raise ValueError(
                f"{name} has no safetensors weights; pickled weights can run code when opened. "
                "Allow them with allow_pickle=True (--allow-pickle)"
            ) from error
        raise NotReachableError(f"model {name!r} could not be loaded from the hub: {error}") from error
    return Loaded(model, tokenizer, name)


def _refuse_quantised(name: str, config: dict[str, Any]) -> None:
    settings = config.get("quantization_config")
    if settings:
        method = settings.get("quant_method", "unknown method") if isinstance(settings, dict) else "unknown method"
        raise ValueError(
            f"the weights of {name} are quantised ({method}), and quantised kernels have no derivatives: save the model "
            "de-quantised, in floating point, and load that"
        )


def auto_model(source: str | Path, *, kind: str = "AutoModel", local_files_only: bool = True, **options: Any) -> nn.Module:
    """The model that a class of transformers makes of a directory or name, in eval mode, without progress bars."""
    import transformers
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        made_by = getattr(transformers, kind)
        model: nn.Module = made_by.from_pretrained(str(source), local_files_only=local_files_only, **options)
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    return model.eval()


def auto_tokenizer(source: str | Path, *, local_files_only: bool = True, **options: Any) -> Any:
    """The tokenizer of a directory or name; None when there are no files for one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=local_files_only, **options)
    # Without tokenizer files transformers makes one up that knows no word.
    return tokenizer if getattr(tokenizer, "vocab_size", 1) else None


def _in_cache(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def _hub_is_reachable() -> bool:
    """A short look, so that a name asked for without a network fails at once and not after many retries."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return True
    address = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        with socket.create_connection((address.hostname or "", address.port or 443), timeout=3):
            return True
    except OSError:
        return False
