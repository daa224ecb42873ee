"""Eval mode for a moment: every module comes back to exactly the mode it was in, random numbers are not touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(module: nn.Module | None) -> Iterator[None]:
    """Inside, the module and all its parts are in eval mode."""
    if module is None:
        yield
        return
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
