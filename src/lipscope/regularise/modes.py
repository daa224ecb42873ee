"""Eval mode and full precision for a moment: modules come back to the mode they were in, random numbers are not touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
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


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Inside, autocast is off: σ and its singular pair do not survive bfloat16."""
    with ExitStack() as stack:
        for kind in {"cpu", device.type}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
