"""What attention is, written once in plain arithmetic, and σ of it. Nothing here imports lipscope.

    q_i = R_i(W_Q x_i + b_Q)    k_j = R_j(W_K x_j + b_K)    v_j = W_V x_j + b_V    s_ij = c·tanh(τ q_i·k_j / c) + B_ij
    P_ij = e^{s_ij} / (e^{sink} + Σ_{l seen} e^{s_il})      out_i = W_O concat_h(Σ_j P_ij v_j)

``forward`` runs on torch numbers, where autograd gives dense Jacobians of a batch of inputs and numpy their singular values,
and on numpy arrays of mpmath numbers, where a difference quotient with a step of 10^{-2/5·digits} gives derivatives that are
true to dozens of digits. The first searches, the second judges: it knows no rounding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Numbers:
    """A kind of arithmetic: how numpy numbers enter it, and its functions."""

    array: Callable[[Array], Any]
    exp: Callable[[Any], Any]
    tanh: Callable[[Any], Any]
    sqrt: Callable[[Any], Any]
    join: Callable[[list[Any]], Any]


def _rows_peak(scores: torch.Tensor) -> torch.Tensor:
    peak = scores.detach().amax(-1, keepdim=True)
    return torch.where(torch.isfinite(peak), peak, torch.zeros_like(peak))


FLOATS = Numbers(
    array=lambda a: torch.from_numpy(np.ascontiguousarray(a)),
    exp=torch.exp,
    tanh=torch.tanh,
    sqrt=torch.sqrt,
    join=lambda parts: torch.cat(parts, -1),
)
_exact = np.frompyfunc(mpmath.mpf, 1, 1)
DIGITS = Numbers(
    array=lambda a: a if a.dtype == bool else _exact(a),
    exp=np.frompyfunc(mpmath.exp, 1, 1),
    tanh=np.frompyfunc(mpmath.tanh, 1, 1),
    sqrt=np.frompyfunc(mpmath.sqrt, 1, 1),
    join=lambda parts: np.concatenate(parts, -1),
)


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention layer as plain arrays."""

    q: Any  # (H, dk, d)
    k: Any  # (G, dk, d): grouped queries share keys and values
    v: Any  # (G, dv, d)
    out: Any  # (d_out, H·dv), or None
    seen: Any  # (1 or H, n, n), boolean
    scale: float
    kind: str = "dot"
    b_q: Any = None  # (H, dk)
    b_k: Any = None  # (G, dk)
    b_v: Any = None  # (G, dv)
    added: Any = None  # (1 or H, n, n)
    softcap: float | None = None
    sinks: Any = None  # (H,)
    turn: Any = None  # rotations (n, dk, dk)
    gain: Any = None  # a normalisation in front: gains (d,)
    offset: Any = None  # its offsets (d,)
    centred: bool = True  # LayerNorm, or RMSNorm
    eps: float = 0.0  # of that normalisation, or of the normalised features of a variant
    nu: float = 1.0  # size of the values of cosine attention
    shift: float = 0.0  # of sigmoid attention

    def on(self, numbers: Numbers) -> Problem:
        """The same arrays in another arithmetic."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return dataclasses.replace(self, **{k: numbers.array(v) for k, v in fields.items() if isinstance(v, np.ndarray)})


def forward(p: Problem, X: Any, numbers: Numbers, head: int | None = None) -> Any:
    """The layer at tokens (n, d), p in the same arithmetic; of one head before W_O if given."""
    if p.gain is not None:
        d = X.shape[-1]
        about = X - X.sum(axis=-1, keepdims=True) / d if p.centred else X
        X = about / numbers.sqrt((about * about).sum(axis=-1, keepdims=True) / d + p.eps) * p.gain
        X = X if p.offset is None else X + p.offset
    heads = range(p.q.shape[0]) if head is None else [head]
    outputs = numbers.join([_head(p, X, numbers, h) for h in heads])
    return outputs if p.out is None or head is not None else outputs @ p.out.T


def _head(p: Problem, X: Any, numbers: Numbers, h: int) -> Any:
    g = h * p.k.shape[0] // p.q.shape[0]
    q, k, v = X @ p.q[h].T, X @ p.k[g].T, X @ p.v[g].T
    q = q if p.b_q is None else q + p.b_q[h]
    k = k if p.b_k is None else k + p.b_k[g]
    v = v if p.b_v is None else v + p.b_v[g]
    if p.turn is not None:
        q, k = ((p.turn @ t[..., None])[..., 0] for t in (q, k))
    if p.kind in ("cosine", "qk-norm"):
        q, k = _unit(q, p, numbers), _unit(k, p, numbers)
        v = p.nu * _unit(v, p, numbers) if p.kind == "cosine" else v
    if p.kind == "l2":
        gaps = q[:, None, :] - q[None, :, :]
        s = -p.scale * (gaps * gaps).sum(axis=-1)
        v = p.scale * (X @ p.q[h].T) @ p.q[h] @ p.v[g].T
    else:
        s = p.scale * (q @ k.T)
    s = s if p.softcap is None else p.softcap * numbers.tanh(s / p.softcap)
    if p.added is not None:
        s = s + p.added[h if p.added.shape[0] > 1 else 0]
    seen = p.seen[h if p.seen.shape[0] > 1 else 0]
    if p.kind == "sigmoid":
        return (1 / (1 + numbers.exp(-s - p.shift)) * seen) @ v
    if p.kind == "sinkhorn":
        return _doubly_stochastic(s) @ v
    hidden = ~seen
    if numbers is FLOATS:
        s = torch.where(hidden, -math.inf, s)
        peak = _rows_peak(s) if p.sinks is None else torch.maximum(_rows_peak(s), p.sinks[h])
        E = torch.exp(s - peak)
        total = E.sum(-1, keepdim=True) + (0 if p.sinks is None else torch.exp(p.sinks[h] - peak))
        return (E / torch.where(total > 0, total, 1.0)) @ v
    E = numbers.exp(s) * seen
    total = E.sum(axis=-1, keepdims=True) + (0 if p.sinks is None else mpmath.exp(p.sinks[h]))
    return (E / np.where(total > 0, total, mpmath.mpf(1))) @ v


def _unit(z: Any, p: Problem, numbers: Numbers) -> Any:
    return z / numbers.sqrt((z * z).sum(axis=-1, keepdims=True) + p.eps)


def _doubly_stochastic(s: torch.Tensor) -> torch.Tensor:
    """Sinkhorn's limit; its derivative by the implicit function theorem, as that of one Newton step from the solution."""
    n, S = s.shape[0], s.detach()
    f, g = torch.zeros_like(S[:, 0]), torch.zeros_like(S[0])
    for _ in range(100):
        f = -torch.logsumexp(S + g[None], -1)
        g = -torch.logsumexp(S + f[:, None], 0)
    for last in (False, False, False, False, False, True):
        P = torch.exp(S + f[:, None] + g[None])
        H = torch.cat([torch.cat([torch.diag_embed(P.sum(1)), P], 1), torch.cat([P.T, torch.diag_embed(P.sum(0))], 1)])
        moved = torch.exp(s + f[:, None] + g[None]) if last else P
        step = torch.linalg.pinv(H, hermitian=True) @ torch.cat([moved.sum(1) - 1, moved.sum(0) - 1])
        f, g = f - step[:n], g - step[n:]
    return torch.exp(s + f[:, None] + g[None])


