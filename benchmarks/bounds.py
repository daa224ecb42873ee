"""What the certificate costs beside the measurement it accompanies, and what it needs at 2,048 tokens.

    python benchmarks/bounds.py [--long]

d = 768, 12 heads, n = 98, float32 measurement by Golub–Kahan at its defaults, against the float64 certificate. The two are
timed in turns, so that the ratio does not depend on what else the machine does. Times compare only inside one run.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import torch

import lipscope
from lipscope.bounds.certificates import certified_upper
from lipscope.bounds.weights import layer_weights
from lipscope.rounding import interval, round_up

WIDTH, HEADS, TOKENS, LONG = 768, 12, 98, 2048


def seconds(function) -> float:
    """Time one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def bert_shaped(scale: float) -> lipscope.Attention:
    """Random weights of standard deviation ``scale``."""
    generator = torch.Generator().manual_seed(0)
    weights = [scale * torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(4)]
    return lipscope.Attention(*weights, heads=HEADS)


def compare(layer: lipscope.Attention, X: torch.Tensor, scale: float) -> None:
    """Print σ, the certificate, and the ratio of their times."""

    def measure():
        return lipscope.local_lipschitz(layer, X, solver=lipscope.GolubKahan(), certificate=False)

    sigma = measure()
    once = seconds(lambda: layer_weights(layer))
    certificate = float(certified_upper(layer, X[None])[0])
    pairs = [(seconds(measure), seconds(lambda: certified_upper(layer, X[None]))) for _ in range(7)]
    m, c = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"weights of size {scale}: σ ∈ {interval(sigma.lower, sigma.upper)} in {m:.3f} s, {sigma.iterations} steps")
    print(f"  certified ≤ {round_up(certificate)} in {c:.3f} s, and {once:.3f} s once per layer for its weights")
    print(f"  certificate / measurement = {statistics.median(b / a for a, b in pairs):.2f} (target: at most 2)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="also certify 2,048 tokens and report the peak memory")
    long = parser.parse_args().long
    X = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    print(f"n = {TOKENS}, d = {WIDTH}, {HEADS} heads, {torch.get_num_threads()} threads")
    for scale in (0.02, 0.03, 0.05):
        layer = bert_shaped(scale)
        compare(layer, X, scale)
    if long:
        X = torch.randn(1, LONG, WIDTH, generator=torch.Generator().manual_seed(2))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        spent = seconds(lambda: certified_upper(layer.with_mask("causal"), X))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown = (peak - before) / 2**20
        print(f"n = {LONG}, causal: {spent:.1f} s, peak {peak / 2**20:.2f} GiB, {grown:.2f} more than before")


if __name__ == "__main__":
    main()
