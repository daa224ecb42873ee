"""σ of BERT-shaped attention: lipscope against the textbook loop and against SciPy over autograd, in one run.

    python benchmarks/local_lipschitz.py [--write docs/performance.md]

Same inputs, same weights, same float32 arithmetic; errors are against a float64 reference at rtol 1e-10. The query and
key weights are sharpened so that power iteration is not trivially fast. Times compare only inside one run: read ratios.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch

import lipscope
from lipscope.attention.operator import AttentionOperator
from sections import write_section
from textbook import forward, power_loop, scipy_over_autograd

WIDTH, HEADS, INPUTS, SHARP = 768, 12, 10, 1.5
LENGTHS = (20, 50, 98)


def sharpened_layer() -> lipscope.Attention:
    generator = torch.Generator().manual_seed(0)

    def weight(factor: float) -> torch.Tensor:
        return factor * torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5

    return lipscope.Attention(weight(SHARP), weight(SHARP), weight(1), weight(1), heads=HEADS)


def timed(function: Callable[[], object], repeats: int) -> tuple[float, object]:
    """Best time of a few runs, and the last value."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        value = function()
        times.append(time.perf_counter() - start)
    return min(times), value


def compare(layer: lipscope.Attention, n: int, causal: bool) -> list[str]:
    """One table row per method."""
    X = torch.randn(INPUTS, n, WIDTH, generator=torch.Generator().manual_seed(n))
    layer = layer.with_mask("causal" if causal else "full")
    reference = lipscope.local_lipschitz(layer, X, dtype=torch.float64, solver=lipscope.GolubKahan(rtol=1e-10))

    def error(values: object) -> float:
        return float((torch.as_tensor(values, dtype=torch.float64) / reference.estimate - 1).abs().max())

    functions = [lambda x: forward(layer, x, causal)] * INPUTS
    # Without the certificate: the two methods beside it give a bare number.
    lipscope.local_lipschitz(layer, X[:2], certificate=False)  # warm-up of threads and kernels, for everyone
    ours, result = timed(lambda: lipscope.local_lipschitz(layer, X, certificate=False), 5)
    textbook, values = timed(lambda: [power_loop(f, x) for f, x in zip(functions, X, strict=True)], 1)
    scipy, scipy_values = timed(lambda: [scipy_over_autograd(f, x) for f, x in zip(functions, X, strict=True)], 1)
    rows = [
        ("textbook loop", textbook, error([v for v, _ in values]), sum(s for _, s in values) / INPUTS),
        ("SciPy svds over autograd", scipy, error(scipy_values), None),
        ("lipscope", ours, error(result.estimate), float(result.iterations.double().mean())),
    ]
    mask = "causal" if causal else "full"
    return [
        f"| {mask} | {n} | {name} | {seconds:.3f} | {seconds / ours:.1f}× | {worst:.1e} | "
        f"{'' if steps is None else f'{steps:.0f}'} |"
        for name, seconds, worst, steps in rows
    ]


def products_against_matmul(layer: lipscope.Attention, n: int, batch: int) -> str:
    """Speed of one J, Jᵀ pair against plain matrix products of the projection's shape."""
    X = torch.randn(batch, n, WIDTH, generator=torch.Generator().manual_seed(n))
    operator = AttentionOperator(layer, X)
    u, g = torch.randn(batch, n * WIDTH), torch.randn(batch, n * WIDTH)
    pair, _ = timed(lambda: (operator.matvec(u), operator.rmatvec(g)), 15)
    dh = WIDTH // HEADS
    projections = 2 * n * WIDTH * 4 * WIDTH
    forward_products = 4 * 2 * n * n * dh * HEADS  # dQ·Kᵀ, Q·dKᵀ, T·V, P·dV
    flops = batch * 2 * (projections + forward_products)  # Jᵀ has the same five-by-five count
    a, b = torch.randn(batch * n, WIDTH), torch.randn(WIDTH, 3 * WIDTH)
    product, _ = timed(lambda: a @ b, 25)
    speed, best = flops / pair / 1e9, 2 * batch * n * WIDTH * 3 * WIDTH / product / 1e9
    return f"| {n} | {batch} | {speed:.0f} | {best:.0f} | {speed / best:.0%} |"


def main() -> None:
    """Run the comparison and print or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="also write the tables to this Markdown file")
    path: Path | None = parser.parse_args().write
    layer = sharpened_layer()
    lines = [
        "Written by `benchmarks/local_lipschitz.py`. Times are from one run on one machine "
        f"({torch.get_num_threads()} threads, torch {torch.__version__}); only the ratios travel.",
        "",
        f"## σ of one attention layer, d = {WIDTH}, {HEADS} heads, {INPUTS} inputs, float32",
        "",
        "*Textbook loop*: power iteration with `torch.func.jvp` and `vjp`, one input at a time, absolute tolerance 1e-4 "
        "on σ², at most 100 steps. *SciPy*: `svds(k=1, tol=1e-4)` with products by autograd on one cached graph. "
        "*lipscope*: default settings, with an interval of at most 10 %. *Error*: worst relative error over the inputs "
        "against a float64 reference at rtol 1e-10. *Ratio*: time over lipscope's.",
        "",
        "| mask | n | method | seconds | ratio | worst error | mean steps |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    for causal in (False, True):
        for n in LENGTHS:
            rows = compare(layer, n, causal)
            lines += rows
            print("\n".join(rows), flush=True)
    tail = [
        "",
        "## One pair of products (J·u, Jᵀ·g) against plain matrix products",
        "",
        "| n | inputs | pair, GFLOP/s | matmul, GFLOP/s | share |",
        "|---|---|---|---|---|",
        *[products_against_matmul(layer, n, INPUTS) for n in (20, 98, 256)],
        "",
        "The products run close to the speed of the matrix products they consist of: what is left to gain is their number.",
    ]
    print("\n".join(tail))
    if path is not None:
        write_section(path, "benchmarks/local_lipschitz.py", [*lines, *tail])


if __name__ == "__main__":
    main()
