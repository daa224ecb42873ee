"""Put a monitor on a model in training and leave no trace: which module is watched, on what batch, and with which hooks.

Compiled, data-parallel and Lightning modules wrap the model that is watched. The probe batch is the beginning of a training
batch: its longest inputs, without padding, cut to a few tokens, so that one measurement costs less than one step. Inside
``undisturbed(model)`` every module is in eval mode, autocast is off and gradients can be taken; on exit the mode of every
module, its buffers, and the random states of torch, numpy and Python are what they were, to the last bit.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lipscope.models.inputs import accepts, position_limit
from lipscope.models.model import Model
from lipscope.models.refusals import check_ids

# Arguments of a training step that the map from tokens to tokens does not have.
_NOT_INPUTS = (
    "labels",
    "past_key_values",
    "use_cache",
    "cache_position",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "num_items_in_batch",
    "logits_to_keep",
)
_SHARDS = ("DTensor", "FlatParameter", "ShardedTensor")
_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


def unwrapped(model: nn.Module) -> tuple[nn.Module, bool]:
    """The model inside compiled, data-parallel and other wrappers, and whether it is compiled; refuses sharded weights."""
    compiled = False
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model, compiled = model._orig_mod, True  # type: ignore[assignment]
        elif type(model).__name__ in _WRAPPERS and isinstance(getattr(model, "module", None), nn.Module):
            model = model.module  # type: ignore[assignment]
        elif not _is_pretrained(model) and (inner := _pretrained_inside(model)) is not None:
            model = inner
        else:
            break
    if sharded := next((name for name, p in model.named_parameters() if type(p).__name__ in _SHARDS), None):
        raise ValueError(
            f"{sharded} is sharded over processes (FSDP, tensor parallel), and layers are measured with whole weights: "
            "train with DistributedDataParallel, or measure its checkpoints (lipscope scan)"
        )
    return model, compiled or any(module._compiled_call_impl is not None for module in model.modules())


def _is_pretrained(model: nn.Module) -> bool:
    return any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__)


def _pretrained_inside(model: nn.Module) -> nn.Module | None:
    """The one outermost transformers model among the parts of a module (a LightningModule, say)."""
    found: list[nn.Module] = []
    for part in filter(_is_pretrained, model.modules()):
        if not any(part in set(outer.modules()) for outer in found):
            found.append(part)
    if len(found) > 1:
        names = " and ".join(type(part).__name__ for part in found)
        raise ValueError(f"{type(model).__name__} holds several transformers models ({names}): give the one to watch")
    return found[0] if found else None


def named_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of the model's forward by name."""
    names = list(inspect.signature(model.forward).parameters)
    return dict(zip(names, args, strict=False)) | kwargs


def probe_batch(handle: Model, batch: Any, inputs: int, tokens: int) -> dict[str, Tensor]:
    """The probe batch as the model's keyword arguments: ``inputs`` inputs of at most ``tokens`` tokens, none padded.

    ``batch`` is a mapping of arguments, or a tensor: token ids (B, n), or embedded tokens (B, n, d). Inputs with most tokens
    are kept first. An empty batch, NaN, and a mask that is more than one of padding are refused.
    """
    given = _as_arguments(handle, batch)
    for key, value in given.items():
        if value.numel() == 0:
            raise ValueError(f"the probe batch is empty: {key} has shape {tuple(value.shape)}")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError(f"the probe batch holds NaN or infinite values in {key}")
    name = next((name for name in ("input_ids", "inputs_embeds") if name in given), None)
    if name is None:
        batched = "tokens" not in given or handle.layers[0].batch_first
        return {key: value[:inputs] if batched else value[:tokens, :inputs] for key, value in given.items()}
    if "input_ids" in given:
        check_ids(given["input_ids"], handle.model)
    B, n = given[name].shape[:2]
    real = given.pop("attention_mask", None)
    if real is not None and real.shape != (B, n):
        # Dropping it would measure another map than the one that is trained.
        raise ValueError(
            f"the attention_mask of the probe batch has shape {tuple(real.shape)}; the probe takes masks of padding only, "
            f"of shape ({B}, {n}): give probe=… with such a mask or without one"
        )
    real = torch.ones(B, n, dtype=torch.bool) if real is None else real.bool().cpu()
    lengths = real.sum(-1)
    if int(lengths.max()) == 0:
        raise ValueError("the probe batch is padding only: attention_mask has no 1")
    longest = lengths.argsort(descending=True, stable=True)[:inputs]
    rows = longest[lengths[longest] > 0]
    which = rows[:, None]
    kept = min(tokens, position_limit(handle.model) or tokens, int(lengths[rows].min()))
    positions = torch.stack([seen.nonzero()[:kept, 0] for seen in real[rows]])
    return {
        key: value[which, positions] if value.shape[:2] == (B, n) else value[rows] if value.shape[:1] == (B,) else value
        for key, value in given.items()
    }


