"""Tables for the terminal in which no number is ever cut: headers wrap first, then the text columns."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

# Words are folded down to so many letters before a table becomes wider than the terminal.
_FOLDED = 8


def print_table(
    names: Sequence[str], rows: Sequence[Sequence[str]], *, text: Sequence[str] = (), whole: Sequence[str] = (),
    title: str = "", caption: str = "",
) -> None:  # fmt: skip
    """Print rows of cells under wrapping headers.

    Args:
        names: the headers.
        rows: the cells, as strings.
        text: headers of columns that hold words: aligned left, and folded when the terminal is narrow.
        whole: those of ``text`` that hold names, which stay in one piece.
        title: printed above; taken literally.
        caption: printed below; taken literally.
    """
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

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
        console.print(Text(title, style="italic"))
    # Where even this is too wide, the terminal folds whole lines: the table would leave columns out.
    Console(width=max(console.width, needed)).print(table)
    if caption:
        console.print(Text(caption, style="dim italic"))
