"""From text, token ids or embeddings to the keyword arguments of a model; and a small input that any model accepts."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lipscope.models.anatomy import decoder_of
from lipscope.models.capture import model_device, model_dtype
from lipscope.models.media import how_to_ask, reads_text, samples_for, signals
from lipscope.models.refusals import check_ids

if TYPE_CHECKING:
    from lipscope.models.model import Model


_PROBE_TOKENS = 8


def probe_inputs(model: nn.Module, n: int | None = None) -> dict[str, Any]:
    """Keyword arguments for a pass of n tokens, a few by default, from a fixed seed; refuses inputs of other kinds.

    A decoder gets another number of them than its encoder, so that its cross-attention is told apart.
    """
    found = _first_inputs(model, n)
    known = None if decoder_of(model) is None else vocabulary(model)
    if known is None:
        return found
    first = next(iter(found.values()))
    short = first.shape[1] - 1 if "input_ids" in found else _PROBE_TOKENS
    ids = torch.randint(min(10, known - 1), known, (len(first), short or 2), generator=torch.Generator().manual_seed(1))
    return found | {"decoder_input_ids": ids.to(first.device)}


def _first_inputs(model: nn.Module, n: int | None) -> dict[str, Any]:
    short = _PROBE_TOKENS if n is None else n
    generator = torch.Generator().manual_seed(0)
    config = getattr(model, "config", None)
    dtype, device = model_dtype(model), model_device(model)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)

    if config is None:
        attentions = [part for part in model.modules() if isinstance(part, nn.MultiheadAttention)]
        if not attentions:
            raise ValueError(
                f"{type(model).__name__} is neither a transformers model nor a torch module with nn.MultiheadAttention "
                "inside; measure it as a map with lipscope.local_lipschitz(module, X)"
            )
        shape = (2, short) if all(part.batch_first for part in attentions) else (short, 2)
        return {"tokens": gaussian(*shape, attentions[0].embed_dim)}
    kind = getattr(model, "main_input_name", "input_ids")
    if n is not None and kind != "input_ids":
        raise ValueError(f"{type(model).__name__} takes {kind}, so its number of tokens cannot be chosen")
    match kind:
        case "input_ids":
            short = min(short, position_limit(model) or short)
            ids = vocabulary(model)
            if ids is None:
                raise ValueError(f"{type(model).__name__} does not say how many token ids it knows")
            return {"input_ids": torch.randint(min(10, ids - 1), ids, (2, short), generator=generator).to(device)}
        case "pixel_values":
            size = config.image_size if isinstance(config.image_size, int) else max(config.image_size)
            return {"pixel_values": gaussian(1, config.num_channels, size, size)}
        case "input_features":
            return {"input_features": gaussian(1, config.num_mel_bins, 2 * config.max_source_positions)}
        case "input_values":
            return {"input_values": gaussian(1, samples_for(config, _PROBE_TOKENS))}
        case other:
            raise ValueError(f"{type(model).__name__} takes {other}, an input that lipscope does not know how to probe")


def vocabulary(model: nn.Module) -> int | None:
    """How many token ids a model knows: by its configuration and by the rows of its input embeddings."""
    known = getattr(getattr(model, "config", None), "vocab_size", None)
    found = [known] if isinstance(known, int) else []
    with suppress(AttributeError, NotImplementedError):
        table = cast(Any, model).get_input_embeddings()
        found += [len(table.weight)] if isinstance(table, nn.Embedding) else []
    return min(found, default=None)


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


class TokenArguments(TypedDict, total=False):
    """What to measure on: exactly one of them, but for ``attention_mask``."""

    input_ids: Tensor  # token ids (n,) or (B, n)
    inputs_embeds: Tensor  # embedded tokens (n, d) or (B, n, d)
    text: str | Sequence[str]  # one or more texts, tokenised as the model expects
    inputs: dict[str, Any]  # the model's keyword arguments as they are
    audio: str | os.PathLike[str] | Tensor  # a WAV file, or samples (T,) at the rate of the model's processor
    image: str | os.PathLike[str] | Tensor  # an image file, or pixels (height, width, 3) as uint8
    features: str | os.PathLike[str] | Tensor  # what the processor would make, or a safetensors file with that
    attention_mask: Tensor  # 1 at real tokens, 0 at padding, (B, n); beside ``input_ids`` or ``inputs_embeds``


_MEDIA = ("audio", "image", "features")
_KINDS = ("input_ids", "inputs_embeds", "text", "inputs", *_MEDIA)


def token_inputs(handle: Model, **arguments: Unpack[TokenArguments]) -> dict[str, Any]:
    """The model's keyword arguments for exactly these tokens; refuses what is empty, too long or outside the vocabulary.

    ``arguments`` are those of ``TokenArguments``.
    """
    unknown = set(arguments) - {*_KINDS, "attention_mask"}
    if unknown:
        raise TypeError(f"unknown argument {unknown.pop()!r}; tokens are given as {', '.join(_KINDS)} and attention_mask")
    given = [name for name in _KINDS if arguments.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"give exactly one of {', '.join(_KINDS)}, got {' and '.join(given) or 'none'}")
    attention_mask = arguments.get("attention_mask")
    name, tokens = given[0], cast(Tensor, arguments.get(given[0]))
    if name == "inputs":
        if hasattr(handle.model, "config") and not any(isinstance(v, Tensor) for v in arguments["inputs"].values()):
            raise ValueError("inputs hold no tensor: give the model's keyword arguments, such as {'input_ids': …}")
        return arguments["inputs"]
    if name in _MEDIA:
        pieces = [piece.inputs for piece in signals(handle, **{name: arguments.get(name)})]  # type: ignore[arg-type]
        return {key: torch.cat([piece[key] for piece in pieces]) for key in pieces[0]}
    if name == "text":
        name, (tokens, attention_mask) = "input_ids", tokenise(handle, arguments["text"])
    dimensions = 2 if name == "input_ids" else 3
    tokens = tokens[None] if tokens.ndim == dimensions - 1 else tokens
    if tokens.ndim != dimensions or 0 in tokens.shape:
        raise ValueError(f"{name} must hold at least one token, with shape (n, …) or (B, n, …)")
    check_length(handle, tokens.shape[1])
    if name == "input_ids":
        check_ids(tokens, handle.model)
    else:
        tokens = tokens.to(handle.dtype)
    result: dict[str, Any] = {name: tokens.to(handle.device)}
    if decoder_of(handle.model) is not None:
        if attention_mask is not None or name != "input_ids":
            raise ValueError("a decoder reads token ids, as many of every text; give anything else as inputs={…}")
        config: Any = handle.model.config
        start = getattr(config, "decoder_start_token_id", None) or getattr(config, "bos_token_id", None) or 0
        # As in training: the decoder is to say what the encoder reads, and sees what it has said so far.
        result["decoder_input_ids"] = torch.cat([torch.full_like(tokens[:, :1], start), tokens[:, :-1]], 1).to(handle.device)
    if attention_mask is not None:
        attention_mask = attention_mask.reshape(tokens.shape[:2]).to(handle.device)
        result["attention_mask"] = attention_mask
        if handle.layers[0].causal and not bool(attention_mask[:, 0].all()) and accepts(handle.model, "position_ids"):
            # Left padding: positions count real tokens, as generation does.
            result["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
    return result


def packed_inputs(handle: Model, documents: Sequence[Sequence[int]]) -> tuple[dict[str, Any], list[int]]:
    """Several documents (lists of token ids) in one sequence: the inputs, and the lengths for ``record``.

    Positions start again in every document, so each is measured as if it stood alone.
    """
    lengths = [len(document) for document in documents]
    if not lengths or min(lengths) < 1:
        raise ValueError("every packed document needs at least one token")
    ids = torch.tensor([[i for document in documents for i in document]], device=handle.device)
    check_ids(ids, handle.model)
    inputs: dict[str, Any] = {"input_ids": ids}
    if accepts(handle.model, "position_ids"):
        positions = torch.cat([torch.arange(length) for length in lengths]) + first_position(handle.model)
        inputs["position_ids"] = positions[None].to(handle.device)
    return inputs, lengths


def check_length(handle: Model, n: int) -> int:
    """The number of tokens; refuses none, and more than the model has positions for."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    limit = position_limit(handle.model)
    if limit is not None and n > limit:
        raise ValueError(f"n = {n} tokens are more than the {limit} positions of {handle.name}")
    return n


