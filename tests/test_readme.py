"""What the README promises beyond its examples, which tests/test_docs_snippets.py runs."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_python_example_is_short_and_shows_its_output():
    lines = [line for line in readme_blocks("python")[0].splitlines() if line]
    assert len(lines) <= 10
    assert "σ ∈ [" in readme_blocks("text")[0]


def test_the_two_commands_exist():
    makefile = (README.parent / "Makefile").read_text(encoding="utf-8")
    for line in readme_blocks("sh")[0].splitlines():
        target = line.split()[1]
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_the_paper_can_be_cited():
    (entry,) = readme_blocks("bibtex")
    for word in ("How Smooth Is Attention?", "Castin", "Ablin", "Peyr", "Conference on Machine Learning", "2024"):
        assert word in entry
    assert entry.count("{") == entry.count("}")


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
