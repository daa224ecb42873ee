"""Long sequences: products without n×n matrices, against fused attention and plain products; growth of time and memory.

    python benchmarks/long_context.py [--write docs/performance-log.md] [--longest 32768]

One causal layer of d = 768 and 12 heads in float32. Ratios are taken inside one run. Memory is the peak resident size of a
fresh process above what it held with the weights loaded; when it misses a goal the script ends with status 1, after
everything is written.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch

import lipscope
from cost import LayerShape, pair_of_products
from lipscope.attention.operators import AttentionOperator
from lipscope.attention.tiled import current_tiling, using_tiling
from lipscope.measure.memory import TYPICAL_VECTORS, plan_memory
from lipscope.rounding import show_bytes
from sections import Curve, Goal, exponent, failures, machine, plot, timed, write_goals, write_section

WIDTH, HEADS = 768, 12
GIB = 1 << 30
# Tokens → most bytes above the weights for one σ.
MEMORY_GOALS = {16384: 2 * GIB, 32768: 4 * GIB}
# Tokens up to which one pair is timed several times and at all, and simulated steps of the search for the top vector.
OFTEN, TIMED, SEARCH = 4096, 16384, 20


def make_layer(mask: str = "causal") -> lipscope.Attention:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(4)]
    return lipscope.Attention(*weights, heads=HEADS, mask=mask)


def tokens(n: int) -> torch.Tensor:
    return torch.randn(1, n, WIDTH, generator=torch.Generator().manual_seed(n))


def pair_seconds(layer: lipscope.Attention, n: int, repeats: int = 3) -> float:
    """One J·u and one Jᵀ·g."""
    operator = AttentionOperator.at(layer, tokens(n))
    u = torch.randn(1, n * WIDTH)
    return timed(lambda: (operator.matvec(u), operator.rmatvec(u)), repeats)[0]


def against_attention(n: int) -> tuple[str, float, float]:
    """One pair against one fused forward pass, and against its own flops in plain products."""
    layer = make_layer()
    q, k, v = layer.project(tokens(n))
    repeats = 4 if n > 512 else 12
    fused, _ = timed(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), repeats)
    operator = AttentionOperator.at(layer, tokens(n))
    u = torch.randn(1, n * WIDTH)
    pair, _ = timed(lambda: (operator.matvec(u), operator.rmatvec(u)), repeats)
    # Half of the entries, and no exponentials; scores are counted where tiles compute them again.
    tiled = not hasattr(operator.core, "P")
    flops = pair_of_products(
        LayerShape.of(layer), n, visible=0.5 if tiled else 1.0, rebuilt=tiled and operator.core.kept is None
    )
    a, b = torch.randn(1024, WIDTH), torch.randn(WIDTH, 3 * WIDTH)
    plain = 2 * 1024 * WIDTH * 3 * WIDTH / timed(lambda: a @ b, 10)[0]
    speed = flops / pair
    line = (
        f"| {n} | {'tiles' if tiled else 'n×n'} | {pair / fused:.1f}× | {speed / 1e9:.0f} | {plain / 1e9:.0f} | "
        f"{speed / plain:.0%} |"
    )
    return line, pair / fused, speed / plain


class FewRealProducts(lipscope.Operator):
    """The operator for its first products; afterwards cheap stand-ins of their shapes, so that memory peaks as in a solve.

    All that a solve allocates is allocated by its first product, J·u, and by the bases, which grow with every step. Random
    products never converge, so that all steps are taken, and some more in search of the top vector, which a multiple of the
    identity ends: one so large that what the random products seemed to have found is no longer missed.
    """

    def __init__(self, real: AttentionOperator, steps: int, products: int) -> None:
        self.real, self.products, self.seconds = real, products, 0.0
        self.count, self.random = 0, 2 * (steps + SEARCH)
        self.batch, self.dtype, self.device = real.batch, real.dtype, real.device
        self.input_shape, self.output_shape = real.input_shape, real.output_shape

    def matvec(self, u: torch.Tensor) -> torch.Tensor:
        """J·u, or a vector of its size."""
        return self._product(self.real.matvec, u)

    def rmatvec(self, g: torch.Tensor) -> torch.Tensor:
        """Jᵀ·g, or a vector of its size."""
        return self._product(self.real.rmatvec, g)

    def _product(self, real: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        if self.count > self.products:
            return torch.randn_like(x) if self.count <= self.random else 1e6 * x
        seconds, product = timed(lambda: real(x))
        self.seconds += seconds
        return product

    def select(self, items: torch.Tensor) -> FewRealProducts:
        """There is one item."""
        return self


def resident() -> int:
    """Peak resident bytes of this process so far; not ``ru_maxrss``, which a new process inherits from the one before."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("the peak resident size is read from /proc/self/status, which has no VmHWM here")


