"""The goals of all benchmarks in one table, each with its measured reason where it is missed.

    python benchmarks/goals.py --write docs/performance.md

Reads what the other benchmarks of the same run have left in build/goals.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sections import GOALS, Goal, machine, write_section

ORDER = ("local_lipschitz", "long_context", "model_scan", "cost_model", "experiments", "monitor")


def main() -> None:
    """Collect, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="page whose section is replaced")
    page: Path | None = parser.parse_args().write
    goals: list[Goal] = []
    for name in ORDER:
        path = GOALS / f"{name}.json"
        if path.exists():
            goals += [Goal(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    missed = [goal for goal in goals if not goal.met]
    lines = [
        "## Goals",
        "",
        f"Written by `benchmarks/goals.py` from one run of `make bench` on one machine ({machine()}). Every figure is a "
        f"ratio inside one run, an exponent, or a share. {len(goals) - len(missed)} of {len(goals)} goals are met.",
        "",
        "| case | goal | measured | verdict |",
        "|---|---|---|---|",
        *[f"| {goal.case} | {goal.goal} | {goal.measured} | {'met' if goal.met else '**missed**'} |" for goal in goals],
    ]
    if missed:
        lines += ["", "Why goals are missed, as measured in the same run:", ""]
        lines += [f"- {goal.case}: {goal.reason}." for goal in missed]
    print("\n".join(lines))
    if page is not None:
        write_section(page, "benchmarks/goals.py", lines)


if __name__ == "__main__":
    main()
