"""What a page asks its reader to run: Python blocks and ``lipscope`` commands, each with the output that the page shows.

A command stands in a ``console`` block behind ``$``, in an ``sh`` or ``bash`` block, or on a line indented by four spaces
that starts with ``lipscope``. Its output follows it in a ``console`` block, or is the plain fenced block right below it;
that of a Python block is the ``text`` block right below. A comment right above a block says what a test does with it:

    <!-- not run: why -->               it needs a network, a cluster, minutes, …
    <!-- run with: --lengths 8 -->      these options come after its own, where a command has them; outputs are not compared
    <!-- output not compared: why -->   times, or names of the machine
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYTHON, COMMANDS = ("python", "py", "pycon"), ("console", "sh", "bash", "shell")
_FENCE = re.compile(r"^```(?P<language>[\w-]*)[^\n]*\n(?P<body>.*?)^```[ ]*$\n?", flags=re.DOTALL | re.MULTILINE)
_INDENTED = re.compile(r"(?:^    lipscope [^\n]*\n(?:^      +[^\n]*\n)*)+", flags=re.MULTILINE)
_NOTE = re.compile(r"<!-- (?P<kind>not run|run with|output not compared): (?P<text>[^>]*?) -->\n+\Z")


@dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
        page: the page.
        line: line of the page on which it begins.
        kind: ``"python"``, ``"console"`` (command and output in one), or ``"shell"`` (commands only).
        body: what stands in it.
        shown: the output that the page shows below it, or None.
        note: kind and text of the comment above it, or None.
        span: where the body is in the page.
        shown_span: where the shown output is in the page.
    """

    page: Path
    line: int
    kind: str
    body: str
    shown: str | None
    note: tuple[str, str] | None
    span: tuple[int, int]
    shown_span: tuple[int, int] | None

    @property
    def skipped(self) -> str | None:
        """Why a test does not run it, or None."""
        return self.note[1] if self.note is not None and self.note[0] == "not run" else None

    @property
    def options(self) -> list[tuple[str, str]]:
        """Options, with their values, that a test adds to those of its commands that have them."""
        words = shlex.split(self.note[1]) if self.note is not None and self.note[0] == "run with" else []
        return list(zip(words[::2], words[1::2], strict=True))

    @property
    def compared(self) -> bool:
        """Whether what it prints has to be what the page shows."""
        return self.note is None

    @property
    def shows_output(self) -> bool:
        """Whether the page says what it prints."""
        return self.shown is not None or (self.kind == "console" and any(shown for _, shown in self.commands()))

    @property
    def where(self) -> str:
        """``docs/page.md:12``."""
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"

    def commands(self) -> list[tuple[str, str | None]]:
        """Its commands, each with its shown output or None."""
        if self.kind == "console":
            found: list[tuple[str, str | None]] = []
            for part in re.split(r"^\$ ", self.body, flags=re.MULTILINE)[1:]:
                command, output = _first_line(part)
                found.append((command, output or None))
            return found
        lines = re.sub(r"\\\n\s*", "", self.body).splitlines()
        alone = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
        return [(line, self.shown if len(alone) == 1 else None) for line in alone]


def _first_line(text: str) -> tuple[str, str]:
    """A command, over several lines when they end with a backslash, and the rest."""
    match = re.match(r"(?:[^\n]*\\\n)*[^\n]*\n?", text)
    assert match is not None
    return re.sub(r"\\\n\s*", "", match[0]).strip(), text[match.end() :]


def blocks(page: Path) -> list[Block]:
    """The blocks of a page that can be run, in order."""
    text = page.read_text(encoding="utf-8")
    fences = list(_FENCE.finditer(text))
    found = []
    for index, fence in enumerate(fences):
        language = fence["language"]
        if language not in (*PYTHON, *COMMANDS):
            continue
        kind = "python" if language in PYTHON else "console" if "$ " in fence["body"][:2] else "shell"
        shown = fences[index + 1] if index + 1 < len(fences) and kind != "console" else None
        wanted = "text" if kind == "python" else ""
        if shown is not None and (shown["language"] != wanted or text[fence.end() : shown.start()].strip()):
            shown = None
        found.append(_block(page, text, kind, fence["body"], fence.start(), fence.span("body"), shown))
    inside = [fence.span() for fence in fences]
    for match in _INDENTED.finditer(text):
        if any(start <= match.start() < end for start, end in inside):
            continue
        below = next((f for f in fences if f.start() >= match.end()), None)
        if below is not None and (below["language"] or text[match.end() : below.start()].strip()):
            below = None
        found.append(_block(page, text, "shell", match[0], match.start(), match.span(), below))
    return sorted(found, key=lambda block: block.line)


def _block(
    page: Path, text: str, kind: str, body: str, start: int, span: tuple[int, int], shown: re.Match[str] | None
) -> Block:
    note = _NOTE.search(text[:start])
    return Block(
        page, text.count("\n", 0, start) + 1, kind, body, None if shown is None else shown["body"],
        None if note is None else (note["kind"], note["text"]), span, None if shown is None else shown.span("body"),
    )  # fmt: skip


def prepare(directory: Path, *, small: bool) -> None:
    """Put the files that pages ask their readers to bring into an empty directory.

    Args:
        directory: where.
        small: with shorter and fewer inputs in ``docs/how-to/plan.toml`` than it has. Those of ``plan.toml`` always are.
    """
    import torch
    from safetensors.torch import save_file

    from lipscope.models.corpora import read_text

    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(24, 24, generator=generator) / 24**0.5 for name in ("q", "k", "v", "out")}
    save_file(weights, directory / "layer.safetensors")
    save_file({"x": torch.randn(10, 24, generator=generator)}, directory / "x.safetensors")
    (directory / "book.txt").write_text("\n".join(read_text("python-docs"))[:50_000], encoding="utf-8")
    plan = less = (ROOT / "docs/how-to/plan.toml").read_text(encoding="utf-8")
    for setting, other in (('"16:64:log"', "[6, 8]"), ("inputs = 2", "inputs = 1")):
        assert setting in plan
        less = less.replace(setting, other)
    (directory / "docs/how-to").mkdir(parents=True)
    (directory / "plan.toml").write_text(less, encoding="utf-8")
    (directory / "docs/how-to/plan.toml").write_text(less if small else plan, encoding="utf-8")


def with_options(command: str, options: list[tuple[str, str]], known: dict[str, set[str]]) -> list[str]:
    """The arguments of a command, without ``lipscope``, and those of the options that it has.

    Args:
        command: ``lipscope scan …``.
        options: name and value.
        known: the options of every command.
    """
    program, *arguments = shlex.split(command, comments=True)
    if program != "lipscope":
        raise ValueError(f"only lipscope can be run here, not {program!r}; say <!-- not run: why --> above it")
    for option, value in options:
        arguments += [option, value] if option in known[arguments[0]] else []
    return arguments


def pages() -> list[Path]:
    """The README and all pages of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
