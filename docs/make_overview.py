"""The picture of the README and of the first page: one model before and after training, by length and head by head.

    python docs/make_overview.py

Writes overview.svg: σ of every layer of gpt2-mini and of its random twin on alice against n, with the intervals of all
inputs, and σ of every head at the longest n.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "concepts"))
import lipscope
from drawing import COLOURS, TEXT, pyplot, save

LENGTHS, INPUTS = [8, 16, 32, 64, 128, 256], 4


def curves(axes: Any, rows: tuple[dict[str, Any], ...], trained: bool) -> None:
    """Medians as lines, from the least lower to the largest upper end as bands."""
    for layer in sorted({row["layer"] for row in rows}):
        at = [[row for row in rows if (row["layer"], row["n"]) == (layer, n)] for n in LENGTHS]
        medians = [statistics.median(row["estimate"] for row in some) for some in at]
        style = {"color": COLOURS[layer]} if trained else {"color": "grey", "linestyle": ":"}
        axes.plot(LENGTHS, medians, **style, marker="o", markersize=3)
        axes.fill_between(LENGTHS, [min(row["lower"] for row in some) for some in at],
                          [max(row["upper"] for row in some) for some in at], color=style["color"], alpha=0.15)  # fmt: skip
        if trained:
            axes.text(LENGTHS[-1] * 1.08, medians[-1], f"layer {layer}", color=COLOURS[layer], va="center", fontsize=11)
    if not trained:
        axes.text(LENGTHS[0], medians[0] * 1.45, "the same model before training", color="grey", fontsize=11)


def main() -> None:
    """Draw."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10.5, 3.9), width_ratios=(5, 4))
    for name, trained in (("gpt2-mini", True), ("gpt2-mini-random", False)):
        curves(left, lipscope.scan(name, TEXT, lengths=LENGTHS, inputs=INPUTS).rows, trained)
    left.set(xscale="log", yscale="log", xlabel="number of tokens n", ylabel="σ", xlim=(7, 430),
             title="σ of attention, every layer, with its interval")  # fmt: skip
    left.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    left.minorticks_off()
    heads = lipscope.scan("gpt2-mini", TEXT, heads=True, lengths=[64], inputs=INPUTS).rows
    layers, count = max(row["layer"] for row in heads) + 1, max(row["head"] for row in heads) + 1
    grid = [[statistics.median(r["estimate"] for r in heads if (r["layer"], r["head"]) == (k, h)) for h in range(count)]
            for k in range(layers)]  # fmt: skip
    image = right.imshow(grid, cmap="cividis", aspect="auto")
    for k in range(layers):
        for h in range(count):
            bright = grid[k][h] > 0.6 * max(map(max, grid))
            right.text(
                h, k, f"{grid[k][h]:.2g}", ha="center", va="center", fontsize=10, color="black" if bright else "white"
            )
    right.set(xlabel="head", ylabel="layer", yticks=range(layers), xticks=range(count), title="σ of every head, n = 64")
    figure.colorbar(image, ax=right, shrink=0.8)
    save(figure, "overview.svg", Path(__file__).parent)


if __name__ == "__main__":
    main()
