"""Ideas that were tried: each against what lipscope does, in one run, so that what did not work stays written down.

python benchmarks/experiments.py [--write docs/performance.md] [--n 1024]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

import lipscope
from lipscope.attention.operator import AttentionOperator
from lipscope.attention.tiling import Tiling, using_tiling
from local_lipschitz import WIDTH, sharpened_layer
from long_context import make_layer, tokens
from sections import machine, timed, write_section


def in_turns(first: Callable[[], object], second: Callable[[], object], turns: int = 5) -> float:
    """Median over turns of the time of ``second`` over that of ``first``."""
    return statistics.median(timed(second)[0] / timed(first)[0] for _ in range(turns))


def bfloat16() -> str:
    """Products in half precision."""
    a, b = torch.randn(128, WIDTH), torch.randn(WIDTH, WIDTH)
    c, d = a.bfloat16(), b.bfloat16()
    ratio = in_turns(lambda: a @ b, lambda: c @ d, 3)
    verdict = "no faster here, so mixed precision is not used" if ratio > 0.8 else "faster, but see the interval below"
    return f"| first steps in bfloat16 | a product takes {ratio:.2f} of its time in float32 | {verdict} |"


def prefix_warm_start(n: int) -> str:
    """The worst direction of the first half of a text, padded with zeros, as the start for the whole."""
    layer = sharpened_layer().with_mask("causal")
    X = torch.randn(1, n, WIDTH, generator=torch.Generator().manual_seed(5))
    solver = lipscope.GolubKahan(vectors=True)
    short = solver.solve(AttentionOperator(layer, X[:, : n // 2]))
    start = torch.zeros(1, n, WIDTH)
    start[:, : n // 2] = short.right[:, 0].reshape(1, n // 2, WIDTH)
    operator = AttentionOperator(layer, X)
    cold, warm = solver.solve(operator), solver.solve(operator, start=start.reshape(1, -1))
    loose = lipscope.GolubKahan(interval=None)
    bare = [int(loose.solve(operator, start=s).iterations[0]) for s in (None, start.reshape(1, -1))]
    return (
        f"| start from the worst direction of a prefix, n = {n // 2} → {n} | {int(cold.iterations[0])} pairs without, "
        f"{int(warm.iterations[0])} with (estimate alone: {bare[0]} and {bare[1]}) | the interval needs its steps from a "
        "random start whatever the estimate knows |"
    )


def one_sided() -> str:
    """Re-orthogonalising the right vectors only, which is what large problems do for want of memory."""
    layer = sharpened_layer()
    X = torch.randn(10, 98, WIDTH, generator=torch.Generator().manual_seed(98))
    operator = AttentionOperator(layer, X)
    both = lipscope.GolubKahan()
    # Room for just fewer than 32 pairs of vectors.
    right = lipscope.GolubKahan(memory=31 * 10 * 2 * 98 * WIDTH * 4)
    ratio = in_turns(lambda: both.solve(operator), lambda: _one_run(right, operator), 3)
    steps = [float(found.iterations.double().mean()) for found in (both.solve(operator), _one_run(right, operator))]
    return (
        f"| re-orthogonalise one side only, n = 98 | {ratio:.2f} of the time, {steps[1]:.1f} pairs instead of "
        f"{steps[0]:.1f} | used where memory asks for it; elsewhere both bases give the singular vectors as well |"
    )


def _one_run(solver: lipscope.GolubKahan, operator: AttentionOperator) -> object:
    """The whole batch at once in right vectors only, without the solver's split into turns."""
    from lipscope.spectral.golub_kahan import _Run

    return _Run(solver, operator).solve()


def tile_sizes(n: int) -> list[str]:
    """One pair at other tiles, and without kept exponentials."""
    layer, u = make_layer(), torch.randn(1, n * WIDTH)

    def pair(tiling: Tiling) -> Callable[[], object]:
        with using_tiling(tiling):
            operator = AttentionOperator(layer, tokens(n), tiled=True)
        return lambda: (operator.matvec(u), operator.rmatvec(u))

    usual = pair(Tiling())
    lines = []
    for tile in ((64, 128), (128, 256), (512, 512), (512, 1024)):
        ratio = in_turns(usual, pair(Tiling(tile=tile)), 3)
        lines.append(f"| tiles of {tile[0]}×{tile[1]} instead of 256×512, n = {n} | {ratio:.2f} of the time | |")
    ratio = in_turns(usual, pair(Tiling(keep=0)), 3)
    lines.append(
        f"| exponentials rebuilt instead of kept, n = {n} | {ratio:.2f} of the time | kept while they fit in 256 MiB |"
    )
    return lines


def main() -> None:
    """Try everything, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="page whose section is replaced")
    parser.add_argument("--n", type=int, default=1024)
    given = parser.parse_args()
    lines = [
        "## What did not work, or pays only somewhere",
        "",
        "Written by `benchmarks/experiments.py`: each idea against what lipscope does by default, timed in turns in one "
        f"run ({machine()}). Reuse of a recorded pass for prefixes is in *All layers* above.",
        "",
        "| idea | measured | verdict |",
        "|---|---|---|",
        bfloat16(),
        prefix_warm_start(256),
        one_sided(),
        *tile_sizes(given.n),
    ]
    print("\n".join(lines))
    if given.write is not None:
        write_section(given.write, "benchmarks/experiments.py", lines)


if __name__ == "__main__":
    main()
