"""Where W_Q and W_K of every head are among a layer's parameters, and their rescaling.

Layouts differ (separate matrices, GPT-2's fused ``Conv1D``, NeoX's heads in turn), but every row of W_Q and W_K, known from
probing the layer, is a row of one of its parameters up to the score scale. So rows are found by direction, not by name, and
the result is checked: after the rescaling, queries and keys must have changed by the asked factors and values not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipscope.attention.layer import Attention
from lipscope.models.anatomy import Layer, is_linear


@dataclass(frozen=True, eq=False)
class Rows:
    """A row of a weight matrix for every row of W_Q (or W_K).

    Attributes:
        weights: parameters that hold rows, each with its bias (or None), and whether it is stored transposed.
        where: per row, the index into ``weights`` and the row there; (-1, -1) for a row of zeros.
    """

    weights: list[tuple[nn.Parameter, nn.Parameter | None, bool]]
    where: list[tuple[int, int]]


def find_rows(layer: Layer, wanted: Tensor, what: str) -> Rows:
    """The rows of the layer's parameters that are ``wanted`` (rows, d), up to a positive factor.

    Raises:
        ValueError: when a row is not there; the projections are then no plain matrices (adapters, parametrisations).
    """
    candidates = list(_matrices(layer))
    best = torch.full((wanted.shape[0],), -1.0, dtype=torch.float64)
    where = [(-1, -1)] * wanted.shape[0]
    direction = _unit(wanted)
    for index, (weight, _, transposed) in enumerate(candidates):
        matrix = weight.detach().mT if transposed else weight.detach()
        if matrix.shape[1] != wanted.shape[1]:
            continue
        cosine, row = (direction @ _unit(matrix).mT).max(1)
        for i in (cosine > best + _SAME).nonzero()[:, 0].tolist():
            best[i], where[i] = cosine[i], (index, int(row[i]))
    lost = [i for i in range(wanted.shape[0]) if bool(wanted[i].any()) and best[i] < 1 - _SAME]
    if lost:
        raise ValueError(
            f"layer {layer.index} ({layer.name}): row {lost[0]} of its {what} is in none of its weight matrices, so {what} "
            "cannot be rescaled: merge adapters and remove parametrisations first"
        )
    where = [place if bool(wanted[i].any()) else (-1, -1) for i, place in enumerate(where)]
    return Rows(candidates, where)


class Rescaling:
    """Rescales rows of parameters in place, and can take it back."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Parameter, Tensor]] = []

    def scale(self, rows: Rows, factors: Tensor) -> None:
        """Multiply every row, and its bias, by its factor (rows,)."""
        by_place: dict[tuple[int, int], float] = {}
        for place, factor in zip(rows.where, factors.tolist(), strict=True):
            if place[0] >= 0:
                by_place[place] = factor
        with torch.no_grad():
            for index in sorted({index for index, _ in by_place}):
                weight, bias, transposed = rows.weights[index]
                column = torch.ones(weight.shape[1 if transposed else 0], dtype=torch.float64)
                for (at, row), factor in by_place.items():
                    if at == index:
                        column[row] = factor
                self._multiply(weight, column if transposed else column[:, None])
                if bias is not None:
                    self._multiply(bias, column)

    def _multiply(self, parameter: nn.Parameter, factors: Tensor) -> None:
        self._before.append((parameter, parameter.detach().clone()))
        parameter.copy_((parameter.double() * factors.to(parameter.device)).to(parameter.dtype))

    def absorb(self, later: Rescaling) -> None:
        """Also answer for a later rescaling."""
        self._before += later._before

    def undo(self) -> None:
        """Put every parameter back to what it was."""
        with torch.no_grad():
            for parameter, content in reversed(self._before):
                parameter.copy_(content)
        self._before.clear()


def check_rescaled(before: Attention, after: Attention | None, q: Tensor, k: Tensor, where: str) -> None:
    """Queries and keys changed by their factors (per head), values not at all.

    Raises:
        RuntimeError: when they did not; the parameters are used in a way that was not foreseen.
    """
    if after is None:
        raise RuntimeError(f"{where} is no plain attention any more after the rescaling of W_Q and W_K")
    pairs = [
        (before.q * _per_row(q, before.q), after.q), (before.k * _per_row(k, before.k), after.k), (before.v, after.v)
    ]  # fmt: skip
    for expected, found in pairs:
        if not torch.allclose(expected, found, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
            raise RuntimeError(f"{where}: rescaling the rows of W_Q and W_K did not rescale its queries and keys")


def _per_row(factors: Tensor, matrix: Tensor) -> Tensor:
    return factors.to(matrix).repeat_interleave(matrix.shape[0] // factors.shape[0])[:, None]


def _matrices(layer: Layer) -> Iterator[tuple[nn.Parameter, nn.Parameter | None, bool]]:
    """Weights inside the attention module that may hold projections: (weight, bias, stored transposed)."""
    for module in layer.host.modules():
        if module is not layer.out and is_linear(module):
            weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
            if isinstance(weight, nn.Parameter):
                yield weight, bias if isinstance(bias, nn.Parameter) else None, type(module).__name__ == "Conv1D"


def _unit(matrix: Tensor) -> Tensor:
    wide = matrix.double().cpu()
    unit: Tensor = wide / wide.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return unit


# Cosines this close are the same direction: projections are probed in the model's precision.
_SAME = 1e-5
