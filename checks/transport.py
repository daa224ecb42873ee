"""Distances between measures against SciPy's linear programme, and what attention does to them against its constants."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.optimize import linprog
from scipy.sparse import coo_array

from draws import as_layer, rounded
from ledger import Ledger
from lipscope.bounds import sets
from lipscope.studies.mean_field import Measure, wasserstein
from oracle import FLOATS, Array, Problem, forward

# Powers of distances by the linear programme are known up to this part of the largest.
PROGRAMME = 1e-7


def programme(x: Array, y: Array, a: Array, b: Array, p: float, allowed: Array) -> float:
    """The least Σπ‖x_i − y_j‖^p over plans π between masses a and b that use allowed pairs only."""
    i, j = allowed.nonzero()
    cost = np.linalg.norm(x[i] - y[j], axis=-1) ** p
    size = cost.max() or 1.0
    k = np.arange(len(i))
    A = coo_array((np.ones(2 * len(k)), (np.concatenate([i, len(a) + j]), np.concatenate([k, k]))))
    found: Any = linprog(cost / size, A_eq=A.toarray(), b_eq=np.concatenate([a, b]), method="highs")
    if not found.success:
        raise ArithmeticError(found.message)
    return float(found.fun) * size


def cloud(rng: np.random.Generator, places: Array, masses: Array, d: int) -> tuple[Array, Array, Array]:
    """Atoms, one to three at every position: positions, weights, points."""
    counts = rng.integers(1, 4, size=len(places))
    s = np.repeat(places, counts)
    w = np.concatenate([m * (np.full(c, 1 / c) if rng.random() < 0.5 else rng.dirichlet(np.ones(c)))
                        for m, c in zip(masses, counts, strict=True)])  # fmt: skip
    return s, w / w.sum(), rng.normal(size=(len(s), d))


def check_transport(seed: int, number: int) -> Ledger:
    """One pair of measures and one layer."""
    ledger, rng = Ledger(), np.random.default_rng([seed, number, 3])
    where = f"--seed {seed} --only transport:{number}"
    d, p, causal = int(rng.integers(1, 4)), float(rng.choice([1, 1.5, 2, 3])), bool(number % 2)
    places = np.sort(rng.choice(8, size=int(rng.integers(1, 4)) if causal else 1, replace=False)) / 8
    masses = rng.dirichlet(np.ones(len(places)))
    s, a, x = cloud(rng, places, masses, d)
    t, b, y = cloud(rng, places, masses, d)
    if rng.random() < 0.5:
        t, b, y = s, a, x + 10 ** rng.uniform(-3, 0) * rng.normal(size=x.shape)
    radius = 10 ** rng.uniform(-0.5, 0.5)
    longest = max(np.linalg.norm(x, axis=-1).max(), np.linalg.norm(y, axis=-1).max())
    x, y = x * radius / longest, y * radius / longest
    allowed = s[:, None] == t[None, :]

    def distance(x: Array, y: Array) -> tuple[float, float]:
        """W_p, or d_p, and how far it may be off."""
        cost = programme(x, y, a, b, p, allowed)
        slack = PROGRAMME * float(np.linalg.norm(x[:, None] - y[None], axis=-1).max()) ** p
        return cost ** (1 / p), (cost + slack) ** (1 / p) - max(0.0, cost - slack) ** (1 / p)

    def measure(points: Array, weights: Array, at: Array) -> Measure:
        return Measure(torch.from_numpy(points), torch.from_numpy(weights), torch.from_numpy(at) if causal else None)

    before, off = distance(x, y)
    name = f"transport: {'d_p of masked measures' if causal else 'W_p'}, p = {p:g}"
    value = ledger.guarded(name, where, lambda: wasserstein(measure(x, a, s), measure(y, b, t), p))
    if value is None:
        return ledger
    wrong = not abs(value - before) <= off + 1e-9 * before
    close = min(value / before, before / value) if min(value, before) > 0 else math.inf
    ledger.record(name, close, f"{value!r} against {before!r} at {where}" if wrong else None)
    heads, w = int(rng.integers(1, 3)), 2
    sharp = 10 ** rng.uniform(-1, 0.5) / radius**2
    q, k, v = (rounded(size * rng.normal(size=(heads, w, d))) for size in (sharp, 1.0, 1.0))
    layer = Problem(q, rounded(-q) if rng.random() < 0.4 else k, v, None, np.ones((1, 1, 1), dtype=bool), scale=1.0)
    after, blur = distance(image(layer, x, a, s, causal), image(layer, y, b, t, causal))
    if before > 100 * off:
        for bound, constant in constants(as_layer(layer, "causal" if causal else "full"), radius * (1 + 1e-12), p, causal):
            ratio = constant * before / after if after > 0 else math.inf
            broken = constant * (before + off) < after - blur
            ledger.record(bound, ratio, f"{constant!r} < {after / before!r} at {where}" if broken else None)
    return ledger


def image(layer: Problem, points: Array, weights: Array, at: Array, causal: bool) -> Array:
    """The atoms after attention, under which a weight is a term log w_j of the scores."""
    n = len(points)
    seen = (at[None, :] <= at[:, None])[None] if causal else np.ones((1, n, n), dtype=bool)
    weighted = replace(layer, seen=seen, added=np.broadcast_to(np.log(weights), (1, n, n)).copy())
    return np.asarray(forward(weighted.on(FLOATS), torch.from_numpy(points), FLOATS).numpy())


def constants(layer: Any, radius: float, p: float, causal: bool) -> list[tuple[str, float]]:
    """Bounds for the constant of mean-field attention with respect to W_p, or d_p."""
    refined = sets.refined_masked if causal else sets.refined_unmasked
    name = f"mean field: refined, {'d_p' if causal else 'W_p'}, p = {p:g}"
    found = [(name, refined(layer, radius, **({} if p == 2 else {"p": p})).value)] if p == 2 or takes_p(refined) else []
    if not causal:
        found.append((f"mean field: castin2024.meanfield, p = {p:g}", sets.castin2024_meanfield(layer, radius, p=p).value))
    return found


def takes_p(function: Any) -> bool:
    """Whether a bound is for other exponents than two."""
    return "p" in inspect.signature(function).parameters