def _as_arguments(handle: Model, batch: Any) -> dict[str, Tensor]:
    if isinstance(batch, Mapping):
        if hasattr(handle.model, "config"):
            batch = {k: v for k, v in batch.items() if k not in _NOT_INPUTS and accepts(handle.model, k)}
        given = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
        if batch.get("attention_mask") is not None and "attention_mask" not in given:
            kind = type(batch["attention_mask"]).__name__
            raise ValueError(f"the attention_mask of the probe batch must be a tensor (B, n), got {kind}")
        if not hasattr(handle.model, "config"):
            tokens = [value for value in given.values() if value.is_floating_point()]
            given = {"tokens": tokens[0]} if tokens else {}
    elif isinstance(batch, Tensor):
        kind = "input_ids" if not batch.is_floating_point() else "inputs_embeds"
        given = {kind if hasattr(handle.model, "config") else "tokens": batch}
    else:
        given = {}
    if not given:
        raise ValueError(
            f"the probe batch must be a mapping of the model's arguments or a tensor of tokens, got {type(batch).__name__}"
        )
    # Copies in ordinary mode: tensors made for inference cannot take part in a derivative.
    return {name: value.detach().clone().to(handle.device) for name, value in given.items()}


def adapters(model: nn.Module) -> list[Any]:
    """The low-rank adapters inside a model, by the structure that PEFT gives them: W x + s·B A x with s in ``scaling``."""
    found = (m for m in model.modules() if hasattr(m, "lora_A") and isinstance(getattr(m, "scaling", None), dict))
    return [m for m in found if getattr(m, "merged", False) is not True]


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model is its base model."""
    with ExitStack() as stack:
        for adapter in adapters(model):
            # PEFT's own switch, where it is: without it the magnitudes of DoRA stay.
            off = {"_disable_adapters": True} if hasattr(adapter, "_disable_adapters") else {}
            for name, value in {"scaling": dict.fromkeys(adapter.scaling, 0.0), **off}.items():
                stack.callback(setattr, adapter, name, getattr(adapter, name))
                setattr(adapter, name, value)
        yield


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode, full precision and autograd inside; modes, buffers and random states restored on exit."""
    # The attention core gives NaN for a derivative nobody asks for; anomaly detection would take it for a mistake.
    autograd = torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_detect_anomaly(False)
    precision = full_precision(*{p.device.type for p in model.parameters()} - {"meta"})
    with ExitStack() as stack:
        for context in (*autograd, precision, _same_buffers(model), _same_random_states()):
            stack.enter_context(context)
        for module in model.modules():
            # Not .eval(), which some modules override. A module compiled in place would run, and keep, code for the probe.
            for name, value in {"training": False, "_compiled_call_impl": None}.items():
                if name in vars(module):
                    stack.callback(setattr, module, name, vars(module)[name])
                    setattr(module, name, value)
        yield


@contextmanager
def full_precision(*devices: str) -> Iterator[None]:
    """Inside, autocast is off, on the CPU too: σ and its singular pair do not survive bfloat16."""
    with ExitStack() as stack:
        for device in {"cpu", *devices}:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def _same_buffers(model: nn.Module) -> Iterator[None]:
    """Rotary tables may grow or shrink in a forward pass; afterwards every buffer is the tensor it was, and as it was."""
    found = [(m, name, buffer) for m in model.modules() for name, buffer in m._buffers.items() if buffer is not None]
    contents = [(-1 if buffer.is_inference() else buffer._version, buffer.detach().clone()) for _, _, buffer in found]
    try:
        yield
    finally:
        for (module, name, buffer), (version, content) in zip(found, contents, strict=True):
            module._buffers[name] = buffer
            if not buffer.is_inference() and buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(content)


@contextmanager
def _same_random_states() -> Iterator[None]:
    # Asking CUDA for its state would start it in a process that does not use it.
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    of_numpy, of_python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            np.random.set_state(of_numpy)
            random.setstate(of_python)


class OwnHook:
    """A forward hook, or pre-hook, that stays with one module: in a copy of it, or read back from a file, it does nothing.

    A model carries its hooks along when it is copied or pickled (``torch.save(model)``, spawned processes). What is watched
    is the model itself, so a hook is not copied: an inert one takes its place. ``then`` gets what the hook gets beside
    the module (arguments, keyword arguments, output). It is left out of compiled code, whose graph it would break, unless
    it is ``compilable``.

    Example:
        >>> import copy
        >>> layer, seen = nn.Identity(), []
        >>> _ = layer.register_forward_hook(OwnHook(layer, lambda args, output: seen.append(output)))
        >>> layer(1), copy.deepcopy(layer)(2), seen
        (1, 2, [1])
    """

    def __init__(self, module: nn.Module, then: Callable[..., Any], *, compilable: bool = False) -> None:
        self._module, self._then, self._compilable = module, then, compilable

    def __call__(self, module: nn.Module, *details: Any) -> Any:
        """What ``then`` says, for its own module only: shallow copies share their hooks."""
        runs = module is self._module and (self._compilable or not torch.compiler.is_compiling())
        return self._then(*details) if runs else None

    def __reduce__(self) -> tuple[Any, ...]:
        # Takes anything, returns None, and can be loaded where lipscope is not installed.
        return getattr, (nullcontext(), "__exit__")
