"""A program of its own: peak memory of σ of one layer above what the process held before, and what was planned.

    python measured_memory.py '{"heads": 8, "mask": "causal"}' width tokens inputs ['{"k": 2}' share]

The solver's options may follow, and what share of the memory planned for it there is.

It has a process for itself because memory that other work has left to the C library would hide what this one takes.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import torch

import lipscope
from lipscope.measure.memory import plan_memory
from lipscope.spectral.solvers import triplets

STEPS = 19


def resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} here")


def main() -> None:
    options, (d, n, inputs) = json.loads(sys.argv[1]), map(int, sys.argv[2:5])
    extra, share = (json.loads(sys.argv[5]), float(sys.argv[6])) if len(sys.argv) > 5 else ({}, None)
    shared = options.get("kv_heads", options["heads"]) / options["heads"]
    weights = [torch.randn(int(d * (shared if role in "kv" else 1)), d) / d**0.5 for role in "qkvo"]
    solver = lipscope.GolubKahan(rtol=1e-30, max_steps=STEPS, **extra)
    # Threads and kernels take memory once.
    lipscope.local_lipschitz(lipscope.Attention(*weights[:1] * 4, heads=1), torch.randn(1, 16, d), solver=solver)
    layer = lipscope.Attention(*weights, **options)
    plan = plan_memory(layer, n, inputs=inputs, triplets=triplets(solver))
    if share is not None:
        plan = plan_memory(layer, n, inputs=inputs, triplets=triplets(solver), limit=int(share * plan.total))
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from here
    before = resident("VmRSS")
    memory = None if share is None else plan.total
    lipscope.local_lipschitz(layer, torch.randn(inputs, n, d), certificate=False, solver=solver, memory=memory)
    print(json.dumps([resident("VmHWM") - before, plan.total]))


if __name__ == "__main__":
    main()
