"""What a search has found: a row per claim, and the truth that claims are held against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np

from oracle import Array, Problem, attained, jacobians, sigmas, true_sigma

# σ by autograd in float64 is off by about this much, relatively.
NOISE = 2e-15
# Less than this float64 does not hold to all digits: it counts as zero.
VANISHING = 1e-300


@dataclass
class Row:
    """What is known of one claim."""

    cases: int = 0
    closest: float = math.inf  # the least bound/σ, or what was reached/bound for lower bounds
    judged: int = 0  # cases that mpmath decided
    refused: int = 0
    failures: int = 0  # of an end that may fail
    violations: list[str] = field(default_factory=list)

    def add(self, other: Row) -> None:
        """Take over what another search found."""
        self.cases += other.cases
        self.closest = min(self.closest, other.closest)
        self.judged += other.judged
        self.refused += other.refused
        self.failures += other.failures
        self.violations += other.violations


class Ledger(dict[str, Row]):
    """A row per claim."""

    def row(self, name: str) -> Row:
        """The row of a claim, which may be new."""
        return self.setdefault(name, Row())

    def record(self, name: str, ratio: float, broken: str | None = None, cases: int = 1) -> None:
        """So many cases of a claim, the tightest of them, and what was found wrong if anything."""
        row = self.row(name)
        row.cases += cases
        if math.isfinite(ratio):
            row.closest = min(row.closest, float(ratio))
        if broken:
            row.violations.append(f"{name}: {broken}")

    def add(self, other: Ledger) -> None:
        """Take over another ledger."""
        for name, row in other.items():
            self.row(name).add(row)

    def guarded(self, name: str, where: str, call: Callable[[], Any]) -> Any:
        """What a call returns; None when it refuses for want of digits or of range. Any other error is a violation."""
        try:
            return call()
        except FloatingPointError:
            self.row(name).refused += 1
        except Exception as error:
            if isinstance(error, ValueError) and "float64 overflows" in str(error):
                self.row(name).refused += 1
            else:
                self.record(name, math.inf, f"{type(error).__name__}: {str(error)[:200]} at {where}")
        return None


class Truth:
    """σ of one layer at its inputs (B, n, d), by autograd, and by mpmath where that is not sure."""

    def __init__(self, p: Problem, X: Array, head: int | None = None, digits: int = 60) -> None:
        self.p, self.X, self.head, self.digits = p, X, head, digits
        self.J = jacobians(p, X, head)
        self.sigma = sigmas(self.J)
        self.known: dict[int, Any] = {}

    @property
    def decidable(self) -> bool:
        """Whether mpmath can compute this layer."""
        return self.p.kind != "sinkhorn"

    def exact(self, b: int) -> Any:
        """σ at input b as mpmath has it."""
        if b not in self.known:
            self.known[b] = true_sigma(self.p, self.X[b], self.digits, self.head)
        return self.known[b]

    def above(self, value: float, b: int, tolerance: float, row: Row) -> Any:
        """A gain above ``value`` that some direction at input b attains, or None."""
        if b in self.known:
            return self.known[b] if not value >= self.known[b] * (1 - tolerance) else None
        if value >= self.sigma[b] * (1 + 1e-9):
            return None
        if not self.decidable:
            return self.sigma[b] if not value >= self.sigma[b] * (1 - 1e-9) else None
        row.judged += 1
        gain = attained(self.p, self.X[b], np.linalg.svd(self.J[b])[2][0], self.digits, self.head)
        return gain if not value >= gain * (1 - tolerance) and gain > VANISHING else None

    def upper(self, ledger: Ledger, name: str, value: float, b: int, where: str, tolerance: float, cases: int = 1) -> None:
        """An upper bound for σ at input b."""
        found = self.above(value, b, tolerance, ledger.row(name))
        sigma = float(self.known.get(b, self.sigma[b]))
        broken = None
        if found is not None:
            part = float(1 - mpmath.mpf(value) / found) if math.isfinite(value) else math.nan
            broken = f"{value!r} < σ = {float(found)!r}, {part:.1e} below, at {where} input {b}"
        ledger.record(name, value / sigma if sigma > 0 else math.inf, broken, cases)

    def interval(self, ledger: Ledger, name: str, result: Any, where: str, b: int | None = None) -> None:
        """Whether an interval holds σ, at input b or at all; where autograd is not sure, mpmath judges the worst input."""
        low, high = (np.atleast_1d(np.asarray(end, dtype=float)) for end in (result.lower, result.upper))
        items = np.arange(len(self.X)) if b is None else np.array([b])
        sigma = np.array([float(self.known.get(int(i), self.sigma[i])) for i in items])
        size = np.where(sigma > 0, sigma, 1.0)
        # How far σ is inside, relatively; negative outside.
        depth = np.minimum((high - sigma) / size, (sigma - low) / size)
        at = int(np.where(np.isnan(depth), -math.inf, depth).argmin())
        broken, row, i = None, ledger.row(name), int(items[at])
        if not depth[at] > NOISE or i in self.known:
            if self.decidable:
                row.judged += 1
                exact = self.exact(i)
                outside = max(mpmath.mpf(low[at]) - exact, exact - mpmath.mpf(high[at])) / (exact or 1)
                fine = outside <= 0 or exact < VANISHING >= high[at] >= 0
            else:
                exact, outside = sigma[at], -depth[at]
                fine = outside <= 1e-9
            if not fine:
                span = f"[{low[at]:.17g}, {high[at]:.17g}], rounding {np.atleast_1d(result.rounding)[at]:.1e},"
                broken = f"σ = {float(exact)!r} is {float(outside):.1e} outside {span} at {where} input {i}"
        ledger.record(name, float(np.where(sigma > 0, high / size, math.inf).min()), broken, len(items))
