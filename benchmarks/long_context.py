"""Long sequences: products without n×n matrices, against fused attention and plain products; growth of time and memory.

    python benchmarks/long_context.py [--write docs/performance.md] [--longest 16384]

One causal layer of d = 768 and 12 heads in float32. Ratios are taken inside one run. Memory is the peak resident size of a
fresh process above what it held with the weights loaded.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import lipscope
from lipscope.attention.memory import plan_memory, show_bytes
from lipscope.attention.operator import AttentionOperator
from sections import write_section

WIDTH, HEADS = 768, 12
GIB = 1 << 30
# Tokens → most bytes above the weights for one σ.
MEMORY_GOALS = {16384: 2 * GIB, 32768: 4 * GIB}


def make_layer(mask: str = "causal") -> lipscope.Attention:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(4)]
    return lipscope.Attention(*weights, heads=HEADS, mask=mask)


def tokens(n: int) -> torch.Tensor:
    return torch.randn(1, n, WIDTH, generator=torch.Generator().manual_seed(n))


def best_of(function: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def pair_seconds(layer: lipscope.Attention, n: int, repeats: int = 3) -> float:
    """One J·u and one Jᵀ·g."""
    operator = AttentionOperator(layer, tokens(n))
    u = torch.randn(1, n * WIDTH)
    return best_of(lambda: (operator.matvec(u), operator.rmatvec(u)), repeats)


def pair_flops(n: int, share: float) -> float:
    """Flops of one pair when ``share`` of the n×n entries is visible: projections, and ten products of tiles."""
    return 2 * 2 * n * WIDTH * 4 * WIDTH + 10 * 2 * share * n * n * WIDTH


def against_attention(n: int) -> str:
    """One pair against one fused forward pass, and against its own flops in plain products."""
    layer = make_layer()
    q, k, v = layer.project(tokens(n))
    fused = best_of(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    pair = pair_seconds(layer, n)
    a, b = torch.randn(1024, WIDTH), torch.randn(WIDTH, 3 * WIDTH)
    plain = 2 * 1024 * WIDTH * 3 * WIDTH / best_of(lambda: a @ b, 10)
    speed = pair_flops(n, 0.5) / pair
    return f"| {n} | {pair / fused:.1f}× | {speed / 1e9:.0f} | {plain / 1e9:.0f} | {speed / plain:.0%} |"


def exponent(lengths: list[int], values: list[float]) -> float:
    """Least-squares slope in log–log coordinates."""
    x, y = torch.tensor(lengths).double().log(), torch.tensor(values).double().log()
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


class FewRealProducts(lipscope.Operator):
    """The operator for its first pair; afterwards cheap stand-ins of the same shapes, so that memory peaks as in a solve.

    All that a solve allocates is allocated by its first pair and by the bases, which grow with every step.
    """

    def __init__(self, real: AttentionOperator, pairs: int = 1) -> None:
        self.real, self.left = real, 2 * pairs
        self.batch, self.dtype, self.device = real.batch, real.dtype, real.device
        self.input_shape, self.output_shape = real.input_shape, real.output_shape

    def matvec(self, u: torch.Tensor) -> torch.Tensor:
        """J·u, or a vector of its size."""
        self.left -= 1
        return self.real.matvec(u) if self.left >= 0 else torch.randn_like(u)

    def rmatvec(self, g: torch.Tensor) -> torch.Tensor:
        """Jᵀ·g, or a vector of its size."""
        self.left -= 1
        return self.real.rmatvec(g) if self.left >= 0 else torch.randn_like(g)

    def select(self, items: torch.Tensor) -> FewRealProducts:
        """There is one item."""
        return self


def resident() -> int:
    """Peak resident bytes of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure_memory(n: int, steps: int) -> None:
    """In a process of its own: peak of one solve of ``steps`` pairs within the goal, above the loaded weights."""
    layer = make_layer()
    torch.mm(torch.randn(64, 64), torch.randn(64, 64))
    before = resident()
    plan = plan_memory(layer, n, limit=MEMORY_GOALS.get(n))
    operator = FewRealProducts(AttentionOperator(layer, tokens(n)))
    # Random products never converge, so all steps are taken.
    lipscope.GolubKahan(max_steps=steps, memory=plan.bases).solve(operator)
    print(json.dumps({"peak": resident() - before, "expected": plan.total}))


def memory_rows(lengths: list[int], steps: int) -> tuple[list[str], float]:
    rows, peaks = [], []
    for n in lengths:
        command = [sys.executable, __file__, "--memory-of", str(n), "--steps", str(steps)]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        goal = MEMORY_GOALS.get(n)
        if goal is not None and found["peak"] > goal:
            raise SystemExit(f"n = {n}: {show_bytes(found['peak'])} is above the goal of {show_bytes(goal)}")
        peaks.append(found["peak"])
        rows.append(
            f"| {n} | {show_bytes(found['peak'])} | {show_bytes(found['expected'])} | {show_bytes(goal) if goal else ''} |"
        )
        print(rows[-1], flush=True)
    return rows, exponent(lengths, peaks)


def main() -> None:
    """Run everything and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="page whose section is replaced")
    parser.add_argument("--longest", type=int, default=16384, help="longest causal sequence that is timed")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=20, help="steps of the solve whose memory is measured")
    given = parser.parse_args()
    if given.memory_of:
        measure_memory(given.memory_of, given.steps)
        return
    lines = [
        "## Long sequences",
        "",
        f"Written by `benchmarks/long_context.py`: one causal layer, d = {WIDTH}, {HEADS} heads, float32, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}.",
        "",
        "One pair (J·u, Jᵀ·g) against one fused forward pass of attention without its projections, and its speed against "
        "that of plain matrix products.",
        "",
        "| n | pair / fused forward | pair, GFLOP/s | matmul, GFLOP/s | share |",
        "|---|---|---|---|---|",
        *[against_attention(n) for n in (512, 1024, 2048, 4096)],
        "",
    ]
    print("\n".join(lines), flush=True)
    causal = [n for n in (512, 1024, 2048, 4096, 8192, 16384, 32768) if n <= given.longest]
    window = [2048, 4096, 8192, 16384, 32768]
    times = {n: pair_seconds(make_layer(), n, 2 if n <= 4096 else 1) for n in causal}
    banded = {n: pair_seconds(make_layer("window:512"), n, 2) for n in window}
    rows, memory_exponent = memory_rows([2048, 4096, 8192, 16384, 32768], given.steps)
    lines += [
        "Seconds of one pair as the sequence grows:",
        "",
        "| n | causal | window 512 |",
        "|---|---|---|",
        *[
            f"| {n} | {f'{times[n]:.2f}' if n in times else ''} | {f'{banded[n]:.2f}' if n in banded else ''} |"
            for n in sorted({*causal, *window})
        ],
        "",
        f"Fitted exponents: causal {exponent(list(times), list(times.values())):.2f} (goal ≤ 2.1), "
        f"window {exponent(list(banded), list(banded.values())):.2f} (goal ≤ 1.15).",
        "",
        f"Peak memory of one σ of {given.steps} steps, Krylov basis included, above the loaded weights, in a process of its "
        "own (the first pair is real, later products are stand-ins of the same size; the bases are real):",
        "",
        "| n | peak | expected before the run | goal |",
        "|---|---|---|---|",
        *rows,
        "",
        f"Fitted exponent: {memory_exponent:.2f} (goal ≤ 1.1).",
    ]
    print("\n".join(lines))
    if given.write is not None:
        write_section(given.write, "benchmarks/long_context.py", lines)


if __name__ == "__main__":
    main()
