"""What a verified upper end costs, and how close it is: time, peak memory and bound/σ for matrices of 3,072 to 24,576 rows.

    python benchmarks/verified.py [--sizes 3072 24576] [--models gpt2-mini random] [--write docs/performance-log.md]

First, middle and last layer of every model at the first tokens of alice, as many as fill the rows, and a layer of random
GPT-2 shape (d = 768, 12 heads, causal). Every case runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

import lipscope
from lipscope.bounds.verified import Cost, verified_upper
from lipscope.models.corpora import read_text
from lipscope.models.text import chunks_of
from lipscope.rounding import duration, round_up, show_bytes
from sections import Goal, machine, write_goals, write_section

SIZES, MODELS = [3072, 6144, 12288, 24576], ["gpt2-mini", "minilm-l6", "smollm2-135m", "random"]
# Asked of the largest matrices.
SECONDS, BYTES, RATIO = 120, 8 << 30, 1.05


def layers_of(model: str) -> list[int]:
    """First, middle and last."""
    if model == "random":
        return [0]
    count = len(lipscope.load(model).layers)
    return [0, count // 2, count - 1]


def layer_at(model: str, index: int, size: int) -> tuple[lipscope.Attention, torch.Tensor]:
    """The layer and tokens (n, d) with n·d close to ``size``."""
    if model == "random":
        generator = torch.Generator().manual_seed(0)
        weights = [0.05 * torch.randn(768, 768, generator=generator) for _ in range(4)]
        tokens = torch.randn(size // 768, 768, generator=generator)
        return lipscope.Attention(*weights, heads=12, mask="causal"), tokens
    handle = lipscope.load(model)
    width = handle.record(input_ids=chunks_of(handle, read_text("alice"), 16))[index].attention.width
    recorded = handle.record(input_ids=chunks_of(handle, read_text("alice"), size // width))[index]
    return recorded.attention, recorded.tokens()[0]


def measure(model: str, index: int, size: int) -> None:
    """Print one case as JSON."""
    layer, X = layer_at(model, index, size)
    sigma = lipscope.local_lipschitz(layer, X, dtype=torch.float64, certificate=False)
    cost = Cost.of(layer, len(X))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    processor = time.process_time()
    bound = float(verified_upper(layer, X[None], estimate=torch.tensor([sigma.estimate], dtype=torch.float64))[0])
    seconds, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"model": model, "layer": index, "n": len(X), "size": cost.size, "dtype": str(cost.dtype).removeprefix("torch.")}
    found |= {
        "seconds": seconds,
        "processor": time.process_time() - processor,
        "peak": peak << 10,
        "grown": (peak - before) << 10,
        "planned": cost.bytes,
    }
    print(json.dumps(found | {"bound": bound, "ratio": bound / sigma.lower}), flush=True)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--write", type=Path, help="page whose section is replaced")
    parser.add_argument("--case", nargs=3, help="one case as JSON: model, layer, size")
    given = parser.parse_args()
    if given.case:
        measure(given.case[0], int(given.case[1]), int(given.case[2]))
        return
    rows = []
    for size in given.sizes:
        for model in given.models:
            for index in layers_of(model):
                line = [sys.executable, __file__, "--case", model, str(index), str(size)]
                done = subprocess.run(line, capture_output=True, text=True, check=True)
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                print(rows[-1], flush=True)
    table = [
        f"| {row['model']} | {row['layer']} | {row['n']} | {row['size']} | {row['dtype']} | {duration(row['seconds'])} | "
        f"{show_bytes(row['peak'])} | {show_bytes(row['grown'])} ({show_bytes(row['planned'])}) | "
        f"{round_up(row['ratio'], 5)} |"
        for row in rows
    ]
    largest = [row for row in rows if row["size"] > 0.95 * max(SIZES)]
    lines = [
        "## Verified upper ends",
        "",
        f"`benchmarks/verified.py`, {machine()}, {torch.get_num_threads()} threads. Bound/σ is against the lower end of σ.",
        "",
        "| model | layer | n | rows | factorised in | time | peak of the process | above the start (planned) | bound/σ |",
        "|---|---|---|---|---|---|---|---|---|",
        *table,
    ]
    print("\n".join(lines))
    if given.write is not None:
        write_section(given.write, "benchmarks/verified.py", lines)
    ratio = max(row["ratio"] for row in rows)
    goals = [
        Goal(
            "verified upper ends, all sizes", f"bound/σ ≤ {RATIO}", round_up(ratio, 5), ratio <= RATIO, "the bound is loose"
        )
    ]
    if largest:
        slowest, peak = max(row["seconds"] for row in largest), max(row["peak"] for row in largest)
        goals += [
            Goal("verified, 24,576 rows", f"≤ {SECONDS} s", duration(slowest), slowest <= SECONDS, "N³/3 multiplications"),
            Goal("verified, 24,576 rows", f"≤ {show_bytes(BYTES)}", show_bytes(peak), peak <= BYTES, "the matrix"),
        ]
    write_goals(__file__, goals)


if __name__ == "__main__":
    main()
