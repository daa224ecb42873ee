"""How far apart attention can drive two measures: W_p(F(μ), F(ν)) / W_p(μ, ν), measured and maximised over pairs.

Every pair gives a lower bound for the Lipschitz constant of F on measures in the ball B_R. The search ascends the gradient
of the ratio with both transport plans held fixed: the exact gradient wherever the plans are unique (envelope theorem). The
two measures need not have the same number of atoms: inserting, deleting or duplicating a token is a perturbation of the
measure like any other. Under the causal mask the distance is d_p, infinite unless both have the same law of positions; a
token may still fall apart there, into atoms that share its position.

Whatever the search proposes is measured anew by exact transport before it is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipscope.bounds.domain import ball
from lipscope.bounds.exponent import best_pair
from lipscope.bounds.pairs import lower_measured, matrices, real_eigenvectors
from lipscope.doors import at_least
from lipscope.rounding import round_down, round_up
from lipscope.spectral.solvers import Auto
from lipscope.studies.mean_field.attention import MeanFieldAttention, local_constant
from lipscope.studies.mean_field.measures import Ball, Measure
from lipscope.studies.mean_field.study import set_bound
from lipscope.studies.mean_field.transport import Plan, by_position, optimal_plan, same_positions, wasserstein

# Pairs closer than this fraction of R say no more than the local constant, and start to lose digits.
_CLOSEST = 1e-5
# Lighter atoms would carry less mass than transport can account for.
_LIGHTEST = 1e-12


@dataclass(frozen=True, eq=False)
class PairRatio:
    """One pair of measures and what attention does to their distance."""

    ratio: float  # output / input
    input: float  # W_p(μ, ν), or d_p under the causal mask
    output: float  # W_p(F(μ), F(ν)), or d_p
    mu: Measure
    nu: Measure
    # How ν came from μ at the start: ``move``, ``insert``, ``delete``, ``duplicate``, ``split`` or ``given``.
    change: str = "given"
    history: tuple[float, ...] = ()  # the ratio at every step of the search that led here

    def to_row(self) -> dict[str, Any]:
        """Numbers and strings only."""
        names = ("change", "ratio", "input", "output")
        return {name: getattr(self, name) for name in names} | {"atoms_mu": self.mu.size, "atoms_nu": self.nu.size}


@dataclass(frozen=True, eq=False)
class EmpiricalConstant:
    """The largest ratio a search has found, beside what bounds say."""

    best: PairRatio
    pairs: tuple[PairRatio, ...]  # the best pair of every start, largest ratio first
    upper: float  # ``refined`` bound of the Lipschitz constant on measures in B_R, for every number of atoms
    radius: float  # R
    p: float = 2.0  # of W_p, or d_p

    def __str__(self) -> str:
        kind = f"{'W' if self.best.mu.positions is None else 'd'}_{self.p:g}"
        return (
            f"{kind} constant on measures in the ball of radius {self.radius:g}: at least {round_down(self.best.ratio, 6)} "
            f"({self.best.change}: {self.best.mu.size} and {self.best.nu.size} atoms), at most {round_up(self.upper, 6)}"
        )


def pair_ratio(attention: MeanFieldAttention, mu: Measure, nu: Measure, p: float = 2.0, **about: Any) -> PairRatio:
    """W_p(F(μ), F(ν)) / W_p(μ, ν) by exact transport (d_p under the causal mask).

    ``about`` are ``change`` and ``history`` of the result. Refuses measures that are equal, closer than the rounding of
    their weights resolves, or infinitely far apart.

    Example:
        >>> import torch, lipscope
        >>> from lipscope.studies.mean_field import Measure
        >>> W = torch.eye(1, dtype=torch.float64)
        >>> F = MeanFieldAttention(lipscope.Attention(0 * W, W, W))                  # every token becomes the mean
        >>> pair_ratio(F, Measure([[0.0], [1.0]]), Measure([[0.0], [1.0], [2.0]])).ratio     # means ½ and 1
        0.7071067811865475
    """
    before, smallest = wasserstein(mu, nu, p), resolution(mu, nu, p)
    if before == 0:
        raise ValueError("mu and nu are the same measure, so their ratio is 0/0")
    if before <= smallest:
        raise ValueError(
            f"mu and nu are {before:.2g} apart, but their weights are rounded and resolve no distance below {smallest:.2g}: "
            "the ratio would be noise; give both the same weights, or measures farther apart"
        )
    if math.isinf(before):
        raise ValueError("mu and nu have different laws of positions, so d_p is infinite; give both the same positions")
    after = wasserstein(attention(mu), attention(nu), p)
    return PairRatio(after / before, before, after, mu, nu, **about)


def resolution(mu: Measure, nu: Measure, p: float = 2.0) -> float:
    """Distances up to this may be rounding of the weights alone: (n·eps)^{1/p}·max‖x_i − y_j‖, and 0 where masses are exact.

    They are exact between uniform clouds, between the same weights in the same order, and when one side is a single atom.
    With positions each position counts with its mass: (Σ_s θ(s) r_s^p)^{1/p}.

    Example:
        >>> resolution(Measure([[0.0], [1.0]]), Measure([[0.0], [1.0], [2.0]]))
        0.0
    """
    if mu.positions is not None and not same_positions(mu, nu):
        return 0.0  # the distance is infinite
    parts = []
    for i, j, a, b, mass in by_position(mu, nu):
        if not (min(len(a), len(b)) == 1 or (bool((a == a[0]).all()) and bool((b == b[0]).all())) or torch.equal(a, b)):
            farthest = torch.cdist(mu.points[i], nu.points[j], compute_mode="donot_use_mm_for_euclid_dist").max()
            share = math.pow(max(len(a), len(b)) * torch.finfo(torch.float64).eps, 1 / p)
            parts.append((float(mass), float(farthest) * share))
    unit = max((size for _, size in parts), default=0.0)
    if unit == 0:
        return 0.0
    return unit * math.pow(math.fsum(mass * (size / unit) ** p for mass, size in parts), 1 / p)


def transport_cost(plan: Plan, x: Tensor, y: Tensor, p: float = 2.0) -> Tensor:
    """Σ_k mass_k‖x_source − y_target‖^p, differentiable in x and y with the plan held fixed."""
    gaps = x[plan.source] - y[plan.target]
    costs: Tensor = gaps.square().sum(-1) if p == 2 else torch.linalg.vector_norm(gaps, dim=-1) ** p
    return (plan.mass * costs).sum()


def empirical_constant(
    attention: MeanFieldAttention,
    n: int,
    radius: float,
    *,
    restarts: int = 2,
    steps: int = 100,
    seed: int = 0,
    starts: tuple[Measure, ...] = (),
    p: float = 2.0,
    progress: Callable[[int, int, str], None] | None = None,
) -> EmpiricalConstant:
    """The largest W_p ratio that gradient ascent finds over pairs of measures in B_R.

    It starts from the worst known inputs (two Diracs, groups of tokens) and from random clouds. For every start μ and every
    kind of change between μ and ν the points of both ascend the ratio. One ``move`` is a small step in the worst direction
    of the local constant, so the result is not below the local constant of the starts, up to the curvature over that step.

    Args:
        attention: F or F^m.
        n: number of atoms of μ.
        radius: R.
        restarts: random clouds to start from (uniform in the ball).
        steps: gradient steps per start.
        seed: seed of the clouds and of the changes.
        starts: measures to start from as well, for example the two Diracs of ``lipscope.bounds.pairs.lower_meanfield``.
        p: of W_p, or of d_p under the causal mask. The starts are those that are bad for p = 2.
        progress: called with (done, total, what).

    Returns:
        The best pair, measured exactly, with the best of every start.

    Raises:
        ValueError: when n, radius, restarts or steps is not positive, or a start leaves the ball.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> F = MeanFieldAttention(lipscope.Attention(-W, W, W, scale=1.0))
        >>> found = empirical_constant(F, n=4, radius=1.0, restarts=1, steps=20)
        >>> 1.0 < found.best.ratio <= found.upper
        True
    """
    at_least(1, n=n, restarts=restarts, steps=steps)
    upper = set_bound(attention, radius, p)
    for start in starts:
        attention.check(start)
        if start.radius > radius * (1 + 1e-12):
            raise ValueError(f"a start has tokens of norm {start.radius:g}, outside the ball of radius {radius:g}")
    clouds = [*starts, *starting_measures(attention, n, radius, restarts, seed)]
    proposed = [pair for k, mu in enumerate(clouds) for pair in starting_pairs(attention, mu, radius, seed + k)]
    # Changing an atom that hardly weighs anything may be less than the rounding of the weights.
    pairs = [(mu, nu, change) for mu, nu, change in proposed if wasserstein(mu, nu, p) > resolution(mu, nu, p)]
    found = []
    for done, (mu, nu, change) in enumerate(pairs):
        if progress is not None:
            progress(done, len(pairs), change)
        found.append(ascend(attention, mu, nu, radius, p, steps=steps, change=change))
    found.sort(key=lambda pair: -pair.ratio)
    return EmpiricalConstant(found[0], tuple(found), upper, radius, p)


def ascend(
    attention: MeanFieldAttention,
    mu: Measure,
    nu: Measure,
    radius: float,
    p: float = 2.0,
    *,
    steps: int = 100,
    change: str = "given",
) -> PairRatio:
    """Move the points of μ and ν inside B_R so that their ratio grows; weights and positions stay.

    Returns the best pair met, μ and ν themselves included, measured exactly.
    """
    gamma_mu, gamma_nu, inside = attention.finite(mu), attention.finite(nu), ball(radius)
    together = mu.size == nu.size
    X = mu.points.clone().requires_grad_()
    # Equally many atoms: their common motion and their differences are separate unknowns, each with its own step, so that a
    # close pair can travel as one. Else the points of ν are unknowns themselves.
    Z = (nu.points - mu.points if together else nu.points.clone()).requires_grad_()
    apart = min(1.0, float(Z.detach().abs().max()) / radius) if together else 1.0
    optimiser = torch.optim.Adam([{"params": [X], "lr": 0.02 * radius}, {"params": [Z], "lr": 0.02 * radius * apart}])
    best, best_points, history = 0.0, (mu.points, nu.points), []
    for _ in range(steps):
        Y = X + Z if together else Z
        out_X, out_Y = gamma_mu(X), gamma_nu(Y)
        before = transport_cost(optimal_plan(mu.push(X), nu.push(Y), p), X, Y, p)
        after = transport_cost(optimal_plan(mu.push(out_X), nu.push(out_Y), p), out_X, out_Y, p)
        if before.item() <= (_CLOSEST * radius) ** p or after.item() == 0:
            break
        history.append((after.item() / before.item()) ** (1 / p))
        if history[-1] > best:
            best, best_points = history[-1], (X.detach().clone(), Y.detach().clone())
        optimiser.zero_grad()
        # The logarithm of a power of the ratio, so that steps do not depend on the scale of anything.
        torch.log(before / after).backward()
        optimiser.step()
        with torch.no_grad():
            Y = inside.project(X + Z if together else Z)
            X.copy_(inside.project(X))
            Z.copy_(Y - X if together else Y)
    about = {"change": change, "history": tuple(history)}
    # X + (Y − X) may round to a hair outside the ball.
    return pair_ratio(attention, mu.push(best_points[0]), nu.push(inside.project(best_points[1])), p, **about)


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
        A, _ = matrices(attention.layer, head)
        candidates = [best_pair(A, radius)]
        candidates += [(-radius * e, radius * e) for gamma, e in real_eigenvectors(A) if gamma < 0][:1]
        for u, w in candidates:
            E = max(0.0, float((u - w) @ A @ w))
            t = torch.logspace(-4, 2, 601, dtype=torch.float64)
            t_best = float(t[(t.sqrt() / (1 + t) * (1 + t * E / (1 + t))).argmax()])
            light = max(_LIGHTEST, 1 / (1 + t_best * math.exp(min(E, 600.0))))
            mu = Measure(ball(radius).project(torch.stack([u, w])), torch.tensor([light, 1 - light]))
            value = float(local_constant(attention, mu, solver=Auto(rtol=1e-3)).estimate)
            if value > best:
                best, found = value, mu
    assert found is not None
    return found


def starting_measures(attention: MeanFieldAttention, n: int, radius: float, restarts: int, seed: int) -> list[Measure]:
    """Two Diracs (unmasked), the constructions with n tokens, and random clouds in the ball."""
    starts: list[Measure] = [] if attention.causal else [two_diracs(attention, radius)]
    if n > 1:
        worst = lower_measured(attention.layer, radius, n)
        assert worst is not None
        assert worst.tokens is not None
        starts.append(attention.measure_of(ball(radius).project(worst.tokens)))
    law = Ball(attention.layer.width, radius)
    return starts + [attention.measure_of(law.sample(n, seed + k)) for k in range(restarts)]


def starting_pairs(
    attention: MeanFieldAttention, mu: Measure, radius: float, seed: int
) -> Iterator[tuple[Measure, Measure, str]]:
    """Pairs (μ, ν, change) with ν a change of μ.

    Inserting, deleting and duplicating tokens changes the law of positions, so that d_2 is infinite: these changes are made
    to measures without positions only. Splitting every atom into two that part is possible everywhere.
    """
    generator, inside = torch.Generator().manual_seed(seed), ball(radius)

    def noise(at: Measure) -> Tensor:
        return torch.randn(at.points.shape, generator=generator, dtype=torch.float64)

    mu = mu.support()
    worst = local_constant(attention, mu, solver=Auto(vectors=True, seed=seed)).right
    assert worst is not None
    # Small in the metric of the measure, and for every atom: a light one moves far.
    direction = worst[0] / float(worst[0].norm(dim=-1).max())
    step = 1e-3 * radius * direction
    # On the boundary of the ball only one of the two signs may lead inwards.
    outwards = float((mu.weights[:, None] * mu.points * step).sum())
    yield mu, mu.push(inside.project(mu.points - math.copysign(1, outwards) * step)), "move"
    yield mu, mu.push(inside.project(mu.points + 0.1 * radius * noise(mu))), "move"
    halves = mu.split()
    yield mu, halves.push(inside.project(halves.points + 0.1 * radius * noise(halves))), "split"
    if mu.positions is not None or not mu.is_uniform:
        return
    X, which = mu.points, int(torch.randint(mu.size, (), generator=generator))
    yield mu, Measure(torch.cat([X, Ball(mu.dimension, radius).sample(1, seed)])), "insert"
    if len(torch.unique(X, dim=0)) > 1:
        yield mu, Measure(torch.cat([X[:which], X[which + 1 :]])), "delete"
        yield mu, Measure(torch.cat([X, X[which : which + 1]])), "duplicate"
