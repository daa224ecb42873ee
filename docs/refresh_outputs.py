"""Run every command and Python block that a page shows with its output, and write the output anew.

    python docs/refresh_outputs.py docs/how-to/scan-your-model.md README.md

``docs/snippets.py`` says what counts as a command, as its output, and as a reason not to run it. Everything runs in one
process, which loads a model once, and in a directory of its own with the files that a reader is asked to bring.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import make_reference
import snippets


def run(command: str, options: list[tuple[str, str]]) -> str:
    """What the command prints on a terminal of 100 columns, without colour."""
    from lipscope.cli.main import app

    arguments = snippets.with_options(command, options, make_reference.options())
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "NO_COLOR": "1"})
    if done.exit_code != 0:
        raise RuntimeError(f"{command} failed: {done.output}") from done.exception
    return trimmed(done.stdout)


def trimmed(printed: str) -> str:
    """Without blank lines around it and spaces at the ends of lines."""
    return "\n".join(row.rstrip() for row in printed.strip("\n").splitlines()) + "\n"


def refreshed(page: Path) -> str:
    """The page with new outputs. Its Python blocks run one after the other in one namespace."""
    text = page.read_text(encoding="utf-8")
    names: dict[str, Any] = {}
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
        else:
            # What nobody sees may be smaller, but later blocks may need what it writes.
            outputs = [(command, run(command, [] if shown is not None else block.options), shown is not None)
                       for command, shown in block.commands()]  # fmt: skip
            if block.kind == "console":
                parts = [f"$ {command}\n{output if shown else ''}" for command, output, shown in outputs]
                changes.append((block.span, "".join(parts)))
            elif block.shown_span is not None:
                changes.append((block.shown_span, outputs[0][1]))
    for (start, end), new in reversed(changes):
        text = text[:start] + new + text[end:]
    return text


def main() -> None:
    """Refresh the pages named on the command line."""
    import torch

    from lipscope.models import load

    torch.set_num_threads(1)  # as the tests: searches end a little elsewhere with more
    load.load = lru_cache(maxsize=4)(load.load)  # type: ignore[assignment]
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    for page in pages:
        with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
            snippets.prepare(Path(directory), small=False)
            page.write_text(refreshed(page), encoding="utf-8")


if __name__ == "__main__":
    main()
