"""Layers made for rounding to go wrong: cancelling offsets, vanishing and huge scales, sharp scores; mpmath knows σ."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

import lipscope
from draws import as_layer, normalisation, rounded
from layers import LAST_DIGITS
from ledger import Ledger, Truth
from lipscope.bounds import registry
from oracle import Array, Problem

KINDS = (
    "value bias", "value bias and sinks", "offset before the norm", "no queries, query bias", "key bias",
    "tiny or huge values", "tiny or huge tokens", "sharp scores", "saturated soft-cap", "nearly equal tokens",
    "nearly equal tokens behind a norm",
)  # fmt: skip


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
