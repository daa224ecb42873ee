"""Quantised weights: linear layers of other libraries, de-quantised when they are called and let go after it.

A layer's weights come from the ``dequantize`` of the library that packed them (torchao, quanto, HQQ, bitsandbytes), or,
where it has none (GPTQ, AWQ, packed GGUF), from the layer's images of unit vectors: an affine map is known by them. What is
measured is the map with these weights. That some kernels also round their inputs is left out: it has no useful derivative.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.models.capture import model_dtype


class DequantisedLinear(nn.Module):
    """The affine map x ↦ Wx + b of a quantised layer, in floating point; ``weight`` is made anew whenever it is asked for.

    ``like`` has the dtype and the device of the computation. Copies share the packed weights, which nothing changes.
    """

    def __init__(self, source: nn.Module, like: Tensor) -> None:
        super().__init__()
        self.source = (source,)  # in a tuple: its parameters are not this module's
        self.like = nn.Parameter(like.detach().clone(), requires_grad=False)
        bias: Any = getattr(source, "bias", None)
        bias = bias() if callable(bias) else bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().to(self.like), requires_grad=False)
        self.digest: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """W, (outputs, inputs); what was put in its place, where something was."""
        held = self._parameters.get("weight")
        return dense_weight(self.source[0]).to(self.like) if held is None else held

    def forward(self, x: Tensor) -> Tensor:
        """Wx + b."""
        return nn.functional.linear(x, self.weight.to(x), None if self.bias is None else self.bias.to(x))

    def __deepcopy__(self, memo: dict[int, Any]) -> DequantisedLinear:
        return DequantisedLinear(self.source[0], self.like)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        # The hash stands for the weights, so that models with other weights are told apart.
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.digest is None:
            dense = dense_weight(self.source[0]).double().cpu().contiguous().numpy()
            self.digest = torch.tensor(list(hashlib.blake2b(dense.tobytes(), digest_size=16).digest()), dtype=torch.uint8)
        destination[f"{prefix}weight"] = self.digest


def dequantised(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The model with its quantised layers as ``DequantisedLinear``, and a note on them; itself where it has none.

    Raises:
        ValueError: when the weights of a layer cannot be had, naming it.
    """
    like = torch.zeros((), dtype=model_dtype(model))
    packed = {name: part for name, part in model.named_modules() if _is_quantised(part)}
    held = {id(p) for part in packed.values() for p in part.parameters()}
    # Elsewhere (embeddings, experts) what can be de-quantised is so at once.
    others = [p for p in model.parameters() if _knows_itself(p) and id(p) not in held]
    if not packed and not others:
        return model, ()
    kinds = {_kind(p) for p in others}
    memo: dict[int, Any] = {id(p): p for p in [*model.parameters(), *model.buffers()]}
    memo |= {id(p): nn.Parameter(p.dequantize(), requires_grad=False) for p in others}
    for name, part in packed.items():
        here: Tensor = next((t for t in [*part.parameters(), *part.buffers()]), like)
        if here.is_meta:
            raise ValueError(f"{name} is off-loaded; load the whole model on one device")
        memo[id(part)] = DequantisedLinear(part, like.to(here.device))
        _refuse_other_map(name, part, memo[id(part)])
        weight = getattr(part, "weight", None)
        kinds.add(_kind(weight if isinstance(weight, Tensor) and _knows_itself(weight) else part))
    made = copy.deepcopy(model, memo)
    for part in made.modules():
        for flag in ("hf_quantizer", "is_quantized", "quantization_method"):
            vars(part).pop(flag, None)
    return made, (f"weights de-quantised from {', '.join(sorted(kinds))}; rounding of activations in its kernels left out",)


