"""Optimal transport between measures: W_p on R^d, and the conditional distance d_p on [0,1] × R^d. All by POT.

    W_p(μ,ν)^p = min_π Σ π_ij ‖x_i − y_j‖^p              π ≥ 0 with marginals μ and ν
    d_p(μ̄,ν̄)^p = ∫ W_p(μ^s, ν^s)^p dθ(s)                 +∞ unless both have the same law θ of positions

POT finds the plan (``ot.emd``, ``ot.emd2_lazy`` when the cost matrix would be large, ``ot.emd_1d`` when d = 1); the cost is
then summed over the plan from the differences x_i − y_j themselves.

**Rounding.** ‖x‖² + ‖y‖² − 2x·y would leave an error of eps·‖x‖², that is √eps·‖x‖ in W_2; differences do not, and W_p(μ,μ)
is exactly zero. Uniform clouds are handed over with integer masses, which add up without rounding. Other weights are known
to one part in 10¹⁶, so masses of about n·eps may end up misplaced: W_p is then known up to (n·eps)^{1/p} times the diameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.spatial.distance import cdist
from torch import Tensor

from lipscope.studies.mean_field.measures import Measure

# Positions that differ by less are the same; so are masses at a position, relatively.
POSITION_TOLERANCE = 1e-12
MASS_TOLERANCE = 1e-9
# Entries of the cost matrix above which it is not formed (p = 1 and p = 2): 128 MB.
LAZY_ABOVE = 1 << 24
_MOST_STEPS = 50_000_000

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Plan:
    """A transport plan in sparse form: ``mass[k]`` goes from atom ``source[k]`` to atom ``target[k]``."""

    source: Tensor
    target: Tensor
    mass: Tensor


def wasserstein(mu: Measure, nu: Measure, p: float = 2.0) -> float:
    """W_p(μ, ν) for the Euclidean distance on R^d, exact up to rounding; d_p(μ̄, ν̄) for measures with positions.

    Args:
        mu: a measure.
        nu: another one of the same dimension, with any number of atoms; with positions when μ has them.
        p: the exponent, at least 1.

    Returns:
        The distance, in the unit of the points; infinite when the laws of the positions differ.

    Raises:
        ValueError: when p < 1 or the dimensions differ.
        TypeError: when only one of them has positions.

    Example:
        >>> wasserstein(Measure([[0.0], [1.0]]), Measure([[0.0], [1.0], [2.0], [3.0]]), p=1)
        1.0
        >>> X = torch.zeros(2, 1)
        >>> wasserstein(Measure.from_tokens(X, ordered=True), Measure.from_tokens(X + 3, ordered=True))
        3.0
        >>> wasserstein(Measure.from_tokens(X, ordered=True), Measure.from_tokens(X[:1], ordered=True))
        inf
    """
    _check(mu, nu, p)
    if mu.positions is not None and not same_positions(mu, nu):
        return math.inf
    plan = optimal_plan(mu, nu, p)
    gaps = mu.points[plan.source] - nu.points[plan.target]
    # Powers of tiny or huge distances would leave the range of floats: measure in units of the largest one.
    unit = float(gaps.abs().max())
    if unit == 0:
        return 0.0
    lengths = torch.linalg.vector_norm(gaps / unit, dim=-1)
    return unit * math.pow(float((plan.mass * lengths**p).sum()), 1 / p)


def optimal_plan(mu: Measure, nu: Measure, p: float = 2.0) -> Plan:
    """A plan that attains the distance, with atoms numbered as in the measures; refuses different laws of positions."""
    _check(mu, nu, p)
    if mu.positions is not None and nu.positions is not None:
        if not same_positions(mu, nu):
            raise ValueError("the measures have different laws of positions, so that no plan keeps them: d_p is infinite")
        places, masses = mu.position_marginal()
        if len(places) == mu.size == nu.size:
            # One atom at every position on both sides: each goes to the one that shares its position.
            return Plan(mu.positions.argsort(), nu.positions.argsort(), masses)
    parts: list[Plan] = []
    for i, j, a, b, mass in by_position(mu, nu):
        inside = _plan(mu.points[i], nu.points[j], a, b, p)
        parts.append(Plan(i[inside.source], j[inside.target], mass * inside.mass))
    return Plan(*(torch.cat([getattr(part, name) for part in parts]) for name in ("source", "target", "mass")))


def same_positions(mu: Measure, nu: Measure) -> bool:
    """Whether both measures have the same first marginal θ, up to rounding."""
    (s, a), (t, b) = mu.position_marginal(), nu.position_marginal()
    if len(s) != len(t) or bool(((s - t).abs() > POSITION_TOLERANCE).any()):
        return False
    return bool(((a - b).abs() <= MASS_TOLERANCE * torch.maximum(a, b)).all())


def by_position(mu: Measure, nu: Measure) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """At every position: the atoms of μ and ν that carry mass there, their shares of it, and it; without positions, all."""
    if mu.positions is None:
        i, j = mu.weights.nonzero()[:, 0], nu.weights.nonzero()[:, 0]
        yield i, j, mu.weights[i], nu.weights[j], torch.ones((), dtype=torch.float64)
        return
    places_mu, masses = mu.position_marginal()
    places_nu, _ = nu.position_marginal()
    for s, t, mass in zip(places_mu, places_nu, masses, strict=True):
        i = ((mu.positions == s) & (mu.weights > 0)).nonzero()[:, 0]
        j = ((nu.positions == t) & (nu.weights > 0)).nonzero()[:, 0]
        a, b = mu.weights[i], nu.weights[j]
        yield i, j, a / a.sum(), b / b.sum(), mass


def _plan(x: Tensor, y: Tensor, a: Tensor, b: Tensor, p: float) -> Plan:
    """POT's plan between points of positive weight."""
    if min(len(a), len(b)) == 1:
        # All mass starts or ends in one place: there is only one plan.
        source, target = torch.broadcast_tensors(torch.arange(len(a)), torch.arange(len(b)))
        return Plan(source, target, b if len(a) == 1 else a)
    # One shift and one scale for both clouds change no plan, and keep the solver's numbers near one.
    centre = (x.mean(0) + y.mean(0)) / 2
    x, y = x - centre, y - centre
    unit = max(float(x.abs().max()), float(y.abs().max())) or 1.0
    total, masses = 1.0, (_to_total_one(a.numpy()), _to_total_one(b.numpy()))
    if bool((a == a[0]).all() and (b == b[0]).all()):  # integers, so that sums of them carry no rounding
        total = float(math.lcm(len(a), len(b)))
        masses = (np.full(len(a), total / len(a)), np.full(len(b), total / len(b)))
    found = _solve((x / unit).numpy(), (y / unit).numpy(), *masses, p)
    source, target, mass = (torch.from_numpy(part[found[2] > 0]) for part in found)
    return Plan(source, target, mass / total)


