"""Figures and numbers of docs/concepts/worst-case.md.

    python docs/concepts/make_worst_case.py [--out docs/concepts]

Writes worst-case-n.svg, worst-case-norm.svg, worst-case-numbers.md and the sentences of worst-case.md that say what those
numbers are. Takes a few minutes. One head, V = I, known A.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

import lipscope
import say_worst_case
from lipscope.bounds.constants import Constants
from lipscope.bounds.pairs import PlainHead, best_pair, lower_meanfield
from lipscope.bounds.sets import refined_unmasked
from lipscope.report.palette import palette
from lipscope.studies.worst_case import grouped_sigma, growth

BLUE, ORANGE, GREEN, YELLOW = (palette("light")[name] for name in ("blue", "orange", "green", "amber"))
R = 1.3
A = torch.diag(torch.tensor([-1.0, 0.5], dtype=torch.float64))
LONG = [round(2 ** (step / 2)) for step in range(2, 35)]
SHORT = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 97]


def head(matrix: torch.Tensor, mask: str = "full") -> lipscope.Attention:
    """The head with A = τW_KᵀW_Q: W_K = I, τ = 1, V = I."""
    identity = torch.eye(len(matrix), dtype=torch.float64)
    return lipscope.Attention(matrix, identity, identity, scale=1.0, mask=mask)


def best_groups(layer: lipscope.Attention, u: torch.Tensor, w: torch.Tensor, n: int) -> float:
    """σ at m tokens u and n−m tokens w, exact, with the best m of a fine grid."""
    sizes = {1, *(max(1, round(n * 2 ** (-step / 8))) for step in range(8, 8 * n.bit_length()))}
    pair = torch.stack([u, w])
    return max(grouped_sigma(layer, pair, [m, n - m]) for m in sizes if m < n)


def over_n() -> tuple[dict[str, tuple[list[int], list[float], dict]], object]:
    """Every curve of the first figure, and the study behind the black one."""
    layer = head(A)
    u, w = best_pair(A, R)
    pair = torch.stack([u, w])
    study = growth(layer, SHORT, radius=R, method="ascend", restarts=12, steps=150)
    climbed = [float(point.sigma.estimate) for point in study.worst]
    constants = Constants.of_norms(1.0, 1.0)
    limit = lower_meanfield(PlainHead(A, torch.eye(2, dtype=torch.float64)), R).value
    return {
        "upper bound (refined)": (LONG, [refined_unmasked(constants, R, n).value for n in LONG], {"color": BLUE}),
        "found by ascent": (SHORT, climbed, {"color": "black", "marker": "o", "markersize": 3}),
        "groups, best m": (LONG, [best_groups(layer, u, w, n) for n in LONG], {"color": GREEN}),
        "pair: one token against n−1": (LONG, [grouped_sigma(layer, pair, [1, n - 1]) for n in LONG], {"color": YELLOW}),
        "two-Dirac lower bound, n → ∞": (LONG, [limit] * len(LONG), {"color": GREEN, "linestyle": ":"}),
        "√n": (LONG[2:11], [1.5 * math.sqrt(n) for n in LONG[2:11]], {"color": "grey", "linestyle": ":"}),
    }, study


def with_and_without_norm() -> dict[str, dict[str, tuple[list[int], list[float], dict]]]:
    """Ball against the image of LayerNorm, for a repulsive and an attractive head of width 4."""
    d = 4
    norm = lipscope.LayerNorm(torch.ones(d, dtype=torch.float64) / math.sqrt(d) * R, eps=0.0)
    panels = {}
    for title, sign in (("repulsive, A = −2I", -2.0), ("attractive, A = 2I", 2.0)):
        layer = head(sign * torch.eye(d, dtype=torch.float64))
        curves = {}
        for name, where, colour in (("ball", {"radius": R}, ORANGE), ("LayerNorm", {"norm": norm}, BLUE)):
            study = growth(layer, SHORT[1::2], **where, method="ascend", restarts=10, steps=100)
            ns = [point.n for point in study.worst]
            lines = study.curves()
            curves[f"{name}: ascent"] = (ns, lines["worst"], {"color": colour, "marker": "o", "markersize": 3})
            curves[f"{name}: groups"] = (ns, lines["groups"], {"color": colour, "linestyle": "--"})
        panels[title] = curves
    return panels


def draw(path: Path, panels: dict[str, dict], border: float | None) -> None:
    """One row of panels on logarithmic axes."""
    import matplotlib as mpl

    mpl.use("agg" if path.suffix == ".png" else "svg")
    mpl.rcParams["svg.hashsalt"] = "lipscope"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(panels), figsize=(5.6 * len(panels) + 1.4 * (len(panels) == 1), 4.5), sharey=True,
                                squeeze=False)  # fmt: skip
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        for name, (x, y, style) in curves.items():
            axis.plot(x, y, label=name, **style)
        if border is not None:
            axis.axvline(border, color="lightgrey", zorder=0)
            axis.text(border, 1.15, r" $n = e^{2\gamma R^2}$", color="grey", fontsize=9)
        axis.set(title=title, xlabel="number of tokens n", xscale="log", yscale="log")
        axis.legend(
            fontsize=8, **({"loc": "upper left"} if border is None else {"loc": "center left", "bbox_to_anchor": (1, 0.5)})
        )
    axes[0][0].set_ylabel("local Lipschitz constant σ")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def numbers(study, panels: dict[str, dict]) -> str:
    """The same as tables."""
    lines = ["# Worst-case inputs in numbers", "", "Written by `docs/concepts/make_worst_case.py`.", ""]
    lines += [f"## One head, V = I, A = diag(−1, ½), R = {R}: e^{{2γR²}} = {math.exp(2 * R**2):.1f}", ""]
    lines += [
        "| n | pair | groups | ascent | ascent / best construction | refined bound / ascent |",
        "|---|---|---|---|---|---|",
    ]
    for point in study.worst:
        built = {c.name: float(c.sigma.estimate) for c in point.built}
        worst, bound = float(point.sigma.estimate), point.bounds["refined.unmasked"]
        lines.append(f"| {point.n} | {built['pair']:.4g} | {built['groups']:.4g} | {worst:.4g} | "
                     f"{worst / max(built.values()):.3f} | {bound / worst:.2f} |")  # fmt: skip
    lines += ["", f"Ascent over all lengths: {study.fit}.", ""]
    lines += ["## Tokens in a ball, and behind LayerNorm with ε = 0", "", "Width 4, V = I, ascent.", ""]
    for title, curves in panels.items():
        ns = curves["ball: ascent"][0]
        lines += [f"| {title}, n | " + " | ".join(map(str, ns)) + " |", "|---" * (len(ns) + 1) + "|"]
        for name in ("ball: ascent", "LayerNorm: ascent"):
            lines.append(f"| {name.split(':')[0]} | " + " | ".join(f"{value:.4g}" for value in curves[name][1]) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--suffix", default="svg", help="svg, or png for a look")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    curves, study = over_n()
    panels = with_and_without_norm()
    draw(arguments.out / f"worst-case-n.{arguments.suffix}", {f"A = diag(−1, ½), R = {R}": curves}, math.exp(2 * R**2))
    draw(arguments.out / f"worst-case-norm.{arguments.suffix}", panels, None)
    (arguments.out / "worst-case-numbers.md").write_text(numbers(study, panels), encoding="utf-8")
    if (arguments.out / "worst-case.md").exists():
        say_worst_case.write(arguments.out)


if __name__ == "__main__":
    main()
