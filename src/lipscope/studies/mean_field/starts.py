"""Where the search for large W_2 ratios starts: measures at which attention is known to be rough, and changes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lipscope.bounds import constructions, lower
from lipscope.spectral.solvers import Auto
from lipscope.studies.mean_field.attention import AnyMeasure, MeanFieldAttention
from lipscope.studies.mean_field.laws import Ball
from lipscope.studies.mean_field.measures import Measure
from lipscope.studies.mean_field.operator import local_constant

# Lighter atoms would carry less mass than transport can account for.
_LIGHTEST = 1e-12


def two_diracs(attention: MeanFieldAttention, radius: float) -> Measure:
    """A light and a heavy Dirac in B_R at which the local W_2 constant is large: the mean-field limit of ``lower.groups``.

    For every head the places u, w with the largest E = (u−w)ᵀAw are tried, with the light mass 1/(1 + te^E) at u, where t
    maximises √t/(1+t)·(1 + tE/(1+t)) as in ``lower.meanfield``. Unmasked layers only.

    Example:
        >>> import lipscope
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> mu = two_diracs(MeanFieldAttention(lipscope.Attention(-W, W, W, scale=1.0)), radius=1.0)
        >>> mu.size, round(mu.radius, 12)
        (2, 1.0)
    """
    if attention.causal:
        raise ValueError("two_diracs is for unmasked layers: a causal layer maps measures with positions")
    best, found = -1.0, None
    for head in range(attention.layer.heads):
        A, _ = constructions.matrices(attention.layer, head)
        candidates = [lower.best_pair(A, radius)]
        candidates += [(-radius * e, radius * e) for gamma, e in lower.real_eigenvectors(A) if gamma < 0][:1]
        for u, w in candidates:
            E = max(0.0, float((u - w) @ A @ w))
            t = torch.logspace(-4, 2, 601, dtype=torch.float64)
            t_best = float(t[(t.sqrt() / (1 + t) * (1 + t * E / (1 + t))).argmax()])
            light = max(_LIGHTEST, 1 / (1 + t_best * math.exp(min(E, 600.0))))
            mu = Measure(inside_ball(torch.stack([u, w]), radius), torch.tensor([light, 1 - light]))
            value = float(local_constant(attention, mu, solver=Auto(rtol=1e-3)).estimate)
            if value > best:
                best, found = value, mu
    assert found is not None
    return found


def starting_measures(attention: MeanFieldAttention, n: int, radius: float, restarts: int, seed: int) -> list[AnyMeasure]:
    """Two Diracs (unmasked), the constructions with n tokens, and random clouds in the ball."""
    starts: list[AnyMeasure] = [] if attention.causal else [two_diracs(attention, radius)]
    if n > 1:
        worst = constructions.measured(attention.layer, radius, n).tokens
        assert worst is not None
        starts.append(attention.measure_of(inside_ball(worst, radius)))
    law = Ball(attention.layer.width, radius)
    return starts + [attention.measure_of(law.sample(n, seed + k)) for k in range(restarts)]


def starting_pairs(
    attention: MeanFieldAttention, mu: AnyMeasure, radius: float, seed: int
) -> Iterator[tuple[AnyMeasure, AnyMeasure, str]]:
    """Pairs (μ, ν, change) with ν a change of μ.

    Inserting, deleting and duplicating tokens changes the law of positions, so that d_2 is infinite: these changes are made
    to measures without positions only. Splitting every atom into two that part is possible everywhere.
    """
    generator = torch.Generator().manual_seed(seed)
    mu = mu.support()
    worst = local_constant(attention, mu, solver=Auto(vectors=True, seed=seed)).right
    assert worst is not None
    # Small in the metric of the measure, and for every atom: a light one moves far.
    direction = worst[0] / float(worst[0].norm(dim=-1).max())
    step = 1e-3 * radius * direction
    # On the boundary of the ball only one of the two signs may lead inwards.
    outwards = float((mu.weights[:, None] * mu.points * step).sum())
    yield mu, mu.push(inside_ball(mu.points - math.copysign(1, outwards) * step, radius)), "move"
    yield mu, mu.push(inside_ball(mu.points + 0.1 * radius * _noise(mu.points, generator), radius)), "move"
    halves = mu.split()
    yield mu, halves.push(inside_ball(halves.points + 0.1 * radius * _noise(halves.points, generator), radius)), "split"
    if not isinstance(mu, Measure) or not mu.is_uniform:
        return
    X, which = mu.points, int(torch.randint(mu.size, (), generator=generator))
    yield mu, Measure(torch.cat([X, Ball(mu.dimension, radius).sample(1, seed)])), "insert"
    if len(torch.unique(X, dim=0)) > 1:
        yield mu, Measure(torch.cat([X[:which], X[which + 1 :]])), "delete"
        yield mu, Measure(torch.cat([X, X[which : which + 1]])), "duplicate"


def inside_ball(points: Tensor, radius: float) -> Tensor:
    """Points outside the ball, moved to its boundary."""
    norms: Tensor = points.norm(dim=-1, keepdim=True)
    # A hair inside, so that rounding does not leave them outside.
    return torch.where(norms > radius, points * (radius * (1 - 1e-15) / norms.clamp_min(1e-300)), points)


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64)
