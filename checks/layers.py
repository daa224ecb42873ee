"""All claims about one random layer: registered bounds, intervals, balls, limits, and lower bounds that must be reached."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import mpmath  # type: ignore[import-untyped]
import numpy as np
import torch

import lipscope
from draws import ASCENDED, Draw, draw
from ledger import Ledger, Truth
from lipscope.attention.tiled import Tiling, using_tiling
from lipscope.bounds import registry
from lipscope.bounds.bound import Bound
from lipscope.bounds.certificates import certified_upper
from oracle import DIGITS, FLOATS, Array, Problem, forward, inside, jacobians, sigmas

# Set bounds are formulas evaluated in float64 without a margin: their last digits are not part of the claim. Certificates
# and intervals say that they cover rounding, and are taken at their word.
LAST_DIGITS = 1e-12
TILES = Tiling(tile=(2, 3), dense=0, keep=0)
Extra = Callable[[Any], Sequence[Bound]]


def check_layer(seed: int, number: int, extra: Extra | None = None, steps: int = 6) -> Ledger:
    """All claims at the inputs of one layer; ``extra`` adds bounds to those of the registry, to see the checker fail."""
    ledger, drawn = Ledger(), draw(seed, number, steps)
    where = f"--seed {seed} --only layers:{number} ({drawn.note})"
    truth = Truth(drawn.problem, drawn.X)
    if not np.isfinite(truth.sigma).all():
        raise ArithmeticError(f"the oracle overflows: {where}")
    ledger.record("inputs", math.inf, cases=len(drawn.X))
    intervals(ledger, drawn, truth, where, number)
    if drawn.norm is None:
        bounds(ledger, drawn, truth, where, number, extra)
    return ledger


def intervals(ledger: Ledger, drawn: Draw, truth: Truth, where: str, number: int) -> None:
    """The interval of every way to measure the layer."""
    layer, X = drawn.layer, torch.from_numpy(drawn.X)
    scope: dict[str, Any] = {} if drawn.norm is None else {"scope": "norm+attention", "norm": drawn.norm}
    label = "" if drawn.norm is None else ", norm+attention"
    krylov, known = lipscope.GolubKahan(delta=1e-9, seed=number), isinstance(layer, lipscope.Attention)
    single = layer.to(torch.float32)

    def measured(one: Any, tokens: Any, tiled: bool = False, certificate: bool = False, **options: Any) -> Any:
        wanted = certificate if known else None
        if not tiled:
            return lipscope.local_lipschitz(one, tokens, certificate=wanted, **scope, **options)
        with using_tiling(TILES):
            return lipscope.local_lipschitz(one, tokens, certificate=wanted, **scope, **options)

    ways: dict[str, Callable[[], Any]] = {
        "float64, dense": lambda: measured(layer, X),
        "float32, dense": lambda: measured(single, X.float()),
        "float64, Golub–Kahan": lambda: measured(layer, X, solver=krylov),
        "float64, tiles, Golub–Kahan": lambda: measured(layer, X, True, solver=krylov),
        "float32, tiles, dense": lambda: measured(single, X.float(), True),
        "float32, tiles, Golub–Kahan": lambda: measured(single, X.float(), True, solver=krylov),
    }
    for k, (way, call) in enumerate(ways.items()):
        name = f"interval: {way}{label}"
        if k > 1 and (number + k) % 2:
            continue
        result = ledger.guarded(name, where, call)
        if result is not None:
            truth.interval(ledger, name, result, where)
    if known:
        result = ledger.guarded("certified end" + label, where, lambda: measured(layer, X[-ASCENDED:], certificate=True))
        if result is not None:
            tightest(ledger, "certified end" + label, result.certified, truth, where)
    if known and drawn.norm is None:
        height, name = 1 + number % X.shape[1], "certified end, several strips"
        ends = ledger.guarded(name, where, lambda: certified_upper(layer, X[-ASCENDED:], height=height))
        if ends is not None:
            tightest(ledger, name, ends, truth, f"{where} height {height}")
    if known and drawn.norm is None and layer.heads > 1:
        h, name = number % layer.heads, "interval: float64, dense, each head"
        last = X[-ASCENDED:]
        result = ledger.guarded(name, where, lambda: lipscope.local_lipschitz(layer, last, scope="head", certificate=True))
        if result is not None:
            alone = Truth(drawn.problem, drawn.X[-ASCENDED:], h)
            ends = SimpleNamespace(lower=result.lower[:, h], upper=result.upper[:, h], rounding=result.rounding[:, h])
            alone.interval(ledger, name, ends, f"{where} head {h}")
            tightest(ledger, "certified end, each head", result.certified[:, h], alone, f"{where} head {h}")


def tightest(ledger: Ledger, name: str, values: Any, truth: Truth, where: str) -> None:
    """Certified ends of the last inputs; the tightest is looked at closely."""
    sigma, skipped = truth.sigma[-len(values) :], len(truth.sigma) - len(values)
    ratios = np.where(sigma > 0, values.numpy() / np.where(sigma > 0, sigma, 1.0), math.inf)
    b = int(np.where(np.isnan(ratios), -math.inf, ratios).argmin())
    truth.upper(ledger, name, float(values[b]), skipped + b, where, 0.0, len(values))


def bounds(ledger: Ledger, drawn: Draw, truth: Truth, where: str, number: int, extra: Extra | None) -> None:
    """Every registered bound: on the ball, at single inputs, by ``table``, and ``certify`` around one input."""
    n, X, top = drawn.X.shape[1], torch.from_numpy(drawn.X), int(truth.sigma.argmax())

    def applicable(**given: Any) -> list[Bound]:
        return list(registry.applicable(drawn.layer, **given))

    on_set = ledger.guarded("bounds on sets", where, partial(applicable, radius=drawn.radius, n=n))
    on_set = [*(on_set or []), *(extra(drawn.layer) if extra else [])]
    for found in on_set:
        if found.side == "upper":
            check_upper(ledger, found, drawn, truth, top, where, len(X))
        else:
            check_lower(ledger, found, on_set, drawn, where)
    for b in sorted({top, number % 8, 8 + number % 8, 16 + number % 8, *range(24 + number % 3, 32, 3)}):
        local = ledger.guarded("bounds at one input", where, partial(applicable, x=X[b]))
        for found in local or []:
            check_upper(ledger, found, drawn, truth, b, where)
    table = ledger.guarded("bounds.table", where, lambda: lipscope.bounds.table(drawn.layer, X[top]))
    if table is not None:
        truth.interval(ledger, "interval: of bounds.table", table.sigma, where, top)
        for found in table.bounds:
            if found.side == "upper" and found.kind == "set":
                check_upper(ledger, found, drawn, truth, top, f"{where} table")
    if isinstance(drawn.layer, lipscope.Attention):
        ball(ledger, drawn, where, number)


def check_upper(ledger: Ledger, found: Bound, drawn: Draw, truth: Truth, b: int, where: str, cases: int = 1) -> None:
    """An upper bound against σ at input b, in the norm that it is for."""
    p, (_, n, d) = drawn.problem, drawn.X.shape
    if found.kind == "limit":
        gap = smallest_gap(p, drawn.X[b])
        if gap > 0 and p.b_q is None and p.b_k is None:
            r = 10 * math.sqrt(max(1.0, 80 / gap))
            far = Truth(p, r * drawn.X[b : b + 1]).sigma[0]
            ratio = found.value / far if far > 0 else math.inf
            wrong = not ratio >= 1 - 1e-6 or (len(p.q) == 1 and math.isfinite(ratio) and not ratio <= 1 + 1e-6)
            text = f"{found.value!r} against σ({r:.3g}·X) = {far!r} at {where} input {b}"
            ledger.record(found.name, ratio, text if wrong else None)
    elif found.norm == "Frobenius":
        tolerance = 0.0 if found.name.startswith(("certificates.", "ball.")) else LAST_DIGITS
        truth.upper(ledger, found.name, found.value, b, where, tolerance, cases)
    else:
        gain = float(token_gain(truth.J, n).max()) * (math.sqrt(d * n / truth.J.shape[1]) if "√d" in found.norm else 1.0)
        broken = None if found.value >= gain * (1 - 1e-9) else f"{found.value!r} < {gain!r} ({found.norm}) at {where}"
        ledger.record(found.name, found.value / gain if gain > 0 else math.inf, broken, cases)


def token_gain(J: Array, n: int, rounds: int = 6) -> Array:
    """At most the largest max_i‖(Jε)_i‖ over ‖ε_j‖ ≤ 1, by alternating between ε and the direction of the output."""
    blocks = J.reshape(len(J), n, -1, n, J.shape[2] // n)
    u = np.random.default_rng(0).normal(size=blocks.shape[:3])
    size = np.abs(blocks).max(axis=(1, 2, 3, 4), keepdims=True)
    blocks = blocks / np.where(size > 0, size, 1.0)
    for _ in range(rounds):
        e = np.einsum("bipjq,bip->bijq", blocks, u / np.maximum(np.abs(u).max(), 1e-300))
        e /= np.maximum(np.linalg.norm(e, axis=-1, keepdims=True), 1e-100)
        u = np.einsum("bipjq,bijq->bip", blocks, e)
    return np.asarray(np.linalg.norm(u, axis=-1).max(-1) * size.flatten())


def smallest_gap(p: Problem, X: Array) -> float:
    """The least distance between the two largest bare scores of a row, over rows and heads; 0 where all are equal."""
    gaps = [math.inf]
    for h in range(len(p.q)):
        q, k = X @ p.q[h].T, X @ p.k[h * len(p.k) // len(p.q)].T
        if p.turn is not None:
            q, k = ((p.turn @ t[..., None])[..., 0] for t in (q, k))
        s = np.where(p.seen[h if len(p.seen) > 1 else 0], p.scale * q @ k.T, -math.inf)
        ordered = np.sort(s, -1)[:, ::-1]
        gaps += [float(row[0] - row[1]) for row in ordered if len(row) > 1 and np.isfinite(row[1])]
    return min(gaps) if math.isfinite(min(gaps)) else 0.0


def ball(ledger: Ledger, drawn: Draw, where: str, number: int) -> None:
    """``certify``: a constant for all inputs within a distance, at inputs on the boundary of that ball."""
    rng, b = np.random.default_rng(number), number % len(drawn.X)
    X = drawn.X[b]
    size = float(np.linalg.norm(X)) * float(rng.choice([1e-3, 0.03, 0.3]))
    found = ledger.guarded("ball.certify", where, lambda: lipscope.certify(drawn.layer, torch.from_numpy(X), radius=size))
    if found is None:
        return
    steps = rng.normal(size=(6, *X.shape)) * (rng.random((6, X.shape[0], 1)) < 0.5)
    steps[0] = jacobians(drawn.problem, X[None])[0].sum(0).reshape(X.shape)
    steps /= np.maximum(np.sqrt((steps**2).sum((1, 2), keepdims=True)), 1e-300)
    near = Truth(drawn.problem, X + size * (1 - 1e-12) * steps)
    near.upper(ledger, found.name, found.value, int(near.sigma.argmax()), f"{where} near input {b}", 0.0, len(steps))


def check_lower(ledger: Ledger, found: Bound, others: Sequence[Bound], drawn: Draw, where: str) -> None:
    """A lower bound is reached by the tokens that it gives, or by a search over measures; and no upper bound is below it."""
    everything, causal = "n" not in found.inputs, str(drawn.layer.mask) == "causal"  # it is for the supremum over n
    if found.tokens is not None:
        X = found.tokens.numpy()[None]
        far = float(np.linalg.norm(X, axis=-1).max()) > drawn.radius * (1 + 1e-12)
        reached = float("nan") if far else float(Truth(drawn.problem, X).sigma[0])
    elif found.value > 1e60:
        # Atoms so light that float64 cannot hold them are needed.
        ledger.row(found.name).judged += 1
        chosen = point_pairs(drawn.problem, drawn.radius)[:4]
        share = max(light_atom(drawn.problem, at, E, 100) / found.value for E, at in chosen)
        reached = float(share) * (averaging_norm() if causal else 1.0) * found.value
    else:
        reached = two_points(drawn.problem, drawn.radius, 0.96 * found.value, causal)
    # The supremum over n is not attained: a search comes close, under the causal mask as slowly as 1/log² of the length.
    near = 1e-9 if found.tokens is not None else 0.05 if causal else 2e-3
    short = not reached >= found.value * (1 - near)
    broken = f"{found.value!r}, but {reached!r} is all that was reached at {where}" if short else None
    ledger.record(found.name, reached / found.value if found.value > 0 else math.inf, broken)
    for other in others:
        same = other.side == "upper" and other.norm == "Frobenius" and other.kind == "set"
        if same and not (everything and "n" in other.inputs) and not found.value <= other.value * (1 + 1e-9):
            ledger.record(found.name, math.inf, f"{found.value!r} exceeds {other.name} = {other.value!r} at {where}")


def point_pairs(p: Problem, radius: float) -> list[tuple[float, Array]]:
    """Pairs of points (u, w) of the ball, u = w allowed, with E = (u − w)ᵀAw, the largest E first."""
    rng, d = np.random.default_rng(0), p.q.shape[2]
    A = p.scale * p.k[0].T @ p.q[0]
    unit = A / (np.abs(A).max() or 1.0)
    values, vectors = np.linalg.eig(unit)
    axes = [vectors[:, i].real for i in range(d) if abs(values[i].imag) < 1e-9]
    axes += [*np.linalg.eigh(unit + unit.T)[1].T, *np.linalg.svd(unit)[2], *rng.normal(size=(16, d))]
    w = radius * np.stack([e / np.linalg.norm(e) for e in axes])
    pairs = [(s * w[i], t * w[i]) for i in range(min(len(w), 8)) for s, t in ((-1, 1), (1, 0.5), (1, 1))]
    for _ in range(200):  # E = R‖Aw‖ − wᵀAw climbs
        image = w @ A.T
        slope = radius * image / np.maximum(np.linalg.norm(image, axis=-1, keepdims=True), 1e-300) @ A - image - w @ A
        w = inside(w + 0.3 / (np.linalg.norm(A, 2) or 1.0) * slope, radius)
    image = w @ A.T
    pairs += zip(radius * image / np.maximum(np.linalg.norm(image, axis=-1, keepdims=True), 1e-300), w, strict=True)
    different = {(round(float((u - w) @ A @ w), 6), round(float(np.linalg.norm(p.v[0] @ (u - w))), 6)): np.stack([u, w])
                 for u, w in pairs}  # fmt: skip
    return [(E, at) for (E, _), at in sorted(different.items(), reverse=True)]


def light_atom(p: Problem, at: Array, E: float, digits: int) -> mpmath.mpf:
    """The constant of W_2 from moving an atom at u of mass e^{−E}, however small, while a heavy one at w listens."""
    with mpmath.workdps(digits):
        light, step, best = mpmath.exp(-mpmath.mpf(E)), mpmath.mpf(10) ** -(digits // 3), mpmath.mpf(0)
        plain = dataclasses.replace(p, seen=np.ones((1, 2, 2), dtype=bool)).on(DIGITS)
        x, shifts = DIGITS.array(at), DIGITS.array(np.eye(at.shape[1])) * step
        for mass in DIGITS.array(np.logspace(-0.5, 0.8, 40)):
            heard = dataclasses.replace(plain, added=np.array([[[mpmath.log(light), mpmath.log(mass)]] * 2]))
            here = forward(heard, x, DIGITS)[1]
            moved = [forward(heard, np.stack([x[0] + shift, x[1]]), DIGITS)[1] for shift in shifts]
            J = np.stack([(there - here) / step for there in moved], -1)
            size = max(abs(entry) for entry in J.flat)
            if size:
                best = max(best, mpmath.sqrt(mass / light) * size * float(np.linalg.norm((J / size).astype(float), 2)))
        return best


def averaging_norm() -> float:
    """By how much d_2 exceeds W_2 at causal pairs of a light and a heavy atom that follow each other, ever larger.

    All light atoms sit at u, so one of mass m_j among those of mass L_i that row i sees moves it by m_j/L_i of what all
    would; the masses that are seen keep their ratio. What is left is the norm of an average over the past.
    """
    masses = np.exp(0.05 * np.arange(1200))
    return float(np.linalg.norm(np.tril(np.sqrt(np.outer(masses, masses)) / np.cumsum(masses)[:, None]), 2))


def two_points(p: Problem, radius: float, enough: float, causal: bool) -> float:
    """The largest constant of W_2 (causal: d_2) found at measures in the ball that sit at two points u and w.

    A light atom at u moves, and the heavy ones at w listen. Under the causal mask the light one comes first and the heavy
    part in pieces, or ever larger pairs of both follow each other and all light atoms move; u = w is allowed.
    """
    found: list[tuple[float, float, float, Array]] = []
    pairs = point_pairs(p, radius)[:8]
    for E, at in pairs:
        few = math.exp(-min(E, 300.0))
        for grid in (np.logspace(-6, 3, 10), np.logspace(-0.5, 0.5, 15)):
            heavy = grid if grid[0] < 1e-3 else grid * max(found[-10:], key=lambda one: one[0])[1]
            found += [(weighted_norm(p, at, np.array([few, t]), causal=False), float(t), few, at) for t in heavy]
    ordered = sorted(found, key=lambda one: -one[0])
    best, tried = ordered[0][0], list[int]()
    growing, pieces = np.exp(0.1 * np.arange(400)), np.diff(np.logspace(-8, 8, 800), prepend=0.0)
    for E, at in pairs if causal else []:
        if best < enough:
            light = [math.exp(-min(E, 300.0))]
            best = max(best, weighted_norm(p, np.stack([at[0], *[at[1]] * 800]), np.concatenate([light, pieces])))
    for _, t, few, at in ordered:
        if not causal or best >= enough or len(tried) > 2:
            break
        if id(at) not in tried:
            tried.append(id(at))
            masses = np.stack([few * growing, t * growing], -1).flatten()
            best = max(best, weighted_norm(p, np.tile(at, (400, 1)), masses, every=2, enough=enough))
    return best


def weighted_norm(
    p: Problem, X: Array, masses: Array, every: int = 0, enough: float = math.inf, causal: bool = True
) -> float:
    """At most the norm of D^½JD^{−½}, D the masses of the atoms X, from moving the first or every so-manyth of them."""
    n, moving = len(X), slice(0, None, every) if every else slice(0, 1)
    seen = np.tril(np.ones((1, n, n), dtype=bool)) if causal else np.ones((1, n, n), dtype=bool)
    layer = dataclasses.replace(p, seen=seen, added=np.broadcast_to(np.log(masses), (1, n, n)).copy()).on(FLOATS)
    atoms, root = torch.from_numpy(X), torch.from_numpy(np.sqrt(masses))[:, None]

    def outputs(x: torch.Tensor) -> torch.Tensor:
        moved = atoms.clone()
        moved[moving] = x / root[moving]
        result: torch.Tensor = forward(layer, moved, FLOATS) * root
        return result

    here = atoms[moving] * root[moving]
    if not every:
        J = torch.func.jacfwd(outputs)(here).numpy()
        return float(sigmas(J.reshape(1, -1, X.shape[1]))[0])
    back = torch.func.vjp(outputs, here)[1]
    # The worst profile is half a wave in the logarithm of the mass.
    v = torch.sin(torch.linspace(0, math.pi, len(here) + 2, dtype=torch.float64)[1:-1])[:, None] * torch.ones_like(here)
    gain = 0.0
    for _ in range(30):
        v = v / v.norm()
        image = torch.func.jvp(outputs, (here,), (v,))[1]
        gain = max(gain, float(image.norm()))
        if gain >= enough:
            break
        (v,) = back(image)
    return gain
