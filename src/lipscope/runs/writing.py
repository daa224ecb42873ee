"""Every file that lipscope writes for others: whole or not there, never through a link, no cell that a spreadsheet runs.

Terminals are the business of ``lipscope.rounding.printable``.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a pipe"}
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def write_file(path: str | os.PathLike[str], content: str | bytes | Callable[[IO[bytes]], object]) -> Path:
    """Put a file in place as a whole; until then, and when it cannot be written, what was there stays.

    It is written under a new name in the same directory, is on the disk, and then takes the place of the old one. Where a
    directory, a link, a pipe or a device is there, it is refused.
    """
    path = refuse_special(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no directory {str(path.parent)!r} for {path.name!r}")
    part = path.with_name(f".lipscope-{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode("utf-8", "replace") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        if error.errno is not None:
            error.filename = os.fspath(path)  # a full disk names no file
        raise
    finally:
        part.unlink(missing_ok=True)
    return path


def open_log(path: str | os.PathLike[str]) -> IO[str]:
    """Open a file to add to it, made when it does not exist; not through a link, and nothing but a regular file."""
    place = refuse_special(path)
    return open(
        place, "a+", encoding="utf-8", newline="", opener=lambda name, flags: os.open(name, flags | _NO_LINKS, 0o666)
    )


def refuse_special(path: str | os.PathLike[str]) -> Path:
    """The path, unless something is there that is no regular file."""
    place = Path(path)
    if os.path.lexists(place) and not stat.S_ISREG(mode := place.lstat().st_mode):
        raise FileExistsError(f"{str(path)!r} is {_KINDS.get(stat.S_IFMT(mode), 'a device')}, not a file: name another")
    return place


# A spreadsheet takes a cell that begins so for a formula; the apostrophe itself is among them, so that it can be undone.
_BEGINS = ("=", "+", "-", "@", "\t", "\r", "\n", "'")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


def safe_cell(value: Any) -> Any:
    """Words that a spreadsheet would run get an apostrophe in front, which ``read_cell`` takes away; numbers stay.

    Example:
        >>> safe_cell("=1+1"), safe_cell("-0.5"), safe_cell(-0.5), read_cell("'=1+1"), read_cell(safe_cell("'a"))
        ("'=1+1", '-0.5', -0.5, '=1+1', "'a")
    """
    risky = isinstance(value, str) and value.startswith(_BEGINS) and not _NUMBER.fullmatch(value)
    return f"'{value}" if risky else value


def read_cell(cell: str) -> str:
    """The words behind a cell of ``safe_cell``."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(_BEGINS) else cell


def finite_json(value: Any, **style: Any) -> str:
    """JSON; numbers that are not finite, which it does not have, become null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda name: None), **style)


def csv_lines(rows: Iterable[Iterable[Any]]) -> str:
    """Cells as CSV."""
    lines, line = [], io.StringIO(newline="")
    writer = csv.writer(line)  # its own ends of lines make it quote both signs that readers take for one
    for row in rows:
        writer.writerow([safe_cell(cell) for cell in row])
        lines.append(line.getvalue().removesuffix("\r\n") + "\n")
        line.seek(0)
        line.truncate()
    return "".join(lines)


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with the same columns, as CSV."""
    columns = list(rows[0]) if rows else ["key"]
    return csv_lines([columns, *([row[name] for name in columns] for row in rows)])
