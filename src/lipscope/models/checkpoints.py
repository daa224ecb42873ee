"""Saved models from a directory, from the hub or from installed packages, with pickles and foreign code only when allowed.

A package is located through its metadata, and its files are read as data: none of its code is imported. Most hold a saved
model as it is; Whisper's is a checkpoint of its first authors, with other names for the same tensors. MPNet is a zip file
cut into five packages and SmolLM2 a quantised file that takes half a minute to read: both are put into the cache directory
once, as saved models.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import socket
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from safetensors import SafetensorError, safe_open

from lipscope.doors import read_json

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Loaded:
    """A model as it comes from its source."""

    model: nn.Module  # in eval mode
    tokenizer: Any  # its tokenizer, or None
    name: str  # how rows call it
    notes: tuple[str, ...] = ()  # remarks every row carries
    processor: Any = None  # makes inputs of clips or images, where no file says how


class NotReachableError(FileNotFoundError):
    """A model that is neither here nor to be had."""


def refuse_directory(directory: Path, *, allow_pickle: bool) -> None:
    """Refuse a directory without a saved model, and pickled weights that are not allowed."""
    if not (directory / "config.json").exists():
        raise ValueError(f"{directory} holds no config.json, so it is not a saved transformers model")
    refuse_files(directory, allow_pickle=allow_pickle)
    if not any(directory.glob("*.safetensors")):
        pickled = [p.name for p in sorted(directory.iterdir()) if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        if not pickled:
            more = "" if allow_pickle else "; those of the hub, if pickled, come with allow_pickle=True (--allow-pickle)"
            raise ValueError(f"{directory} holds no weights (*.safetensors){more}")
        if not allow_pickle:
            raise ValueError(f"{directory} holds its weights as a pickle ({pickled[0]}), {_PICKLE}")


def from_directory(directory: Path, name: str, *, allow_pickle: bool, trust_remote_code: bool, **options: Any) -> Loaded:
    """A directory written by ``save_pretrained``; refuses one without a model, and pickled weights that are not allowed."""
    refuse_directory(directory, allow_pickle=allow_pickle)
    options |= {"use_safetensors": None if allow_pickle else True, "trust_remote_code": trust_remote_code}
    try:
        model = auto_model(directory, **options)
    except ImportError as error:
        method = quantised_by(directory)
        if method is None:
            raise
        raise ValueError(f"the weights of {directory} are quantised ({method}): {error}") from error
    except (MemoryError, OSError, ValueError):
        raise
    except Exception as error:  # whatever transformers meets inside a configuration that makes no sense
        raise ValueError(f"transformers makes no model of {directory}: {type(error).__name__}: {error}") from error
    return Loaded(model, tokenizer_in(directory, trust_remote_code=trust_remote_code), name)


def quantised_by(directory: Path) -> str | None:
    """The method by which the weights of a saved model are quantised, or None."""
    file = directory / "config.json"
    settings = read_json(file, dict).get("quantization_config") if file.exists() else None
    return (
        str(settings.get("quant_method", "unknown method") if isinstance(settings, dict) else settings) if settings else None
    )


def tokenizer_in(directory: Path, **options: Any) -> Any:
    """The tokenizer of a saved model, or None."""
    try:
        return auto_tokenizer(directory, **options)
    except Exception:  # what transformers raises when files for one are missing, damaged or of an unknown kind
        return None


_PICKLE = (
    "which can run code when it is opened. Convert it to safetensors, or allow it with allow_pickle=True (--allow-pickle)"
)


def refuse_files(directory: Path, *, allow_pickle: bool) -> None:
    """Refuse a model whose loading would take files from outside its directory, pickles, damaged weights or foreign code."""
    config = read_json(directory / "config.json", dict)
    if re.search(r'"_?(attn|experts)_implementation\w*": "[^"]*/', json.dumps(config)):
        raise ValueError(f"{directory} wants attention code from the hub: take attn_implementation out of its config.json")
    if (directory / "adapter_config.json").exists():
        raise ValueError(
            f"{directory} holds an adapter (adapter_config.json), and its model may lie elsewhere: merge the two "
            "(peft: merge_and_unload), save the result, and load that"
        )
    named = {str(config["transformers_weights"])} if "transformers_weights" in config else set()
    indices = {*directory.glob("*.index.json" if allow_pickle else "*.safetensors.index.json")}
    indices |= {directory / name for name in named if name.endswith(".index.json")}
    named = named.union(*map(parts_of, indices))
    home = directory.resolve()
    # In the cache of the hub, the files of a snapshot are links into a directory beside it.
    rooms = (home, home.parent.parent / "blobs") if home.parent.name == "snapshots" else (home,)
    for name in sorted({*named, *(file.name for file in directory.iterdir() if file.is_file())}):
        file = (directory / name).resolve()
        if not any(file.is_relative_to(room) for room in rooms):
            raise ValueError(f"{directory} takes {name} from outside, {file}: put a copy of that file into the directory")
        if name in named and not allow_pickle and not name.endswith((".safetensors", ".index.json")):
            raise ValueError(f"{directory} names {name} as a part of its weights, {_PICKLE}")
        if name.endswith(".safetensors") and file.is_file():
            refuse_damaged(directory / name)


def refuse_damaged(file: Path) -> None:
    """Refuse a file that safetensors cannot read: one cut short, say, or with something else inside."""
    try:
        safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"the weights in {file.parent} are damaged: {file.name}: {error}") from None


def parts_of(index: Path) -> set[str]:
    """The files that an index of weights names."""
    weights = read_json(index, dict).get("weight_map")
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise ValueError(f"{index} must hold a table weight_map, from names of tensors to files")
    return set(weights.values())


def auto_model(source: str | Path, *, kind: str = "AutoModel", **options: Any) -> nn.Module:
    """The model that a class of transformers makes of a directory, in eval mode, without progress bars.

    What its checkpoint does not hold is drawn at random. Such tensors say so: ``Model`` refuses those that it would use.
    """
    import transformers
    from transformers.utils import logging

    options = {"trust_remote_code": False} | options
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        made_by = getattr(transformers, kind)
        model: nn.Module
        model, told = made_by.from_pretrained(
            str(source), local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{source} brings code of its own, which would run on this machine: read it, and if you trust it, allow it with "
            "--trust-remote-code (trust_remote_code=True in Python)"
        ) from error
    finally:
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    drawn = dict.fromkeys(told["missing_keys"], "missing")
    drawn |= {name: f"stored as {tuple(there)}, needed as {tuple(here)}" for name, there, here in told["mismatched_keys"]}
    mark_drawn(model, drawn)
    return model.eval()


def mark_drawn(model: nn.Module, drawn: Mapping[str, str]) -> None:
    """Let tensors say that no checkpoint held them, and why: ``not_in_checkpoint`` asks them."""
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in drawn:
            tensor.not_in_checkpoint = drawn[name]


def not_in_checkpoint(model: nn.Module) -> dict[str, str]:
    """The tensors of a model that were drawn at random when it was loaded, and why: missing, or of another shape."""
    tensors = model.state_dict(keep_vars=True)
    return {name: why for name, tensor in tensors.items() if (why := getattr(tensor, "not_in_checkpoint", None))}


def auto_tokenizer(source: str | Path, **options: Any) -> Any:
    """The tokenizer of a directory or name; None when there are no files for one."""
    from transformers import AutoTokenizer

    # Without a word on trust, transformers would ask at the terminal whether it may run the tokenizer's code.
    options = {"trust_remote_code": False} | options
    tokenizer = AutoTokenizer.from_pretrained(str(source), local_files_only=True, **options)
    # Without tokenizer files transformers makes one up that knows no word.
    return tokenizer if getattr(tokenizer, "vocab_size", 1) else None


def cached_directory(name: str, revision: str | None = None) -> Path | None:
    """Where the cache of the hub has a model, or None."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def hub_directory(name: str, revision: str | None = None, *, allow_pickle: bool = False) -> Path:
    """A model of the hub as files, from the cache or fetched into it, its weights only where nothing else is refused.

    Raises:
        NotReachableError: when it is not in the cache and the hub cannot be reached, or has no such model.
        ValueError: when ``refuse_files`` refuses it.
    """
    from huggingface_hub import snapshot_download

    here = cached_directory(name, revision)
    local = here is not None and any(file.suffix in (".safetensors", ".bin") for file in here.iterdir())
    if not local and not _hub_is_reachable():
        raise NotReachableError(
            f"model {name!r} is neither a known name, nor a directory, nor in the Hugging Face cache, and the hub cannot be "
            "reached"
        )
    which: Any = {"revision": revision, "local_files_only": local, "ignore_patterns": ["*/*", "consolidated*"]}
    try:
        for files in (["*.json", "*.txt", "*.model", "*.py"], ["*.safetensors"]):
            directory = Path(snapshot_download(name, allow_patterns=files, **which))
            refuse_files(directory, allow_pickle=allow_pickle)
        if allow_pickle and not any(directory.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=["*.bin"], **which)
    except OSError as error:
        raise NotReachableError(f"model {name!r} could not be fetched from the hub: {error}") from error
    return directory


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


