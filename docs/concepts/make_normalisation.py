"""Figure and table of docs/concepts/normalisation.md: one layer with and without its LayerNorm, at ever longer tokens.

    python docs/concepts/make_normalisation.py

Layer 2 of gpt2-mini at 32 tokens of alice, scaled by r; and for every layer the norms of its tokens beside the largest one
that its LayerNorm can put out.
"""

from __future__ import annotations

import torch

import lipscope
from drawing import BLUE, MODEL, ORANGE, TEXT, RealLayer, pyplot, save, table, write
from lipscope.bounds import evaluate

LAYER, N = 2, 32
SCALES = [10 ** (exponent / 8) for exponent in range(-8, 25)]


def main() -> None:
    """Draw and write."""
    handle = lipscope.load(MODEL)
    real = RealLayer(LAYER, N, handle)
    norm = real.recording[LAYER].norm
    assert norm is not None
    f, X, U = real.attention.to(torch.float64), real.X.double(), real.tokens("norm+attention").double()
    bare = [float(lipscope.local_lipschitz(f, r * X, certificate=False).estimate) for r in SCALES]
    behind = [float(lipscope.local_lipschitz(f, r * U, scope="norm+attention", norm=norm, certificate=False).estimate)
              for r in SCALES]  # fmt: skip
    limit = evaluate("large_radius.limit", f, x=X).value
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    left.plot(SCALES, bare, color=ORANGE, marker="o", markersize=3, label="attention at r·X: no normalisation")
    left.plot(SCALES, behind, color=BLUE, marker="o", markersize=3, label="norm+attention at r·U: with its LayerNorm")
    left.axhline(limit, color="grey", linestyle=":", linewidth=1)
    left.text(SCALES[0], limit * 1.1, "the limit of attention as r → ∞ is at most this", color="grey", fontsize=10)
    left.set(xscale="log", yscale="log", xlabel="r, tokens are r times those of the text", ylabel="σ")
    left.legend(fontsize=10)
    rows = lipscope.scan(handle, TEXT, lengths=[N], inputs=4).rows
    layers = sorted({row["layer"] for row in rows})
    lines = []
    for layer in layers:
        mine = [row for row in rows if row["layer"] == layer]
        largest, radius = max(row["radius_max"] for row in mine), mine[0]["radius_norm"]
        right.plot([layer, layer], [0, radius], color=BLUE, linewidth=8, alpha=0.25, solid_capstyle="butt")
        right.plot([layer] * len(mine), [row["radius_rms"] for row in mine], "o", color=ORANGE, markersize=4)
        right.plot([layer], [largest], "_", color="black", markersize=14)
        bound = max(row["refined_global"] for row in mine)
        numbers = (largest, radius, max(row["estimate"] for row in mine), bound)
        lines.append([str(layer), *(f"{number:.3g}" for number in numbers)])
    right.set(xlabel="layer", ylabel="norm of a token", xticks=layers)
    right.set_title("dots: typical tokens; dash: the longest seen;\nbar: the longest that the LayerNorm allows", fontsize=11)
    save(figure, "normalisation.svg")
    header = ["layer", "longest token seen", "longest allowed", "largest σ seen", "σ of every input, at most"]
    write("normalisation.md", "numbers", table(header, lines))


if __name__ == "__main__":
    main()
