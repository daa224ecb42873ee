"""The README's Python example runs and prints what the README shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), flags=re.DOTALL)


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"(?<![\w.])\d+\.\d+(?:e[+-]\d+)?", text)]


def test_the_python_example_prints_what_the_readme_shows():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(readme_blocks("python")[0], {})
    shown, ours = readme_blocks("text")[0], printed.getvalue()

    def words(text: str) -> str:
        return re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "#", text).strip()

    assert words(ours) == words(shown)
    for a, b in zip(numbers(ours), numbers(shown), strict=True):
        # Residuals are at rounding level and differ between machines; everything else agrees to the digits shown.
        assert abs(a - b) <= 2e-4 * abs(b) or max(a, b) < 1e-1


def test_the_two_commands_exist():
    makefile = (README.parent / "Makefile").read_text()
    for line in readme_blocks("sh")[0].splitlines():
        target = line.split()[1]
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
