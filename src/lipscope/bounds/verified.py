"""A verified upper end: σ² ≤ c is proved by a Cholesky factorisation of c·I − JJᵀ whose own residual is bounded.

Whatever triangle L was computed, c·I − JJᵀ = LLᵀ + F gives σ² ≤ c + ‖F‖. F is what is left of the panels, which is measured,
and what rounding may have done to the products between them, in blocks of b rows:

    ‖F‖ ≤ ρ + γ_{b+2}(m + s + √S)² + K·u·(c + 2t + S)

JJᵀ is n·d_out numbers square (n·dv for a head). It is formed in float64, one token at a time and without J, from

    J_ij = W_O[ P_ij W_V + W_ij(v_j − o_i)a_ijᵀ + δ_ij B_i τW_Q ]       a_ij = W_KᵀR_jᵀq_i,  B_i = Σ_j W_ij(v_j − o_i)k_jᵀR_i

docs/theory/verified.md has the theorem, its proof, the letters above, and what is assumed of floating point.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from lipscope.attention.core import Linearisation, Point
from lipscope.attention.layer import Attention
from lipscope.attention.rotary import Rotation
from lipscope.attention.validation import balanced, times_power
from lipscope.bounds.head_rounding import Rounding
from lipscope.bounds.products import Products
from lipscope.bounds.weights import layer_weights
from lipscope.rounding import duration, show_bytes
from lipscope.spectral.solvers import Auto

# Rows of a block, about; size up to which the matrix is factorised in float64; bytes it may take.
BLOCK, WIDE, MEMORY = 1024, 16384, 8 << 30
# What is tried one after the other, relative to the estimate of σ: a factorisation that breaks down proves nothing.
_TRIED = (1.002, 1.01, 1.1, 2.0)
_U = {torch.float64: 2.0**-53, torch.float32: 2.0**-24}
# For the rounding of norms and of the few operations that put a bound together.
_UP = 1 + 1e-6
_norm = torch.linalg.vector_norm


@dataclass(frozen=True)
class Cost:
    """What verifying one σ takes."""

    size: int  # rows of JJᵀ
    dtype: torch.dtype  # in which it is factorised
    bytes: int
    flops: float

    @classmethod
    def of(cls, layer: Attention, n: int, scope: str = "attention") -> Cost:
        """At n tokens."""
        heads, width = (1, layer.value_width) if scope == "head" else (layer.heads, layer.output_width)
        size, inner, block = n * width, heads * layer.value_width, _block(width)
        try:
            exact = torch.get_float32_matmul_precision() == "highest"
        except RuntimeError:  # torch's answer where backends were set apart
            exact = False
        wide = size <= WIDE or not exact
        dtype, number = (torch.float64, 8) if wide else (torch.float32, 4)
        scratch = 12 * heads * n * n + 10 * inner * n * inner + 3 * width * size + 4 * n * layer.width
        held = (size * (size + block) // 2 + 3 * size * block) * number + 8 * scratch
        formed = 4.0 * (inner * n) ** 2 * n + 4.0 * n * n * inner * width * (inner + width)
        return cls(size, dtype, held, size**3 / 3 + 2.0 * size**2 * block + formed)

    def check(self, memory: int) -> None:
        """Raise a MemoryError that says what it would take, when that is more."""
        if self.bytes > memory:
            raise MemoryError(f"verifying σ takes {self}, but memory is limited to {show_bytes(memory)}: take fewer tokens")

    def __str__(self) -> str:
        one = torch.ones(BLOCK, BLOCK, dtype=self.dtype)
        started = time.perf_counter()
        one @ one
        seconds = self.flops * (time.perf_counter() - started) / (2.0 * BLOCK**3)
        name = str(self.dtype).removeprefix("torch.")
        return f"a matrix of {self.size}² in {name}, about {show_bytes(self.bytes)} and {duration(seconds)}"


def verified_upper(
    layer: Attention,
    X: Tensor,
    scope: str = "attention",
    *,
    heads: Sequence[int] | None = None,
    estimate: Tensor | None = None,
    memory: int = MEMORY,
    progress: Callable[[float], None] = lambda done: None,
) -> Tensor:
    """A proved upper bound about 0.2 % above σ at every input, its own rounding included: ‖J‖² ≤ c + ‖c·I − JJᵀ − LLᵀ‖.

    Args:
        layer: the attention layer: any mask, biases, soft-cap, grouped queries, sinks, rotary embeddings.
        X: tokens (B, n, d).
        scope: ``"attention"`` (all heads and W_O) or ``"head"`` (each head before W_O).
        heads: which heads, for scope ``"head"``; all by default.
        estimate: about σ of every item; by default it is measured. It decides how close the bound is, not whether it holds.
        memory: most bytes.
        progress: called with the share that is done.

    Returns:
        Float64 bounds (B,), or (B, H) for scope ``"head"``; infinite where float64 does not resolve the scores.

    Raises:
        ValueError: for other scopes.
        MemoryError: when the matrix does not fit.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> layer = lipscope.Attention(q=0 * W, k=W, v=W)
        >>> round(float(verified_upper(layer, torch.randn(1, 5, 2, dtype=torch.float64))), 2)
        1.0
    """
    if scope not in ("attention", "head"):
        raise ValueError(f"no verified bound for scope {scope!r}; there are verified bounds for: attention, head")
    cost, single = Cost.of(layer, X.shape[1], scope), scope == "head"
    cost.check(memory)
    layer, X, _, power = balanced(layer.to(torch.float64), X.detach().double(), heads=single)
    chosen = (range(layer.heads) if heads is None else heads) if single else [0]
    if estimate is None:
        known = Auto(rtol=1e-4).solve(layer.operator(X, scope)).estimate.reshape(len(X), -1)[:, list(chosen)]
    else:
        known = times_power(estimate.double(), -power).reshape(len(X), -1)
    found = torch.full_like(known, math.inf)
    with torch.no_grad():
        for item in range(found.numel()):
            b, h = divmod(item, len(chosen))

            def part(done: float, item: int = item) -> None:
                progress((item + done) / found.numel())

            gram = Gram.at(layer.for_input(b).head(chosen[h]) if single else layer.for_input(b), X[b])
            for candidate in (*(ratio * float(known[b, h]) for ratio in _TRIED), gram.largest) if gram.resolved else ():
                found[b, h] = gram.prove(candidate, cost.dtype, part)
                if math.isfinite(found[b, h]):
                    break
    bounds: Tensor = times_power(found, power, outwards=1)
    return bounds if single else bounds[:, 0]


@dataclass(frozen=True, eq=False)
class Gram:
    """JJᵀ = T + Tᵀ at one input, and what rounding may have done to it; float64 tensors, heads first."""

    q: Tensor  # scaled queries (H, n, dk), rotated
    v: Tensor  # values and outputs (H, n, dv), without their common term
    o: Tensor
    P: Tensor  # probabilities (H, n, n), and the same times the slope of the soft-cap
    W: Tensor
    B: Tensor  # B_i, (H, n, dv, dk)
    products: Tensor  # [τW_Q; W_K; W_V] of every head times its transpose, (H, ·, H, ·)
    out: Tensor | None  # W_O (d_out, H·dv)
    rotation: Rotation | None
    jacobian_error: float  # how far the J of these numbers may be from the true one
    gram_error: float  # how far T + Tᵀ may be from JJᵀ of these numbers
    largest: float  # more than ‖J‖_F
    resolved: bool  # the probabilities have digits

    @classmethod
    def at(cls, layer: Attention, x: Tensor) -> Gram:
        """At tokens x (n, d) of a float64 layer."""
        (n, d), H, dk, dv = x.shape, layer.heads, layer.head_width, layer.value_width
        point, rotation, gain = Point.of(layer, x[None]), layer.rotation(n, 1), None
        core = Linearisation.at(point.q, point.k, point.v, layer.score_rule(n, 1), shift=point.shift).per_head(H)
        q, k, v, P, W, o = (t[:, 0] for t in (core.q, core.k, core.v, core.P, core.W, core.o))
        B = (W @ (v[..., None] * k[:, :, None]).flatten(2)).reshape(H, n, dv, dk) - o[..., None] * (W @ k)[:, :, None]
        if rotation is not None:
            rotation = Rotation(rotation.cos[0, 0], rotation.sin[0, 0], rotation.interleaved)
            gain = max(1.0, float((rotation.cos.square() + rotation.sin.square()).max().sqrt()))
            B = rotation.unsqueeze().transpose(B)
        of_weights = Products(layer, layer_weights(layer))
        heads, weights = [of_weights.side(name) for name in "qkv"], of_weights.weights.plain
        flat = torch.cat(heads, 1).flatten(0, 1)
        products = (flat @ flat.mT).reshape(H, 2 * dk + dv, H, 2 * dk + dv)
        # Errors head by head, as on the page; norms of weights are Frobenius norms.
        known = [Rounding.of(w, x, layer.head(h).score_rule(n, 1, tiled=True), gain, None) for h, w in enumerate(weights)]
        margin, unit, query, key, value, shift = x.new_tensor([astuple(r) for r in known]).T
        n_q, n_k, n_v = (_norm(t, dim=(1, 2)) * (gain or 1.0) for t in heads)
        sizes = [_norm(t, dim=-1) for t in (q, k, v, o)]
        most_q, most_k, most_v, most_o = (t.amax(-1) for t in sizes)
        scores = _norm(W * (sizes[2][:, None] + sizes[3][..., None]) * sizes[0][..., None], dim=(1, 2)) * n_k
        moved, spread = 2 * unit * value + 3 * margin * most_v, most_v + most_o
        if layer.sinks is not None:
            moved = moved + 3 * margin * (shift + most_o) + unit * shift
        error = margin * (_norm(P, dim=(1, 2)) * n_v + scores)
        error = error + _norm(W, dim=(1, 2)) * n_k * (moved * most_q + spread * unit * query)
        by_query = 2 * margin * spread * most_k + moved * most_k + spread * unit * key
        error = error + W.sum(-1).amax(-1) * n_q * by_query
        error = error + x.new_tensor([r.underflow(w, n) for r, w in zip(known, weights, strict=True)])
        majorant = _norm(P, dim=(1, 2)) * n_v + 2 * scores + 2 * _norm(B, dim=(1, 2, 3)) * n_q
        through = 1.0 if layer.out is None else float(_norm(layer.out))
        jacobian_error, largest = (through * float(_norm(t)) * _UP for t in (2 * error, majorant))
        gram_error = _gamma(2 * n + 2 * d + 6 * dk + 2 * H * dv + 64, torch.float64) * largest**2 + 1e-250
        resolved = float(margin.max()) < 0.01
        return cls(q, v, o, P, W, B, products, layer.out, rotation, jacobian_error, gram_error, largest, resolved)

    def prove(self, candidate: float, dtype: torch.dtype, progress: Callable[[float], None] = lambda done: None) -> float:
        """A bound just above the ``candidate`` if σ can be shown to be below it, else infinity."""
        n, width = self.P.shape[1], self.v.shape[0] * self.v.shape[2] if self.out is None else self.out.shape[0]
        candidate = max(candidate, self.jacobian_error, math.sqrt(self.gram_error))
        scale = math.ldexp(1.0, math.frexp(candidate)[1])
        c = float(torch.tensor((candidate / scale) ** 2, dtype=dtype))
        triangle, squares = Triangle(n * width, _block(width), c, dtype, self.P.device), 0.0
        for i in range(n):
            T = self.strip(i) / scale / scale
            squares += float(T.square().sum())
            triangle.subtract(i * width, T.to(dtype))
            progress(0.3 * (i + 1) / n)
        half = math.sqrt(squares) * _UP
        defect = triangle.defect(half, lambda p: progress(0.3 + 0.7 * p)) + 8 * _U[dtype] * (c + half)
        bound = scale * math.sqrt(c + defect * _UP + self.gram_error / scale / scale)
        return (bound + self.jacobian_error) * (1 + 1e-12) if math.isfinite(bound) else math.inf

    def strip(self, i: int) -> Tensor:
        """Rows of T that belong to token i, (d_out, n·d_out)."""
        (H, n, _), dv = self.q.shape, self.v.shape[2]
        T = torch.cat([self._blocks(i, h).permute(2, 1, 0, 3).reshape(dv, n, H * dv) for h in range(H)])
        return T.flatten(1) if self.out is None else self.out @ (T.flatten(0, 1) @ self.out.mT).reshape(H * dv, -1)

    def _blocks(self, i: int, h: int) -> Tensor:
        """T of token i and head h against all heads and tokens k, (H, n, dv, dv), before W_O."""
        (H, n, dk), dv = self.q.shape, self.v.shape[2]
        queries, keys, values = (self.products[:, rows, h] for rows in (slice(dk), slice(dk, 2 * dk), slice(2 * dk, None)))
        a = self.q[h, i].expand(n, dk)
        a = a if self.rotation is None else self.rotation.transpose(a)
        update = self.W[h, i, :, None] * (self.v[h] - self.o[h, i])
        # Through the keys, Σ_j W_ij δ_ij( P_kj W_V a_ij + ½ W_kj (a_ij·a_kj) δ_kj )ᵀ with δ_ij = v_j − o_i.
        gradient = a @ keys[..., dk : 2 * dk].mT
        gradient = gradient if self.rotation is None else self.rotation.apply(gradient)
        M = self.W * (self.q @ gradient.mT) / 2
        T = self.P @ (update[:, :, None] * (a @ values[..., dk : 2 * dk].mT)[:, :, None]).flatten(2)
        T += M @ (update[:, :, None] * self.v[:, :, None]).flatten(2)
        T = T.reshape(H, n, dv, dv) - (M @ update)[..., None] * self.o[:, :, None]
        # The mean part with itself, all of row i with the query of token k, and that of token i with itself.
        T += (self.P @ self.P[h, i])[..., None, None] / 2 * values[..., 2 * dk :].mT[:, None]
        T += self.P[h, i, :, None, None] * (self.B @ queries[:, None, :, 2 * dk :]).mT
        T += update[:, :, None] * (self.B @ (a @ queries[..., dk : 2 * dk].mT)[..., None]).mT
        T[:, i] += self.B[h, i] @ (self.B[:, i] @ queries[..., :dk]).mT / 2
        return T


class Triangle:
    """The lower triangle of c·I minus a symmetric matrix, in rows of blocks; it is used up by its factorisation."""

    def __init__(self, size: int, block: int, c: float, dtype: torch.dtype, device: torch.device) -> None:
        self.size, self.block, self.c, self.dtype, self.rows = size, block, c, dtype, list[Tensor]()
        for start in range(0, size, block):
            row = torch.zeros(min(block, size - start), min(size, start + block), dtype=dtype, device=device)
            row[:, start:].diagonal().fill_(c)
            self.rows.append(row)

    def subtract(self, start: int, T: Tensor) -> None:
        """Take away rows of T, which begin at ``start`` and lie in one block, and their transpose."""
        stop = start + len(T)
        for k, row in enumerate(self.rows):
            first, last = k * self.block, row.shape[1]
            if first <= start < last:
                row[start - first : stop - first] -= T[:, :last]
            if start < last:
                row[:, start:stop] -= T[:, first:last].mT

    def defect(self, half: float, progress: Callable[[float], None] = lambda done: None) -> float:
        """η with all eigenvalues ≥ −η, for half ≥ ‖T‖_F; infinite when the factorisation breaks down."""
        b, count = self.block, len(self.rows)
        residual = below = largest = inner = 0.0
        for k in range(count):
            start, A = k * b, self.rows[k][:, k * b :]
            L, broken = torch.linalg.cholesky_ex(A)
            if int(broken):
                return math.inf
            residual += 2 * _square((A - L @ L.mT).tril_())
            largest, inner = max(largest, float(L.diagonal().abs().max())), max(inner, _square(L.tril(-1)))
            self.rows[k] = A[:0]
            if k + 1 < count:
                panel = torch.cat([row[:, start : start + b] for row in self.rows[k + 1 :]])
                X = torch.linalg.solve_triangular(L.mT, panel, upper=True, left=False)
                residual += 2 * _square(panel.sub_(X @ L.mT))
                below += _square(X)
                for r in range(k + 1, count):
                    first, last = (r - k - 1) * b, self.rows[r].shape[1] - start - b
                    # The product first, and one subtraction: the rounding of long sums then stays small.
                    self.rows[r][:, start + b :] -= X[first : first + b] @ X[:last].mT
            progress(1 - (1 - (k + 1) / count) ** 3)
        if _gamma(b + 2, self.dtype) + count * _U[self.dtype] > 0.005:  # the theorem needs it
            return math.inf
        rounding = _gamma(b + 2, self.dtype) * (largest + math.sqrt(inner) + math.sqrt(below)) ** 2
        rounding += count * _U[self.dtype] * (self.c + 2 * half + below)
        return math.sqrt(residual) * _UP + 1.02 * rounding + self.size**2 * 2.0**-124


def _gamma(length: int, dtype: torch.dtype) -> float:
    return length * _U[dtype] / (1 - length * _U[dtype])


def _square(t: Tensor) -> float:
    return float(_norm(t, dtype=torch.float64)) ** 2


def _block(width: int) -> int:
    """Rows of a block: whole tokens."""
    return width * max(1, round(BLOCK / width))
