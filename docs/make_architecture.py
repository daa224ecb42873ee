"""Draw docs/architecture.svg, the rooms of the source and which way they import, and list every file in architecture.md.

    python docs/make_architecture.py

The rooms and their order are those that tests/test_package.py enforces; an arrow is drawn where a room really imports the
other, so that the picture cannot promise what the source does not do.
"""

from __future__ import annotations

import ast
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src" / "lipscope"

# Room → what it does, left to right; the leaves stand below, the command line at the end.
ROOMS = {
    "spectral": "an operator (J·u, Jᵀ·g) becomes σ, an interval",
    "attention": "layers, masks, norms, and their Jacobians as operators",
    "bounds": "how large σ could be; certificates at one input",
    "measure": "σ of a layer or map at tokens, within a memory",
    "models": "a Hugging Face layer at a text is a layer",
    "runs": "plan, task, row, store; a scan is a plan of one block",
    "report": "rows become charts, pages, figures; no torch",
}
LEAVES = {
    "studies": "worst case, mean field, variants, the paper's experiments",
    "training": "monitor, penalties, rescaled queries and keys",
}
TOP = {"cli": "parses, calls, prints"}

WIDTH, HEIGHT, GAP, LEFT, STEP = 420, 46, 12, 150, 58


def imports() -> set[tuple[str, str]]:
    """Pairs (room, room that it imports)."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lipscope."):
                found.add((room, str(node.module).split(".")[1]))
    return {(a, b) for a, b in found if a != b}


def box(name: str, text: str, x: float, y: float, width: float, kind: str) -> str:
    """A room."""
    return (
        f'<g><rect x="{x}" y="{y}" width="{width}" height="{HEIGHT}" rx="6" class="{kind}"/>'
        f'<text x="{x + 12}" y="{y + 19}" class="name">{escape(name)}/</text>'
        f'<text x="{x + 12}" y="{y + 36}" class="words">{escape(text)}</text></g>'
    )


def drawing() -> str:
    """The picture."""
    real = imports()
    place = {name: 20 + STEP * i for i, name in enumerate(reversed(ROOMS))}
    parts = [box(name, text, LEFT, place[name], WIDTH, "room") for name, text in ROOMS.items()]
    names = list(ROOMS)
    for later, room in enumerate(names):
        for earlier in range(later):
            if (room, names[earlier]) not in real:
                continue
            # From the lower edge of a box to the upper edge of the next, or around those between.
            y1, y2 = place[room] + HEIGHT / 2, place[names[earlier]] + HEIGHT / 2
            if later - earlier == 1:
                line = f"M{LEFT + WIDTH / 2},{place[room] + HEIGHT} V{place[names[earlier]]}"
            else:
                reach = LEFT - 14 * (later - earlier)
                line = f"M{LEFT},{y1} C{reach},{y1} {reach},{y2} {LEFT},{y2}"
            parts.append(f'<path d="{line}" class="arrow" marker-end="url(#head)"/>')
    bottom = 20 + STEP * len(ROOMS)
    right = LEFT + WIDTH + 60
    # The command line stands between the two leaves.
    column = [*LEAVES.items()]
    column.insert(1, *TOP.items())
    middle = right + (WIDTH - 20) / 2
    for i, (name, text) in enumerate(column):
        y = 20 + STEP * (2 * i + 0.5)
        parts.append(box(name, text, right, y, WIDTH - 20, "leaf" if name in LEAVES else "top"))
        parts.append(f'<path d="M{right},{y + HEIGHT / 2} H{LEFT + WIDTH + 4}" class="arrow" marker-end="url(#head)"/>')
        if name in TOP:
            for start, end in ((y, y - 2 * STEP + HEIGHT + 2), (y + HEIGHT, y + 2 * STEP - 2)):
                parts.append(f'<path d="M{middle},{start} V{end}" class="arrow" marker-end="url(#head)"/>')
    note = (
        "An arrow means: imports. A room imports rooms below it; studies, training and cli import any room; only cli "
        "imports studies and training."
    )
    parts.append(f'<text x="{LEFT}" y="{bottom + 12}" class="words">{escape(note)}</text>')
    style = (
        "text{font-family:system-ui,sans-serif;fill:#1a1a1a}.name{font-size:14px;font-weight:600}.words{font-size:12px}"
        ".room{fill:#e8f1f8;stroke:#0072b2}.leaf{fill:#fdf1e0;stroke:#e69f00}.top{fill:#eee;stroke:#666}"
        ".arrow{fill:none;stroke:#555;stroke-width:1.2}"
    )
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 z" fill="#555"/></marker>'
    )
    size = f'width="{right + WIDTH}" height="{bottom + 30}" viewBox="0 0 {right + WIDTH} {bottom + 30}"'
    title = "<title>The rooms of lipscope and which way they import</title>"
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{title}<defs>{head}</defs>'
        f"<style>{style}</style>{background}\n{body}\n</svg>\n"
    )


def every_file() -> str:
    """The files of every room with the first sentence of their docstrings."""
    parts = []
    for room in (*ROOMS, *LEAVES, *TOP):
        parts += [f"### {room}/", ""]
        for path in sorted((SOURCE / room).rglob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            if path.name != "__init__.py":
                first = " ".join(text.split("\n\n")[0].split())
                parts.append(f"- `{path.relative_to(SOURCE)}`: {first}")
        parts.append("")
    return "\n".join(parts)


def write_list(page: Path) -> None:
    """Put the list between the page's marks."""
    begin, end = "<!-- begin docs/make_architecture.py -->", "<!-- end docs/make_architecture.py -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}\n{every_file()}{end}{rest.split(end)[1]}", encoding="utf-8")


if __name__ == "__main__":
    (HERE / "architecture.svg").write_text(drawing(), encoding="utf-8")
    write_list(HERE / "architecture.md")
