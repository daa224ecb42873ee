"""Every command and Python block of the README and the documentation runs, and prints what its page shows.

A block that cannot run in a test carries the reason in a comment above it (docs/snippets.py). The reasons are listed and
counted below, so that no block is left out in silence. Blocks of one page share one namespace and one directory, as they do
for a reader.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import lipscope
import lock
import make_reference
import snippets
from lipscope.cli.main import app
from lipscope.models import load as loading
from lipscope.models.text import Chunker

PAGES = [page for page in snippets.pages() if snippets.blocks(page)]
BLOCKS = [block for page in PAGES for block in snippets.blocks(page)]

OPTIONS = make_reference.options()

# Why a block is not run: the first words of its comment. A new reason is a decision, so it is made here.
REASONS = ("network", "cluster", "long", "make", "your own", "needs")
MOST_SKIPPED = 0.35
MAKEFILE = (snippets.ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with the files that a reader is asked to bring, and models that are loaded once for all pages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    snippets.prepare(tmp_path, small=True)
    monkeypatch.setattr("lipscope.models.load.load", cached_load)
    monkeypatch.setattr(Chunker, "__init__", chunker_of_known_text)
    return tmp_path


_LOAD: Callable[..., Any] = loading.load
_CHUNKER = Chunker.__init__
# Tokenizer, text, and the chunker that was made of them: most commands of the pages read the same book.
_CHUNKED: list[tuple[Any, list[str], Chunker]] = []


def chunker_of_known_text(self: Chunker, documents: Sequence[str], tokenizer: Any) -> None:
    for known, text, chunker in _CHUNKED:
        if known is tokenizer and text == list(documents):
            vars(self).update(vars(chunker))
            return
    _CHUNKER(self, documents, tokenizer)
    _CHUNKED.append((tokenizer, list(documents), self))
    del _CHUNKED[:-8]


@lru_cache(maxsize=4)
def _named(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    return _LOAD(name, **dict(options))


def cached_load(model: Any, *rest: Any, **options: Any) -> Any:
    if isinstance(model, str) and not rest and not Path(model).exists():
        # What is said and what is the default anyway are the same model: commands say all of their options.
        given = {name: value for name, value in options.items() if name != "check" and value not in (None, False)}
        return _named(model, tuple(sorted(given.items())))
    return _LOAD(model, *rest, **options)


DEMO = ("base", "offline", "report", "ot")


def test_the_demo_installs_what_the_readme_is_tested_with() -> None:
    rule = re.search(r"^\$\(VENV\)/\.installed:.*?(?=^\S+:.*installed-dev)", MAKEFILE, re.DOTALL | re.MULTILINE)
    offline = re.search(r"^\$\(VENV\)/\.installed-offline:.*?^\n", MAKEFILE, re.DOTALL | re.MULTILINE)
    assert rule is not None
    assert offline is not None
    assert tuple(re.findall(r"--install (.+)", rule[0] + offline[0])) == (DEMO[0], " ".join(DEMO[1:]))
    assert re.search(r"^demo: \$\(VENV\)/\.installed \$\(VENV\)/\.installed-offline$", MAKEFILE, re.MULTILINE)
    assert {"dask", "lightning"} <= beyond_the_demo()


def test_the_first_lines_of_the_readme_are_measured() -> None:
    words = " ".join((snippets.ROOT / "README.md").read_text(encoding="utf-8").split())
    said = re.search(
        r"layer (\d+) makes the worst small change of (\d+) tokens of \*Alice\* more than (\d+) times as large, and a "
        r"random one about (\d+) times",
        words,
    )
    assert said is not None
    layer, n, worst, typical = map(int, said.groups())
    [row] = lipscope.scan("smollm2-135m", "alice", layers=[layer], lengths=[n], inputs=1).rows
    assert row["lower"] > worst
    assert row["typical"] == pytest.approx(typical, rel=0.05)


def beyond_the_demo() -> set[str]:
    """Modules that are here and not where ``make demo`` alone was run; but for the tools of the tests themselves."""
    groups = {name: {*groups} for name, (_, _, groups) in lock.read_lock().items()}
    found = metadata.packages_distributions().items()
    owners = {module: [groups.get(lock.canonical(name), {"base"}) for name in names] for module, names in found}
    return {module for module, kinds in owners.items() if not any(kind & {*DEMO, "dev"} for kind in kinds)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(snippets.ROOT).as_posix())
def test_the_blocks_of_a_page_run(
    page: Path, workshop: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {}
    if page.name == "README.md":  # works after `make demo` as it stands
        for module in beyond_the_demo():
            monkeypatch.setitem(sys.modules, module, None)
    if "lipscope smooth" in page.read_text(encoding="utf-8"):  # changes the weights of what it loads
        _named.cache_clear()
        request.addfinalizer(_named.cache_clear)
    for block in snippets.blocks(page):
        if block.skipped is not None:
            continue
        if block.kind == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.body, block.where, "exec"), names)
            if block.shown is not None and block.compared:
                assert_alike(printed.getvalue(), block.shown, block.where)
            continue
        for command, shown in block.commands():
            done = CliRunner().invoke(app, snippets.with_options(command, block.options, OPTIONS))
            assert done.exit_code == 0, f"{block.where}: {command}\n{done.output}"
            if shown is not None and block.compared:
                assert_alike(done.stdout, shown, block.where)


def test_what_is_not_run_says_why() -> None:
    skipped = [block for block in BLOCKS if block.skipped is not None]
    for block in skipped:
        print(f"{block.where}: {block.skipped}")
        assert block.skipped.startswith(REASONS), f"{block.where}: {block.skipped!r} is none of {REASONS}"
    assert len(BLOCKS) > 30
    assert len(skipped) <= MOST_SKIPPED * len(BLOCKS), f"{len(skipped)} of {len(BLOCKS)} blocks are not run"


def test_every_comment_is_next_to_its_block() -> None:
    for page in snippets.pages():
        comments = re.findall(r"<!-- (?:not run|run with|output not compared):", page.read_text(encoding="utf-8"))
        assert len(comments) == sum(block.note is not None for block in snippets.blocks(page)), page


@pytest.mark.parametrize("page", snippets.pages(), ids=lambda page: page.relative_to(snippets.ROOT).as_posix())
def test_commands_in_sentences_and_in_blocks_that_are_not_run_exist(page: Path) -> None:
    said = re.findall(r"(?<!`)`lipscope\s([^`]+)`(?!`)", page.read_text(encoding="utf-8"))
    said += [
        command.removeprefix("lipscope ")
        for block in snippets.blocks(page)
        if block.kind != "python"
        for command, _ in block.commands()
        if command.startswith("lipscope ")
    ]
    for text in said:
        name, *words = text.split()
        if name.isupper() or name.startswith("-"):  # lipscope COMMAND, lipscope --help
            continue
        assert name in OPTIONS, f"{page}: there is no command `lipscope {text}`"
        for word in words:
            option = word.partition("=")[0].rstrip(",.:;)")
            assert not option.startswith("--") or option in OPTIONS[name], f"{page}: `lipscope {text}` has no {option}"


_NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?"


def assert_alike(printed: str, shown: str, where: str) -> None:
    """The same words, and numbers that agree to 0.2 % or in the last digit shown; residuals are rounding, so any will do."""
    texts = [re.sub(rf"residual {_NUMBER}", "residual", text) for text in (printed, shown)]
    words = [re.sub(r"[\s─]+", " ", re.sub(_NUMBER, "#", text)).strip() for text in texts]
    assert words[0] == words[1], f"{where} prints other words than the page shows"
    for ours, theirs in zip(*(re.findall(_NUMBER, text) for text in texts), strict=True):
        a, b = float(ours.replace(",", "")), float(theirs.replace(",", ""))
        digit = 10.0 ** -len(theirs.partition(".")[2]) if "e" not in theirs else 0.0
        assert abs(a - b) <= max(2e-3 * abs(b), 1.5 * digit), f"{where} prints {ours}, the page shows {theirs}"


def test_comparing_outputs_can_fail() -> None:
    assert_alike("σ = 1.2345, residual 3e-9", "σ =  1.2346, residual 1e-8", "here")
    for other in ("σ = 1.2395, residual 1", "σ = 1.27, residual 1", "s = 1.2345, residual 1", "σ = 1.2345 1.0, residual 1"):
        with pytest.raises((AssertionError, ValueError)):
            assert_alike("σ = 1.2345, residual 3e-9", other, "here")


def test_blocks_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text.\n\n    lipscope one --a \\\n        --b\n\n```\nout\n```\n\n"
        "<!-- not run: network -->\n\n```sh\nlipscope two  # c\n"
        "lipscope three\n```\n\n```console\n$ lipscope four\nprinted\n$ lipscope five\n```\n\n```python\nprint(1)\n```\n\n"
        "```text\n1\n```\n\n```toml\nlipscope = 1\n```\n",
        encoding="utf-8",
    )
    found = snippets.blocks(page)
    assert [block.kind for block in found] == ["shell", "shell", "console", "python"]
    assert found[0].commands() == [("lipscope one --a --b", "out\n")]
    assert found[1].skipped == "network"
    assert [command for command, _ in found[1].commands()] == ["lipscope two  # c", "lipscope three"]
    assert found[2].commands() == [("lipscope four", "printed\n"), ("lipscope five", None)]
    assert found[3].shown == "1\n"
