"""Figure and tables of docs/concepts/training.md: σ while gpt2-mini was trained, and trained against random at the end.

    python docs/concepts/make_training.py [--page docs/concepts/training.md]

Reads gpt2-mini-log.csv and gpt2-mini-sigma.csv next to the page (written by examples/train_gpt2_mini.py), draws
sigma-training.svg, measures the two models on the held-out text, and writes the tables between the page's markers.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from pathlib import Path
from typing import Any

import lipscope
from drawing import COLOURS, table, write
from lipscope import rounding as ends
from lipscope.models.load import GPT2_MINI

LENGTHS, INPUTS, SEED = (64, 256), 8, 1
Rows = list[dict[str, str]]


def read(path: Path) -> Rows:
    """The rows of a CSV file."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def at_layer(sigma: Rows, layer: int, column: str = "estimate") -> dict[int, list[float]]:
    """Values of one layer by step, one per input."""
    found: dict[int, list[float]] = {}
    for row in sigma:
        if int(row["layer"]) == layer:
            found.setdefault(int(row["step"]), []).append(float(row[column]))
    return found


def draw(path: Path, log: Rows, sigma: Rows) -> None:
    """Loss on the left; σ of every layer on the right, median and range over the probe inputs."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "lipscope"
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    shown = {"train_loss": ("training text", "grey"), "tails_loss": ("held-out ends of the training books", "#E69F00"),
             "alice_loss": ("held-out book (alice)", "black")}  # fmt: skip
    for column, (label, colour) in shown.items():
        points = [(int(row["step"]), float(row[column])) for row in log if row[column]]
        left.plot(*zip(*points, strict=True), label=label, color=colour, marker="o", markersize=2)
    left.set(xlabel="step", ylabel="loss, nats per token", title="loss")
    for layer in sorted({int(row["layer"]) for row in sigma}):
        values = at_layer(sigma, layer)
        steps, colour = list(values), COLOURS[layer]
        medians = [statistics.median(found) for found in values.values()]
        right.plot(steps, medians, label=f"layer {layer}", color=colour, marker="o", markersize=2)
        right.fill_between(
            steps, [min(v) for v in values.values()], [max(v) for v in values.values()], color=colour, alpha=0.15
        )
    first = sigma[0]
    right.set(xlabel="step", ylabel=f"σ, scope {first['scope']}", yscale="log",
              title=f"σ on the held-out book, n = {first['n']}, mask {first['mask']}")  # fmt: skip
    for panel in (left, right):
        panel.set_xscale("symlog", linthresh=1)
        panel.set_xlim(left=0)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def along_training(log: Rows, sigma: Rows) -> str:
    """A few steps of the run: losses, and the median σ of every layer."""
    layers = sorted({int(row["layer"]) for row in sigma})
    losses = {int(row["step"]): float(row["alice_loss"]) for row in log}
    steps = list(losses)
    wanted = sorted({0, 16, 100, *(min(steps, key=lambda s: abs(s - share * steps[-1])) for share in (0.25, 0.5, 0.75, 1))})
    values = {k: at_layer(sigma, k) for k in layers}
    rows = [
        [f"{step:,}", f"{losses[step]:.2f}", *(f"{statistics.median(values[k][step]):.3g}" for k in layers)]
        for step in wanted
    ]
    return table(("step", "held-out loss", *(f"σ, layer {k}" for k in layers)), rows)


def against_random() -> str:
    """σ per layer of the trained model and of its random twin, on the same tokens."""
    scans = {name: lipscope.scan(name, "alice", lengths=LENGTHS, inputs=INPUTS, seed=SEED).rows
             for name in ("gpt2-mini", "gpt2-mini-random")}  # fmt: skip
    names = ("n", "layer", "σ trained", "σ random", "ratio", "entropy trained", "random", "largest logit trained", "random")
    found = []
    for n in LENGTHS:
        for layer in sorted({row["layer"] for row in scans["gpt2-mini"]}):
            trained, random = ([r for r in rows if (r["n"], r["layer"]) == (n, layer)] for rows in scans.values())
            ratio = statistics.median(r["estimate"] for r in trained) / statistics.median(r["estimate"] for r in random)
            found.append(
                [str(n), str(layer), interval(trained), interval(random), f"{ratio:.1f}", f"{mean(trained, 'entropy'):.2f}",
                 f"{mean(random, 'entropy'):.2f}", f"{max(r['max_logit'] for r in trained):.1f}",
                 f"{max(r['max_logit'] for r in random):.2f}"]
            )  # fmt: skip
    return table(names, found)


def interval(rows: list[dict[str, Any]]) -> str:
    """Median estimate, and the interval that holds σ of every input."""
    median = statistics.median(r["estimate"] for r in rows)
    return f"{median:.3g} {ends.interval(min(r['lower'] for r in rows), max(r['upper'] for r in rows), 3)}"


def mean(rows: list[dict[str, Any]], column: str) -> float:
    """Mean of a column."""
    return statistics.fmean(row[column] for row in rows)


def losses(facts: dict[str, Any]) -> str:
    """What the model learned, from the metadata that ships with it."""
    rows = [
        [text, who, f"{found[who]['nats_per_token']:.3f}", f"{found[who]['bits_per_byte']:.3f}"]
        for text, found in facts["held_out"].items()
        for who in ("trained", "random", "unigram")
    ]
    return table(("held-out text", "model", "nats per token", "bits per byte"), rows)


def main() -> None:
    """Refresh the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=Path(__file__).parent / "training.md")
    page: Path = parser.parse_args().page.resolve()
    log, sigma = read(page.parent / "gpt2-mini-log.csv"), read(page.parent / "gpt2-mini-sigma.csv")
    draw(page.parent / "sigma-training.svg", log, sigma)
    facts = json.loads((GPT2_MINI / "training.json").read_text(encoding="utf-8"))
    for name, content in (("losses", losses(facts)), ("along", along_training(log, sigma)), ("random", against_random())):
        write(page, name, content)


if __name__ == "__main__":
    main()
