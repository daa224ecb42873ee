"""Inputs at which a layer of a model is known to be rough: the lower bound that stands beside its upper bounds.

The constructions of ``bounds.lower`` live in the span of a head's query and key weights, which has 2·d_head dimensions
however wide the model is: they are searched there, put back into d dimensions, and σ of the whole layer is measured at all
of them in one batch. Whatever the mask, the biases or the other heads do, what is measured is a lower bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal
from lipscope.attention.operator import AttentionOperator
from lipscope.bounds import lower
from lipscope.bounds.bound import OURS, Bound
from lipscope.spectral.golub_kahan import GolubKahan
from lipscope.spectral.result import summarise

# Numbers in one batch of inputs: the solver keeps a few dozen vectors of this size.
_LARGEST_BATCH = 1 << 20


def measured_lower(attention: Attention, radius: float, n: int) -> Bound:
    """The largest σ measured at two-group inputs, one or two per head: a lower bound for the supremum over B_R^n.

    Args:
        attention: the layer, for one input.
        radius: R.
        n: number of tokens, at least 2.

    Returns:
        A lower bound with the tokens that attain it.
    """
    precise = attention.to(torch.float64)
    inputs = torch.stack([X for h in range(attention.heads) for X in _constructions(precise.head(h), radius, n)])
    size = max(1, _LARGEST_BATCH // inputs[0].numel())
    # Every gain that a direction attains is a lower bound, so no interval is asked for.
    solver = GolubKahan(rtol=1e-3, interval=None)
    operators = [AttentionOperator(precise, X) for X in inputs.split(size)]
    values = torch.cat([summarise(solver.solve(operator), operator, scope="attention").lower for operator in operators])
    best = int(values.argmax())
    return Bound("lower.measured", float(values[best]), "set", f"supremum over tokens of norm ≤ {radius:g}, n = {n}, "
                 f"mask {attention.mask}", OURS, {"R": radius, "n": n}, side="lower", tokens=inputs[best])  # fmt: skip


def _constructions(head: Attention, radius: float, n: int) -> list[Tensor]:
    """Two-group inputs (n, d) for one head: the pair with the largest E, and the paper's eigenvector pair."""
    basis = torch.linalg.qr(torch.cat([head.q, head.k]).mT).Q
    A = head.tau * (head.k @ basis).mT @ (head.q @ basis)
    V = head.v @ basis
    value_of = lower.causal_groups if isinstance(head.mask, Causal) else lower.two_groups
    pairs = [lower.best_pair(A, radius)]
    special = lower.proposition34(A, V, radius, n)
    if special is not None and special.tokens is not None:
        pairs.append((special.tokens[0], special.tokens[-1]))
    sizes = sorted({1} | {max(1, n >> shift) for shift in range(1, n.bit_length())})
    found = []
    for u, w in pairs:
        _, m = max((value_of(A, V, u, w, n, m), m) for m in sizes)
        found.append(lower.tokens(u, w, n, m) @ basis.mT)
    return found
