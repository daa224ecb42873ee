"""σ of BERT-shaped attention: lipscope against four other ways to get it, in one run.

    python benchmarks/local_lipschitz.py [--write docs/performance-log.md] [--lengths 20,98] [--inputs 10]

Same inputs, same weights, same float32 arithmetic; errors are against a float64 reference at rtol 1e-10. The query and
key weights are sharpened so that power iteration is not trivially fast. Times compare only inside one run: read ratios.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import lipscope
from cost import LayerShape, pair_of_products
from lipscope.attention.operators import AttentionOperator
from sections import Goal, machine, timed, write_goals, write_section
from textbook import forward, power_loop, power_until, projection_until, scipy_over_autograd

WIDTH, HEADS, SHARP = 768, 12, 1.5
ACCURACY, COLUMNS = 1e-4, 6
# Inputs that slow methods are timed on; their seconds are scaled to all.
PEERS = 3
OURS, ALONE = "lipscope", "lipscope, a bare number"
LOOP, SCIPY = "textbook loop", "SciPy svds over autograd"
POWER, PROJECTION = "power iteration, lipscope's products", "random projection, lipscope's products"


@dataclass(frozen=True)
class Run:
    """One method on the inputs of one length."""

    mask: str
    n: int
    method: str
    seconds: float
    error: float
    pairs: float | None

    def line(self, ours: float) -> str:
        """A row of the table."""
        pairs = "" if self.pairs is None else f"{self.pairs:.0f}"
        return (
            f"| {self.mask} | {self.n} | {self.method} | {self.seconds:.3f} | {self.seconds / ours:.1f}× | "
            f"{self.error:.1e} | {pairs} |"
        )


def sharpened_layer() -> lipscope.Attention:
    """Random weights whose attention is neither flat nor one-hot."""
    generator = torch.Generator().manual_seed(0)

    def weight(factor: float) -> torch.Tensor:
        return factor * torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5

    return lipscope.Attention(weight(SHARP), weight(SHARP), weight(1), weight(1), heads=HEADS)


def usual_time(function: Callable[[], object], runs: int = 5) -> tuple[float, object]:
    """Median time of a few runs of what is done in a second or two; the others take longer, and one run."""
    found = [timed(function) for _ in range(runs)]
    return statistics.median(seconds for seconds, _ in found), found[-1][1]


def compare(layer: lipscope.Attention, n: int, causal: bool, inputs: int) -> list[Run]:
    """All methods on the same inputs."""
    X = torch.randn(inputs, n, WIDTH, generator=torch.Generator().manual_seed(n))
    layer = layer.with_mask("causal" if causal else "full")
    reference = lipscope.local_lipschitz(layer, X, dtype=torch.float64, solver=lipscope.GolubKahan(rtol=1e-10)).estimate

    def run(method: str, seconds: float, values: object, pairs: float | None) -> Run:
        found = torch.as_tensor(values, dtype=torch.float64)
        error = float((found / reference[: len(found)] - 1).abs().max())
        return Run("causal" if causal else "full", n, method, seconds, error, pairs)

    peers = min(PEERS, inputs)

    def one(x: torch.Tensor) -> torch.Tensor:
        return forward(layer, x, causal)

    # Without the certificate, and once without the interval: the methods beside it give a bare number.
    bare = lipscope.Auto(rtol=ACCURACY, interval=None)
    lipscope.local_lipschitz(layer, X[:2], certificate=False)  # warm-up of threads and kernels, for everyone
    ours, result = usual_time(lambda: lipscope.local_lipschitz(layer, X, certificate=False))
    alone, number = usual_time(lambda: lipscope.local_lipschitz(layer, X, certificate=False, solver=bare))
    loop, values = timed(lambda: [power_loop(one, x) for x in X[:peers]])
    scipy, scipy_values = timed(lambda: [scipy_over_autograd(one, x) for x in X[:peers]])
    power, (powered, steps) = timed(lambda: power_until(AttentionOperator.at(layer, X), reference, ACCURACY))
    repeated = X[:peers].repeat_interleave(COLUMNS, dim=0)
    projection, (projected, pairs) = timed(
        lambda: projection_until(AttentionOperator.at(layer, repeated), reference[:peers], ACCURACY, COLUMNS)
    )
    loop, scipy, projection = (seconds * inputs / peers for seconds in (loop, scipy, projection))
    return [
        run(OURS, ours, result.estimate, float(result.iterations.double().mean())),
        run(ALONE, alone, number.estimate, float(number.iterations.double().mean())),
        run(LOOP, loop, [v for v, _ in values], statistics.fmean(s for _, s in values)),
        run(SCIPY, scipy, [v for v, _ in scipy_values], statistics.fmean(p for _, p in scipy_values)),
        run(POWER, power, powered, steps),
        run(PROJECTION, projection, projected, pairs),
    ]


def products_against_matmul(layer: lipscope.Attention, n: int, batch: int) -> tuple[str, float]:
    """Speed of one J, Jᵀ pair against plain matrix products of the projection's shape."""
    X = torch.randn(batch, n, WIDTH, generator=torch.Generator().manual_seed(n))
    operator = AttentionOperator.at(layer, X)
    u, g = torch.randn(batch, n * WIDTH), torch.randn(batch, n * WIDTH)
    pair, _ = timed(lambda: (operator.matvec(u), operator.rmatvec(g)), 15)
    flops = batch * pair_of_products(LayerShape.of(layer), n, rebuilt=False)
    a, b = torch.randn(batch * n, WIDTH), torch.randn(WIDTH, 3 * WIDTH)
    product, _ = timed(lambda: a @ b, 25)
    speed, best = flops / pair / 1e9, 2 * batch * n * WIDTH * 3 * WIDTH / product / 1e9
    return f"| {n} | {batch} | {speed:.0f} | {best:.0f} | {speed / best:.0%} |", speed / best


