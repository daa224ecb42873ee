"""Figure and table of docs/concepts/certificates.md: what is attained, probable, certain, and certain for every input.

    python docs/concepts/make_certificates.py

Every layer of gpt2-mini at 32 tokens of alice; and the constant of a ball around those tokens for head 0 of layer 0.
"""

from __future__ import annotations

import torch

import lipscope
from drawing import BLUE, GREEN, MODEL, ORANGE, PINK, SKY, RealLayer, pyplot, save, table, write
from lipscope.rounding import interval, round_up

N, BALL_LAYER, BALL_HEAD = 32, 0, 0
RADII = [0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0]


def main() -> None:
    """Draw and write."""
    handle = lipscope.load(MODEL)
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    steps = {"certificate at this input": GREEN, "refined bound, tokens of this norm": BLUE,
             "refined bound, every input": SKY, "bound of the paper, every input": PINK}  # fmt: skip
    lines = []
    for layer in range(len(handle.layers)):
        real = RealLayer(layer, N, handle)
        (row,) = handle.record(input_ids=real.ids).rows(layers=[layer], certificate=True)
        probable = lipscope.local_lipschitz(real.attention, real.X, certificate=False)
        left.plot([row["lower"], probable.upper], [layer, layer], color=ORANGE, linewidth=6, solid_capstyle="butt")
        values = [row["certified"], row["refined"], row["refined_global"], row["castin2024_global"]]
        for value, colour in zip(values, steps.values(), strict=True):
            left.plot([value], [layer], "D", color=colour, markersize=5)
        lines.append([str(layer), interval(row["lower"], probable.upper), *map(round_up, values)])
    left.plot([], [], color=ORANGE, linewidth=6, label="σ lies in here (probabilistic upper end)")
    for name, colour in steps.items():
        left.plot([], [], "D", color=colour, markersize=5, label=name)
    left.set(xscale="log", xlabel="σ, and what bounds it", ylabel="layer", yticks=range(len(handle.layers)),
             ylim=(-0.6, len(handle.layers) + 1.7))  # fmt: skip
    left.legend(fontsize=10, loc="upper left")
    real = RealLayer(BALL_LAYER, N, handle)
    head, X = real.attention.head(BALL_HEAD).to(torch.float64), real.X.double()
    sigma = float(lipscope.local_lipschitz(head, X).estimate)
    constants = [lipscope.certify(head, X, radius=rho).value for rho in RADII]
    verified = [lipscope.certify(head, X, radius=rho, verified=True).value for rho in RADII]
    generator = torch.Generator().manual_seed(0)
    seen = []
    for rho in RADII:
        E = torch.randn(8, *X.shape, generator=generator, dtype=torch.float64)
        E *= rho / E.norm(dim=(1, 2), keepdim=True)
        seen.append(float(lipscope.local_lipschitz(head, X + E, certificate=False).estimate.max()))
    right.plot(RADII, constants, color=GREEN, marker="o", markersize=3, label="certify(radius=ρ): holds on the whole ball")
    right.plot(RADII, verified, color=BLUE, linestyle="--", label="the same with σ at the centre verified")
    right.plot(RADII, seen, color=ORANGE, marker="o", markersize=3, label="largest σ seen at 8 random points at distance ρ")
    right.set(xscale="log", xlabel="radius ρ of the ball", ylabel=f"layer {BALL_LAYER}, head {BALL_HEAD}", ylim=(0, None))
    right.legend(fontsize=10)
    save(figure, "certificates.svg")
    header = ["layer", "σ in", "certificate", "refined, this norm", "refined, every input", "paper, every input"]
    write("certificates.md", "numbers", table(header, lines))
    ball = [
        [f"{rho:g}", round_up(c), round_up(v), f"{s:.4g}"]
        for rho, c, v, s in zip(RADII, constants, verified, seen, strict=True)
    ][::3]
    write(
        "certificates.md",
        "ball",
        f"σ at the centre: {sigma:.4g}.\n\n"
        + table(["ρ", "certified on the ball", "centre verified", "largest σ seen"], ball),
    )


if __name__ == "__main__":
    main()
