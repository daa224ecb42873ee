"""Train a small GPT-2 on the Python documentation with and without a smoothness penalty, and compare loss and σ.

    python examples/train_smooth_gpt2.py --out smooth-gpt2                                 # without, and with σ as penalty
    python examples/train_smooth_gpt2.py --out smooth-gpt2 --runs none spectral jasmin     # more penalties
    python examples/train_smooth_gpt2.py --out smooth-gpt2 --page docs/how-to/train-smoother.md    # write the page anew

All runs start from the same weights and see the same tokens in the same order; they differ by the penalty alone. A run
that is finished is kept in ``out`` (``NAME.json``), so that runs with the same settings can be added later. At the end the
held-out loss, σ of every layer on held-out text (scope attention) and the exponent of its growth with n are written as
``table.md`` and drawn as ``smooth-gpt2.svg``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lipscope
from gpt2_mini.books import Batches, Books, encode, train_tokenizer
from gpt2_mini.plan import Plan
from gpt2_mini.probe import held_out_loss, windows
from gpt2_mini.step import next_token_loss, seeded_gpt2, set_rate
from lipscope.models.corpora import read_text
from lipscope.models.text import Chunker
from lipscope.rounding import interval
from lipscope.runs.fit import fit_growth
from lipscope.training.penalties import ModelPenalty

# Weight of each penalty beside the loss in nats per token: large enough to be felt, small enough for the model to learn.
STRENGTH = {"none": 0.0, "spectral": 0.01, "jasmin": 0.1, "max-logit": 1e-3, "weights": 0.03}
COLOURS = {"none": "#000000", "spectral": "#0072B2", "jasmin": "#D55E00", "max-logit": "#009E73", "weights": "#CC79A7"}


@dataclass(frozen=True)
class Settings:
    """What all runs share."""

    layers: int = 3
    width: int = 96
    heads: int = 4
    positions: int = 96
    vocabulary: int = 1024
    windows: int = 8
    steps: int = 500
    peak_rate: float = 2e-3
    warmup: int = 50
    penalty_inputs: int = 2
    penalty_tokens: int = 48
    penalty_steps: int = 6
    lengths: tuple[int, ...] = (12, 24, 48, 96)
    inputs: int = 8
    log_every: int = 25
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Data:
    """Tokens to train on, tokens held out, and the inputs on which σ is measured, by length."""

    train: Tensor
    held_out: Tensor
    chunks: dict[int, Tensor]


def prepare(settings: Settings, documents: Sequence[str]) -> Data:
    """Nine tenths of the text train, the rest is held out; the tokenizer sees the training part only."""
    text = "\n\n".join(documents)
    cut = text.find("\n", int(0.9 * len(text))) + 1
    books = Books(train={"text": text[:cut]}, tails={}, alice="")
    tokenizer = train_tokenizer(books, settings.vocabulary)
    found = Chunker([text[cut:]], tokenizer).chunks(settings.lengths, settings.inputs, settings.seed)
    return Data(
        encode([text[:cut]], tokenizer), encode([text[cut:]], tokenizer), {n: torch.tensor(ids) for n, ids in found.items()}
    )


def train(settings: Settings, data: Data, kind: str, strength: float) -> dict[str, Any]:
    """One run from the common start: its losses, and σ of every layer at the end."""
    model = seeded_gpt2(settings)
    penalty = None
    if kind != "none":
        solver = lipscope.GolubKahan(rtol=1e-2, interval=None, max_steps=settings.penalty_steps)
        penalty = ModelPenalty(model, kind, solver=solver)
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.peak_rate, betas=(0.9, 0.95), weight_decay=0.1)
    plan = Plan.of_steps(settings.steps, settings.peak_rate, settings.warmup)
    batches = Batches(data.train, settings.positions, settings.windows, settings.seed)
    log, losses, penalties, clock = [], [], [], time.process_time()
    for step in range(settings.steps):
        inputs, targets = batches.at(step, settings.positions)
        set_rate(optimiser, plan.rate(step))
        total = loss = next_token_loss(model, inputs, targets)
        if penalty is not None:
            value = penalty(input_ids=inputs[: settings.penalty_inputs, : settings.penalty_tokens])
            total = loss + strength * value
            penalties.append(value.item())
        optimiser.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        if (step + 1) % settings.log_every == 0 or step + 1 == settings.steps:
            log.append({"step": step + 1, "loss": statistics.fmean(losses[-settings.log_every :])})
            shown = f", penalty {penalties[-1]:.3f}" if penalties else ""
            print(f"{kind}: step {step + 1}, loss {log[-1]['loss']:.3f}{shown}", flush=True)
    seconds = (time.process_time() - clock) / settings.steps
    rows = windows(data.held_out, settings.positions, 24)
    return {
        "kind": kind, "strength": strength, "settings": asdict(settings), "log": log, "train_loss": log[-1]["loss"],
        "held_out_loss": held_out_loss(model, rows), "seconds_per_step": seconds, "layers": measure(model.eval(), data),
    }  # fmt: skip


def measure(model: nn.Module, data: Data) -> list[dict[str, Any]]:
    """Per layer: σ by length (median, interval over the inputs) and the exponent of its growth."""
    handle = lipscope.load(model)
    rows = [row for ids in data.chunks.values() for row in handle.record(input_ids=ids).rows()]
    layers = []
    for layer in range(len(handle.layers)):
        mine = [row for row in rows if row["layer"] == layer]
        fit = fit_growth([row["n"] for row in mine], [row["estimate"] for row in mine])
        by_length = {}
        for n in data.chunks:
            here = [row for row in mine if row["n"] == n]
            low, high = min(row["lower"] for row in here), max(row["upper"] for row in here)
            by_length[n] = {"sigma": statistics.median(row["estimate"] for row in here), "lower": low, "upper": high}
        layers.append({"layer": layer, "sigma": by_length, "alpha": fit.alpha, "alpha_low": fit.alpha_low,
                       "alpha_high": fit.alpha_high})  # fmt: skip
    return layers


def tables(runs: Sequence[dict[str, Any]]) -> str:
    """Losses, then σ and its exponent per layer, as Markdown."""
    longest = str(max(int(n) for n in runs[0]["layers"][0]["sigma"]))
    lines = [
        "| penalty | weight | training loss | held-out loss | processor time per step, relative |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        ratio = run["seconds_per_step"] / runs[0]["seconds_per_step"]
        lines.append(f"| {run['kind']} | {run['strength']:g} | {run['train_loss']:.3f} | {run['held_out_loss']:.3f} "
                     f"| {ratio:.1f} |")  # fmt: skip
    lines += [
        "",
        f"| penalty | layer | σ, n = {longest} | σ without penalty / with | exponent in n |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        for layer, plain in zip(run["layers"], runs[0]["layers"], strict=True):
            here, base = layer["sigma"][longest], plain["sigma"][longest]
            lines.append(
                f"| {run['kind']} | {layer['layer']} | {here['sigma']:.3g} {interval(here['lower'], here['upper'], 3)} "
                f"| {base['sigma'] / here['sigma']:.2f} "
                f"| {layer['alpha']:.2f} {interval(layer['alpha_low'], layer['alpha_high'], decimals=2)} |"
            )
    return "\n".join(lines)


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Training loss on the left, then σ over n for every layer."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    layers = len(runs[0]["layers"])
    with mpl.rc_context({"font.size": 9, "svg.hashsalt": "lipscope"}):
        figure = Figure(figsize=(3.4 * (layers + 1), 3.4), layout="constrained")
        first, *panels = figure.subplots(1, layers + 1)
        for run in runs:
            colour = COLOURS[run["kind"]]
            first.plot([e["step"] for e in run["log"]], [e["loss"] for e in run["log"]], color=colour, label=run["kind"])
            for panel, layer in zip(panels, run["layers"], strict=True):
                x = [int(n) for n in layer["sigma"]]
                panel.plot(x, [e["sigma"] for e in layer["sigma"].values()], "o-", color=colour, markersize=4)
                low, high = ([e[end] for e in layer["sigma"].values()] for end in ("lower", "upper"))
                panel.fill_between(x, low, high, color=colour, alpha=0.12)
        first.set(xlabel="step", ylabel="training loss, nats per token")
        first.legend(title="penalty", frameon=False)
        for index, panel in enumerate(panels):
            panel.set(xscale="log", yscale="log", xlabel="n", ylabel="σ, scope attention", title=f"layer {index}")
            panel.set_xticks(x, [str(n) for n in x])
            panel.minorticks_off()
        figure.savefig(path, metadata={"Date": None})


def check_kept(run: dict[str, Any], path: Path, settings: Settings, strength: float, text: str) -> None:
    """Refuse a kept run that is not the one asked for: runs of one table share everything but the penalty."""
    asked = json.loads(json.dumps(asdict(settings))) | {"strength": strength, "text": text}
    # Runs kept before the name of the text was may be of any text.
    kept = run["settings"] | {"strength": run["strength"], "text": run.get("text", text)}
    wrong = [name for name in asked if kept.get(name) != asked[name]]
    if wrong:
        was, now = kept.get(wrong[0]), asked[wrong[0]]
        raise ValueError(f"{path} was trained with {wrong[0]} = {was}, not {now}: remove it, or give another --out")


def fill(page: Path, content: str) -> None:
    """Put the tables between the page's markers."""
    start, end = "<!-- tables -->\n", "<!-- /tables -->"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(start)
    page.write_text(before + start + content + "\n" + end + rest.split(end)[1], encoding="utf-8")


