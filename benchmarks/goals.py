"""The goals of all benchmarks in one table, each with its measured reason where it is missed.

    python benchmarks/goals.py --write docs/performance-log.md

Reads what the other benchmarks of the same run have left in build/goals. Ends with status 1, after the table is written,
when a goal that is asserted was missed (memory, in benchmarks/long_context.py) or a benchmark has left nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from sections import GOALS, Goal, failures, machine, write_section

ORDER = ("local_lipschitz", "scan", "long_context", "model_scan", "typical_gain", "cost_model", "monitor")


def main() -> None:
    """Collect, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="page whose section is replaced")
    page: Path | None = parser.parse_args().write
    goals: list[Goal] = []
    silent = [name for name in ORDER if not (GOALS / f"{name}.json").exists()]
    for name in ORDER:
        if name not in silent:
            goals += [Goal(**entry) for entry in json.loads((GOALS / f"{name}.json").read_text(encoding="utf-8"))]
    missed = [goal for goal in goals if goal.verdict == "missed"]
    undecided = [goal for goal in goals if goal.verdict == "undecided"]
    shown = {"met": "met", "missed": "**missed**", "undecided": "**undecided**"}
    lines = [
        "## Goals",
        "",
        f"Written by `benchmarks/goals.py` from the last run of every benchmark on one machine ({machine()}). Every figure "
        f"is a ratio inside one run, an exponent, or a share. Of {len(goals)} goals "
        f"{len(goals) - len(missed) - len(undecided)} are met, {len(missed)} missed, and {len(undecided)} undecided: the "
        "quartiles of the measurement lie on both sides of the limit.",
        "",
        "| case | goal | measured | verdict |",
        "|---|---|---|---|",
        *[f"| {goal.case} | {goal.goal} | {goal.measured} | {shown[goal.verdict]} |" for goal in goals],
    ]
    if missed:
        lines += ["", "Why goals are missed, as measured in the same runs:", ""]
        lines += [f"- {goal.case}: {goal.reason}." for goal in missed]
    if silent:
        lines += ["", f"Without a result in this run: {', '.join(f'`benchmarks/{name}.py`' for name in silent)}."]
    print("\n".join(lines))
    if page is not None:
        write_section(page, "benchmarks/goals.py", lines)
    wrong = [*failures(goals), *(f"benchmarks/{name}.py left no goals in {GOALS}" for name in silent)]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
