"""The generated pages are those of the code, every page has its place, and the site builds without a warning."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import lipscope
import make_reference
import site_hooks
from lipscope.spectral.result import Status

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


PAGES = make_reference.written()


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    on_disk = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert on_disk == PAGES[name], f"docs/reference/{name} is out of date: run python docs/make_reference.py"


def test_no_generated_page_is_left_behind() -> None:
    assert {path.name for path in (DOCS / "reference").glob("*.md")} == set(PAGES)


def test_the_reference_has_every_command_status_and_name() -> None:
    for name in make_reference.registered():
        assert f"\n## lipscope {name}\n" in PAGES["cli.md"]
    for status in Status:
        assert status.explanation in PAGES["statuses.md"]
    for name in lipscope.__all__:
        assert isinstance(getattr(lipscope, name), ModuleType) or f"::: lipscope.{name}\n" in PAGES["api.md"]
    for room in make_reference.ROOMS:
        for name in importlib.import_module(f"lipscope.{room}").__all__:
            assert f"::: lipscope.{room}.{name}\n" in PAGES[f"api-{room}.md"]


def test_a_page_that_nobody_listed_comes_last_in_its_section() -> None:
    nav = [{"Start": "index.md"}, {"How to": ["how-to/b.md", {"C": "how-to/c.md"}]}]
    assert site_hooks.complete(nav, ["index.md", "how-to/a.md", "how-to/b.md", "how-to/c.md", "more.md", "new/x.md"]) == [
        {"Start": "index.md"}, {"How to": ["how-to/b.md", {"C": "how-to/c.md"}, "how-to/a.md"]}, "more.md", "new/x.md",
    ]  # fmt: skip


def test_every_figure_names_the_script_that_draws_it() -> None:
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        text = page.read_text(encoding="utf-8")
        for image in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
            assert (page.parent / image).is_file(), f"{page}: {image}"
        if "](" in text and re.search(r"!\[[^\]]+\]\(", text):
            assert re.search(r"\w+\.py|lipscope paper", text), f"{page} does not say which script draws its figures"
        assert "![](" not in text, f"{page}: a figure without a text alternative"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return directory


def test_the_site_builds_without_a_warning_and_needs_no_network(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?((?:https?:)?//[^\"' >]+)", text)
        assert not fetched, f"{page.name} fetches {fetched}"


def test_search_works_from_disk(site: Path, browser: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((site / "concepts" / "masks.html").as_uri())
    browser.get_log("browser")
    browser.find_element("css selector", "[data-md-component=search-query]").send_keys("Sinkhorn doubly stochastic")
    found = "return [...document.querySelectorAll('.md-search-result__link')].map((link) => link.href)"
    links = WebDriverWait(browser, 60, poll_frequency=0.1).until(lambda window: window.execute_script(found))
    assert links
    assert all(link.startswith(site.as_uri()) for link in links)
    assert browser.get_log("browser") == []


def test_the_configuration_is_portable() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    config = yaml.safe_load(text)
    assert config["theme"]["font"] is False
    assert config["strict"] is True
    assert not re.search(r"https?://", text)