def data_file(package: str, file: str) -> Path | None:
    """A file of an installed distribution, found without importing it; None when absent. A ``==version`` is not compared."""
    try:
        path = Path(str(metadata.distribution(package.partition("==")[0]).locate_file(file)))
    except metadata.PackageNotFoundError:
        return None
    return path if path.exists() else None


def saved(name: str, files: Sequence[Path]) -> Loaded:
    """A saved model, as it is, or inside a zip file that is spread over several packages."""
    directory = files[0].parent if len(files) == 1 else assembled(name, files)
    return Loaded(auto_model(directory, use_safetensors=True), auto_tokenizer(directory), name)


def smollm2(name: str, files: Sequence[Path]) -> Loaded:
    """A GGUF file, de-quantised by transformers the first time and kept as float32."""
    import torch
    import transformers

    def save(directory: Path) -> None:
        model, tokenizer = from_gguf(files[0])
        with contextlib.redirect_stderr(io.StringIO()):  # saving draws one too
            model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    notes = ("weights de-quantised from 4 bits",)
    try:
        # Another transformers may de-quantise in another way: it gets a directory of its own.
        directory = made_once(f"{name}-{files[0].stat().st_size}-transformers-{transformers.__version__}", save)
    except OSError:  # nowhere to keep it
        return Loaded(*from_gguf(files[0]), name, notes)
    model = auto_model(directory, use_safetensors=True, dtype=torch.float32)
    return Loaded(model, auto_tokenizer(directory), name, notes)


