"""The truth about σ of tiny layers in a hundred digits, by mpmath and without the project's code; layers that lose digits.

Every tensor of a layer is taken for the exact numbers that it holds. The Jacobian is written entry by entry,

    ∂o_i = Σ_j P_ij ( W_V ∂x_j + (v_j − o_i) ∂s_ij ),    ∂s_ij = τ slope_ij ( k_j·∂q_i + q_i·∂k_j ),

with biases, offsets and sinks as they are: nothing is left out because it cancels, digits are cheap here.
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mpmath import mp, mpf
from torch import Tensor

import lipscope
from lipscope import local_lipschitz
from lipscope.attention.norms import LayerNorm, Normalisation, RMSNorm
from lipscope.attention.tiled import Tiling, using_tiling
from lipscope.measure.sigma import certificate_at
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Auto, Dense, GolubKahan

DIGITS = 100


def exact(tensor: Tensor) -> Any:
    """A tensor as nested lists of mpmath numbers."""
    return np.vectorize(mpf, otypes=[object])(tensor.detach().double().numpy())


def true_sigma(layer: lipscope.Attention, X: Tensor, norm: Normalisation | None = None, head: int | None = None) -> mpf:
    """σ of one input (n, d): of the whole layer, behind a normalisation, or of one head before W_O."""
    with mp.workdps(DIGITS):
        x, D = exact(X), None
        if norm is not None:
            x, D = _normalised(norm, x)
        J = _jacobian(layer, x, head)
        if D is not None:
            n, d = x.shape
            J = np.concatenate([J[:, j * d : (j + 1) * d] @ D[j] for j in range(n)], axis=1)
        return _largest(J)


def _largest(J: Any) -> mpf:
    """‖J‖ as the gain of the top vector of its rounded copy: the error of the vector enters squared."""
    size = max((abs(value) for value in J.flat), default=mpf(0))
    if size == 0:
        return mpf(0)
    small = J / size
    _, _, right = np.linalg.svd(small.astype(float))
    v = np.vectorize(mpf, otypes=[object])(right[0])
    gain = small @ v
    return size * mp.sqrt(sum(g * g for g in gain) / sum(t * t for t in v))


def _normalised(norm: Normalisation, x: Any) -> tuple[Any, list[Any]]:
    """The normalised tokens and the Jacobian of every one, by the quotient rule."""
    g, d = exact(norm.weight), x.shape[1]
    beta = np.array([mpf(0)] * d, dtype=object) if norm.bias is None else exact(norm.bias)
    outputs, jacobians = [], []
    for token in x:
        mean = sum(token) / d if norm.centred else mpf(0)
        about = token - mean
        s = mp.sqrt(sum(t * t for t in about) / d + mpf(norm.eps))
        D = np.empty((d, d), dtype=object)
        for a in range(d):
            for b in range(d):
                moved = mpf(a == b) - (mpf(1) / d if norm.centred else 0)
                # ∂s/∂x_b = about_b/(d·s): the mean moves s by Σ about = 0.
                D[a, b] = g[a] * (moved / s - about[a] * about[b] / (d * s**3))
        outputs.append(g * about / s + beta)
        jacobians.append(D)
    return np.array(outputs), jacobians


def _jacobian(layer: lipscope.Attention, x: Any, head: int | None) -> Any:
    n, d = x.shape
    heads = range(layer.heads) if head is None else [head]
    blocks = [_head(layer, x, h) for h in heads]
    stacked = np.concatenate([block.reshape(n, -1, n * d) for block in blocks], axis=1)
    if head is None and layer.out is not None:
        out = exact(layer.out)
        stacked = np.stack([out @ rows for rows in stacked])
    return stacked.reshape(-1, n * d)


def _head(layer: lipscope.Attention, x: Any, h: int) -> Any:
    """The Jacobian (n, dv, n·d) of one head."""
    n, d = x.shape
    shared, dk, dv = h * layer.kv_heads // layer.heads, layer.head_width, layer.value_width
    tau = 1 / mp.sqrt(mpf(dk)) if layer.scale is None else mpf(layer.scale)
    WQ, WK, WV = (
        exact(w[p * m : (p + 1) * m]) for w, p, m in ((layer.q, h, dk), (layer.k, shared, dk), (layer.v, shared, dv))
    )
    zero = mpf(0)
    bQ, bK, bV = (
        np.array([zero] * m, dtype=object) if b is None else exact(b[p * m : (p + 1) * m])
        for b, p, m in ((layer.q_bias, h, dk), (layer.k_bias, shared, dk), (layer.v_bias, shared, dv))
    )
    turns = [_turn(layer, i, dk) for i in range(n)]
    MQ, MK = [R @ WQ for R in turns], [R @ WK for R in turns]
    q = [M @ t + R @ bQ for M, R, t in zip(MQ, turns, x, strict=True)]
    k = [M @ t + R @ bK for M, R, t in zip(MK, turns, x, strict=True)]
    v = [WV @ t + bV for t in x]
    allowed = layer.mask.allowed(n)
    added = layer.mask.additive(n)
    J = np.full((n, dv, n * d), zero, dtype=object)
    for i in range(n):
        scores, slopes = {}, {}
        for j in range(n):
            if allowed is not None and not bool(allowed[0, h if allowed.shape[1] > 1 else 0, i, j]):
                continue
            s, slope = tau * (q[i] @ k[j]), mpf(1)
            if layer.softcap is not None:
                c = mpf(layer.softcap)
                slope = mp.sech(s / c) ** 2
                s = c * mp.tanh(s / c)
            for extra in (added, layer.bias):
                if extra is not None:
                    e = extra.reshape((1,) * (4 - extra.ndim) + tuple(extra.shape))
                    s += exact(e[0, h if e.shape[1] > 1 else 0, i, j][None])[0]
            scores[j], slopes[j] = s, slope
        if not scores:
            continue
        top = max(scores.values())
        weight = {j: mp.exp(s - top) for j, s in scores.items()}
        total = sum(weight.values())
        if layer.sinks is not None:
            total += mp.exp(exact(layer.sinks)[h] - top)
        P = {j: w / total for j, w in weight.items()}
        o = sum(P[j] * v[j] for j in P)
        for j in P:
            J[i, :, j * d : (j + 1) * d] += P[j] * WV
            factor = P[j] * slopes[j]
            change = v[j] - o
            J[i, :, j * d : (j + 1) * d] += factor * tau * np.outer(change, q[i] @ MK[j])
            J[i, :, i * d : (i + 1) * d] += factor * tau * np.outer(change, k[j] @ MQ[i])
    return J


def _turn(layer: lipscope.Attention, i: int, dk: int) -> Any:
    R = np.array([[mpf(a == b) for b in range(dk)] for a in range(dk)], dtype=object)
    if layer.rotary is None:
        return R
    cos, sin, r = exact(layer.rotary.cos[i]), exact(layer.rotary.sin[i]), layer.rotary.width
    pairs = (
        [(2 * m, 2 * m + 1) for m in range(r // 2)] if layer.rotary.interleaved else [(m, m + r // 2) for m in range(r // 2)]
    )
    for a, b in pairs:
        R[a, a] = R[b, b] = cos[a]
        R[a, b], R[b, a] = -sin[a], sin[a]
    return R


@dataclass
class Case:
    """A layer at tokens (n, d), perhaps behind a normalisation, and what is hard about it."""

    layer: lipscope.Attention
    X: Tensor
    norm: Normalisation | None
    about: str

    @property
    def scope(self) -> str:
        """The scope that is measured."""
        return "attention" if self.norm is None else "norm+attention"


MASKS = (None, "causal", "window:2", "packed:2,{}", "prefix:2", "pad-left:1", "window:2:both")


def draw(seed: int, dtype: torch.dtype, *, ordinary: bool = False) -> Case:
    """A random small layer with offsets that cancel and scales of up to 10^±20 (of values up to 10^±160 in float64)."""
    pick, torch_pick = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch_pick, dtype=torch.float64)

    def often(p: float) -> bool:
        return pick.random() < p

    def power(low: float, high: float) -> float:
        return 10 ** pick.uniform(low, high)

    wide = dtype == torch.float64
    n, d = pick.randint(1, 5), pick.randint(1, 4)
    heads = pick.choice((1, 1, 2, 4))
    kv = pick.choice([m for m in (1, 2, 4) if heads % m == 0])
    dk, dv = pick.randint(1, 3), pick.randint(1, 3)
    far = 0.0 if ordinary else (20.0 if wide else 8.0)
    sizes = {name: power(-far, far) if often(0.3) else 1.0 for name in ("x", "v", "out", "qk")}
    if wide and far and often(0.1):
        sizes["v"] = power(-160, 160)
    sharp = power(-2, 2.3)
    about = []

    def offset(name: str, p: float, high: float) -> float:
        if ordinary or not often(p):
            return 0.0
        found = power(0, high)
        about.append(f"{name} 1e{math.log10(found):.1f}")
        return found

    most = 14.0 if wide else 6.0
    X = (
        normal(n, d)
        + offset("common token", 0.3, most / 2) * normal(1, d)
        + offset("token mean", 0.3, most / 2) * normal(n, 1)
    )
    X = X * sizes["x"]
    x_size = float(X.norm(dim=-1).max()) or 1.0
    norm: Normalisation | None = None
    gains = normal(d) * power(-far / 4, far / 4)
    kind = pick.choice((None, None, None, "layer", "rms"))
    if kind == "layer":
        beta = offset("beta", 0.4, most / 2) * normal(d) * float(gains.abs().max())
        eps = pick.choice((0.0, 1e-12, 1e-5)) if sizes["x"] == 1 and d > 1 else 0.0 if d > 1 else 1e-5
        norm = LayerNorm(gains.to(dtype), beta.to(dtype), eps)
    elif kind == "rms":
        norm = RMSNorm(gains.to(dtype), pick.choice((0.0, 1e-6)) if sizes["x"] == 1 else 0.0)
    if norm is not None:
        x_size = d**0.5 * float(gains.abs().max())
    spread = 1.0 if norm is not None else sizes["x"] / x_size
    q, k = normal(heads * dk, d) * sharp / x_size * sizes["qk"], normal(kv * dk, d) / x_size / sizes["qk"]
    v, out = normal(kv * dv, d) * sizes["v"], normal(pick.randint(1, 4), heads * dv) * sizes["out"]
    if often(0.15):
        q = q * 0
        about.append("W_Q 0")
    if often(0.1):
        q[: (heads * dk) // 2] = 0
    b_q = normal(heads * dk) * sizes["qk"] * sharp * (offset("b_Q", 0.3, 2) or 1.0) if often(0.6) else None
    b_k = normal(kv * dk) / sizes["qk"] * (offset("b_K", 0.4, most) or 1.0) if often(0.6) else None
    b_v = normal(kv * dv) * sizes["v"] * x_size * spread * (offset("b_V", 0.6, most + 4) or 1.0) if often(0.6) else None
    mask = pick.choice(MASKS if n >= 3 else MASKS[:2])
    mask = None if mask is None else mask.format(n - 2)
    rotary = None
    if dk == 2 and often(0.4):
        rotary = lipscope.Rotary.from_base(2, base=10.0, n=n, interleaved=often(0.5), dtype=dtype)
        about.append("rotary")
    softcap = power(-0.5, 2) if often(0.2) else None
    sinks = normal(heads) * power(-1, 2) if often(0.25) else None
    bias = normal(n, n) * power(-1, 2) if often(0.2) else None
    extras = {"softcap": softcap, "sinks": sinks, "bias": bias, str(kind): norm}
    about += [name for name, value in extras.items() if value is not None]
    layer = lipscope.Attention(
        *(t.to(dtype) for t in (q, k, v)), out=None if often(0.3) else out.to(dtype), heads=heads, kv_heads=kv,
        **{name: None if t is None else t.to(dtype)
           for name, t in (("q_bias", b_q), ("k_bias", b_k), ("v_bias", b_v), ("sinks", sinks), ("bias", bias))},
        mask=mask, softcap=softcap, rotary=rotary,
    )  # fmt: skip
    return Case(layer, X.to(dtype), norm, f"seed {seed} n={n} d={d} H={heads}/{kv} {mask} " + ", ".join(about))


def search(seeds: range, dtype: torch.dtype) -> Counter[str]:
    """How often intervals and certificates miss σ of drawn layers, by kind; heads of layers with several are cases too."""
    counts: Counter[str] = Counter()

    def look(kind: str, truth: Any, measure: Callable[[], tuple[float, float]]) -> None:
        counts[f"{kind}: cases"] += 1
        try:
            lower, upper = measure()
            counts[f"{kind}: misses"] += not mpf(lower) <= truth <= mpf(upper)
        except FloatingPointError:
            counts[f"{kind}: refused"] += 1
        except Exception as error:
            counts[f"{kind}: {type(error).__name__}"] += 1

    head = {"scope": "head", "certificate": True}
    for seed in seeds:
        case = draw(seed, dtype)
        truth = true_sigma(case.layer, case.X, case.norm)
        for kind, solver, tiling in (
            ("exact", Auto(), Tiling()),
            ("iterative", GolubKahan(), Tiling()),
            ("tiled", Dense(), Tiling(tile=(2, 2), dense=-1, keep=0)),
        ):
            options = {"scope": case.scope, "norm": case.norm, "solver": solver, "certificate": False}
            with using_tiling(tiling):
                look(kind, truth, lambda case=case, options=options: _ends(local_lipschitz(case.layer, case.X, **options)))
        for kind, memory in (("certificate", None), ("certificate, strips", 1)):
            given = (case.layer, case.X[None], case.scope, case.norm, memory)
            look(kind, truth, lambda given=given: (0.0, float(certificate_at(*given)[0])))
        for h in range(case.layer.heads if case.norm is None and case.layer.heads > 1 else 0):
            truth = true_sigma(case.layer, case.X, head=h)
            look("head", truth, lambda case=case, h=h: _ends(local_lipschitz(case.layer, case.X, **head)[h]))
            look(
                "head, certificate",
                truth,
                lambda case=case, h=h: (0.0, float(local_lipschitz(case.layer, case.X, **head)[h].certified)),
            )
    return counts


def _ends(result: SpectralNorm) -> tuple[float, float]:
    return result.lower, result.upper


if __name__ == "__main__":
    for dtype in (torch.float64, torch.float32):
        for kind, count in sorted(search(range(int(sys.argv[1])), dtype).items()):
            print(dtype, kind, count)
