"""Figures and tables of §5 and §6 of docs/theory/mean-field.md.

    python docs/theory/make_mean_field.py

Where small heads and the heads of real models are in the (n, R) plane; and σ of n independent tokens beside its limit, which
is computed with code of its own: the derivative on L² of a law, by quadrature.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

import lipscope
from lipscope.bounds.domain import Domain, ball, image, sphere
from lipscope.bounds.exponent import Regime, regimes
from lipscope.models.inputs import position_limit, probe_inputs
from lipscope.report import draw
from lipscope.report.charts import Chart, Panel, Series
from lipscope.rounding import round_down, round_up
from lipscope.studies.charts import regime_chart
from lipscope.studies.mean_field.measures import parse_law
from lipscope.studies.worst_case import regime_map

PAGE = Path(__file__).parent / "mean-field.md"
RADIUS = 1.6
EYE = torch.eye(2, dtype=torch.float64)
MIXED = torch.diag(torch.tensor([-1.0, 0.5], dtype=torch.float64))
SKEW = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
GAINS = lipscope.RMSNorm(torch.tensor([RADIUS, RADIUS / 2], dtype=torch.float64) / math.sqrt(2), eps=0.0)
HEADS = {"diag(−1, ½)": MIXED, "skew": SKEW, "I (attractive)": EYE}
SETS = {"ball": ball(RADIUS), "sphere": sphere(RADIUS, 2), "ellipse, axes 1 : ½": image(GAINS)}


# Laws of independent tokens in the plane, with the radius of the tables in docs/concepts/mean-field.md.
LENGTHS, DRAWS, FAR = (16, 64, 256, 1024), 9, 1.5
FOUR = FAR * torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.6, 0.8]], dtype=torch.float64)


def write(name: str, header: list[str], lines: list[list[str]]) -> None:
    """Put a table between ``<!-- numbers: name -->`` and ``<!-- end -->`` of the page."""
    rows = ["| " + " | ".join(cells) + " |" for cells in (header, *lines)]
    content = "\n".join([rows[0], "|" + "---|" * len(header), *rows[1:]])
    marks = re.compile(rf"(<!-- numbers: {name} -->\n).*?(<!-- end -->)", flags=re.DOTALL)
    page, found = marks.subn(lambda m: f"{m[1]}\n{content}\n\n{m[2]}", PAGE.read_text(encoding="utf-8"))
    assert found == 1, name
    PAGE.write_text(page, encoding="utf-8")


def power(log: float, shown: Callable[[float, int], str]) -> str:
    """A number of tokens: itself where it can be read, else a power of ten; rounded so that what is claimed of it holds."""
    return shown(math.exp(log), 3) if log < math.log(1e4) else f"10^{shown(log / math.log(10), 3)}"


def line(name: str, where: str, found: list[Regime], n: int) -> list[str]:
    """Borders over the heads of a layer, and what n tokens are in each."""
    growth, plateau = [r.log_growth for r in found], [r.log_plateau for r in found]
    at = [r.at(n) for r in found]
    counts = ", ".join(f"{at.count(kind)} {kind}" for kind in dict.fromkeys(at))
    ends = [power(end(growth), round_down) for end in (min, max)] + [power(end(plateau), round_up) for end in (min, max)]
    return [name, where, " … ".join(dict.fromkeys(ends[:2])), " … ".join(dict.fromkeys(ends[2:])), str(n), counts]


def real(name: str) -> list[list[str]]:
    """Every layer of a model, on the image of its own normalisation."""
    model = lipscope.load(name)
    recording, limit = model.record(probe_inputs(model.model, 8)), position_limit(model.model) or 0
    lines = []
    for index in range(len(model.layers)):
        at = recording[index]
        if at.norm is None:
            continue
        domain: Domain = image(at.norm)
        found = list(regimes(at.weights().for_input(0), domain))
        lines.append(line(f"{name}, layer {index}", f"image of LayerNorm, R = {domain.radius:.3g}", found, limit))
    return lines


def circle(nodes: int, radius: float = FAR) -> tuple[Tensor, Tensor]:
    """The uniform law on a circle; the trapezoidal rule converges faster than any power."""
    angle = torch.arange(nodes, dtype=torch.float64) * 2 * math.pi / nodes
    return radius * torch.stack([angle.cos(), angle.sin()], 1), torch.full((nodes,), 1 / nodes, dtype=torch.float64)


def disc(rings: int, nodes: int) -> tuple[Tensor, Tensor]:
    """The uniform law on a disc: r² is uniform, hence Gauss's rule in r² and circles."""
    places, weights = (values / 2 for values in np.polynomial.legendre.leggauss(rings))
    made = [circle(nodes, FAR * math.sqrt(place + 0.5)) for place in places]
    return torch.cat([x for x, _ in made]), torch.cat([w * float(q) for (_, w), q in zip(made, weights, strict=True)])


