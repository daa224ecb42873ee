"""What a search for the worst input costs: the whole search, and one of its steps against one warm evaluation of σ.

    python benchmarks/adversarial.py

d = 64, 4 heads, n = 64, 16 restarts × 200 steps, float64. A step is one trial point for every restart: projections, the
core, a few warm Golub–Kahan steps, and the gradient where the trial is kept; it is timed in turns with the same
evaluation without the gradient and the bookkeeping, so that the ratio does not depend on what else the machine does.
Targets: the search in less than 60 s on 2 cores, a step at most 3 times the evaluation.
"""

from __future__ import annotations

import statistics
import time

import torch

import lipscope
from lipscope.attention.operators import AttentionOperator
from lipscope.bounds.domain import ball
from lipscope.studies.worst_case import ascent, maximise
from lipscope.studies.worst_case.ascent import gather_starts, warm_pair
from lipscope.studies.worst_case.constructions import construct

WIDTH, HEADS, TOKENS, RESTARTS, STEPS, RADIUS = 64, 4, 64, 16, 200, 8.0


def seconds(function) -> float:
    """Time one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def layer(mask: str) -> lipscope.Attention:
    """Random weights with entries of size 1/√d."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64) / WIDTH**0.5 for _ in range(4)]
    return lipscope.Attention(*weights, heads=HEADS, mask=mask)


def step_ratio(attention: lipscope.Attention, turns: int = 40) -> tuple[float, float, float]:
    """Median seconds of a step, of a warm evaluation of the same restarts, and the median of their ratio."""
    domain = ball(RADIUS)
    begin, _ = gather_starts(domain, construct(attention, TOKENS, radius=RADIUS), None, RESTARTS, TOKENS, WIDTH, 0)
    search = ascent._Search(attention, domain, begin.clone(), 0)

    def evaluate() -> None:
        warm_pair(AttentionOperator.at(attention, domain.tokens(search.z)), search.pair.right, ascent._WARM_STEPS)

    pairs = [(seconds(search._advance), seconds(evaluate)) for _ in range(turns)]
    step, evaluation = (statistics.median(column) for column in zip(*pairs, strict=True))
    return step, evaluation, statistics.median(a / b for a, b in pairs)


def main() -> None:
    print(f"n = {TOKENS}, d = {WIDTH}, {HEADS} heads, R = {RADIUS:g}, {torch.get_num_threads()} threads")
    for mask in ("full", "causal"):
        attention = layer(mask)
        step, evaluation, ratio = step_ratio(attention)
        print(f"{mask}: step {1e3 * step:.1f} ms, warm evaluation {1e3 * evaluation:.1f} ms")
        print(f"  ratio {ratio:.2f} (target: at most 3)")
        start, work = time.perf_counter(), time.process_time()
        # No restart may stop early: all steps are paid for.
        found = maximise(attention, TOKENS, radius=RADIUS, restarts=RESTARTS, steps=STEPS, patience=STEPS)
        spent, work = time.perf_counter() - start, time.process_time() - work
        print(f"  {RESTARTS} restarts × {STEPS} steps in {spent:.1f} s, {work:.1f} s of CPU (target: 60 s on 2 cores)")
        print(f"  {found}")
        print(f"  best construction {float(found.starts[:5].max()):.4g}")


if __name__ == "__main__":
    main()
