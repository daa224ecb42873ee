"""Rotary position embeddings: every token's query and key are rotated, pair by pair, by angles that its position sets.

For a pair of coordinates (a, b) of the first r of a head, and the token at position i,

    (a, b) ↦ (a·cos_i − b·sin_i, a·sin_i + b·cos_i)

The map is linear per token, so J·u and Jᵀ·g of attention stay analytic. Tables whose cos² + sin² is not 1 (models that also
scale, such as YaRN) are allowed: a pair is then rotated and stretched.

Reference: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, 2021 (arXiv 2104.09864).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.attention.validation import derived, moved, refuse_infinite


@dataclass(frozen=True, eq=False)
class Rotary:
    """Tables of cosines and sines, one row per token position.

    Attributes:
        cos: ``(n_max, r)``, for all inputs of up to n_max tokens, or ``(B, n, r)``, for exactly these inputs. Both
            coordinates of a pair carry the same number. r is even, at most the query width; other coordinates stay.
        sin: likewise.
        interleaved: pairs are (0, 1), (2, 3), … as in GPT-J; otherwise (0, r/2), (1, r/2 + 1), … as in Llama and NeoX.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(4, dtype=torch.float64)
        >>> rotary = lipscope.Rotary.from_base(4, n=16, dtype=torch.float64)
        >>> layer = lipscope.Attention(q=W, k=W, v=W, mask="causal", rotary=rotary)
        >>> layer(torch.ones(3, 4, dtype=torch.float64)).shape
        torch.Size([3, 4])
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def __post_init__(self) -> None:
        for name in ("cos", "sin"):
            table = getattr(self, name)
            if not table.is_floating_point():
                raise TypeError(f"rotary {name} must be a floating-point tensor, got {table!r:.80}")
            if table.ndim not in (2, 3) or 0 in table.shape:
                raise ValueError(f"rotary {name} must be (n_max, r) or (B, n, r), got shape {tuple(table.shape)}")
            if table.shape[-1] % 2:
                raise ValueError(f"rotary {name} rotates pairs of coordinates: r must be even, got r = {table.shape[-1]}")
            refuse_infinite(f"rotary {name}", table)
        if (self.cos.shape, self.cos.dtype, self.cos.device) != (self.sin.shape, self.sin.dtype, self.sin.device):
            raise ValueError(
                f"rotary cos and sin must agree: cos is {tuple(self.cos.shape)} {self.cos.dtype} on {self.cos.device}, "
                f"sin is {tuple(self.sin.shape)} {self.sin.dtype} on {self.sin.device}"
            )
        for name in ("cos", "sin"):
            first, second = pair_parts(getattr(self, name), self.interleaved)
            if not torch.equal(first, second):
                layout = "(0, 1), (2, 3), …" if self.interleaved else "(0, r/2), (1, r/2 + 1), …"
                raise ValueError(
                    f"rotary {name} must give both coordinates of a pair the same number; pairs are {layout} with "
                    f"interleaved={self.interleaved}"
                )

    @classmethod
    def from_base(
        cls,
        width: int,
        *,
        base: float = 10000.0,
        n: int | None = None,
        positions: Tensor | None = None,
        interleaved: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> Rotary:
        """The usual table: pair m of the token at position p is rotated by p·base^(−2m/r).

        Args:
            width: r, the number of coordinates that are rotated.
            base: the base of the frequencies.
            n: number of tokens, at positions 0, …, n − 1.
            positions: instead of n, the positions themselves, ``(n,)`` or ``(B, n)``.
            interleaved: which coordinates form a pair.
            dtype: that of the layer.

        Returns:
            The tables, computed in float64 and rounded to ``dtype``.

        Raises:
            ValueError: when the width is odd, the base not positive, or not exactly one of n and positions is given.
        """
        if width < 2 or width % 2:
            raise ValueError(f"width must be a positive even number, got {width}")
        if not 0 < base < float("inf"):
            raise ValueError(f"base must be positive and finite, got {base}")
        if (n is None) == (positions is None):
            raise ValueError("give exactly one of n and positions")
        if positions is None:
            if n is None or n < 1:
                raise ValueError(f"n must be at least 1, got {n}")
            positions = torch.arange(n)
        frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width)
        angles = positions[..., None].double() * frequencies
        cos, sin = (joined_pairs(table, table, interleaved).to(dtype) for table in (angles.cos(), angles.sin()))
        return cls(cos, sin, interleaved)

    @property
    def width(self) -> int:
        """Number r of coordinates that are rotated."""
        return self.cos.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the tables."""
        return self.cos.dtype

    def to(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Rotary:
        """The same tables in another dtype or on another device."""
        return moved(self, dtype, device)

    def for_input(self, index: int) -> Rotary:
        """The tables of batch item ``index``."""
        if self.cos.ndim == 2 or self.cos.shape[0] == 1:
            return self
        return derived(self, cos=self.cos[index : index + 1], sin=self.sin[index : index + 1])

    def rotation(self, n: int, batch: int) -> Rotation:
        """The tables for ``batch`` inputs of n tokens.

        Raises:
            ValueError: when they are for fewer tokens, or for other inputs.
        """
        cos, sin = self.cos.detach(), self.sin.detach()
        if cos.ndim == 2:
            if n > cos.shape[0]:
                raise ValueError(f"rotary has positions for n_max = {cos.shape[0]} tokens, but the input has n = {n}")
            return Rotation(cos[None, None, :n], sin[None, None, :n], self.interleaved)
        if cos.shape[1] != n or cos.shape[0] not in (1, batch):
            raise ValueError(
                f"rotary is for {cos.shape[0]} inputs of n = {cos.shape[1]} tokens, but there are {batch} inputs of n = {n}"
            )
        return Rotation(cos[:, None], sin[:, None], self.interleaved)

    def __str__(self) -> str:
        return f"rotary({self.width}, {'interleaved' if self.interleaved else 'halves'})"


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotations of given tokens, ready to be applied to (…, n, dk); cos and sin broadcast against (…, n, r)."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    def apply(self, t: Tensor) -> Tensor:
        """Rotate: R t for every token."""
        return self._rotated(t, self.sin)

    def transpose(self, t: Tensor) -> Tensor:
        """Rotate back: Rᵀ t for every token: the opposite angle, the same stretch."""
        return self._rotated(t, -self.sin)

    def inverse(self, t: Tensor) -> Tensor:
        """Undo: R⁻¹ t for every token: Rᵀ t with the stretch taken out twice; no cos and sin may both be 0."""
        stretch = self.cos.square() + self.sin.square()
        return Rotation(self.cos / stretch, self.sin / stretch, self.interleaved).transpose(t)

    def select(self, items: Tensor) -> Rotation:
        """The rotations of the listed batch items."""
        return self if self.cos.shape[0] == 1 else Rotation(self.cos[items], self.sin[items], self.interleaved)

    def tokens(self, positions: Tensor) -> Rotation:
        """The rotations of the listed tokens of one input, as (…, r) tables for vectors (tokens, heads, dk)."""
        return Rotation(self.cos[0, 0, positions][:, None], self.sin[0, 0, positions][:, None], self.interleaved)

    def unsqueeze(self) -> Rotation:
        """The same rotations for vectors with one more dimension before the last."""
        return Rotation(self.cos[..., None, :], self.sin[..., None, :], self.interleaved)

    def _rotated(self, t: Tensor, sin: Tensor) -> Tensor:
        r = self.cos.shape[-1]
        moving = t[..., :r]
        first, second = pair_parts(moving, self.interleaved)
        rotated = moving * self.cos + joined_pairs(-second, first, self.interleaved) * sin
        return rotated if r == t.shape[-1] else torch.cat([rotated, t[..., r:]], dim=-1)


def pair_parts(t: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """First and second coordinates of all pairs."""
    return (t[..., 0::2], t[..., 1::2]) if interleaved else (t[..., : t.shape[-1] // 2], t[..., t.shape[-1] // 2 :])


def joined_pairs(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    """The inverse of ``pair_parts``."""
    return torch.stack([first, second], dim=-1).flatten(-2) if interleaved else torch.cat([first, second], dim=-1)
