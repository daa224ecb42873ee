"""The cheaper penalties of an ``Attention``: on its rows, on its logits, and on its weights; in full precision always."""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.facade import check_tokens
from lipscope.regularise.differentiable import scores_and_weights
from lipscope.regularise.modes import full_precision
from lipscope.regularise.rows import jasmin, max_logit
from lipscope.regularise.spectral import matrix_norm


def jasmin_penalty(attention: Attention, X: Tensor, k: int = 0) -> Tensor:
    """JaSMin of a layer at tokens X (n, d) or (B, n, d), with a gradient in W_Q, W_K and their biases; see ``jasmin``."""
    with full_precision(attention.device):
        _, P, _ = scores_and_weights(attention, check_tokens(X).to(attention.q))
        return jasmin(P, k)


def max_logit_penalty(attention: Attention, X: Tensor, *, limit: float = 0.0) -> Tensor:
    """Squared excess of the largest |logit| over ``limit`` at tokens X, mean over heads and inputs; see ``max_logit``."""
    with full_precision(attention.device):
        raw, _, visible = scores_and_weights(attention, check_tokens(X).to(attention.q))
        return max_logit(raw, visible, limit=limit)


def weight_penalty(attention: Attention) -> Tensor:
    """‖W_Q^h‖ + ‖W_K^h‖ + ‖W_V^h‖, mean over heads: the norms that every bound on a ball is made of.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, requires_grad=True)
        >>> weight_penalty(lipscope.Attention(W, 2 * W, 3 * W)).item()
        6.0
    """
    groups = ((attention.q, attention.heads), (attention.k, attention.kv_heads), (attention.v, attention.kv_heads))
    return torch.stack(
        [torch.stack([matrix_norm(block) for block in matrix.chunk(heads)]).mean() for matrix, heads in groups]
    ).sum()