def _to_total_one(masses: Floats) -> Floats:
    """The masses with the last digits of the largest one changed so that they add up to exactly 1 in floating point.

    POT multiplies by the quotient of the totals; when that is not exactly 1, equal weights on both sides become unequal.
    """
    masses = masses.copy()
    for _ in range(4):
        masses[masses.argmax()] += 1 - masses.sum()
    return masses


def _solve(x: Floats, y: Floats, a: Floats, b: Floats, p: float) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats]:
    try:
        import ot  # type: ignore[import-untyped]  # POT ships no types
    except ImportError:
        raise ImportError("transport distances need POT: pip install 'lipscope[ot]'") from None
    log: dict[str, Any] = {"warning": None}
    if x.shape[1] == 1:
        plan = ot.emd_1d(x[:, 0], y[:, 0], a, b, metric="minkowski", p=p, dense=False)
    elif len(x) * len(y) > LAZY_ABOVE and p in (1, 2):
        metric = "sqeuclidean" if p == 2 else "euclidean"
        _, log = ot.lp.emd2_lazy(x, y, a, b, metric=metric, numItermax=_MOST_STEPS, log=True)
        plan = log["G"]
    else:
        cost = cdist(x, y, "sqeuclidean") if p == 2 else cdist(x, y) ** p
        dense, log = ot.emd(a, b, cost / (cost.max() or 1.0), numItermax=_MOST_STEPS, log=True)
        plan = sparse.coo_array(dense)
    if log["warning"] is not None:
        raise ArithmeticError(f"the transport solver did not finish: {log['warning']}. Use fewer atoms.")
    return plan.row.astype(np.int64), plan.col.astype(np.int64), plan.data


def _check(mu: Measure, nu: Measure, p: float) -> None:
    if (mu.positions is None) != (nu.positions is None):
        raise TypeError("no distance between a measure with positions and one without: give both positions, or neither")
    if mu.dimension != nu.dimension:
        raise ValueError(f"the measures have different dimensions, {mu.dimension} and {nu.dimension}")
    if not 1 <= p < math.inf:
        why = ": below 1 the cost is not a distance" if p < 1 else ""
        raise ValueError(f"p must be at least 1 and finite, got {p}{why}")