def gguf_file(file: Path) -> Loaded:
    """A model in a GGUF file, de-quantised as a whole."""
    try:
        from gguf import GGUFReader

        kinds = {tensor.tensor_type.name for tensor in GGUFReader(file).tensors if len(tensor.shape) > 1}
    except ImportError:
        raise ImportError("GGUF files need gguf: pip install 'lipscope[offline]'") from None
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{file} is no GGUF file, or damaged: {error}") from error
    return Loaded(*from_gguf(file), file.stem, (f"weights de-quantised from GGUF {', '.join(sorted(kinds))}",))


def from_gguf(file: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file, de-quantised to float32."""
    import torch

    # De-quantising draws a progress bar that transformers cannot be asked to leave out.
    with contextlib.redirect_stderr(io.StringIO()):
        model: Any = auto_model(file.parent, gguf_file=file.name, dtype=torch.float32)
    # The weights are plain float32 now; transformers would still refuse to save a model that it calls quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return model, tokenizer_in(file.parent, gguf_file=file.name)


def whisper_encoder(name: str, files: Sequence[Path]) -> Loaded:
    """The encoder of a Whisper checkpoint in its first authors' layout; hears log-mel features, 1,500 tokens a window.

    The file is a pickle, opened with ``weights_only=True``: it may hold tensors and plain values only, no code.
    """
    import torch
    from transformers import WhisperConfig, WhisperFeatureExtractor
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    checkpoint = torch.load(files[0], map_location="cpu", weights_only=True)
    dims = checkpoint["dims"]
    config = WhisperConfig(
        num_mel_bins=dims["n_mels"], d_model=dims["n_audio_state"], max_source_positions=dims["n_audio_ctx"],
        encoder_layers=dims["n_audio_layer"], encoder_attention_heads=dims["n_audio_head"],
        encoder_ffn_dim=4 * dims["n_audio_state"], vocab_size=dims["n_vocab"],
    )  # fmt: skip
    model: nn.Module = WhisperEncoder(config)
    weights = {name: tensor for name, tensor in checkpoint["model_state_dict"].items() if name.startswith("encoder.")}
    for old, new in _WHISPER_NAMES.items():
        weights = {name.replace(old, new): tensor for name, tensor in weights.items()}
    # Strict: a tensor too many or too few is an error, not a random weight.
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=True)
    hears = WhisperFeatureExtractor(feature_size=dims["n_mels"])  # type: ignore[no-untyped-call]
    return Loaded(model.eval(), None, name, ("weights stored in 16 bits",), hears)


# What the first authors call a tensor of the encoder, and what transformers calls it.
_WHISPER_NAMES = {
    "encoder.": "",
    "positional_embedding": "embed_positions.weight",
    "blocks.": "layers.",
    "attn_ln.": "self_attn_layer_norm.",
    "mlp_ln.": "final_layer_norm.",
    "attn.query.": "self_attn.q_proj.",
    "attn.key.": "self_attn.k_proj.",
    "attn.value.": "self_attn.v_proj.",
    "attn.out.": "self_attn.out_proj.",
    "mlp.0.": "fc1.",
    "mlp.2.": "fc2.",
    "ln_post.": "layer_norm.",
}


def assembled(name: str, parts: Sequence[Path]) -> Path:
    """The directory with the saved model inside the zip file made up of the parts in order; unpacked once, into a cache."""

    def unpack(directory: Path) -> None:
        with tempfile.TemporaryFile(dir=directory) as joined:
            for part in parts:
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, joined)
            with zipfile.ZipFile(joined) as archive:
                for member in archive.infolist():
                    *folders, file = member.filename.split("/")
                    if len(folders) == 1 and Path(file).suffix in (".json", ".txt", ".safetensors"):
                        with archive.open(member) as source, (directory / file).open("wb") as out:
                            shutil.copyfileobj(source, out)

    # Another size of the parts is another file: it gets a directory of its own.
    return made_once(f"{name}-{sum(part.stat().st_size for part in parts)}", unpack)


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """A directory of the cache that ``make`` fills the first time; ``name`` says everything that its content depends on."""
    target = cache_directory() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Made beside it and then renamed: a directory of that name is always whole.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        inside = Path(scratch) / "model"
        inside.mkdir()
        make(inside)
        try:
            inside.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, with the same files
                raise
    return target


def cache_directory() -> Path:
    """Where lipscope keeps what it unpacked: ``$XDG_CACHE_HOME/lipscope`` or ``~/.cache/lipscope``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lipscope"
