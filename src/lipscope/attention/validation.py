"""What a layer refuses when it is made, and how others are derived from it without being checked again.

To look for NaN in all tensors costs as much as to use them. A layer is checked once, when it is made: its heads, its copies
in another dtype and its view of one input consist of numbers that have been checked.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lipscope.attention.layer import Attention
    from lipscope.spectral.result import SpectralNorm

Made = TypeVar("Made")


def derived(made: Made, **changes: Any) -> Made:
    """The frozen dataclass ``made`` with some fields changed to values that are known to fit: ``replace``, unchecked."""
    other = object.__new__(type(made))
    for field in dataclasses.fields(made):  # type: ignore[arg-type]
        object.__setattr__(other, field.name, changes.get(field.name, getattr(made, field.name)))
    return other


def rows_of(made: Made, items: Tensor, *names: str, **changes: Any) -> Made:
    """The same with the listed rows of the named tensors, and other changes; what is one tensor, or None, stays so."""
    tensors = {name: getattr(made, name) for name in names}
    rows = {id(tensor): tensor[items] for tensor in tensors.values() if tensor is not None}
    return derived(made, **{name: rows.get(id(tensor)) for name, tensor in tensors.items()}, **changes)


def moved(made: Made, dtype: torch.dtype | None, device: torch.device | None) -> Made:
    """The same with all tensors in another dtype or on another device; refuses numbers too large for the dtype."""
    changes = {}
    for field in dataclasses.fields(made):  # type: ignore[arg-type]
        value = getattr(made, field.name)
        if hasattr(value, "to"):
            changes[field.name] = there = value.to(dtype=dtype, device=device)
            if isinstance(there, Tensor) and torch.finfo(there.dtype).max < torch.finfo(value.dtype).max:
                refuse_infinite(f"{field.name} in {there.dtype}", there)
    return derived(made, **changes)


# Entries within 2^±24 are left as they are: their products, squares and fourth powers stay far within the range of floats.
_USUAL = 24


def balanced(
    layer: Attention, X: Tensor, offset: Tensor | None = None, *, heads: bool = False
) -> tuple[Attention, Tensor, Tensor | None, int]:
    """The same layer at the same tokens (and offset), in units by powers of two in which all entries are at most one.

    J (of ``heads`` before W_O) is 2^power times that of the result: no digit changes, and no square leaves the range of
    floats. As they are, with power 0, where no unit is unusual.
    """
    tokens, out = max(power_above(X), power_above(offset)), power_above(layer.out)
    named = {name: (getattr(layer, name), getattr(layer, f"{name}_bias")) for name in "qkv"}
    if layer.sinks is None:
        # What ``Point`` leaves out.
        named["v"] = named["v"][0], None
        if layer.rotary is None and layer.softcap is None:
            named["k"] = named["k"][0], None
    powers = {name: max(power_above(W) + tokens, power_above(bias)) for name, (W, bias) in named.items()}
    found = (tokens, out, *(p for pair in named.values() for p in map(power_above, pair)))
    if all(abs(p) <= _USUAL for p in found if p > _NOTHING):
        return layer, X, offset, 0
    tokens, out = (0 if p <= _NOTHING else p for p in (tokens, out))
    changes: dict[str, Any] = {"out": times_power(layer.out, -out), "out_bias": None}
    for name, (W, bias) in named.items():
        power = powers[name] = 0 if powers[name] <= _NOTHING / 2 else powers[name]
        changes |= {name: times_power(W, tokens - power), f"{name}_bias": times_power(bias, -power)}
    try:
        changes["scale"] = math.ldexp(layer.tau, powers["q"] + powers["k"])
    except OverflowError:
        raise FloatingPointError("the attention scores overflow at this input: rescale the tokens or the weights") from None
    scaled = derived(layer, **changes)
    return scaled, times_power(X, -tokens), times_power(offset, -tokens), powers["v"] - tokens + (0 if heads else out)


_NOTHING = -(1 << 20)


def power_above(tensor: Tensor | None) -> int:
    """The power of two above the largest entry, far below all others where there is none."""
    largest = 0.0 if tensor is None else max(abs(float(end)) for end in torch.aminmax(tensor.detach()))
    return math.frexp(largest)[1] if largest > 0 else _NOTHING


def times_power(tensor: Any, power: int, *, outwards: int = 0) -> Any:
    """A tensor (or None) times 2^power, in two steps: either factor alone may leave the range of floats.

    Numbers at the lower end of that range are moved by the least float, up with ``outwards`` = 1 and down with −1.
    """
    if tensor is None or power == 0:
        return tensor
    half = max(-1000, min(1000, power // 2))
    wide = tensor.detach().double() * 2.0**half * 2.0 ** max(-1000, min(1000, power - half))
    wide = torch.where(tensor > 0, (wide + outwards * 5e-324).clamp_min(0.0), wide) if outwards else wide
    return wide.to(tensor.dtype)


def scaled_back(result: SpectralNorm, power: int) -> SpectralNorm:
    """A result of ``balanced`` tokens in the units of the given ones."""
    ends = {"lower": -1, "estimate": 0, "upper": 1, "residual": 0, "singular_values": 0}
    scaled = {name: times_power(getattr(result, name), power, outwards=way) for name, way in ends.items()}
    if not bool(torch.isfinite(scaled["estimate"]).all()):
        raise FloatingPointError("σ is beyond the range of float64 at this input: rescale the weights")
    return dataclasses.replace(result, **scaled)


def refuse_infinite(name: str, tensor: Tensor) -> None:
    """Raise when a tensor is not finite."""
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} holds NaN or infinite values")


def validate(layer: Attention) -> None:
    """Refuse an inconsistent layer, naming the argument and the two sizes that disagree."""
    for field in dataclasses.fields(layer):
        if isinstance(tensor := getattr(layer, field.name), Tensor):
            if not tensor.is_floating_point():
                raise ValueError(f"{field.name} must be floating point, got {tensor.dtype}")
            refuse_elsewhere(field.name, tensor, layer)
            refuse_infinite(field.name, tensor)
    for wrong, message in _problems(layer):
        if wrong:
            raise ValueError(message)


def refuse_elsewhere(name: str, tensor: Tensor, layer: Attention) -> None:
    """Raise when a tensor has another dtype than the layer, or is on another device."""
    if (tensor.dtype, tensor.device) != (layer.dtype, layer.device):
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, but q is {layer.dtype} on {layer.device}")


def _problems(layer: Attention) -> Iterator[tuple[bool, str]]:
    """Whether something is wrong, and what; each presupposes that the earlier ones are not."""
    matrices = {"q": layer.q, "k": layer.k, "v": layer.v}
    for name, matrix in matrices.items():
        shape = tuple(matrix.shape)
        yield matrix.ndim != 2 or 0 in shape, f"{name} must be a non-empty matrix, got shape {shape}"
        yield shape[1] != layer.width, f"{name} takes tokens of width {shape[1]}, but q takes width {layer.width}"
    heads, kv_heads = layer.heads, layer.kv_heads
    yield heads < 1, f"heads must be at least 1, got {heads}"
    divides = kv_heads >= 1 and heads % kv_heads == 0
    yield not divides, f"kv_heads = {kv_heads} must be a positive divisor of heads = {heads}"
    for (name, matrix), count in zip(matrices.items(), (heads, kv_heads, kv_heads), strict=True):
        yield bool(matrix.shape[0] % count), f"{name} has {matrix.shape[0]} rows, which {count} heads do not divide"
    keys = kv_heads * layer.head_width
    wanted = f"kv_heads × query width = {kv_heads} × {layer.head_width} = {keys}"
    yield layer.k.shape[0] != keys, f"k has {layer.k.shape[0]} rows, but {wanted}"
    joined = heads * layer.value_width
    if layer.out is not None:
        shape = tuple(layer.out.shape)
        yield len(shape) != 2 or shape[1] != joined, f"out has shape {shape}, but the heads joined have width {joined}"
    if layer.bias is not None:
        shape = tuple(layer.bias.shape)
        square = len(shape) in (2, 3, 4) and shape[-1] == shape[-2]
        yield not square, f"bias must be (n, n), (heads, n, n) or (B, heads, n, n), got {shape}"
        if len(shape) > 2:
            yield shape[-3] not in (1, heads), f"bias is for {shape[-3]} heads, but the layer has heads = {heads}"
    if layer.rotary is not None:
        width = layer.rotary.width
        yield width > layer.head_width, f"rotary rotates {width} coordinates, but queries have width {layer.head_width}"
        refuse_elsewhere("rotary", layer.rotary.cos, layer)
    capped = layer.softcap is None or 0 < layer.softcap < math.inf
    yield not capped, f"softcap must be positive and finite (None for no cap), got {layer.softcap}"
    yield layer.scale is not None and not math.isfinite(layer.scale), f"scale must be finite, got {layer.scale}"
    lengths = {"q_bias": len(layer.q), "k_bias": len(layer.k), "v_bias": len(layer.v)}
    for name, length in (lengths | {"out_bias": layer.output_width, "sinks": heads}).items():
        vector = getattr(layer, name)
        if vector is not None:
            yield vector.shape != (length,), f"{name} has shape {tuple(vector.shape)}, but {(length,)} is needed"
