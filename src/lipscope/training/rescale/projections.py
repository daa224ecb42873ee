"""Where W_Q and W_K of every head are among a layer's parameters, and their rescaling.

Layouts differ (separate matrices, GPT-2's fused ``Conv1D``, NeoX's interleaved heads), but every row of W_Q and W_K, known
from probing the layer, is a row of one of its parameters up to the score scale. So rows are found by direction, not by name,
rows that share a direction by trial, and the result is checked: after the rescaling, queries and keys must have changed by
the factors asked for, and values not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lipscope.attention.layer import Attention
from lipscope.models.anatomy import Layer, is_linear


@dataclass(frozen=True, eq=False)
class Rows:
    """A row of a weight matrix for every row of W_Q (or W_K)."""

    # Parameters that hold rows, each with its bias (or None), and whether it is stored transposed
    weights: list[tuple[nn.Parameter, nn.Parameter | None, bool]]
    # Per row, the index into ``weights`` and the row there; (-1, -1) for a row of zeros without a bias
    where: list[tuple[int, int]]


def find_rows(layer: Layer, plain: Attention, again: Callable[[], Attention | None]) -> tuple[Rows, Rows]:
    """Where the rows of W_Q and W_K, with their biases, are among the layer's parameters, up to a positive factor.

    Rows that look the same are told apart by trial: every candidate row is multiplied by a factor of its own, the layer
    is probed once more, and what a row was multiplied by says where it is. The trial is taken back. A row that is
    nowhere (adapters, parametrisations), or serves as a query and as a key, is refused.
    """
    label = f"layer {layer.index} ({layer.name})"
    candidates = list(_matrices(layer))
    wanted = {"W_Q": _with_bias(plain.q, plain.q_bias), "W_K": _with_bias(plain.k, plain.k_bias)}
    locations = {what: _parallel(candidates, rows) for what, rows in wanted.items()}
    for what, rows in wanted.items():
        # Rotations leave rounding noise in a row of zeros.
        noise = _NOISE * torch.finfo(plain.dtype).eps * float(rows.norm(dim=1).max())
        lost = [i for i, found in enumerate(locations[what]) if not found and float(rows[i].norm()) > noise]
        if lost:
            raise ValueError(
                f"{label}: row {lost[0]} of its {what} is in none of its weight matrices, so {what} cannot be rescaled: "
                "merge adapters and remove parametrisations first"
            )
    doubtful = sorted({location for found in locations.values() for group in found if len(group) > 1 for location in group})
    factors = {location: 1 + rank / len(doubtful) for rank, location in enumerate(doubtful)}
    if doubtful:
        trial = Rescaling()
        try:
            trial.scale(Rows(candidates, doubtful), torch.tensor(list(factors.values()), dtype=torch.float64))
            tried = again()
        finally:
            trial.undo()
        if tried is None:
            raise ValueError(f"{label} is no plain attention when its rows are rescaled one by one")
        moved = {"W_Q": _with_bias(tried.q, tried.q_bias), "W_K": _with_bias(tried.k, tried.k_bias)}
        for what, rows in wanted.items():
            ratio = ((moved[what] * rows).sum(1) / rows.square().sum(1)).tolist()
            for i, group in enumerate(locations[what]):
                if len(group) > 1:
                    misses = [abs(factors[location] - ratio[i]) for location in group]
                    locations[what][i] = [group[misses.index(min(misses))]]
    queries, keys = (Rows(candidates, [found[0] if found else (-1, -1) for found in locations[what]]) for what in wanted)
    if shared := ({location for location in queries.where if location[0] >= 0} & set(keys.where)):
        raise ValueError(
            f"{label}: row {min(shared)[1]} of one of its weights gives a query and a key, so they cannot be rescaled apart"
        )
    return queries, keys


def _parallel(
    candidates: list[tuple[nn.Parameter, nn.Parameter | None, bool]], wanted: Tensor
) -> list[list[tuple[int, int]]]:
    """For every wanted row (rows, d + 1) the parameter rows with its direction; none for a row of zeros."""
    locations: list[list[tuple[int, int]]] = [[] for _ in range(wanted.shape[0])]
    direction = nn.functional.normalize(wanted, dim=1, eps=_TINY)
    for index, (weight, bias, transposed) in enumerate(candidates):
        rows = _with_bias(weight.detach().mT if transposed else weight.detach(), bias)
        if rows.shape[1] == wanted.shape[1]:
            for i, row in (direction @ nn.functional.normalize(rows, dim=1, eps=_TINY).mT >= 1 - _SAME).nonzero().tolist():
                locations[i].append((index, row))
    return locations


def _with_bias(matrix: Tensor, bias: Tensor | None) -> Tensor:
    """[W b]: a row of W may vanish and its bias not."""
    column = matrix.new_zeros(matrix.shape[0]) if bias is None else bias.detach().to(matrix)
    return torch.cat([matrix.detach(), column[:, None]], dim=1).double().cpu()


class Rescaling:
    """Rescales rows of parameters in place, and can take it back."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Parameter, Tensor]] = []

    def scale(self, rows: Rows, factors: Tensor) -> None:
        """Multiply every row, and its bias, by its factor (rows,)."""
        with torch.no_grad():
            for index in sorted({index for index, _ in rows.where if index >= 0}):
                weight, bias, transposed = rows.weights[index]
                column = torch.ones(weight.shape[1 if transposed else 0], dtype=torch.float64)
                for (at, row), factor in zip(rows.where, factors.tolist(), strict=True):
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
    """Refuse a rescaling that did not change queries and keys by their factors (per head), or changed the values."""
    if after is None:
        raise RuntimeError(f"{where} is no plain attention any more after the rescaling of W_Q and W_K")
    one = torch.ones(1)
    for name, factors in (("q", q), ("k", k), ("v", one), ("q_bias", q), ("k_bias", k), ("v_bias", one)):
        old, found = getattr(before, name), getattr(after, name)
        if old is None:
            continue
        each = factors.to(old).repeat_interleave(old.shape[0] // factors.shape[0])
        expected = old * (each[:, None] if old.ndim == 2 else each)
        if not torch.allclose(expected, found, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
            raise RuntimeError(f"{where}: rescaling the rows of W_Q and W_K did not rescale its queries and keys")


def _matrices(layer: Layer) -> Iterator[tuple[nn.Parameter, nn.Parameter | None, bool]]:
    """Weights inside the attention module that may hold projections: (weight, bias, stored transposed)."""
    for module in layer.host.modules():
        if module is not layer.out and is_linear(module):
            weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
            if isinstance(weight, nn.Parameter):
                yield weight, bias if isinstance(bias, nn.Parameter) else None, type(module).__name__ == "Conv1D"


_TINY = torch.finfo(torch.float64).tiny
# Cosines this close are the same direction: projections are probed in the model's precision.
_SAME = 1e-5
# Rows this many times the precision of the largest one are zero.
_NOISE = 64
