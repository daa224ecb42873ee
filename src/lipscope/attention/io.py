"""Attention layers and tokens in safetensors files. Pickled checkpoints are refused: opening one can run code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.rotary import Rotary

_SEPARATE = ("q", "k", "v")
_OPTIONAL = ("out", "q_bias", "k_bias", "v_bias", "out_bias", "bias", "sinks")
_ROTARY = ("rotary_cos", "rotary_sin")


def load_layer(path: Path, *, heads: int | None = None, transposed: bool = False, **options: Any) -> Attention:
    """Read a layer: tensors q, k, v (or a fused qkv), and optionally out, biases, bias, sinks, rotary_cos and rotary_sin.

    Rotary tables are those of ``Rotary``; the metadata entry ``rotary_interleaved`` (``true`` or ``false``) says how pairs
    are formed.

    Args:
        path: a safetensors file.
        heads: number of query heads; the file's metadata entry ``heads`` or 1 when None.
        transposed: weights are stored (in, out), as in GPT-2's ``Conv1D``.
        **options: other fields of ``Attention``; ``kv_heads`` None means the metadata entry or ``heads``.

    Raises:
        ValueError: when the file is not safetensors, or tensors are missing, unknown or of the wrong shape.
    """
    tensors, metadata = _read(path)
    count = _count(path, metadata, "heads", 1) if heads is None else heads
    if options.get("kv_heads") is None:
        options["kv_heads"] = _count(path, metadata, "kv_heads", 0)
    elif options["kv_heads"] < 1:
        raise ValueError(f"kv_heads must be at least 1, got {options['kv_heads']}")
    known = {*_SEPARATE, *_OPTIONAL, *_ROTARY, "qkv", "qkv_bias"}
    if unknown := sorted(set(tensors) - known):
        raise ValueError(f"{path.name} holds unknown tensors {', '.join(unknown)}; known are: {', '.join(sorted(known))}")
    if given := [name for name in _ROTARY if name in tensors]:
        options["rotary"] = _rotary(path, {name: tensors.pop(name) for name in given}, metadata)
    if "qkv" in tensors:
        if clash := sorted(set(tensors) & {*_SEPARATE, "q_bias", "k_bias", "v_bias"}):
            raise ValueError(f"{path.name} holds both qkv and {', '.join(clash)}: give one of them")
        return Attention.from_fused(heads=count, transposed=transposed, **tensors, **options)
    if missing := sorted(set(_SEPARATE) - set(tensors)):
        raise ValueError(f"{path.name} lacks {', '.join(missing)}; it needs q, k and v, or a fused qkv")
    if transposed:
        tensors |= {name: tensors[name].mT for name in (*_SEPARATE, "out") if name in tensors}
    return Attention(heads=count, **tensors, **options)


def load_tokens(path: Path) -> Tensor:
    """Read the one tensor of a safetensors file."""
    tensors, _ = _read(path)
    if len(tensors) != 1:
        raise ValueError(f"{path.name} must hold exactly one tensor (the tokens), it holds {len(tensors)}")
    tokens: Tensor = next(iter(tensors.values()))
    return tokens


def _count(path: Path, metadata: dict[str, str], name: str, default: int) -> int:
    text = metadata.get(name, str(default))
    if not text.isdecimal():
        raise ValueError(f"metadata entry {name!r} of {path.name} must be a number, got {text!r}")
    return int(text)


def _rotary(path: Path, tables: dict[str, Tensor], metadata: dict[str, str]) -> Rotary:
    if missing := sorted(set(_ROTARY) - set(tables)):
        raise ValueError(f"{path.name} lacks {', '.join(missing)}: rotary embeddings need both rotary_cos and rotary_sin")
    text = metadata.get("rotary_interleaved", "false")
    if text not in ("true", "false"):
        raise ValueError(f"metadata entry 'rotary_interleaved' of {path.name} must be true or false, got {text!r}")
    return Rotary(tables["rotary_cos"], tables["rotary_sin"], text == "true")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path.name} is not a safetensors file ({error}). Pickled checkpoints are not opened, since loading one can "
            "run code; convert it with safetensors.torch.save_file"
        ) from None
