"""What docs/concepts/worst-case.md says in words is what worst-case-numbers.md has in its tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "docs" / "concepts"
PAGE = re.sub(r"\s+", " ", (FOLDER / "worst-case.md").read_text(encoding="utf-8"))
NUMBERS = (FOLDER / "worst-case-numbers.md").read_text(encoding="utf-8")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def said(pattern: str) -> list[float]:
    found = re.search(pattern, PAGE)
    assert found is not None, pattern
    return [float(number) for number in found.groups()]


def test_what_ascent_adds():
    rows = [[float(cell) for cell in cells(line)] for line in NUMBERS.splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(rows) >= 10
    (start,) = said(r"worst input from n = (\d+) on")
    percent, at = said(r"it finds at most ([\d.]+) % more \(at n = (\d+)\)")
    (factor,) = said(r"upper bound is less than ([\d.]+) times")
    (short,) = said(r"For fewer tokens ascent finds up to ([\d.]+) times more")
    late = {row[0]: row[4] for row in rows if row[0] >= start}
    assert max(late, key=late.__getitem__) == at
    assert max(late.values()) == pytest.approx(1 + percent / 100, abs=6e-4)
    assert max(row[5] for row in rows if row[0] >= start) < factor
    assert max(row[4] for row in rows if row[0] < start) == pytest.approx(short, abs=0.05)


def test_ball_against_layer_norm():
    tables = re.findall(r"\| (\w+), A = .*?, n (\|.*)\n.*\n\| ball (\|.*)\n\| LayerNorm (\|.*)", NUMBERS)
    below = {}
    for kind, *lines in tables:
        lengths, ball, norm = ([float(cell) for cell in cells(line)] for line in lines)
        below[kind] = {n: 100 * (1 - y / x) for n, x, y in zip(lengths, ball, norm, strict=True)}
    (repulsive,) = said(r"agree to within ([\d.]+) %")
    assert max(map(abs, below["repulsive"].values())) <= repulsive
    most, at, least, last = said(r"below those of the ball by (\d+) % at n = (\d+) and (\d+) % at n = (\d+)")
    attractive = below["attractive"]
    assert max(attractive, key=attractive.__getitem__) == at
    assert min(attractive, key=attractive.__getitem__) == last
    assert attractive[at] == pytest.approx(most, abs=0.5)
    assert attractive[last] == pytest.approx(least, abs=0.5)
