"""Memory for tile matrices that is taken once per product and used again for every tile.

A matrix of a few MiB that is freed goes back to the system, which hands out zeroed pages for the next one: with hundreds of
tiles per product this took up to a third of the time.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Workspace:
    """Named matrices that live until the next one of the same name is asked for."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._buffers: dict[str, Tensor] = {}

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """The batched product a·b."""
        return torch.bmm(a, b, out=self.matrix(name, *a.shape[:2], b.shape[2]))

    def matrix(self, name: str, *shape: int) -> Tensor:
        """Uninitialised numbers of this shape."""
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = self._like.new_empty(size)
        return buffer[:size].view(shape)
