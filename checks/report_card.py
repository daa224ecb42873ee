"""What an attack found: cases tried, failures with a line each, written as a table into a page."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Card:
    """One kind of attack: how often it was tried, and every time something broke."""

    name: str
    promise: str
    tried: int = 0
    failures: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def check(self, good: bool, what: str | Callable[[], str]) -> None:
        """Count a case; a bad one is kept with its description."""
        self.tried += 1
        if not good:
            self.failures.append(what if isinstance(what, str) else what())

    def line(self) -> str:
        """A row of the table."""
        detail = "; ".join(self.details)
        return f"| {self.name} | {self.tried:,} | {len(self.failures)} | {self.seconds:.0f} s | {self.promise} | {detail} |"


@contextmanager
def timed(card: Card) -> Iterator[Card]:
    """Note how long the attack took, and say what it found as soon as it ends."""
    start = time.monotonic()
    try:
        yield card
    finally:
        card.seconds = time.monotonic() - start
        print(f"{card.name}: {card.tried} tried, {len(card.failures)} failed, {card.seconds:.0f} s", flush=True)
        for failure in card.failures[:20]:
            print(f"  {failure}", flush=True)


def commit() -> str:
    """The commit that was attacked, marked when the source differs from it."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def write(page: Path, cards: list[Card], seed: int) -> None:
    """Put the table between the marks of a page."""
    minutes = sum(card.seconds for card in cards) / 60
    stamp = f"{datetime.now(UTC):%Y-%m-%d}, commit `{commit()}`, seed {seed}, {minutes:.0f} minutes."
    head = ["| attack | tried | failed | time | a failure would be | seen |", "|---|---|---|---|---|---|"]
    write_between(page, "checks/attack.py", [stamp, "", *head, *(card.line() for card in cards)])


def write_between(page: Path, script: str, lines: list[str]) -> None:
    """Put lines between the marks that a page has for a script."""
    begin, end = f"<!-- begin {script} -->", f"<!-- end {script} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    page.write_text("\n".join([before + begin, *lines, end]) + after, encoding="utf-8")
