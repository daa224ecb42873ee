"""Tables for the terminal in which no number is ever cut: headers wrap first, then the text columns."""

from __future__ import annotations

from collections.abc import Sequence


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

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column, name in enumerate(names):
        widest = max((len(row[column]) for row in rows), default=0)
        if name in text:
            # The first column says what the row is about: it stays in one piece too.
            table.add_column(name, overflow="fold", min_width=None if column and name not in whole else widest)
        else:
            table.add_column(name, justify="right", min_width=widest, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console = Console()
    # Beside the table, not inside it: they may be wider than a narrow table.
    if title:
        console.print(Text(title, style="italic"))
    console.print(table)
    if caption:
        console.print(Text(caption, style="dim italic"))
