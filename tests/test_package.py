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

# Who may import whom, inside the project.
MAY_IMPORT = {
    "spectral": set(),
    "attention": {"spectral"},
    "bounds": {"attention", "spectral"},
    "facade": {"bounds", "attention", "spectral"},
    "token_influence": {"facade", "attention", "spectral"},
    "models": {"facade", "token_influence", "bounds", "attention", "spectral"},
    "sweep": {"models", "facade", "token_influence", "bounds", "attention", "spectral"},
    "paper": {"sweep", "adversarial", "models", "facade", "token_influence", "bounds", "attention", "spectral"},
    "report": {"sweep", "models", "facade", "token_influence", "bounds", "attention", "spectral"},
    "meanfield": {"models", "bounds", "attention", "spectral"},
    "monitor": {"models", "spectral"},
    "smoothing": {"models", "attention", "spectral"},
    "adversarial": {"models", "facade", "bounds", "attention", "spectral"},
    "compare": {"adversarial", "models", "facade", "bounds", "attention", "spectral"},
    "regularise": {"models", "facade", "attention", "spectral"},
}


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(module):
    outcome = doctest.testmod(importlib.import_module(module))
    assert outcome.failed == 0


def test_public_functions_show_an_example():
    for name in ("local_lipschitz", "influence", "spectral_norm", "Attention", "as_mask", "smooth"):
        assert ">>>" in getattr(lipscope, name).__doc__, name
    for name in ("construct", "maximise", "growth", "grouped_sigma", "attack_tokens"):
        assert ">>>" in getattr(lipscope.adversarial, name).__doc__, name


def test_public_names_exist():
    for name in lipscope.__all__:
        assert getattr(lipscope, name) is not None
    assert set(lipscope._HOME) | {"__version__"} == set(lipscope.__all__)
    assert callable(lipscope.bounds.table)
    assert callable(lipscope.adversarial.maximise)
    assert callable(lipscope.paper.companion_estimator)
    assert callable(lipscope.meanfield.local_constant)
    assert callable(lipscope.monitor.Monitor)
    assert callable(lipscope.compare.compare)
    assert callable(lipscope.regularise.spectral_penalty)
    with pytest.raises(AttributeError):
        lipscope.nothing_of_this_name  # noqa: B018


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_layers_import_downwards_only(path):
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room not in MAY_IMPORT:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lipscope."):
            other = node.module.split(".")[1]
            assert other == room or other in MAY_IMPORT[room], f"{path.name} imports {node.module}"
