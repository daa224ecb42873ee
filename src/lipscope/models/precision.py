"""float64 that stays float64 inside a model.

Model code "upcasts" to float32 in softmax, RMSNorm and rotary embeddings. In a float64 model the same line rounds every
activation to seven digits. ``double_throughout()`` turns those casts into no-ops for float64 tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - its customary name
from torch.overrides import TorchFunctionMode


class _KeepDouble(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func in _CASTS:
                args = tuple(torch.float64 if value is torch.float32 else value for value in args)
                if kwargs.get("dtype") is torch.float32:
                    kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


_CASTS = {Tensor.to, Tensor.type, Tensor.softmax, Tensor.log_softmax, F.softmax, F.log_softmax, torch.softmax, torch.mean}


@contextmanager
def double_throughout(dtype: torch.dtype) -> Iterator[None]:
    """Inside, casts of float64 tensors to float32 do nothing. Only active when ``dtype`` is float64."""
    if dtype != torch.float64:
        yield
        return
    with _KeepDouble():
        yield
