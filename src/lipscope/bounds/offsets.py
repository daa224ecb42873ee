"""The largest ‖A_ij‖ with rotary embeddings: A_ij = τW_KᵀR_jᵀR_iW_Q depends on the pair of tokens through R_jᵀR_i alone.

For evenly spaced positions R_jᵀR_i depends on i − j, so 2n − 1 norms of d_head × d_head matrices suffice; how far the
tables are from that is measured, and added. Otherwise all pairs are tried while they are few, and in any case

    ‖A_ij‖ ≤ γ²·τ‖W_K‖‖W_Q‖,    γ the largest stretch of a rotation (1 for pure ones)
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal
from lipscope.attention.rotary import Rotation
from lipscope.bounds.spectral_upper import matrix_norm_upper
from lipscope.bounds.weights import HeadWeights, layer_weights, spectral

# Multiplications that may be spent on norms of single A_ij, per head.
_AFFORDABLE = 1 << 30
# Offsets are believed when the tables follow them to this accuracy.
_EVEN = 1e-3


@dataclass(frozen=True)
class TurnedNorms:
    """One head with rotary embeddings, over all pairs of tokens that may meet.

    Attributes:
        interaction: ≥ ‖A_ij‖.
        query_bias: ≥ τ‖W_KᵀR_jᵀR_ib_Q‖.
        key_bias: ≥ τ‖W_QᵀR_iᵀR_jb_K‖; a turned key bias does not cancel in the softmax.
        bias_score: ≥ τ|b_QᵀR_iᵀR_jb_K|.
    """

    interaction: float
    query_bias: float
    key_bias: float
    bias_score: float


def turned_norms(layer: Attention, n: int | None = None) -> tuple[TurnedNorms, ...]:
    """The norms of every head for n tokens (for all positions of the tables when None); computed once per layer and n."""
    known = _CACHE.setdefault(layer, {})
    if n not in known:
        known[n] = tuple(_of_head(layer, h, n) for h in range(layer.heads))
    return known[n]


_CACHE: WeakKeyDictionary[Attention, dict[int | None, tuple[TurnedNorms, ...]]] = WeakKeyDictionary()


def _of_head(layer: Attention, head: int, n: int | None) -> TurnedNorms:
    assert layer.rotary is not None
    w, single = layer_weights(layer).plain[head], layer.to(torch.float64).head(head)
    causal = isinstance(layer.mask, Causal)
    cos, sin = layer.rotary.cos.detach().double(), layer.rotary.sin.detach().double()
    inputs = [(cos, sin)] if cos.ndim == 2 else list(zip(cos, sin, strict=True))
    found = []
    for c, s in inputs:
        # A table per input is as long as the sequence: with padding, n counts the real places, and these may lie anywhere.
        places = n if cos.ndim == 2 else None
        turn = Rotation(c[:places], s[:places], layer.rotary.interleaved)
        query = key = score = 0.0
        if single.q_bias is not None:
            query = bias_gradient(w.R_K, single.tau * single.q_bias.detach(), turn)
        if single.k_bias is not None:
            key = bias_gradient(w.R_Q, single.k_bias.detach(), turn)
            if single.q_bias is not None:
                score = bias_gradient(single.tau * single.q_bias.detach()[None], single.k_bias.detach(), turn)
        found.append((largest_interaction(w, turn, causal=causal), query, key, score))
    return TurnedNorms(*(max(values) for values in zip(*found, strict=True)))


def largest_interaction(w: HeadWeights, turn: Rotation, *, causal: bool = False) -> float:
    """An upper bound for max_{i,j} ‖A_ij‖, the exact maximum up to a few per cent when that is affordable.

    Args:
        w: weights of the head.
        turn: rotations with tables (n, r).
        causal: only pairs with j ≤ i occur.
    """
    stretch = max(float((turn.cos.square() + turn.sin.square()).max()), 1.0 if turn.cos.shape[-1] < w.R_K.shape[1] else 0.0)
    simple = stretch * w.query * spectral(w.R_K) * (1 + 1e-12)
    # W_Q = 0 or W_K = 0.
    if simple == 0.0:
        return 0.0
    relative, deviation = _relative_turns(turn, causal, _AFFORDABLE // (12 * max(1, w.R_K.shape[1]) ** 3))
    if relative is None:
        return simple
    # W_Kᵀ(R_jᵀR_i)τW_Q in triangular factors: R_K · rel · R_Qᵀ, a turned R_Qᵀ read row by row.
    images = relative.apply(w.R_Q.expand(relative.cos.shape[0], *w.R_Q.shape))
    norms = matrix_norm_upper(w.R_K @ images.mT, squarings=6)
    return min(simple, float(norms.max()) + deviation * w.query * spectral(w.R_K))


def bias_gradient(M: Tensor, vector: Tensor, turn: Rotation) -> float:
    """The largest of ‖M R_jᵀR_i z‖ over all pairs, at most γ²‖M‖‖z‖ and exact for short tables."""
    stretch = max(1.0, float((turn.cos.square() + turn.sin.square()).max()))
    simple = stretch * spectral(M) * float(torch.linalg.vector_norm(vector)) * (1 + 1e-12)
    relative, deviation = _relative_turns(turn, False, _AFFORDABLE // max(1, 4 * M.numel()))
    if relative is None:
        return simple
    z = relative.apply(vector.expand(relative.cos.shape[0], 1, len(vector)))[:, 0]
    exact = float(torch.linalg.vector_norm(z @ M.mT, dim=-1).max()) * (1 + 1e-12)
    return min(simple, exact + deviation * spectral(M) * float(torch.linalg.vector_norm(vector)))


def _relative_turns(turn: Rotation, causal: bool, limit: int) -> tuple[Rotation | None, float]:
    """Rotations (m, 1, r) that R_jᵀR_i runs through, and how far it may be from them; None when they are too many."""
    c = torch.complex(turn.cos, turn.sin)
    n = c.shape[0]
    if n <= min(limit, 1024):
        # Offset o stands for all pairs (t + o, t).
        offsets = c * c[:1].conj()
        deviation = 0.0
        for o in range(n):
            deviation = max(deviation, float((c[o:] * c[: n - o].conj() - offsets[o]).abs().max()))
        if deviation <= _EVEN and (2 - causal) * n <= limit:
            return _as_turn(offsets if causal else torch.cat([offsets, offsets[1:].conj()]), turn), deviation
    if n * n <= min(limit, 1 << 12):
        pairs = c[:, None] * c.conj()[None]
        pairs = pairs[torch.ones(n, n, dtype=torch.bool, device=c.device).tril()] if causal else pairs.flatten(0, 1)
        return _as_turn(pairs, turn), 0.0
    return None, 0.0


def _as_turn(numbers: Tensor, turn: Rotation) -> Rotation:
    return Rotation(numbers.real[:, None].contiguous(), numbers.imag[:, None].contiguous(), turn.interleaved)
