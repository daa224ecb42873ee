"""Hostile spectra against the solver: intervals must contain σ, and "converged" must mean within ``rtol``.

    python checks/spectra.py [--items 10000] [--seed 0] [--seconds 300] [--json OUT]

Every item is a map whose largest singular value is known: clusters, values that differ by 1e-2 to 1e-7, null spaces,
isometries with an outlier, few distinct values, flat and steep spectra, at ordinary and at extreme scales, in float32 and
float64, with one and with several values asked for, with much and little memory, in 2 to 3,000 dimensions, at ``rtol`` from
1e-2 to 1e-8, with the interval guarded and not. Maps are diagonal, or turned by reflections on both sides, so that their
products cost no more than their vectors; some of the small ones are dense matrices. The seed of a case is its number:
``--only 1000085`` repeats one.

The exit code is 1 when an interval does not contain σ, a result is not finite, or more than one in 10,000 values that are
called converged is off by more than ``rtol`` and the rounding allowance.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from lipscope.spectral.golub_kahan import GolubKahan
from lipscope.spectral.operator import DenseOperator, Operator
from lipscope.spectral.result import summarise

BATCH = 8
WRONG_PER_CONVERGED = 1e-4


class Turned(Operator):
    """The maps L·diag(values)·R, L and R products of reflections; values (B, r) on the first r of N and M dimensions."""

    def __init__(self, values: Tensor, M: int, N: int, left: Tensor, right: Tensor) -> None:
        self.values, self.left, self.right = values, left, right
        self.batch, self.dtype, self.device = len(values), values.dtype, values.device
        self.output_shape, self.input_shape = (M,), (N,)

    def matvec(self, u: Tensor) -> Tensor:
        """J·u."""
        return self._map(u, self.right, self.left)

    def rmatvec(self, g: Tensor) -> Tensor:
        """Jᵀ·g."""
        return self._map(g, self.left.flip(1), self.right.flip(1))

    def select(self, items: Tensor) -> Turned:
        """The listed items."""
        return Turned(self.values[items], *self.shape, self.left[items], self.right[items])

    def _map(self, x: Tensor, before: Tensor, after: Tensor) -> Tensor:
        rank = self.values.shape[1]
        middle = x.new_zeros(self.batch, after.shape[2])
        middle[:, :rank] = self.values * _reflect(x, before)[:, :rank]
        return _reflect(middle, after)


def _reflect(x: Tensor, directions: Tensor) -> Tensor:
    """Reflections along unit directions (B, m, N), one after the other."""
    for j in range(directions.shape[1]):
        w = directions[:, j]
        x = x - 2 * w * (w * x).sum(-1, keepdim=True)
    return x


@dataclass(frozen=True)
class Case:
    """One batch of maps with what is known of them, and the solver for it."""

    number: int
    family: str
    operator: Operator
    truth: Tensor  # leading values (B, k), float64
    solver: GolubKahan


Draw = random.Random
Family = Callable[[Draw, int], list[float]]


def _rest(draw: Draw, count: int, top: float = 0.95) -> list[float]:
    """Smaller values: even, geometric, none, or like those of a random matrix."""
    kind, top = draw.choice(["even", "geometric", "zero", "random"]), draw.uniform(0.2, top)
    if kind == "even":
        return [top * (1 - i / max(1, count)) for i in range(count)]
    if kind == "geometric":
        ratio = draw.uniform(0.5, 0.995)
        return [top * ratio**i for i in range(count)]
    return [0.0] * count if kind == "zero" else sorted((top * draw.random() for _ in range(count)), reverse=True)


def _gap(draw: Draw, least: float = 7.0) -> float:
    return 10 ** -draw.uniform(2, least)


def cluster(draw: Draw, r: int) -> list[float]:
    """Some values within 1e-3 to 1e-6 of the largest."""
    spread, some = _gap(draw), draw.randint(1, max(1, min(r - 1, 30)))
    return [1.0, *(1 - spread * draw.random() for _ in range(some - 1)), *_rest(draw, r - some)]


def pair(draw: Draw, r: int) -> list[float]:
    """Two values close together."""
    return [1.0, 1 - _gap(draw), *_rest(draw, r)]


def ladder(draw: Draw, r: int) -> list[float]:
    """Every value a little below the one before."""
    gap = _gap(draw, 5.0)
    return [max(0.0, 1 - gap * i) for i in range(r)]


def isometry(draw: Draw, r: int) -> list[float]:
    """All equal."""
    return [1.0] * r


def outlier(draw: Draw, r: int) -> list[float]:
    """An isometry with one value above."""
    return [1.0, *[1 / (1 + 10 ** -draw.uniform(1, 6))] * (r - 1)]


def few(draw: Draw, r: int) -> list[float]:
    """Few distinct values, many times each."""
    distinct = [1.0, *(draw.choice([draw.random(), 1 - _gap(draw)]) for _ in range(draw.randint(1, 4)))]
    return [1.0, *(draw.choice(distinct) for _ in range(r - 1))]


def null(draw: Draw, r: int) -> list[float]:
    """Few values above a null space."""
    some = draw.randint(0, min(r, 5))
    return [*(1 - draw.choice([0.0, _gap(draw), draw.random()]) for _ in range(some)), *[0.0] * (r - some)]


def plateau(draw: Draw, r: int) -> list[float]:
    """One value, a little above many that are almost equal."""
    gap, spread = _gap(draw, 5.0), _gap(draw)
    return [1.0, *((1 - gap) * (1 - spread * draw.random()) for _ in range(r // 2)), *_rest(draw, r)]


def smooth(draw: Draw, r: int) -> list[float]:
    """No gap anywhere."""
    return [1.0, *_rest(draw, r, 1.0)]


def steep(draw: Draw, r: int) -> list[float]:
    """Many orders of magnitude."""
    ratio = 10 ** -draw.uniform(0.1, 3)
    return [ratio**i for i in range(r)]


FAMILIES: dict[str, Family] = {f.__name__: f for f in (
    cluster, pair, ladder, isometry, outlier, few, null, plateau, smooth, steep,
)}  # fmt: skip


def case(number: int, batch: int = BATCH) -> Case:
    """The maps of this number, always the same."""
    draw = random.Random(number)
    family = draw.choice(list(FAMILIES))
    sizes = [round(2 ** draw.uniform(1, 9)) if draw.random() < 0.96 else draw.randint(600, 3000) for _ in range(2)]
    M, N = sizes if draw.random() < 0.3 else [sizes[0]] * 2
    dtype = draw.choice([torch.float32, torch.float64])
    scale = 1.0 if draw.random() < 0.8 else 10 ** draw.uniform(*((-44, 38) if dtype == torch.float32 else (-322, 307)))
    r = min(M, N)
    k = min(r, draw.choice([1, 1, 1, 1, 2, 3, 5]))
    ideal = torch.tensor([sorted(FAMILIES[family](draw, r)[:r], reverse=True) for _ in range(batch)], dtype=torch.float64)
    values = (ideal * scale).to(dtype)
    truth = values.double()
    generator = torch.Generator().manual_seed(number)
    turns = draw.choice([0, 1, 2])
    left, right = (_directions(batch, turns, size, dtype, generator) for size in (M, N))
    operator: Operator = Turned(values, M, N, left, right)
    dense = max(M, N) <= 200 and draw.random() < 0.4
    if dense:
        wide = Turned(truth, M, N, left.double(), right.double()).to_dense().to(dtype)
        operator = DenseOperator(wide)
        size = wide.double().abs().amax().clamp_min(torch.finfo(torch.float64).tiny)
        truth = torch.linalg.svdvals(wide.double() / size) * size
    solver = GolubKahan(
        rtol=10 ** -draw.uniform(2, 8),
        k=k,
        interval=draw.choice([0.1, 0.1, None, _gap(draw, 4.0)]),
        seed=number,
        memory=1 << 30 if draw.random() < 0.8 else draw.choice([1, 20, 100]) * (M + N) * dtype.itemsize * batch,
        max_steps=max(k, draw.choice([300, 300, 300, 30, 1000])),
    )
    name = f"{family} {M}×{N} {str(dtype)[6:]} scale {scale:.0e}{' dense' if dense else ''}"
    return Case(number, name, operator, truth[:, :k], solver)


def _directions(batch: int, count: int, size: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    x = torch.randn(batch, count, size, dtype=torch.float64, generator=generator)
    return (x / x.norm(dim=-1, keepdim=True)).to(dtype)


@dataclass
class Outcome:
    """What was seen: counts, and the cases that went wrong in a line each."""

    items: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # called converged, off by more than rtol
    errors: list[str] = field(default_factory=list)
    steps: int = 0
    slowest: float = 0.0
    slowest_case: str = ""

    @property
    def rate(self) -> float:
        """Share of converged values that were off by more than ``rtol``."""
        return len(self.wrong) / max(1, self.statuses["converged"])

    @property
    def ok(self) -> bool:
        """Whether nothing was seen that must not be."""
        return not (self.violations or self.errors or self.rate >= WRONG_PER_CONVERGED)

    def __str__(self) -> str:
        lines = [
            f"{self.items:,} items, {self.steps:,} steps; {dict(self.statuses)}",
            f"{len(self.violations)} intervals without σ, {len(self.errors)} errors",
            f"{len(self.wrong)} of {self.statuses['converged']:,} that converged are off by over rtol ({self.rate:.1e})",
            f"slowest: {self.slowest:.2f} s, {self.slowest_case}",
        ]
        return "\n".join([*lines, *self.violations[:20], *self.errors[:20], *self.wrong[:40]])


def judge(one: Case, outcome: Outcome) -> None:
    """Solve one case and count what comes out."""
    start = time.perf_counter()
    about = f"case {one.number}: {one.family}, rtol {one.solver.rtol:.1e}, interval {one.solver.interval}, k {one.solver.k}"
    batch = one.operator.batch
    outcome.items += batch
    try:
        result = summarise(one.solver.solve(one.operator), one.operator, scope="operator")
    except Exception as error:
        outcome.errors.append(f"{about}: {type(error).__name__}: {error}")
        return
    seconds = time.perf_counter() - start
    if seconds > outcome.slowest:
        outcome.slowest, outcome.slowest_case = seconds, about
    outcome.steps += int(result.iterations.sum())
    outcome.statuses.update(str(status) for status in result.status)
    sigma = one.truth[:, 0]
    least = 5e-324 if one.operator.dtype == torch.float64 else 0.0
    for item in range(batch):
        low, high, exact = float(result.lower[item]), float(result.upper[item]), float(sigma[item])
        if not (math.isfinite(high) and low <= exact + least and exact <= high + least):
            outcome.violations.append(f"{about}, item {item}: {exact!r} not in [{low!r}, {high!r}], {result.status[item]}")
        if bool(result.converged[item]):
            # Values are asked for to rtol of themselves, and known to the rounding of the largest.
            off = (result.singular_values[item] - one.truth[item]).abs()
            allowed = one.solver.rtol * one.truth[item] + 4 * float(result.rounding[item]) * exact + 8 * least
            if bool((off > allowed).any()):
                worst = float((off / (one.solver.rtol * one.truth[item]).clamp_min(5e-324)).max())
                outcome.wrong.append(f"{about}, item {item}: off by {worst:.1f} rtol, {int(result.iterations[item])} steps")


def attack(items: int, seed: int, seconds: float) -> Outcome:
    """As many items as asked for, or as the time allows."""
    outcome, end = Outcome(), time.perf_counter() + seconds
    for number in _numbers(seed):
        if outcome.items >= items or time.perf_counter() > end:
            return outcome
        judge(case(number), outcome)
    return outcome


def _numbers(seed: int) -> Iterator[int]:
    number = seed * 1_000_000
    while True:
        yield number
        number += 1


def main() -> None:
    """Attack, print, and say by the exit code whether the solver held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--only", type=int, help="one case, by its number")
    parser.add_argument("--json", type=Path, help="write the outcome here too")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"seed {given.seed}", flush=True)
    if given.only is not None:
        outcome = Outcome()
        judge(case(given.only), outcome)
    else:
        outcome = attack(given.items, given.seed, given.seconds)
    print(outcome)
    if given.json is not None:
        given.json.write_text(json.dumps(asdict(outcome), indent=1))
    sys.exit(0 if outcome.ok else 1)


if __name__ == "__main__":
    main()
