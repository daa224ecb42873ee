"""Figures and numbers of docs/concepts/mean-field.md.

    python docs/concepts/make_mean_field_figures.py [--out docs/concepts] [--png DIRECTORY]

Writes mean-field-constants.svg, mean-field-plateau.svg and mean-field-gaussian.svg, and the tables between the marks
``<!-- numbers: NAME -->`` and ``<!-- end -->`` of mean-field.md. One head, d = 2, V = I, A = diag(−1, ½).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lipscope
from lipscope.bounds.constants import Constants
from lipscope.bounds.pairs import PlainHead, lower_meanfield
from lipscope.bounds.sets import castin2024_meanfield, refined_masked, refined_unmasked
from lipscope.report.palette import palette
from lipscope.rounding import round_up, span
from lipscope.studies.mean_field import MeanFieldAttention, Measure, convergence_study, local_constant
from lipscope.studies.mean_field.measures import parse_law
from lipscope.studies.mean_field.study import PlateauStudy
from measure_pairs import empirical_constant

A = torch.diag(torch.tensor([-1.0, 0.5], dtype=torch.float64))
V = torch.eye(2, dtype=torch.float64)
NORMS = Constants.of_norms(1.0, 1.0)
LENGTHS = [8, 16, 32, 64, 128, 256, 512, 1024]
CONFINED = ("ball:1.5", "sphere:1.5")
CLUSTERS = "mixture:4:1.5:0.1"
GAUSSIANS = ("gaussian:0.5", "gaussian:1", "gaussian:1.5")
NODES = (12, 20, 28)
BLUE, ORANGE, GREEN, PURPLE, GREY = (palette("light")[name] for name in ("blue", "orange", "green", "purple", "grey"))


def attention(mask: str) -> MeanFieldAttention:
    """The head with A = τW_KᵀW_Q: W_K = I, τ = 1."""
    return MeanFieldAttention(lipscope.Attention(A, V, V, scale=1.0, mask=mask))


def two_dirac_sigma(a: float) -> float:
    """σ measured at two Diracs ±Re, with the light mass at which ``lower.meanfield`` is attained."""
    t = torch.logspace(-3, 2, 4001, dtype=torch.float64)
    t_best = float(t[(t.sqrt() / (1 + t) * (1 + 2 * a * t / (1 + t))).argmax()])
    light, R = 1 / (1 + t_best * math.exp(2 * a)), math.sqrt(a)
    return float(local_constant(attention("full"), Measure([[-R, 0.0], [R, 0.0]], [light, 1 - light])).estimate)


def constants(plt: Any) -> tuple[Any, str]:
    """Upper and lower mean-field constants in R, and the ratio between them."""
    radii = [0.1 * step for step in range(1, 46)]
    upper = [refined_unmasked(NORMS, R).value for R in radii]
    paper = [castin2024_meanfield(NORMS, R).value for R in radii]
    below = [lower_meanfield(PlainHead(A, V), R).value for R in radii]
    measured = [two_dirac_sigma(R * R) for R in radii]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    left.plot(radii, paper, ":", color=ORANGE, label="upper: paper, Theorem 3.5")
    left.plot(radii, upper, color=BLUE, label="upper: refined")
    left.plot(radii, measured, "o", color="black", markersize=3, label="σ measured at two Diracs ±Re")
    left.plot(radii, below, "--", color=GREEN, label="lower: two Diracs, closed form")
    left.set(yscale="log", xlabel="R", ylabel="mean-field (W_2) Lipschitz constant", title="upper and lower constants")
    left.legend(fontsize=8, frameon=False)
    right.plot(radii, [u / b for u, b in zip(upper, below, strict=True)], color=BLUE, label="refined / lower")
    right.plot(radii, [u / m for u, m in zip(upper, measured, strict=True)], "o", color="black", markersize=3,
               label="refined / measured at two Diracs")  # fmt: skip
    right.axhline(2, color=GREY, linestyle=":", label="2, proved for every R")
    right.set(ylim=(0.9, 2.15), xlabel="R", ylabel="upper / lower", title="the ratio between them")
    right.legend(fontsize=8, frameon=False, loc="lower right")
    rows = ["| a = ‖A‖R² | lower | measured at two Diracs | refined | refined / lower | paper, Thm 3.5 | lighter mass | "
            "causal: lower | refined | refined / lower |"]  # fmt: skip
    rows.append("|---" * 10 + "|")
    for a in (0.01, 0.1, 0.5, 1, 2, 5, 10, 20):
        R = math.sqrt(a)
        low, up, old = (
            lower_meanfield(PlainHead(A, V), R).value,
            refined_unmasked(NORMS, R).value,
            castin2024_meanfield(NORMS, R).value,
        )
        t = torch.logspace(-3, 2, 4001, dtype=torch.float64)
        t_best = float(t[(t.sqrt() / (1 + t) * (1 + 2 * a * t / (1 + t))).argmax()])
        light = 1 / (1 + t_best * math.exp(2 * a))
        rows.append(
            f"| {a:g} | {low:.4g} | {two_dirac_sigma(a):.4g} | {up:.4g} | {up / low:.3f} | {old:.3g} | {light:.1e} | "
        )
        low, up = lower_meanfield(PlainHead(A, V, causal=True), R).value, refined_masked(NORMS, R).value
        rows[-1] += f"{low:.4g} | {up:.4g} | {up / low:.3f} |"
    return figure, "\n".join(rows)


def study(mask: str, law: str) -> PlateauStudy:
    """Nine draws of every length."""
    return convergence_study(attention(mask), parse_law(law, 2), LENGTHS, repeats=9, transport_up_to=256)


def curve(axes: Any, x: list[int], done: PlateauStudy, column: str, **style: Any) -> None:
    """Medians, with the range of the draws behind them."""
    pairs = [(n, y) for n, y in zip(x, done.medians(column), strict=True) if y is not None]
    axes.plot([n for n, _ in pairs], [y for _, y in pairs], **style)
    if column == "sigma":
        low = [min(row.sigma for row in done.rows if row.n == n) for n in x]
        high = [max(row.sigma for row in done.rows if row.n == n) for n in x]
        axes.fill_between(x, low, high, color=style["color"], alpha=0.12, linewidth=0)


def plateau(plt: Any) -> tuple[Any, str]:
    """σ and ratios on laws inside a ball, and on tight clusters."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    rows = ["| mask | law | σ at n = 8 | σ at n = 1024 | fit | ratio of two samples, n = 256 | refined |", "|---" * 7 + "|"]
    for axes, mask in zip(panels, ("full", "causal"), strict=True):
        for law, color in zip((*CONFINED, CLUSTERS), (BLUE, GREEN, PURPLE), strict=True):
            done = study(mask, law)
            name = law if law != CLUSTERS else "four clusters"
            curve(axes, LENGTHS, done, "sigma", color=color, marker="o", markersize=3, label=f"σ, {name}")
            curve(axes, LENGTHS, done, "ratio", color=color, linestyle="--", label=f"ratio of two samples, {name}")
            sigma, ratio = done.medians("sigma"), done.medians("ratio")
            bound = round_up(done.bound) if math.isfinite(done.bound) else "none for every n"
            rows.append(f"| {mask} | {name} | {sigma[0]:.3f} | {sigma[-1]:.3f} | {done.plateau()} | "
                        f"{ratio[LENGTHS.index(256)]:.3f} | {bound} |")  # fmt: skip
        axes.set(
            xscale="log", xlabel="number of tokens n", title={"full": "unmasked", "causal": "causal"}[mask], ylim=(0, 4.2)
        )
        axes.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
        axes.minorticks_off()
        axes.legend(fontsize=7, frameon=False, ncols=2, loc="upper center")
    panels[0].set_ylabel("σ of the cloud, and ratios of distances")
    return figure, "\n".join(rows)


