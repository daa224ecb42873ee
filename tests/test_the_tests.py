"""What the tests stand on: helpers that must be able to fail."""

from __future__ import annotations

from itertools import combinations, product

import torch

from largest_tensor import LargestTensor
from pairwise import pairwise


def test_every_pair_occurs_and_few_cases_do() -> None:
    levels = ("abcde", range(4), "xyz", (True, False))
    found = pairwise(*levels)
    for (i, one), (j, other) in combinations(enumerate(levels), 2):
        assert {(case[i], case[j]) for case in found} == set(product(one, other))
    assert len(found) <= 24 < 5 * 4 * 3 * 2
    assert pairwise(*levels) == found


def test_it_sees_matrices_and_not_views() -> None:
    with LargestTensor(30) as seen:
        torch.ones(3).expand(100, 3)
        assert seen.elements == 3
        assert not seen.matrices
        torch.ones(40, 1) @ torch.ones(1, 40)
    assert seen.elements == 1600
    assert len(seen.matrices) == 1
