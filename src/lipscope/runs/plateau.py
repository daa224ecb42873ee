"""How fast a sequence of measurements settles: σ_n ≈ σ_∞ + c·n^{−β}, with bootstrap intervals.

For fixed β the other two coefficients are a least-squares line in n^{−β}, so only β is searched. A constant competes with
that curve; the smaller AIC = N·log(RSS/N) + 2·(coefficients + 1) decides. Intervals are percentile bootstraps over the
repeats within each length. Where the interval for β reaches the slow end of the search, a plateau cannot be told from steady
growth or decay, its level is an extrapolation without a basis, and none is reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lipscope.rounding import interval

Floats = NDArray[np.float64]

# Slower than the first, no plateau can be told from steady growth; faster than the last, only the shortest length counts.
RATES = np.geomspace(0.2, 3.0, 61)


@dataclass(frozen=True)
class PlateauFit:
    """σ_n ≈ level + c·n^{−rate}, or σ_n ≈ level when a constant describes the measurements better (then c = 0).

    Attributes:
        level: σ_∞, the fitted plateau.
        level_low: lower end of its interval.
        level_high: upper end.
        rate: β; NaN for a constant, like its interval.
        rate_low: lower end of its interval.
        rate_high: upper end.
        c: the coefficient of n^{−β}; negative when σ_n grows towards its plateau.
        confidence: level of the intervals.
    """

    level: float
    level_low: float
    level_high: float
    rate: float
    rate_low: float
    rate_high: float
    c: float
    confidence: float

    @property
    def is_constant(self) -> bool:
        """Whether the measurements show no trend in n at all."""
        return self.c == 0

    @property
    def rate_is_determined(self) -> bool:
        """Whether the interval for β stays clear of the ends of the range that was searched."""
        return bool(not self.is_constant and self.rate_low > RATES[0] * 1.01 and self.rate_high < RATES[-1] / 1.01)

    @property
    def is_visible(self) -> bool:
        """Whether there is a plateau: all of the interval for β, not the estimate alone, is clear of the slowest rate."""
        return bool(self.is_constant or min(self.rate, self.rate_low) > RATES[0] * 1.01)

    def at(self, n: float) -> float:
        """The fitted curve."""
        return self.level if self.is_constant else self.level + self.c * math.pow(n, -self.rate)

    def __str__(self) -> str:
        rates = interval(self.rate_low, self.rate_high, decimals=2)
        if not self.is_visible:
            return (
                "no plateau can be told from steady drift at these lengths: "
                f"β in {rates} reaches the slow end {RATES[0]:.2f} of the search"
            )
        rate = f"rate n^−{self.rate:.2f}" if self.rate_is_determined else "rate not determined by these lengths"
        rate = "no trend in n" if self.is_constant else f"{rate} (β in {rates})"
        return f"plateau {self.level:.4g} (in {interval(self.level_low, self.level_high)} at {self.confidence:.0%}), {rate}"


def fit_plateau(
    n: Sequence[float], sigma: Sequence[float], *, confidence: float = 0.95, resamples: int = 400, seed: int = 0
) -> PlateauFit:
    """Fit σ_n ≈ σ_∞ + c·n^{−β} to measurements, several per length.

    Args:
        n: lengths, at least four different ones.
        sigma: the measurements.
        confidence: level of the intervals.
        resamples: bootstrap resamples.
        seed: seed of the bootstrap.

    Raises:
        ValueError: when there are fewer than four different lengths.

    Example:
        >>> lengths = [16, 32, 64, 128, 256, 512]
        >>> fit = fit_plateau(lengths, [3 - 2 / m for m in lengths])
        >>> round(fit.level, 3), round(fit.rate, 1)
        (3.0, 1.0)
    """
    x, y = np.asarray(n, dtype=np.float64), np.asarray(sigma, dtype=np.float64)
    lengths = np.unique(x)
    if len(lengths) < 4:
        raise ValueError(f"a plateau fit needs at least four different lengths n, got {len(lengths)}")
    generator = np.random.default_rng(seed)
    groups = [np.flatnonzero(x == value) for value in lengths]
    single = all(len(group) == 1 for group in groups)
    fit = _fit if _aic(y, _fit(x, y), x) < _aic(y, _constant(x, y), x) else _constant
    level, c, rate = fit(x, y)
    fitted = _curve((level, c, rate), x)
    left = y - fitted
    levels, rates = [], []
    for _ in range(resamples):
        if single:
            # One measurement per length says nothing about the scatter within it: resample the residuals instead.
            again = fit(x, fitted + generator.choice(left, len(left)))
        else:
            rows = np.concatenate([generator.choice(group, len(group)) for group in groups])
            again = fit(x[rows], y[rows])
        levels.append(again[0])
        rates.append(again[2])
    ends = [(1 - confidence) / 2, (1 + confidence) / 2]
    (level_low, level_high), (rate_low, rate_high) = np.quantile(levels, ends), np.quantile(rates, ends)
    return PlateauFit(level, float(level_low), float(level_high), rate, float(rate_low), float(rate_high), c, confidence)


def _fit(x: Floats, y: Floats) -> tuple[float, float, float]:
    """(level, c, β) of least squares, over the grid of β and then between its neighbours."""
    best = _on_grid(x, y, RATES)
    at = int(np.searchsorted(RATES, best[2]))
    fine = np.linspace(RATES[max(0, at - 1)], RATES[min(len(RATES) - 1, at + 1)], 41)
    return _on_grid(x, y, fine)


def _constant(x: Floats, y: Floats) -> tuple[float, float, float]:
    return float(y.mean()), 0.0, math.nan


def _curve(fit: tuple[float, float, float], x: Floats) -> Floats:
    level, c, rate = fit
    return np.full_like(x, level) if c == 0 else level + c * x**-rate


def _aic(y: Floats, fit: tuple[float, float, float], x: Floats) -> float:
    rss = max(float(np.square(y - _curve(fit, x)).sum()), 1e-24 * float(np.square(y).sum()), np.finfo(np.float64).tiny)
    return len(y) * math.log(rss / len(y)) + 2 * (2 if fit[1] == 0 else 4)


def _on_grid(x: Floats, y: Floats, rates: Floats) -> tuple[float, float, float]:
    basis = x[None, :] ** -rates[:, None]
    centred = basis - basis.mean(1, keepdims=True)
    c = (centred * (y - y.mean())).sum(1) / np.square(centred).sum(1)
    level = y.mean() - c * basis.mean(1)
    errors = np.square(y - level[:, None] - c[:, None] * basis).sum(1)
    k = int(errors.argmin())
    return float(level[k]), float(c[k]), float(rates[k])
