"""Where a long search reports to: the caller's function, a bar on standard error, or nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

Progress: TypeAlias = Callable[[int, int, str], None]


@contextmanager
def reporting(progress: Progress | bool) -> Iterator[Progress]:
    """A function of (done, total, what): the one given, that of a progress bar for True, or one that does nothing."""
    if callable(progress):
        yield progress
        return
    if not progress:
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("searching", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)
