"""Figure and table of docs/concepts/sigma.md: how far the output of a real layer moves, per direction and per distance.

    python docs/concepts/make_sigma.py

Layer 2 of gpt2-mini at 64 tokens of alice, in float64: ‖f(X + εE) − f(X)‖/ε for the worst direction E and for random ones.
"""

from __future__ import annotations

import statistics

import torch

import lipscope
from drawing import BLUE, ORANGE, RealLayer, pyplot, save, table, write

LAYER, N, DIRECTIONS = 2, 64, 100
SIZES = [10.0 ** (exponent / 4) for exponent in range(-16, 9)]


def main() -> None:
    """Draw and write."""
    real = RealLayer(LAYER, N)
    f, X = real.attention.to(torch.float64), real.X.double()
    result = lipscope.local_lipschitz(f, X, solver=lipscope.GolubKahan(rtol=1e-8, interval=1e-3, vectors=True))
    assert result.right is not None
    assert result.token_energy is not None
    worst, sigma = result.right[0].reshape(X.shape), float(result.estimate)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(DIRECTIONS, *X.shape, generator=generator, dtype=torch.float64)
    noise /= noise.norm(dim=(1, 2), keepdim=True)

    def gain(direction: torch.Tensor, size: float) -> float:
        return float((f(X + size * direction) - f(X)).norm()) / size

    along = [gain(worst, size) for size in SIZES]
    random = [[gain(one, size) for one in noise] for size in SIZES]
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2))
    left.axhline(sigma, color="black", linestyle="--", linewidth=1, label=f"σ(X) = {sigma:.1f}")
    left.plot(SIZES, along, color=ORANGE, marker="o", markersize=3, label="the worst direction")
    left.plot(SIZES, [statistics.median(g) for g in random], color=BLUE, label="random directions, median and range")
    left.fill_between(SIZES, [min(g) for g in random], [max(g) for g in random], color=BLUE, alpha=0.25)
    left.set(xscale="log", yscale="log", xlabel="distance ε = ‖E‖ of the move", ylabel="‖f(X + E) − f(X)‖ / ‖E‖")
    left.legend(fontsize=10)
    energy = result.token_energy.tolist()
    right.bar(range(N), energy, color=ORANGE)
    right.set(xlabel="token", ylabel="share of the worst direction", title="where the worst direction lives")
    save(figure, "sigma.svg")
    small = SIZES.index(min(SIZES, key=lambda s: abs(s - 1e-2)))
    top = sorted(range(N), key=lambda i: -energy[i])[:3]
    rows = [
        ["σ(X)", f"{sigma:.4g}"],
        ["gain of the worst direction at ε = 0.01", f"{along[small]:.4g}"],
        [f"median gain of {DIRECTIONS} random directions at ε = 0.01", f"{statistics.median(random[small]):.3g}"],
        ["σ over that median", f"{sigma / statistics.median(random[small]):.3g}"],
        ["gain of the worst direction at ε = 100", f"{along[-1]:.3g}"],
        ["largest shares of the worst direction", ", ".join(f"token {i}: {energy[i]:.0%}" for i in top)],
        ["largest ‖∂out_i/∂x_j‖ of one token on one token", f"{float(lipscope.influence(f, X).max()):.3g}"],
    ]
    write("sigma.md", "numbers", table(["", f"layer {LAYER} of gpt2-mini, n = {N}"], rows))


if __name__ == "__main__":
    main()