def measure_memory(n: int, steps: int) -> None:
    """In a process of its own: peak of one solve of ``steps`` pairs within the goal, above the loaded weights."""
    layer = make_layer()
    torch.mm(torch.randn(64, 64), torch.randn(64, 64))
    before = resident()
    plan = plan_memory(layer, n, limit=MEMORY_GOALS.get(n))
    # The same number of kept vectors at every length, as far as the goal allows.
    bases = min(plan.room, TYPICAL_VECTORS * n * WIDTH * 4)
    with using_tiling(plan.tiling):
        operator = FewRealProducts(AttentionOperator.at(layer, tokens(n)), steps, products=2 if n <= TIMED else 1)
        lipscope.GolubKahan(max_steps=steps, memory=bases).solve(operator)
    expected = plan.matrices + plan.tokens + bases
    print(json.dumps({"peak": resident() - before, "expected": expected, "seconds": operator.seconds}))


def memory_rows(lengths: list[int], steps: int) -> tuple[list[str], dict[int, int], dict[int, float]]:
    """Peak of one σ in a process of its own, for every length, and the seconds of its real pair of products."""
    rows, peaks, seconds = [], {}, {}
    for n in lengths:
        expected = plan_memory(make_layer(), n, limit=MEMORY_GOALS.get(n))
        print(f"n = {n}: {expected}", flush=True)
        command = [sys.executable, __file__, "--memory-of", str(n), "--steps", str(steps)]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        goal = MEMORY_GOALS.get(n)
        peaks[n], seconds[n] = found["peak"], found["seconds"]
        rows.append(
            f"| {n} | {show_bytes(found['peak'])} | {show_bytes(found['expected'])} | {show_bytes(goal) if goal else ''} |"
        )
        print(rows[-1], flush=True)
    return rows, peaks, seconds


