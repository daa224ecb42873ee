"""Which tokens carry the worst direction of a layer, and which pairs of tokens influence each other most."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipscope.models.handle import Model
from lipscope.models.scopes import scope_tokens
from lipscope.spectral.dense import Auto
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SpectralNorm
from lipscope.token_influence import influence

_COPIES = 32
_POWER_STEPS = 60


@dataclass(frozen=True, eq=False)
class TokenView:
    """A layer seen token by token.

    Attributes:
        tokens: the tokens as the tokenizer writes them.
        energy: share of each token in the worst input direction, summing to one.
        influence: ‖∂out_i/∂x_j‖₂, rows are outputs.
        result: σ of the layer.
    """

    tokens: list[str]
    energy: Tensor
    influence: Tensor
    result: SpectralNorm

    def strongest_pairs(self, count: int = 10, *, apart: bool = True) -> list[tuple[int, int, float]]:
        """The pairs (output i, input j) with the largest influence; ``apart`` leaves out a token on itself."""
        values = self.influence.clone()
        if apart:
            values.fill_diagonal_(0)
        top = values.flatten().topk(min(count, values.numel()))
        n = values.shape[1]
        return [(int(k) // n, int(k) % n, float(v)) for v, k in zip(top.values, top.indices, strict=True) if float(v) > 0]


def token_view(handle: Model, text: str, layer: int, *, scope: str = "attention") -> TokenView:
    """Look at one layer of a model on one text.

    Raises:
        ValueError: when the text is empty or too long, or the layer or scope does not exist.
    """
    if scope == "head":
        raise ValueError("the token view takes one map: scope attention, norm+attention, attention+residual, block or model")
    inputs = handle.token_inputs(text=text)
    ids = inputs["input_ids"]
    recording = handle.record(inputs)
    result = handle.solve(layer, recording, scope, solver=Auto())
    assert result.token_energy is not None
    plain = handle.attention(layer, recording) if scope == "attention" else None
    if plain is not None:
        matrix = influence(plain, scope_tokens(handle.layer(layer), recording, scope)[0])
    else:
        # The same input many times over: as many columns of the Jacobian per product.
        copies = handle.record({name: value.repeat_interleave(_COPIES, dim=0) for name, value in inputs.items()})
        matrix = _influence_by_columns(handle.operator(layer, copies, scope, analytic=False))
    names = handle.tokenizer.convert_ids_to_tokens(ids[0].tolist())
    return TokenView([_readable(name) for name in names], result.token_energy[0], matrix, _first(result))


def _influence_by_columns(operator: Operator) -> Tensor:
    """Block norms of one input's Jacobian from an operator that holds that input in every batch item."""
    n, d = operator.input_shape
    n_out, d_out = operator.output_shape
    result = torch.zeros(n_out, n, dtype=operator.dtype, device=operator.device)
    for j in range(n):
        columns = []
        for start in range(0, d, operator.batch):
            u = torch.zeros(operator.batch, n, d, dtype=operator.dtype, device=operator.device)
            count = min(operator.batch, d - start)
            u[torch.arange(count), j, start + torch.arange(count)] = 1
            columns.append(operator.matvec(u.flatten(1))[:count])
        blocks = torch.cat(columns).reshape(d, n_out, d_out).transpose(0, 1)
        result[:, j] = _spectral_norms(blocks)
    return result


def _spectral_norms(blocks: Tensor) -> Tensor:
    """Largest singular values of a stack of matrices, by power iteration from a fixed random start."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(blocks.shape[0], blocks.shape[2], 1, generator=generator, dtype=torch.float64).to(blocks)
    tiny = torch.finfo(blocks.dtype).tiny
    for _ in range(_POWER_STEPS):
        x = blocks.mT @ (blocks @ (x / x.norm(dim=1, keepdim=True).clamp_min(tiny)))
    norms: Tensor = (blocks @ (x / x.norm(dim=1, keepdim=True).clamp_min(tiny))).norm(dim=1)
    return norms[:, 0]


def _first(result: SpectralNorm) -> SpectralNorm:
    return replace(
        result,
        lower=float(result.lower[0]), estimate=float(result.estimate[0]), upper=float(result.upper[0]),
        iterations=int(result.iterations[0]), residual=float(result.residual[0]), converged=bool(result.converged[0]),
        status=result.status[0],
    )  # fmt: skip


def _readable(token: str) -> str:
    """Byte-level tokenizers write a leading space as Ġ and a line break as Ċ."""
    return token.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\\n")
