"""Lower bounds for a given layer: the closed forms for one plain head, and measured values at the same inputs otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal
from lipscope.bounds import lower
from lipscope.bounds.bound import OURS, Bound


def matrices(layer: Attention, head: int = 0) -> tuple[Tensor, Tensor]:
    """A = τW_KᵀW_Q (d, d) and V = W_OW_V (d_out, d) of one head, float64."""
    single = layer.to(torch.float64).head(head)
    V = single.v.detach()
    if layer.out is not None:
        width = layer.value_width
        V = layer.out.detach().double()[:, head * width : (head + 1) * width] @ V
    return single.tau * single.k.detach().mT @ single.q.detach(), V


def closed_form(name: str, layer: Attention, radius: float, n: int) -> Bound | None:
    """A lower bound of the table for a layer with one plain head; None when A lacks the eigenvalue it needs."""
    A, V = matrices(layer)
    causal = isinstance(layer.mask, Causal)
    match name:
        case "lower.pair":
            return lower.pair(A, V, radius, n, causal=causal)
        case "lower.proposition34":
            return lower.proposition34(A, V, radius, n, causal=causal)
        case "lower.groups":
            return lower.groups(A, V, radius, n, causal=causal)
        case "lower.meanfield":
            return lower.meanfield(A, V, radius)
    raise ValueError(f"unknown lower bound {name!r}")


def measured(layer: Attention, radius: float, n: int) -> Bound:
    """The largest σ measured at the constructions of every head: a lower bound for any mask and score rule.

    Args:
        layer: the layer.
        radius: R.
        n: number of tokens.

    Returns:
        A lower bound for the supremum of σ over B_R^n, with the tokens that attain it.
    """
    from lipscope.facade import local_lipschitz

    causal = isinstance(layer.mask, Causal)
    inputs = []
    for head in range(layer.heads):
        A, V = matrices(layer, head)
        found = [lower.pair(A, V, radius, n, causal=causal), lower.groups(A, V, radius, n, causal=causal)]
        inputs += [bound.tokens for bound in found if bound.tokens is not None]
    best, tokens = 0.0, inputs[0]
    for X in inputs:
        sigma = float(local_lipschitz(layer, X, certificate=False).lower)
        if sigma > best:
            best, tokens = sigma, X
    return Bound("lower.measured", best, "set", f"supremum over tokens of norm ≤ {radius:g}, n = {n}, mask {layer.mask}",
                 OURS, {"R": radius, "n": n}, side="lower", tokens=tokens)  # fmt: skip
