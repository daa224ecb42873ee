"""How much the scores of a head must shrink: the largest γ ≤ 1 with which the target is met.

The scores of a head are s_ij = γ·τ q_i·k_j + B_ij (soft-capped before B_ij is added, where there is a cap), so with
r_ij = τ q_i·k_j the largest logit stays below t when γ r_ij ≤ c_ij for every visible pair, c_ij = t − B_ij: a closed form.
σ is no simple function of γ (at γ = 0 every token attends evenly, and W_V alone counts), so its γ is found by search from 1
downwards, and what was found is a value that was measured.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.measure.sigma import sigma
from lipscope.models.seam import CoreCall
from lipscope.spectral.solvers import Solver


class Factors(NamedTuple):
    """What a head of a layer needs."""

    gamma: Tensor  # the factor of its scores, (H,); 0 where the target cannot be met
    lowest: Tensor  # the least value that was reached on the way, (H,)


def raw_scores(call: CoreCall) -> Tensor:
    """τ q_i·k_j (B, H, n, n) of one call of the attention core, one key head per query head."""
    return call.q @ call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1).mT


def largest_logits(call: CoreCall, gamma: Tensor | float = 1.0) -> Tensor:
    """The largest visible logit of every head (H,) when its scores are multiplied by ``gamma``."""
    raw = raw_scores(call).double()
    factor = gamma[:, None, None].to(raw) if isinstance(gamma, Tensor) else gamma
    return call.rule.scores(factor * raw)[0].amax((0, 2, 3))


def factors_for_logits(call: CoreCall, target: float) -> Factors:
    """The largest γ ≤ 1 per head with which no visible logit exceeds ``target``."""
    raw = raw_scores(call).double()
    visible = call.rule.scores(raw)[0] > -torch.inf
    headroom = torch.full_like(raw, target) - (0 if call.rule.additive is None else call.rule.additive)
    if call.rule.softcap is not None:
        capped = (headroom / call.rule.softcap).clamp(-1, 1)
        headroom = call.rule.softcap * torch.atanh(capped)
    limit = (headroom / raw).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    rising, falling = visible & (raw > 0), visible & (raw < 0)
    most = limit.masked_fill(~rising, torch.inf).amin((0, 2, 3)).clamp(max=1.0)
    least = limit.masked_fill(~falling, -torch.inf).amax((0, 2, 3))
    even = (visible & (raw == 0) & (headroom < 0)).amax((0, 2, 3))
    met = (most > 0) & (most >= least) & ~even
    # Where no factor is enough: the least value over a range of factors, each of which can be had.
    tried = [largest_logits(call, g) for g in (*_RANGE, 0.0)] if not bool(met.all()) else []
    lowest = torch.stack(tried).amin(0) if tried else torch.full_like(most, target)
    return Factors(torch.where(met, most, torch.zeros_like(most)), lowest)


def factors_for_sigma(layer: Attention, X: Tensor, target: float, solver: Solver) -> Factors:
    """A γ ≤ 1 per head with which the upper end of σ stays below ``target`` at all inputs X (B, n, d).

    From 1 downwards in steps of √2, then of 4 towards even attention (γ = 0); the first that is small enough, refined by
    bisection towards its predecessor.
    """
    heads = layer.heads
    lowest = torch.full((heads,), torch.inf, dtype=torch.float64)
    good, bad = torch.zeros(heads, dtype=torch.float64), torch.ones(heads, dtype=torch.float64)
    hopeful = good == 0
    for gamma in (*_RANGE, 0.0, *_BELOW):
        open_ = (good == 0) & hopeful
        if not bool(open_.any()):
            break
        values = head_sigma(layer, X, torch.full((heads,), gamma), solver)
        met = values <= target
        if gamma == 0 or gamma in _RANGE:
            lowest = torch.minimum(lowest, values)
        if gamma == 0:
            # Below the range: only where even attention meets the target there is something to find.
            hopeful = met
            continue
        good = torch.where(open_ & met, torch.full_like(good, gamma), good)
        bad = torch.where(open_ & ~met, torch.full_like(bad, gamma), bad)
    searching = (good > 0) & (good < 1)
    for _ in range(_BISECTIONS if bool(searching.any()) else 0):
        middle = torch.where(searching, (good * bad).sqrt(), good.clamp_min(_RANGE[-1]))
        met = head_sigma(layer, X, middle, solver) <= target
        good = torch.where(searching & met, middle, good)
        bad = torch.where(searching & ~met, middle, bad)
    return Factors(good, lowest)


def head_sigma(layer: Attention, X: Tensor, gamma: Tensor, solver: Solver) -> Tensor:
    """The upper end of σ of every head (H,) with its scores, hence its queries, times ``gamma``; the largest over X."""
    rows = gamma.to(layer.q).repeat_interleave(layer.head_width)
    bias = None if layer.q_bias is None else layer.q_bias * rows
    operator = dataclasses.replace(layer, q=layer.q * rows[:, None], q_bias=bias).operator(X, "head")
    upper: Tensor = sigma(operator, solver, scope="head", shape=(operator.batch // layer.heads, layer.heads)).upper
    return upper.amax(0).cpu()


# Factors that are tried: 1, 1/√2, … 1/256.
_RANGE = tuple(2.0 ** (-k / 2) for k in range(17))
# And those that are tried when scores are so large that these are not small enough: 1/1024, 1/4096, … 2⁻⁶⁰.
_BELOW = tuple(4.0**-k for k in range(5, 31))
_BISECTIONS = 6


def split_factors(gamma: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Factors of the queries (H,) and of the keys (Hkv,) that multiply the scores of head h by γ_h.

    Example:
        >>> split_factors(torch.tensor([0.25, 1.0]), 1)
        (tensor([0.2500, 1.0000]), tensor([1.]))
        >>> split_factors(torch.tensor([0.25, 1.0]), 2)
        (tensor([0.5000, 1.0000]), tensor([0.5000, 1.0000]))
    """
    k = gamma.reshape(kv_heads, -1).amax(1).sqrt()
    return gamma / k.repeat_interleave(gamma.shape[0] // kv_heads), k
