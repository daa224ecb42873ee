"""Two tokens at which σ is provably large: lower bounds, and the worst inputs that searches start from.

One head without biases, A = τW_KᵀW_Q, V = W_OW_V. m tokens at u and n−m at w, moving the m tokens together, give

    σ ≥ √((n−m)/m)·p·‖V(I + (1−p)(u−w)(Aw)ᵀ)‖,     E = (u−w)ᵀAw,     p = 1/(1 + ((n−m)/m)e^{−E})

E is the score by which a token at w prefers u to its own kind: the larger, the more tokens at w listen to few at u.
``lower.pair`` is m = 1 with the largest E; Proposition 3.4 of Castin et al. takes u and w along an eigenvector of A;
``lower.groups`` maximises over m and so levels off where m = 1 decays; ``lower.meanfield`` is what n → ∞ gives;
``lower.measured`` measures σ at such inputs, for any mask and score rule. All bound the supremum of σ over B_R^n from below,
with the tokens that attain the value. Where A and V are products of weights they may cancel: with E lowered by its rounding,
and ‖V(I + …)‖ by what rounding can make of it, the formulas stay below σ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal
from lipscope.attention.operators import AttentionOperator
from lipscope.attention.validation import balanced, power_above, times_power
from lipscope.bounds.bound import CASTIN, OURS, PLAIN, Bound, bound, conjugate, norm_name, refuse_others
from lipscope.bounds.domain import Domain
from lipscope.bounds.exponent import HeadOnSet, Pair, best_pair
from lipscope.bounds.sets import times
from lipscope.bounds.weights import layer_weights, rounding_unit, triangle
from lipscope.spectral.golub_kahan import GolubKahan
from lipscope.spectral.solvers import spectral_norm

NO_EIGENVALUE = "A has no {which} real eigenvalue: the general pair stands in"
# Eigenvectors that are tried, those with the largest eigenvalues; group sizes tried one by one.
_EIGENVECTORS, _EVERY_SIZE = 8, 128
# Numbers in one batch of inputs: the solver keeps a few dozen vectors of this size. Numbers in an input that is shown.
_LARGEST_BATCH, _LARGEST_INPUT = 1 << 20, 1 << 26
# A smaller exponent is a lower bound too, and stays in the range of floats whatever it is multiplied by.
_LARGEST_EXPONENT = 600.0
# Rows that are added up one by one.
_LONGEST_SUM = 1 << 16
# How far E, V and S = V(u−w)(Aw)ᵀ may be from what is computed.
Off: TypeAlias = tuple[float, float, float]
EXACT: Off = (0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class PlainHead:
    """One head without biases, in coordinates of what it looks at."""

    A: Tensor  # τW_KᵀW_Q, (r, r)
    V: Tensor  # W_OW_V, (·, r)
    causal: bool = False  # under the causal mask, else without a mask
    basis: Tensor | None = None  # (d, r), the tokens of the coordinates; None when they are the same
    sizes: tuple[float, float] = (0.0, 0.0)  # of the products that A and V are: at least their Frobenius norms
    unit: float = 0.0  # how far A and V are from them at most, relative to ``sizes``; 0 for given matrices

    @classmethod
    def of(cls, layer: Attention | PlainHead, head: int = 0) -> PlainHead:
        """One head of a layer, float64; a plain head passes through.

        The rows of [W_Q; W_K; W_V] span at most 3·d_head dimensions; A and V vanish outside. The rows of V are reduced to
        as many, which keeps every norm ‖VM‖.
        """
        if isinstance(layer, PlainHead):
            return layer
        single, causal = layer.to(torch.float64).head(head), isinstance(layer.mask, Causal)
        stacked = torch.cat([single.q, single.k, single.v]).detach()
        (A, V), w = matrices(layer, head), layer_weights(layer).image[head]
        sizes, unit = (w.sizes[0] * w.sizes[1], w.out_size * w.sizes[2]), rounding_unit(stacked, stacked, stacked)
        if stacked.shape[0] >= layer.width:
            return cls(A, V, causal, None, sizes, unit)
        basis = torch.linalg.qr(stacked.mT).Q
        return cls(basis.mT @ A @ basis, torch.linalg.qr(V @ basis).R, causal, basis, sizes, unit)

    @property
    def least_value(self) -> float:
        """At most ‖V‖."""
        return max(0.0, float(torch.linalg.matrix_norm(self.V, 2)) - self.unit * self.sizes[1])

    def off(self, u: Tensor, w: Tensor) -> Off:
        """How far E, V and S = V(u−w)(Aw)ᵀ may be from what is computed."""
        score = self.sizes[0] * math.hypot(*(u - w).tolist()) * math.hypot(*w.tolist())
        return self.unit * score, self.unit * self.sizes[1], 4 * self.unit * self.sizes[1] * score

    def gain(self, u: Tensor, w: Tensor, n: int, m: int = 1) -> float:
        """The lower bound for σ at m tokens at u and n−m at w.

        Under the causal mask the first tokens do not see the others, so what holds for fewer tokens holds for n.
        """
        n = min(n, _LONGEST_SUM) if self.causal else n
        return (causal_groups if self.causal else two_groups)(self.A, self.V, u, w, n, m, self.off(u, w))

    def limit(self, u: Tensor, w: Tensor, p: float = 2.0) -> float:
        """What the best share of tokens at u gives as n → ∞, in the norm (Σ_i‖x_i‖^p)^{1/p}; see ``lower_meanfield``."""
        if not bool(self.V.any()):
            return 0.0
        power, (less, V_off, S_off) = power_above(self.V), self.off(u, w)
        E, V_off, S_off = float((u - w) @ self.A @ w) - less, *(_scaled(each, -power) for each in (V_off, S_off))
        V = times_power(self.V, -power)
        S = torch.outer(V @ (u - w), self.A @ w)
        # Any direction gives a valid bound: those that are best at a few shares, then the best share for each of them.
        coarse = torch.linspace(0, 1, 9, dtype=V.dtype)[:, None, None]
        directions = torch.linalg.svd(V + coarse * S).Vh[:, 0]
        q = torch.linspace(0, 1, 4001, dtype=V.dtype)
        moved = torch.linalg.vector_norm((directions @ V.mT)[:, None] + q[:, None] * (directions @ S.mT)[:, None], dim=-1)
        moved = (moved - V_off - q * S_off).clamp_min(0).nan_to_num(0.0)
        value = math.exp(min(E / p, _LARGEST_EXPONENT)) * float((q ** (1 / p) * (1 - q) ** (1 - 1 / p) * moved).max())
        value = times(value, conjugate(p)) if self.causal else value
        if not self.causal or p != 2:
            return value * 2.0**power
        gram, cross = V.mT @ V, V.mT @ S
        E = min(E, _LARGEST_EXPONENT)
        top = max(E, 0.0)  # e^{−E} times the matrix where E is large
        gram = math.exp(-top) * gram + math.exp(E - top) * (gram + (cross + cross.mT) / 2 + S.mT @ S / 3)
        root = math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram)[-1]))) - math.sqrt(2) * (V_off + S_off)
        return max(value, math.exp(top / 2) * root) * 2.0**power

    def coordinates(self, u: Tensor, w: Tensor) -> Pair:
        """Two tokens in the coordinates of the head."""
        return (u, w) if self.basis is None else (u @ self.basis, w @ self.basis)

    def pairs(self, radius: float) -> list[Pair]:
        """Tokens u, w in B_R that are worth trying: the largest E, and those of Proposition 3.4 for several eigenvectors."""
        found = [best_pair(self.A, radius)]
        for _, e in sorted(real_eigenvectors(self.A), key=lambda found: -abs(found[0]))[:_EIGENVECTORS]:
            found += [(radius * e, radius * e / 2), (-radius * e, radius * e)]
        return found

    def tokens(self, u: Tensor, w: Tensor, n: int, m: int = 1) -> Tensor:
        """The input (n, d)."""
        X = tokens(u, w, n, m)
        return X if self.basis is None else X @ self.basis.mT


def matrices(layer: Attention, head: int = 0) -> tuple[Tensor, Tensor]:
    """A = τW_KᵀW_Q (d, d) and V = W_OW_V (d_out, d) of one head, float64."""
    single = layer.to(torch.float64).head(head)
    V = single.v.detach()
    if layer.out is not None:
        width = layer.value_width
        V = layer.out.detach().double()[:, head * width : (head + 1) * width] @ V
    return single.tau * single.k.detach().mT @ single.q.detach(), V


def two_groups(A: Tensor, V: Tensor, u: Tensor, w: Tensor, n: int, m: int = 1, off: Off = EXACT) -> float:
    """The gain √((n−m)/m)·p·‖V(I + (1−p)(u−w)(Aw)ᵀ)‖ of m tokens at u and n−m at w; 0 when one group is empty.

    With ``off``, how far E, V and S = V(u−w)(Aw)ᵀ may be from what they are, at most the gain.
    """
    if not 0 < m < n:
        return 0.0
    E = float((u - w) @ A @ w)
    ratio = (n - m) / m
    p, most = (1 / (1 + ratio * math.exp(max(-700.0, min(-E + change, 600.0)))) for change in (off[0], -off[0]))
    first, second = V @ (u - w), A @ w
    gain = float(torch.linalg.matrix_norm(V + (1 - p) * torch.outer(first, second), 2))
    if off[0] or off[1]:
        gain -= off[1] + (1 - p) * off[2] + (most - p) * math.hypot(*first.tolist()) * math.hypot(*second.tolist())
    return math.sqrt(ratio) * p * max(0.0, gain)


def causal_groups(A: Tensor, V: Tensor, u: Tensor, w: Tensor, n: int, m: int = 1, off: Off = EXACT) -> float:
    """The same input under the causal mask, the m tokens at u first: ‖Σ_i p_i²M_iᵀM_i/m‖^½, M_i = V(I + (1−p_i)(u−w)(Aw)ᵀ).

    Row i > m sees m tokens at u and i−m at w, so p_i = 1/(1 + ((i−m)/m)e^{−E}); one common direction moves all m tokens.
    """
    if not 0 < m < n:
        return 0.0
    E = float((u - w) @ A @ w)
    seen = torch.arange(1, n - m + 1, dtype=torch.float64)
    p, most = (1 / (1 + seen / m * math.exp(max(-700.0, min(-E + change, 600.0)))) for change in (off[0], -off[0]))
    power = power_above(V)
    first = times_power(V, -power)
    second = torch.outer(first @ (u - w), A @ w)
    # Σ p²(V + (1−p)S)ᵀ(V + (1−p)S), expanded so that no n×d×d tensor is formed.
    p2 = p.square()
    cross = first.mT @ second
    gram = p2.sum() * first.mT @ first + (p2 * (1 - p)).sum() * (cross + cross.mT)
    gram = gram + (p2 * (1 - p).square()).sum() * second.mT @ second
    gain = math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram)[-1])))
    if off[0] or off[1]:
        parts = [torch.linalg.vector_norm(p * t) for t in (torch.ones_like(p), 1 - p, most - p)]
        sizes = _scaled(off[1], -power), _scaled(off[2], -power), math.hypot(*second.flatten().tolist())
        gain -= sum(float(part) * size for part, size in zip(parts, sizes, strict=True))
    return max(0.0, gain) / math.sqrt(m) * 2.0**power


def _scaled(x: float, power: int) -> float:
    """x·2^power, infinite instead of an overflow error."""
    return x * 2.0 ** min(power, 1000)


def tokens(u: Tensor, w: Tensor, n: int, m: int = 1) -> Tensor:
    """The input: m rows u, then n−m rows w."""
    return torch.cat([u.expand(m, -1), w.expand(n - m, -1)])


@bound("lower.pair", side="lower", needs="radius, n", masks="full, causal", without=PLAIN)
def lower_pair(layer: Attention | PlainHead, radius: float, n: int) -> Bound:
    """One token at u, the others at w, with w maximising E = R‖Aw‖ − wᵀAw over B_R and u = R·Aw/‖Aw‖.

    No real eigenvalue of A is needed. Any u, w give a valid lower bound, so the maximisation need not be exact.
    """
    head = PlainHead.of(layer)
    return _bound("lower.pair", head, best_pair(head.A, radius), radius, n, OURS)


@bound("lower.proposition34", side="lower", needs="radius, n", masks="full, causal", without=PLAIN)
def lower_proposition34(layer: Attention | PlainHead, radius: float, n: int) -> Bound | None:
    """The input of Proposition 3.4, see ``eigenvector_pair``; it grows as √n as long as n−1 ≲ e^E, then decays.

    None when A has no real eigenvalue.
    """
    head = PlainHead.of(layer)
    pair = eigenvector_pair(head.A, radius)
    return None if pair is None else _bound("lower.proposition34", head, pair, radius, n, f"{CASTIN}, Proposition 3.4")


@bound("lower.groups", side="lower", needs="radius, n", masks="full, causal", without=PLAIN)
def lower_groups(layer: Attention | PlainHead, radius: float, n: int) -> Bound:
    """With m tokens at u and n−m at w: the best m and the best of the pairs above; it levels off, give or take a few %."""
    head = PlainHead.of(layer)
    candidates = head.pairs(radius)
    sizes = sorted({1, *(int(n * 2 ** (-step / 4)) for step in range(1, 4 * max(1, n.bit_length()) + 1))} - {0})
    scored = [(head.gain(*pair, n, m), index, m) for index, pair in enumerate(candidates) for m in sizes]
    _, index, m = max(scored)
    return _bound("lower.groups", head, candidates[index], radius, n, OURS, m=m)


@bound("lower.meanfield", side="lower", needs="radius", masks="full, causal", without=PLAIN)
def lower_meanfield(layer: Attention | PlainHead, radius: float, *, p: float = 2.0, domain: Domain | None = None) -> Bound:
    """Two Diracs as n → ∞, a light one at u and a heavy one at w: for any A, with S = V(u−w)(Aw)ᵀ and E = (u−w)ᵀAw.

        unmasked   e^{E/p} max_{0≤q≤1} q^{1/p}(1−q)^{1−1/p}‖V + qS‖, and ‖V‖ for one Dirac
        causal     p/(p−1) times that; for p = 2 also ‖VᵀV + e^E(VᵀV + ½(VᵀS + SᵀV) + ⅓SᵀS)‖^½, the light one first

    Along an eigenvector, Ae = −γe and u = −w = −Re: ‖Ve‖e^{γR²} max_q √(q(1−q))(1 + 2γR²q), and causal
    ‖Ve‖e^{γR²}√(1 + 2γR² + (4/3)γ²R⁴). The supremum over n and B_R^n of σ, for p ≠ 2 of the norm of J for
    (Σ_i‖x_i‖^p)^{1/p}, is at least this; so are the Lipschitz constants for W_p and d_p on B_R. With ``domain`` the tokens
    are of that set, the pair is one with large E there, and the statement is about the norm of J alone. n tokens need not
    reach it: for a given n see ``lower.groups``.
    """
    refuse_others("lower.meanfield", layer)
    head = PlainHead.of(layer)
    one = times(head.least_value, conjugate(p) if head.causal else 1.0)
    if domain is None:
        pairs, where = head.pairs(radius), f"tokens of norm ≤ {radius:g}"
    else:
        assert isinstance(layer, Attention)
        pairs, where = [head.coordinates(*HeadOnSet(layer.to(torch.float64), 0, domain).best)], str(domain)
    value = max(one, *(head.limit(*pair, p) for pair in pairs))
    where += f", supremum over n, {'causal mask' if head.causal else 'unmasked'}"
    return Bound("lower.meanfield", value, "sup n", where, OURS, {"R": radius, "p": p}, side="lower", norm=norm_name(p))


@bound("lower.measured", side="lower", needs="radius, n", longest=1 << 14)
def lower_measured(layer: Attention, radius: float, n: int) -> Bound | None:
    """The largest σ measured at two-group inputs of every head, any mask and score rule; None for a single token."""
    if n < 2:
        return None
    precise = layer.to(torch.float64)
    inputs = torch.stack([X for head in range(layer.heads) for X in _two_group_inputs(precise, head, radius, n)])
    # Every gain that a direction attains is a lower bound, so no interval is asked for.
    solver = GolubKahan(rtol=1e-3, interval=None)
    scaled, X, _, power = balanced(precise, inputs)
    batches = X.split(max(1, _LARGEST_BATCH // inputs[0].numel()))
    found = [spectral_norm(AttentionOperator.at(scaled, X), solver).lower for X in batches]
    values = torch.cat([torch.as_tensor(lower, dtype=torch.float64).reshape(-1) for lower in found])
    values = times_power(values, power, outwards=-1)
    best = int(values.argmax())
    where = f"supremum over tokens of norm ≤ {radius:g}, n = {n}, mask {layer.mask}"
    given = {"R": radius, "n": n}
    return Bound("lower.measured", float(values[best]), "set", where, OURS, given, side="lower", tokens=inputs[best])


def _two_group_inputs(layer: Attention, head: int, radius: float, n: int) -> list[Tensor]:
    """Inputs (n, d) for one head: one token against the rest, and the best m tokens, for the two kinds of pairs."""
    plain = PlainHead.of(layer, head)
    sizes = sorted({1} | {max(1, n >> shift) for shift in range(1, n.bit_length())})
    found = []
    for pair in filter(None, (best_pair(plain.A, radius), eigenvector_pair(plain.A, radius))):
        best = max((plain.gain(*pair, n, m), m) for m in sizes)[1]
        found += [plain.tokens(*pair, n, m) for m in {1, best}]
    return found


def proposition34_case(eigenvalues: Sequence[float]) -> Literal["max", "min"]:
    """Which case of Proposition 3.4 applies to real eigenvalues of A: ``"max"`` when γ_max > −8γ_min, else ``"min"``."""
    return "max" if max([0.0, *eigenvalues]) > -8 * min([0.0, *eigenvalues]) else "min"


def eigenvector_pair(A: Tensor, radius: float) -> Pair | None:
    """The tokens of Proposition 3.4 along a real eigenvector e of A; None when there is none.

    Case ``"max"``: (Re, Re/2), E = γ_maxR²/4; case ``"min"``: (−Re, Re), E = 2|γ_min|R².
    """
    real = real_eigenvectors(A)
    if not real:
        return None
    if proposition34_case([gamma for gamma, _ in real]) == "max":
        e = max(real, key=lambda found: found[0])[1]
        return radius * e, radius * e / 2
    e = min(real, key=lambda found: found[0])[1]
    return -radius * e, radius * e


def real_eigenvectors(A: Tensor) -> list[tuple[float, Tensor]]:
    """Real eigenvalues of A with unit eigenvectors."""
    values, vectors = torch.linalg.eig(A.double())
    scale = float(values.abs().max())
    found = []
    for value, vector in zip(values, vectors.mT, strict=True):
        if abs(float(value.imag)) <= 1e-12 * max(scale, 1e-300):
            e = vector.real
            found.append((float(value.real), e / torch.linalg.vector_norm(e)))
    return found


def real_eigenvalues(head: Attention) -> list[float]:
    """The real eigenvalues of A = τW_KᵀW_Q of a one-head layer other than 0, from the dk×dk matrix τW_QW_Kᵀ."""
    values = torch.linalg.eigvals(head.tau * head.q.detach().double() @ head.k.detach().double().mT)
    real: list[float] = values.real[values.imag.abs() <= 1e-9 * values.abs().max()].tolist()
    return real


def strongest_head(layer: Attention) -> int:
    """The head with the largest E/R² = max(γ_max/4, 2|γ_min|) over the two cases of Proposition 3.4."""

    def gain(h: int) -> float:
        real = real_eigenvalues(layer.head(h))
        return max(max(real) / 4, -2 * min(real)) if real else 0.0

    return max(range(layer.heads), key=gain)


@dataclass(frozen=True, eq=False)
class Candidate:
    """m tokens at u and the others at w, built from one head; ``note`` says what stands in for what."""

    head: int
    name: str
    u: Tensor
    w: Tensor
    m: int
    note: str = ""


class HeadPairs(HeadOnSet):
    """The pairs of one head of a float64 layer, biases included, in a set of tokens.

    With a query bias Aw + c stands for Aw, c = τW_Kᵀb_Q; key and value biases cancel.
    """

    def __init__(self, layer: Attention, head: int, domain: Domain) -> None:
        """Describe a head on a set."""
        super().__init__(layer, head, domain)
        self.head, single = head, layer.head(head)
        Q, K, V = single.tau * single.q.detach(), single.k.detach(), single.v.detach()
        bias = Q.new_zeros(Q.shape[0]) if single.q_bias is None else single.tau * single.q_bias.detach()
        # One more coordinate, always the same, turns Aw + c into a product, so that the plain formulas apply.
        self._one = 2.0 ** math.frexp(domain.radius)[1]
        if layer.out is not None:
            width = layer.value_width
            V = triangle(layer.out.detach()[:, head * width : (head + 1) * width]) @ V
        self._span = torch.linalg.qr(torch.cat([Q, K, V]).mT).Q
        r = self._span.shape[1]
        A = Q.new_zeros(r + 1, r + 1)
        A[:r, :r] = (K @ self._span).mT @ (Q @ self._span)
        A[:r, r] = (K @ self._span).mT @ bias / self._one
        V = torch.cat([V @ self._span, V.new_zeros(V.shape[0], 1)], dim=1)
        of, unit = layer_weights(layer).image[head], rounding_unit(Q, K, V, self._span)
        sizes = of.sizes[1] * (of.sizes[0] + of.biases[0] / self._one), of.out_size * of.sizes[2]
        self._plain = PlainHead(A, V, isinstance(layer.mask, Causal), None, sizes, unit)

    def all(self, names: Sequence[str], n: int) -> Iterator[Candidate]:
        """The candidates for each of ``names``; several for ``groups``, of which the best is to be measured."""
        general = self.best
        high, low = self._eigenvector_pairs(n)
        special = {"proposition34.max": (high, "positive"), "proposition34.min": (low, "negative"),
                   "meanfield": (low, "negative"), "pair": (general, "")}  # fmt: skip
        for name in names:
            if name == "groups":
                for pair in filter(None, (general, high, low)):
                    for m in {1, self.best_size(pair, n)}:
                        yield Candidate(self.head, name, *pair, m)
                continue
            found, which = special[name]
            pair = found or general
            m = self.best_size(pair, n) if name == "meanfield" else 1
            yield Candidate(self.head, name, *pair, m, "" if found else NO_EIGENVALUE.format(which=which))

    def gain(self, pair: Pair, n: int, m: int) -> float:
        """The gain √((n−m)/m)·p·‖V(I + (1−p)(u−w)(Aw + c)ᵀ)‖ of this head, or its causal form."""
        one = self._span.new_full((1,), self._one)
        u, w = (torch.cat([token @ self._span, one]) for token in pair)
        return self._plain.gain(u, w, n, m)

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
        """The two cases of Proposition 3.4; of e and −e, which a query bias or an offset tells apart, the better one."""
        size, rho = float(torch.linalg.matrix_norm(self.A, 2)), self.size
        # The span has more dimensions than A has rank: what is zero up to rounding is no eigenvalue of the head.
        real = [(value, e) for value, e in real_eigenvectors(self.A) if abs(value) > 1e-10 * size]

        def better(pairs: list[Pair]) -> Pair:
            return max(pairs, key=lambda pair: self.gain(pair, n, 1))

        high = low = None
        if real and (best := max(real, key=lambda found: found[0]))[0] > 0:
            high = better([self.place(sign * rho * best[1], sign * rho * best[1] / 2) for sign in (1, -1)])
        if real and (best := min(real, key=lambda found: found[0]))[0] < 0:
            low = better([self.place(-sign * rho * best[1], sign * rho * best[1]) for sign in (1, -1)])
        return high, low


def _bound(name: str, head: PlainHead, pair: Pair, R: float, n: int, reference: str, m: int | None = None) -> Bound:
    where = f"supremum over tokens of norm ≤ {R:g}, n = {n}, {'causal mask' if head.causal else 'unmasked'}"
    given = {"R": R, "n": n} if m is None else {"R": R, "n": n, "m": m}
    X = head.tokens(*pair, n, 1 if m is None else min(m, n)) if n * len(head.A) <= _LARGEST_INPUT else None
    return Bound(name, head.gain(*pair, n, m or 1), "set", where, reference, given, side="lower", tokens=X)
