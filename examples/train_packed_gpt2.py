"""Train one small GPT-2 on the same documents packed in three ways, and compare σ inside and beyond the training length.

    python examples/train_packed_gpt2.py --out packed-gpt2                                    # three ways, one seed
    python examples/train_packed_gpt2.py --out packed-gpt2 --page docs/concepts/packing.md    # and write the page anew

Documents are paragraphs of public-domain books in random order, cut at the training length.

    across     they are joined and cut into windows; a token attends to all tokens before it in its window
    masked     the same windows; a token attends to its own document alone, whose positions begin at 0
    buckets    a batch holds whole documents of about one length, padded at the end

Every ``steps_per_group`` steps all three have seen exactly the same documents. A run that is finished is kept in ``out``
(``WAY-SEED.json``); it takes about eight minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor, nn

import lipscope
from gpt2_mini.books import Books, encode, read_books, train_tokenizer
from gpt2_mini.plan import Plan
from gpt2_mini.step import seeded_gpt2, set_rate
from lipscope.report.charts import Chart, Look, Panel, Series
from lipscope.report.draw_print import draw
from lipscope.rounding import interval
from lipscope.runs.fit import GrowthFit, fit_growth
from train_smooth_gpt2 import fill

WAYS = ("across", "masked", "buckets")
COLOURS = {"across": "orange", "masked": "blue", "buckets": "green"}
IGNORED = -100  # target of a token that has no next one


@dataclass(frozen=True)
class Settings:
    """What all runs share but for the way of packing."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    window: int = 128
    positions: int = 512
    vocabulary: int = 2048
    shortest: int = 8
    windows_per_step: int = 16
    steps_per_group: int = 16
    steps: int = 1280
    peak_rate: float = 2e-3
    warmup: int = 80
    lengths: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    inputs: int = 12
    held_out: int = 200
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Batch:
    """What one step trains on, each (rows, tokens)."""

    ids: Tensor
    targets: Tensor  # IGNORED where nothing is to be predicted
    places: Tensor  # positions of the tokens
    documents: Tensor | None = None  # which document each token is of, where attention is to stay inside


@dataclass(frozen=True, eq=False)
class Data:
    """Documents to train on, documents held out, and the text on which σ is measured, (inputs, longest)."""

    train: list[list[int]]
    held_out: list[list[int]]
    probe: Tensor


def paragraphs(text: str) -> list[str]:
    """Paragraphs of a book, each on one line."""
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n", text) if part.strip()]


