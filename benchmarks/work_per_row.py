"""How much work one row takes: model passes, replays, validations, and CPU time of loading and of a scan.

    python benchmarks/work_per_row.py [--seconds]

Counts how often functions of the package are entered while ``gpt2-mini`` is loaded and while one row of one layer is
measured, and with ``--seconds`` their CPU time (least of five, one thread). The functions are counted by their names, so the
script runs on any version of the source: ``PYTHONPATH=other/src python benchmarks/work_per_row.py`` compares.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import lipscope

# What is counted: the function's name, and the end of the file it stands in where the name alone is not enough.
COUNTED = {
    "seam put up": ("using_seam", "seam.py"),
    "modules replayed": ("__call__", "capture.py"),
    "layers validated": ("validate", "validation.py"),
    "core calls watched": ("core_call", ""),
}


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


def cpu(work: Callable[[], Any], repeats: int = 5) -> float:
    """Least CPU seconds of several runs."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    """Print the counts, and the seconds when asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", action="store_true")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)

    def load() -> Any:
        return lipscope.load("gpt2-mini")

    def row(model: Any) -> Any:
        return lipscope.scan(model, "python-docs", layers=[0], lengths=[16], inputs=1)

    row(load())  # reads the text and warms up
    loading, model = counting(load)
    first, _ = counting(lambda: row(model))
    for name in COUNTED:
        print(f"{name:24} loading {loading[name]:5g}   first row {first[name]:5g}")
    if seconds:
        models = iter([load() for _ in range(5)])
        print(f"{'CPU seconds':24} loading {cpu(load):.3f}   first row {cpu(lambda: row(next(models))):.3f}")


if __name__ == "__main__":
    main()
