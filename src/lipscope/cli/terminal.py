"""What commands print: tables in which no number is ever cut, the one progress bar, and lines on standard error."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import typer

from lipscope.rounding import duration, printable

if TYPE_CHECKING:
    from lipscope.attention.layer import Attention
    from lipscope.measure.memory import MemoryPlan

# Tokens from which a run is long enough to say beforehand what it takes.
_LONG = 2048

# In a pipe or a file.
SECONDS_BETWEEN_LINES = 10.0

# Words are folded down to so many letters before a table becomes wider than the terminal.
_FOLDED = 8


def print_table(
    names: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[str] = (), whole: Sequence[str] = (),
    title: str = "", caption: str = "",
) -> None:  # fmt: skip
    """Print rows of cells under wrapping headers, between a title and a caption.

    Columns in ``text`` hold words: aligned left, and folded when the terminal is narrow, but for names (``whole``).
    """
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    names, text, whole = (list(map(printable, words)) for words in (names, text, whole))
    rows = [list(map(printable, row)) for row in rows]
    console = Console()
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    cells = [max((len(row[column]) for row in rows), default=0) for column in range(len(names))]
    # A space of padding and one of the box beside every column.
    narrow = sum(map(max, cells, map(len, names))) + 2 * len(names) > console.width
    needed = 2 * len(names)
    for column, (name, widest) in enumerate(zip(names, cells, strict=True)):
        if name in text:
            # The first column says what the row is about: it stays in one piece too.
            least = min(widest, _FOLDED) if column and name not in whole else widest
            table.add_column(name, overflow="fold", min_width=least)
        else:
            # Folded here and not by the table, which would take the room from the widest column, whatever its header.
            least = max([widest, *map(len, name.split())])
            header = "\n".join(wrap(name, least)) if narrow and name else name
            table.add_column(header, justify="right", min_width=least if narrow else None, no_wrap=True)
        needed += least
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    # Beside the table, not inside it: they may be wider than a narrow table.
    if title:
        console.print(Text(printable(title), style="italic"))
    # Where even this is too wide, the terminal folds whole lines: the table would leave columns out.
    Console(width=max(console.width, needed)).print(table)
    if caption:
        console.print(Text(printable(caption), style="dim italic"))


def echo(message: str, *, err: bool = False, data: bool = False) -> None:
    """Print a line with nothing in it that a terminal would obey; ``data`` stay as they are unless a terminal is there.

    A terminal gets sentences folded between words; it would fold them inside. Commands to copy stay in one piece.
    """
    there = (sys.stderr if err else sys.stdout).isatty()
    kept = data and not there
    said = message if kept else printable(message)
    if there and not data:
        width = get_terminal_size().columns
        said = "".join(line if line.startswith("lipscope ") else _folded(line, width) for line in said.splitlines(True))
    typer.echo(said, nl=not message.endswith("\n"), err=err, color=kept or None)


def _folded(line: str, width: int) -> str:
    end = line[len(line.rstrip("\n")) :]
    indent = line[: len(line) - len(line.lstrip())]
    parts = wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(parts) + end


def show(content: Any, as_json: bool, table: Callable[[], None]) -> None:
    """Print what a command found: as JSON, or as a table."""
    if as_json:
        echo(as_text(content), data=True)
    else:
        table()


def as_text(content: Any) -> str:
    """What was found, as JSON."""
    return json.dumps(content, indent=2, ensure_ascii=False)


_quiet = False


@contextmanager
def quietly(quiet: bool) -> Iterator[None]:
    """Inside, with ``quiet``, no progress and no notices."""
    global _quiet
    _quiet = quiet
    try:
        yield
    finally:
        _quiet = False


def notice(message: str) -> None:
    """A line on standard error."""
    if not _quiet:
        echo(message, err=True)


@contextmanager
def filtered_logs() -> Iterator[None]:
    """Inside, log messages of all libraries hold nothing that a terminal would obey."""
    make = logging.getLogRecordFactory()

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = make(*args, **kwargs)
        made.msg, made.args = printable(made.getMessage()), ()
        if made.exc_info:
            made.exc_text = printable(logging.Formatter().formatException(made.exc_info))
        return made

    logging.setLogRecordFactory(record)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


@contextmanager
def told_warnings() -> Iterator[None]:
    """Warnings as lines on standard error. A command that found a store damaged ends with exit code 1."""
    damaged = False

    def show(message: Warning | str, category: type[Warning], *_: object) -> None:
        nonlocal damaged
        damaged |= category.__name__ == "DamagedStoreWarning"
        notice(f"lipscope: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield
    if damaged:
        raise typer.Exit(1)


def announce(n: int, memory: str | None, plan: Callable[[], MemoryPlan]) -> None:
    """Say what memory the longest inputs will take, or refuse it, when that was limited or they are long."""
    if memory is not None or n >= _LONG:
        notice(f"n = {n}: {plan()}")


def announce_verified(layers: Iterable[Attention | None], n: int, scope: str, memory: str | None) -> None:
    """Say what verifying one σ takes, of the layer where it takes most, or refuse it."""
    from lipscope.bounds.verified import MEMORY, Cost
    from lipscope.measure.memory import read_bytes

    costs = [Cost.of(layer, n, scope) for layer in layers if layer is not None]
    if costs:
        largest = max(costs, key=lambda cost: cost.flops)
        largest.check(MEMORY if memory is None else read_bytes(memory))
        notice(f"n = {n}: to verify one σ takes {largest}")


@contextmanager
def progress_bar(first: str = "starting") -> Iterator[Callable[[float, float, str], None]]:
    """A function of (done, total, what) that moves a bar on standard error; the time left is by work and not by count.

    Where no terminal is there, it prints a line now and then.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn
    from rich.text import Text

    class Times(ProgressColumn):
        """What is left, where that can be told, and what has passed."""

        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            left = "" if task.time_remaining is None else f"{duration(round(task.time_remaining))} left, "
            return Text(f"{left}{duration(round(task.elapsed or 0))} so far")

    console = Console(stderr=True)
    if _quiet or not console.is_terminal:
        yield _lines()
        return
    words = TextColumn("{task.description}", markup=False)
    columns = (words, BarColumn(), TaskProgressColumn(), Times())
    with Progress(*columns, console=console, transient=True, speed_estimate_period=600) as bar:
        line = bar.add_task(first, total=None)
        yield lambda done, total, what: bar.update(line, completed=done, total=total, description=printable(what))


def _lines() -> Callable[[float, float, str], None]:
    start = said = time.monotonic()
    first: tuple[float, float] | None = None

    def show(done: float, total: float, what: str) -> None:
        nonlocal said, first
        now = time.monotonic()
        # The rate is that since the first call: what was done before it, or only prepared, says nothing about the rest.
        first = first or (now, done)
        if now - said >= SECONDS_BETWEEN_LINES:
            said = now
            since, before = first
            left = f", about {duration((now - since) * (total - done) / (done - before))} left" if done > before else ""
            notice(f"{what}: {done / total if total else 1:.0%} done after {duration(now - start)}{left}")

    return show


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Words with a moving sign on standard error."""
    from rich.console import Console

    with nullcontext() if _quiet else Console(stderr=True).status(what):
        yield
