"""Every table and figure of docs/concepts/mean-field.md has been written, and claims no more than was measured."""

from __future__ import annotations

import re
from pathlib import Path

from lipscope.runs.fit import RATES

PAGE = Path(__file__).parent.parent / "docs" / "concepts" / "mean-field.md"


def test_figures_exist_and_tables_are_filled():
    text = PAGE.read_text(encoding="utf-8")
    for name in re.findall(r"\]\((mean-field-\w+\.svg)\)", text):
        assert (PAGE.parent / name).is_file(), name
    tables = re.findall(r"<!-- numbers: (\w+) -->\n(.*?)<!-- end -->", text, flags=re.DOTALL)
    assert {name for name, _ in tables} == {"constants", "pairs", "plateau", "cesaro", "gaussian"}
    for name, table in tables:
        assert table.count("\n|") >= 3, name


def test_no_plateau_is_claimed_where_the_rate_reaches_the_slow_end():
    table = re.search(r"<!-- numbers: plateau -->\n(.*?)<!-- end -->", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[1]
    fits = [line.split(" | ")[4] for line in table.splitlines() if "β in" in line]
    assert len(fits) == 6
    for fit in fits:
        slowest = float(re.search(r"β in \[([\d.]+),", fit)[1])
        assert fit.startswith("no plateau") == (slowest <= RATES[0] * 1.01), fit