def prepare(settings: Settings, books: Books) -> Data:
    """Paragraphs as documents that end with end-of-text; σ is measured on windows of the book that is held out."""
    tokenizer = train_tokenizer(books, settings.vocabulary)

    def documents(texts: dict[str, str]) -> list[list[int]]:
        found = (encode([part], tokenizer).tolist() for text in texts.values() for part in paragraphs(text))
        return [ids[: settings.window] for ids in found if len(ids) >= settings.shortest]

    text = encode([" ".join(paragraphs(books.alice))], tokenizer)
    longest = max(settings.lengths)
    starts = [k * (len(text) - longest) // max(settings.inputs - 1, 1) for k in range(settings.inputs)]
    held_out = documents(books.tails)
    chosen = [held_out[k * len(held_out) // settings.held_out] for k in range(min(settings.held_out, len(held_out)))]
    return Data(documents(books.train), chosen, torch.stack([text[k : k + longest] for k in starts]))


def groups(documents: Sequence[list[int]], size: int, seed: int) -> Iterator[list[list[int]]]:
    """Documents in random order, in groups of exactly ``size`` tokens; the last one of a group is cut to fit."""
    generator = np.random.default_rng(seed)
    group: list[list[int]] = []
    while True:
        for k in generator.permutation(len(documents)):
            left = size - sum(map(len, group))
            group.append(documents[k][:left])
            if len(group[-1]) == left:
                yield group
                group = []


def windows_of(group: Sequence[list[int]], settings: Settings, masked: bool) -> list[Batch]:
    """The documents joined and cut; a group has one token more than its windows, the last target."""
    ids = torch.tensor([token for document in group for token in document])
    owner = torch.repeat_interleave(torch.arange(len(group)), torch.tensor([len(document) for document in group]))
    shape = (settings.steps_per_group, settings.windows_per_step, settings.window)
    targets, places, owners = ids[1:].clone(), torch.arange(settings.window).expand(shape), owner[:-1].reshape(shape)
    if masked:
        targets[owner[1:] != owner[:-1]] = IGNORED
        # The first token of each piece of a document in a window: its positions are counted from there.
        fresh = torch.ones(shape, dtype=torch.bool)
        fresh[..., 1:] = owners[..., 1:] != owners[..., :-1]
        places = places - torch.where(fresh, places, 0).cummax(-1).values
    steps = zip(ids[:-1].reshape(shape), targets.reshape(shape), places, owners, strict=True)
    return [Batch(i, t, p, o if masked else None) for i, t, p, o in steps]


def buckets_of(group: Sequence[list[int]], settings: Settings, seed: int) -> list[Batch]:
    """Whole documents by length, about as many tokens in each batch, the batches in random order."""
    ordered = sorted(group, key=len)
    ends = np.cumsum([len(document) for document in ordered])
    cut = np.searchsorted(ends, np.linspace(0, ends[-1], settings.steps_per_group + 1)[1:-1]) + 1
    bounds = [0, *cut.tolist(), len(ordered)]
    batches = []
    for k in np.random.default_rng(seed).permutation(settings.steps_per_group):
        part = ordered[bounds[k] : bounds[k + 1]]
        longest = max(map(len, part)) - 1
        ids, targets = torch.zeros(len(part), longest, dtype=torch.long), torch.full((len(part), longest), IGNORED)
        for row, document in enumerate(part):
            ids[row, : len(document) - 1] = torch.tensor(document[:-1])
            targets[row, : len(document) - 1] = torch.tensor(document[1:])
        batches.append(Batch(ids, targets, torch.arange(longest).expand(len(part), -1)))
    return batches


def batches(way: str, data: Data, settings: Settings) -> Iterator[Batch]:
    """Steps of one way of packing, without end."""
    size = settings.steps_per_group * settings.windows_per_step * settings.window + 1
    for count, group in enumerate(groups(data.train, size, settings.seed)):
        if way == "buckets":
            yield from buckets_of(group, settings, settings.seed + count)
        else:
            yield from windows_of(group, settings, way == "masked")


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Mean −ln p over the targets of a batch, in nats per token."""
    options: dict[str, Any] = {"position_ids": batch.places}
    n = batch.ids.shape[1]
    allowed = torch.ones(n, n, dtype=torch.bool).tril().expand(len(batch.ids), n, n)
    if batch.documents is not None:
        allowed = allowed & (batch.documents[:, :, None] == batch.documents[:, None])
    options["attention_mask"] = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]
    logits = model(input_ids=batch.ids, use_cache=False, **options).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)


def train(settings: Settings, data: Data, way: str) -> tuple[nn.Module, dict[str, Any]]:
    """One run from the start that its seed fixes: the model, its loss, and how many targets each position had."""
    model = seeded_gpt2(settings)
    optimiser = torch.optim.AdamW(model.parameters(), lr=settings.peak_rate, betas=(0.9, 0.95), weight_decay=0.1)
    plan = Plan.of_steps(settings.steps, settings.peak_rate, settings.warmup)
    seen, losses, clock = torch.zeros(settings.window, dtype=torch.long), [], time.process_time()
    for step, batch in zip(range(settings.steps), batches(way, data, settings), strict=False):
        set_rate(optimiser, plan.rate(step))
        loss = loss_of(model, batch)
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        seen += torch.bincount(batch.places[batch.targets != IGNORED], minlength=settings.window)
        if (step + 1) % 20 == 0:
            print(f"{way} {settings.seed}: step {step + 1}, loss {statistics.fmean(losses[-20:]):.3f}", flush=True)
    found = {
        "way": way, "settings": asdict(settings), "train_loss": statistics.fmean(losses[-settings.steps_per_group :]),
        "seconds": time.process_time() - clock, "places": seen.tolist(),
    }  # fmt: skip
    return model.eval(), found


@torch.no_grad()
def held_out_loss(model: nn.Module, data: Data, settings: Settings) -> float:
    """Mean loss on held-out documents, each by itself, in nats per token."""
    parts = buckets_of(data.held_out, settings, 0)
    counts = [int((part.targets != IGNORED).sum()) for part in parts]
    return sum(float(loss_of(model, part)) * count for part, count in zip(parts, counts, strict=True)) / sum(counts)


def measure(model: nn.Module, data: Data, settings: Settings) -> list[dict[str, Any]]:
    """σ of every layer on the first n tokens of every input, scope attention."""
    handle = lipscope.load(model)
    kept = ("layer", "n", "input", "lower", "estimate", "upper", "entropy", "max_logit")
    rows = (row for n in settings.lengths for row in handle.record(input_ids=data.probe[:, :n]).rows())
    return [{name: row[name] for name in kept} for row in rows]


def kept_run(settings: Settings, way: str, out: Path, data: Data | None) -> tuple[dict[str, Any], Data | None]:
    """The run in ``out``, trained and measured if it is not there yet; refused if its settings were others."""
    path = out / f"{way}-{settings.seed}.json"
    if not path.exists():
        data = data or prepare(settings, read_books())
        model, run = train(settings, data, way)
        model.save_pretrained(out / path.stem)
        run |= {"held_out_loss": held_out_loss(model, data, settings), "rows": measure(model, data, settings)}
        path.write_text(json.dumps(run), encoding="utf-8")
    run = json.loads(path.read_text(encoding="utf-8"))
    asked = json.loads(json.dumps(asdict(settings)))
    wrong = [name for name in asked if run["settings"].get(name) != asked[name]]
    if wrong:
        was, now = run["settings"].get(wrong[0]), asked[wrong[0]]
        raise ValueError(f"{path} was trained with {wrong[0]} = {was}, not {now}: remove it, or give another --out")
    return run, data


def of(run: dict[str, Any], layer: int, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Rows of one layer at some lengths."""
    return [row for row in run["rows"] if row["layer"] == layer and row["n"] in lengths]


def exponent(run: dict[str, Any], layer: int, lengths: Sequence[int]) -> GrowthFit:
    """α in σ ∝ n^α over these lengths, with a 95 % interval over the inputs, which are the same at every length."""
    rows = of(run, layer, lengths)
    return fit_growth([r["n"] for r in rows], [r["estimate"] for r in rows], inputs=[r["input"] for r in rows])


def ratio(run: dict[str, Any], other: dict[str, Any], layer: int, n: int) -> tuple[float, float, float]:
    """σ of one run over σ of another on the same inputs: the geometric mean, and its 95 % interval over the inputs."""
    pairs = zip(of(run, layer, [n]), of(other, layer, [n]), strict=True)
    logs = np.log([mine["estimate"] / theirs["estimate"] for mine, theirs in pairs])
    spread = float(student.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs)))
    return tuple(np.exp([logs.mean(), logs.mean() - spread, logs.mean() + spread]).tolist())


def split(settings: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Lengths up to the training length, and from there."""
    window, lengths = settings["window"], settings["lengths"]
    return [n for n in lengths if n <= window], [n for n in lengths if n >= window]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows))


def tables(runs: Sequence[dict[str, Any]]) -> str:
    """Losses, σ and exponents, ratios to ``across``, and the sentences that hold for every seed."""
    settings = runs[0]["settings"]
    inside, beyond = split(settings)
    layers, last, half = range(settings["layers"]), max(settings["lengths"]), settings["window"] // 2
    seeds = sorted({run["settings"]["seed"] for run in runs})
    by = {(run["way"], run["settings"]["seed"]): run for run in runs}
    losses = [
        [way, str(seed), f"{run['train_loss']:.3f}", f"{run['held_out_loss']:.3f}", f"{sum(run['places']):,}",
         f"{sum(run['places'][half:]) / sum(run['places']):.0%}"]
        for (way, seed), run in by.items()
    ]  # fmt: skip
    header = ["packing", "seed", "training loss", "held-out loss", "targets", f"of these at positions from {half}"]
    parts = [markdown(header, losses), ""]
    lines = []
    for (way, seed), run in by.items():
        for layer in layers:
            fits = [exponent(run, layer, lengths) for lengths in (inside, beyond)]
            sigma = [statistics.median(row["estimate"] for row in of(run, layer, [n])) for n in (inside[-1], last)]
            alphas = [f"{fit.alpha:.2f} {interval(fit.alpha_low, fit.alpha_high, decimals=2)}" for fit in fits]
            lines.append([way, str(seed), str(layer), *(f"{value:.3g}" for value in sigma), *alphas])
    header = ["packing", "seed", "layer", f"median σ, n = {inside[-1]}", f"n = {last}", f"α, n = {inside[0]} … {inside[-1]}",
              f"α, n = {beyond[0]} … {last}"]  # fmt: skip
    parts += [markdown(header, lines), ""]
    lines, said = [], []
    for way in WAYS[1:]:
        for n in (inside[-1], last):
            sides: dict[str, list[str]] = {"below": [], "above": [], "undecided": []}
            for layer in layers:
                found = [ratio(by[way, seed], by[WAYS[0], seed], layer, n) for seed in seeds]
                shown = (f"{middle:.2f} {interval(low, high, decimals=2)}" for middle, low, high in found)
                lines.append([way, str(n), str(layer), *shown])
                side = "below" if all(f[2] < 1 for f in found) else "above" if all(f[1] > 1 for f in found) else "undecided"
                sides[side].append(str(layer))
            told = "; ".join(f"{side} in {', '.join(which)}" for side, which in sides.items() if which)
            said.append(f"- `{way}` against `across`, n = {n}, by layer: σ {told}.")
    header = [f"σ over that of `{WAYS[0]}`", "n", "layer", *(f"seed {seed}" for seed in seeds)]
    every = "every seed" if len(seeds) > 1 else "the one seed"
    parts += [markdown(header, lines), "", f"Below or above means: so in {every}, with the whole interval.", "", *said]
    for way in WAYS[1:]:
        fits = {(w, s, k): exponent(by[w, s], k, beyond) for w in (way, WAYS[0]) for s in seeds for k in layers}
        slower = [str(k) for k in layers if all(fits[way, s, k].alpha_high < fits[WAYS[0], s, k].alpha_low for s in seeds)]
        faster = [str(k) for k in layers if all(fits[way, s, k].alpha_low > fits[WAYS[0], s, k].alpha_high for s in seeds)]
        told = f"slower in layers {', '.join(slower) or 'none'}, faster in {', '.join(faster) or 'none'} (intervals apart)"
        parts.append(f"- Growth beyond the training length, `{way}` against `across`: {told}.")
    return "\n".join(parts)


def chart(runs: Sequence[dict[str, Any]]) -> Chart:
    """σ against n for every layer, a line per run, and the training length."""
    settings, panels = runs[0]["settings"], []
    lengths = settings["lengths"]
    looks: tuple[Look, ...] = ("line", "dashes", "dots")
    for layer in range(settings["layers"]):
        series, heights = [], []
        for run in runs:
            seed, found = run["settings"]["seed"], [of(run, layer, [n]) for n in lengths]
            middle = [statistics.median(row["estimate"] for row in rows) for rows in found]
            heights += middle
            name = f"{run['way']}, seed {seed}"
            series.append(Series(name, lengths, middle, looks[seed % 3], COLOURS[run["way"]]))
        ends = [min(heights), max(heights)]
        series.append(Series("training length", [settings["window"]] * 2, ends, "dots", "grey", group="guide"))
        panels.append(Panel(series, "number of tokens n", "σ, scope attention", f"layer {layer}", True, True, lengths))
    words = "Median σ over the inputs against n for every layer, way of packing and seed."
    return Chart("packing", "The same documents, packed in three ways", panels, words, columns=2)


def main() -> None:
    """Train what is not there yet, then write tables and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--page", type=Path, help="a page with markers <!-- tables -->; figure and tables go there")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    data, runs = None, []
    for seed in arguments.seeds:
        for way in WAYS:
            run, data = kept_run(Settings(seed=seed), way, arguments.out, data)
            runs.append(run)
    content = tables(runs)
    print(content)
    draw(chart(runs), arguments.out / "packing.svg")
    if arguments.page is not None:
        fill(arguments.page, content)
        draw(chart(runs), arguments.page.parent / "packing.svg")


if __name__ == "__main__":
    main()
