"""Few cases for many parameters: every pair of values occurs in one of them, where a full product repeats most pairs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairwise(*levels: Iterable[Any]) -> list[tuple[Any, ...]]:
    """A covering array of strength two: whatever values two parameters take, some case has both. The same ones every time.

    Greedy: each case takes, of the full product, what covers most of the pairs that are left, the first of equals.
    """
    cases = list(product(*(range(len(values)) for values in map(list, levels))))
    columns = list(combinations(range(len(cases[0])), 2))

    def pairs(case: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(a, case[a], b, case[b]) for a, b in columns}

    covers = {case: pairs(case) for case in cases}
    left, chosen = set().union(*covers.values()), []
    while left:
        case = max(cases, key=lambda case: len(covers[case] & left))
        chosen.append(case)
        left -= covers[case]
    values = [list(level) for level in levels]
    return [tuple(values[i][index] for i, index in enumerate(case)) for case in sorted(chosen)]
