"""Figure, tables and sentences of docs/concepts/what-sigma-predicts.md: what predicts the damage that rounding does.

    python docs/concepts/make_what_sigma_predicts.py            twenty minutes of one core
    python docs/concepts/make_what_sigma_predicts.py --full     every format, text and length for every model; hours
    python docs/concepts/make_what_sigma_predicts.py --rows F   measure only the models of which F has no rows

Keys, values, activations or weights of one layer at a time are rounded, or noise is added to its output. What that does to
the outputs is measured, and compared with σ and other numbers of the layer. Rows are kept in build/what-sigma-predicts.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import lipscope
from drawing import BLUE, ORANGE, pyplot, save, table, write
from lipscope.models.corpora import read_text
from lipscope.models.text import chunks_of
from lipscope.report.summary import PREDICTORS, correlations

PAGE, ROWS = "what-sigma-predicts.md", Path("build/what-sigma-predicts.json")
MODELS = ("smollm2-135m", "minilm-l6", "gpt2-mini", "gpt2-mini-random")
TEXTS, LENGTHS, FORMATS = ("python-docs", "alice", "moby-dick"), (16, 32, 64), ("bf16", "fp8", "int8")
PLACES = {"keys": "k", "values": "v", "activations": "input", "weights": "weights"}
GROUPS = {words: [f"{kind}-{place}" for kind in FORMATS] for words, place in PLACES.items()}
GROUPS["noise"] = ["noise:0.01-output"]
INPUTS, PROBES, SMALL, CLOSE, TRIALS = 2, 96, 1e-3, 0.25, 400

Setting = list[dict[str, Any]]


def settings(model: str, full: bool) -> list[tuple[str, int, list[str]]]:
    """Texts, lengths and perturbations: all; or, for the largest model, every text, length and format once, and fp8 keys."""
    names = [name for group in GROUPS.values() for name in group]
    if full or model != MODELS[0]:
        return [(text, n, names) for text, n in itertools.product(TEXTS, LENGTHS)]
    return [
        (text, n, [name for name in names if name.startswith((kind, "noise")) or name in ("fp8-k", "fp8-v")])
        for text, n, kind in zip(TEXTS, LENGTHS, FORMATS, strict=True)
    ]


def measure(model: str, full: bool) -> Iterator[Setting]:
    """The rows of one perturbation, on one text, at one length."""
    handle = lipscope.load(model)
    for text, n, names in settings(model, full):
        found = lipscope.sensitivity(handle, text, perturb=names, verify=True, n=n, inputs=INPUTS, probes=PROBES)
        print(f"{found!r}", flush=True)
        yield from (found.to_rows(name) for name in names)


def estimators() -> Iterator[list[str]]:
    """The error of ‖J‖_F from eight products with J or Jᵀ: Hutchinson's sum, and Hutch++ on JJᵀ with one and two directions.

    Both depend on singular values alone, here those of dense Jacobians, so that trials are drawn for diagonal matrices.
    """
    handle, generator = lipscope.load("gpt2-mini"), torch.Generator().manual_seed(0)
    recorded = handle.record(input_ids=chunks_of(handle, read_text("alice"), 6))
    for scope in ("attention", "attention+residual", "block"):
        for layer in (recorded[0], recorded[3]):
            squares = torch.linalg.svdvals(layer.operator(scope).to_dense()[0].double()).square()
            trials, total = torch.randn(TRIALS, len(squares), 8, generator=generator, dtype=torch.float64), squares.sum()
            plain = (squares[:, None] * trials.square()).sum(1).mean(1)
            errors = [plain]
            for k in (1, 2):  # A·S takes 2k products, JᵀQ k, and the rest is left for directions beside Q
                Q = torch.linalg.qr(squares[:, None] * trials[..., :k])[0]
                rest = trials[..., 3 * k :] - Q @ (Q.mT @ trials[..., 3 * k :])
                found = (squares[:, None] * Q.square()).sum((1, 2)) + (squares[:, None] * rest.square()).sum(1).mean(1)
                errors.append(found)
            shown = [f"{100 * float((e / total).sqrt().sub(1).square().mean().sqrt()):.1f} %" for e in errors]
            yield [scope, str(layer.index), f"{float(total / squares[0]):.3g}", *shown]


def cell(found: tuple[float, float, float]) -> str:
    """A correlation with its interval."""
    value, low, high = (0.0 if abs(x) < 0.005 else x for x in found)
    return f"{value:.2f} [{low:.2f}, {high:.2f}]".replace("-", "−")


def counted_signs(name: str, found: Sequence[dict[str, tuple[float, float, float]]]) -> str:
    """How often an interval lies above, around or below zero."""
    ends = [row[name][1:] for row in found]
    above, below = sum(low > 0 for low, _ in ends), sum(high < 0 for _, high in ends)
    return f"above zero in {above}, below zero in {below}, on both sides in {len(ends) - above - below} of {len(ends)} rows"


def agreement(rows: Sequence[dict[str, Any]]) -> list[str]:
    """In how many cases prediction and measurement agree."""
    small = [row for row in rows if 0 < row["measured"] < SMALL]
    close = sum(abs(row["predicted"] - row["measured"]) <= CLOSE * row["measured"] for row in small)
    return [f"{close} of {len(small)} ({100 * close / len(small):.0f} %)", f"{len(rows) - len(small)}"]


def coverage(found: dict[str, list[Setting]]) -> str:
    """How often what was measured lies in the interval, of roundings and of noise."""
    lines = []
    for model, settings in found.items():
        small = [row for rows in settings for row in rows if 0 < row["measured"] < SMALL]
        groups = [[row for row in small if row["kind"].startswith("noise") == noise] for noise in (False, True)]
        inside = [sum(row["predicted_low"] <= row["measured"] <= row["predicted_high"] for row in rows) for rows in groups]
        shown = (f"{k} of {len(rows)} ({100 * k / len(rows):.0f} %)" for k, rows in zip(inside, groups, strict=True))
        lines.append([model, *shown])
    return table(["model", "rounding inside the 95 % interval", "noise inside the 95 % interval"], lines)


def draw(rows: Sequence[dict[str, Any]]) -> None:
    """Measured damage against σ and against the prediction, for keys and values of the largest model in fp8."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for panel, column, label in zip(panels, ("estimate", "predicted"), ("σ", "predicted damage, ½ δᵀFδ"), strict=True):
        for kind, colour, words in (("fp8-k", BLUE, "keys in fp8"), ("fp8-v", ORANGE, "values in fp8")):
            mine = [row for row in rows if row["kind"] == kind]
            across, up = ([row[name] for row in mine] for name in (column, "measured"))
            panel.plot(across, up, "o", color=colour, markersize=4, label=words)
        panel.set(xscale="log", yscale="log", xlabel=label)
    ends = panels[1].get_xlim()
    panels[1].plot(ends, ends, color="grey", linewidth=1, zorder=0)
    panels[0].set(ylabel="measured damage, KL in nats")
    panels[0].legend(fontsize=10)
    save(figure, "what-sigma-predicts.svg")