def judge(groups: list[list[Run]], share: float) -> list[Goal]:
    """The goals against the runs, a bare number against a bare number: the least ratio over all lengths and masks counts."""

    def runs(method: str) -> list[Run]:
        return [run for group in groups for run in group if run.method == method]

    def ratios(method: str, to: str = ALONE) -> list[float]:
        return [a.seconds / b.seconds for a, b in zip(runs(method), runs(to), strict=True)]

    def measured(method: str) -> str:
        alone, whole = ratios(method), ratios(method, OURS)
        return f"{min(alone):.1f}× … {max(alone):.1f}× (with the interval {min(whole):.1f}× … {max(whole):.1f}×)"

    def why(method: str) -> str:
        both = list(zip(runs(method), runs(ALONE), strict=True))
        pairs = [a.pairs / b.pairs for a, b in both]
        each = [(a.seconds / a.pairs) / (b.seconds / b.pairs) for a, b in both]
        return (
            f"it takes {min(pairs):.1f} to {max(pairs):.1f} times as many pairs of products, and each takes "
            f"{min(each):.1f} to {max(each):.1f} times as long; ours run at {share:.0%} of the speed of plain products "
            f"at n = 98, so that at full speed the ratio would be {min(ratios(method)) / share:.0f}× at least"
        )

    oracle = "an oracle that knows σ stops it at an error of 1e-4; "
    where = "paper workload, n ≤ 98, BERT shape, 10 inputs"
    return [
        Goal(f"{where}, vs textbook loop", "≥ 50×", measured(LOOP), min(ratios(LOOP)) >= 50, why(LOOP)),
        Goal("same, vs SciPy svds on autograd", "≥ 10×", measured(SCIPY), min(ratios(SCIPY)) >= 10, why(SCIPY)),
        Goal("same, vs random projection on our operator", "faster", measured(PROJECTION), min(ratios(PROJECTION)) > 1,
             oracle + why(PROJECTION)),
        Goal("same, vs power iteration on our operator", "≥ 3×", measured(POWER), min(ratios(POWER)) >= 3,
             oracle + why(POWER)),
    ]  # fmt: skip


def main() -> None:
    """Run the comparison and print or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also write the tables to this Markdown file")
    parser.add_argument("--lengths", default="20,98")
    parser.add_argument("--inputs", type=int, default=10)
    given = parser.parse_args()
    layer = sharpened_layer()
    lines = [
        f"## σ of one attention layer, d = {WIDTH}, {HEADS} heads, {given.inputs} inputs, float32",
        "",
        f"Written by `benchmarks/local_lipschitz.py`. Times are from one run on one machine ({machine()}); only the ratios "
        "travel.",
        "",
        "*Textbook loop*: power iteration with `torch.func.jvp` and `vjp`, one input at a time, absolute tolerance 1e-4 "
        "on σ², at most 100 steps. *SciPy*: `svds(k=1, tol=1e-4)` with products by autograd on one cached graph. Both, and "
        f"random projection, ran on {PEERS} of the inputs, and their seconds are scaled to all. *Power "
        f"iteration* and *random projection* ({COLUMNS} columns and subspace iteration, as in `torch.svd_lowrank`) use our "
        f"products on all inputs at once, and an oracle that knows σ stops them at an error of {ACCURACY:g}. *lipscope*: "
        f"default settings, with an interval of at most 10 %; *a bare number*: rtol {ACCURACY:g} and no interval, as the "
        "others have none. *Error*: worst relative error over the inputs against a float64 reference at rtol 1e-10. "
        "*Seconds*: lipscope's are the median of five runs, those of the others one run. *Ratio*: time over lipscope's, "
        "with its interval. *Pairs*: products with J and Jᵀ per input.",
        "",
        "| mask | n | method | seconds | ratio | worst error | pairs |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    groups = []
    for causal in (False, True):
        for n in map(int, given.lengths.split(",")):
            group = compare(layer, n, causal, given.inputs)
            groups.append(group)
            rows = [run.line(group[0].seconds) for run in group]
            lines += rows
            print("\n".join(rows), flush=True)
    shares = {n: products_against_matmul(layer, n, given.inputs) for n in (20, 98, 256)}
    each = [share for _, share in shares.values()]
    tail = [
        "",
        "### One pair of products (J·u, Jᵀ·g) against plain matrix products, several inputs at once",
        "",
        "| n | inputs | pair, GFLOP/s | matmul, GFLOP/s | share |",
        "|---|---|---|---|---|",
        *[line for line, _ in shares.values()],
        "",
        f"Products at the full speed of the matrix products they consist of would be {1 / max(each):.2f} to "
        f"{1 / min(each):.2f} times as fast.",
    ]
    print("\n".join(tail))
    goals = judge(groups, shares[98][1])
    write_goals(__file__, goals)
    if given.write is not None:
        write_section(given.write, "benchmarks/local_lipschitz.py", [*lines, *tail])


if __name__ == "__main__":
    main()
