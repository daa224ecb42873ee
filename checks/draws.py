"""Random layers and inputs that try to break a claim, and the same layers as lipscope knows them.

Everything follows from a seed and a number. All numbers are float32 numbers times powers of two, so that the layer in
float32 is the very same layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import lipscope
from lipscope.attention.variants import CosineAttention, L2Attention, QKNormAttention, SigmoidAttention, SinkhornAttention
from oracle import Array, Problem, ascend, inside

VARIANTS = ("l2", "cosine", "qk-norm", "sigmoid", "sinkhorn")
INPUTS, ASCENDED = 32, 8  # inputs of every layer, and how many of them have climbed


@dataclass(frozen=True, eq=False)
class Draw:
    """A layer twice, inputs, and the ball they lie in."""

    problem: Problem
    layer: Any
    X: Array  # (B, n, d)
    radius: float
    norm: Any  # the normalisation in front, as lipscope knows it, or None
    note: str


def rounded(a: Any) -> Array:
    """The nearest float32 numbers, as float64."""
    return np.asarray(np.asarray(a, dtype=np.float32), dtype=np.float64)


def visible(rng: np.random.Generator, n: int, heads: int) -> tuple[Any, Array, Array | None]:
    """A mask as lipscope reads it, who sees whom by itself, and what it adds to the scores."""
    i, j = np.arange(n)[:, None], np.arange(n)[None, :]
    w, cut = int(rng.integers(1, n + 1)), int(rng.integers(1, n)) if n > 1 else 1
    document = np.arange(n) >= cut
    same = document[:, None] == document[None, :]
    packed = f"packed:{cut},{n - cut}" if n > 1 else "packed:1"
    hole = np.broadcast_to(i != rng.integers(n), (n, n)) if n > 1 else np.ones((1, 1), dtype=bool)
    holes, each = rng.random((n, n)) < 0.6, rng.random((1, heads, n, n)) < 0.7
    term = rounded(rng.normal(size=(n, n)))
    choices: list[tuple[Any, Array]] = [
        ("full", np.ones((n, n), dtype=bool)), ("full", np.ones((n, n), dtype=bool)), ("causal", j <= i), ("causal", j <= i),
        (f"window:{w}", (j <= i) & (i - j < w)), (f"window:{w}:both", abs(i - j) < w),
        (f"prefix:{cut}", (j <= i) | (j < cut)), (packed, same & (j <= i)), (packed + ":both", same),
        ("pad-right:1", (i < n - 1) & (j < n - 1)) if n > 1 else ("full", same),
        ("causal&pad-left:1", (i > 0) & (j > 0) & (j <= i)) if n > 1 else ("causal", same),
        (torch.from_numpy(holes), holes), (torch.from_numpy(each), each[0]), (torch.from_numpy(hole.copy()), hole),
        (torch.from_numpy(np.where(j <= i, term, -np.inf)), j <= i),
    ]  # fmt: skip
    which = int(rng.integers(len(choices)))
    mask, seen = choices[which]
    return mask, seen.reshape(-1, n, n).copy(), term[None] if which == len(choices) - 1 else None


def rotations(cos: Array, sin: Array, dk: int, interleaved: bool) -> Array:
    """The rotations of all tokens as matrices (n, dk, dk)."""
    n, r = cos.shape
    R = np.tile(np.eye(dk), (n, 1, 1))
    for m in range(r // 2):
        a, b = (2 * m, 2 * m + 1) if interleaved else (m, m + r // 2)
        R[:, a, a] = R[:, b, b] = cos[:, a]
        R[:, a, b], R[:, b, a] = -sin[:, a], sin[:, a]
    return R


def draw(seed: int, number: int, steps: int = 8) -> Draw:
    """Layer ``number`` of a seed with its inputs, the last ones after ``steps`` of ascent."""
    rng = np.random.default_rng([seed, number])
    # One layer of eight has the closed-form lower bounds: one head with plain scores, full or causal.
    closed = number % 8 == 1
    kind = str(rng.choice(VARIANTS)) if rng.random() < 0.2 and not closed else "dot"
    n, d = int(rng.choice([1, 2, 2, 3, 4, 5, 6, 8, 10])), int(rng.integers(1, 7))
    heads, dk, dv = (
        int(rng.choice([1, 1, 1, 2, 3, 4] if not closed else [1])),
        int(rng.integers(1, 5)),
        int(rng.integers(1, 5)),
    )
    groups = heads if kind != "dot" else int(rng.choice([g for g in range(1, heads + 1) if heads % g == 0]))
    plain = kind != "dot" or rng.random() < 0.3
    used = (
        set()
        if plain or closed
        else {f for f in ("b_q", "b_k", "b_v", "cap", "sinks", "added", "turn") if rng.random() < 0.2}
    )
    big, size = (2.0 ** int(rng.choice([0, 0, 0, 0, 10, -10, 66, -66])) for _ in range(2))
    q, k, v = (rng.normal(size=(m, w, d)) for m, w in ((heads, dk), (groups, dk), (groups, dv)))
    shape = rng.random()
    if shape < 0.45 and groups == heads:
        k = q.copy() if shape < 0.15 else -q.copy() if shape < 0.35 else q[:, ::-1].copy()
    radius = 10 ** rng.uniform(-0.5, 0.6)
    sharp = float(rng.choice([0.0, *10 ** rng.uniform(-1.5, 1.2, size=14), 10 ** rng.uniform(2, 4)]))
    sharp = min(sharp, 2.0) if kind == "sinkhorn" else sharp  # so that Sinkhorn's iteration converges
    q *= sharp / max(1e-9, radius**2 * float(np.linalg.norm(k[0].T @ q[0], 2)))
    mask, seen, term = ("full", np.ones((1, n, n), dtype=bool), None) if kind == "sinkhorn" else visible(rng, n, heads)
    if (kind != "dot" and term is not None) or (closed and not (isinstance(mask, str) and mask in ("full", "causal"))):
        mask, seen, term = "causal", np.tril(np.ones((1, n, n), dtype=bool)), None
    fields: dict[str, Any] = {"kind": kind, "scale": 1.0 if rng.random() < 0.5 else float(rounded(rng.normal()))}
    if kind in ("l2", "cosine", "qk-norm"):
        big = size = 1.0
        tau = float(rounded(10 ** rng.uniform(-0.5, 1)))
        fields |= {"scale": 1 / math.sqrt(dk) if kind == "l2" else tau, "eps": 0.01, "nu": 2.0 if kind == "cosine" else 1.0}
        size_q = math.sqrt(sharp + 0.1) / radius / max(1e-9, float(np.linalg.norm(q[0], 2)))
        q = size_q * q if kind == "l2" else rng.normal(size=q.shape)
    q, k, v = rounded(q / size), rounded(k / size), rounded(big * v)
    if sharp > 0 and kind == "dot" and rng.random() < 0.05:
        v[0, 0] = 0.0
    for name, of in (("b_q", q), ("b_k", k), ("b_v", v)):
        if name in used:
            spread = radius * size * np.abs(of).mean() * float(rng.choice([0.3, 1, 10, 100 if name == "b_v" else 1]))
            fields[name] = rounded(min(spread, 1e36) * rng.normal(size=of.shape[:2]))
    if "cap" in used:
        fields["softcap"] = float(rounded(rng.uniform(0.1, 4)))
    if "sinks" in used:
        fields["sinks"] = rounded(rng.normal(size=heads))
    if "added" in used:
        fields["added"] = rounded(rng.normal(size=(heads, n, n)) * rng.choice([1, 5]))
    tables = None
    if "turn" in used and dk > 1:
        r, interleaved = dk - dk % 2, bool(rng.random() < 0.5)
        places = np.arange(n) if rng.random() < 0.6 else rng.integers(0, 40, size=n)
        angles = places[:, None] * float(rng.choice([2.0, 100.0])) ** (-np.arange(0, r, 2) / r)
        angles = np.repeat(angles, 2, -1) if interleaved else np.concatenate([angles, angles], -1)
        stretch = float(rng.choice([1, 1, 0.75, 1.25]))
        tables = (rounded(stretch * np.cos(angles)), rounded(stretch * np.sin(angles)), interleaved)
        fields["turn"] = rotations(tables[0], tables[1], dk, interleaved)
    joined = None if rng.random() < 0.25 else rounded(rng.normal(size=(int(rng.integers(1, 6)), heads * dv)))
    if kind == "sigmoid":
        fields["shift"] = -math.log(n) if rng.random() < 0.7 else float(rounded(rng.normal()))
    norm = None
    if kind == "dot" and rng.random() < 0.15 and d > 1 and not closed:
        centred = bool(rng.random() < 0.6)
        g, beta = rounded(rng.normal(size=d)), rounded(rng.normal(size=d)) if centred and rng.random() < 0.6 else None
        fields |= {"gain": g, "offset": beta, "centred": centred, "eps": 2.0**-17}
        norm = normalisation(g, beta, centred)
    own = fields.get("added")
    added = own if term is None else term if own is None else own + term
    problem = Problem(q, k, v, joined, seen, **(fields | {"added": added}))
    layer = as_layer(problem, mask, tables, own)
    X, ball = inputs(rng, problem, n, d, radius * size, steps)
    note = f"{kind}, n = {n}, d = {d}, {heads}/{groups} heads, mask {layer.mask}, scores {sharp:.2g}, values ×{big:.1g}, "
    note += f"tokens ×{size:.1g}, {', '.join(sorted(used)) or 'plain'}" + ("" if norm is None else ", norm")
    return Draw(problem, layer, X, ball, norm, note)


def inputs(rng: np.random.Generator, p: Problem, n: int, d: int, radius: float, steps: int) -> tuple[Array, float]:
    """So many inputs in a ball, and its radius: spread, on the sphere, in clusters, equal, in two groups, and ascended."""
    normal = rng.normal(size=(INPUTS, n, d))
    X = normal / np.sqrt(d)
    X[8:16] /= np.linalg.norm(X[8:16], axis=-1, keepdims=True)
    X[16:20] = X[16:20, np.arange(n) % 2] + 1e-3 * normal[16:20]
    X[20] = X[20, :1]
    A = p.k[0].T @ p.q[0]
    u = np.linalg.eigh(A / (np.abs(A).max() or 1.0) + (A / (np.abs(A).max() or 1.0)).T)[1][:, 0]
    few = int(rng.integers(1, n + 1))
    for at, second in ((21, -u), (22, u / 2), (23, normal[23, 0] / np.linalg.norm(normal[23, 0]))):
        X[at] = np.where(np.arange(n)[:, None] < few, u, second)
    X = inside(radius * X, radius)
    starts = [0, 1, 8, 9, 16, 21, 22, 23]
    X[-ASCENDED:] = ascend(p, X[starts], radius, steps) if steps else X[starts]
    X = rounded(X)
    return X, float(np.linalg.norm(X, axis=-1).max()) * (1 + 1e-14)


def tensor(a: Array) -> torch.Tensor:
    """A float64 tensor of the rows of all heads."""
    return torch.from_numpy(np.ascontiguousarray(a.reshape(-1, a.shape[-1])))


def flat(a: Array | None) -> torch.Tensor | None:
    """A float64 vector."""
    return None if a is None else torch.from_numpy(np.ascontiguousarray(a.reshape(-1)))


def normalisation(g: Array, beta: Array | None, centred: bool) -> Any:
    """LayerNorm or RMSNorm as lipscope knows it."""
    weight = torch.from_numpy(g)
    return lipscope.LayerNorm(weight, flat(beta), 2.0**-17) if centred else lipscope.RMSNorm(weight, 2.0**-17)


def as_layer(p: Problem, mask: Any, tables: Any = None, added: Array | None = None) -> Any:
    """The layer that lipscope measures; ``added`` is the part of the additive term that does not belong to the mask."""
    k = tensor(p.k)
    shared: dict[str, Any] = {"q": tensor(p.q), "v": tensor(p.v), "heads": p.q.shape[0], "mask": mask}
    shared["out"] = None if p.out is None else tensor(p.out)
    if p.kind == "l2":
        return L2Attention(**shared)
    if p.kind == "cosine":
        return CosineAttention(k=k, tau=p.scale, nu=p.nu, eps=p.eps, **shared)
    if p.kind == "qk-norm":
        return QKNormAttention(k=k, tau=p.scale, eps=p.eps, **shared)
    if p.kind == "sigmoid":
        return SigmoidAttention(k=k, scale=p.scale, shift=p.shift, **shared)
    if p.kind == "sinkhorn":
        return SinkhornAttention(k=k, scale=p.scale, **shared)
    rotary = None if tables is None else lipscope.Rotary(torch.from_numpy(tables[0]), torch.from_numpy(tables[1]), tables[2])
    return lipscope.Attention(
        k=k, kv_heads=p.k.shape[0], scale=p.scale, q_bias=flat(p.b_q), k_bias=flat(p.b_k), v_bias=flat(p.b_v),
        softcap=p.softcap, sinks=flat(p.sinks), rotary=rotary, bias=None if added is None else torch.from_numpy(added),
        **shared,
    )  # fmt: skip
