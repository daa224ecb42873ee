"""Set bounds sharper than the paper's for all parameters. Ours; proofs in docs/theory.

One head, tokens in B_R, a = ‖A‖R², q = e^{−2a}. The row–column certificate with c_i ≤ ‖V‖²R², ‖a_i‖ ≤ ‖A‖R gives

    σ ≤ ‖V‖( √(1+a²)·√κ + a ),     κ ≥ largest column sum of P

A row that sees m keys has entries of at most 1/(1 + (m−1)q), so κ is a sum over the rows that see a column:

    unmasked   κ = n/(1 + (n−1)q)            ≤ min(n, e^{2a})
    causal     κ = Σ_{i≤n} 1/(1 + (i−1)q)    ≤ min(n, e^{2a}H_n)
    any mask   κ = max_j Σ_{i sees j} 1/(1 + (m_i−1)q)

Causal, free of n: σ ≤ ‖V‖((1+2a)Π(a) + a) with ‖P‖₂ ≤ Π(a) = min(2e^{2a}, inf_{0<t<1} e^{a(1+t)}√((1+1/t)/(1−t))).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Mask, MaskLike, as_mask
from lipscope.bounds.bound import OURS, Bound
from lipscope.bounds.castin2024 import exp
from lipscope.bounds.constants import Constants, HeadConstants


def unmasked(layer: Attention | Constants, radius: float, n: float = math.inf) -> Bound:
    """ρ√κ + νβ with κ = n/(1 + (n−1)e^{−2h}); ‖V‖(√(1+a²)·√κ + a) without biases.

    κ ≤ min(n, e^{2a}): the √n regime, the plateau e^a, and the border between them. For n = ∞ it bounds the
    W_2-Lipschitz constant of mean-field attention. Frobenius norms, tokens in B_R, no mask. Ours.

    Args:
        layer: the layer, or ``Constants.of_norms(‖V‖, ‖A‖)``.
        radius: R.
        n: number of tokens, infinite for every n.

    Returns:
        A set bound.
    """

    def head(c: HeadConstants) -> float:
        return c.mean_and_keys(radius) * math.sqrt(_full_column(n, c.half_range(radius))) + c.queries(radius)

    value = Constants.of(layer, _cut(n)).combine(head)
    return Bound("refined.unmasked", value, "set", f"tokens of norm ≤ {radius:g}, {_length(n)}, unmasked", OURS,
                 {"R": radius, "n": n})  # fmt: skip


def masked(layer: Attention | Constants, radius: float, n: float = math.inf) -> Bound:
    """min(ρ√κ, (‖V‖ + 2να)Π(h)) + νβ, κ = Σ_{i≤n} 1/(1 + (i−1)e^{−2h}), for the causal mask.

    Without biases: ‖V‖(min{√(1+a²)√κ, (1+2a)Π(a)} + a). The second member does not depend on n. Frobenius norms, tokens
    in B_R. Ours: Hardy's inequality and a Schur test with weights j^{−t}.

    Args:
        layer: the layer, or ``Constants.of_norms(‖V‖, ‖A‖)``.
        radius: R.
        n: number of tokens, infinite for every n.

    Returns:
        A set bound.
    """

    def head(c: HeadConstants) -> float:
        h = c.half_range(radius)
        free = (c.value + 2 * c.nu(radius) * c.alpha(radius)) * causal_norm(h)
        return min(c.mean_and_keys(radius) * math.sqrt(_causal_column(n, h)), free) + c.queries(radius)

    value = Constants.of(layer, _cut(n)).combine(head)
    return Bound("refined.masked", value, "set", f"tokens of norm ≤ {radius:g}, {_length(n)}, causal mask", OURS,
                 {"R": radius, "n": n})  # fmt: skip


def visibility(layer: Attention | Constants, radius: float, n: int, mask: MaskLike = None) -> Bound:
    """ρ√κ + νβ with κ = max_j Σ_{i sees j} 1/(1 + (m_i−1)e^{−2h}), m_i the number of keys row i sees, for any mask.

    Frobenius norms, tokens in B_R. Ours.

    Args:
        layer: the layer, or ``Constants.of_norms(‖V‖, ‖A‖)``.
        radius: R.
        n: number of tokens.
        mask: the mask; the layer's own when it is a layer and this is None.

    Returns:
        A set bound.
    """
    rule = layer.mask if isinstance(layer, Attention) and mask is None else mask
    constants = Constants.of(layer, _cut(n))
    ranges = sorted({c.half_range(radius) for c in (*constants.image, *constants.plain)})
    columns = dict(zip(ranges, _largest_columns(as_mask(rule), n, ranges), strict=True))

    def head(c: HeadConstants) -> float:
        return c.mean_and_keys(radius) * math.sqrt(columns[c.half_range(radius)]) + c.queries(radius)

    value = constants.combine(head)
    return Bound("refined.visibility", value, "set", f"tokens of norm ≤ {radius:g}, n = {n}, mask {as_mask(rule)}", OURS,
                 {"R": radius, "n": n, "mask": str(as_mask(rule))})  # fmt: skip


# Rows of a mask looked at together.
_ROWS = 512


def _largest_columns(mask: Mask, n: int, ranges: Sequence[float]) -> list[float]:
    """κ = max_j Σ_{i sees j} 1/(1 + (m_i−1)e^{−2h}) for every h of ``ranges``, a strip of rows at a time."""
    everything = slice(0, n)
    decay = torch.tensor([math.exp(-2 * h) for h in ranges], dtype=torch.float64)
    sums = torch.zeros(1, 1, n, len(ranges), dtype=torch.float64)
    for start in range(0, n, _ROWS):
        rows = slice(start, min(n, start + _ROWS))
        seen = mask.sees(rows, everything, n)
        seen = torch.ones(1, 1, rows.stop - start, n) if seen is None else seen
        counts = seen.sum(-1, keepdim=True).double().clamp_min(1)
        sums = sums + seen.double().mT @ (1 / (1 + (counts - 1) * decay.to(counts)))
    return [float(value) for value in sums.amax((0, 1, 2))]


def causal_norm(a: float) -> float:
    """Π(a) ≥ ‖P‖₂ for causal attention of any length whose scores vary by at most 2a within a row.

    min(2e^{2a}, inf_t e^{a(1+t)}√((1+1/t)/(1−t))): P is at most e^{2a} times the Cesàro matrix (norm ≤ 2, Hardy); and with
    w_j = j^{−t}, Pw ≤ e^{2at}/(1−t)·w and Pᵀw ≤ e^{2a}(1+1/t)·w (Schur).
    """
    best = 2 * exp(2 * a)
    # Any t gives a valid bound; the minimiser moves from ½ to 0 as 1/(2a).
    for step in range(1, 200):
        t = step / 200 if a < 1 else step / (200 * max(1.0, a / 2))
        best = min(best, exp(a * (1 + t)) * math.sqrt((1 + 1 / t) / (1 - t)))
    return best


def _full_column(n: float, h: float) -> float:
    q = exp(-2 * h)
    if math.isinf(n):
        return exp(2 * h)
    return n / (1 + (n - 1) * q)


def _causal_column(n: float, h: float) -> float:
    if math.isinf(n):
        return math.inf
    q = exp(-2 * h)
    head = min(int(n), 100_000)
    total = float((1 / (1 + q * torch.arange(head, dtype=torch.float64))).sum())
    # The rest by the integral of a decreasing function, from above; equal to the sum's tail up to one term.
    if n > head:
        total += (n - head) if q == 0 else math.log((1 + (n - 1) * q) / (1 + (head - 1) * q)) / q
    return total * (1 + 1e-12)


def _cut(n: float) -> int | None:
    return None if math.isinf(n) else int(n)


def _length(n: float) -> str:
    return "any n" if math.isinf(n) else f"n = {n:g}"
