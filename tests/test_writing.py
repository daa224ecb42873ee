"""Files are whole or not there and never written through a link; spreadsheets and terminals run nothing that a name says."""

from __future__ import annotations

import csv
import io
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import command
import lipscope
from lipscope.cli.terminal import echo, print_table
from lipscope.report import draw
from lipscope.report.charts import Chart, Panel, Series
from lipscope.runs import Store, export
from lipscope.runs.files import write_run
from lipscope.runs.run import Run
from lipscope.runs.schema import LockedStoreError
from lipscope.runs.writing import csv_text, write_file
from lipscope.studies.rows import write_study
from lipscope.training.monitor import Monitor
from test_sweep_store import filled

CHART = Chart("line", "A line", [Panel([Series("y = x", [1, 2], [1, 2])], "x", "y")], "A straight line.")
ROW = {"model": "m", "layer": 0, "head": None, "document": None, "n": 8, "lower": 1.0, "estimate": 1.1, "upper": 1.2}
LENGTHS = [ROW | {"n": n} for n in (8, 16, 32)]


def test_a_full_disk_is_named_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as told:
        write_file(tmp_path / "rows.csv", "n,σ")
    assert told.value.filename == str(tmp_path / "rows.csv")
    assert not list(tmp_path.iterdir())


def write_all(place: Path) -> None:
    """Every file that has a fixed name, and one of each kind."""
    store = place.parent / "run.db"
    export(store, "csv", place / "table.csv")
    export(store, "json", place / "table.json")
    export(store, "parquet", place / "table.parquet")
    lipscope.report.write_report(store, place / "report.html")
    write_run(Run(LENGTHS), place)
    draw(CHART, *(place / f"line.{ending}" for ending in ("png", "pdf", "svg", "html")))
    write_study(place / "study", LENGTHS, CHART)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    filled(tmp_path / "run.db", 2)
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_files_have_the_rights_that_the_user_wants_and_leave_nothing_else(place: Path) -> None:
    before = os.umask(0o027)
    try:
        write_all(place)
    finally:
        os.umask(before)
    files = [path for path in place.rglob("*") if path.is_file()]
    assert len(files) == 17
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}
    assert not [path for path in files if path.name.startswith(".")]


SPECIAL: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, victim: path.symlink_to(victim),
    "dangling link": lambda path, victim: path.symlink_to(victim.with_name("nowhere")),
    "pipe": lambda path, _: os.mkfifo(path),
    "directory": lambda path, _: path.mkdir(),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_nothing_is_written_through_a_link_or_into_a_pipe(place: Path, kind: str) -> None:
    victim = place.parent / "victim"
    victim.write_text("precious")
    (place / "study").mkdir()
    chart = place / "line.png"
    writers: dict[Path, Callable[[], object]] = {
        place / "table.csv": lambda: export(place.parent / "run.db", "csv", place / "table.csv"),
        place / "table.parquet": lambda: export(place.parent / "run.db", "parquet", place / "table.parquet"),
        place / "report.html": lambda: lipscope.report.write_report(place.parent / "run.db", place / "report.html"),
        chart: lambda: draw(CHART, chart),
        place / "study" / "rows.csv": lambda: write_study(place / "study", LENGTHS),
        place / "log.csv": lambda: Monitor(torch.nn.Linear(2, 2), csv=place / "log.csv"),
        place / "other.db.lock": lambda: Store(place / "other.db", write=True),
        place / "pipe.db": lambda: Store(place / "pipe.db", write=True),
    }
    writers |= {
        place / name: lambda: write_run(Run(LENGTHS), place)
        for name in ("rows.csv", "rows.json", "run.json", "tokens.json", "fits.csv")
    }
    for path, write in writers.items():
        if path.name == "pipe.db" and "link" in kind:
            continue  # the store behind a link is the store
        path.unlink(missing_ok=True)
        SPECIAL[kind](path, victim)
        with pytest.raises((FileExistsError, LockedStoreError), match="not a file: name another"):
            write()
        assert victim.read_text() == "precious"
        assert not victim.with_name("nowhere").exists()
        path.rmdir() if kind == "directory" else path.unlink()


