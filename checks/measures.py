"""The supremum over all numbers of tokens: weighted atoms on a ball, a sphere or the image of a normalisation, ascended.

Moving the atoms of Σ_i m_i δ_{x_i} has the local constant ‖D^½JD^{−½}‖₂, D the masses, which no bound for every n may be
below: a measure with rational masses is a sequence of tokens, and long ones come as close to the others as one likes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import torch

from draws import as_layer, normalisation, rounded
from layers import LAST_DIGITS
from ledger import Ledger
from lipscope.bounds import domain, exponent, sets
from oracle import FLOATS, Problem, forward

MEASURES, STEPS = 24, 25
Tensor = torch.Tensor


def token_set(rng: np.random.Generator, d: int) -> tuple[str, Any, Any]:
    """A set of tokens: its name, as lipscope knows it, and a map from any numbers (…, d) into it."""
    R, kind = 10 ** rng.uniform(-0.3, 0.4), str(rng.choice(["ball", "sphere", "image of RMSNorm", "image of LayerNorm"]))
    g, beta = rounded(R * rng.normal(size=d) / math.sqrt(d)), rounded(0.3 * rng.normal(size=d))
    if kind == "ball" or d == 1:
        return "ball", domain.ball(R), lambda z: z * torch.clamp(R / z.norm(dim=-1, keepdim=True), max=1.0)
    if kind == "sphere":
        return kind, domain.sphere(R, d), lambda z: R * z / z.norm(dim=-1, keepdim=True)
    centred = kind.endswith("LayerNorm")
    norm, gains, offset = normalisation(g, beta if centred else None, centred), torch.from_numpy(g), torch.from_numpy(beta)

    def place(z: Tensor) -> Tensor:
        z = z - z.mean(-1, keepdim=True) if centred else z
        x = gains * z * torch.clamp(math.sqrt(d) / z.norm(dim=-1, keepdim=True), max=1.0)
        return x + offset if centred else x

    return kind, domain.image(norm), place


def check_measures(seed: int, number: int) -> Ledger:
    """The largest constant found on one set for one layer, against the bounds for every n; and the exponent itself."""
    ledger, rng = Ledger(), np.random.default_rng([seed, number, 4])
    d, heads, width, causal = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2])), int(rng.integers(1, 4)), bool(number % 2)
    kind, where, place = token_set(rng, d)
    q, k, v = (rng.normal(size=(heads, width, d)) for _ in range(3))
    k = rng.choice([1.0, -1.0]) * q if rng.random() < 0.6 else k
    q *= 10 ** rng.uniform(-1, 1) / max(1e-9, where.radius**2 * float(np.linalg.norm(k[0].T @ q[0], 2)))
    n = int(rng.integers(2, 6))
    seen = np.tril(np.ones((1, n, n), dtype=bool)) if causal else np.ones((1, n, n), dtype=bool)
    p = Problem(rounded(q), rounded(k), rounded(v), None, seen, scale=1.0)
    if rng.random() < 0.3:
        p = dataclasses.replace(p, b_q=rounded(rng.normal(size=q.shape[:2]) * np.abs(q).mean()))
    layer, prepared = as_layer(p, "causal" if causal else "full"), p.on(FLOATS)
    mask = "causal" if causal else "full"
    text = f"--seed {seed} --only measures:{number} ({kind} of radius {where.radius:.3g}, {mask}, {n} atoms)"

    def constant(z: Tensor, log_masses: Tensor) -> Tensor:
        weighted = dataclasses.replace(prepared, added=log_masses.expand(1, n, n))
        J = torch.func.jacrev(lambda x: forward(weighted, x, FLOATS))(place(z))
        roots = torch.exp((log_masses[:, None] - log_masses[None, :]) / 2)
        size: Tensor = torch.linalg.matrix_norm((J * roots[:, None, :, None]).reshape(J.shape[0] * J.shape[1], -1), 2)
        return size

    z = torch.from_numpy(rng.normal(size=(MEASURES, n, d)) * rng.choice([0.3, 1, 3])).requires_grad_()
    log_masses = torch.from_numpy(rng.uniform(-8, 0, size=(MEASURES, n))).requires_grad_()
    optimiser = torch.optim.Adam([{"params": [z], "lr": 0.1}, {"params": [log_masses], "lr": 0.3}])
    best = 0.0
    for _ in range(STEPS):
        optimiser.zero_grad()
        found = torch.func.vmap(constant)(z, log_masses)
        best = max(best, float(found.detach().nan_to_num(0.0).max()))
        (-found.clamp_min(1e-300).log().nan_to_num(0.0).sum()).backward()
        if not all(bool(torch.isfinite(t.grad).all()) for t in (z, log_masses) if t.grad is not None):
            break
        optimiser.step()
    bounds = {f"covering.exponent, {kind}": lambda: exponent.covering_exponent(layer, where.radius, domain=where)}
    if causal:
        bounds["refined.masked"] = lambda: sets.refined_masked(layer, where.radius)
    else:
        bounds["refined.unmasked"] = lambda: sets.refined_unmasked(layer, where.radius)
        bounds["castin2024.meanfield"] = lambda: sets.castin2024_meanfield(layer, where.radius)
    for name, call in bounds.items():
        claim = f"every n: {name}"
        bound = ledger.guarded(claim, text, call)
        if bound is not None:
            short = not bound.value >= best * (1 - 1e-9)
            ledger.record(claim, bound.value / best, f"{bound.value!r} < {best!r} at {text}" if short else None, MEASURES)
            if name.startswith("covering"):
                E = largest_exponent(p, place, rng)
                short = not bound.inputs["E"] >= E - LAST_DIGITS * max(1.0, E)
                broken = f"E = {bound.inputs['E']!r} < {E!r} at {text}" if short else None
                ledger.record(f"every n: E of {name}", bound.inputs["E"] / E if E > 0 else math.inf, broken)
    return ledger


def largest_exponent(p: Problem, place: Any, rng: np.random.Generator) -> float:
    """The largest (y − x)ᵀ(Ax + c) over heads and pairs of tokens that ascent finds."""
    best = 0.0
    for h in range(len(p.q)):
        A = torch.from_numpy(p.k[h].T @ p.q[h])
        c = torch.zeros(A.shape[0], dtype=A.dtype) if p.b_q is None else torch.from_numpy(p.k[h].T @ p.b_q[h])
        z = torch.from_numpy(rng.normal(size=(2, 64, A.shape[0]))).requires_grad_()
        optimiser = torch.optim.Adam([z], lr=0.1)
        for _ in range(80):
            optimiser.zero_grad()
            x, y = place(z)
            E = ((y - x) * (x @ A.T + c)).sum(-1)
            best = max(best, float(E.detach().max()))
            (-E.sum()).backward()
            optimiser.step()
    return best
