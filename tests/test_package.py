"""The house itself: examples in docstrings run, the public names exist, and packages import only what they may."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import lipscope

SOURCE = Path(lipscope.__file__).parent
MODULES = [m.name for m in pkgutil.walk_packages([str(SOURCE)], "lipscope.") if not m.name.endswith("__main__")]

# A room imports itself and the rooms before it in this list; studies and training import everything but each other and cli.
ORDER = ("rounding", "spectral", "attention", "bounds", "measure", "models", "runs", "report")
LEAVES = ("studies", "training")


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(module):
    outcome = doctest.testmod(importlib.import_module(module))
    assert outcome.failed == 0


def test_public_functions_show_an_example():
    for name in ("local_lipschitz", "influence", "spectral_norm", "Attention", "variant", "smooth"):
        assert ">>>" in getattr(lipscope, name).__doc__, name
    for name in ("construct", "maximise", "growth", "grouped_sigma", "attack_tokens"):
        assert ">>>" in getattr(lipscope.studies.worst_case, name).__doc__, name


def test_public_names_exist():
    for name in lipscope.__all__:
        assert getattr(lipscope, name) is not None
    assert callable(lipscope.bounds.table)
    assert callable(lipscope.studies.worst_case.maximise)
    assert callable(lipscope.studies.paper.companion_estimator)
    assert callable(lipscope.studies.mean_field.local_constant)
    assert callable(lipscope.training.Monitor)
    assert callable(lipscope.studies.variants.compare)
    assert callable(lipscope.training.spectral_penalty)
    with pytest.raises(AttributeError):
        lipscope.nothing_of_this_name  # noqa: B018


def test_a_room_imports_only_rooms_before_it():
    offenders = []
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room in ("cli", "__init__", "__main__"):
            continue
        allowed = {*ORDER[: ORDER.index(room) + 1]} if room in ORDER else {*ORDER, room}
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lipscope."):
                other = node.module.split(".")[1]
                if other not in allowed:
                    offenders.append(f"{path.relative_to(SOURCE)} imports {node.module}")
    assert not offenders, "\n".join(offenders)