def test_a_name_that_can_be_guessed_beside_the_file_is_never_used(place: Path) -> None:
    victim = place.parent / "victim"
    victim.write_text("precious")
    for name in (".rows.csv.part", "rows.csv.part", ".rows.csv.tmp"):
        (place / name).symlink_to(victim)
    export(place.parent / "run.db", "csv", place / "rows.csv")
    assert victim.read_text() == "precious"
    assert not (place / "rows.csv").is_symlink()
    assert (place / ".rows.csv.part").is_symlink()


def test_what_was_there_stays_when_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, "before")

    def fail(file: io.BufferedIOBase) -> None:
        file.write(b"half")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_file(path, fail)  # type: ignore[arg-type]
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        write_file(tmp_path / "no" / "file", "")


def test_there_is_one_way_to_write_a_file_and_one_to_print() -> None:
    source = Path(lipscope.__file__).parent
    writes = re.compile(r"write_text|write_bytes|savefig\(|save_file\(|open\([^)]*[\"'][wax]")
    found = {path.relative_to(source).as_posix() for path in source.rglob("*.py") if writes.search(path.read_text())}
    # Into new directories of their own, which then take their place as a whole.
    own = {"training/smooth.py", "models/checkpoints.py"}
    assert found <= own | {"runs/writing.py"}
    commands = (source / "cli").glob("*.py")
    assert [path.name for path in commands if re.search(r"typer\.echo|(?<![.\w])print\(", path.read_text())] == [
        "terminal.py"
    ]


WORDS = [
    "=1+1",
    "+1+cmd",
    "-2+3",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\n=1",
    "'=1",
    "''",
    "'",
    "a=b",
    "-",
    "",
    "-0.5e3",
    "x\x1b[2J",
]


def test_cells_that_a_spreadsheet_would_run_are_text_and_come_back(tmp_path: Path) -> None:
    rows = [ROW | {"model": word, "text": word, "=name": word, "difference": -0.25, "count": -3} for word in WORDS]
    Run(rows).to_csv(tmp_path / "rows.csv")
    cells = list(csv.reader(io.StringIO((tmp_path / "rows.csv").read_bytes().decode(), newline="")))
    number = re.compile(r"[+-]?[\d.]+(e[+-]?\d+)?")
    risky = [cell for line in cells for cell in line if cell[:1] in "=+-@\t\r\n" and cell and not number.fullmatch(cell)]
    assert risky == []
    assert cells[1][cells[0].index("difference")] == "-0.25"
    read = Run.read(tmp_path / "rows.csv").rows
    assert [row["model"] or "" for row in read] == WORDS
    assert [row["text"] or "" for row in read] == WORDS
    assert "=name" in read[0]
    assert {(row["difference"], row["count"]) for row in read} == {(-0.25, -3)}


HOSTILE = "evil\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


@pytest.mark.parametrize("debug", [[], ["--debug"]])
@pytest.mark.parametrize(
    "arguments",
    [
        ["export", HOSTILE], ["report", HOSTILE], ["view", HOSTILE], ["scan", f"./{HOSTILE}"],
        ["scan", "gpt2-mini", "--text", HOSTILE],
        ["measure", HOSTILE, "--tokens", HOSTILE], ["sweep", HOSTILE], ["sweep", "--model", HOSTILE, "--text", HOSTILE],
        ["bounds", f"./{HOSTILE}"], ["tokens", f"./{HOSTILE}"], ["scan", "gpt2-mini", "--scope", HOSTILE], [f"--{HOSTILE}"],
    ],
)  # fmt: skip
def test_no_name_reaches_the_terminal_as_a_command(arguments: list[str], debug: list[str]) -> None:
    found = command.run(*arguments, *debug)
    assert found.returncode in (1, 2)
    assert not CONTROLS.search(found.stdout + found.stderr), repr(found.stderr)
    assert "evil" in found.stderr


def test_rows_of_strangers_are_shown_and_not_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, terminal)
    table = csv_text([ROW | {"model": HOSTILE}])
    echo(table, data=True)
    print_table(["model", HOSTILE], [[HOSTILE, "1"]], title=HOSTILE, caption=HOSTILE)
    shown = terminal.getvalue()
    assert shown.count("evil") == 5
    assert not CONTROLS.search(shown)
    # A program behind a pipe gets the table as it is.
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    echo(table, data=True)
    assert pipe.getvalue() == table
    assert not CONTROLS.search(str(Run([ROW | {"model": HOSTILE, "scope": "s", "dtype": "d", "notes": HOSTILE,
                                               "radius_rms": 1.0, "entropy": None, "sink_mass": None}])))  # fmt: skip
