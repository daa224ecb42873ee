"""What attention rows look like: entropy, largest logit, and the share of one token and of sinks, with or without tiles.

With s the logits, ℓ_i = log(exp(sink) + Σ_j exp(s_ij)) and P_ij = exp(s_ij − ℓ_i), the entropy of row i is

    −Σ_j P_ij log P_ij = Σ_j P_ij (ℓ_i − s_ij)

so that one pass over the tiles gives it, without an n×n matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipscope.attention.core import Linearisation, ungroup_queries
from lipscope.attention.scores import ScoreRule
from lipscope.attention.tiled import TiledLinearisation, Workspace, core_at, current_tiling


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """One number per input, head and row, each (B, H, n)."""

    entropy: Tensor  # of the attention of the row, in nats
    max_logit: Tensor  # largest visible logit after scale, soft-cap and bias; −inf where nothing is visible
    on_token: Tensor  # attention on the token asked for
    on_sink: Tensor  # attention on sinks


def row_statistics(
    q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, token: Tensor, *, tiled: bool | None = None
) -> RowStatistics:
    """The statistics at scaled queries q (B, H, n, dk), keys k (B, Hkv, m, dk) and values, of which only the shape matters.

    ``token`` (B,) is the token of every input whose share is asked for.

    Example:
        >>> import torch
        >>> q = torch.zeros(1, 1, 4, 2)
        >>> found = row_statistics(q, q, q, ScoreRule(), torch.tensor([0]))
        >>> [round(float(value), 4) for value in (found.entropy[0, 0, 0], found.on_token[0, 0, 0])]
        [1.3863, 0.25]
    """
    # One pass over the tiles after the one that normalises them: nothing is worth keeping.
    core = core_at(q, k, v[..., :1], rule, tiled=tiled, tiling=replace(current_tiling(), keep=0))
    return (
        _from_matrices(core, rule, q.shape[1], token) if isinstance(core, Linearisation) else _from_tiles(core, rule, token)
    )


def _from_matrices(core: Linearisation, rule: ScoreRule, heads: int, token: Tensor) -> RowStatistics:
    P = ungroup_queries(core.P, heads)
    B, H, n, _ = P.shape
    scores, _ = rule.scores(ungroup_queries(core.q @ core.k.transpose(-1, -2), heads))
    on_token = P.gather(-1, token[:, None, None, None].expand(B, H, n, 1))[..., 0]
    on_sink = (1 - P.sum(-1)).clamp_min(0) if rule.sinks is not None else torch.zeros_like(on_token)
    return RowStatistics(-torch.special.xlogy(P, P).sum(-1), scores.amax(-1), on_token, on_sink)


def _from_tiles(core: TiledLinearisation, rule: ScoreRule, token: Tensor) -> RowStatistics:
    space = Workspace(core.queries)
    layout, shape = core.layout, core.peak.shape
    mass, energy, chosen = (core.peak.new_zeros(shape) for _ in range(3))
    top = core.peak.new_full(shape, float("-inf"))
    wanted = token.to(core.peak.device).repeat_interleave(layout.kv_heads)
    for items in core.item_parts():
        for strip in core.strips:
            rows = (items, slice(None), strip.rows)
            for tile in strip.tiles:
                scores, _ = core.scores(items, strip, tile, space)
                top[rows] = torch.maximum(top[rows], scores.amax(-1, keepdim=True))
                below = scores.sub_(core.peak[rows])
                E = below.exp()
                mass[rows] += E.sum(-1, keepdim=True)
                energy[rows] += (E * below.masked_fill_(E == 0, 0.0)).sum(-1, keepdim=True)
                places = torch.arange(tile.columns.start, tile.columns.stop, device=core.peak.device)
                here = (places == wanted[items, None]).to(E)
                chosen[rows] += (E * here[:, None, None, :]).sum(-1, keepdim=True)
    total = torch.where(core.scale > 0, 1 / core.scale, torch.ones_like(core.scale))
    entropy = core.scale * (total.log() * mass - energy)
    # Of rows that see nothing, and of sinks, the rest of the mass.
    on_sink = (1 - core.scale * mass).clamp_min(0) if rule.sinks is not None else torch.zeros_like(mass)

    def by_head(t: Tensor) -> Tensor:
        return t.reshape(layout.inputs, -1, t.shape[2])

    return RowStatistics(by_head(entropy), by_head(top), by_head(core.scale * chosen), by_head(on_sink))
