"""Search for inputs at which a certified upper end is below σ, on every rung.

    python checks/certificates.py [--inputs 2500] [--seed 0] [--write docs/theory/certificates.md]

Inputs are drawn in turns. **Random**, **clustered**, **constructed** (two distinct tokens, where bounds are nearly reached)
and **ascended** ones (gradient ascent on σ) come from ``tests/bound_cases.py``, those of **wide** heads from here; σ is that
of a dense float64 Jacobian by automatic differentiation. **Hostile** ones come from ``tests/rounding_cases.py``: scores in
the hundreds, rows that are nearly one-hot, tokens of norm 1e±20, offsets that cancel, n = 1, d = 1, numbers of float32 and
of float64; their σ is computed in a hundred digits. A comparison holds one end of one rung against one σ.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "docs" / "concepts")]

import bound_cases  # noqa: E402
import lipscope  # noqa: E402
import rounding_cases  # noqa: E402
from drawing import table, write  # noqa: E402
from lipscope.bounds.certificates import certified_upper  # noqa: E402
from lipscope.bounds.verified import Gram  # noqa: E402
from lipscope.measure.sigma import certificate_at  # noqa: E402

KINDS = ("random", "constructed", "ascended", "clustered", "wide", "hostile", "hostile")
RUNGS = ("fast", "fast, strips", "tight", "fast, each head", "verified, float64", "verified, float32")
# What the dense Jacobian, or its decomposition, may itself be off by; hostile inputs have none of it.
ORACLE = 1e-12
# Candidates for a verified end, relative to σ; the first is below it, and must prove nothing below σ.
TRIED = (0.9999, 1.0003, 1.002, 1.01, 1.1, 2.0, 1e3)


def wide(seed: int) -> tuple[lipscope.Attention, Tensor]:
    """Heads of 32 to 40 coordinates, where norms of Gram matrices are computed in float32."""
    generator = torch.Generator().manual_seed(seed)
    width, heads, n = 32 + seed % 9, 1 + seed % 2, 2 + seed % 5
    sharp = (0.02, 0.1, 0.3, 1.0)[seed % 4]
    side = heads * width
    weights = [torch.randn(side, side, generator=generator, dtype=torch.float64) / side**0.5 for _ in range(4)]
    X = torch.randn(n, side, generator=generator, dtype=torch.float64)
    weights[0] *= 4 * sharp
    return lipscope.Attention(*weights, heads=heads, mask=("full", "causal")[seed // 4 % 2]), X


def dense(layer: lipscope.Attention, X: Tensor) -> float:
    """σ from all entries of the Jacobian."""
    return float(torch.linalg.matrix_norm(bound_cases.jacobian(layer, X).reshape(-1, X.numel()), 2))


def compare(
    counts: Counter[tuple[str, str]], closest: dict[str, float], kind: str, rung: str, end: float, sigma: Any
) -> bool:
    """Count a comparison; False for a counter-example."""
    counts[kind, rung] += 1
    held = end * (1 if kind == "hostile" else 1 + ORACLE) >= sigma
    if sigma > 0 and math.isfinite(end):
        closest[rung] = min(closest.get(rung, math.inf), float(end / sigma))
    return bool(held)


def check(kind: str, seed: int, counts: Counter[tuple[str, str]], closest: dict[str, float]) -> list[str]:
    """All rungs at one input; what failed, in words."""
    norm, ends, sigma = None, dict[str, list[float]](), None
    if kind == "hostile":
        case = rounding_cases.draw(seed, (torch.float64, torch.float32)[seed % 2])
        layer, X, norm = case.layer, case.X, case.norm
        sigma = rounding_cases.true_sigma(layer, X, norm)
    else:
        if kind == "wide":
            layer, X = wide(seed)
        else:
            case = bound_cases.problem(seed, n_max=8, kind=kind)
            layer, X = case.layer, case.X
        sigma = dense(layer, X)
    scope = "attention" if norm is None else "norm+attention"
    ends["fast"] = [float(certificate_at(layer, X[None], scope, norm)[0])]
    ends["tight"] = [float(certificate_at(layer, X[None], scope, norm, rung="tight")[0])]
    if norm is None:
        ends["fast, strips"] = [float(certified_upper(layer, X[None], height=1 + seed % len(X)))]
        gram = Gram.at(layer.to(torch.float64), X.double())
        usual = 1e-100 < float(sigma) < 1e100
        for dtype in (torch.float64, torch.float32) if gram.resolved and usual and kind != "hostile" else ():
            name = f"verified, {str(dtype).removeprefix('torch.')}"
            ends[name] = [gram.prove(ratio * float(sigma), dtype) for ratio in TRIED[:3]]
    bad = [
        f"{kind} {seed} {rung}: {end!r} < {sigma}"
        for rung, found in ends.items()
        for end in found
        if not compare(counts, closest, kind, rung, end, sigma)
    ]
    if norm is None and layer.heads > 1 and kind != "wide":
        for h, end in enumerate(certified_upper(layer, X[None], "head")[0].tolist()):
            alone = rounding_cases.true_sigma(layer, X, head=h) if kind == "hostile" else dense(layer.head(h), X)
            if not compare(counts, closest, kind, "fast, each head", end, alone):
                bad.append(f"{kind} {seed} head {h}: {end!r} < {alone}")
    return bad


def main() -> int:
    """Search, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop then, with what was searched")
    parser.add_argument("--write", type=Path, help="page whose part is replaced")
    asked = parser.parse_args()
    counts, closest, bad, refused = Counter[tuple[str, str]](), dict[str, float](), list[str](), 0
    started, done = time.monotonic(), 0
    for number in range(asked.inputs):
        if time.monotonic() - started > 60 * asked.minutes:
            break
        kind, seed = KINDS[number % len(KINDS)], asked.seed * 10**6 + number
        try:
            bad += check(kind, seed, counts, closest)
        except FloatingPointError:
            refused += 1
        done += 1
        if done % 100 == 0:
            print(done, sum(counts.values()), bad, flush=True)
    kinds = list(dict.fromkeys(KINDS))
    rows = [
        [
            rung,
            *(str(counts[kind, rung]) if counts[kind, rung] else "–" for kind in kinds),
            f"{closest.get(rung, math.inf):.6f}",
        ]
        for rung in RUNGS
    ]
    words = (
        f"{done:,} inputs (seed {asked.seed}), {sum(counts.values()):,} comparisons, **{len(bad)} ends below σ**; {refused} "
        "inputs refused because float64 does not hold their scores.\n\n" + table(["rung", *kinds, "least end/σ"], rows)
    )
    print(words, *bad, sep="\n")
    if asked.write:
        write(asked.write.resolve(), "search", words)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
