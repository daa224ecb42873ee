"""Two tokens u, w of a set for one head: far apart in score, so that many tokens at w listen to few at u.

What counts is E = (u−w)·(Aw + c), the score by which a token at w prefers u to its own kind, A = τW_KᵀW_Q and c =
τW_Kᵀb_Q; key and value biases cancel. In the set's coordinates (x = Dz + β, ‖z‖ ≤ ρ) this is the same problem with A →
DᵀAD, c → Dᵀ(Aβ + c), and only the span of the head's queries and keys matters, at most 2·dk dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal
from lipscope.bounds import lower
from lipscope.bounds.weights import triangle
from lipscope.studies.worst_case.domain import Domain

Pair: TypeAlias = tuple[Tensor, Tensor]
NO_EIGENVALUE = "A has no {which} real eigenvalue: the general pair stands in"


class HeadPairs:
    """The pairs of one head of a float64 layer, in one set."""

    def __init__(self, layer: Attention, head: int, domain: Domain) -> None:
        single = layer.head(head)
        self.domain, self.causal = domain, isinstance(layer.mask, Causal)
        Q, K, V = single.tau * single.q.detach(), single.k.detach(), single.v.detach()
        bias = Q.new_zeros(Q.shape[0]) if single.q_bias is None else single.tau * single.q_bias.detach()
        D, beta = domain.affine(Q)
        # The search: A and c in coordinates of the set, restricted to the span of queries and keys.
        QD, KD = Q @ D, K @ D
        self._basis = torch.linalg.qr(torch.cat([QD, KD]).mT).Q
        self.A = (KD @ self._basis).mT @ (QD @ self._basis)
        self.shift = (KD @ self._basis).mT @ (Q @ beta + bias)
        # The gain: one more coordinate, always 1, turns Aw + c into a product, so that the plain formulas apply.
        if layer.out is not None:
            width = layer.value_width
            V = triangle(layer.out.detach()[:, head * width : (head + 1) * width]) @ V
        self._span = torch.linalg.qr(torch.cat([Q, K, V]).mT).Q
        r = self._span.shape[1]
        self._A = Q.new_zeros(r + 1, r + 1)
        self._A[:r, :r] = (K @ self._span).mT @ (Q @ self._span)
        self._A[:r, r] = (K @ self._span).mT @ bias
        self._V = torch.cat([V @ self._span, V.new_zeros(V.shape[0], 1)], dim=1)

    def all(self, names: Sequence[str], n: int) -> Iterator[tuple[str, Tensor, Tensor, int, str]]:
        """(name, u, w, m, note) for each of ``names``; several for ``groups``, of which the best is to be measured."""
        general = self._tokens(*lower.best_pair(self.A, self.domain.size, shift=self.shift))
        high, low = self._eigenvector_pairs(n)
        for name in names:
            match name:
                case "proposition34.max":
                    yield name, *(high or general), 1, "" if high else NO_EIGENVALUE.format(which="positive")
                case "proposition34.min":
                    yield name, *(low or general), 1, "" if low else NO_EIGENVALUE.format(which="negative")
                case "meanfield":
                    pair = low or general
                    yield name, *pair, self.best_size(pair, n), "" if low else NO_EIGENVALUE.format(which="negative")
                case "pair":
                    yield name, *general, 1, ""
                case "groups":
                    for pair in filter(None, (general, high, low)):
                        for m in {1, self.best_size(pair, n)}:
                            yield name, *pair, m, ""

    def gain(self, pair: Pair, n: int, m: int) -> float:
        """√((n−m)/m)·p·‖V(I + (1−p)(u−w)(Aw + c)ᵀ)‖ of this head, or its causal form."""
        one = self._V.new_ones(1)
        u, w = (torch.cat([token @ self._span, one]) for token in pair)
        return (lower.causal_groups if self.causal else lower.two_groups)(self._A, self._V, u, w, n, m)

    def best_size(self, pair: Pair, n: int) -> int:
        """The m that maximises the gain: every size for short n, else a geometric grid refined around its best."""
        if n <= _EVERY_SIZE:
            return max(range(1, n), key=lambda m: self.gain(pair, n, m))
        grid = sorted({math.floor(math.pow(n - 1, step / _EVERY_SIZE)) for step in range(_EVERY_SIZE + 1)})
        best = max(grid, key=lambda m: self.gain(pair, n, m))
        at = grid.index(best)
        first, last = grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)]
        finer: list[int] = [best, *range(first, last + 1, max(1, (last - first) // _EVERY_SIZE))]
        return max(finer, key=lambda m: self.gain(pair, n, m))

    def _eigenvector_pairs(self, n: int) -> tuple[Pair | None, Pair | None]:
        """The paper's two cases; of e and −e, which a query bias or an offset tells apart, the one with more gain."""
        size, rho = float(torch.linalg.matrix_norm(self.A, 2)), self.domain.size
        # The span has more dimensions than A has rank: what is zero up to rounding is no eigenvalue of the head.
        real = [(value, e) for value, e in lower.real_eigenvectors(self.A) if abs(value) > 1e-10 * size]

        def better(pairs: list[Pair]) -> Pair:
            return max(pairs, key=lambda pair: self.gain(pair, n, 1))

        high = low = None
        if real and (best := max(real, key=lambda found: found[0]))[0] > 0:
            high = better([self._tokens(sign * rho * best[1], sign * rho * best[1] / 2) for sign in (1, -1)])
        if real and (best := min(real, key=lambda found: found[0]))[0] < 0:
            low = better([self._tokens(-sign * rho * best[1], sign * rho * best[1]) for sign in (1, -1)])
        return high, low

    def _tokens(self, u: Tensor, w: Tensor) -> Pair:
        """Coordinates in the span → tokens of the set."""
        z = self.domain.project(torch.stack([u, w]) @ self._basis.mT)
        tokens = self.domain.tokens(z)
        return tokens[0], tokens[1]


# Group sizes tried one by one.
_EVERY_SIZE = 128
