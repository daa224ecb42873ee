"""One page for all measurements: every benchmark owns a section of docs/performance.md and replaces only that."""

from __future__ import annotations

from pathlib import Path

import torch

_HEAD = """# Performance

Every section is written by the benchmark it names, from one run on one machine; only ratios travel.
"""


def machine() -> str:
    """What the ratios were measured on."""
    return f"{torch.get_num_threads()} threads, torch {torch.__version__}"


def write_section(path: Path | None, name: str, lines: list[str]) -> None:
    """Print the section, and put it into the page in place of its older version when a path is given."""
    body = "\n".join(lines).strip()
    print(body, flush=True)
    if path is None:
        return
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    page = path.read_text() if path.exists() else _HEAD
    section = f"{begin}\n{body}\n{end}"
    if begin in page:
        before, rest = page.split(begin, 1)
        page = before + section + rest.split(end, 1)[1]
    else:
        page = f"{page.rstrip()}\n\n{section}\n"
    path.write_text(page)
