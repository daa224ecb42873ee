"""A device that is not there: tensors that compute on the CPU, and refuse to meet a CPU tensor as those of a GPU do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

# A type of device that this build of torch knows the name of, and has no kernels for.
DEVICE = torch.device("lazy")
# A GPU takes values, and indices, from the CPU as well.
_CROSSING = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
_INDEXING = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default}


class Elsewhere(Tensor):
    """A tensor whose numbers are in ``inner``; for everybody else it is on another device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=DEVICE
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.inner.tolist()


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    away = any(isinstance(t, Elsewhere) for t in given)
    looked_at = [args[0], *tree_leaves(args[2:])] if func in _INDEXING else given
    if away and func not in _CROSSING:
        for t in looked_at:
            if isinstance(t, Tensor) and not isinstance(t, Elsewhere) and t.ndim > 0:
                raise RuntimeError(f"{func}: a CPU tensor of shape {tuple(t.shape)} meets one on another device")
    device = kwargs.get("device")
    if device is not None:
        away = torch.device(device).type == DEVICE.type
        if away and isinstance(kwargs.get("generator"), torch.Generator):
            raise RuntimeError(f"{func}: a generator of the CPU draws for another device")
    inside_args, inside = tree_map_only(Elsewhere, lambda t: t.inner, (args, kwargs))
    if device is not None and away:
        inside["device"] = torch.device("cpu")
    if func is torch.ops.aten._to_copy.default:
        out = func(*inside_args, **inside)
        out = out.clone() if any(out is t for t in tree_leaves(inside_args)) else out
    else:
        out = func(*inside_args, **inside)
    if not away:
        return out
    out = tree_map_only(Tensor, Elsewhere, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


class _Everywhere(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(func, args, kwargs or {})


class _FromNumbers(TorchFunctionMode):
    """Tensors of Python's numbers, which torch makes without telling a dispatch mode: on the CPU first, then there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.new_tensor:
            kwargs = {"dtype": args[0].dtype, "device": args[0].device} | kwargs
            func, args = torch.tensor, args[1:]
        if func not in (torch.tensor, torch.as_tensor) or isinstance(args[0], Elsewhere):
            return func(*args, **kwargs)
        device = kwargs.pop("device", None)
        made = func(*args, **kwargs)
        return made if device is None else made.to(device)


@contextmanager
def another_device() -> Iterator[torch.device]:
    """The device, and tensors that are made on it."""
    with _Everywhere(), _FromNumbers():
        yield DEVICE


def moved(model: nn.Module) -> nn.Module:
    """The module with its parameters and buffers there."""
    for part in model.modules():
        for name, p in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(part, name, nn.Parameter(Elsewhere(p.detach()), requires_grad=False))
        for name, b in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(part, name, Elsewhere(b))
    return model
