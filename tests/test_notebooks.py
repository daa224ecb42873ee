"""The notebooks of ``examples/`` run, and print what they show."""

from __future__ import annotations

import copy
import json

import pytest

import run_notebook

NOTEBOOKS = sorted(run_notebook.EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_prints_what_it_shows(path):
    shown = json.loads(path.read_text(encoding="utf-8"))
    found = run_notebook.run(copy.deepcopy(shown))
    for before, after in zip(shown["cells"], found["cells"], strict=True):
        assert texts(after) == texts(before)


def texts(cell):
    """What a cell prints, and its value in words."""
    return ["".join(one.get("text") or one["data"]["text/plain"]) for one in cell.get("outputs", ())]


def test_a_cell_shows_its_last_value_as_a_notebook_does():
    class Picture:
        def _repr_png_(self):
            return b"png"

    names = {"Picture": Picture}
    assert run_notebook.outputs("x = 2\nprint(x)\nx + 1", names)[1]["data"] == {"text/plain": ["3"]}
    assert run_notebook.outputs("Picture()", names)[0]["data"]["image/png"] == "cG5n"
    with pytest.raises(ZeroDivisionError):
        run_notebook.outputs("1 / 0", names)
