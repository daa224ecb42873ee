"""Layers made for rounding to go wrong: cancelling offsets and products, vanishing and huge scales; mpmath knows σ."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import torch

import lipscope
from draws import as_layer, normalisation, rotations, rounded
from layers import LAST_DIGITS
from ledger import Ledger, Truth
from lipscope.bounds import registry
from oracle import Array, Problem

KINDS = (
    "value bias", "value bias and sinks", "offset before the norm", "no queries, query bias", "key bias",
    "tiny or huge values", "tiny or huge tokens", "sharp scores", "saturated soft-cap", "nearly equal tokens",
    "nearly equal tokens behind a norm",
)  # fmt: skip
# What cancels in a product of weights that is all rounding in float64: W_KᵀW_Q, as it is, turned, and of sigmoid attention,
# or W_OW_V, as it is and of variants.
CANCELLING = ("scores", "turned scores", "sigmoid scores", "values", "qk-norm values", "l2 values")


def hostile(seed: int, number: int) -> tuple[str, Problem, Array, Any]:
    """A tiny layer, one input (1, n, d), and the normalisation in front of it if any."""
    rng = np.random.default_rng([seed, number, 1])
    kind = KINDS[number % len(KINDS)]
    n, d, heads, w = int(rng.integers(2, 4)), int(rng.integers(1, 3)), int(rng.choice([1, 1, 2])), int(rng.integers(1, 3))
    q, k, v = (rng.normal(size=(heads, w, d)) for _ in range(3))
    X = rng.normal(size=(n, d))
    seen = np.tril(np.ones((1, n, n), dtype=bool)) if rng.random() < 0.4 else np.ones((1, n, n), dtype=bool)
    fields: dict[str, Any] = {"scale": 1.0}
    norm = None
    far = 10 ** rng.uniform(1, 16)
    if kind.startswith("value bias"):
        fields["b_v"] = rounded(far * rng.normal(size=v.shape[:2]))
        if "sinks" in kind:
            fields["sinks"] = rounded(rng.normal(size=heads))
    elif "norm" in kind:
        d = 3
        q, k, v = (rng.normal(size=(heads, w, d)) for _ in range(3))
        X = rng.normal(size=(n, d)) + (min(far, 1e9) if "offset" in kind else 0.0)
        if "nearly" in kind:
            X = rng.normal(size=(1, d)) + 10 ** rng.uniform(-9, -2) * rng.normal(size=(n, d))
        g, beta, centred = rounded(rng.normal(size=d)), rounded(rng.normal(size=d)), bool(rng.random() < 0.7)
        norm = normalisation(g, beta if centred else None, centred)
        fields |= {"gain": g, "offset": beta if centred else None, "centred": centred, "eps": 2.0**-17}
    elif kind.startswith("no queries"):
        q = 0 * q
        fields |= {"b_q": rounded(far**0.5 * rng.normal(size=q.shape[:2])), "b_k": rounded(rng.normal(size=k.shape[:2]))}
    elif kind == "key bias":
        fields["b_k"] = rounded(far * rng.normal(size=k.shape[:2]))
        if rng.random() < 0.3:
            fields["softcap"] = 2.0
    elif kind == "tiny or huge values":
        v = np.ldexp(rounded(v), int(rng.choice([-565, -500, -100, -66, 66, 100, 500, 530])))
    elif kind == "tiny or huge tokens":
        e = int(rng.choice([-300, -100, -66, 66, 100, 300]))
        X, back = np.ldexp(rounded(X), e), 0 if rng.random() < 0.3 else -e
        q, k = np.ldexp(rounded(q), back), np.ldexp(rounded(k), back)
    elif kind == "sharp scores":
        q = q * min(far, 1e15)
    elif kind == "saturated soft-cap":
        q, fields["softcap"] = q * far**0.3, float(rounded(10 ** rng.uniform(-2, 1)))
    elif kind == "nearly equal tokens":
        X = rng.normal(size=(1, d)) * 10 ** rng.uniform(0, 3) + 10 ** rng.uniform(-9, 0) * rng.normal(size=(n, d))
    q, k, v, X = (rounded(a) if 1e-30 < np.abs(a).max() < 1e30 else a for a in (q, k, v, X))
    return kind, Problem(q, k, v, None, seen, **fields), X[None], norm


def cancelling(seed: int, number: int) -> tuple[str, Problem, Array, Any]:
    """A layer whose product of weights cancels, one input, and rotary tables that turn nothing if it has any."""
    rng = np.random.default_rng([seed, number, 5])
    kind = CANCELLING[number % len(CANCELLING)]
    n, d = int(rng.integers(2, 5)), int(rng.integers(1, 3))
    seen = np.tril(np.ones((1, n, n), dtype=bool)) if rng.random() < 0.4 else np.ones((1, n, n), dtype=bool)
    if rng.random() < 0.5:
        # leftᵀright = 0 exactly, and what float64 makes of it depends on the order.
        terms = np.array([2.0**60, *[-65.0] * 4, -(2.0**60), *[65.0] * 4])
        left, right = np.ones((10, d)), rng.permutation(terms)[:, None] * np.ones(d)
    else:
        # Two terms that are equal up to their last digits, which are of size 1 and more.
        e, a, b, far = rng.normal(size=d), *rng.normal(size=2), 10 ** rng.uniform(16, 19)
        left = np.stack([a * e, b * e])
        right = np.stack([far * np.ones(d), -far * a / b * np.ones(d)])
    fields: dict[str, Any] = {"scale": 1.0}
    one, tables = np.eye(d)[None], None
    X = rng.normal(size=(1, n, d))
    if number // len(CANCELLING) % 2:
        X = np.where(np.arange(n)[:, None] < 1, 1.0, -1.0) * np.ones((1, n, d))
    X /= np.linalg.norm(X, axis=-1).max()
    if "scores" in kind:
        if kind.startswith("turned"):
            tables = np.ones((n, len(left))), np.zeros((n, len(left))), False
            fields["turn"] = rotations(tables[0], tables[1], len(left), False)
        fields |= {"kind": "sigmoid", "shift": -float(rng.integers(1, 40))} if kind.startswith("sigmoid") else {}
        return kind, Problem(right[None], left[None], one, None, seen, **fields), X, tables
    q = rng.normal(size=(1, 1, d))
    fields |= {"kind": kind.split()[0], "eps": 0.01} if kind != "values" else {}
    return kind, Problem(q, q.copy(), left[None], right[:, :1].T.copy(), seen, **fields), X, None


def check_cancelling(seed: int, number: int) -> Ledger:
    """Set bounds of one such layer against σ at one input, and lower bounds against σ at their own tokens."""
    ledger = Ledger()
    kind, p, X, tables = cancelling(seed, number)
    causal, radius, n = not p.seen.all(), float(np.linalg.norm(X, axis=-1).max()) * (1 + 1e-14), X.shape[1]
    where = f"--seed {seed} --only cancelling:{number} ({kind}; n = {n}, d = {X.shape[2]})"
    layer = as_layer(p, "causal" if causal else "full", tables)
    truth = Truth(p, X, digits=200)
    truth.known[0] = truth.exact(0)
    given: dict[str, Any] = {"radius": radius, "n": n}
    if p.kind == "sigmoid":
        given["x"] = torch.from_numpy(X[0])
    found = ledger.guarded("cancelling: bounds", where, lambda: list(registry.applicable(layer, side="upper", **given)))
    for bound in found or []:
        if bound.norm == "Frobenius" and bound.kind in ("set", "local"):
            truth.upper(ledger, f"cancelling: {bound.name}", bound.value, 0, f"{bound.name} at {where}", LAST_DIGITS)
    for name in registry.names(layer):
        if name.startswith("lower.") and name != "lower.measured":
            call = partial(registry.evaluate, name, layer, radius=radius, n=n)
            bound = ledger.guarded(f"cancelling: {name}", where, call)
            if bound is not None:
                reached = most_over_n(p, radius, causal) if bound.tokens is None else exact_sigma(p, bound.tokens.numpy())
                short = not bound.value <= reached * (1 + LAST_DIGITS)
                broken = f"{bound.value!r}, but at most {float(reached)!r} is reached at {where}" if short else None
                ledger.record(f"cancelling: {name}", float(reached / bound.value) if bound.value else math.inf, broken)
    return ledger


def exact_sigma(p: Problem, X: Array) -> Any:
    """σ at tokens (n, d) in 200 digits."""
    return Truth(p, X[None], digits=200).exact(0)


def most_over_n(p: Problem, radius: float, causal: bool) -> Any:
    """What no supremum over n exceeds: Theorems 1 and 2 with exact Frobenius norms of A and V."""
    exact = np.frompyfunc(mpmath.mpf, 1, 1)
    with mpmath.workdps(200):
        A, V = exact(p.k[0]).T @ exact(p.q[0]), exact(p.v[0]) if p.out is None else exact(p.out) @ exact(p.v[0])
        a, v = (mpmath.sqrt(sum(entry * entry for entry in M.flat)) for M in (A, V))
        a = p.scale * a * mpmath.mpf(radius) ** 2
        top = (2 + mpmath.mpf(2) ** (mpmath.mpf(5) / 3) * a) if causal else mpmath.sqrt(1 + a * a)
        return v * (top * mpmath.exp(a) + a)


def check_hostile(seed: int, number: int) -> Ledger:
    """Intervals, certificates and bounds of one such layer."""
    ledger = Ledger()
    kind, p, X, norm = hostile(seed, number)
    where = f"--seed {seed} --only rounding:{number} ({kind}; n = {X.shape[1]}, d = {X.shape[2]}, {len(p.q)} heads)"
    truth = Truth(p, X, digits=200)
    truth.known[0] = truth.exact(0)
    if not 1e-300 < float(truth.known[0]) < 1e300:
        return ledger
    layer, tokens = as_layer(p, "causal" if not p.seen.all() else "full"), torch.from_numpy(X)
    scope: dict[str, Any] = {} if norm is None else {"scope": "norm+attention", "norm": norm}

    def measured(dtype: torch.dtype, **options: Any) -> Any:
        return lipscope.local_lipschitz(layer.to(dtype), tokens.to(dtype), **scope, **options)

    ways: dict[str, Any] = {
        "float64, dense": {"dtype": torch.float64, "certificate": True},
        "float64, Golub–Kahan": {"dtype": torch.float64, "solver": lipscope.GolubKahan(delta=1e-9), "certificate": False},
        "float32, dense": {"dtype": torch.float32, "certificate": False},
    }
    single = all(bool((a.float().double() == a).all()) for a in (layer.q, layer.k, layer.v, tokens))
    for way, options in ways.items():
        if options["dtype"] == torch.float32 and not single:
            continue
        result = ledger.guarded(f"rounding: {way}", where, partial(measured, **options))
        if result is not None:
            truth.interval(ledger, f"rounding: {way}", result, where)
            if result.certified is not None:
                truth.upper(ledger, "rounding: certified end", float(result.certified[0]), 0, where, 0.0)
    if norm is None:
        radius = float(np.linalg.norm(X[0] / np.abs(X).max(), axis=-1).max() * np.abs(X).max()) * (1 + 1e-14)
        call = {"x": tokens[0], "radius": radius, "n": X.shape[1], "side": "upper"}
        found = ledger.guarded("rounding: bounds", where, lambda: list(registry.applicable(layer, **call)))
        for bound in found or []:
            if bound.norm == "Frobenius" and bound.kind in ("set", "local"):
                tolerance = 0.0 if bound.name.startswith("certificates.") else LAST_DIGITS
                name = "certificates" if tolerance == 0 else f"{bound.kind} bounds of the registry"
                truth.upper(ledger, f"rounding: {name}", bound.value, 0, f"{bound.name} at {where}", tolerance)
    return ledger
