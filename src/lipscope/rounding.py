"""Numbers as people read them; ends of intervals are rounded outwards, so that what is shown contains what was computed.

    shown lower end ≤ lower end ≤ upper end ≤ shown upper end

Rounded to the nearest, σ ∈ [1.00621, 1.00624] would read as [1.006, 1.006], which does not contain σ. What is rounded is the
shortest decimal number that stands for the float (0.1, not its last bit), so a number with few digits is shown as it is.
"""

from __future__ import annotations

import html
import math
import re
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from importlib import import_module
from typing import Any, SupportsFloat

# Room for every digit of every float: the only rounding is the one that is asked for.
_EXACT = Context(prec=1200)
# From here down a number is shown with a power of ten, as ``%g`` does.
_SMALLEST_PLAIN = -4


def round_down(value: SupportsFloat, digits: int = 4, *, decimals: int | None = None) -> str:
    """A lower end: not above ``value``, with so many significant digits, or so many decimals.

    Example:
        >>> round_down(1.00624), round_down(-0.1234567, 3), round_down(0.4972, decimals=2), round_down(0.1)
        ('1.006', '-0.124', '0.49', '0.1')
    """
    return _shown(float(value), ROUND_FLOOR, digits, decimals)


def round_up(value: SupportsFloat, digits: int = 4, *, decimals: int | None = None) -> str:
    """An upper end or bound: not below ``value``.

    Example:
        >>> round_up(1.00621), round_up(123456.0), round_up(-0.0012, decimals=2), round_up(float("inf"))
        ('1.007', '1.235e+05', '0.00', 'inf')
    """
    return _shown(float(value), ROUND_CEILING, digits, decimals)


def interval(lower: SupportsFloat, upper: SupportsFloat, digits: int = 4, *, decimals: int | None = None) -> str:
    """An interval that contains the given one.

    Example:
        >>> interval(1.00621, 1.00624), interval(0.4972, 0.5011, decimals=2)
        ('[1.006, 1.007]', '[0.49, 0.51]')
    """
    return f"[{span(lower, upper, digits, decimals=decimals, between=', ')}]"


def span(
    lower: SupportsFloat, upper: SupportsFloat, digits: int = 4, *, decimals: int | None = None, between: str = " … "
) -> str:
    """The same without brackets.

    Example:
        >>> span(0.4972, 0.5011, decimals=2), span(1.00621, 1.00624, between=" and ")
        ('0.49 … 0.51', '1.006 and 1.007')
    """
    return f"{round_down(lower, digits, decimals=decimals)}{between}{round_up(upper, digits, decimals=decimals)}"


def number(value: float, rounding: str = ROUND_HALF_EVEN) -> str:
    """Three significant digits, zeros too, or a power of ten for what is very large or small; by default to the nearest.

    Example:
        >>> number(17.853), number(5238.2), number(1.2e205), number(0.5)
        ('17.9', '5240', '1.20e+205', '0.500')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:.2f}"
    near = rounded(float(value), rounding, 3)
    power = near.adjusted()
    return f"{near:.{max(0, 2 - power)}f}" if -3 <= power < 6 else f"{near:.2e}"


def below(value: float) -> str:
    """As ``number``, rounded down: a printed lower end is a lower end."""
    return number(value, ROUND_FLOOR)


def above(value: float) -> str:
    """As ``number``, rounded up: a printed upper end or bound is one."""
    return number(value, ROUND_CEILING)


def enclosure(lower: float, upper: float) -> str:
    """As ``number``, an interval that contains the given one.

    Example:
        >>> enclosure(1.00620, 1.00621), enclosure(0.1, 2.0)
        ('[1.00, 1.01]', '[0.100, 2.00]')
    """
    return f"[{below(lower)}, {above(upper)}]"


def duration(seconds: float) -> str:
    """A time in words.

    Example:
        >>> duration(1.234), duration(600), duration(9000)
        ('1.23 s', '10 min', '2 h 30 min')
    """
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> counted(1, "task"), counted(12, "head")
        ('1 task', '12 heads')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def show_bytes(count: int) -> str:
    """Bytes in binary units.

    Example:
        >>> show_bytes(3 << 30), show_bytes(1536 << 10), show_bytes(12)
        ('3 GiB', '1.5 MiB', '12 B')
    """
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def rounded(value: float, rounding: str, digits: int, decimals: int | None = None) -> Decimal:
    """A finite number on the grid of so many significant digits or, where they are given, decimals; see ``decimal``."""
    exact = Decimal(repr(value))
    last = exact.adjusted() - digits + 1 if decimals is None else -decimals
    return exact.quantize(Decimal(1).scaleb(last, _EXACT), rounding, _EXACT)


def _shown(value: float, rounding: str, digits: int, decimals: int | None) -> str:
    if digits < 1:
        raise ValueError(f"digits must be at least 1, got {digits}")
    if not math.isfinite(value):
        return str(value)
    if value == 0 and decimals is None:
        return "0"
    near = rounded(value, rounding, digits, decimals)
    if decimals is not None:
        return f"{near.copy_abs() if near == 0 else near:f}"
    power = near.adjusted()
    if _SMALLEST_PLAIN <= power < digits:
        return f"{near.normalize(_EXACT):f}"
    return f"{near.scaleb(-power, _EXACT).normalize(_EXACT):f}e{power:+03d}"


# What moves the cursor, hides text or turns the direction of writing, and halves of characters.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    """Text that a terminal only shows, whatever names it holds: control characters become escapes; lines and tabs stay.

    Example:
        >>> printable("a" + chr(27) + "[31mb") == "a" + chr(92) + "x1b[31mb"
        True
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Shown:
    """How results look in consoles and notebooks: one line by ``repr``, all of ``str`` in a notebook, rows as a table."""

    def to_rows(self) -> list[dict[str, Any]]:
        """Plain dictionaries with the same keys."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """The rows as a pandas ``DataFrame``; needs ``lipscope[report]``."""
        return import_module("pandas").DataFrame(self.to_rows())

    def __str__(self) -> str:
        return counted(len(self.to_rows()), "row")

    def __repr__(self) -> str:
        lines = [line.strip() for line in str(self).splitlines() if line.strip()]
        more = " · …" if len(lines) > 2 else ""
        return f"<{type(self).__name__} {' · '.join(lines[:2])}{more}>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"
