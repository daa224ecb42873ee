"""The worst places of many measured rows, token by token: which of their tokens carry σ, and which move which."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lipscope.models.model import Model
from lipscope.models.tokens import TokenView, token_view

# Beyond it an influence matrix is more than a page shows, and its n² entries take longer than the scan itself.
LONGEST = 48

Row = Mapping[str, Any]


def worst_views(
    handle: Model, rows: Sequence[Row], ids_of: Callable[[int, int], Sequence[int]], count: int
) -> list[TokenView]:
    """Token views of the ``count`` layers or heads with the largest σ.

    Args:
        handle: the model that the rows were measured on.
        rows: rows of a scan or a sweep of that model, on one text and at one scope.
        ids_of: the token ids of an input, from its length n and its number.
        count: how many.
    """
    views = []
    for row in worst_inputs(rows, count):
        ids = ids_of(row["n"], row["input"])
        view = token_view(handle, ids, row["layer"], scope=row["scope"], head=row["head"])
        views.append(dataclasses.replace(view, input=row["input"]))
    return views


def worst_inputs(rows: Iterable[Row], count: int) -> list[Row]:
    """For the ``count`` layers or heads with the largest median σ at their longest n, the row of their worst input.

    That input is looked for at the longest measured n up to ``LONGEST``; at the shortest when all are longer.

    Example:
        >>> cell = {"layer": 0, "head": None, "document": None, "n": 8}
        >>> rows = [cell | {"input": 0, "estimate": 1.0}, cell | {"input": 1, "estimate": 3.0}]
        >>> [row["input"] for row in worst_inputs(rows, 1)]
        [1]
    """
    cells: dict[tuple[Any, Any], list[Row]] = {}
    for row in rows:
        if row["document"] is None:
            cells.setdefault((row["layer"], row["head"]), []).append(row)

    def median(cell: list[Row]) -> float:
        longest = max(row["n"] for row in cell)
        return statistics.median(float(row["estimate"]) for row in cell if row["n"] == longest)

    found = []
    for cell in sorted(cells.values(), key=median, reverse=True)[:count]:
        lengths = {row["n"] for row in cell}
        n = max((n for n in lengths if n <= LONGEST), default=min(lengths))
        found.append(max((row for row in cell if row["n"] == n), key=lambda row: float(row["estimate"])))
    return found
