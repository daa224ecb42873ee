"""What happens to attention as n → ∞ when tokens are drawn from a fixed law.

For every length n and every repeat two independent clouds μ_n, ν_n are drawn, and measured are

    σ(μ_n)                                     the local constant, as an interval
    W_2(F(μ_n), F(ν_n)) / W_2(μ_n, ν_n)        two samples of the same law
    W_2(F(μ_n), F(μ_n + token)) / W_2(…)       one token inserted (unmasked only)

On a law with support in a ball B_R all three stay below the ``refined`` constant for every n, and σ settles on a plateau. A
Gaussian has no such R: the norms of n draws grow without bound, and so does the bound evaluated at the largest of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from lipscope.bounds.sets import refined_masked, refined_unmasked
from lipscope.doors import at_least, positive
from lipscope.rounding import Shown, round_up
from lipscope.runs.fit import GrowthFit, PlateauFit, fit_growth, fit_plateau
from lipscope.spectral.solvers import Solver
from lipscope.studies.mean_field.attention import MeanFieldAttention, local_constant
from lipscope.studies.mean_field.measures import Law, Measure
from lipscope.studies.mean_field.transport import wasserstein
from lipscope.studies.rows import Row, study_row

# More draws per length than anybody waits for.
MOST_REPEATS = 100_000


@dataclass(frozen=True)
class StudyRow:
    """One draw."""

    n: int
    repeat: int  # which draw of this length
    lower: float  # σ(μ_n) is at least this
    sigma: float
    upper: float  # σ(μ_n) is at most this, in the sense of ``upper_kind``
    upper_kind: str  # exact or probabilistic
    delta: float | None  # failure probability of a probabilistic upper end, else None
    radius: float  # largest norm of a token of μ_n and ν_n
    bound: float  # ``refined`` constant at that radius, for every n
    distance: float | None  # W_2(μ_n, ν_n), or d_2; None beyond the longest transport
    ratio: float | None  # W_2(F(μ_n), F(ν_n)) over it; None when both draws are the same measure
    # The ratio for one inserted token; None under the causal mask, where d_2 is infinite, and when the token leaves the
    # measure as it is.
    insertion: float | None


@dataclass(frozen=True, repr=False)
class PlateauStudy(Shown):
    """The draws of one study, and what they say about n → ∞."""

    rows: tuple[StudyRow, ...]  # one per length and repeat
    law: str  # the law in words
    law_radius: float  # its radius, infinite for a Gaussian
    mask: str  # full or causal
    bound: float  # ``refined`` constant for every n at the law's radius; infinite when that is
    seed: int

    @property
    def lengths(self) -> list[int]:
        """The lengths, increasing."""
        return sorted({row.n for row in self.rows})

    def medians(self, name: str) -> list[float | None]:
        """Median of a column at every length; None where it was not measured."""
        by_length = ([getattr(row, name) for row in self.rows if row.n == n] for n in self.lengths)
        known = ([value for value in values if value is not None] for values in by_length)
        return [median(values) if values else None for values in known]

    def growth(self) -> GrowthFit | None:
        """σ ~ n^α over the longer half of the lengths: α = 0 on a plateau. None with fewer than three lengths there."""
        longer = self.lengths[len(self.lengths) // 2 :] if len(self.lengths) > 4 else self.lengths
        kept = [row for row in self.rows if row.n in longer]
        if len(longer) < 3 or min(row.sigma for row in kept) <= 0:
            return None
        return fit_growth([row.n for row in kept], [row.sigma for row in kept], seed=self.seed)

    def plateau(self) -> PlateauFit | None:
        """σ_∞ and the rate; None with fewer than four lengths."""
        if len(self.lengths) < 4:
            return None
        return fit_plateau([row.n for row in self.rows], [row.sigma for row in self.rows], seed=self.seed)

    def to_rows(self) -> list[Row]:
        """One row per draw, with the columns of a scan: σ as an interval, W_2 ratios, and the refined constant."""
        same: Row = {"mask": self.mask, "dtype": "float64"}
        if math.isfinite(self.bound):
            same |= {"radius_norm": self.law_radius, "refined_global": self.bound}
        rows = []
        for draw in self.rows:
            known = vars(draw) | same | {"estimate": draw.sigma, "input": draw.repeat}
            own = {name: getattr(draw, name) for name in ("radius", "bound", "distance", "ratio", "insertion")}
            rows.append(study_row(known, kind=f"mean field, {self.law}", law=self.law, **own))
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Numbers and strings only; infinite numbers become None."""
        plateau, growth = self.plateau(), self.growth()
        told = ("rate_is_determined", "is_visible")
        fitted = {} if plateau is None else asdict(plateau) | {name: getattr(plateau, name) for name in told}
        about = {"law": self.law, "law_radius": self.law_radius, "mask": self.mask, "bound": self.bound, "seed": self.seed}
        return _plain(about) | {
            "plateau": _plain(fitted) or None,
            "growth": None if growth is None else _plain(asdict(growth)),
            "rows": [_plain(asdict(row)) for row in self.rows],
        }

    def __str__(self) -> str:
        lines = [f"law {self.law}, mask {self.mask}, n = {', '.join(map(str, self.lengths))}"]
        lines += [str(fit) for fit in (self.plateau(), self.growth()) if fit is not None]
        return "\n  ".join([*lines, self.verdict()])

    def verdict(self) -> str:
        """One sentence on how the measurements stand to the bound."""
        highest = max(row.upper for row in self.rows)
        if math.isinf(self.law_radius):
            norms, bounds = self.medians("radius"), [value for value in self.medians("bound") if value is not None]
            return (
                "the law is not confined to a ball, so no bound of ours holds for every n: "
                f"the largest norm grew from {norms[0]:.3g} to {norms[-1]:.3g}, "
                f"and the refined constant at that norm from {round_up(bounds[0], 3)} to {round_up(bounds[-1], 3)}"
            )
        exceeds = f"no cloud of this law can exceed the refined constant {round_up(self.bound)}"
        return f"every σ drawn is at most {round_up(highest)}, and {exceeds}"


