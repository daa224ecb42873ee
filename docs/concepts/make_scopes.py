"""Figure and table of docs/concepts/scopes.md: where the scopes begin and end, and σ of one model in all of them.

    python docs/concepts/make_scopes.py

Median over four pieces of alice of 64 tokens, every layer of gpt2-mini.
"""

from __future__ import annotations

import statistics
from typing import Any

import lipscope
from drawing import COLOURS, MODEL, TEXT, pyplot, save, table, write

SCOPES = ("head", "attention", "norm+attention", "attention+residual", "block", "model")
N, INPUTS = 64, 4


def sketch(axes: Any) -> None:
    """A pre-norm block from left to right, and a bar for every scope."""
    boxes = {"norm": 1.0, "heads": 2.5, "W_O": 3.7, "+": 4.75, "norm, MLP, +": 6.3}
    top = 6.6
    axes.annotate("", (7.9, top), (-0.3, top), arrowprops={"arrowstyle": "->", "color": "grey"})
    axes.plot([0.1, 0.1, 4.75, 4.75], [top, top + 1, top + 1, top + 0.3], color="grey", linewidth=1)
    for name, x in boxes.items():
        box = {"boxstyle": "square,pad=0.35", "facecolor": "white", "edgecolor": "black"}
        axes.text(x, top, name, ha="center", va="center", fontsize=10, bbox=box)
    bars = {"head": (1.9, 3.15), "attention": (1.9, 4.2), "norm+attention": (0.3, 4.2), "attention+residual": (-0.1, 5.05),
            "block": (-0.1, 7.4), "model": (-0.1, 7.9)}  # fmt: skip
    for row, (scope, (start, end)) in enumerate(bars.items()):
        y = 5.2 - 0.95 * row
        axes.plot([start, end], [y, y], color=COLOURS[row], linewidth=5, solid_capstyle="butt")
        axes.text(start, y + 0.2, scope + (": all blocks" if scope == "model" else ""), fontsize=10, color=COLOURS[row])
    axes.set(xlim=(-0.4, 8.0), ylim=(0, 8))
    axes.axis("off")


def main() -> None:
    """Draw and write."""
    handle = lipscope.load(MODEL)
    found: dict[str, dict[int, list[float]]] = {}
    for scope in SCOPES:
        rows = lipscope.scan(handle, TEXT, lengths=[N], inputs=INPUTS, scope=scope).rows
        found[scope] = {}
        for layer in sorted({row["layer"] for row in rows}):
            heads: dict[Any, list[float]] = {}
            for row in rows:
                if row["layer"] == layer:
                    heads.setdefault(row["head"], []).append(row["estimate"])
            # For scope head: the head whose median is largest.
            found[scope][layer] = max(heads.values(), key=statistics.median)
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(1, 1))
    sketch(left)
    for row, scope in enumerate(SCOPES[:-1]):
        x = [layer + 0.12 * (row - 2) for layer in found[scope]]
        medians = [statistics.median(v) for v in found[scope].values()]
        ends = [[m - min(v) for m, v in zip(medians, found[scope].values(), strict=True)],
                [max(v) - m for m, v in zip(medians, found[scope].values(), strict=True)]]  # fmt: skip
        label = "head (the largest)" if scope == "head" else scope
        right.errorbar(x, medians, ends, color=COLOURS[row], fmt="o", markersize=4, capsize=2, label=label)
    right.axhline(statistics.median(found["model"][0]), color=COLOURS[5], linestyle="--", label="model")
    right.set(xlabel="layer", ylabel="σ", yscale="log", xticks=list(found["attention"]))
    right.legend(fontsize=10, loc="center left", bbox_to_anchor=(1, 0.5))
    save(figure, "scopes.svg")
    layers = list(found["attention"])
    rows = [[f"`{scope}`" + (" (the largest)" if scope == "head" else ""),
             *(f"{statistics.median(found[scope][k]):.3g}" if k in found[scope] else "" for k in layers)]
            for scope in SCOPES]  # fmt: skip
    write("scopes.md", "numbers", table(["scope", *(f"layer {k}" for k in layers)], rows))


if __name__ == "__main__":
    main()
