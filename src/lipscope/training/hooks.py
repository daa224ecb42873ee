"""Hooks that stay with the model they were put on: in a copy of it, or read back from a file, they do nothing.

A model carries its hooks along when it is copied or pickled (``torch.save(model)``, processes that are spawned). What is
watched is the model itself, so a hook is not copied: an inert one takes its place.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn


class OwnHook:
    """A forward hook, or pre-hook, of one module.

    Args:
        module: the module that it is registered on.
        then: called with what the hook gets beside the module (arguments, keyword arguments, output).

    Example:
        >>> import copy
        >>> layer, seen = nn.Identity(), []
        >>> _ = layer.register_forward_hook(OwnHook(layer, lambda args, output: seen.append(output)))
        >>> layer(1), copy.deepcopy(layer)(2), seen
        (1, 2, [1])
    """

    def __init__(self, module: nn.Module, then: Callable[..., Any]) -> None:
        self._module, self._then = module, then

    def __call__(self, module: nn.Module, *details: Any) -> Any:
        """What ``then`` says, for its own module only: shallow copies share their hooks."""
        return self._then(*details) if module is self._module else None

    def __reduce__(self) -> tuple[Any, ...]:
        # Takes anything, returns None, and can be loaded where lipscope is not installed.
        return getattr, (nullcontext(), "__exit__")
