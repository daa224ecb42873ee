"""Figure and table of docs/concepts/growth.md: σ of one real layer against the number of tokens, on text and at its worst.

    python docs/concepts/make_growth.py

gpt2-mini, layer 2: pieces of alice, random Gaussian tokens of the same norm, constructions inside the image of the layer's
own LayerNorm, and the set bounds for tokens of that norm.
"""

from __future__ import annotations

import statistics

import torch

import lipscope
from drawing import BLUE, GREEN, MODEL, ORANGE, PINK, TEXT, RealLayer, pyplot, save, table, write
from lipscope.bounds import evaluate
from lipscope.rounding import span
from lipscope.runs.fit import fit_growth
from lipscope.studies.worst_case import growth

LAYER, INPUTS = 2, 6
LENGTHS = [8, 16, 32, 64, 128, 256]


def main() -> None:
    """Draw and write."""
    handle = lipscope.load(MODEL)
    rows = lipscope.scan(handle, TEXT, layers=[LAYER], lengths=LENGTHS, inputs=INPUTS).rows
    text = {n: [row["estimate"] for row in rows if row["n"] == n] for n in LENGTHS}
    real = RealLayer(LAYER, LENGTHS[-1], handle)
    norm = real.recording[LAYER].norm
    assert norm is not None
    layer = real.attention
    size = float(real.X.norm(dim=-1).mean())
    generator = torch.Generator().manual_seed(0)
    noise: dict[int, float] = {}
    for n in LENGTHS:
        X = torch.randn(4, n, layer.width, generator=generator)
        X *= size / X.norm(dim=-1, keepdim=True)
        noise[n] = statistics.median(lipscope.local_lipschitz(layer, X, certificate=False).estimate.tolist())
    worst = growth(layer, LENGTHS, norm=norm, method="construct").curves()["worst"]
    R = norm.image_radius()
    ours = [evaluate("refined.masked", layer, radius=R, n=n).value for n in LENGTHS]
    paper = [evaluate("castin2024.general", layer, radius=R, n=n).value for n in LENGTHS]
    medians = [statistics.median(text[n]) for n in LENGTHS]
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8.6, 5.2))
    axes.plot(LENGTHS, paper, color=PINK, label="bound of the paper, every input")
    axes.plot(LENGTHS, ours, color=PINK, linestyle="--", label="refined bound, every input")
    axes.plot(
        LENGTHS, worst, color=ORANGE, marker="s", markersize=3, label="constructed inputs: σ is at least this somewhere"
    )
    axes.plot(LENGTHS, medians, color=BLUE, marker="o", markersize=3, label="text: median and range")
    axes.fill_between(LENGTHS, [min(v) for v in text.values()], [max(v) for v in text.values()], color=BLUE, alpha=0.2)
    axes.plot(LENGTHS, list(noise.values()), color=GREEN, marker="^", markersize=3, label="random tokens of the same norm")
    for power, name in ((0.5, "√n"), (0.25, "n^¼")):
        guide = [medians[0] * (n / LENGTHS[0]) ** power for n in LENGTHS]
        axes.plot(LENGTHS, guide, color="grey", linewidth=0.8, linestyle=":")
        axes.text(LENGTHS[-1] * 1.03, guide[-1], name, color="grey", va="center", fontsize=10)
    axes.set(xscale="log", yscale="log", xlabel="number of tokens n", ylabel="σ, scope attention")
    axes.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    axes.minorticks_off()
    # Below the axes: no curve runs there, whatever the model.
    axes.legend(fontsize=10, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False)
    save(figure, "growth.svg")
    curves = {"text": [v for n in LENGTHS for v in text[n]], "constructed inputs": worst,
              "random tokens": list(noise.values()), "refined bound": ours, "bound of the paper": paper}  # fmt: skip
    lines = []
    for name, values in curves.items():
        lengths = [n for n in LENGTHS for _ in range(INPUTS)] if name == "text" else LENGTHS
        per = INPUTS if name == "text" else 1
        fit = fit_growth(lengths, values)
        ends = [statistics.median(values[:per]), statistics.median(values[-per:])]
        lines.append(
            [
                name,
                *(f"{end:.3g}" for end in ends),
                f"{fit.alpha:.2f}",
                span(fit.alpha_low, fit.alpha_high, decimals=2),
            ]
        )
    header = ["", f"n = {LENGTHS[0]}", f"n = {LENGTHS[-1]}", "α in c·n^α", "its 95 % interval"]
    write("growth.md", "numbers", table(header, lines))


if __name__ == "__main__":
    main()
