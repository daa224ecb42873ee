"""Page, figure and rows of docs/gpt2-attention.md: the attention weights of OpenAI's GPT-2, measured without text.

    python docs/make_gpt2_attention.py --gpt2-attention FILE [--layers 0:4]   measure, and add to docs/gpt2-attention.csv
    python docs/make_gpt2_attention.py                                        write page and figure from the rows

FILE is a safetensors file with ``c_attn``, ``c_proj`` and ``ln_1`` of the blocks of ``gpt2``, named as in transformers.
Tokens lie in the image of the layer's own ``ln_1``, or in a ball of the paper's radius. Beside two of the layers: random
weights of the same shape, drawn as GPT-2 is before training.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import lipscope
from lipscope.bounds.domain import domain_of
from lipscope.bounds.exponent import regimes
from lipscope.bounds.registry import least
from lipscope.report import draw
from lipscope.report.charts import Chart, Panel, Series
from lipscope.runs.fit import fit_growth
from lipscope.studies.paper.analysis import exponent, verdict
from lipscope.studies.worst_case import construct, maximise

HERE = Path(__file__).parent
ROWS, PAGE = HERE / "gpt2-attention.csv", HERE / "gpt2-attention.md"
COLUMNS = ("weights", "layer", "head", "tokens", "radius", "what", "n", "lower", "upper", "exponent", "log_growth",
           "log_plateau", "refined", "castin2024")  # fmt: skip
LAYERS, HEADS, WIDTH, CONTEXT = 12, 12, 768, 1024
RADIUS = 15.5
LENGTHS, CLIMBED = (8, 16, 32, 64, 96), (16, 64)
# Layers beside which random weights are measured: before training all are alike.
DRAWN = (0, 6)
BALL, IMAGE = "ball", "image of ln_1"


def original(file: Path, layer: int) -> tuple[lipscope.Attention, lipscope.LayerNorm]:
    """A layer of GPT-2 and the normalisation before it; ``Conv1D`` stores (in, out)."""
    from safetensors import safe_open

    with safe_open(file, "pt") as stored:
        names = {name.removeprefix("transformer."): name for name in stored.keys()}  # noqa: SIM118
        w = {name: stored.get_tensor(names[f"h.{layer}.{name}"]).double() for name in (
            "attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "attn.c_proj.bias", "ln_1.weight", "ln_1.bias",
        )}  # fmt: skip
    q, k, v = w["attn.c_attn.weight"].mT.split(WIDTH)
    b_q, b_k, b_v = w["attn.c_attn.bias"].split(WIDTH)
    made = lipscope.Attention(q, k, v, w["attn.c_proj.weight"].mT, HEADS, q_bias=b_q, k_bias=b_k, v_bias=b_v,
                              out_bias=w["attn.c_proj.bias"], mask="causal")  # fmt: skip
    return made, lipscope.LayerNorm(w["ln_1.weight"], w["ln_1.bias"], eps=1e-5)


def drawn(layer: int) -> tuple[lipscope.Attention, lipscope.LayerNorm]:
    """The same shapes before training: normal weights with standard deviation 0.02, no biases, unit gains."""
    G = torch.Generator().manual_seed(layer)
    q, k, v, out = (0.02 * torch.randn(WIDTH, WIDTH, generator=G, dtype=torch.float64) for _ in range(4))
    unit = torch.ones(WIDTH, dtype=torch.float64)
    return lipscope.Attention(q, k, v, out, HEADS, mask="causal"), lipscope.LayerNorm(unit, torch.zeros_like(unit), eps=1e-5)


def measured(weights: str, layer: int, attention: lipscope.Attention, norm: lipscope.LayerNorm) -> Iterator[dict[str, Any]]:
    """Borders and bounds of every head, and the worst inputs of the head with the largest E."""
    for tokens, where in ((BALL, {"radius": RADIUS}), (IMAGE, {"norm": norm})):
        domain = domain_of(where.get("radius"), where.get("norm"), WIDTH)
        base = {"weights": weights, "layer": layer, "tokens": tokens, "radius": domain.radius}
        borders = regimes(attention, domain)
        for regime in borders:
            single = attention.head(regime.head)
            found = {source: least(source, single, domain.radius, CONTEXT) for source in ("refined", "castin2024")}
            known = {name: getattr(regime, name) for name in ("exponent", "log_growth", "log_plateau")}
            yield base | {"head": regime.head, "what": "head", "n": CONTEXT} | known | found
        chosen = max(borders, key=lambda regime: regime.exponent).head
        single = attention.head(chosen)
        for n in LENGTHS:
            built = construct(single, n, **where, names=("proposition34.min", "pair", "groups"))
            ends = [(c.name, c.sigma) for c in built]
            if n in CLIMBED:
                ends.append(("ascent", maximise(single, n, **where, built=built, restarts=2, steps=8).sigma))
            limits = {source: least(source, single, domain.radius, n) for source in ("refined", "castin2024")}
            for what, sigma in ends:
                yield base | {"head": chosen, "what": what, "n": n, "lower": sigma.lower, "upper": sigma.upper} | limits


def measure(file: Path, layers: list[int]) -> None:
    """Replace the rows of these layers."""
    kept: list[dict[str, Any]] = [row for row in rows() if row["layer"] not in layers] if ROWS.exists() else []
    for layer in layers:
        kept += measured("GPT-2", layer, *original(file, layer))
        kept += measured("random", layer, *drawn(layer)) if layer in DRAWN else []
        kept.sort(key=lambda row: row["layer"])
        with ROWS.open("w", encoding="utf-8", newline="") as out:
            writer = csv.DictWriter(out, COLUMNS)
            writer.writeheader()
            for row in kept:
                writer.writerow({name: f"{v:.7g}" if isinstance(v := row.get(name), float) else v for name in COLUMNS})
        print(f"layer {layer}", flush=True)


def rows() -> list[dict[str, Any]]:
    """What was measured."""
    words = ("weights", "tokens", "what")
    with ROWS.open(encoding="utf-8", newline="") as file:
        return [
            {name: value if name in words else None if value == "" else int(value) if name in ("layer", "head", "n") else
             float(value) for name, value in row.items()}
            for row in csv.DictReader(file)
        ]  # fmt: skip


def worst(found: list[dict[str, Any]], n: int, *kinds: str) -> float:
    """The largest σ attained at n tokens."""
    return max((row["lower"] for row in found if row["n"] == n and row["what"] in kinds), default=math.nan)


BUILT = ("proposition34.min", "pair", "groups")


def say() -> None:
    """Write the page and the figure from the rows."""
    every, lines, gains, slack = rows(), [], [], []
    attained: dict[str, list[float]] = {"GPT-2": [], "random": []}
    series: dict[str, list[Series]] = {BALL: [], IMAGE: []}
    for weights, layer in dict.fromkeys((row["weights"], row["layer"]) for row in every):
        for tokens, drawn in series.items():
            mine = [r for r in every if (r["weights"], r["layer"], r["tokens"]) == (weights, layer, tokens)]
            curve, climbed = [worst(mine, n, *BUILT) for n in LENGTHS], [worst(mine, n, "ascent") for n in CLIMBED]
            fit, last = fit_growth(LENGTHS, curve), next(r for r in mine if r["n"] == LENGTHS[-1])
            borders = sorted(math.floor(r["log_growth"] / math.log(10)) for r in mine if r["what"] == "head")
            lines.append([
                weights, str(layer), f"{tokens}, R = {last['radius']:.3g}", f"10^{borders[0]} … 10^{borders[-1]}",
                exponent(fit.alpha, fit.alpha_low, fit.alpha_high), verdict(fit.alpha_low, fit.alpha_high),
                f"{worst(mine, CLIMBED[-1], *BUILT):.3g}", f"{climbed[-1]:.3g}",
                f"{last['refined']:.1e}", f"{last['castin2024']:.1e}",
            ])  # fmt: skip
            attained[weights].append(worst(mine, CLIMBED[-1], *BUILT))
            if weights == "GPT-2":
                bound = {r["n"]: r["refined"] for r in mine}
                slack += [bound[n] / worst(mine, n, *BUILT, "ascent") for n in CLIMBED]
                gains += [top / worst(mine, n, *BUILT) for n, top in zip(CLIMBED, climbed, strict=True)]
            look, colour = ("line", "blue") if weights == "GPT-2" else ("dashes", "orange")
            first = not any(one.name.startswith(weights) for one in drawn)
            drawn.append(Series(f"{weights}, constructed", LENGTHS, curve, look, colour, group="fit", listed=first))
            drawn.append(Series(f"{weights}, ascent", CLIMBED, climbed, "marks", colour, listed=first))
    slope = [10 * math.sqrt(n / LENGTHS[0]) for n in LENGTHS]
    guide = Series("slope of √n", LENGTHS, slope, "dots", "grey", group="guide")
    panels = [
        Panel([*found, guide], "number of tokens n", "σ of the head, attained", tokens, True, True, LENGTHS)
        for tokens, found in series.items()
    ]
    words = "Worst σ attained by one head per layer of GPT-2 and of random weights, against n."
    chart = Chart("gpt2-attention", "The attention weights of GPT-2 at worst-case tokens", panels, words, columns=2)
    draw(chart, HERE / "gpt2-attention.svg")
    trained, heads = [line for line in lines if line[0] == "GPT-2"], [row for row in every if row["what"] == "head"]
    low = {t: min(r["log_growth"] for r in heads if (r["weights"], r["tokens"]) == ("GPT-2", t)) for t in series}
    header = ["weights", "layer", "tokens", "√n growth up to n =, over the heads", "α of the worst σ", "verdict"]
    header += [f"built, n = {CLIMBED[-1]}", "by ascent there", f"refined bound, n = {LENGTHS[-1]}", "paper's bound"]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines))
    verdicts = Counter(line[5] for line in trained)
    counts = "; ".join(f"{name} in {count}" for name, count in verdicts.most_common())
    power = {tokens: math.floor(found / math.log(10)) for tokens, found in low.items()}
    beyond = "more than" if 10 ** min(power.values()) > CONTEXT else "beside"
    (least, most), drawn_built = (min(attained["GPT-2"]), max(attained["GPT-2"])), attained["random"]
    PAGE.write_text(f"""# The attention weights of GPT-2, without text

