"""Who may look at whom. A mask is a small frozen object; ``as_mask`` makes one of a short string or a tensor.

``mask.sees(rows, columns, n)`` is a boolean tile broadcastable to (batch, heads, rows, columns): entry (i, j) says whether
query i sees key j. Masks are rules, so a tile of a long sequence never needs the n×n matrix; ``mask.allowed(n)`` is that
matrix. ``mask.additive(n)`` is a finite term added to the scores, or None. Masks combine with ``&``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lipscope.attention.validation import derived


class Mask:
    """Base of all masks."""

    def sees(self, rows: slice, columns: slice, n: int) -> Tensor | None:
        """Boolean (·, ·, rows, columns), True where query i sees key j of n tokens; None when everything is visible."""
        seen = self._sees(torch.arange(rows.start, rows.stop)[:, None], torch.arange(columns.start, columns.stop), n)
        return None if seen is None else seen[None, None]

    def _sees(self, i: Tensor, j: Tensor, n: int) -> Tensor | None:
        """Whether queries i (rows, 1) see keys j (columns,), where that is the same for all inputs and heads."""
        raise NotImplementedError

    def span(self, rows: slice, n: int) -> tuple[int, int]:
        """A range [first, last) of keys outside which queries ``rows`` see nothing."""
        return 0, n

    def allowed(self, n: int) -> Tensor | None:
        """The whole matrix (·, ·, n, n), or None when everything is visible."""
        return self.sees(slice(0, n), slice(0, n), n)

    def additive(self, n: int) -> Tensor | None:
        """Finite additive scores (·, ·, n, n), or None."""
        return None

    @property
    def length(self) -> int | None:
        """The one number of tokens that the mask is for; None when it is for any."""
        return None

    def for_input(self, index: int) -> Mask:
        """The mask as batch item ``index`` sees it."""
        return self

    def for_head(self, index: int) -> Mask:
        """The mask as head ``index`` sees it."""
        return self

    def __and__(self, other: MaskLike) -> Mask:
        return Both(self, as_mask(other))


@dataclass(frozen=True)
class Full(Mask):
    """Everything is visible."""

    def _sees(self, i: Tensor, j: Tensor, n: int) -> None:
        return None

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True)
class Causal(Mask):
    """Token i sees tokens j ≤ i."""

    def _sees(self, i: Tensor, j: Tensor, n: int) -> Tensor:
        return i >= j

    def span(self, rows: slice, n: int) -> tuple[int, int]:
        return 0, rows.stop

    def __str__(self) -> str:
        return "causal"


@dataclass(frozen=True)
class Window(Mask):
    """Sliding window: token i sees the ``width`` tokens i − width < j ≤ i; both sides when not ``causal``."""

    width: int
    causal: bool = True

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"window width must be at least 1, got {self.width}")

    def _sees(self, i: Tensor, j: Tensor, n: int) -> Tensor:
        near = (i - j).abs() < self.width
        return near & (i >= j) if self.causal else near

    def span(self, rows: slice, n: int) -> tuple[int, int]:
        return max(0, rows.start - self.width + 1), rows.stop if self.causal else min(n, rows.stop + self.width - 1)

    def __str__(self) -> str:
        return f"window:{self.width}" + ("" if self.causal else ":both")


@dataclass(frozen=True)
class PrefixLM(Mask):
    """The first ``prefix`` tokens are visible to everyone, the rest is causal."""

    prefix: int

    def __post_init__(self) -> None:
        if self.prefix < 0:
            raise ValueError(f"prefix length must not be negative, got {self.prefix}")

    def _sees(self, i: Tensor, j: Tensor, n: int) -> Tensor:
        if self.prefix > n:
            raise ValueError(f"mask prefix:{self.prefix} is longer than the sequence, n = {n}")
        return (i >= j) | (j < self.prefix)

    def span(self, rows: slice, n: int) -> tuple[int, int]:
        return 0, max(self.prefix, rows.stop)

    def __str__(self) -> str:
        return f"prefix:{self.prefix}"


@dataclass(frozen=True)
class Padding(Mask):
    """``pads[b]`` padding tokens on one side of input b (one number: the same for all inputs).

    Padding tokens are neither seen nor do they see: their outputs are 0, so σ equals that of the unpadded sequence.
    """

    pads: tuple[int, ...]
    side: str = "right"

    def __post_init__(self) -> None:
        if self.side not in ("left", "right"):
            raise ValueError(f"padding side must be 'left' or 'right', got {self.side!r}")
        if not self.pads or min(self.pads) < 0:
            raise ValueError(f"pads must be non-negative counts, one per input, got {self.pads}")

    def sees(self, rows: slice, columns: slice, n: int) -> Tensor:
        if max(self.pads) >= n:
            raise ValueError(f"pads holds {max(self.pads)} padding tokens but the sequence has n = {n}")
        pads, parts = torch.tensor(self.pads)[:, None], (torch.arange(part.start, part.stop) for part in (rows, columns))
        query, key = (i >= pads if self.side == "left" else i < n - pads for i in parts)
        return (query[:, :, None] & key[:, None, :])[:, None]

    def for_input(self, index: int) -> Mask:
        return self if len(self.pads) == 1 else Padding((self.pads[index],), self.side)

    def __str__(self) -> str:
        return f"pad-{self.side}:" + ",".join(map(str, self.pads))


@dataclass(frozen=True)
class Packed(Mask):
    """Documents of the given ``lengths`` packed into one sequence; attention never crosses a document boundary.

    The Jacobian is block diagonal, so σ(packed) = max over documents of σ(document).
    """

    lengths: tuple[int, ...]
    causal: bool = True

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"document lengths must be positive, got {self.lengths}")

    def _sees(self, i: Tensor, j: Tensor, n: int) -> Tensor:
        document = self._documents(n)
        same = document[i] == document[j]
        return same & (i >= j) if self.causal else same

    def span(self, rows: slice, n: int) -> tuple[int, int]:
        document = self._documents(n)
        first, last = document[rows.start], document[rows.stop - 1]
        inside = ((document >= first) & (document <= last)).nonzero()[:, 0]
        return int(inside[0]), rows.stop if self.causal else int(inside[-1]) + 1

    def _documents(self, n: int) -> Tensor:
        if sum(self.lengths) != n:
            raise ValueError(f"mask {self}: documents add up to {sum(self.lengths)} tokens but n = {n}")
        return torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))

    def __str__(self) -> str:
        return "packed:" + ",".join(map(str, self.lengths)) + ("" if self.causal else ":both")


@dataclass(frozen=True, eq=False)
class Explicit(Mask):
    """A tensor of shape (n, n), (B, n, n) or (B, H, n, n): boolean (True = visible) or additive (−inf = hidden)."""

    tensor: Tensor

    def __post_init__(self) -> None:
        t = self.tensor
        if t.ndim not in (2, 3, 4) or t.shape[-1] != t.shape[-2]:
            raise ValueError(f"mask tensor must be (n, n), (B, n, n) or (B, H, n, n), got {tuple(t.shape)}")
        if t.dtype != torch.bool and not t.is_floating_point():
            raise ValueError(f"mask tensor must be boolean or floating, got {t.dtype}")
        if t.is_floating_point() and bool((t.isnan() | (t == float("inf"))).any()):
            raise ValueError("mask tensor holds NaN or +inf; hidden entries are -inf")

    @property
    def length(self) -> int | None:
        return int(self.tensor.shape[-1])

    def sees(self, rows: slice, columns: slice, n: int) -> Tensor:
        t = self._at(n)[..., rows, columns]
        return t if t.dtype == torch.bool else ~hidden(t)

    def additive(self, n: int) -> Tensor | None:
        """The finite part of an additive mask."""
        t = self._at(n)
        if t.dtype == torch.bool:
            return None
        return t.masked_fill(hidden(t), 0.0)

    def for_input(self, index: int) -> Mask:
        t = self.tensor
        return derived(self, tensor=t[index : index + 1]) if t.ndim > 2 and t.shape[0] > 1 else self

    def for_head(self, index: int) -> Mask:
        t = self.tensor
        return derived(self, tensor=t[:, index : index + 1]) if t.ndim == 4 and t.shape[1] > 1 else self

    def _at(self, n: int) -> Tensor:
        t = self.tensor
        if t.shape[-1] != n:
            raise ValueError(f"mask tensor is for n = {t.shape[-1]} tokens but the input has n = {n}")
        return t[None, None] if t.ndim == 2 else t[:, None] if t.ndim == 3 else t

    def __str__(self) -> str:
        kind = "boolean" if self.tensor.dtype == torch.bool else "additive"
        return f"{kind}:{'×'.join(map(str, self.tensor.shape))}"


def hidden(additive: Tensor) -> Tensor:
    """Where a term is −inf or the most negative number, often that of float32, which libraries write instead."""
    lowest = max(torch.finfo(additive.dtype).min, torch.finfo(torch.float32).min)
    return additive <= lowest / 2


@dataclass(frozen=True, eq=False)
class Both(Mask):
    """Visible where both masks say so; additive terms add up."""

    first: Mask
    second: Mask

    @property
    def length(self) -> int | None:
        return self.first.length or self.second.length

    def sees(self, rows: slice, columns: slice, n: int) -> Tensor | None:
        a, b = self.first.sees(rows, columns, n), self.second.sees(rows, columns, n)
        if a is None or b is None:
            return b if a is None else a
        for name, axis in (("inputs", 0), ("heads", 1)):
            if a.shape[axis] != b.shape[axis] and 1 not in (a.shape[axis], b.shape[axis]):
                raise ValueError(f"masks {self.first} and {self.second} are for {a.shape[axis]} and {b.shape[axis]} {name}")
        return a & b

    def span(self, rows: slice, n: int) -> tuple[int, int]:
        (a, b), (c, d) = self.first.span(rows, n), self.second.span(rows, n)
        return max(a, c), min(b, d)

    def additive(self, n: int) -> Tensor | None:
        a, b = self.first.additive(n), self.second.additive(n)
        if a is None or b is None:
            return b if a is None else a
        return a + b

    def for_input(self, index: int) -> Mask:
        return Both(self.first.for_input(index), self.second.for_input(index))

    def for_head(self, index: int) -> Mask:
        return Both(self.first.for_head(index), self.second.for_head(index))

    def __str__(self) -> str:
        return f"{self.first}&{self.second}"


@dataclass(frozen=True, eq=False)
class MaskFunction(Mask):
    """Who sees whom by a function of index tensors (input, head, query, key), which broadcast."""

    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    inputs: int
    tokens: int
    device: torch.device | str = "cpu"

    @property
    def length(self) -> int | None:
        return self.tokens

    def sees(self, rows: slice, columns: slice, n: int) -> Tensor:
        # What the function closes over lives where the model does; masks are handed on from the CPU.
        batch = torch.arange(self.inputs, device=self.device)[:, None, None, None]
        head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=self.device)
        query = torch.arange(rows.start, rows.stop, device=self.device)[None, None, :, None]
        key = torch.arange(columns.start, columns.stop, device=self.device)[None, None, None, :]
        seen = self.function(batch, head, query, key)
        return seen.expand(*seen.shape[:2], query.shape[2], key.shape[3]).cpu()

    def for_input(self, index: int) -> Mask:
        function = self.function
        return MaskFunction(lambda b, h, q, k: function(b + index, h, q, k), 1, self.tokens, self.device)

    def __str__(self) -> str:
        return "the model's own"


@dataclass(frozen=True, eq=False)
class RealTokens(Mask):
    """Only tokens with ``real`` (B, n) are seen, and, unless ``keys_only``, only they see."""

    real: Tensor
    keys_only: bool = False

    @property
    def length(self) -> int | None:
        return int(self.real.shape[1])

    def sees(self, rows: slice, columns: slice, n: int) -> Tensor:
        key = self.real[:, None, None, columns]
        if self.keys_only:
            return key.expand(-1, -1, rows.stop - rows.start, -1)
        return self.real[:, None, rows, None] & key

    def for_input(self, index: int) -> Mask:
        return RealTokens(self.real[index : index + 1], self.keys_only) if len(self.real) > 1 else self

    def __str__(self) -> str:
        return "padding"


MaskLike: TypeAlias = Mask | str | Tensor | None

MASK_SYNTAX = (
    "full, causal, window:W[:both], prefix:P, pad-left:K[,K…], pad-right:K[,K…], packed:L1,L2,…[:both], "
    "joined with & (for example causal&pad-left:3)"
)


def as_mask(mask: MaskLike) -> Mask:
    """Read a mask from an object, a short string, or a boolean or additive tensor; None means everything is visible.

    Example:
        >>> print(as_mask("causal&pad-left:2"))
        causal&pad-left:2
    """
    if mask is None:
        return Full()
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return Explicit(mask)
    if not isinstance(mask, str):
        raise TypeError(f"mask must be a Mask, a string or a tensor, got {type(mask).__name__}")
    first, *rest = [_parse(part.strip()) for part in mask.split("&")]
    for other in rest:
        first = first & other
    return first


def _parse(text: str) -> Mask:
    name, _, argument = text.partition(":")
    argument, _, ending = argument.partition(":")
    if ending not in ("", "both") or (ending and name not in ("window", "packed")):
        raise ValueError(_unknown(text))
    try:
        numbers = tuple(int(part) for part in argument.split(",")) if argument else ()
    except ValueError:
        raise ValueError(_unknown(text)) from None
    match name, numbers:
        case "full", ():
            return Full()
        case "causal", ():
            return Causal()
        case "window", (width,):
            return Window(width, causal=not ending)
        case "prefix", (prefix,):
            return PrefixLM(prefix)
        case "pad-left" | "pad-right", (_, *_):
            return Padding(numbers, side=name.removeprefix("pad-"))
        case "packed", (_, *_):
            return Packed(numbers, causal=not ending)
    raise ValueError(_unknown(text))


def _unknown(text: str) -> str:
    return f"unknown mask {text!r}; masks are: {MASK_SYNTAX}"


def same_mask(first: Mask, second: Mask, n: int) -> bool:
    """Whether two masks hide the same entries of n tokens; compared a strip of rows at a time."""
    everything, height = slice(0, n), 512
    for start in range(0, n, height):
        rows = slice(start, min(n, start + height))
        seen = (mask.sees(rows, everything, n) for mask in (first, second))
        a, b = (torch.ones((), dtype=torch.bool) if tile is None else tile.cpu() for tile in seen)
        if not bool((a == b).all()):
            return False
    return True
