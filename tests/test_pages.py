"""Generated pages were written by the code they name, and nobody edited their numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import make_architecture
import pages


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_a_page_was_written_by_the_script_it_names(page: pages.Page) -> None:
    found = pages.wrong(page)
    assert not found, f"{page.name}: {'; '.join(found)}. Write it anew: python docs/pages.py --all {page.name}"


def test_every_script_that_makes_pages_is_known() -> None:
    known = {page.script for page in pages.PAGES}
    made = {str(path.relative_to(pages.ROOT)) for path in (pages.ROOT / "docs").rglob("make_*.py")}
    assert made <= known, f"docs/pages.py does not know {', '.join(sorted(made - known))}"


def test_the_architecture_lists_every_file() -> None:
    page = (pages.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert make_architecture.every_file() in page, "python docs/pages.py --all architecture"


def test_older_scripts_and_edited_numbers_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("docs", "src"):
        (tmp_path / name).mkdir()
    script, page = tmp_path / "docs" / "make_it.py", tmp_path / "docs" / "it.md"
    script.write_text("from pathlib import Path\nPath('docs/it.md').write_text('a <!-- numbers --> 1 <!-- end --> b')\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "RECORD", tmp_path / "docs" / "pages.json")
    it = pages.Page("it", "docs/make_it.py", ("docs/it.md",))
    assert pages.wrong(it) == ["docs/pages.json does not know it"]
    pages.write(it)
    assert pages.wrong(it) == []
    assert not pages.stale(it)
    page.write_text("other words <!-- numbers --> 1 <!-- end --> b")
    assert pages.wrong(it) == []
    page.write_text("a <!-- numbers --> 2 <!-- end --> b")
    assert pages.wrong(it) == ["it was edited by hand"]
    pages.write(it)
    script.write_text(script.read_text() + "# newer\n")
    assert pages.wrong(it) == ["its script is newer than it"]
    pages.write(it)
    (tmp_path / "src" / "new.py").write_text("")
    assert pages.wrong(it) == []
    assert pages.stale(it)
    assert pages.stale(dataclasses.replace(it, name="other"))
