"""Sentences of docs/concepts/worst-case.md that say in words what the tables of worst-case-numbers.md have.

    python docs/concepts/say_worst_case.py

Writes them between the markers of the page. ``make_worst_case.py`` does so when it has measured, and ``docs/check_pages.py``
says when they are not those of the tables.
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
# Ascent that finds less than this more is said to find nothing.
LITTLE = 1.005


def sentences(numbers: str) -> dict[str, str]:
    """What the tables say, by the name of its marker."""
    rows = [list(map(float, _cells(line))) for line in numbers.splitlines() if re.match(r"\| \d+ \|", line)]
    start = next(row[0] for k, row in enumerate(rows) if all(later[4] < LITTLE for later in rows[k:]))
    late, short = [row for row in rows if row[0] >= start], [row for row in rows if row[0] < start]
    most = max(late, key=lambda row: row[4])
    below = {}
    for kind, *lines in re.findall(r"\| (\w+), A = .*?, n (\|.*)\n.*\n\| ball (\|.*)\n\| LayerNorm (\|.*)", numbers):
        lengths, ball, norm = (list(map(float, _cells(line))) for line in lines)
        below[kind] = [(100 * (1 - y / x), n) for n, x, y in zip(lengths, ball, norm, strict=True)]
    far, near = max(below["attractive"]), min(below["attractive"])
    return {
        "ascent": (
            f"In the figure the pair is all but the worst input from n = {start:.0f} on, as far as ascent can see: it finds "
            f"at most {100 * (most[4] - 1):.1f} % more (at n = {most[0]:.0f}), and the refined upper bound is less than "
            f"{max(row[5] for row in late) + 0.05:.1f} times it. For fewer tokens ascent finds up to "
            f"{max(row[4] for row in short):.1f} times more."
        ),
        "repulsive": f"the two curves agree to within {max(abs(x) for x, _ in below['repulsive']) + 0.05:.1f} %.",
        "attractive": (
            f"Ascent still finds inputs whose σ grows slowly, below those of the ball by {far[0]:.0f} % at n = {far[1]:.0f} "
            f"and {near[0]:.0f} % at n = {near[1]:.0f}."
        ),
    }


def said(page: str, numbers: str) -> str:
    """The page with its sentences written anew."""
    for name, text in sentences(numbers).items():
        page, count = re.subn(rf"(<!-- said: {name} -->).*?(<!-- end -->)", rf"\g<1>{text}\g<2>", page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"the page has {count} places for what {name} says, expected 1")
    return page


def write(folder: Path = FOLDER) -> None:
    """Write the sentences into the page of a folder that holds the numbers."""
    page = folder / "worst-case.md"
    text = said(page.read_text(encoding="utf-8"), (folder / "worst-case-numbers.md").read_text(encoding="utf-8"))
    page.write_text(text, encoding="utf-8")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


if __name__ == "__main__":
    write()
