"""How large tensors get: a mode that watches every floating-point result of any operation inside it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """What is the largest tensor, and which ones are matrices over pairs of tokens.

    Attributes:
        elements: entries of the largest storage of a floating-point result.
        operation: what made it.
        matrices: what made results with two dimensions of at least ``tokens``.
    """

    def __init__(self, tokens: int | None = None) -> None:
        super().__init__()
        self.tokens = tokens
        self.elements = 0
        self.operation = ""
        self.matrices: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor) and value.is_floating_point():
                size = value.untyped_storage().nbytes() // value.element_size()
                if size > self.elements:
                    self.elements, self.operation = size, f"{func} {tuple(value.shape)}"
                if self.tokens is not None and sum(length >= self.tokens for length in value.shape) >= 2:
                    self.matrices.add(f"{func} {tuple(value.shape)}")
        return result