def convergence_study(
    attention: MeanFieldAttention,
    law: Law,
    lengths: Sequence[int],
    *,
    repeats: int = 5,
    seed: int = 0,
    transport_up_to: int = 512,
    solver: Solver | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> PlateauStudy:
    """Measure σ and W_2 ratios of clouds of growing size, drawn from a fixed law.

    Args:
        attention: F, or F^m (then token i of n has position i/n and distances are d_2).
        law: where tokens come from.
        lengths: the n to measure at.
        repeats: independent draws per length.
        seed: seed of all draws; they differ between lengths and repeats.
        transport_up_to: longest n for which transport distances are computed: exact transport takes about n³ steps.
        solver: ``Auto()`` by default.
        progress: called with (done, total, what).

    Raises:
        ValueError: when a length or ``repeats`` is not positive, or the law has another dimension than the layer.

    Example:
        >>> import torch, lipscope
        >>> from lipscope.studies.mean_field import Ball
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> F = MeanFieldAttention(lipscope.Attention(0 * W, W, W))      # every token becomes the mean: σ = 1 for every n
        >>> study = convergence_study(F, Ball(2, 1.0), [4, 8], repeats=1)
        >>> [round(row.sigma, 9) for row in study.rows]
        [1.0, 1.0]
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths must be positive, got {list(lengths)}")
    at_least(1, repeats=repeats)
    if repeats > MOST_REPEATS:
        raise ValueError(f"repeats must be at most {MOST_REPEATS:,}, got {repeats}")
    if law.dimension != attention.layer.width:
        raise ValueError(f"the law lives on R^{law.dimension}, but the layer takes width {attention.layer.width}")
    jobs = [(n, repeat) for n in sorted(set(lengths)) for repeat in range(repeats)]
    rows = []
    for done, (n, repeat) in enumerate(jobs):
        if progress is not None:
            progress(done, len(jobs), f"n = {n}")
        X, Y, extra = law.sample(2 * n + 1, seed + 1_000_003 * (repeat + 1) + 2 * n).split([n, n, 1])
        mu, nu = attention.measure_of(X), attention.measure_of(Y)
        (found,) = local_constant(attention, mu, solver=solver).to_rows()
        interval = {name: found[name] for name in ("lower", "upper", "upper_kind", "delta")}
        radius = max(mu.radius, nu.radius)
        apart = ratio = insertion = None
        if n <= transport_up_to:
            apart, ratio = _ratio(attention, mu, nu)
            if not attention.causal:
                insertion = _ratio(attention, mu, attention.measure_of(torch.cat([X, extra])))[1]
        known: Row = {"distance": apart, "ratio": ratio, "insertion": insertion, "bound": set_bound(attention, radius)}
        rows.append(StudyRow(n=n, repeat=repeat, sigma=found["estimate"], radius=radius, **interval, **known))
    bound = set_bound(attention, law.radius) if math.isfinite(law.radius) else math.inf
    return PlateauStudy(tuple(rows), str(law), law.radius, str(attention.layer.mask), bound, seed)


def set_bound(attention: MeanFieldAttention, radius: float, p: float = 2.0) -> float:
    """The ``refined`` bound for every number of atoms: of the W_p constant, or of the d_p constant of a causal layer."""
    positive(radius=radius)
    return (refined_masked if attention.causal else refined_unmasked)(attention.constants, radius, p=p).value


def _ratio(attention: MeanFieldAttention, mu: Measure, nu: Measure) -> tuple[float, float | None]:
    """The distance and the ratio; a law with atoms may draw the same measure twice, in any order, which has no ratio."""
    apart = wasserstein(mu, nu)
    return apart, None if apart == 0 else wasserstein(attention(mu), attention(nu)) / apart


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """What JSON can say: NaN and infinity become None."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in values.items()}
