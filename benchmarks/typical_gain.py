"""What ‖J‖_F and the damage of rounding cost: in operator pairs (J·u, Jᵀ·g), and in backward passes.

    python benchmarks/typical_gain.py [--write docs/performance-log.md]

A random layer of GPT-2's size at n = 98 tokens. All times are CPU time on one thread, in turns: the least of several.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import lipscope
from lipscope.bounds.certificates import certified_and_sized
from lipscope.measure.typical import with_typical
from lipscope.spectral.operator import Operator
from sections import Goal, write_goals, write_section

N, WIDTH, HEADS, TURNS, MOST = 98, 768, 12, 5, 2.0


def least(works: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """CPU seconds of every work, the least of all turns."""
    found = dict.fromkeys(works, float("inf"))
    for turn in range(TURNS + 1):
        for name, work in works.items():
            start = time.process_time()
            work()
            if turn:  # the first one warms up
                found[name] = min(found[name], time.process_time() - start)
    return found


def pair(operator: Operator) -> Callable[[], Any]:
    """One product with J and one with Jᵀ."""
    u, g = (torch.ones(operator.batch, side, dtype=operator.dtype) for side in reversed(operator.shape))
    return lambda: (operator.matvec(u), operator.rmatvec(g))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    W = {name: torch.randn(WIDTH, WIDTH) / WIDTH**0.5 for name in ("q", "k", "v", "out")}
    layer, X = lipscope.Attention(**W, heads=HEADS, mask="causal"), torch.randn(3, N, WIDTH)
    operator, precise = layer.operator(X[:1]), layer.to(torch.float64)
    result = lipscope.local_lipschitz(layer, X[:1], certificate=False)
    seconds = least(
        {
            "pair": pair(operator),
            "pair64": pair(precise.operator(X[:1].double())),
            "closed": lambda: certified_and_sized(precise, X[:1].double(), rung=None),
            "three": lambda: certified_and_sized(precise, X.double(), rung=None),
            "estimated": lambda: with_typical(result, operator, N * WIDTH),
        }
    )
    rows = {
        "closed form, first input of a call": seconds["closed"],
        "closed form, further inputs": (seconds["three"] - seconds["closed"]) / 2,
        "estimated from random directions": seconds["estimated"],
    }
    lines = ["| ‖J‖_F, n = 98, d = 768, 12 heads | pairs in float32 | pairs in float64 |", "|---|---|---|"]
    lines += [f"| {name} | {s / seconds['pair']:.1f} | {s / seconds['pair64']:.1f} |" for name, s in rows.items()]
    found = lipscope.sensitivity("gpt2-mini", "alice", perturb=["fp8-k", "fp8-v", "int8-kv"], n=16, inputs=1, probes=8)
    layers = len({row["layer"] for row in found.rows})
    cost = (
        f"Damage of three roundings in all {layers} layers of gpt2-mini: {found.backward_passes} backward passes together; "
        f"measured one by one it takes {len(found.rows)} forward passes."
    )
    print("\n".join([*lines, "", cost]))
    pairs = seconds["closed"] / seconds["pair64"]
    reason = (
        "six products of the weights of every pair of heads, three of them symmetric, are about four pairs by themselves "
        "at this n; the inputs of a call share them, and the rest is products of n×n matrices of every pair of heads"
    )
    case, measured = "‖J‖_F in closed form, n = 98, d = 768", f"{pairs:.1f} in float64"
    write_goals(__file__, [Goal(case, f"≤ {MOST:g} operator pairs", measured, pairs <= MOST, reason)])
    if asked.write is not None:
        write_section(asked.write, "benchmarks/typical_gain.py", ["## Typical gain and damage", "", *lines, "", cost])


if __name__ == "__main__":
    main()
