"""Run the notebooks of ``examples/`` anew and keep what their cells put out.

    python docs/run_notebook.py                every notebook
    python docs/run_notebook.py examples/a.ipynb

A cell runs in this process, one after the other in one namespace; the value of its last line is shown as a notebook would
show it. ``tests/test_notebooks.py`` runs them too, and compares what is printed.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parent.parent / "examples"


def outputs(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """What a cell puts out, as a notebook keeps it."""
    parsed, printed, value = ast.parse(source), io.StringIO(), None
    last = parsed.body.pop() if parsed.body and isinstance(parsed.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(parsed, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    found: list[dict[str, Any]] = []
    if printed.getvalue():
        found.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)})
    if value is not None:
        data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_png_"):
            data["image/png"] = base64.b64encode(value._repr_png_()).decode()
        elif hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        found.append({"data": data, "metadata": {}, "output_type": "execute_result"})
    return found


def run(notebook: dict[str, Any]) -> dict[str, Any]:
    """The same notebook with the outputs of its cells."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        found = outputs("".join(cell["source"]), names)
        cell["execution_count"] = number
        cell["outputs"] = [one | ({"execution_count": number} if "data" in one else {}) for one in found]
    return notebook


def main() -> None:
    """Run and write."""
    for path in map(Path, sys.argv[1:] or sorted(EXAMPLES.glob("*.ipynb"))):
        notebook = run(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name}: {sum(cell['cell_type'] == 'code' for cell in notebook['cells'])} cells")


if __name__ == "__main__":
    main()
