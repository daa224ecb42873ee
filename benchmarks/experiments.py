"""Ideas that were tried: each against what lipscope does, in one run, so that what did not work stays written down.

python benchmarks/experiments.py [--write docs/performance-log.md] [--n 1024]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import lipscope
from lipscope.attention.operators import AttentionOperator
from lipscope.attention.tiled import Tiling, using_tiling
from lipscope.rounding import show_bytes
from lipscope.spectral.bidiagonalisation import Bidiagonalisation
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
    verdict = "faster here, and not used so far" if ratio < 1 else "no faster here, so mixed precision is not used"
    return f"| first steps in bfloat16 | a product takes {ratio:.2f} of its time in float32 | {verdict} |"


def saved(cold: float, warm: float) -> str:
    """What a warm start does to the number of pairs, in words."""
    if warm == cold:
        return "saves no pair"
    return f"{'saves' if warm < cold else 'costs'} {abs(cold - warm):.1f} pairs"


def prefix_warm_start(n: int, inputs: int = 3) -> str:
    """The worst direction of the first half of a text, padded with zeros, as the start for the whole."""
    layer = sharpened_layer().with_mask("causal")
    X = torch.randn(inputs, n, WIDTH, generator=torch.Generator().manual_seed(5))
    short = lipscope.GolubKahan(vectors=True).solve(AttentionOperator.at(layer, X[:, : n // 2]))
    start = torch.zeros(inputs, n, WIDTH)
    start[:, : n // 2] = short.right[:, 0].reshape(inputs, n // 2, WIDTH)
    operator = AttentionOperator.at(layer, X)

    def pairs(solver: lipscope.GolubKahan) -> tuple[float, float]:
        cold, warm = (solver.solve(operator, start=s) for s in (None, start.flatten(1)))
        return float(cold.iterations.double().mean()), float(warm.iterations.double().mean())

    whole, bare = pairs(lipscope.GolubKahan()), pairs(lipscope.GolubKahan(interval=None))
    return (
        f"| start from the worst direction of a prefix, n = {n // 2} → {n}, mean of {inputs} inputs | {whole[0]:.1f} pairs "
        f"without, {whole[1]:.1f} with (estimate alone: {bare[0]:.1f} and {bare[1]:.1f}) | with the interval it "
        f"{saved(*whole)}, for the estimate alone it {saved(*bare)}; not used by scans |"
    )


def through_keys(n: int, inputs: int = 10) -> str:
    """Scores of a perturbation from vectors a_i = W_Kᵀq_i and b_j = W_Qᵀk_j of every head, which spares two projections."""
    layer = sharpened_layer()
    u = torch.randn(inputs, n, WIDTH)
    queries_and_keys = torch.randn(2 * WIDTH, WIDTH)
    a, b = torch.randn(2, inputs, layer.heads * n, WIDTH)
    left, right = torch.randn(2, inputs * layer.heads, n, WIDTH // layer.heads)

    def projected() -> object:
        first = u.flatten(0, 1) @ queries_and_keys.mT
        return first, torch.baddbmm(torch.bmm(left, right.mT), left, right.mT)

    ratio = in_turns(projected, lambda: torch.baddbmm(torch.bmm(a, u.mT), b, u.mT))
    verdict = "would pay for so few tokens" if ratio < 1 else "does not pay"
    return (
        f"| how scores move through W_Kᵀq and W_Qᵀk instead of projections, n = {n}, {inputs} inputs | {ratio:.2f} of the "
        f"time of that part | {verdict}; impossible with rotary embeddings; not used |"
    )


def compiled(n: int = 98, inputs: int = 10) -> str:
    """The products through ``torch.compile``; what an earlier run compiled does not count."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        X = torch.randn(inputs, n, WIDTH, generator=torch.Generator().manual_seed(n))
        operator, u = AttentionOperator.at(sharpened_layer(), X), torch.randn(inputs, n * WIDTH)
        fast = torch.compile(operator.matvec)
        idea = f"| `torch.compile` of J·u, n = {n}, {inputs} inputs |"
        try:
            seconds = timed(lambda: fast(u))[0]
        except RuntimeError as error:  # no compiler on this machine
            return f"{idea} not possible here: {type(error).__name__} | not used |"
        plain = timed(lambda: operator.matvec(u), 3)[0]
        ratio = in_turns(lambda: operator.matvec(u), lambda: fast(u))
        return (
            f"{idea} {ratio:.2f} of the time, after {seconds:.0f} s of compiling | that is {seconds / plain:.0f} products; "
            "matrix products are most of the work, so it is not used |"
        )


def two_sided() -> str:
    """Re-orthogonalising both sides, which problems of more than a thousand dimensions do not."""
    layer = sharpened_layer()
    X = torch.randn(10, 98, WIDTH, generator=torch.Generator().manual_seed(98))
    operator, solver = AttentionOperator.at(layer, X), lipscope.GolubKahan()
    kinds = [partial(Bidiagonalisation, solver, operator, whole=whole) for whole in (False, True)]
    runs = [partial(lambda kind: kind().solve(), kind) for kind in kinds]
    assert [kind().one_sided for kind in kinds] == [True, False]
    ratio = in_turns(*runs, 3)
    (one, two), (M, N) = [run() for run in runs], operator.shape
    steps = [float(found.iterations.double().mean()) for found in (one, two)]
    apart = float(((two.estimate - one.estimate) / two.estimate).abs().max())
    return (
        f"| re-orthogonalise both sides instead of the right one, n = 98 | {ratio:.2f} of the time, {steps[1]:.1f} pairs "
        f"instead of {steps[0]:.1f}, estimates within {apart:.1e} | {(M + N) / N:.0f} times the memory for "
        f"{'fewer' if steps[1] < steps[0] else 'as many' if steps[1] == steps[0] else 'more'} pairs and "
        f"{'less' if ratio < 1 else 'more'} time |"
    )


def tile_sizes(n: int) -> list[str]:
    """One pair at other tiles, and without kept exponentials."""
    layer, u = make_layer(), torch.randn(1, n * WIDTH)

    def pair(tiling: Tiling) -> Callable[[], object]:
        with using_tiling(tiling):
            operator = AttentionOperator.at(layer, tokens(n), tiled=True)
        return lambda: (operator.matvec(u), operator.rmatvec(u))

    usual = pair(Tiling())
    lines = []
    for tile in ((64, 128), (128, 256), (512, 512), (512, 1024)):
        ratio = in_turns(usual, pair(Tiling(tile=tile)), 3)
        lines.append(f"| tiles of {tile[0]}×{tile[1]} instead of 256×512, n = {n} | {ratio:.2f} of the time | |")
    ratio = in_turns(usual, pair(Tiling(keep=0)), 3)
    kept = show_bytes(Tiling().keep)
    lines.append(
        f"| exponentials rebuilt instead of kept, n = {n} | {ratio:.2f} of the time | keeping them, which is done up to "
        f"{kept}, {'pays' if ratio > 1 else 'does not pay'} here |"
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
        prefix_warm_start(512),
        two_sided(),
        through_keys(20),
        through_keys(98),
        compiled(),
        *tile_sizes(given.n),
    ]
    print("\n".join(lines))
    if given.write is not None:
        write_section(given.write, "benchmarks/experiments.py", lines)


if __name__ == "__main__":
    main()
