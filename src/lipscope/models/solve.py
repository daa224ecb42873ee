"""σ of one layer at recorded tokens: the Jacobian of a scope as an operator, solved, with its least upper end."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lipscope.attention.layer import Attention
from lipscope.attention.operators import AttentionOperator, HeadOperator
from lipscope.measure.certificate import head_items
from lipscope.measure.scopes import check_scope
from lipscope.models.anatomy import Layer
from lipscope.models.capture import Recording
from lipscope.models.scopes import HeadOfOperator, scope_operator, scope_tokens
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SolverOutput, SpectralNorm, dtype_name, reshape_batch, summarise
from lipscope.spectral.solvers import Solver


def jacobian(
    model: nn.Module, layers: list[Layer], where: Layer, recording: Recording, scope: str, plain: Attention | None
) -> Operator:
    """The Jacobian of a scope at the recorded tokens, analytic when the layer is known as an ``Attention``."""
    check_scope(scope)
    if plain is not None and scope in ("attention", "head"):
        X = scope_tokens(where, recording, scope).contiguous()
        return AttentionOperator.at(plain, X) if scope == "attention" else HeadOperator.at(plain, X)
    return scope_operator(model, where, recording, scope, layers)


def solve_scope(operator: Operator, where: Layer, recording: Recording, solver: Solver, scope: str) -> SpectralNorm:
    """σ of every item of an operator that is not split into heads, as a flat batch."""
    return summarise(
        solver.solve(operator), operator, scope=scope, mask=mask_words(where, recording), input_dtype=_dtype(operator)
    )


def solve_heads(operator: Operator, where: Layer, recording: Recording, solver: Solver, heads: list[int]) -> SpectralNorm:
    """σ of the chosen heads as a flat batch ordered (input, head)."""
    if isinstance(operator, HeadOperator):
        operator = operator.select(head_items(operator.batch // where.heads, where.heads, heads).to(operator.device))
        output = solver.solve(operator)
    else:
        inputs = operator.batch
        parts = [solver.solve(HeadOfOperator(operator, h, where.heads)) for h in heads]
        output = _interleave(parts, inputs)
        # Only its shape, batch and rounding are read below: one item per input and head.
        items = torch.arange(inputs, device=operator.device).repeat_interleave(len(heads))
        operator = HeadOfOperator(operator.select(items), 0, where.heads)
    mask = mask_words(where, recording)
    return summarise(output, operator, scope="head", mask=mask, input_dtype=_dtype(operator))


def mask_words(where: Layer, recording: Recording) -> str:
    """The mask of a layer in this recording, in words."""
    mask = where.mask if recording.real is None else f"{where.mask}&padding"
    return mask if recording.documents is None else f"{mask}&packed:" + ",".join(map(str, recording.documents))


def by_head(result: SpectralNorm, heads: int | None) -> SpectralNorm:
    """A flat batch as (B,), or as (B, heads)."""
    items = len(result.status)
    return reshape_batch(result, (items,) if heads is None else (items // heads, heads))


def _dtype(operator: Operator) -> str:
    return dtype_name(operator.dtype)


def _interleave(parts: list[SolverOutput], inputs: int) -> SolverOutput:
    """Outputs ordered (head, input) → (input, head)."""
    order = [h * inputs + b for b in range(inputs) for h in range(len(parts))]
    joined = SolverOutput.cat(parts)
    for name, value in vars(joined).items():
        if isinstance(value, Tensor):
            setattr(joined, name, value[order])
        elif isinstance(value, list):
            setattr(joined, name, [value[i] for i in order])
    return joined
