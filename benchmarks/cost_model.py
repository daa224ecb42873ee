"""The cost model against measurements at three sizes, and what it says about a model that does not fit here.

    python benchmarks/cost_model.py [--write docs/performance-log.md] [--sizes 512,2048,3072]

The only number taken from a measurement is the speed of one pair of products at n = 1,024; everything else follows from
``benchmarks/cost.py``.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

import lipscope
from cost import LayerShape, forward, pair_of_products, solve, vector_bytes, working_bytes
from lipscope.attention.operators import AttentionOperator
from lipscope.attention.tiled import Tiling, using_tiling
from long_context import HEADS, WIDTH, make_layer, tokens
from sections import Curve, Goal, machine, plot, timed, write_goals, write_section

ALLOWED = 1.35
CALIBRATION = 1024


@dataclass(frozen=True)
class Machine:
    """What is assumed of a machine that is not here."""

    name: str
    rate: float
    memory: float
    link: float


# Sustained rates of float32 products (TF32 units on accelerators), memory and network of one unit; assumptions, not
# measurements.
ACCELERATOR = Machine("accelerator", rate=2e14, memory=80e9, link=3e11)
NODE = Machine("CPU node of 64 cores", rate=2e12, memory=512e9, link=1.2e9)
SHAPE, LAYERS, TOKENS = LayerShape(8192, 64, 8, 128, 128, 8192), 80, 131072


def measured_solve(n: int, rebuilt: bool = True) -> tuple[float, float, float]:
    """Seconds of one pair and of one σ with its steps, causal, probabilities rebuilt."""
    with using_tiling(Tiling(keep=0)):
        layer, X = make_layer(), tokens(n)
        operator = AttentionOperator.at(layer, X, tiled=True)
        u = torch.randn(1, n * WIDTH)
        pair, _ = timed(lambda: (operator.matvec(u), operator.rmatvec(u)), 3)
        whole, result = timed(lambda: lipscope.local_lipschitz(layer, X, certificate=False))
    return pair, whole, float(result.iterations)


def hours(seconds: float) -> str:
    """A time for people."""
    return (
        f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
    )


def large_model() -> list[str]:
    """What σ of every layer of a 70B model at 128k tokens takes."""
    one = solve(SHAPE, TOKENS, visible=0.5)
    vector = vector_bytes(SHAPE, TOKENS)
    pass_flops = 2 * 70e9 * TOKENS + LAYERS * (forward(SHAPE, TOKENS, visible=0.5) - 2 * TOKENS * SHAPE.weights)
    spread = 8
    kept = 8
    share = working_bytes(SHAPE, TOKENS, vectors=kept) / spread
    # Heads are spread: every pair sums the outputs of J and of Jᵀ over the units, a ring passes each vector about twice.
    traffic = 18 * 2 * 2 * vector / ACCELERATOR.link
    seconds = one / (spread * ACCELERATOR.rate) + traffic
    node = one / NODE.rate
    needed = working_bytes(SHAPE, TOKENS, vectors=24)
    return [
        "### On paper: a 70B model at 128k tokens",
        "",
        f"Assumed: {LAYERS} layers of width {SHAPE.width:,}, {SHAPE.heads} query and {SHAPE.kv_heads} key heads of "
        f"{SHAPE.key_width}, causal, n = {TOKENS:,}, float32, 18 pairs per σ, one input. Machines as assumed, not "
        f"measured: an accelerator sustains {ACCELERATOR.rate:.0e} operations per second in products, holds "
        f"{ACCELERATOR.memory / 1e9:.0f} GB and talks to its neighbours at {ACCELERATOR.link:.0e} bytes per second; a "
        f"node of 64 cores sustains {NODE.rate:.0e} and holds {NODE.memory / 1e9:.0f} GB.",
        "",
        "| quantity | value |",
        "|---|---|",
        f"| one pair (J·u, Jᵀ·g) of one layer | {pair_of_products(SHAPE, TOKENS, visible=0.5):.2e} operations |",
        f"| σ of one layer | {one:.2e} operations |",
        f"| σ of all layers | {LAYERS * one:.2e} operations, {LAYERS * one / pass_flops:.0f} forward passes of the model |",
        f"| one Krylov vector | {vector / 1e9:.1f} GB |",
        f"| memory of one σ with 24 vectors | {needed / 1e9:.0f} GB |",
        f"| the same with {kept} vectors, heads and tokens spread over {spread} accelerators | {share / 1e9:.0f} GB each |",
        f"| one layer on {spread} accelerators, {hours(traffic)} of it on the links | {hours(seconds)} |",
        f"| all layers on {spread} accelerators | {hours(LAYERS * seconds)} |",
        f"| one layer on one node | {hours(node)} |",
        f"| all layers on a Dask cluster of {LAYERS} nodes, one layer each | {hours(node)} |",
        "",
        "Layers, heads and inputs are independent, which is what `lipscope sweep --scheduler` uses; spreading the heads "
        "of one layer over several accelerators is what this estimate adds, and what is not implemented.",
    ]


def main() -> None:
    """Measure, predict, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="page whose section is replaced")
    parser.add_argument("--sizes", default="512,2048,3072")
    given = parser.parse_args()
    shape = LayerShape.of(make_layer())
    calibrated, _, _ = measured_solve(CALIBRATION)
    rate = pair_of_products(shape, CALIBRATION, visible=0.5) / calibrated
    sizes = [int(part) for part in given.sizes.split(",")]
    rows, factors, seen, said = [], [], [], []
    for n in sizes:
        pair, whole, steps = measured_solve(n)
        expected = pair_of_products(shape, n, visible=0.5) / rate
        expected_whole = solve(shape, n, visible=0.5, pairs=steps) / rate
        factors += [pair / expected, whole / expected_whole]
        seen.append(whole)
        said.append(expected_whole)
        rows.append(
            f"| {n} | {expected:.3f} | {pair:.3f} | {pair / expected:.2f} | {steps:.0f} | {expected_whole:.2f} | "
            f"{whole:.2f} | {whole / expected_whole:.2f} |"
        )
        print(rows[-1], flush=True)
    worst = max(max(factor, 1 / factor) for factor in factors)
    lines = [
        "## The cost model",
        "",
        f"Written by `benchmarks/cost_model.py`: one causal layer, d = {WIDTH}, {HEADS} heads, probabilities rebuilt, "
        f"float32, {machine()}. One pair takes 4·n·(weights) + (12·d_k + 8·d_v)·(visible entries of all heads) "
        "operations, a linearisation 2·n·(weights) + 2·(d_k + d_v)·(visible entries), and a solve one linearisation and "
        f"its pairs (`benchmarks/cost.py`). The speed, {rate / 1e9:.0f} GFLOP/s, is that of one pair at n = "
        f"{CALIBRATION:,}; the rest is predicted from it.",
        "",
        "| n | pair, predicted s | measured s | ratio | pairs | σ, predicted s | measured s | ratio |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        *plot(
            given.write, "cost_model", [Curve("predicted", sizes, said, "--"), Curve("measured", sizes, seen, "o")],
            x="tokens n", y="seconds of one σ", title="The cost model against measurement",
        ),
        f"Median ratio {statistics.median(factors):.2f}, the farthest {worst:.2f}. Bytes are predicted and measured in "
        "*Long sequences*.",
        "",
        *large_model(),
    ]  # fmt: skip
    print("\n".join(lines))
    goal = Goal(
        f"cost model at n = {given.sizes}, pair and whole σ", f"within {ALLOWED}×", f"{worst:.2f}×", worst <= ALLOWED,
        f"measured over predicted, pair and σ by size: {', '.join(f'{factor:.2f}' for factor in factors)}",
    )  # fmt: skip
    write_goals(__file__, [goal])
    if given.write is not None:
        write_section(given.write, "benchmarks/cost_model.py", lines)


if __name__ == "__main__":
    main()