def jacobians(p: Problem, X: Array, head: int | None = None) -> Array:
    """Dense float64 Jacobians (B, n·d_out, n·d) at tokens (B, n, d)."""
    prepared, B = p.on(FLOATS), X.shape[0]
    J = torch.func.vmap(torch.func.jacrev(lambda x: forward(prepared, x, FLOATS, head)))(torch.from_numpy(X))
    return np.asarray(J.reshape(B, -1, X[0].size).numpy())


def sigmas(J: Array) -> Array:
    """The largest singular values (B,); NaN where float64 has no Jacobian."""
    finite = np.isfinite(J).all(axis=(-2, -1), keepdims=True)
    J = np.where(finite, J, 0.0)
    size = np.abs(J).max(axis=(-2, -1), keepdims=True)
    size = np.where(size > 0, size, 1.0)
    values = np.linalg.svd(J / size, compute_uv=False)[:, :1, None] * size
    return np.asarray(np.where(finite, values, np.nan)[:, 0, 0])


def ascend(p: Problem, X: Array, radius: float, steps: int) -> Array:
    """Tokens (B, n, d) of norm at most ``radius`` after steps along the gradient of σ; the best of every item."""
    prepared = p.on(FLOATS)

    def gain(x: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = torch.func.jvp(lambda y: forward(prepared, y, FLOATS), (x,), (v,))[1]
        return (moved * u).sum()

    slope = torch.func.vmap(torch.func.grad(gain))
    best, found, size = X, np.full(len(X), -1.0), 0.5
    for _ in range(steps):
        J = jacobians(p, X)
        if not np.isfinite(J).all():
            break
        u, s, v = np.linalg.svd(J, full_matrices=False)
        better = s[:, 0] > found
        best, found = np.where(better[:, None, None], X, best), np.where(better, s[:, 0], found)
        left, right = u[:, :, 0].reshape(len(X), X.shape[1], -1), v[:, 0].reshape(X.shape)
        G = slope(*(torch.from_numpy(np.ascontiguousarray(t)) for t in (X, left, right))).numpy()
        length = np.sqrt((G**2).sum((1, 2), keepdims=True))
        G = np.where(np.isfinite(G), G, 0.0) / np.where(np.isfinite(length) & (length > 0), length, 1.0)
        X = inside(X + size * radius * math.sqrt(X.shape[1]) * G, radius)
        size *= 0.8
    return best


def inside(X: Array, radius: float) -> Array:
    """Tokens outside the ball moved to its boundary, a hair inside."""
    norms = np.linalg.norm(X, axis=-1, keepdims=True)
    return np.asarray(X * np.minimum(1.0, radius * (1 - 1e-15) / np.where(norms > 0, norms, 1.0)))


def attained(p: Problem, X: Array, v: Array, digits: int, head: int | None = None) -> mpmath.mpf:
    """‖J·v‖/‖v‖ ≤ σ, whatever v is."""
    with mpmath.workdps(digits):
        return _norm(_images(p, X, v[None], digits, head)[0]) / _norm(_exact(v))


def true_sigma(p: Problem, X: Array, digits: int, head: int | None = None) -> mpmath.mpf:
    """σ from the Jacobian in so many digits: its top right singular vector in float64, then the gain that this attains."""
    with mpmath.workdps(digits):
        J = np.stack(_images(p, X, np.eye(X.size), digits, head), -1)
        size = max(abs(entry) for entry in J.flat)
        if size == 0:
            return size
        v = _exact(np.linalg.svd((J / size).astype(float))[2][0])
        return _norm(J @ v) / _norm(v)


def _images(p: Problem, X: Array, directions: Array, digits: int, head: int | None) -> list[Array]:
    """J·v for every direction by difference quotients, off by about 10^{−2/5·digits} relatively."""
    exact, step = p.on(DIGITS), mpmath.mpf(10) ** -int(0.4 * digits) * mpmath.mpf(float(np.abs(X).max()) or 1.0)
    x = _exact(X)
    here = forward(exact, x, DIGITS, head)
    moved = (x + step * _exact(v.reshape(X.shape)) for v in directions)
    return [((forward(exact, there, DIGITS, head) - here) / step).flatten() for there in moved]


def _norm(x: Array) -> mpmath.mpf:
    return mpmath.sqrt(sum(entry * entry for entry in x.flat))
