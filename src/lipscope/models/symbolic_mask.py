"""Masks of long sequences as rules: what ``transformers`` hands to its attention function, without the n×n matrix.

The mask function that the seam registers receives the rule itself, a function of (input, head, query, key). For long
sequences it answers with a ``SymbolicMask``: a tensor for everybody who looks at its shape or passes it on, and the rule for
our attention core, which evaluates it tile by tile. Whoever computes with it gets the true boolean matrix. It cannot be
changed: a write into it, also one through a view of it, is noticed by torch's version counter and refused (of those made in
inference mode, which lipscope does not use, torch counts only some).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lipscope.attention.masks import Causal, Full, Mask, MaskFunction, RealTokens, Window, same_mask

# Tokens from which masks stay rules.
LONG = 512


class SymbolicMask(Tensor):
    """A boolean mask (B, 1, n, n) that is a rule; the matrix is formed only for those who compute with it."""

    _rule: Mask

    @staticmethod
    def of(rule: Mask, inputs: int, n: int, device: torch.device | str = "cpu") -> SymbolicMask:
        """The mask of ``inputs`` sequences of n tokens."""
        with torch.inference_mode(False):
            made: SymbolicMask = Tensor._make_wrapper_subclass(
                SymbolicMask, (inputs, 1, n, n), dtype=torch.bool, device=torch.device(device)
            )
        made._rule = rule
        return made

    @property
    def rule(self) -> Mask:
        """Who sees whom.

        Raises:
            NotImplementedError: when somebody has written into the mask or into a view of it, which share their count of
                writes: what was written went into a matrix that nobody keeps.
        """
        if self._version:
            raise NotImplementedError(_changed("through a view of it"))
        return self._rule

    def dense(self) -> Tensor:
        """The matrix."""
        B, _, n, _ = self.shape
        allowed = self.rule.allowed(n)
        allowed = torch.ones(1, 1, n, n, dtype=torch.bool) if allowed is None else allowed
        # Contiguous, as the tensor that it stands for.
        return allowed.to(self.device).expand(B, 1, n, n).contiguous()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SymbolicMask({self._rule}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse assignment at once; torch makes it a write into a view, which is noticed only later."""
        if getattr(func, "__name__", "") == "__setitem__" and args and isinstance(args[0], SymbolicMask):
            raise NotImplementedError(_changed("__setitem__"))
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            # The same tensor, but writes into it are counted.
            return args[0].detach()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Pass on what leaves the mask as it is; for everything else but changes there is the matrix."""
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        for argument in func._schema.arguments:
            value = given.get(argument.name)
            written = value if isinstance(value, (tuple, list)) else [value]
            writes = argument.alias_info is not None and argument.alias_info.is_write
            if writes and any(isinstance(entry, SymbolicMask) for entry in written):
                raise NotImplementedError(_changed(str(func)))
        first = args[0] if args else None
        if isinstance(first, SymbolicMask) and _leaves_as_is(func, first, args[1:]):
            B, _, n, _ = first.shape
            return SymbolicMask.of(first.rule, B, n, first.device)

        def unwrap(value: Any) -> Any:
            if isinstance(value, SymbolicMask):
                return value.dense()
            if isinstance(value, (tuple, list)):
                return type(value)(unwrap(entry) for entry in value)
            return value

        # Tensors of inference mode have no count of writes to share.
        with torch.inference_mode(False):
            return func(*unwrap(args), **{name: unwrap(value) for name, value in (kwargs or {}).items()})


def _changed(how: str) -> str:
    return (
        f"the model changes its attention mask in place ({how}), and from {LONG} tokens on masks are kept as rules "
        f"that cannot be changed: measure it with fewer tokens, or let its code make a new mask"
    )


def _leaves_as_is(func: Any, mask: SymbolicMask, rest: tuple[Any, ...]) -> bool:
    aten = torch.ops.aten
    if func in (aten.detach.default, aten.alias.default):
        return True
    if func is not aten.slice.Tensor:
        return False
    given: list[Any] = [*rest, *(0, None, None, 1)[len(rest) :]]
    dim, start, end, step = given
    return not start and (end is None or end >= mask.shape[dim]) and step == 1


def symbolic_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    padding: Tensor | None = None,
    window: int | None = None,
    device: torch.device | str = "cpu",
) -> SymbolicMask:
    """The mask of ``batch_size`` sequences as a rule, called by name where it is the full, causal or windowed one.

    ``padding`` is True at real tokens (B, n); ``window`` is the width of a sliding window, if the layer has one.
    """
    rule: Mask = MaskFunction(mask_function, batch_size, q_length, device)
    candidates: list[Mask] = [Causal(), Full()]
    if window:
        candidates += [Window(window), Window(window, causal=False)]
    rule = next((named for named in candidates if same_mask(named, rule, q_length)), rule)
    if padding is not None and not bool(padding.all()):
        rule = rule & RealTokens(padding.bool().cpu(), keys_only=True)
    return SymbolicMask.of(rule, batch_size, q_length, device)
