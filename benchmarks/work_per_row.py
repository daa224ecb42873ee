"""How much work one row takes: seam, replays, validations, and CPU time of loading and of one row; against another version.

    python benchmarks/work_per_row.py [--against OTHER/src] [--write docs/performance-log.md]

``gpt2-mini`` is loaded, and one row of its layer 0 is measured at 16 tokens of ``python-docs``. Functions are counted by
their names, so that any version of the source can be counted; with ``--against`` both versions run in turns, each in a
process of its own on one thread, and the least CPU seconds of all turns are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sections import write_section

# What is counted: the function's name, and the end of the file it stands in where the name alone is not enough.
COUNTED = {
    "model put onto the seam": ("using_seam", "seam.py"),
    "module calls replayed": ("__call__", "capture.py"),
    "of these up to the attention core": ("core_call", ""),
    "layers validated": ("validate", "validation.py"),
}
TURNS, REPEATS = 7, 5


def counting(work: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """How often every counted function was entered."""
    counts: dict[str, float] = dict.fromkeys(COUNTED, 0)

    def watch(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or "lipscope" not in code.co_filename:
            return
        for name, (function, file) in COUNTED.items():
            if code.co_name == function and code.co_filename.endswith(file):
                # A context manager is entered twice: when it is put up and when it is taken down.
                counts[name] += 0.5 if function == "using_seam" else 1

    sys.setprofile(watch)
    try:
        result = work()
    finally:
        sys.setprofile(None)
    return counts, result


def cpu(work: Callable[[], Any]) -> float:
    """Least CPU seconds of several runs."""
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def measured() -> dict[str, Any]:
    """Counts and seconds of the version on the path."""
    import torch

    import lipscope

    torch.set_num_threads(1)

    def load() -> Any:
        return lipscope.load("gpt2-mini")

    def row(model: Any) -> Any:
        return lipscope.scan(model, "python-docs", layers=[0], lengths=[16], inputs=1)

    row(load())  # reads the text and warms up
    loading, model = counting(load)
    first, _ = counting(lambda: row(model))
    models = iter([load() for _ in range(REPEATS)])
    seconds = {"loading": cpu(load), "row": cpu(lambda: row(next(models)))}
    return {"loading": loading, "row": first, "seconds": seconds}


def in_a_process(source: str | None) -> dict[str, Any]:
    """The same of another version, or of this one."""
    environment = os.environ | ({"PYTHONPATH": source} if source else {})
    command = [sys.executable, __file__, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def lines(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    """The section: counts, and seconds as ratios where there is another version."""
    header = ["what", "loading", "one row", *(["loading before", "one row before"] if theirs else [])]
    rows = [[name, *(f"{run[0][part][name]:g}" for run in (ours, theirs) if run for part in ("loading", "row"))]
            for name in COUNTED]  # fmt: skip
    best = [
        {part: min(run["seconds"][part] for run in runs) for part in ("loading", "row")} for runs in (ours, theirs) if runs
    ]
    rows.append(["CPU seconds", *(f"{seconds[part]:.3f}" for seconds in best for part in ("loading", "row"))])
    if theirs:
        ratio = {part: best[0][part] / best[1][part] for part in ("loading", "row")}
        rows.append(["now over before", *(f"{ratio[part]:.2f}" for part in ("loading", "row")), "", ""])
    table = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    about = (
        "Written by `benchmarks/work_per_row.py`: `gpt2-mini` is loaded with its self-tests, and one row of layer 0 is "
        "measured at 16 tokens of `python-docs`, tokenising included; CPU seconds on one thread, the least of all turns."
    )
    before = " *Before*: the version before the source was rearranged (69fea5b), in turns in the same run." if theirs else ""
    return ["## The work of one row", "", about + before, "", *table]


def main() -> None:
    """Count, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="source tree of another version")
    parser.add_argument("--write", type=Path, help="page whose section is replaced")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.json:
        print(json.dumps(measured()))
        return
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for _ in range(TURNS):
        ours.append(in_a_process(None))
        if asked.against:
            theirs.append(in_a_process(asked.against))
    section = lines(ours, theirs)
    print("\n".join(section))
    if asked.write:
        write_section(asked.write, "benchmarks/work_per_row.py", section)


if __name__ == "__main__":
    main()
