"""Run every command that a page shows with its output, and write the output anew.

    python docs/refresh_outputs.py docs/how-to/scan-your-model.md

A command is an indented line that starts with ``lipscope`` or ``python``; the fenced block right below it is its output.
Commands run where this script is run from, the repository's own directory.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SHOWN = re.compile(
    r"(?P<command>^    (?:lipscope|python) [^\n]*\n)\n```\n(?P<output>.*?)```\n", flags=re.DOTALL | re.MULTILINE
)


def run(command: str) -> str:
    """What the command prints on a terminal of 100 columns, without colour."""
    program, rest = command.strip().split(" ", 1)
    line = f"{Path(sys.executable).parent / program} {rest}"
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True, env=environment)
    return "\n".join(row.rstrip() for row in done.stdout.strip("\n").splitlines()) + "\n"


def main() -> None:
    """Refresh the pages named on the command line."""
    for name in sys.argv[1:]:
        page = Path(name)
        text = SHOWN.sub(lambda m: f"{m['command']}\n```\n{run(m['command'])}```\n", page.read_text(encoding="utf-8"))
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
