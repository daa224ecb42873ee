"""On a terminal, tables fit where they can and cut no number where they cannot, and nothing steers it."""

from __future__ import annotations

import io
import logging
import re

import pytest
from typer.testing import CliRunner

import make_reference
from lipscope.cli.main import app
from lipscope.cli.terminal import echo, filtered_logs, print_table, progress_bar

NAMES = ["layer", "head", "n", "median σ", "lower", "upper", "|x|", "entropy", "on first", "α (σ ~ n^α)"]
ROWS = [
    ["11", "10", "128", "17.85", "16.33", "20.69", "12.1", "2.67", "0.31", "-0.15 … -0.02"],
    ["0", "7", "128", "3.715", "3.483", "4.178", "9.54", "3.35", "0.05", "0.08 … 0.18"],
]


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, **options: object) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(NAMES, ROWS, **options)  # type: ignore[arg-type]
    return [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_a_scan_of_heads_fits_eighty_columns(capsys, monkeypatch) -> None:
    lines = printed(capsys, monkeypatch, 80)
    assert max(map(len, lines)) <= 80
    assert len(lines) == 5  # two lines of headers, a rule, two rows
    assert lines[0].split() == ["median", "on"]
    assert " ".join(lines[1].split()) == "layer head n σ lower upper |x| entropy first α (σ ~ n^α)"
    for line, row in zip(lines[3:], ROWS, strict=True):
        assert line.split() == " ".join(row).split()


def test_headers_stay_on_one_line_where_there_is_room(capsys, monkeypatch) -> None:
    assert printed(capsys, monkeypatch, 100)[0].split() == " ".join(NAMES).split()


def test_no_number_is_cut_on_the_narrowest_terminal(capsys, monkeypatch) -> None:
    lines = printed(capsys, monkeypatch, 30)
    for row in ROWS:
        for cell in row:
            assert any(cell in line for line in lines), cell


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_progress_bar_says_what_is_left_only_where_it_can_be_told(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", shown := Terminal())
    clock = iter(range(0, 100_000, 10))
    monkeypatch.setattr("rich.console.monotonic", lambda: next(clock))
    with progress_bar() as progress:
        before = shown.getvalue()
        progress(1, 4, "layer 0")
        progress(2, 4, "layer 1")
    assert "so far" in before
    assert "left" not in before
    assert re.search(r"layer 1 .* 50%.* \d+ (s|min) left, \d+ (s|min) so far", shown.getvalue())


def test_sentences_are_folded_between_words_on_a_terminal_and_commands_are_not(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    sentence = "  so many of 32,768 directions are as bad as the worst-case one\nand a second line"
    command = "lipscope export a-store-with-a-long-name.db --format parquet --out rows.parquet"
    monkeypatch.setattr("sys.stdout", shown := Terminal())
    echo(sentence)
    echo(command)
    *folded, last = shown.getvalue().splitlines()
    assert last == command
    assert folded == ["  so many of 32,768 directions are as", "  bad as the worst-case one", "and a second line"]
    monkeypatch.setattr("sys.stdout", piped := io.StringIO())
    echo(sentence)
    assert piped.getvalue() == sentence + "\n"


def test_log_messages_of_libraries_hold_nothing_that_a_terminal_obeys() -> None:
    log, written = logging.getLogger("some.library"), io.StringIO()
    handler = logging.StreamHandler(written)
    log.addHandler(handler)
    with filtered_logs():
        log.error("no file %s", "\x1b]0;owned\x07name")
        try:
            raise ValueError("\x1b[2J")
        except ValueError:
            log.exception("what happened")
    log.removeHandler(handler)
    assert "\x1b" not in written.getvalue()
    assert r"no file \x1b]0;owned\x07name" in written.getvalue()
    assert r"ValueError: \x1b[2J" in written.getvalue()


def test_help_names_every_option_in_full_on_eighty_columns() -> None:
    for name, command in make_reference.registered().items():
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "80"}).output
        for parameter in make_reference.parameters(command):
            for spelled in parameter.names if parameter.option else ():
                assert re.search(rf"{spelled}(?![\w…-])", shown), f"{name} {spelled}"