def tokenise(handle: Model, text: str | Sequence[str]) -> tuple[Tensor, Tensor | None]:
    """Token ids (B, n), and the padding mask when the texts differ in length."""
    tokenizer = require_tokenizer(handle)
    texts = [text] if isinstance(text, str) else list(text)
    if not texts or not all(t.strip() for t in texts):
        raise ValueError("text is empty")
    rows = [torch.tensor(refuse_unknown(tokenizer, tokenizer(t)["input_ids"])) for t in texts]
    ids = pad_sequence(rows, batch_first=True, padding_value=getattr(tokenizer, "pad_token_id", None) or 0)
    real = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids, None if bool(real.all()) else real


def refuse_unknown(tokenizer: Any, ids: list[int]) -> list[int]:
    """The token ids of a text, unless the tokenizer does not know it: more than a few of them are its unknown token."""
    unknown: Any = getattr(tokenizer, "unk_token_id", None)
    special = {*getattr(tokenizer, "all_special_ids", ())} - {unknown}
    if unknown not in ids and any(i not in special for i in ids):
        return ids
    words = [i for i in ids if i not in special]
    missed = words.count(unknown)
    # A few words of a sentence may be strange to it.
    if not words or (missed > 0.05 * len(words) and missed >= min(3, len(words) / 2)):
        found = f"{missed} of {len(words)} tokens are unknown to it" if words else "it makes no tokens of it"
        raise ValueError(
            f"the tokenizer does not know this text: {found}. Its files are missing, or it is made for "
            "something else: name one that fits with --tokenizer NAME_OR_DIR (tokenizer=… in Python)"
        )
    return ids


def require_tokenizer(handle: Model) -> Any:
    """The tokenizer, or the reason why this model cannot read text."""
    if not reads_text(handle):  # also where the directory of the whole model has a tokenizer
        raise ValueError(how_to_ask(handle))
    if handle.tokenizer is not None:
        return handle.tokenizer
    raise ValueError(
        f"{handle.name} has no tokenizer, so it cannot read text: name one with --tokenizer NAME_OR_DIR (tokenizer=… in "
        "Python), or use .measure(input_ids=…)"
    )


def runner(model: nn.Module, inputs: dict[str, Any], *, use_cache: bool | None = False) -> Callable[[], Any]:
    """Runs the model on these inputs, without a KV cache; None leaves it to the model."""
    if "tokens" in inputs:
        return lambda: model(inputs["tokens"])
    if getattr(model, "config", None) is None:
        raise ValueError(f"{type(model).__name__} takes its tokens (B, n, d) as inputs={{'tokens': …}}, got {[*inputs]}")
    extra = {"use_cache": use_cache} if use_cache is not None and accepts(model, "use_cache") else {}
    return lambda: model(**extra | inputs)


def accepts(model: nn.Module, argument: str) -> bool:
    """Whether the model's forward has an argument of this name."""
    return argument in inspect.signature(model.forward).parameters