**With the weights of the real GPT-2 σ grows like √n at constructed tokens in {verdicts["½"]} of {len(trained)} curves.** A
curve is the head with the largest E of one layer on one set of tokens, and an exponent needs a 95 % interval no wider than
0.2: {counts}.

Growth like √n is *proved* for every head up to n = 10^{power[IMAGE]} in the image of `ln_1`, and up to 10^{power[BALL]} in
the ball of radius {RADIUS:g}: {beyond} the {CONTEXT} tokens that GPT-2 reads. Only beyond such an n can the
[mean-field regime](theory/mean-field.md#5-the-three-regimes-in-n) begin.

At n = {CLIMBED[-1]} constructed tokens attain σ = {least:.3g} to {most:.3g}, with random weights of the same shape
{min(drawn_built):.3g} to {max(drawn_built):.3g}. A short gradient ascent (8 steps) attains {min(gains):.2g} to
{max(gains):.3g} times the σ of the best construction. The refined bound for all tokens of a set is {min(slack):,.0f} to
{max(slack):,.0f} times the largest σ attained at the same n; between the two the worst σ is not known.

Every attention parameter of OpenAI's GPT-2 124M (`c_attn`, `c_proj`, `ln_1`; files of the public repository
huplay/GPT2-SMALL at 6dc07e4, modified MIT licence) is measured, but not on text: embeddings and MLPs are not among them.
Measured are {len({line[1] for line in trained})} of its {LAYERS} layers, {HEADS}
heads each, under the causal mask. Written by `docs/make_gpt2_attention.py` from `docs/gpt2-attention.csv`, which the same
script makes with `--gpt2-attention FILE`. The parameters are not part of the project.

![Worst σ attained against n, on balls and in the image of ln_1](gpt2-attention.svg)

*One head per layer, the one with the largest E. Lines: the best of constructed inputs; crosses: ascent; orange: random
weights of the same shape. Left: tokens of norm at most {RADIUS:g}; right: tokens that the layer's own LayerNorm puts out.*

{table}
""", encoding="utf-8")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt2-attention", type=Path, metavar="FILE")
    parser.add_argument("--layers", default="0:12", help="which layers to measure, first:last+1")
    asked = parser.parse_args()
    if asked.gpt2_attention is not None:
        first, last = map(int, asked.layers.split(":"))
        measure(asked.gpt2_attention, list(range(first, last)))
    else:
        say()
