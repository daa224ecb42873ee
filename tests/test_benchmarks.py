"""What the benchmarks say and how they end: goals that are asserted fail the run, after everything is written."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch, tmp_path):
    """A benchmark by name, with its goals in a folder of the test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    sections = importlib.import_module("sections")
    monkeypatch.setattr(sections, "GOALS", tmp_path / "goals")

    def load(name: str):
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "GOALS", tmp_path / "goals", raising=False)
        return module

    yield load
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(FOLDER)):
            del sys.modules[name]


def run(module, monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
    module.main()


@pytest.mark.parametrize("peak", [1 << 30, 3 << 30])
def test_a_missed_memory_goal_fails_after_everything_is_written(script, monkeypatch, tmp_path, capsys, peak):
    def memory(lengths, steps):
        return [], {n: peak * n // 16384 for n in lengths}, {n: n * 2e-3 for n in lengths}

    long_context, goals = script("long_context"), script("goals")
    monkeypatch.setattr(long_context, "against_attention", lambda n: (f"| {n} |", 4.0, 0.6))
    monkeypatch.setattr(long_context, "pair_seconds", lambda layer, n, repeats=3: n * 1e-3)
    monkeypatch.setattr(long_context, "memory_rows", memory)
    page = tmp_path / "performance.md"
    for name in goals.ORDER:
        if name != "long_context":
            script("sections").write_goals(f"{name}.py", [])
    met = peak < 2 << 30
    for module in (long_context, goals):
        if met:
            run(module, monkeypatch, "--write", page)
        else:
            with pytest.raises(SystemExit, match=r"memory of one σ, n = 16,384, d = 768, causal: 3 GiB, asked < 2 GiB"):
                run(module, monkeypatch, "--write", page)
    text = page.read_text(encoding="utf-8")
    assert "## Long sequences" in text
    assert "## Goals" in text
    assert ("**missed**" in text) != met


def test_goals_that_are_only_reported_do_not_fail_and_missing_ones_do(script, monkeypatch, tmp_path):
    goals, sections = script("goals"), script("sections")
    for name in goals.ORDER:
        sections.write_goals(f"{name}.py", [sections.Goal(f"case of {name}", "≥ 2×", "1×", False, "measured so")])
    page = tmp_path / "performance.md"
    run(goals, monkeypatch, "--write", page)
    assert f"Of {len(goals.ORDER)} goals 0 are met" in page.read_text(encoding="utf-8")
    (sections.GOALS / "scan.json").unlink()
    with pytest.raises(SystemExit, match=r"benchmarks/scan.py left no goals"):
        run(goals, monkeypatch, "--write", page)
    assert "Without a result in this run: `benchmarks/scan.py`." in page.read_text(encoding="utf-8")


def test_the_goals_of_the_scan_follow_the_numbers(script):
    judge = script("scan").judge
    assert [goal.met for goal in judge(31.0, 2.0, "")] == [True, True]
    assert [goal.met for goal in judge(1.9, 3.1, "the measured reason")] == [False, False]
    assert json.dumps([goal.measured for goal in judge(1.9, 3.1, "")], ensure_ascii=False) == '["1.9×", "3.10×"]'


def test_what_warm_starts_save_is_said_from_the_numbers(script):
    saved = script("experiments").saved
    assert [saved(18, 18), saved(18, 15.5), saved(18, 20)] == ["saves no pair", "saves 2.5 pairs", "costs 2.0 pairs"]
