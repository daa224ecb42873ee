"""Run every command and Python block that a page shows with its output, and write the output anew.

    python docs/refresh_outputs.py docs/how-to/scan-your-model.md README.md

``docs/snippets.py`` says what counts as a command, as its output, and as a reason not to run it.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import snippets

PATH = os.pathsep.join([str(snippets.ROOT / "src"), os.environ.get("PYTHONPATH", "")])


def run(command: str) -> str:
    """What the command prints on a terminal of 100 columns, without colour."""
    line = command.replace("lipscope", f"{sys.executable} -m lipscope", 1)
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1", "PYTHONPATH": PATH}
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True, env=environment, cwd=snippets.ROOT)
    return trimmed(done.stdout)


def trimmed(printed: str) -> str:
    """Without blank lines around it and spaces at the ends of lines."""
    return "\n".join(row.rstrip() for row in printed.strip("\n").splitlines()) + "\n"


def refreshed(page: Path) -> str:
    """The page with new outputs. Its Python blocks run one after the other in one namespace."""
    text, names = page.read_text(encoding="utf-8"), {}  # type: ignore[var-annotated]
    changes: list[tuple[tuple[int, int], str]] = []
    for block in snippets.blocks(page):
        if block.skipped is not None and not block.shows_output:
            continue
        if block.kind == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.body, block.where, "exec"), names)
            if block.shown_span is not None:
                changes.append((block.shown_span, trimmed(printed.getvalue())))
        elif block.kind == "console":
            parts = [f"$ {command}\n" + (run(command) if shown is not None else "") for command, shown in block.commands()]
            changes.append((block.span, "".join(parts)))
        elif block.shown_span is not None:
            changes.append((block.shown_span, run(block.commands()[0][0])))
    for (start, end), new in reversed(changes):
        text = text[:start] + new + text[end:]
    return text


def main() -> None:
    """Refresh the pages named on the command line."""
    for name in sys.argv[1:]:
        page = Path(name).resolve()
        page.write_text(refreshed(page), encoding="utf-8")


if __name__ == "__main__":
    main()
