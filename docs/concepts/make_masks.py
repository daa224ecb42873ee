"""Figure and table of docs/concepts/masks.md: who sees whom, and σ of one layer at the same tokens under every mask.

    python docs/concepts/make_masks.py

Layer 2 of gpt2-mini at 48 tokens of alice; the model's own mask is causal.
"""

from __future__ import annotations

import torch

import lipscope
from drawing import RealLayer, pyplot, save, table, write
from lipscope.rounding import round_down, round_up

LAYER, N = 2, 48
MASKS = ("full", "causal", "window:8", "prefix:16", "causal&pad-left:12", "packed:8,24,16")


def main() -> None:
    """Draw and write."""
    real = RealLayer(LAYER, N)
    plt = pyplot()
    figure, panels = plt.subplots(1, len(MASKS), figsize=(11, 2.6))
    lines = []
    for mask, panel in zip(MASKS, panels, strict=True):
        result = lipscope.local_lipschitz(real.attention, real.X, mask=mask)
        allowed = lipscope.masks.as_mask(mask).allowed(N)
        seen = torch.ones(N, N) if allowed is None else allowed[0, 0].float()
        panel.imshow(seen, cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest")
        panel.set(xticks=[], yticks=[])
        panel.set_title(f"{mask}\nσ = {result.estimate:.3g}", fontsize=11)
        lines.append(
            [f"`{mask}`", f"{seen.mean():.0%}", round_down(result.lower), f"{result.estimate:.4g}", round_up(result.upper)]
        )
    panels[0].set(xlabel="key j", ylabel="query i")
    save(figure, "masks.svg")
    write("masks.md", "numbers", table(["mask", "visible pairs", "σ ≥", "σ", "σ ≤"], lines))
    parts, start = [], 0
    for length in lipscope.masks.as_mask(MASKS[-1]).lengths:  # type: ignore[attr-defined]
        alone = lipscope.local_lipschitz(real.attention, real.X[start : start + length], mask="causal")
        parts.append([f"tokens {start} to {start + length - 1}", f"{alone.estimate:.4g}"])
        start += length
    write("masks.md", "packed", table(["document alone, mask `causal`", "σ"], parts))


if __name__ == "__main__":
    main()