def main() -> None:
    """Run everything and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="page whose section is replaced")
    parser.add_argument("--longest", type=int, default=32768, help="longest sequence")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=24, help="steps of the solve whose memory is measured")
    given = parser.parse_args()
    if given.memory_of:
        measure_memory(given.memory_of, given.steps)
        return
    pairs = {n: against_attention(n) for n in (98, 256, 512, 1024, 2048, 4096)}
    lines = [
        "## Long sequences",
        "",
        f"Written by `benchmarks/long_context.py`: one causal layer, d = {WIDTH}, {HEADS} heads, one input, float32, "
        f"{machine()}.",
        "",
        "One pair (J·u, Jᵀ·g) against one fused forward pass of attention without its projections, and its speed against "
        "that of plain matrix products. Counted are the operations of `benchmarks/cost.py`.",
        "",
        "| n | by | pair / fused forward | pair, GFLOP/s | matmul, GFLOP/s | share |",
        "|---|---|---|---|---|---|",
        *[line for line, _, _ in pairs.values()],
        "",
    ]
    print("\n".join(lines), flush=True)
    long = [n for n in (2048, 4096, 8192, 16384, 32768) if n <= given.longest]
    with using_tiling(replace(current_tiling(), keep=0)):
        banded = {n: pair_seconds(make_layer("window:512"), n, 3 if n <= OFTEN else 2) for n in long}
    times = {n: pair_seconds(make_layer(), n) for n in (512, 1024, 2048, 4096) if n <= given.longest}
    rows, peaks, seconds = memory_rows(long, given.steps)
    # Of long sequences one pair is enough, and the measurement of memory takes one.
    times |= {n: seconds[n] for n in long if OFTEN < n <= TIMED}
    slopes = [exponent(list(found), list(found.values())) for found in (times, banded, peaks)]
    lines += [
        "Seconds of one pair as the sequence grows. Under the window exponentials are rebuilt at every length, as they are "
        "beyond a certain size: kept ones make short sequences faster, and growth would measure that.",
        "",
        "| n | causal | window 512 |",
        "|---|---|---|",
        *[
            f"| {n} | {f'{times[n]:.3f}' if n in times else ''} | {f'{banded[n]:.3f}' if n in banded else ''} |"
            for n in sorted({*times, *banded})
        ],
        *plot(
            given.write,
            "pair_against_n",
            [Curve("causal", list(times), list(times.values())), Curve("window 512", long, list(banded.values()), "s-")],
            x="tokens n", y="seconds of one pair (J·u, Jᵀ·g)", title="One pair of products against the length",
        ),
        f"Fitted exponents: causal {slopes[0]:.2f}, window {slopes[1]:.2f}.",
        "",
        f"Peak memory of one σ of {given.steps} steps, Krylov basis included, above the loaded weights, in a process of its "
        "own (the first pair is real, and beyond 16,384 tokens the first product J·u, which takes more than Jᵀ·g; later "
        "products are stand-ins of the same size; the bases are real):",
        "",
        "| n | peak | expected before the run | goal |",
        "|---|---|---|---|",
        *rows,
        *plot(
            given.write,
            "memory_against_n",
            [Curve("one σ, causal", list(peaks), [peak / GIB for peak in peaks.values()])],
            x="tokens n", y="GiB above the weights", title="Peak memory of one σ against the length",
        ),
        f"Fitted exponent: {slopes[2]:.2f}.",
    ]  # fmt: skip
    print("\n".join(lines))
    goals = judge(pairs, times, banded, slopes, peaks)
    write_goals(__file__, goals)
    if given.write is not None:
        write_section(given.write, "benchmarks/long_context.py", lines)
    if wrong := failures(goals):
        sys.exit("\n".join(wrong))


def judge(
    pairs: dict[int, tuple[str, float, float]],
    times: dict[int, float],
    banded: dict[int, float],
    slopes: list[float],
    peaks: dict[int, int],
) -> list[Goal]:
    """The goals against the measurements."""
    share = {n: found[2] for n, found in pairs.items()}
    worst = min(share, key=lambda n: share[n])
    above = sum(found >= 0.5 for found in share.values())

    def between(found: dict[int, float]) -> str:
        """The slopes between neighbours, which show where growth is faster."""
        slopes = [f"{exponent([a, b], [found[a], found[b]]):.2f}" for a, b in pairwise(found)]
        return f"between neighbouring lengths the slope is {', '.join(slopes)}"

    goals = [
        Goal("one J,Jᵀ pair vs one fused SDPA forward, n = 4,096, causal, 12 heads", "≤ 10×", f"{pairs[4096][1]:.1f}×",
             pairs[4096][1] <= 10, f"the pair runs at {share[4096]:.0%} of the speed of plain products"),
        Goal("one J,Jᵀ pair vs the same flops in plain products, n = 98 … 4,096", "≥ 50 %",
             f"{min(share.values()):.0%} … {max(share.values()):.0%}", min(share.values()) >= 0.5,
             f"at n = {worst} the pair reaches {share[worst]:.0%}, and at least 50 % at {above} of {len(share)} lengths"),
        Goal(f"time against n, {min(times):,} → {max(times):,}, tiled causal", "exponent ≤ 2.1", f"{slopes[0]:.2f}",
             slopes[0] <= 2.1, between(times)),
        Goal("memory against n", "exponent ≤ 1.1", f"{slopes[2]:.2f}", slopes[2] <= 1.1, between(peaks)),
        Goal("sliding window 512, 2,048 → 32,768", "exponent ≤ 1.15", f"{slopes[1]:.2f}", slopes[1] <= 1.15,
             between(banded)),
    ]  # fmt: skip
    for n, goal in MEMORY_GOALS.items():
        if n in peaks:
            goals.append(
                Goal(f"memory of one σ, n = {n:,}, d = {WIDTH}, causal", f"< {show_bytes(goal)}", show_bytes(peaks[n]),
                     peaks[n] < goal, f"{peaks[n] / goal:.2f} of what was allowed", asserted=True)
            )  # fmt: skip
    return goals


if __name__ == "__main__":
    main()
