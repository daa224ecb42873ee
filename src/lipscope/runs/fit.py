"""How σ grows with the length n: a power law with a confidence interval, against a curve that saturates.

    power law    log σ = log c + α·log n
    saturating   log σ = log s + log(n/(n + m))      σ → s for n ≫ m

Both have two coefficients and a residual variance; the smaller AIC = N·log(RSS/N) + 2·3 says which describes the data
better. The interval on α is a percentile bootstrap of the residuals, each over √(1 − its leverage), which has the scatter of
an error and not the smaller one of a residual; with N points it is widened by t_{N−2}/z, the price of few of them.

Where the same m inputs are measured at every length, their values are not independent, but the inputs are: each has an
exponent α_i of its own, α is their mean, and the interval is α ± t_{m−1}·s/√m, s the standard deviation of the α_i.

How fast a sequence of measurements settles: σ_n ≈ σ_∞ + c·n^{−β}, with bootstrap intervals.

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
from scipy.optimize import minimize_scalar
from scipy.stats import norm as normal
from scipy.stats import t as student

from lipscope.rounding import interval

Floats = NDArray[np.float64]


FEWEST_LENGTHS = 3
TOO_FEW = "too few lengths to tell how σ grows"


@dataclass(frozen=True)
class GrowthFit:
    """σ ≈ c·n^α over the measured lengths, and the saturating alternative."""

    c: float  # factor of the power law
    alpha: float  # its exponent
    alpha_low: float  # lower end of the confidence interval on the exponent
    alpha_high: float  # upper end
    level: float  # its confidence level
    limit: float  # s of the saturating curve
    half_length: float  # m, the length at which it reaches half its limit
    aic_power: float  # AIC of the power law
    aic_saturating: float  # AIC of the saturating curve
    points: int  # number of measurements

    @property
    def better(self) -> str:
        """``"power law"`` or ``"saturating"``, whichever has the smaller AIC."""
        return "power law" if self.aic_power <= self.aic_saturating else "saturating"

    @property
    def is_decided(self) -> bool:
        """Whether the interval of the exponent is narrow enough to say anything: no wider than 1."""
        return self.alpha_high - self.alpha_low <= 1

    def __str__(self) -> str:
        ends = interval(self.alpha_low, self.alpha_high, decimals=3)
        if not self.is_decided:
            return f"{TOO_FEW}: σ ≈ c·n^α with α in {ends} at {self.level:.0%}, {self.points} points"
        return (
            f"σ ≈ {self.c:.3g}·n^{self.alpha:.3f} (α in {ends} at {self.level:.0%}), "
            f"{self.points} points, AIC prefers {self.better}"
        )


def can_fit(n: Sequence[float], sigma: Sequence[float]) -> bool:
    """Whether ``fit_growth`` takes these measurements: three lengths, and no σ of 0."""
    return len(set(n)) >= FEWEST_LENGTHS and min(sigma) > 0


def fit_growth(
    n: Sequence[float],
    sigma: Sequence[float],
    *,
    inputs: Sequence[int] | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> GrowthFit:
    """Fit both curves to measurements (n, σ), at three different lengths or more.

    Where the same inputs (or parts of them) were measured at all lengths, ``inputs`` says which one a measurement belongs
    to, and there is no bootstrap; None when every measurement has an input of its own.

    Example:
        >>> fit = fit_growth([8, 16, 32, 64], [2.0, 2.83, 4.0, 5.66])
        >>> round(fit.alpha, 2), fit.better
        (0.5, 'power law')
    """
    x, y = np.asarray(n, dtype=np.float64), np.asarray(sigma, dtype=np.float64)
    if len(np.unique(x)) < FEWEST_LENGTHS:
        raise ValueError(f"a fit needs at least three different lengths n, got {len(np.unique(x))}")
    if not (y > 0).all():
        raise ValueError("a fit in log–log needs σ > 0")
    log_n, log_y = np.log(x), np.log(y)
    alpha, log_c = _line(log_n, log_y)
    if inputs is None:
        residuals = log_y - alpha * log_n - log_c
        low, high = _slope_interval(log_n, residuals, level, resamples, np.random.default_rng(seed))
    else:
        low, high = _interval_over_inputs(log_n, log_y, np.asarray(inputs), level)
    log_m, log_limit, saturating_rss = _saturating(x, log_y)
    return GrowthFit(
        c=float(np.exp(log_c)), alpha=alpha, alpha_low=alpha + low, alpha_high=alpha + high, level=level,
        limit=float(np.exp(log_limit)), half_length=float(np.exp(log_m)),
        aic_power=_aic(float(np.square(log_y - alpha * log_n - log_c).sum()), len(x)),
        aic_saturating=_aic(saturating_rss, len(x)), points=len(x),
    )  # fmt: skip


def _slope_interval(
    x: Floats, residuals: Floats, level: float, resamples: int, generator: np.random.Generator
) -> tuple[float, float]:
    """How far below and above a least-squares slope its true value may lie."""
    centred = x - x.mean()
    spread, points = np.square(centred).sum(), len(x)
    errors = residuals / np.sqrt(1 - 1 / points - np.square(centred) / spread)
    # Lengths stay where they are, so the slope is linear in the resampled errors.
    drawn = generator.choice(errors - errors.mean(), (resamples, points)) @ centred / spread
    ends = np.array([(1 - level) / 2, (1 + level) / 2])
    low, high = student.ppf(ends[1], points - 2) / normal.ppf(ends[1]) * np.quantile(drawn, ends)
    return float(low), float(high)


def _interval_over_inputs(x: Floats, y: Floats, inputs: NDArray[np.int64], level: float) -> tuple[float, float]:
    """The same when inputs, each with all lengths, are what is drawn independently."""
    curves = [(x[inputs == which], y[inputs == which]) for which in np.unique(inputs)]
    lengths = np.sort(curves[0][0])
    if len(curves) < 2:
        raise ValueError("an interval over inputs needs at least two of them, got 1")
    if not all(np.array_equal(np.sort(at), lengths) for at, _ in curves):
        raise ValueError("inputs must all be measured at the same lengths n")
    # Same lengths for all, so the slope of the line through everything is the mean of these.
    slopes = np.array([_line(*curve)[0] for curve in curves])
    half = float(student.ppf((1 + level) / 2, len(slopes) - 1) * slopes.std(ddof=1) / np.sqrt(len(slopes)))
    return -half, half


def _line(x: Floats, y: Floats) -> tuple[float, float]:
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / np.square(x - x.mean()).sum())
    return slope, float(y.mean() - slope * x.mean())


def _saturating(n: Floats, log_y: Floats) -> tuple[float, float, float]:
    """For given m the best log s is a mean, so only log m is searched."""

    def of(log_m: float) -> tuple[float, float]:
        each = log_y - (np.log(n) - np.log(n + np.exp(log_m)))
        return float(each.mean()), float(np.square(each - each.mean()).sum())

    log_m = float(minimize_scalar(lambda m: of(m)[1], bounds=(-20.0, 20.0), method="bounded").x)
    return log_m, *of(log_m)


def _aic(rss: float, points: int, coefficients: int = 2) -> float:
    return points * float(np.log(max(rss, np.finfo(np.float64).tiny) / points)) + 2 * (coefficients + 1)


# Slower than the first, no plateau can be told from steady growth; faster than the last, only the shortest length counts.
RATES = np.geomspace(0.2, 3.0, 61)


@dataclass(frozen=True)
class PlateauFit:
    """σ_n ≈ level + c·n^{−rate}, or σ_n ≈ level when a constant describes the measurements better (then c = 0)."""

    level: float  # σ_∞, the fitted plateau
    level_low: float  # lower end of its interval
    level_high: float  # upper end
    rate: float  # β; NaN for a constant, like its interval
    rate_low: float  # lower end of its interval
    rate_high: float  # upper end
    c: float  # the coefficient of n^{−β}; negative when σ_n grows towards its plateau
    confidence: float  # level of the intervals

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
    """Fit σ_n ≈ σ_∞ + c·n^{−β} to measurements, one or several at each of at least four lengths.

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
    fit = _plateau if _plateau_aic(y, _plateau(x, y), x) < _plateau_aic(y, _constant(x, y), x) else _constant
    level, c, rate = fit(x, y)
    fitted = _curve((level, c, rate), x)
    left = y - fitted
    again = []
    for _ in range(resamples):
        if single:
            # One measurement per length says nothing about the scatter within it: resample the residuals instead.
            again.append(fit(x, fitted + generator.choice(left, len(left))))
        else:
            rows = np.concatenate([generator.choice(group, len(group)) for group in groups])
            again.append(fit(x[rows], y[rows]))
    levels, _, rates = zip(*again, strict=True)
    ends = [(1 - confidence) / 2, (1 + confidence) / 2]
    (level_low, level_high), (rate_low, rate_high) = np.quantile(levels, ends), np.quantile(rates, ends)
    return PlateauFit(level, float(level_low), float(level_high), rate, float(rate_low), float(rate_high), c, confidence)