def main() -> None:
    """Train what is not there yet, then write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--runs", nargs="+", default=["none", "spectral"], choices=list(STRENGTH), help="penalties")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--text", default="python-docs", help="name from `lipscope corpora`, file or directory")
    parser.add_argument("--page", type=Path, help="a page with markers <!-- tables -->; figure and tables go there")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    settings = Settings(steps=arguments.steps)
    arguments.out.mkdir(parents=True, exist_ok=True)
    data, runs = None, []
    for kind in dict.fromkeys(["none", *arguments.runs]):
        path = arguments.out / f"{kind}.json"
        if not path.exists():
            data = data or prepare(settings, read_text(arguments.text))
            found = train(settings, data, kind, STRENGTH[kind]) | {"text": arguments.text}
            path.write_text(json.dumps(found, indent=1), encoding="utf-8")
        run = json.loads(path.read_text(encoding="utf-8"))
        check_kept(run, path, settings, STRENGTH[kind], arguments.text)
        runs.append(run)
    content = tables(runs)
    print(content)
    (arguments.out / "table.md").write_text(content + "\n", encoding="utf-8")
    draw(runs, arguments.out / "smooth-gpt2.svg")
    if arguments.page is not None:
        fill(arguments.page, content)
        draw(runs, arguments.page.parent / "smooth-gpt2.svg")


if __name__ == "__main__":
    main()
