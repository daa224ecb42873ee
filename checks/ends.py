"""How often the probabilistic end fails, on spectra that are made for it to fail; and what it may fail at most."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import beta

import lipscope
from ledger import Ledger
from lipscope.spectral.operator import DenseOperator
from oracle import Array

DELTA = 0.1
BATCH = 250  # solves of one number
# A stratum is violated when its rate is above δ beyond doubt: one stratum in ten thousand is so by chance at a rate of δ.
DOUBT = 1e-4


@dataclass(frozen=True)
class Stratum:
    """One kind of problem: N×N matrices with a spectrum and random singular vectors, and how they are solved."""

    size: int
    spectrum: str
    steps: int = 300
    start: str = "random"  # or a warm start: at the top vector, at the second, or between top and noise
    interval: float | None = 0.1
    memory: int = 1 << 30  # bytes for Krylov bases; few make the recurrence one-sided, fewer without all its vectors

    def __str__(self) -> str:
        parts = [f"N = {self.size}, {self.spectrum}", f"≤ {self.steps} steps", f"start {self.start}"]
        parts += ["no width asked for"] if self.interval is None else []
        parts += [f"{self.memory} bytes"] if self.memory < 1 << 30 else []
        return ", ".join(parts)


STRATA = (
    *(Stratum(size, "outlier", steps, start) for size in (2, 3) for steps, start in
      ((1, "random"), (1, "top"), (1, "second"), (1, "near top"), (2, "random"), (300, "top"), (300, "second"))),
    *(Stratum(8, spectrum, steps) for spectrum in ("outlier", "cluster", "geometric", "two values")
      for steps in (1, 3, 300)),
    *(Stratum(40, spectrum, 4, start, None) for spectrum in ("outlier", "cluster", "linear")
      for start in ("random", "top", "second")),
    *(Stratum(40, spectrum, 300, start) for spectrum in ("outlier", "cluster", "linear", "two values")
      for start in ("random", "second", "near top")),
    *(Stratum(200, spectrum, steps) for spectrum in ("outlier", "cluster", "geometric", "linear") for steps in (5, 300)),
    *(Stratum(40, spectrum, 300, memory=BATCH * 40 * 8 * kept) for spectrum in ("outlier", "cluster", "linear")
      for kept in (20, 40)),
)  # fmt: skip


def values(stratum: Stratum, rng: np.random.Generator) -> Array:
    """Singular values, the largest first and equal to one."""
    k = np.arange(stratum.size)
    spectra = {
        "outlier": np.where(k == 0, 1.0, 0.3),
        "cluster": 1 - 1e-3 * rng.random() * np.minimum(k, 5) - 0.5 * (k >= 5),
        "geometric": 0.5**k,
        "two values": np.where(k < 2, 1.0 - 0.01 * k, 0.0),
        "linear": 1 - k / stratum.size,
    }
    return np.asarray(spectra[stratum.spectrum])


def check_ends(seed: int, number: int) -> Ledger:
    """The solves of one batch: the upper end must be below σ in no more than δ of them."""
    ledger, rng = Ledger(), np.random.default_rng([seed, number, 2])
    stratum = STRATA[number % len(STRATA)]
    count = BATCH if stratum.size < 200 else BATCH // 5
    Q, R = np.linalg.qr(rng.normal(size=(count, stratum.size, stratum.size)))
    V = Q * np.sign(np.einsum("bii->bi", R))[:, None, :]  # uniform on the orthogonal group
    J = torch.from_numpy(values(stratum, rng)[None, :, None] * V.transpose(0, 2, 1))
    noise = V[:, :, 0] + rng.normal(size=V.shape[:2]) / math.sqrt(stratum.size)
    starts = {"random": None, "top": V[:, :, 0], "second": V[:, :, 1], "near top": noise}
    start = starts[stratum.start]
    options: dict[str, Any] = {"max_steps": stratum.steps, "interval": stratum.interval, "memory": stratum.memory}
    solver = lipscope.GolubKahan(delta=DELTA, seed=int(rng.integers(1 << 30)), **options)
    found = solver.solve(DenseOperator(J), None if start is None else torch.from_numpy(start.copy()))
    row = ledger.row(f"end: {stratum}")
    row.cases, row.failures = count, int((found.upper.numpy() < 1 - 1e-12).sum())
    row.closest = float(found.upper.min())
    if bool((found.estimate.numpy() > 1 + 1e-12).any()):
        row.violations.append(f"end: {stratum}: a lower end above σ at --seed {seed} --only ends:{number}")
    return ledger


def limits(failures: int, cases: int, level: float) -> tuple[float, float]:
    """Clopper–Pearson: the rates below and above which chance explains the failures with probability ``level`` each."""
    low = 0.0 if failures == 0 else float(beta.ppf(level, failures, cases - failures + 1))
    high = 1.0 if failures == cases else float(beta.ppf(1 - level, failures + 1, cases - failures))
    return low, high


def judge_ends(ledger: Ledger, where: str) -> None:
    """Strata that fail more often than δ."""
    for name, row in ledger.items():
        if name.startswith("end: ") and limits(row.failures, row.cases, DOUBT)[0] > DELTA:
            row.violations.append(f"{name}: {row.failures} of {row.cases} ends failed at δ = {DELTA}, {where}")
