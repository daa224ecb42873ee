"""What layers that are described by their tensors share: where the tensors live, and how they are moved."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from lipscope.attention.rotary import Rotary


@dataclass(frozen=True, eq=False)
class Described:
    """A layer as tensors; the first of them are its query weights.

    Attributes:
        q: query weights, ``(heads·dk, d)``.
    """

    q: Tensor

    @property
    def width(self) -> int:
        """Token dimension d."""
        return self.q.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the weights."""
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.q.device

    def to(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Self:
        """The same layer in another dtype or on another device."""
        moved: dict[str, Any] = {
            field.name: value.to(dtype=dtype, device=device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor | Rotary)
        }
        return dataclasses.replace(self, **moved)
