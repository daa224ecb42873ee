"""How σ grows with the length n: a power law with a confidence interval, against a curve that saturates.

    power law    log σ = log c + α·log n
    saturating   log σ = log s + log(n/(n + m))      σ → s for n ≫ m

Both have two coefficients and a residual variance; the smaller AIC = N·log(RSS/N) + 2·3 says which describes the data
better. The interval on α is a percentile bootstrap of the residuals, each over √(1 − its leverage), which has the scatter of
an error and not the smaller one of a residual; with N points it is widened by t_{N−2}/z, the price of few of them.

Where the same m inputs are measured at every length, their values are not independent, but the inputs are: each has an
exponent α_i of its own, α is their mean, and the interval is α ± t_{m−1}·s/√m, s the standard deviation of the α_i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.stats import norm as normal
from scipy.stats import t as student

from lipscope.rounding import interval

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class GrowthFit:
    """σ ≈ c·n^α over the measured lengths, and the saturating alternative.

    Attributes:
        c: factor of the power law.
        alpha: its exponent.
        alpha_low: lower end of the confidence interval on the exponent.
        alpha_high: upper end.
        level: its confidence level.
        limit: s of the saturating curve.
        half_length: m, the length at which it reaches half its limit.
        aic_power: AIC of the power law.
        aic_saturating: AIC of the saturating curve.
        points: number of measurements.
    """

    c: float
    alpha: float
    alpha_low: float
    alpha_high: float
    level: float
    limit: float
    half_length: float
    aic_power: float
    aic_saturating: float
    points: int

    @property
    def better(self) -> str:
        """``"power law"`` or ``"saturating"``, whichever has the smaller AIC."""
        return "power law" if self.aic_power <= self.aic_saturating else "saturating"

    def __str__(self) -> str:
        ends = interval(self.alpha_low, self.alpha_high, decimals=3)
        return (
            f"σ ≈ {self.c:.3g}·n^{self.alpha:.3f} (α in {ends} at {self.level:.0%}), "
            f"{self.points} points, AIC prefers {self.better}"
        )


def fit_growth(
    n: Sequence[float],
    sigma: Sequence[float],
    *,
    inputs: Sequence[int] | None = None,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> GrowthFit:
    """Fit both curves to measurements (n, σ).

    Args:
        n: the length of every measurement.
        sigma: what was measured.
        inputs: which input a measurement belongs to, when the same inputs (or parts of them) were measured at all lengths;
            None when every measurement has an input of its own.
        level: confidence level of the interval on α.
        resamples: of the bootstrap; there is none with ``inputs``.
        seed: of the bootstrap.

    Returns:
        The fit.

    Raises:
        ValueError: when there are fewer than three different lengths, σ is not positive, or ``inputs`` are fewer than two or
            not all measured at the same lengths.

    Example:
        >>> fit = fit_growth([8, 16, 32, 64], [2.0, 2.83, 4.0, 5.66])
        >>> round(fit.alpha, 2), fit.better
        (0.5, 'power law')
    """
    x, y = np.asarray(n, dtype=np.float64), np.asarray(sigma, dtype=np.float64)
    if len(np.unique(x)) < 3:
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

    def residuals(log_m: float) -> Floats:
        shape = np.log(n) - np.log(n + np.exp(log_m))
        return np.asarray(log_y - shape - (log_y - shape).mean(), dtype=np.float64)

    found = minimize_scalar(lambda m: float(np.square(residuals(m)).sum()), bounds=(-20.0, 20.0), method="bounded")
    log_m = float(found.x)
    shape = np.log(n) - np.log(n + np.exp(log_m))
    return log_m, float((log_y - shape).mean()), float(np.square(residuals(log_m)).sum())


def _aic(rss: float, points: int) -> float:
    return points * float(np.log(max(rss, np.finfo(np.float64).tiny) / points)) + 6
