"""Every bound that holds for a layer of a model, beside σ at real tokens.

A set bound needs R, the largest norm of a token. What attention sees comes out of a normalisation, whose weights bound it
for every text: with that R a set bound is a Lipschitz constant of the layer on its real input set. Without a normalisation R
is the largest norm among the given tokens, and the bounds hold for tokens no longer than these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lipscope.bounds.registry import BoundTable, table
from lipscope.models.inputs import check_length, probe_inputs
from lipscope.models.model import Model
from lipscope.models.recorded import norm_radius
from lipscope.rounding import Shown, interval

Origin = Literal["normalisation", "tokens", "given"]


@dataclass(frozen=True, eq=False, repr=False)
class LayerBounds(Shown):
    """Bounds of one layer or head of a model."""

    table: BoundTable  # the bounds, and σ when tokens were given
    model: str
    layer: int
    head: int | None  # index of the head, None for the whole layer
    mask: str  # who sees whom
    radius_from: Origin  # where R comes from: the layer's ``"normalisation"``, the ``"tokens"``, or ``"given"``
    radius_norm: float | None  # the largest norm that the normalisation can put out, None without one
    radius_tokens: float | None  # the largest norm among the tokens, None without tokens

    @property
    def scope(self) -> str:
        """``"attention"``, or ``"head"``."""
        return "attention" if self.head is None else "head"

    def to_rows(self) -> list[dict[str, Any]]:
        """One plain dictionary per bound."""
        about = {
            "model": self.model, "layer": self.layer, "head": self.head, "scope": self.scope, "mask": self.mask,
            "n": self.table.n, "radius": self.table.radius, "radius_from": self.radius_from,
            "radius_norm": self.radius_norm, "radius_tokens": self.radius_tokens,
        }  # fmt: skip
        return [about | row for row in self.table.to_rows()]

    def title(self) -> str:
        """What the bounds are about, in a few lines."""
        where = f"layer {self.layer}" + ("" if self.head is None else f", head {self.head}")
        origin = {
            "normalisation": "which its own normalisation guarantees for every input",
            "tokens": "the largest of these tokens",
            "given": "as given",
        }[self.radius_from]
        lines = [
            f"Bounds for {self.model}, {where}, scope {self.scope}, mask {self.mask}, n = {self.table.n}",
            f"tokens of norm ≤ {self.table.radius:.4g}, {origin}",
        ]
        if self.table.sigma is not None:
            sigma = self.table.sigma
            lines.append(f"measured σ ∈ {interval(sigma.lower, sigma.upper)} at tokens of norm ≤ {self.radius_tokens:.4g}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.title() + "\n" + "\n".join(str(self.table).splitlines()[1:])


def layer_bounds(
    handle: Model,
    layer: int,
    *,
    head: int | None = None,
    input_ids: Tensor | None = None,
    n: int | None = None,
    radius: float | None = None,
) -> LayerBounds:
    """Every bound that holds for a layer, or for one of its heads.

    Args:
        handle: the model.
        layer: index of the layer; negative ones count from the end.
        head: index of a head: bounds are then for that head before W_O.
        input_ids: token ids (n,), for local bounds and σ itself.
        n: number of tokens, when no ids are given: bounds for all inputs of that length.
        radius: R; by default that of the layer's normalisation, else the largest norm of the tokens.

    Returns:
        A ``LayerBounds``; print it, or take ``.table`` and ``.to_rows()``.

    Raises:
        ValueError: when the layer or head does not exist, the layer's projections are not known in closed form, or nothing
            says how long tokens are.

    Example:
        >>> import torch, lipscope
        >>> from lipscope.models.layer_bounds import layer_bounds
        >>> model = lipscope.load(torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval())
        >>> layer_bounds(model, 0, n=4, radius=1.0).table["refined.unmasked"].value > 0
        True
    """
    if head is not None:
        handle.check_heads(layer, [head])
    if (input_ids is None) == (n is None):
        raise ValueError("give either input_ids or n")
    if input_ids is not None:
        at = handle.record(input_ids=input_ids)[layer]
    else:
        # Any input of that length: masks and biases depend on the length only.
        at = handle.record(probe_inputs(handle.model, check_length(handle, n or 0)))[layer]
    attention, tokens = at.weights(), at.tokens()
    X = tokens[0] if input_ids is not None else None
    longest = None if X is None else float(torch.linalg.vector_norm(X.double(), dim=-1).max())
    by_norm = norm_radius(at.norm)
    if radius is not None and not radius > 0:
        raise ValueError(f"radius must be positive, got {radius:g}")
    # A token that attains the maximum of the normalisation may exceed it by rounding.
    of_norm = None if by_norm is None else max(by_norm, longest or 0.0)
    known: dict[Origin, float | None] = {"given": radius, "normalisation": of_norm, "tokens": longest}
    origin, value = next(((origin, value) for origin, value in known.items() if value is not None), (None, None))
    if origin is None or value is None:
        raise ValueError(
            f"layer {at.index} of {handle.name} has no LayerNorm or RMSNorm before its attention, so nothing bounds its "
            "tokens: give a text, or a radius"
        )
    single = attention.for_input(0)
    found = table(single if head is None else single.head(head), X, value, tokens.shape[1])
    return LayerBounds(found, handle.name, at.index, head, at.mask, origin, by_norm, longest)
