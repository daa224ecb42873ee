"""Table and figure of docs/theory/certificates.md: how close every rung is to σ, and what it costs beside the measurement.

    python docs/theory/make_ladder.py [--measure]

First, middle and last layer of three models at the first tokens of alice, and random layers of GPT-2's size, on one thread.
A case that is in docs/theory/ladder.jsonl is not measured again; without ``--measure`` only page and figure are written.
Costs are CPU time over that of the measurement, the least of two turns. Where n·d is too large for one thread in minutes,
``tight`` and ``verified`` are left out; benchmarks/verified.py has verified ends up to 24,576 rows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent / "concepts"))

import lipscope  # noqa: E402
from drawing import BLUE, GREEN, ORANGE, PINK, SKY, YELLOW, pyplot, save, table, write  # noqa: E402
from lipscope.bounds import registry  # noqa: E402
from lipscope.bounds.verified import Cost, verified_upper  # noqa: E402
from lipscope.bounds.weights import layer_weights  # noqa: E402
from lipscope.measure.sigma import certificate_at  # noqa: E402
from lipscope.models.corpora import read_text  # noqa: E402
from lipscope.models.text import chunks_of  # noqa: E402

ROWS = FOLDER / "ladder.jsonl"
MODELS, PLACES = ("gpt2-mini", "minilm-l6", "smollm2-135m", "random"), (0, 1, 2)
LENGTHS, SCOPES = (16, 64, 256), ("attention", "head")
# Operations of a row Gram, and rows of a factorisation, up to which they are part of the table.
TIGHT, VERIFIED = 1.6e11, {"attention": 4200, "head": 2100}
WORDS = ("first", "middle", "last")
# Tokens of the layers in the figure.
DRAWN = 64


def layer_at(model: str, place: int, n: int) -> tuple[lipscope.Attention, torch.Tensor]:
    """A layer and its tokens (n, d); random ones have the width of GPT-2 and sharper attention at every place."""
    if model == "random":
        generator = torch.Generator().manual_seed(place)
        weights = [0.02 * torch.randn(768, 768, generator=generator) for _ in range(4)]
        return lipscope.Attention(*weights, heads=12, mask="causal"), (1 + place) * torch.randn(n, 768, generator=generator)
    handle = lipscope.load(model)
    index = (0, len(handle.layers) // 2, len(handle.layers) - 1)[place]
    recorded = handle.record(input_ids=chunks_of(handle, read_text("alice"), n))[index]
    return recorded.attention, recorded.tokens()[0]


def cpu(work: Callable[[], Any], turns: int = 2) -> tuple[float, Any]:
    """The least CPU seconds, and what came out."""
    best, found = math.inf, None
    for _ in range(turns):
        start = time.process_time()
        found = work()
        best = min(best, time.process_time() - start)
    return best, found


def krylov_frobenius(layer: lipscope.Attention, X: torch.Tensor, steps: int, frobenius: float) -> float:
    """What ‖J‖_F and so many Lanczos steps in float64 say of σ: the largest eigenvalue of a bordered tridiagonal matrix."""
    operator = layer.to(torch.float64).operator(X.double()[None], "attention")
    u = torch.randn(1, operator.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    V, images, T = [u / u.norm()], 0.0, torch.zeros(steps + 1, steps + 1, dtype=torch.float64)
    for k in range(steps):
        image = operator.matvec(V[k])
        images += float(image.square().sum())
        y = operator.rmatvec(image)
        T[k, k] = (y * V[k]).sum()
        basis = torch.cat(V)
        for _ in range(2):
            y = y - (y @ basis.mT) @ basis
        T[k, k + 1] = T[k + 1, k] = y.norm()
        V.append(y / y.norm())
    T[steps, steps] = max(0.0, frobenius**2 - images)
    return math.sqrt(float(torch.linalg.eigvalsh(T)[-1]))


def measured(model: str, place: int, n: int, scope: str) -> dict[str, Any]:
    """One row of the table."""
    layer, X = layer_at(model, place, n)
    turns = 2 if n < 256 else 1
    seconds, result = cpu(lambda: lipscope.local_lipschitz(layer, X, scope=scope, certificate=False), turns)
    lower, upper = (torch.as_tensor(t, dtype=torch.float64).flatten() for t in (result.lower, result.upper))
    row = {"model": model, "place": place, "n": n, "scope": scope, "sigma": float(lower.max()), "seconds": seconds}
    row["probable"] = float((upper / lower).max())
    layer_weights(layer)  # norms of weights are known from the first length on

    def closed(rung: Any) -> Any:
        return certificate_at(layer, X[None], scope, rung=rung)

    cost, (_, frobenius) = cpu(lambda: closed(None), turns)
    row |= {"frobenius": float((frobenius / lower).max()), "frobenius_cost": cost / seconds}
    cost, (found, _) = cpu(lambda: closed("fast"), turns)
    row |= {"fast": float((found / lower).max()), "fast_cost": cost / seconds}
    side = layer.heads * layer.value_width
    if scope == "attention" and 12.0 * n * side**3 <= TIGHT:
        cost, (found, _) = cpu(lambda: closed("tight"), 1)
        row |= {"tight": float(found / lower), "tight_cost": cost / seconds}
    if scope == "attention" and n <= 64:
        steps = int(torch.as_tensor(result.iterations).max())
        row["krylov"] = krylov_frobenius(layer, X, steps, float(frobenius)) / float(lower)
        for name, source in (("refined", "refined"), ("paper", "castin2024")) if n == DRAWN else ():
            bounds = registry.applicable(layer, radius=float(X.norm(dim=-1).max()), n=n, side="upper", sources=[source])
            row[name] = min((bound.value for bound in bounds), default=None)
    size = Cost.of(layer, n, scope).size
    if size <= VERIFIED[scope]:
        known = torch.as_tensor(result.estimate).reshape(1, -1)[:, :1]
        heads = [0] if scope == "head" else None
        cost, found = cpu(lambda: verified_upper(layer, X[None], scope, heads=heads, estimate=known), 1)
        row |= {"verified": float(found.flatten()[0] / lower[0]), "verified_seconds": cost, "verified_rows": size}
    return row


def shown(row: dict[str, Any], name: str, digits: int = 3) -> str:
    """A number of a row, rounded up to so many digits, or a dash."""
    value = row.get(name)
    return "–" if value is None else f"{value:.{digits}g}"


def page(rows: list[dict[str, Any]]) -> str:
    """Goals, then all rows."""
    whole = [row for row in rows if row["scope"] == "attention"]
    tight, verified = ([row for row in rows if row.get(name)] for name in ("tight", "verified"))
    largest = {name: max(row[name] for row in verified) for name in ("verified", "verified_seconds", "verified_rows")}

    def spread(found: list[dict[str, Any]], name: str) -> str:
        values = [row[name] for row in found]
        return f"{statistics.median(values):.3g} ({max(values):.3g})"

    goals = [
        ["fast, attention", "median ≤ 4", spread(whole, "fast"), "≤ 1.3", spread(whole, "fast_cost")],
        ["fast, head", "median ≤ 4", spread([r for r in rows if r not in whole], "fast"), "≤ 1.3",
         spread([r for r in rows if r not in whole], "fast_cost")],
        ["tight, attention", "median ≤ 1.7, largest ≤ 4", spread(tight, "tight"), "≤ 20", spread(tight, "tight_cost")],
        ["verified", "largest ≤ 1.05", f"{statistics.median(r['verified'] for r in verified):.4f} "
         f"({largest['verified']:.4f})", "≤ 120 s at 24,576 rows",
         f"{largest['verified_seconds']:.2g} CPU s at ≤ {largest['verified_rows']:,} rows"],
        ["‖J‖_F alone, attention", "", spread(whole, "frobenius"), "", spread(whole, "frobenius_cost")],
    ]  # fmt: skip
    heads = ["rung", "asked", "certified/σ: median (largest)", "cost asked", "cost/measurement: median (largest)"]
    lines = [
        [row["model"], WORDS[row["place"]], str(row["n"]), row["scope"],
         *(shown(row, name) for name in ("probable", "fast", "fast_cost", "tight", "tight_cost")),
         shown(row, "verified", 5), shown(row, "krylov"), shown(row, "frobenius"), shown(row, "frobenius_cost", 2)]
        for row in rows
    ]  # fmt: skip
    names = ["model", "layer", "n", "scope", "probabilistic", "fast", "its cost", "tight", "its cost", "verified",
             "Krylov–Frobenius", "‖J‖_F", "its cost"]  # fmt: skip
    krylov = [row for row in whole if row.get("krylov")]
    below = [row for row in krylov if row["krylov"] < row["fast"]]
    tighter = [row for row in krylov if row["krylov"] < row.get("tight", math.inf) and row.get("tight")]
    gain = max((1 - row["krylov"] / row["fast"] for row in below), default=0.0)
    words = (
        f"{len(rows)} cases. Krylov–Frobenius is below `fast` in {len(below)} of {len(krylov)} cases"
        + (f" ({', '.join(sorted({row['model'] for row in below}))}; by {100 * gain:.0f} % at most)" if below else "")
        + f", and below `tight` in {len(tighter)}."
    )
    return f"{words}\n\n{table(heads, goals)}\n\n{table(names, lines)}"


def figure(rows: list[dict[str, Any]]) -> None:
    """The ladder of every layer: ends over σ, on a logarithmic axis."""
    plt = pyplot()
    chosen = [row for row in rows if row["scope"] == "attention" and row["n"] == DRAWN]
    drawn, axes = plt.subplots(figsize=(9, 5.5))
    rungs = {"probable": ("probabilistic", ORANGE, "o"), "verified": ("verified", BLUE, "s"), "tight": ("tight", SKY, "v"),
             "fast": ("fast", GREEN, "D"), "refined": ("refined set bound, this norm", YELLOW, "^"),
             "paper": ("bound of the paper, this norm", PINK, "x")}  # fmt: skip
    # A verified end of the same layer may be of fewer tokens.
    small = {
        (row["model"], row["place"]): row["verified"] for row in rows if row["scope"] == "attention" and row.get("verified")
    }
    for y, row in enumerate(reversed(chosen)):
        for name, (_, colour, mark) in rungs.items():
            value = row.get(name)
            if name == "verified":
                value = small.get((row["model"], row["place"]))
            elif name in ("refined", "paper") and value is not None:
                value = value / row["sigma"]
            if value is not None and math.isfinite(value):
                axes.plot([value], [y], mark, color=colour, markersize=6)
    for label, colour, mark in rungs.values():
        axes.plot([], [], mark, color=colour, label=label)
    axes.set(xscale="log", xlabel="upper end / σ", yticks=range(len(chosen)),
             yticklabels=[f"{row['model']}, {WORDS[row['place']]}" for row in reversed(chosen)])  # fmt: skip
    axes.legend(fontsize=10)
    save(drawn, "ladder.svg", FOLDER)


def main() -> None:
    """Measure what is missing, then write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure the cases that are not in ladder.jsonl")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()] if ROWS.exists() else []
    cases = [(model, place, n, scope) for n in LENGTHS for model in MODELS for place in PLACES for scope in SCOPES]
    known = {(row["model"], row["place"], row["n"], row["scope"]) for row in rows}
    for case in cases if asked.measure else ():
        if case not in known:
            rows.append(measured(*case))
            with ROWS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(rows[-1], flush=True)
    rows.sort(key=lambda row: (MODELS.index(row["model"]), row["place"], row["n"], row["scope"]))
    write("certificates.md", "ladder", page(rows), FOLDER)
    figure(rows)


if __name__ == "__main__":
    main()