def dense_weight(source: nn.Module) -> Tensor:
    """The weights of a quantised layer in floating point, (outputs, inputs)."""
    weight: Any = getattr(source, "weight", None)
    weight = weight() if callable(weight) and not isinstance(weight, Tensor) else weight
    with torch.no_grad():
        if callable(own := getattr(source, "dequantize", None)):
            dense: Tensor = own()
        elif type(weight).__name__ in _BITSANDBYTES:
            from transformers.integrations.bitsandbytes import dequantize_bnb_weight

            if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
                # Packed anew by its first call on a CPU, which its own dequantize does not know; saving undoes it.
                source = copy.deepcopy(source)
                source.state_dict()
                weight = source.weight
            dense = dequantize_bnb_weight(weight, getattr(source, "state", None))
        elif isinstance(weight, Tensor) and (weight.is_quantized or _knows_itself(weight)):
            dense = weight.dequantize()
        else:
            dense = _images(source, torch.eye(_width(source))).mT
    return dense.detach()


def _images(source: nn.Module, x: Tensor) -> Tensor:
    """W x of rows x, by the layer's own kernel, in the first floating type that it takes."""
    # A copy: some layers pack their weights anew when they are called, and digits are lost where a bias is added.
    source = copy.deepcopy(source, {id(p): p for p in source.parameters() if _knows_itself(p)})
    if isinstance(getattr(source, "bias", None), Tensor):
        setattr(source, "bias", None)  # noqa: B010
    held, errors = [*source.parameters(), *source.buffers(), x], []
    probes = torch.cat([x, x[:1] * 0]).to(held[0].device)
    for dtype in dict.fromkeys([*(t.dtype for t in held if t.dtype in _FLOATS), *_FLOATS]):
        try:
            with torch.no_grad():
                project: Any = source
                y: Tensor = project(probes.to(dtype)[None])[0].to(torch.promote_types(dtype, torch.float32))
        except Exception as error:  # whatever a kernel of another library raises
            errors.append(f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
        else:
            return y[:-1] - y[-1]
    raise ValueError(f"its kernel does not run here ({errors[0]})")


def _refuse_other_map(name: str, source: nn.Module, made: DequantisedLinear) -> None:
    """Refuse a layer whose images of a few unit vectors are not columns of what was made of it."""
    try:
        weight = made.weight.float()
        columns = torch.linspace(0, weight.shape[1] - 1, min(weight.shape[1], 8)).long()
        probes = torch.eye(weight.shape[1])[columns]
        images = _images(source, probes).float().to(weight.device)
    except (ValueError, AttributeError, TypeError, RuntimeError) as error:
        raise ValueError(f"the quantised weights of {name} ({type(source).__name__}) cannot be had: {error}") from error
    if not bool(weight.isfinite().all()):
        raise ValueError(f"{name}: the quantised weights hold NaN or infinite values: they are damaged")
    away = float((images - weight[:, columns].mT).abs().max())
    if images.shape != (len(columns), len(weight)) or away > _KERNEL * float(weight.abs().max()):
        raise ValueError(
            f"{name} ({type(source).__name__}): what it makes of unit vectors differs by {away:.3g} from its de-quantised "
            "weights, so these are not its weights"
        )


def _is_quantised(part: nn.Module) -> bool:
    """Whether the module is a linear map whose weights are no plain floating tensor."""
    weight: Any = getattr(part, "weight", None)
    if not isinstance(_width(part), int):
        return False
    if isinstance(weight, Tensor):
        return _knows_itself(weight) or weight.dtype not in _FLOATS
    return callable(weight) or any(not t.is_floating_point() for t in [*part.parameters(False), *part.buffers(False)])


def _knows_itself(weight: Tensor) -> bool:
    """Whether the tensor is of a type with a ``dequantize`` of its own, as those of torchao and quanto are."""
    return getattr(type(weight), "dequantize", None) is not Tensor.dequantize


def _width(part: nn.Module) -> Any:
    return getattr(part, "in_features", getattr(part, "infeatures", None))


def _kind(what: object) -> str:
    """How notes call a packed layer or tensor: its library and type."""
    return f"{type(what).__module__.partition('.')[0]} {type(what).__name__}"


_BITSANDBYTES = ("Params4bit", "Int8Params")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_KERNEL = 0.02  # kernels round: to half precision, and inputs to 8 bits
