"""The atlas of reference values, src/lipscope/measure/atlas.csv, and its page, docs/concepts/atlas.md.

    python docs/concepts/make_atlas.py            every model that is here, and random twins of common sizes
    python docs/concepts/make_atlas.py NAME …     these (catalogue, directory or hub name), and keep the rest

Models read a text. A random twin has the widths and heads of a named configuration at its own random initialisation, and
reads random tokens (or a random image). Only LAYERS of its layers and a small vocabulary are made.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers as tf

import lipscope
from drawing import table, write
from lipscope.models.corpora import read_text
from lipscope.models.text import chunks_of
from lipscope.rounding import round_down, round_up
from lipscope.runs.fit import fit_growth
from lipscope.spectral.solvers import Auto

FILE = Path(__file__).resolve().parents[2] / "src/lipscope/measure/atlas.csv"
PAGE = "atlas.md"
COLUMNS = ("model", "weights", "layer", "heads", "width", "text", "n", "inputs", "lower", "estimate", "upper", "typical",
           "stable_rank", "alpha_low", "alpha", "alpha_high")  # fmt: skip
TRAINED, TEXT, LENGTHS, INPUTS = ("gpt2-mini", "minilm-l6", "smollm2-135m", "mpnet-base"), "alice", (16, 32, 64, 128, 256), 2
# Wider layers are measured up to 128 tokens, with estimates of ‖J‖_F.
WIDE = 768
LAYERS, VOCABULARY, SOLVER = 4, 512, Auto(rtol=1e-3, interval=0.05)
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "num_hidden_layers": LAYERS}
ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
TWINS: dict[str, Any] = {
    "gpt2": lambda: tf.GPT2Model(tf.GPT2Config(n_layer=LAYERS, vocab_size=VOCABULARY, **ENDS)),
    "bert-base": lambda: tf.BertModel(tf.BertConfig(**SMALL)),
    "llama-3.2-1b": lambda: tf.LlamaModel(tf.LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, rope_theta=5e5,
        **SMALL, **ENDS)),
    "qwen3-0.6b": lambda: tf.Qwen3Model(tf.Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        **SMALL, **ENDS)),
    "vit-base": lambda: tf.ViTModel(tf.ViTConfig(num_hidden_layers=LAYERS)),
}  # fmt: skip


def measured(handle: lipscope.Model, name: str, about: dict[str, Any], given: dict[int, Any]) -> Iterator[dict[str, str]]:
    """The entries of a model at its inputs, by length."""
    wide = handle.probe_recording[handle.layers[0].index].tokens().shape[-1] > WIDE
    how: dict[str, Any] = {"certificate": False, "typical": True} if wide else {}
    recordings = (handle.record(**one) for one in given.values())
    rows = [row for recorded in recordings for layer in recorded for row in layer.rows(solver=SOLVER, **how)]
    for layer in handle.layers:
        mine = [row for row in rows if row["layer"] == layer.index]
        growth = {}
        if len(given) >= 3:
            fit = fit_growth([row["n"] for row in mine], [row["estimate"] for row in mine])
            growth = {name: f"{getattr(fit, name):.3f}" for name in ("alpha_low", "alpha", "alpha_high")}
        for n in dict.fromkeys(row["n"] for row in mine):
            here = [row for row in mine if row["n"] == n]
            middle = {c: f"{statistics.median(row[c] for row in here):.4g}" for c in ("estimate", "typical", "stable_rank")}
            lower, upper = round_down(min(row["lower"] for row in here)), round_up(max(row["upper"] for row in here))
            ends = {"lower": lower, "upper": upper}
            width = handle.probe_recording[layer.index].tokens().shape[-1]
            shape = {"layer": layer.index, "heads": layer.heads, "width": width}
            known = {"model": name, **about, **shape, "n": n, "inputs": len(here), **ends, **middle, **growth}
            yield {column: str(known.get(column, "")) for column in COLUMNS}


def of_model(name: str) -> list[dict[str, str]]:
    """A model at the text."""
    handle = lipscope.load(name)
    text = read_text(TEXT)
    given = {n: {"input_ids": chunks_of(handle, text, n, INPUTS)} for n in LENGTHS}
    weights = "random" if "random weights" in "; ".join(handle.notes) else "trained"
    return list(measured(handle, handle.name, {"weights": weights, "text": TEXT}, given))


def of_twin(name: str) -> list[dict[str, str]]:
    """A random twin at random inputs."""
    torch.manual_seed(0)
    handle = lipscope.load(TWINS[name]().eval())
    generator = torch.Generator().manual_seed(0)
    if name.startswith("vit"):
        given = {197: {"inputs": {"pixel_values": torch.randn(1, 3, 224, 224, generator=generator)}}}
    else:
        wide = handle.model.config.hidden_size > WIDE
        lengths = [n for n in LENGTHS if n <= 128 or not wide]
        draws = {n: torch.randint(3, VOCABULARY, (1, n), generator=generator) for n in lengths}
        given = {n: {"input_ids": ids} for n, ids in draws.items()}
    return list(measured(handle, f"{name} (random twin)", {"weights": "random", "text": "random"}, given))


def keep(found: list[dict[str, str]]) -> list[dict[str, str]]:
    """Write the entries of a model into the file, in the place of older ones."""
    names = {entry["model"] for entry in found}
    before = list(csv.DictReader(FILE.read_text(encoding="utf-8").splitlines())) if FILE.is_file() else []
    entries = [entry for entry in before if entry["model"] not in names] + found
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(entries)
    FILE.write_text(text.getvalue(), encoding="utf-8")
    print(f"{', '.join(names)}: {len(found)} entries", flush=True)
    return entries


def span(entries: list[dict[str, str]], column: str) -> str:
    """The least, the median and the largest of a column."""
    values = [float(entry[column]) for entry in entries if entry[column]]
    if not values:
        return "–"
    return " · ".join(f"{v:.3g}".replace("-", "−") for v in (min(values), statistics.median(values), max(values)))


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="names as lipscope load takes them; all that are here by default")
    parser.add_argument("--twins", nargs="*", help=f"only these random twins: {', '.join(TWINS)}")
    parser.add_argument("--table", action="store_true", help="measure nothing, write the table of the page")
    asked = parser.parse_args()
    names = asked.models or ([] if asked.table or asked.twins else [name for name in TRAINED if lipscope_has(name)])
    for name in names:
        keep(of_model(name))
    for twin in [twin for twin in TWINS if twin in (asked.twins or TWINS) and not (asked.models or asked.table)]:
        keep(of_twin(twin))
    entries, lines = list(csv.DictReader(FILE.read_text(encoding="utf-8").splitlines())), []
    for name in dict.fromkeys(entry["model"] for entry in entries):
        mine = [entry for entry in entries if entry["model"] == name]
        n = 64 if any(entry["n"] == "64" for entry in mine) else int(mine[-1]["n"])
        at = [entry for entry in mine if int(entry["n"]) == n]
        spans = [span(at, column) for column in ("estimate", "typical", "stable_rank", "alpha")]
        lines.append([name, at[0]["width"], str(n), str(len(at)), *spans])
    header = ["model", "d", "n", "layers", "σ", "typical gain", "stable rank", "growth exponent"]
    write(PAGE, "atlas", table(header, lines))
    write(PAGE, "directions", few(entries))


def few(entries: list[dict[str, str]]) -> str:
    """How few directions are about as bad as the worst one, in trained layers."""
    trained = [entry for entry in entries if entry["weights"] == "trained" and entry["n"] == "64"]
    ranks = [float(entry["stable_rank"]) for entry in trained]
    shares = [rank / (64 * int(entry["width"])) for rank, entry in zip(ranks, trained, strict=True)]
    most = max(shares)
    return (
        f"In the {len(trained)} trained layers of the atlas, at 64 tokens, stable ranks lie between {min(ranks):.3g} and "
        f"{max(ranks):.3g}: at most one in {math.floor(1 / most):,} of the 64·d directions is about as bad as the worst one."
    )


def lipscope_has(name: str) -> bool:
    """Whether a model of the catalogue is on this machine."""
    try:
        lipscope.load(name)
    except (OSError, ValueError) as error:
        print(f"{name} is left out: {str(error).splitlines()[0]}", flush=True)
        return False
    return True


if __name__ == "__main__":
    main()
