"""The exponent of attention for n → ∞: by how much a token of a set can prefer another one to itself.

    E = max (y − x)ᵀ(Ax + c) over tokens x, y of the set          c = τW_Kᵀb_Q

Up to a polynomial, the largest σ over all n is e^{E/2}, with and without the causal mask; proofs in docs/theory. From above,
within a cell of tokens whose scores differ by at most s, a row shares its attention with its own cell, so that the column
sums of P are at most N(s)e^{E+s} if N(s) cells cover the set. From below: two groups of tokens at a pair that attains E.

A set is x = Dz + β with ‖z‖ ≤ ρ, or = ρ (``Domain``); in coordinates z a head has A → DᵀAD and c → Dᵀ(Aβ + c). For a head
that does not see some direction of a sphere it is no smaller than its ball: tokens differ there as much as they need to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal, Full
from lipscope.attention.validation import times_power
from lipscope.bounds.bound import OURS, Bound, bound, refuse_others
from lipscope.bounds.constants import Constants, HeadConstants
from lipscope.bounds.domain import Domain, ball
from lipscope.bounds.sets import causal_column_sum, causal_gain, exp, times
from lipscope.bounds.weights import layer_weights, over_heads, spectral

Pair: TypeAlias = tuple[Tensor, Tensor]
# Gaussian kernels: cells of width 0.79 in every coordinate give e^{0.79²/2}(2 + √(2π)/0.79) = 7.068 per dimension.
_KERNEL = 7.07
_TINY = 1e-100


@bound("covering.exponent", needs="radius", masks="full, causal", without="additive, softcap, rotary")
def covering_exponent(
    layer: Attention, radius: float, n: int | None = None, *, domain: Domain | None = None
) -> Bound | None:
    """The bounds ``refined.unmasked`` and ``refined.masked`` with min(e^{2h}, N(s)e^{E+s}) for e^{2h}: any A, any n.

    Sharp in the exponent for every A, where those are for repulsive heads only; the polynomial N makes it the larger one at
    small R. Tokens in B_R, or in ``domain``: then it bounds σ there, and is a Lipschitz constant if the set is convex.
    """
    refuse_others("covering.exponent", layer)
    if domain is None and radius == 0:
        return None
    length, R = math.inf if n is None else n, radius if domain is None else domain.radius
    precise, causal = layer.to(torch.float64), isinstance(layer.mask, Causal)
    where = Domain(R, R) if domain is None else domain
    # In a unit of length near R, a power of two: squares of tiny and huge radii would leave the range of floats.
    unit, power = math.frexp(R) if domain is None else (R, 0)
    scaled = replace(precise, q=times_power(precise.q, power), k=times_power(precise.k, power))
    heads = [HeadOnSet(scaled, h, domain or ball(unit)) for h in range(layer.heads)]
    tops = [exp(head.log_column()) for head in heads]

    def value(c: HeadConstants, top: float) -> float:
        h = c.half_range(R)
        top = min(top, exp(2 * h))
        if causal:
            column = times(c.mean_and_keys(R), math.sqrt(causal_column_sum(length, h)))
            return min(column, causal_gain(c, R, top)) + c.queries(R)
        column = top if n is None else min(top, n / (1 + (n - 1) * exp(-2 * h)))
        return times(c.mean_and_keys(R), math.sqrt(column)) + c.queries(R)

    constants = Constants.of(layer)
    total = over_heads(map(value, constants.plain, tops), constants.out, map(value, constants.image, tops))
    given = {"R": R, "E": max(head.largest() for head in heads)} | ({} if n is None else {"n": n})
    words = f"{where}, {'any n' if n is None else f'n = {n}'}, {'causal mask' if causal else 'unmasked'}"
    return Bound("covering.exponent", total, "set", words, OURS, given)


@dataclass(frozen=True)
class Regime:
    """How the worst σ of one head over a set of tokens depends on n; n may be too large to write down, hence logarithms."""

    head: int
    exponent: float  # E of an explicit pair
    largest: float  # E at most
    # log n up to which the worst σ is at least ½√(n−1)·‖V(u − w)‖/‖u − w‖, or ½√(n−1)·‖V‖ where that is 0: n = 1 + e^E.
    # 0 where V may be 0
    log_growth: float
    log_plateau: float  # log n at which the bound for n is that for every n, up to a factor below 5.4: N(s)e^{E+s} or e^{2h}

    def at(self, n: int) -> str:
        """Where n tokens are: ``"√n growth"``, ``"plateau"``, or ``"between"``; ``"plateau"`` where the borders have met."""
        return "plateau" if math.log(n) >= self.log_plateau else "√n growth" if math.log(n) <= self.log_growth else "between"


def regimes(layer: Attention, domain: Domain) -> tuple[Regime, ...]:
    """The borders in n of every head, full or causal mask: √n growth below the first, a level upper bound above the second.

    Raises:
        ValueError: for other masks, sinks, a soft-cap, rotary embeddings and additive terms.

    Example:
        >>> I = torch.eye(2, dtype=torch.float64)
        >>> [round(r.exponent, 6) for r in regimes(Attention(-I, I, I, scale=1.0), ball(3.0))]      # 2γR²
        [18.0]
    """
    further = (layer.sinks, layer.softcap, layer.rotary, layer.bias)
    if not isinstance(layer.mask, Full | Causal) or any(term is not None for term in further):
        raise ValueError("regimes hold for full and causal masks without sinks, soft-cap, rotary embeddings, additive terms")
    precise, constants, weights, found = layer.to(torch.float64), Constants.of(layer), layer_weights(layer), []
    for h in range(layer.heads):
        head = HeadOnSet(precise, h, domain)
        u, w = best_pair(head.A, head.size, shift=head.shift, surface=head.surface)
        E = max(0.0, float((u - w) @ (head.A @ w + head.shift)) - head.off)
        top = min(2 * constants.plain[h].half_range(domain.radius), head.log_column())
        of = weights.image[h]
        grows, level = of.value > 2 * of.value_error, of.value > 0
        found.append(Regime(h, E, head.largest(), E + math.log1p(math.exp(-E)) if grows else 0.0, top if level else 0.0))
    return tuple(found)


class HeadOnSet:
    """The scores of one head of a float64 layer on a set of tokens, in coordinates z of what the head sees.

    Attributes:
        A: DᵀAD (r, r).
        shift: Dᵀ(Aβ + c).
        size: ρ.
        surface: whether ‖z‖ = ρ in these coordinates; else ‖z‖ ≤ ρ.
        off: what rounding of the products may do to E.
    """

    def __init__(self, layer: Attention, head: int, domain: Domain) -> None:
        """Describe a head on a set."""
        single = layer.head(head)
        Q, K = single.tau * single.q.detach(), single.k.detach()
        bias = Q.new_zeros(Q.shape[0]) if single.q_bias is None else single.tau * single.q_bias.detach()
        D, beta = domain.affine(Q)
        QD, KD = Q @ D, K @ D
        free = domain.free_directions(Q)
        self.surface = domain.fixed and 2 * len(Q) >= free.shape[1]
        self._basis = free if 2 * len(Q) >= free.shape[1] else torch.linalg.qr(torch.cat([QD, KD]).mT).Q
        self.A = (KD @ self._basis).mT @ (QD @ self._basis)
        self.shift = (KD @ self._basis).mT @ (Q @ beta + bias)
        self.size, self.domain = domain.size, domain
        # What rounding of the products may do to A and to the shift, which may cancel: four of length d, and one of d_head.
        stretch = math.sqrt(float(D.abs().sum(0).max() * D.abs().sum(1).max()))
        query, key, offset, beyond = (float(torch.linalg.vector_norm(t)) for t in (Q, K, beta, bias))
        rounding = (6 * Q.shape[1] + Q.shape[0] + 8) * torch.finfo(Q.dtype).eps / 2 * stretch * key
        self._A_off, self._shift_off = rounding * stretch * query, rounding * (query * offset + beyond)
        self.off = 2 * self.size * (self.size * self._A_off + self._shift_off)

    def largest(self) -> float:
        """An upper bound for E: for every λ > 0, ρ‖g‖ ≤ λ‖g‖²/2 + ρ²/(2λ), and a quadratic on a ball has an exact dual.

        The best λ gives E itself where c = 0, on a ball always and on a sphere in three or more dimensions.
        """
        c, rho = self.shift, self.size
        symmetric, gram, pulled = (self.A + self.A.mT) / 2, self.A.mT @ self.A, self.A.mT @ self.shift
        offset = float(torch.linalg.vector_norm(c))
        scale = spectral(self.A) + offset / rho
        # Without squares of scores that leave the range of floats; 0 for none.
        if not _TINY < scale * rho * rho < 1 / _TINY:
            return 2 * scale * rho * rho + self.off
        # Multipliers of the constraint: any above the largest eigenvalue is valid, none below 0 on a ball.
        levels = torch.cat([torch.zeros(1), 10 ** torch.linspace(-9, 3, 241)]).to(c) * scale

        def dual(log_weight: float) -> float:
            weight = math.exp(log_weight) / scale
            Q = weight / 2 * gram - symmetric
            rounding = 1e-13 * len(c) * (weight / 2 * scale + 1) * scale
            if offset == 0:
                top = float(torch.linalg.eigvalsh(Q)[-1]) + rounding
                return rho**2 * ((top if self.surface else max(top, 0.0)) + 1 / (2 * weight))
            values, vectors = torch.linalg.eigh(Q)
            linear = (vectors.mT @ (weight * pulled - c)).square()
            top = float(values[-1]) + rounding
            multipliers = (top if self.surface else max(top, 0.0)) + levels[1:]
            best = float((multipliers * rho**2 + (linear / (multipliers[:, None] - values)).sum(-1) / 4).min())
            return best + weight / 2 * offset**2 + rho**2 / (2 * weight)

        # Convex in the weight, so that walking downhill finds the least; every value is a bound.
        at, step = 0.0, 1.0
        best = dual(at)
        while step > 1e-7:
            value, place = min((dual(at + step), at + step), (dual(at - step), at - step))
            best, at, step = (value, place, step) if value < best else (best, at, step / 2)
        return max(best, 0.0) + self.off

    def log_column(self) -> float:
        """The logarithm of a bound for the column sums of P, every n: E + min_s(s + log N(s)).

        Scores of a row change by at most ‖Mᵀ(z − z')‖, M = ρA, or √2[ρA, c] with c. The ellipsoid Mᵀz has half-axes
        t_1 ≥ t_2 ≥ … Beyond the first k it is 2t_{k+1} wide; these are covered by ⌈2t_1/r⌉ cells of diameter r for k = 1,
        else by min((1 + 4t_1/r)^k, Π_i √(2 + 32t_i²/r²)). On a sphere A = γI, γ ≥ 0, makes a Gaussian kernel, with at most
        7.07^d; any other A and c at most e^{2ρ²‖A − γI‖ + 2ρ‖c‖} times that.
        """
        M, offset = self.size * self.A, float(torch.linalg.vector_norm(self.shift))
        if offset > 0:
            M = math.sqrt(2) * torch.cat([M, self.shift[:, None]], dim=1)
        off = math.sqrt(2) * (self.size * self._A_off + self._shift_off)
        axes = self.size * (torch.linalg.svdvals(M) * (1 + 1e-12) + off)
        longest = float(axes[0])
        if not _TINY < longest < 1 / _TINY:
            return self.largest() + 2 * longest
        tails = torch.cat([axes, axes.new_zeros(1)])
        counts = torch.arange(len(tails), dtype=axes.dtype, device=axes.device)
        cells = 2 * longest
        for step in range(61):
            s = 2 * longest * min(1.0, 0.02 / longest) ** (step / 60)
            r = (s * s - 4 * tails.square()).clamp_min(0).sqrt()
            even = counts * torch.log1p(4 * longest / r)
            even[1] = torch.ceil(2 * longest / r[1]).log()
            each = (torch.log(2 + 32 * (axes / r[:, None]).square()) / 2).tril(-1).sum(-1)
            cells = min(cells, s + float(torch.minimum(even, each)[r > 0].min()))
        found = self.largest() + cells
        if self.surface:
            d, gamma = len(self.A), max(0.0, float(self.A.trace()) / len(self.A))
            rest = spectral(self.A - gamma * torch.eye(d, dtype=self.A.dtype, device=self.A.device))
            rest, offset = rest + self._A_off, offset + self._shift_off
            found = min(found, d * math.log(_KERNEL) + 2 * self.size**2 * rest + 2 * self.size * offset)
        return found

    @cached_property
    def best(self) -> Pair:
        """Tokens u, w of the set with large E = (u − w)ᵀ(Aw + c)."""
        return self.place(*best_pair(self.A, self.size, shift=self.shift, surface=self.surface))

    def place(self, u: Tensor, w: Tensor) -> Pair:
        """Coordinates of the head → tokens of the set; what is missing of ‖z‖ = ρ goes where the head does not look."""
        z = torch.stack([u, w]) @ self._basis.mT
        if self.domain.fixed and not self.surface:
            free = self.domain.free_directions(z)
            unseen = free - self._basis @ (self._basis.mT @ free)
            direction = unseen[:, torch.linalg.vector_norm(unseen, dim=0).argmax()]
            missing = (self.size**2 - z.square().sum(-1, keepdim=True)).clamp_min(0).sqrt()
            z = z + missing * direction / torch.linalg.vector_norm(direction)
        tokens = self.domain.tokens(self.domain.project(z))
        return tokens[0], tokens[1]


def best_pair(A: Tensor, radius: float, steps: int = 200, *, shift: Tensor | None = None, surface: bool = False) -> Pair:
    """Tokens u, w in B_R with large E = R‖Aw‖ − wᵀAw, u = R·Aw/‖Aw‖: projected gradient ascent from several starts.

    With ``shift`` c, the keys' side of a query bias, Aw + c stands for Aw; with ``surface`` both have norm R.
    """
    c = A.new_zeros(A.shape[0]) if shift is None else shift
    basis = _span(A, c)
    if basis is not None and not surface:
        # E sees w through Aw, Aᵀw and c only.
        u, w = best_pair(basis.mT @ A @ basis, radius, steps, shift=basis.mT @ c)
        return basis @ u, basis @ w
    d = A.shape[0]
    generator = torch.Generator().manual_seed(0)
    starts = [torch.linalg.svd(A).Vh, -torch.eye(d, dtype=A.dtype), torch.linalg.eigh((A + A.mT) / 2).eigenvectors.mT]
    starts.append(torch.randn(8, d, generator=generator, dtype=A.dtype))
    W = torch.cat(starts)
    W = radius * W / torch.linalg.vector_norm(W, dim=-1, keepdim=True).clamp_min(1e-300)
    size = float(torch.linalg.matrix_norm(A, 2))
    step = 0.5 / max(size, 1e-300)

    def energy(W: Tensor) -> Tensor:
        images = W @ A.mT + c
        energies: Tensor = radius * torch.linalg.vector_norm(images, dim=-1) - (W * images).sum(-1)
        return energies

    best = W.clone()
    for _ in range(steps):
        images = W @ A.mT + c
        unit = images / torch.linalg.vector_norm(images, dim=-1, keepdim=True).clamp_min(1e-300)
        W = W + step * (radius * unit @ A - images - W @ A)
        norms = torch.linalg.vector_norm(W, dim=-1, keepdim=True)
        W = W * torch.clamp(radius / norms.clamp_min(1e-300), max=math.inf if surface else 1.0)
        best = torch.where((energy(W) > energy(best))[:, None], W, best)
    w = best[energy(best).argmax()]
    image = A @ w + c
    norm = float(torch.linalg.vector_norm(image))
    return (radius * image / norm if norm > 0 else w), w


def _span(A: Tensor, c: Tensor) -> Tensor | None:
    """An orthonormal basis (d, r) of the rows and columns of A and of c; None when that is not much less than everything."""
    left, values, right = torch.linalg.svd(A)
    rank = int((values > 1e-13 * values[0]).sum())
    if 2 * rank + 1 > 0.75 * A.shape[0]:
        return None
    basis: Tensor = torch.linalg.qr(torch.cat([left[:, :rank], right[:rank].mT, c[:, None]], dim=1)).Q
    return basis
