"""‖J‖_F of a map without a closed form: from random directions, with an interval that is a theorem.

For g standard normal E‖Jᵀg‖² = ‖J‖_F² = F (Hutchinson 1990). Let T be the mean over m directions, s_i the singular values.
log E exp(t·m·T) = −½ m Σ log(1 − 2t·s_i²) is a sum of convex functions of s_i², zero at zero. As s_i² ≤ σ² and Σ s_i² = F,
it is at most that of F/σ² values σ². So Chernoff's bound for a χ² variable with m·F/σ² degrees of freedom, times σ²/m,
holds for T: either tail beyond T has probability at most

    exp(−m·(T − F + F·log(F/T))/(2σ²)).

The interval is the set of all F for which this is at least half of what may fail. Its width falls like 1/√(m·stable rank),
so that a few directions are enough where the stable rank is large. Hutch++ (Meyer, Musco, Musco, Woodruff 2021) looks for
leading directions first: docs/concepts/what-sigma-predicts.md compares the two at equal cost.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from scipy.special import lambertw
from torch import Tensor

from lipscope.attention.validation import times_power
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SpectralNorm

DIRECTIONS, FAILS = 8, 0.05
SEED = 1729


def with_typical(result: SpectralNorm, operator: Operator, inputs: int, power: int = 0) -> SpectralNorm:
    """A flat batch of σ with ‖J‖_F of ``operator`` as typical gain and stable rank: estimated, or exact where σ is.

    ``inputs`` is the number of input coordinates of the map, and σ is 2^power times that of the operator.
    """
    found = times_power(result.estimate, -power)
    # In units of σ no square leaves the range of floats.
    unit = torch.where(found > 0, found, 1.0)
    gain = times_power(unit / math.sqrt(inputs), power)
    if "probabilistic" not in result.upper_kind:
        size = (operator.to_dense().double() / unit[:, None, None]).flatten(1).norm(dim=1)
        return replace(result, typical=gain * size, stable_rank=size.square())
    generator, squares = torch.Generator().manual_seed(SEED), torch.zeros_like(unit)
    for _ in range(DIRECTIONS):
        g = torch.randn(operator.batch, operator.shape[0], generator=generator, dtype=operator.dtype)
        image = operator.rmatvec(g.to(operator.device)).double()
        squares += (image / unit[:, None]).square().sum(1) / DIRECTIONS
    low, high = interval(squares, (times_power(result.upper, -power) / unit).square(), DIRECTIONS, min(operator.shape))
    # σ is one of the singular values.
    least, squares = result.lower / math.sqrt(inputs), torch.where(found > 0, squares.clamp_min(1.0), squares)
    return replace(
        result,
        typical=gain * squares.sqrt(),
        typical_low=torch.maximum(gain * low * (1 - result.rounding), least),
        typical_high=gain * high * (1 + result.rounding),
        stable_rank=squares,
    )


def interval(squares: Tensor, largest: Tensor, m: int, side: int) -> tuple[Tensor, Tensor]:
    """The ends of ‖J‖_F, from the mean of ‖Jᵀg‖² over m directions, that fail with probability 0.05 at most.

    ``largest`` is an upper end of ‖J‖², and J has ``side`` singular values.
    """
    # f·log f − f + 1 = c with f = F/T, by Lambert's W: f = e^(1 + w) with w·e^w = (c − 1)/e.
    c = (2 * math.log(2 / FAILS) / m * largest / squares).cpu().numpy()
    low, high = (
        torch.from_numpy(1 + lambertw((c.clip(0, most) - 1) / math.e, branch).real).to(squares).div(2).exp()
        for branch, most in ((-1, 1.0), (0, math.inf))
    )
    ends = (squares.sqrt() * end for end in (low, torch.minimum(high, (side * largest / squares).sqrt())))
    low, high = (end.nan_to_num(0.0) for end in ends)  # of a map that is zero
    return low, high
