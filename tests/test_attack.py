"""``make attack`` itself: it counts what fails, writes its table, and does nothing that was not asked for."""

from __future__ import annotations

import os
import random
import shutil
import sys
from pathlib import Path

import pytest

import attack
import attack_stores
import report_card
from lipscope.runs import Store
from report_card import Card
from test_sweep_store import WHERE, made_up_outcome


def test_a_card_counts_and_its_table_replaces_the_last_one(tmp_path: Path) -> None:
    card = Card("kills", "a row lost")
    card.check(True, "never shown")
    card.check(False, lambda: "one row lost")
    assert (card.tried, card.failures) == (2, ["one row lost"])
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin checks/attack.py -->\nold\n<!-- end checks/attack.py -->\nafter\n", encoding="utf-8")
    report_card.write(page, [card], 7)
    written = page.read_text(encoding="utf-8")
    assert "| kills | 2 | 1 |" in written
    assert "seed 7" in written
    assert "old" not in written
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")


def test_damage_is_seen_when_a_row_is_shown_that_was_never_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = tmp_path / "truth.db"
    with Store(truth, write=True) as store:
        run = store.begin_run("plan", [], "none", WHERE)
        for number in range(4):
            store.save(made_up_outcome(number, rows=2), run)
        store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with Store(tmp_path / "other.db", write=True) as store:
        run = store.begin_run("plan", [], "none", WHERE)
        for number in range(1, 6):
            store.save(made_up_outcome(number, rows=2), run)
        store.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def swap(store: Path, *_: object) -> str:
        shutil.copy(tmp_path / "other.db", store)
        return "another store in its place"

    for name in ("_flip", "_zero", "_cut", "_noise", "_edit"):
        monkeypatch.setattr(attack_stores, name, swap)
    monkeypatch.setattr(attack_stores, "sweep", lambda *_: -1)
    monkeypatch.setattr(attack_stores, "wait", lambda *_: 0)
    card = Card("damage", "")
    attack_stores.damage(card, tmp_path, truth, random.Random(0), 1)
    said = "\n".join(card.failures)
    assert "rows shown that were never measured" in said
    assert "gone without a word" in said


def test_root_is_refused_and_nothing_is_done(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["attack.py"])
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    assert attack.main() == 2
    shown = capsys.readouterr()
    assert "not as root" in shown.err
    assert shown.out == ""