def main() -> None:
    """Measure, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every format, text and length for every model; hours")
    parser.add_argument("--rows", type=Path, help="take these, and measure the models that they lack")
    asked = parser.parse_args()
    found = {} if asked.rows is None else json.loads(asked.rows.read_text(encoding="utf-8"))
    ROWS.parent.mkdir(exist_ok=True)
    for model in reversed(MODELS):
        if model not in found:
            found[model] = list(measure(model, asked.full))
            ROWS.write_text(json.dumps(found), encoding="utf-8")
    draw([row for rows in found[MODELS[0]] for row in rows])
    ranks = {
        (model, group): correlations([rows for rows in found[model] if rows[0]["kind"] in names])
        for model in MODELS
        for group, names in GROUPS.items()
    }
    lines = [
        [model, group, str(len(found[model][0])), *(cell(row[name]) for name in PREDICTORS)]
        for (model, group), row in ranks.items()
    ]
    write(PAGE, "numbers", table(["model", "perturbed", "layers", *PREDICTORS.values()], lines))
    said = [f"- of {words} {counted_signs(name, list(ranks.values()))};" for name, words in PREDICTORS.items()]
    best = sum(max(row, key=lambda name: row[name][0]) == "predicted" for row in ranks.values())
    said.append(f"- and the Fisher prediction has the largest correlation of its row in {best} of {len(ranks)}.")
    write(PAGE, "sentences", "\n".join(said))
    header = ["scope", "layer", "stable rank", "Hutchinson", "Hutch++, one direction", "Hutch++, two"]
    write(PAGE, "estimators", table(header, list(estimators())))
    pooled = {model: [row for rows in found[model] for row in rows] for model in MODELS}
    everything = [row for rows in pooled.values() for row in rows]
    write(PAGE, "coverage", coverage(found))
    header = ["model", "within 25 % of the measured damage", "not counted"]
    write(PAGE, "agreement", table(header, [[m, *agreement(rows)] for m, rows in [*pooled.items(), ("all", everything)]]))
    read = {model: dict.fromkeys((rows[0]["text"], rows[0]["n"]) for rows in found[model]) for model in MODELS}
    lines = [
        [model, ", ".join(dict.fromkeys(rows[0]["kind"] for rows in found[model])),
         ", ".join(f"{text} at {n}" for text, n in read[model])]
        for model in MODELS
    ]  # fmt: skip
    passes = PROBES * sum(map(len, read.values()))
    cost = (
        f"{INPUTS} inputs of each length, {PROBES} backward passes per text and length for all layers and perturbations "
        f"together: {passes} backward passes for {len(everything)} cases of a layer, a text and a perturbation."
    )
    write(PAGE, "run", table(["model", "perturbations", "texts and lengths"], lines) + f"\n\n{cost}")


if __name__ == "__main__":
    main()