def quadrature(std: float, nodes: int) -> Measure:
    """N(0, s²I) on R² as a weighted cloud: Gauss–Hermite nodes in both directions, exact for polynomials."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    x, w = torch.from_numpy(std * x), torch.from_numpy(w / w.sum())
    return Measure(torch.cartesian_prod(x, x), torch.outer(w, w).flatten())


def gaussian(plt: Any) -> tuple[Any, str]:
    """What happens without a ball."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    rows = [
        "| law | s²‖A‖ | σ at n = 8 | σ at n = 1024 | σ ~ n^α, longer half, α in | largest norm | refined there | "
        + " | ".join(f"σ of the law, {k}² nodes" for k in NODES) + " |",
        "|---" * (7 + len(NODES)) + "|",
    ]  # fmt: skip
    for law, color in zip(GAUSSIANS, (BLUE, GREEN, ORANGE), strict=True):
        done = study("full", law)
        curve(left, LENGTHS, done, "sigma", color=color, marker="o", markersize=3, label=f"σ, {law}")
        curve(left, LENGTHS, done, "ratio", color=color, linestyle="--", label=f"ratio of two samples, {law}")
        right.plot(LENGTHS, done.medians("bound"), "--", color=color, label=f"refined at the largest norm, {law}")
        right.plot(LENGTHS, done.medians("sigma"), color=color, marker="o", markersize=3, label=f"σ, {law}")
        sigma, growth = done.medians("sigma"), done.growth()
        std = float(law.partition(":")[2])
        cells = [
            law,
            f"{std**2:g}",
            f"{sigma[0]:.3f}",
            f"{sigma[-1]:.3f}",
            span(growth.alpha_low, growth.alpha_high, decimals=2),
        ]
        cells += [f"{done.medians('radius')[-1]:.2f}", round_up(done.medians("bound")[-1], 2)]
        cells += [f"{local_constant(attention('full'), quadrature(std, k)).estimate:.4g}" for k in NODES]
        rows.append("| " + " | ".join(cells) + " |")
    for axes, title in ((left, "measured"), (right, "beside the constant of the ball that holds the draw")):
        axes.set(xscale="log", yscale="log", xlabel="number of tokens n", title=title)
        axes.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
        axes.xaxis.minorticks_off()
        axes.legend(fontsize=7, frameon=False)
    left.set_ylabel("σ of the cloud, and ratios of distances")
    return figure, "\n".join(rows)


