"""Each benchmark owns one section of docs/performance.md and leaves the others alone."""

from __future__ import annotations

from pathlib import Path


def write_section(path: Path, script: str, lines: list[str]) -> None:
    """Replace the section of ``script``, or add it at the end.

    Args:
        path: the Markdown file; made when it is missing.
        script: the benchmark, which names the section's marks.
        lines: the new content.
    """
    begin, end = f"<!-- begin {script} -->", f"<!-- end {script} -->"
    section = "\n".join([begin, *lines, end])
    text = path.read_text(encoding="utf-8") if path.exists() else "# Performance\n"
    if begin in text and end in text:
        before, rest = text.split(begin, 1)
        text = before + section + rest.split(end, 1)[1]
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    path.write_text(text, encoding="utf-8")
