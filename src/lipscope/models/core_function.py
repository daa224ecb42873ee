"""The attention core as a pair of autograd Functions: backward is the analytic Jᵀ, its backward is the analytic J.

    forward      (q, k, v) ↦ O
    backward     g ↦ Jᵀg            one pass of ``Linearisation.vjp``
    its backward u ↦ J·u            one pass of ``Linearisation.jvp``: Jᵀg is linear in g

so that J·u of any map with attention inside is obtained by differentiating g ↦ Jᵀg, without forward mode and without
keeping the many intermediate n×n tensors that autograd would keep for a softmax differentiated twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lipscope.attention.core import Linearisation, Triple, group_queries, ungroup_queries
from lipscope.attention.scores import ScoreRule
from lipscope.attention.tiled import AnyLinearisation, TiledLinearisation, prefers_tiles


def attention_core(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
    """Heads' outputs (B, n, H, dv) for scaled queries (B, H, n, dk), keys (B, Hkv, m, dk) and values (B, Hkv, m, dv)."""
    output: Tensor = _Core.apply(q, k, v, rule)  # type: ignore[no-untyped-call]
    return output


class _Core(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        tiled = prefers_tiles(rule, q.shape[0] * q.shape[1], q.shape[2], k.shape[2], q)
        core: AnyLinearisation = (TiledLinearisation if tiled else Linearisation).at(q, k, v, rule)
        ctx.core, ctx.heads = core, q.shape[1]
        ctx.save_for_backward(q, k, v)
        # A copy, because the saved core must not hold the very tensor that holds this node.
        return ungroup_queries(core.o, q.shape[1]).transpose(1, 2).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grad_outputs
        gq, gk, gv = _Pullback.apply(g, ctx.core, ctx.heads, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return gq, gk, gv, None


class _Pullback(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, core: AnyLinearisation, heads: int, q: Tensor, k: Tensor, v: Tensor) -> Triple:
        ctx.core, ctx.heads = core, heads
        ctx.shapes = (q.shape, k.shape, v.shape)
        gq, gk, gv = core.vjp(group_queries(g.transpose(1, 2), k.shape[1]))
        return ungroup_queries(gq, heads), gk, gv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = grad_outputs
        product = ctx.core.jvp(group_queries(dq, ctx.shapes[1][1]), dk, dv)
        # Jᵀg also depends on q, k and v. That derivative is not provided: NaN stays unseen when only J·u is asked for,
        # and spoils visibly what would otherwise be silently wrong.
        missing = [product.new_full((), float("nan")).expand(shape) for shape in ctx.shapes]
        return ungroup_queries(product, ctx.heads).transpose(1, 2), None, None, *missing
