"""Look at a model in the middle of its training, and leave no trace.

Inside ``undisturbed(model)`` every module is in eval mode, autocast is off and gradients can be taken. On exit the mode of
every module, its buffers, and the random states of torch, numpy and Python are what they were, to the last bit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode, full precision and autograd inside; modes, buffers and random states restored on exit."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = _buffers(model)
    # A module compiled in place would run, and keep, code traced for the probe.
    compiled = [(module, module._compiled_call_impl) for module in model.modules() if module._compiled_call_impl is not None]
    states = _random_states()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # The attention core gives NaN for a derivative nobody asks for; anomaly detection would take it for a mistake.
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        for device in {"cpu", *(p.device.type for p in model.parameters())} - {"meta"}:
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            for module, _ in modes:
                # Not .eval(), which some modules override.
                module.training = False
            for module, _ in compiled:
                module._compiled_call_impl = None
            yield
        finally:
            for module, training in modes:
                module.training = training
            for module, call in compiled:
                module._compiled_call_impl = call
            _restore_buffers(buffers)
            _restore_random_states(states)


def _buffers(model: nn.Module) -> list[tuple[nn.Module, str, Tensor, int, Tensor]]:
    """Owner, name, tensor, version and content of every buffer: rotary tables may grow or shrink in a forward pass."""
    found = []
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                version = -1 if buffer.is_inference() else buffer._version
                found.append((module, name, buffer, version, buffer.detach().clone()))
    return found


def _restore_buffers(buffers: list[tuple[nn.Module, str, Tensor, int, Tensor]]) -> None:
    for module, name, buffer, version, content in buffers:
        module._buffers[name] = buffer
        if not buffer.is_inference() and buffer._version != version:
            with torch.no_grad():
                buffer.copy_(content)


def _random_states() -> tuple[Any, ...]:
    # Asking CUDA for its state would start it in a process that does not use it.
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), on_gpu, np.random.get_state(), random.getstate()


def _restore_random_states(states: tuple[Any, ...]) -> None:
    on_cpu, on_gpu, numpy_state, python_state = states
    torch.set_rng_state(on_cpu)
    if on_gpu is not None:
        torch.cuda.set_rng_state_all(on_gpu)
    np.random.set_state(numpy_state)
    random.setstate(python_state)