def _plateau(x: Floats, y: Floats, rates: Floats = RATES) -> tuple[float, float, float]:
    """(level, c, β) of least squares, over the grid of β and then between its neighbours."""
    basis = x[None, :] ** -rates[:, None]
    centred = basis - basis.mean(1, keepdims=True)
    c = (centred * (y - y.mean())).sum(1) / np.square(centred).sum(1)
    level = y.mean() - c * basis.mean(1)
    errors = np.square(y - level[:, None] - c[:, None] * basis).sum(1)
    k = int(errors.argmin())
    if rates is RATES:
        return _plateau(x, y, np.linspace(RATES[max(0, k - 1)], RATES[min(len(RATES) - 1, k + 1)], 41))
    return float(level[k]), float(c[k]), float(rates[k])


def _constant(x: Floats, y: Floats) -> tuple[float, float, float]:
    return float(y.mean()), 0.0, math.nan


def _curve(fit: tuple[float, float, float], x: Floats) -> Floats:
    level, c, rate = fit
    return np.full_like(x, level) if c == 0 else level + c * x**-rate


def _plateau_aic(y: Floats, fit: tuple[float, float, float], x: Floats) -> float:
    rss = max(float(np.square(y - _curve(fit, x)).sum()), 1e-24 * float(np.square(y).sum()))
    return _aic(rss, len(y), 1 if fit[1] == 0 else 3)
