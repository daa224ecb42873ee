"""The house itself: examples in docstrings run, the public names exist, and packages import only what they may."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import FunctionType

import pytest

import lipscope

SOURCE = Path(lipscope.__file__).parent
FILES = {path: path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}

# A room imports itself and the rooms before it in this list. The leaves import all of these; only cli imports a leaf.
ORDER = ("doors", "rounding", "spectral", "attention", "bounds", "measure", "models", "runs", "report")
LEAVES = ("studies", "training")


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("module", [module_of(path) for path, text in FILES.items() if ">>>" in text])
def test_docstring_examples_run(module):
    outcome = doctest.testmod(importlib.import_module(module))
    assert outcome.attempted
    assert outcome.failed == 0


def test_every_module_can_be_imported():
    for path in FILES:
        if path.stem != "__main__":
            importlib.import_module(module_of(path))


def test_public_methods_are_described():
    """By themselves, or by the method that they override."""
    for module in (importlib.import_module(module_of(path)) for path in FILES if path.stem != "__main__"):
        for kind in (item for item in vars(module).values() if inspect.isclass(item) and item.__module__ == module.__name__):
            for name, method in vars(kind).items():
                public = "_" not in (name[0], kind.__name__[0]) and isinstance(
                    method, FunctionType | property | cached_property | classmethod
                )
                assert not public or inspect.getdoc(getattr(method, "__func__", method)), f"{kind.__name__}.{name}"


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


def imported(tree: ast.AST) -> Iterator[str]:
    """What of lipscope a file imports, wherever in it: the first two parts of each name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "lipscope":
            yield from (f"lipscope.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are written in full"
            yield ".".join((node.module or "").split(".")[:2])
        elif isinstance(node, ast.Import):
            yield from (".".join(name.name.split(".")[:2]) for name in node.names)


def offences(room: str, text: str) -> list[str]:
    """What a room imports and may not. The package has all rooms inside: of it, only the version is taken."""
    allowed = {"__version__", *(ORDER[: ORDER.index(room) + 1] if room in ORDER else (*ORDER, room))}
    names = [name.removeprefix("lipscope.") for name in imported(ast.parse(text)) if name.split(".")[0] == "lipscope"]
    return [name for name in names if name not in allowed]


def test_a_room_imports_only_rooms_before_it():
    found = []
    for path, text in FILES.items():
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room in (*ORDER, *LEAVES):
            found += [f"{path.relative_to(SOURCE)} imports {name}" for name in offences(room, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("room", "line", "wrong"),
    [
        ("models", "from lipscope.bounds.table import table", []),
        ("studies", "from lipscope.report import charts", []),
        ("models", "from lipscope.runs.schema import Row", ["runs"]),
        ("models", "import lipscope.runs.schema", ["runs"]),
        ("report", "from lipscope import studies", ["studies"]),
        ("training", "def f():\n    import lipscope.studies.paper as p", ["studies"]),
        ("report", "from lipscope.cli.main import app", ["cli"]),
        ("measure", "import lipscope", ["lipscope"]),
        ("measure", "from lipscope import load, __version__", ["load"]),
    ],
)
def test_imports_are_seen_however_they_are_written(room, line, wrong):
    assert offences(room, line) == wrong