def pairs() -> str:
    """The largest W_2 ratios that the search finds, by kind of change."""
    changes = ("move", "split", "insert", "delete", "duplicate")
    rows = ["| mask | R | best | " + " | ".join(changes) + " | refined |", "|---" * (len(changes) + 4) + "|"]
    for mask in ("full", "causal"):
        for R in (0.5, 1.0, 1.5):
            found = empirical_constant(attention(mask), n=8, radius=R, restarts=2, steps=60)
            best = {c: max((p.ratio for p in found.pairs if p.change == c), default=None) for c in changes}
            cells = ["–" if best[c] is None else f"{best[c]:.3f}" for c in changes]
            rows.append(
                f"| {mask} | {R:g} | {found.best.ratio:.3f} | " + " | ".join(cells) + f" | {round_up(found.upper)} |"
            )
    return "\n".join(rows)


def cesaro() -> str:
    """Masked attention with A = 0."""
    still = MeanFieldAttention(lipscope.Attention(0 * A, V, V, mask="causal"))
    rows = ["| n | " + " | ".join(map(str, sizes := (2, 10, 100, 1000))) + " | ∞ |", "|---" * (len(sizes) + 2) + "|"]
    values = [local_constant(still, still.measure_of(torch.zeros(n, 2))).estimate for n in sizes]
    rows.append("| σ | " + " | ".join(f"{value:.3f}" for value in values) + " | 2 |")
    return "\n".join(rows)


EXAMPLE = re.compile(r"(```python\n)(.*?)(```\n\n```text\n)(.*?)(```)", flags=re.DOTALL)


def printed(code: str) -> str:
    """What the example of the page prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, {})
    return output.getvalue()


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--png", type=Path, default=None, help="also write PNG copies there")
    arguments = parser.parse_args()
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "lipscope"
    import matplotlib.pyplot as plt

    tables = {"cesaro": cesaro(), "pairs": pairs()}
    for name, make in (("constants", constants), ("plateau", plateau), ("gaussian", gaussian)):
        figure, tables[name] = make(plt)
        figure.tight_layout()
        figure.savefig(arguments.out / f"mean-field-{name}.svg", metadata={"Date": None})
        if arguments.png is not None:
            figure.savefig(arguments.png / f"mean-field-{name}.png", dpi=110)
        plt.close(figure)
    page = arguments.out / "mean-field.md"
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        marks = re.compile(rf"(<!-- numbers: {name} -->\n).*?(<!-- end -->)", flags=re.DOTALL)
        assert marks.search(text), name
        text = marks.sub(lambda m, table=table: f"{m[1]}\n{table}\n\n{m[2]}", text)
    page.write_text(EXAMPLE.sub(lambda m: f"{m[1]}{m[2]}{m[3]}{printed(m[2])}{m[5]}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
