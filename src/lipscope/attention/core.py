"""The attention core and its two products, for any batch of heads.

    S = Q Kᵀ (+ score rule)      P = softmax(S)      O = P V

    dS = dQ Kᵀ + Q dKᵀ           T = W∘dS            dO = T V + P dV − rowsum(T)·O
    gP = G Vᵀ                    gS = W∘(gP − ⟨G, O⟩) gQ = gS K    gK = gSᵀ Q    gV = Pᵀ G

with W = P (times the slope of the soft-cap). The scale τ is folded into Q. Both products use the identities
rowsum(P∘gP)_i = ⟨g_i, o_i⟩ and dP V = T V − rowsum(T)·O, so that each needs one pass over the n×n entries.

Grouped queries are never expanded: G query heads that share a key head are stacked as G·n rows of one larger product.

Linearisations detach the weights and share what they can between products. ``scores_and_weights`` and ``Attention.bilinear``
are plain torch expressions of tokens and weights instead, which keep their graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TypeAlias

import torch
from torch import Tensor

from lipscope.attention.scores import ScoreRule, softcap_size
from lipscope.attention.validation import rows_of

if TYPE_CHECKING:
    from lipscope.attention.layer import Attention
    from lipscope.attention.tiled import AnyLinearisation

Triple: TypeAlias = tuple[Tensor, Tensor, Tensor]

# Probabilities up to which the size of an additive term does not matter. There −B_ij ≤ log(1/P_ij) + log n + twice the size
# of what does matter, so that the error of P_ij, at most eps·P_ij·|B_ij|, vanishes with P_ij: a term of −1e9 hides its
# entry, and leaves the others their digits.
NEGLIGIBLE = 1e-9


@dataclass(frozen=True, eq=False)
class Linearisation:
    """The attention core at one point: everything J·u and Jᵀ·g need, computed once.

    Shapes: q (B, Hkv, G·n, dk) with the scale inside, k (B, Hkv, n, dk), v (B, Hkv, n, dv), P and W (B, Hkv, G·n, n),
    o (B, Hkv, G·n, dv). ``score_size`` bounds the terms that add up to a score which matters: a score s is known up to
    eps times that, and the exponential turns this into a relative error of P.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    P: Tensor
    W: Tensor
    o: Tensor
    score_size: float

    @classmethod
    def at(
        cls, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule, *, shift: Tensor | None = None, size: float = 0.0
    ) -> Linearisation:
        """Linearise at scaled queries q (B, H, n, dk), keys k (B, Hkv, n, dk) and values v (B, Hkv, n, dv).

        Values may be given as v − c, which spares the products a cancellation and changes none: dO = T(V − c) + P dV −
        rowsum(T)·(O − c) does not depend on c. Rows of P that add up to 1 make O − c = P(V − c); where a sink takes the
        share π, O − c = P(V − c) − πc, and c must be given as ``shift`` (B, Hkv, 1, dv). ``size`` is the least score size.
        """
        kv_heads = k.shape[1]
        n_keys = k.shape[2]
        grouped = group_queries(q, kv_heads)
        raw = grouped @ k.transpose(-1, -2)
        P, W = rule.probabilities(raw.reshape(*q.shape[:3], n_keys))
        size = softcap_size(max(size, largest_product(q.detach(), k.detach())), rule.softcap)
        if rule.additive is not None:
            size += float(torch.where(P.detach() > NEGLIGIBLE, rule.additive.abs(), 0.0).amax())
        size += rule.sink_size(size)
        P, W = (t.reshape(raw.shape) for t in (P, W))
        o = P @ v
        if shift is not None and rule.sinks is not None:
            o = o - group_queries(rule.sink_share(raw.reshape(*q.shape[:3], n_keys)), kv_heads) * shift
        return cls(grouped, k, v, P, W, o, size)

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the products."""
        return self.P.dtype

    @property
    def scratch(self) -> int:
        """Numbers that one input of the batch takes beside its tokens."""
        return self.P[0].numel()

    def finite(self) -> dict[str, Tensor]:
        """What must be finite for the products to make sense."""
        return {"scores": self.P, "values": self.v, "queries": self.q, "keys": self.k}

    def mass(self, heads: int) -> Tensor:
        """√(largest row sum · largest column sum) ≥ ‖P‖₂ of every head, (B, H)."""
        P = ungroup_queries(self.P, heads)
        return (P.sum(-1).amax(-1) * P.sum(-2).amax(-1)).sqrt()

    def jvp(self, dq: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
        """The perturbation dO for those of the scaled queries (grouped), keys and values."""
        T = _sum_of_products(dq, self.k.transpose(-1, -2), self.q, dk.transpose(-1, -2)).mul_(self.W)
        row = T.sum(-1, keepdim=True)
        return _sum_of_products(T, self.v, self.P, dv).addcmul_(row, self.o, value=-1)

    def vjp(self, g: Tensor) -> Triple:
        """The cotangents (gQ grouped, gK, gV) for a cotangent g of O, shape (B, Hkv, G·n, dv)."""
        inner = (g * self.o).sum(-1, keepdim=True)
        gS = (g @ self.v.transpose(-1, -2)).sub_(inner).mul_(self.W)
        return gS @ self.k, gS.transpose(-1, -2) @ self.q, self.P.transpose(-1, -2) @ g

    def per_head(self, heads: int) -> Linearisation:
        """Every one of the query heads as an input of its own, ordered (input, head)."""
        q, P, o = (ungroup_queries(t, heads).flatten(0, 1)[:, None] for t in (self.q, self.P, self.o))
        W = P if self.W is self.P else ungroup_queries(self.W, heads).flatten(0, 1)[:, None]
        k, v = (t.repeat_interleave(heads // t.shape[1], dim=1).flatten(0, 1)[:, None] for t in (self.k, self.v))
        return Linearisation(q, k, v, P, W, o, self.score_size)

    def select(self, items: Tensor) -> Self:
        """Keep the listed batch items."""
        return rows_of(self, items, "q", "k", "v", "P", "W", "o")


def largest_product(a: Tensor, b: Tensor) -> float:
    """The product of the largest norms of the last dimension."""
    return float(a.norm(dim=-1).amax() * b.norm(dim=-1).amax())


def typical_norm(squares: Tensor, rows: int, columns: int) -> Tensor:
    """The spectral norm of a random matrix with this sum of squares; no more than its Frobenius norm."""
    return squares.sqrt() * min(1.0, 1 / math.sqrt(rows) + 1 / math.sqrt(columns))


@dataclass(frozen=True, eq=False)
class Point:
    """Queries, keys and values of tokens without the terms that no product depends on, and what they were added up from.

    A term that is the same for all values cancels in v_j − o_i, up to the share of a sink; one that is the same for all keys
    cancels in the softmax, unless sinks, a soft-cap or rotations tell keys apart. Both are left out before anything is
    rounded: tokens are taken about the smallest of them, x_j − x_m, which is no larger than 2‖x_j‖, and biases dropped.
    """

    q: Tensor  # scaled queries (B, H, n, dk)
    k: Tensor  # keys (B, Hkv, n, dk), perhaps without their common term
    v: Tensor  # values (B, Hkv, n, dv) without their common term
    shift: Tensor | None  # that of the values (B, Hkv, 1, dv), where sinks make it matter
    # Norms of the terms that add up to a query, key and value, (B, H), (B, Hkv) and (B, Hkv): rounding is relative to them
    sizes: Triple

    @classmethod
    def of(cls, layer: Attention, X: Tensor, offset: Tensor | None = None) -> Point:
        """At tokens X (B, n, d), to all of which ``offset`` (d,) is to be added."""
        smallest = X.norm(dim=-1).argmin(-1)
        origin = X[torch.arange(len(X), device=X.device), smallest][:, None]
        away, rotation = X - origin, layer.rotation(X.shape[1], X.shape[0])
        free = rotation is None and layer.softcap is None and layer.sinks is None
        weights, biases = layer.qkv_by_head, (layer.q_bias, layer.k_bias, layer.v_bias)
        columns = layer.column_squares.split([len(t) for t in weights])
        found, sizes = [], []
        for which, tokens in enumerate((X, away if free else X, away)):
            W, bias, count = weights[which].flatten(0, 1), biases[which], len(weights[which])
            constant = X.new_zeros(1, len(W)) if bias is None else (layer.tau if which == 0 else 1.0) * bias.detach()[None]
            constant = constant if offset is None else constant + offset @ W.mT
            z, size = tokens @ W.mT, torch.stack([(x.square() @ columns[which].mT).amax(0) for x in tokens]).sqrt()
            if tokens is X:
                z, size = z + constant, size + constant.reshape(1, count, -1).norm(dim=-1)
            z = z.reshape(*X.shape[:2], count, -1).transpose(1, 2).contiguous()
            found.append(z if rotation is None or which == 2 else rotation.apply(z))
            sizes.append(torch.maximum(size, found[-1].norm(dim=-1).amax(-1)))
        # Of the values, which come last.
        shift = None if layer.sinks is None else (origin @ W.mT + constant).reshape(len(X), layer.kv_heads, 1, -1)
        return cls(found[0], found[1], found[2], shift, (sizes[0], sizes[1], sizes[2]))

    @property
    def score_size(self) -> float:
        """Largest size of the terms that add up to a score."""
        q, k, _ = self.sizes
        return float((q.reshape(*k.shape, -1).amax(-1) * k).max())

    def parts(self, layer: Attention, core: AnyLinearisation) -> Tensor:
        """Norms of the mean part of J and of its parts by way of scores, each as if nothing in it cancelled, (B, H, 2)."""
        q, k, v = (t.double().repeat_interleave(layer.heads // t.shape[1], dim=1) for t in self.sizes)
        v = v + ungroup_queries(core.o, layer.heads).norm(dim=-1).amax(-1)
        squares = layer.column_squares.double().sum(-1).split([t.shape[1] for t in self.sizes])
        W_Q, W_K, W_V = (
            typical_norm(t.repeat_interleave(layer.heads // len(t)), z.shape[-1], layer.width)
            for t, z in zip(squares, (self.q, self.k, self.v), strict=True)
        )
        limits = torch.finfo(core.dtype)
        # Probabilities below the range of floats are zero.
        mass = core.mass(layer.heads).double() + self.k.shape[2] * limits.tiny / limits.eps
        return mass[..., None] * torch.stack([W_V.expand_as(v), v * (q * W_K + k * W_Q)], dim=-1)


def group_queries(q: Tensor, kv_heads: int) -> Tensor:
    """Reshape (B, H, n, d) → (B, Hkv, G·n, d): query heads that share a key head become one block of rows."""
    B, H, n, d = q.shape
    return q.reshape(B, kv_heads, H // kv_heads * n, d)


def ungroup_queries(grouped: Tensor, heads: int) -> Tensor:
    """Reshape (B, Hkv, G·n, d) → (B, H, n, d): the inverse of ``group_queries``."""
    B, kv_heads, rows, d = grouped.shape
    return grouped.reshape(B, heads, rows * kv_heads // heads, d)


def _sum_of_products(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """The sum a·b + c·d, the second product accumulated in place."""
    B, H = a.shape[:2]
    first = torch.bmm(a.flatten(0, 1), b.flatten(0, 1))
    total = torch.baddbmm(first, c.flatten(0, 1), d.flatten(0, 1), out=first)
    return total.reshape(B, H, *total.shape[1:])


def scores_and_weights(layer: Attention, X: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Raw scores and probabilities (B, H, n, n) of tokens (B, n, d), and where query i sees key j; with their graph."""
    q, k, _ = layer.project(X, graph=True)
    rule = layer.score_rule(X.shape[1], X.shape[0], graph=True)
    raw = q @ k.repeat_interleave(layer.heads // layer.kv_heads, dim=1).mT
    return raw, rule.probabilities(raw)[0], rule.allowed
