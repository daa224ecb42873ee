"""Lower bounds for a given layer: the closed forms for one plain head, and measured values at the same inputs otherwise."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal
from lipscope.attention.operators import AttentionOperator
from lipscope.bounds import lower
from lipscope.bounds.bound import OURS, Bound
from lipscope.spectral.golub_kahan import GolubKahan
from lipscope.spectral.result import summarise


def matrices(layer: Attention, head: int = 0) -> tuple[Tensor, Tensor]:
    """A = τW_KᵀW_Q (d, d) and V = W_OW_V (d_out, d) of one head, float64."""
    single = layer.to(torch.float64).head(head)
    V = single.v.detach()
    if layer.out is not None:
        width = layer.value_width
        V = layer.out.detach().double()[:, head * width : (head + 1) * width] @ V
    return single.tau * single.k.detach().mT @ single.q.detach(), V


def head_matrices(layer: Attention, head: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """A and V of one head in the coordinates of what it looks at, and the basis (d, r) of these.

    The rows of [W_Q; W_K; W_V] span at most 3·d_head dimensions; A and V vanish outside. The rows of V are reduced to as
    many, which keeps every norm ‖VM‖.
    """
    single = layer.to(torch.float64).head(head)
    stacked = torch.cat([single.q, single.k, single.v]).detach()
    A, V = matrices(layer, head)
    if stacked.shape[0] >= layer.width:
        return A, V, torch.eye(layer.width, dtype=A.dtype, device=A.device)
    basis = torch.linalg.qr(stacked.mT).Q
    return basis.mT @ A @ basis, torch.linalg.qr(V @ basis).R, basis


def closed_form(name: str, layer: Attention, radius: float, n: int) -> Bound | None:
    """A lower bound of the table for a layer with one plain head; None when A lacks the eigenvalue it needs."""
    A, V, basis = head_matrices(layer)
    causal = isinstance(layer.mask, Causal)
    match name:
        case "lower.pair":
            found: Bound | None = lower.pair(A, V, radius, n, causal=causal)
        case "lower.proposition34":
            found = lower.proposition34(A, V, radius, n, causal=causal)
        case "lower.groups":
            found = lower.groups(A, V, radius, n, causal=causal)
        case "lower.meanfield":
            found = lower.meanfield(A, V, radius)
        case _:
            raise ValueError(f"unknown lower bound {name!r}")
    return found if found is None or found.tokens is None else replace(found, tokens=found.tokens @ basis.mT)


def measured(layer: Attention, radius: float, n: int) -> Bound:
    """The largest σ measured at two-group inputs of every head: a lower bound for any mask and score rule.

    Args:
        layer: the layer, for one input.
        radius: R.
        n: number of tokens, at least 2.

    Returns:
        A lower bound for the supremum of σ over B_R^n, with the tokens that attain it.
    """
    precise = layer.to(torch.float64)
    inputs = torch.stack([X for head in range(layer.heads) for X in _two_group_inputs(precise, head, radius, n)])
    # Every gain that a direction attains is a lower bound, so no interval is asked for.
    solver = GolubKahan(rtol=1e-3, interval=None)
    operators = [AttentionOperator.at(precise, X) for X in inputs.split(max(1, _LARGEST_BATCH // inputs[0].numel()))]
    values = torch.cat([summarise(solver.solve(operator), operator, scope="attention").lower for operator in operators])
    best = int(values.argmax())
    return Bound("lower.measured", float(values[best]), "set", f"supremum over tokens of norm ≤ {radius:g}, n = {n}, "
                 f"mask {layer.mask}", OURS, {"R": radius, "n": n}, side="lower", tokens=inputs[best])  # fmt: skip


def _two_group_inputs(layer: Attention, head: int, radius: float, n: int) -> list[Tensor]:
    """Inputs (n, d) for one head: one token against the rest, and the best m tokens, for the two kinds of pairs."""
    A, V, basis = head_matrices(layer, head)
    value_of = lower.causal_groups if isinstance(layer.mask, Causal) else lower.two_groups
    pairs = [lower.best_pair(A, radius)]
    special = lower.proposition34(A, V, radius, n)
    if special is not None and special.tokens is not None:
        pairs.append((special.tokens[0], special.tokens[-1]))
    sizes = sorted({1} | {max(1, n >> shift) for shift in range(1, n.bit_length())})
    found = []
    for u, w in pairs:
        best = max((value_of(A, V, u, w, n, m), m) for m in sizes)[1]
        found += [lower.tokens(u, w, n, m) @ basis.mT for m in {1, best}]
    return found


# Numbers in one batch of inputs: the solver keeps a few dozen vectors of this size.
_LARGEST_BATCH = 1 << 20
