"""Numbers that were frozen before the source was rearranged are what they were; golden_cases.py says what they are.

``LIPSCOPE_GOLDEN=exact`` compares bit for bit, which holds on the machine that froze them; other machines round differently.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

import golden_cases

EXACT = os.environ.get("LIPSCOPE_GOLDEN") == "exact"
# Krylov methods multiply rounding: the last digits of float32 rows depend on the machine's products.
RTOL = 0.0 if EXACT else 2e-4
# They were frozen from n×n matrices, and are sums over strips and heads in another order since: equal to 1e-12.
CERTIFIED = re.compile("certif|upper")


def assert_same(found: Any, frozen: Any, where: str, rtol: float = RTOL) -> None:
    if isinstance(frozen, dict):
        assert list(found) == list(frozen), where
        for key in frozen:
            assert_same(found[key], frozen[key], f"{where} {key}", rtol)
    elif isinstance(frozen, list):
        assert len(found) == len(frozen), where
        for i, (a, b) in enumerate(zip(found, frozen, strict=True)):
            assert_same(a, b, f"{where}[{i}]", rtol)
    elif isinstance(frozen, float) and (not EXACT or CERTIFIED.search(where)):
        rtol = rtol or 1e-12
        assert found == frozen or math.isclose(found, frozen, rel_tol=rtol, abs_tol=1e-9), f"{where}: {found} was {frozen}"
    else:
        assert found == frozen, f"{where}: {found!r} was {frozen!r}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("golden")
    golden_cases.save_models(directory)
    return directory


def test_rows_of_every_kind_of_model(place: Path) -> None:
    volatile = () if EXACT else ("iterations",)
    found, frozen = (
        [{k: v for k, v in row.items() if k not in volatile} for row in rows]
        for rows in (golden_cases.sweep_rows(place), golden_cases.frozen("rows"))
    )
    assert_same(found, frozen, "row")


def test_tables_of_bounds() -> None:
    assert_same(golden_cases.bound_tables(), golden_cases.frozen("tables"), "table", RTOL and 1e-6)


def test_certificates() -> None:
    assert_same(golden_cases.certificates(), golden_cases.frozen("certificates"), "certificate", RTOL and 1e-9)


def test_files_of_a_scan_and_its_report(place: Path) -> None:
    found, frozen = golden_cases.scan_directory(place), golden_cases.frozen("scan")
    assert list(found) == list(frozen)
    rows = [[{k: v for k, v in row.items() if k not in ("seconds", "iterations")} for row in json.loads(f["rows.json"])]
            for f in (found, frozen)]  # fmt: skip
    assert_same(*rows, "rows.json")
    words = [re.sub(r"[-+]?\d[\d.,e+-]*", "#", f["page"]) for f in (found, frozen)]
    assert words[0] == words[1]
