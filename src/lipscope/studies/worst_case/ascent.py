"""Projected gradient ascent on σ: how large can the local Lipschitz constant of a layer become?

All restarts move together. One step of one restart is

    z⁺ = project( z + η·G + μ·(z − z⁻) ),     G_i = g_i/‖g_i‖,   g = ∂⟨u, J v⟩/∂z

with the top singular pair (u, v) held fixed, then a few warm Krylov steps for the new pair. Every token moves by the
same length, whatever its share of the gradient: the set is a product of balls, so this is still an ascent direction, and
it is what brings tokens of small gradient to their place. A step is kept only when the Ritz value grows; it is a lower
bound of σ, so σ at the end is at least what it was at the start, also where singular values cluster and ⟨u, dJ v⟩ is only
a subgradient. On the Krylov space of JᵀJ from v the largest Ritz value θ obeys ‖Jv‖ ≤ θ ≤ σ.

A search begins at every construction, at the inputs the user hands over, at jittered copies of these, and at noise.

The upper end of an interval needs a start vector that the Jacobian does not depend on (docs/theory/solver.md). An input that
was found by measuring may depend on every start vector of the search, so its σ is measured with another one (``unseen``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.norms import Normalisation
from lipscope.attention.operators import AttentionOperator
from lipscope.attention.variants import Variant
from lipscope.bounds.domain import Domain, domain_of
from lipscope.doors import at_least
from lipscope.measure.gradient import sigma_gradient
from lipscope.measure.sigma import check_tokens, local_lipschitz
from lipscope.rounding import Shown, interval
from lipscope.spectral.basis import scaled_norm, unit_rows
from lipscope.spectral.golub_kahan import GolubKahan
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Auto, Solver
from lipscope.studies.worst_case.constructions import Construction, check_length, construct

Given: TypeAlias = Tensor | Mapping[str, Tensor] | None
Progress: TypeAlias = Callable[[int, int, str], None]

_FIRST_STEP, _GROW, _SHRINK, _LONGEST, _SHORTEST = 0.3, 1.2, 0.4, 4.0, 1e-9
_MOMENTUM = 0.9
_WARM_STEPS = 4
_LOOK_AROUND = 25
_JITTER = 0.1
_RADII = (1.0, 0.5, 0.25)


@dataclass(frozen=True, eq=False, repr=False)
class Ascent(Shown):
    """What a search found."""

    tokens: Tensor  # the best input (n, d)
    sigma: SpectralNorm  # its σ, with the least upper end known, certified where that is less
    history: Tensor  # lower bounds of σ per step and restart, (steps + 1, restarts); constant once a restart has stopped
    labels: tuple[str, ...]  # where each restart began
    starts: Tensor  # σ measured at the start of each restart, (restarts,)
    ends: Tensor  # σ measured at its end
    best: int  # the restart that won
    domain: str  # the set in words
    inputs: Tensor  # the end of every restart, (restarts, n, d)
    stopped: str  # ``"converged"`` when every restart stood still before its steps were used up, else ``"steps"``
    # Seed of the start vector that measured ``sigma``, see ``unseen``; with it as the ``seed`` of the solver the tokens give
    # the same interval again.
    start_seed: int

    def to_rows(self) -> list[dict[str, Any]]:
        """One per restart: where it began, and its σ there and at its end."""
        found = zip(self.labels, self.starts.tolist(), self.ends.tolist(), strict=True)
        return [{"label": label, "start": start, "end": end} for label, start, end in found]

    def __str__(self) -> str:
        s = self.sigma
        return (
            f"worst σ found on {self.domain}, n = {self.tokens.shape[0]}: σ ∈ {interval(s.lower, s.upper, 6)} "
            f"({s.upper_kind}), from {self.labels[self.best]} (σ = {float(self.starts[self.best]):.6g}), "
            f"{len(self.history) - 1} steps, {len(self.labels)} restarts, {self.stopped}"
        )


def maximise(
    attention: Attention | Variant,
    n: int,
    *,
    radius: float | None = None,
    norm: Normalisation | None = None,
    restarts: int = 16,
    steps: int = 200,
    seed: int = 0,
    starts: Given = None,
    built: tuple[Construction, ...] | None = None,
    tolerance: float = 1e-4,
    patience: int = 30,
    solver: Solver | None = None,
    dtype: torch.dtype = torch.float64,
    progress: Progress | None = None,
) -> Ascent:
    """Search for the input with the largest σ: sup of σ(X) over tokens in a set, from below.

    Args:
        attention: the layer, masked or not; for one head alone pass ``attention.head(h)``. For a ``Variant`` there are no
            constructions but those of dot-product attention with the same weights, as starts.
        n: number of tokens.
        radius: R, for tokens of norm at most R.
        norm: instead of a radius, a ``LayerNorm`` or ``RMSNorm``: tokens in its image.
        restarts: number of starts: all constructions, all of ``starts``, and then noise at several radii and constructions
            moved a little. More when the first two are more.
        steps: most steps per restart.
        seed: seed of the noise.
        starts: inputs to start from, e.g. real activations, (n, d) or (B, n, d), or several such tensors by name; moved to
            the nearest point of the set.
        built: constructions to start from, when they are known already; all of them are built otherwise.
        tolerance: a restart stops when σ has grown by less than this, relatively, over ``patience`` steps.
        patience: see ``tolerance``.
        solver: how the final values are measured; ``Auto()`` by default. The winner is measured with another seed.
        dtype: dtype of the search, float64 or float32; values are measured in float64.
        progress: called with (steps done, steps, what).

    Returns:
        An ``Ascent``. Its σ is at least that of every start, as all of them are measured too.

    Raises:
        ValueError: when n < 2, the radius is not positive, or the starts do not fit.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> layer = lipscope.Attention(-W, W, W, scale=1.0)             # A = −I: tokens repel
        >>> found = lipscope.studies.worst_case.maximise(layer, 4, radius=1.0, restarts=8, steps=50)
        >>> built = lipscope.studies.worst_case.construct(layer, 4, radius=1.0)
        >>> all(found.sigma.estimate >= c.sigma.estimate * (1 - 1e-9) for c in built)
        True
    """
    domain = domain_of(radius, norm, attention.width)
    plain = attention if isinstance(attention, Attention) else attention.plain
    check_length(plain, n)
    at_least(1, restarts=restarts, steps=steps, patience=patience)
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must lie strictly between 0 and 1, got {tolerance:g}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be float32 or float64, got {dtype}")
    built = construct(plain, n, radius=radius, norm=norm) if built is None else built
    begin, labels = gather_starts(domain, built, starts, restarts, n, attention.width, seed)
    search = _Search(attention.to(dtype), domain, begin.to(dtype, copy=True), seed)
    taken = search.run(steps, tolerance, patience, progress)
    precise = attention.to(torch.float64)
    candidates = torch.cat([domain.tokens(begin), domain.tokens(search.z.double())])
    measured = local_lipschitz(precise, candidates, solver=solver or Auto(), certificate=False).estimate
    first, last = measured[: len(begin)], measured[len(begin) :]
    winner = int(measured.argmax())
    start_seed = unseen(candidates[winner], *(W for W in (plain.q, plain.k, plain.v, plain.out) if W is not None))
    final = replace(solver or Auto(), seed=start_seed) if isinstance(solver, GolubKahan | None) else solver
    return Ascent(
        tokens=candidates[winner],
        sigma=local_lipschitz(precise, candidates[winner], solver=final, certificate=isinstance(attention, Attention)),
        history=torch.stack(search.history),
        labels=labels,
        starts=first,
        # A start whose σ the search underestimated counts as the end it might have been.
        ends=torch.maximum(first, last),
        best=winner % len(begin),
        domain=str(domain),
        inputs=domain.tokens(search.z.double()),
        stopped="converged" if taken < steps or not search.active.numel() else "steps",
        start_seed=start_seed,
    )


def unseen(*measured: Tensor) -> int:
    """The seed of a start vector that no search has seen: a digest of all that is measured with it.

    A search asks for no digests, and whoever looked for an input that suits its own would need about 1/δ tries. The same
    input has the same seed, so that runs can be repeated bit for bit.
    """
    digest = hashlib.sha256()
    for tensor in measured:
        digest.update(tensor.detach().double().cpu().contiguous().numpy().tobytes())
    # As many bits as a number of a JSON file keeps.
    return int.from_bytes(digest.digest()[:7], "big") >> 3


class _Search:
    """All restarts of one search, and which of them still move."""

    def __init__(self, layer: Attention | Variant, domain: Domain, z: Tensor, seed: int) -> None:
        self.layer, self.domain, self.z, self.seed = layer, domain, z, seed
        self.active = torch.arange(z.shape[0])
        operator = self._at(z)
        self.pair = cold_pair(operator, seed=seed)
        self.direction = self._direction(operator, self.pair)
        self.step = torch.full((z.shape[0],), _FIRST_STEP, dtype=torch.float64)
        self.moved = torch.zeros_like(z)
        self.history = [self.pair.theta.clone()]

    def run(self, steps: int, tolerance: float, patience: int, report: Progress | None) -> int:
        """Move until nothing moves any more, or the steps are used up; returns how many were taken."""
        for step in range(1, steps + 1):
            self._advance()
            if step % _LOOK_AROUND == 0:
                self._look_around(step)
            self.history.append(self.pair.theta.clone())
            self._retire(step, tolerance, patience)
            if report is not None:
                report(step, steps, f"σ ≥ {float(self.pair.theta.max()):.4g}")
            if not self.active.numel():
                return step
        return steps

    def _advance(self) -> None:
        """One trial per active restart, kept when it is better."""
        now = self.active
        move = (self.step[now] * self.domain.size).to(self.z)[:, None, None] * self.direction[now]
        trial = self.domain.project(self.z[now] + move + _MOMENTUM * self.moved[now])
        operator = self._at(trial)
        pair = warm_pair(operator, self.pair.right[now], _WARM_STEPS)
        better = pair.theta > self.pair.theta[now]
        kept, items = better.nonzero()[:, 0], now[better]
        self.moved[now] = 0.0
        if kept.numel():
            self.moved[items] = trial[kept] - self.z[items]
            self.z[items] = trial[kept]
            self._replace(items, pair.select(kept), operator if kept.numel() == now.numel() else operator.select(kept))
        self.step[now] = torch.where(better, self.step[now] * _GROW, self.step[now] * _SHRINK).clamp(max=_LONGEST)

    def _look_around(self, step: int) -> None:
        """Warm starts follow one singular vector; a random start finds out whether another has overtaken it."""
        now = self.active
        operator = self._at(self.z[now])
        fresh = cold_pair(operator, seed=self.seed + step)
        better = (fresh.theta > self.pair.theta[now]).nonzero()[:, 0]
        if better.numel():
            self._replace(now[better], fresh.select(better), operator.select(better))

    def _retire(self, step: int, tolerance: float, patience: int) -> None:
        still = self.step[self.active] > _SHORTEST
        if step >= patience:
            before = self.history[step - patience][self.active]
            still &= self.pair.theta[self.active] > before * (1 + tolerance)
        self.active = self.active[still]

    def _at(self, z: Tensor) -> AttentionOperator:
        return AttentionOperator.at(self.layer, self.domain.tokens(z), tiled=False)

    def _replace(self, items: Tensor, pair: TopPair, operator: AttentionOperator) -> None:
        for known, new in zip(self.pair, pair, strict=True):
            known[items] = new
        self.direction[items] = self._direction(operator, pair)

    def _direction(self, operator: AttentionOperator, pair: TopPair) -> Tensor:
        g = self.domain.pull_back(sigma_gradient(operator, pair.left, pair.right))
        norms = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
        # Tokens whose gradient is rounding stay where they are.
        floor = 1e3 * torch.finfo(g.dtype).eps * norms.amax(1, keepdim=True)
        return torch.where(norms > floor, g / norms.clamp_min(torch.finfo(g.dtype).tiny), torch.zeros_like(g))


def gather_starts(
    domain: Domain, built: tuple[Construction, ...], given: Given, restarts: int, n: int, width: int, seed: int
) -> tuple[Tensor, tuple[str, ...]]:
    """All constructions and all given inputs; then jittered constructions and noise in turns until there are ``restarts``.

    Their coordinates in the set (B, n, d), float64, and their names. A given input outside the set is moved to its nearest
    point.
    """
    parts = [(c.name, domain.coordinates(c.tokens.double())) for c in built]
    named = {} if given is None else {"given": given} if isinstance(given, Tensor) else dict(given)
    for name, inputs in named.items():
        batch = check_tokens(inputs).double().cpu()
        if batch.shape[1:] != (n, width):
            raise ValueError(f"starts must have shape ({n}, {width}) or (B, {n}, {width}), got {tuple(inputs.shape)}")
        parts += [(f"{name} {i}" if len(batch) > 1 else name, domain.coordinates(X)) for i, X in enumerate(batch)]
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.nn.functional.normalize(torch.randn(n, width, generator=generator, dtype=torch.float64), dim=-1)

    known = list(parts)
    for index in range(max(0, restarts - len(known))):
        # One in three moves a known input a little, which breaks its symmetry; the others are tokens of a given norm.
        if index % 3 == 2 and known:
            name, z = known[index // 3 % len(known)]
            parts.append((f"{name}, jittered", domain.project(z + _JITTER * domain.size * noise())))
        else:
            share = _RADII[index // 3 % len(_RADII)] if index % 3 == 0 else 1.0
            parts.append((f"noise {share:g}", domain.project(share * domain.size * noise())))
    return torch.stack([z for _, z in parts]), tuple(name for name, _ in parts)


class TopPair(NamedTuple):
    """Approximate top singular triplets of a batch: θ (B,) ≤ σ in float64, unit u (B, M) and v (B, N), θ = ⟨u, Jv⟩."""

    theta: Tensor
    left: Tensor
    right: Tensor

    def select(self, items: Tensor) -> TopPair:
        """Keep the listed items."""
        return TopPair(*(part[items] for part in self))


def cold_pair(operator: Operator, *, rtol: float = 1e-3, seed: int = 0) -> TopPair:
    """The top pairs from a random start."""
    output = GolubKahan(rtol=rtol, vectors=True, interval=None, seed=seed).solve(operator)
    right, left = output.vectors
    return TopPair(output.estimate, left[:, 0], right[:, 0])


def warm_pair(operator: Operator, start: Tensor, steps: int) -> TopPair:
    """The top Ritz pairs after ``steps`` products J·v and one less Jᵀ·u, from unit vectors ``start`` (B, N)."""
    V, images = start[..., None], []
    for left in reversed(range(min(steps, *operator.shape))):
        images.append(operator.matvec(V[..., -1]))
        if left:  # one more direction of the Krylov space, or any other where it is exhausted
            further = operator.rmatvec(unit_rows(images[-1], scaled_norm(images[-1])))
            V = torch.cat([V, torch.linalg.qr(torch.cat([V, further[..., None]], -1)).Q[..., -1:]], -1)
    U, theta, W = torch.linalg.svd(torch.stack(images, -1), full_matrices=False)
    return TopPair(theta[:, 0].double(), U[..., 0], (V @ W.mT[..., :1])[..., 0])