def limits(x: Tensor, w: Tensor, A: Tensor) -> tuple[float, float]:
    """‖K + B‖ or max ‖B‖, whichever is larger, and the largest ‖zK + B‖ on the circle |z − 1| = 1, for V = I."""
    count, d = x.shape
    P = torch.softmax(x @ A.mT @ x.mT + w.log(), -1)
    apart = x[None] - (P @ x)[:, None]
    K = torch.einsum("ij,ab->iajb", P, torch.eye(d, dtype=x.dtype)) + torch.einsum("ij,ija,ib->iajb", P, apart, x @ A.mT)
    K = (K * w.sqrt()[:, None, None, None] / w.sqrt()[None, None, :, None]).reshape(count * d, count * d)
    B = torch.einsum("ij,ija,jb->iab", P, apart, x @ A)
    whole, largest = torch.block_diag(*B), float(torch.linalg.matrix_norm(B, 2).max())
    angles = np.linspace(0, math.pi, 25)
    values = [float(torch.linalg.matrix_norm((1 + np.exp(1j * t)) * K + whole, 2)) for t in angles]
    return max(float(torch.linalg.matrix_norm(K + whole, 2)), largest), max(*values, largest)


def in_law() -> tuple[Chart, list[list[str]]]:
    """σ of n independent tokens, nine draws per length, and what it tends to."""
    laws = {"circle": (circle(48), "sphere:1.5"), "disc": (disc(8, 20), "ball:1.5"),
            "four points": ((FOUR, torch.full((4,), 0.25, dtype=torch.float64)), None)}  # fmt: skip
    panels, lines = [], []
    for mask in ("full", "causal"):
        layer, series = lipscope.Attention(MIXED, EYE, EYE, scale=1.0, mask=mask), []
        for (name, (law, spelled)), colour in zip(laws.items(), ("blue", "green", "purple"), strict=True):
            level, low, high, middle = limits(*law, MIXED)[mask == "causal"], [], [], []
            for n in LENGTHS:
                draws = [
                    FOUR[torch.randint(4, (n,), generator=torch.Generator().manual_seed(seed))]
                    if spelled is None else parse_law(spelled, 2).sample(n, seed)
                    for seed in range(DRAWS)
                ]  # fmt: skip
                found = lipscope.local_lipschitz(layer, torch.stack(draws), certificate=False)
                low.append(float(found.lower.min()))
                high.append(float(found.upper.max()))
                middle.append(median(found.estimate.tolist()))
            sign = "→" if mask == "full" else "limit ≥"
            cells = [f"{m:.3f} ({round_down(a, 4)} … {round_up(b, 4)})" for m, a, b in zip(middle, low, high, strict=True)]
            lines.append([mask, name, *cells, f"{sign} {level:.4f}"])
            series.append(Series(f"{name}: median and range", LENGTHS, middle, "line", colour, low, high))
            series.append(
                Series(f"{name}: {sign} {level:.4f}", LENGTHS, [level] * len(LENGTHS), "dots", colour, group="fit")
            )
        title = "no mask: the limit" if mask == "full" else "causal mask: what the limit is at least"
        panels.append(Panel(series, "number of tokens n", "σ", title, x_log=True, x_ticks=LENGTHS))
    words = f"σ of n independent tokens of three laws, {DRAWS} draws per length, beside its limit."
    return Chart("in-law", "σ of independent tokens", panels, words, columns=2), lines


def main() -> None:
    """Draw and write."""
    for mask in ("full", "causal"):
        layer = lipscope.Attention(MIXED, EYE, EYE, scale=1.0, mask=mask)
        found = regime_map(layer, radius=RADIUS, restarts=8, steps=100)
        draw(regime_chart(found, f"One head, V = I, A = diag(−1, ½), mask {mask}"), PAGE.parent / f"regimes-{mask}.svg")
    small = []
    for name, A in HEADS.items():
        head = lipscope.Attention(A, EYE, EYE, scale=1.0)
        small += [line(f"A = {name}, V = I", f"{kind}, R = {RADIUS}", [*regimes(head, at)], 64) for kind, at in SETS.items()]
    header = ["head or layer", "tokens", "√n growth up to n =", "upper bound level from n =", "n", "heads at n"]
    write("regimes", header, small + real("gpt2-mini") + real("minilm-l6"))
    chart, lines = in_law()
    draw(chart, PAGE.parent / "in-law.svg")
    write("in law", ["mask", "law", *(f"n = {n}" for n in LENGTHS), "n → ∞"], lines)


if __name__ == "__main__":
    main()
