"""A whole model on a long text: all layers of a causal language model, in forward passes' time; and the command's start-up.

    python benchmarks/model_scan.py [--model smollm2-135m] [--n 2048] [--every 4] [--write docs/performance-log.md]

The unit is one forward pass of the same model on the same tokens with its own fused attention, timed in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import lipscope
from lipscope.models.corpora import read_text
from lipscope.models.memory import plan_layers
from lipscope.models.text import chunks_of
from sections import Goal, machine, timed, write_goals, write_section

RTOL = 1e-3  # the default of `lipscope scan`


def start_up(program: str, times: int = 5) -> float:
    """Seconds until a Python program with the argument --help is done, at best."""

    def run() -> None:
        subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, check=True)

    return timed(run, times)[0]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", default="alice")
    parser.add_argument("--n", type=int, default=2048)
    parser.add_argument(
        "--every", type=int, default=4, help="one layer in so many; the count of forward passes is scaled up"
    )
    parser.add_argument("--write", type=Path, help="page whose section is replaced")
    given = parser.parse_args()
    starting = start_up("from lipscope.cli.main import main; main()")
    bare, library = start_up("pass"), start_up("import typer, rich")
    handle = lipscope.load(given.model)
    count = len(handle.layers)
    layers = range(0, count, given.every)
    ids = chunks_of(handle, read_text(given.text), given.n)
    inputs = handle.token_inputs(input_ids=ids)
    print(f"n = {given.n}: {plan_layers(handle, given.n, list(layers))}", flush=True)
    with torch.no_grad():
        forward, _ = timed(lambda: handle.model(**inputs, use_cache=False), 3)
    recorded, recording = timed(lambda: handle.record(inputs))
    # Reading off the projections happens once per model, whatever the number of texts.
    probed, _ = timed(lambda: [handle.probe_recording[layer].attention for layer in layers])
    solver, rows, spent = lipscope.Auto(rtol=RTOL), [], []
    for layer in layers:
        begin = time.perf_counter()
        rows += recording[layer].rows(solver=solver, certificate=False)
        spent.append(time.perf_counter() - begin)
    solving = sum(row["seconds"] for row in rows)
    pairs = statistics.fmean(row["iterations"] for row in rows)
    whole = (recorded + sum(spent) * count / len(spent)) / forward
    per_pair = solving / len(rows) / pairs / forward
    lines = [
        f"## All layers of {given.model} at n = {given.n:,}",
        "",
        f"Written by `benchmarks/model_scan.py`: scope attention, rtol {RTOL:g} with intervals of at most 10 %, set "
        f"bounds and what attention looks like included, float32, {machine()}. The unit is one forward pass of the model "
        f"on the same tokens with its own fused attention ({forward:.2f} s in this run). One layer in {given.every} was "
        f"measured, {len(spent)} of {count}, and the sum of the scan is scaled to all.",
        "",
        "| what | forward passes |",
        "|---|---|",
        f"| recording all layers, on our attention core | {recorded / forward:.2f} |",
        f"| σ of {len(spent)} layers, {pairs:.1f} pairs (J·u, Jᵀ·g) each | {solving / forward:.1f} |",
        f"| statistics and set bounds of these layers | {(sum(spent) - solving) / forward:.1f} |",
        f"| **the scan: recording, and all {count} layers of one input** | **{whole:.1f}** |",
        f"| reading off the projections of {len(spent)} layers, once per model | {probed / forward:.1f} |",
        "",
        "Scans record every length on its own piece of text, which keeps their inputs independent; one recorded pass of "
        "the longest text that served all its prefixes (causal models allow it) could save no more than the recording's "
        f"share of the scan, {recorded / forward / whole:.1%}.",
        "",
        f"`lipscope --help` answers in {starting:.2f} s.",
    ]
    print("\n".join(lines))
    why = f"{pairs:.1f} pairs per layer, each {count * per_pair:.2f} forward passes over all layers"
    write_goals(
        __file__,
        [
            Goal(f"scan of {given.model}, n = {given.n:,}, all layers, scope attention", "≤ 60 forward passes",
                 f"{whole:.1f}", whole <= 60, why),
            Goal("start-up of the command line", "< 0.5 s", f"{starting:.2f} s", starting < 0.5,
                 f"the interpreter alone takes {bare:.2f} s, with the library for command lines {library:.2f} s"),
        ],
    )  # fmt: skip
    if given.write is not None:
        write_section(given.write, "benchmarks/model_scan.py", lines)


if __name__ == "__main__":
    main()
