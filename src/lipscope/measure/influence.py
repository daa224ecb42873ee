"""``influence``: which token moves which. The n×n matrix of block norms ‖∂out_i/∂x_j‖₂."""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.attention.core import Linearisation
from lipscope.attention.layer import Attention
from lipscope.attention.masks import MaskLike
from lipscope.attention.operators import BlockOperator
from lipscope.measure.scopes import check_scope
from lipscope.measure.sigma import TorchMap, as_layer, check_tokens, working_dtype
from lipscope.spectral.autodiff import TensorMap
from lipscope.spectral.golub_kahan import GolubKahan
from lipscope.spectral.operator import Operator


def influence(
    map: Attention | TensorMap, X: Tensor, *, scope: str | None = None, mask: MaskLike = None, rtol: float = 1e-3
) -> Tensor:
    """How far output token i moves when input token j moves: the matrix of spectral norms ‖∂out_i/∂x_j‖₂.

    No single entry is the Lipschitz constant: σ(X) lies between the largest entry and the spectral norm of the matrix.

    Args:
        map: an ``Attention`` layer, or any torch callable that maps tokens to tokens. For a layer all n² blocks are
            solved together; for a callable the Jacobian rows are formed token by token, n·d_out backward passes.
        X: tokens (n, d) or (B, n, d).
        scope: for a layer, ``"attention"`` (default) or ``"head"``.
        mask: replaces the layer's own mask.
        rtol: relative accuracy of each entry (exact for callables).

    Returns:
        A tensor (n, n), with leading dimensions B for a batch and H for scope ``"head"``.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> layer = lipscope.Attention(q=0 * W, k=W, v=W, mask="causal")
        >>> lipscope.influence(layer, torch.zeros(2, 2, dtype=torch.float64))
        tensor([[1.0000, 0.0000],
                [0.5000, 0.5000]], dtype=torch.float64)
    """
    batched = check_tokens(X)
    layer = as_layer(map, mask, bare=X.ndim == 2)
    tokens = batched.to(working_dtype(layer, X))
    if not isinstance(layer, Attention):
        matrices = _blocks_by_rows(layer.operator(tokens, scope or ("map" if isinstance(layer, TorchMap) else "attention")))
        return matrices if X.ndim == 3 else matrices[0]
    check_scope(scope or "attention", ("attention", "head"), of="influence")
    if tokens.shape[-1] != layer.width:
        raise ValueError(f"X has tokens of width {tokens.shape[-1]}, but the layer takes width {layer.width}")
    layer = layer.to(tokens.dtype, tokens.device)
    matrices = torch.stack([_of_layer(layer, x[None], b, scope == "head", rtol) for b, x in enumerate(tokens)])
    return matrices if X.ndim == 3 else matrices[0]


def _of_layer(layer: Attention, x: Tensor, item: int, heads: bool, rtol: float) -> Tensor:
    if heads:
        return torch.stack([_of_layer(layer.head(h), x, item, False, rtol) for h in range(layer.heads)])
    layer = layer.for_input(item)
    core = layer.jacobian_parts(x, tiled=False)[1]
    assert isinstance(core, Linearisation)
    n = x.shape[1]
    result = x.new_zeros(n, n)
    visible = core.P[0].reshape(layer.heads, n, n).any(0)
    visible.fill_diagonal_(False)
    for pairs, diagonal in ((visible.nonzero(), False), (torch.arange(n, device=x.device)[:, None].repeat(1, 2), True)):
        for part in pairs.split(_PAIRS_AT_ONCE) if len(pairs) else ():
            blocks = BlockOperator.at(layer, core, part[:, 0], part[:, 1], diagonal=diagonal)
            result[part[:, 0], part[:, 1]] = GolubKahan(rtol=rtol).solve(blocks).estimate.to(result.dtype)
    return result


def _blocks_by_rows(operator: Operator) -> Tensor:
    """Block norms of a general Jacobian, one output token at a time."""
    if len(operator.input_shape) != 2 or len(operator.output_shape) != 2:
        raise ValueError(
            f"influence needs a map from tokens to tokens, got item shapes {operator.input_shape} → {operator.output_shape}"
        )
    n_out, d_out = operator.output_shape
    result = torch.zeros(operator.batch, n_out, operator.input_shape[0], dtype=operator.dtype, device=operator.device)
    for i in range(n_out):
        rows = []
        for c in range(d_out):
            g = torch.zeros(operator.batch, n_out, d_out, dtype=operator.dtype, device=operator.device)
            g[:, i, c] = 1
            rows.append(operator.rmatvec(g.flatten(1)).reshape(operator.batch, *operator.input_shape))
        blocks = torch.stack(rows, dim=2)
        result[:, i] = torch.linalg.svdvals(blocks.double())[..., 0].to(result.dtype)
    return result


_PAIRS_AT_ONCE = 4096
