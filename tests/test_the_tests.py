"""What the tests stand on: helpers that must be able to fail, and public names alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

import pytest
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


# Private names of other libraries that say what nothing public says: hooks of a module, the attention a model was given,
# subclasses of tensors, …
FOREIGN = {
    "_C", "_attn_implementation", "_attn_implementation_internal", "_disabled_torch_function_impl", "_exit",
    "_experts_implementation_internal", "_foreach_zero_", "_forward_hooks", "_forward_pre_hooks", "_global_mapping",
    "_make_wrapper_subclass", "_orig_mod", "_python_dispatch", "_pytree", "_repr_html_", "_to_copy",
}  # fmt: skip
PRIVATE = re.compile(r"_(?!_)\w+")


def private(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names with an underscore that a test reads, imports or replaces, but for those of its own classes."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute):
            names = [] if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [part for alias in node.names for part in (*(node.module or "").split("."), alias.name)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("getattr", "setattr", "delattr", "patch", "object")
        ):
            said = [a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            names = [part for text in said for part in text.split(".")]
        yield from ((node.lineno, name) for name in names if PRIVATE.fullmatch(name) and name not in FOREIGN)


def test_no_test_touches_what_is_private():
    """Whoever changes the inside of a module changes no test."""
    found = [
        f"{path.name}:{line} {name}"
        for path in sorted(Path(__file__).parent.glob("*.py"))
        for line, name in private(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "model._known", "model.layers[0]._known = 1", "from lipscope.bounds.strips import _STRIP", "import lipscope._lazy",
        "monkeypatch.setattr(strips, '_STRIP', 1)", "monkeypatch.setattr('lipscope.bounds.strips._STRIP', 1)",
        "getattr(model, '_known')", "mock.patch.object(model, '_known')",
    ],
)  # fmt: skip
def test_private_names_are_seen_however_they_are_written(line):
    assert len(list(private(ast.parse(line)))) == 1
    assert not list(private(ast.parse(line.replace("_known", "known").replace("_STRIP", "STRIP").replace("_lazy", "lazy"))))
