"""Train ``gpt2-mini``, a small real GPT-2, on public-domain books, and log σ of every layer on the way.

    python examples/train_gpt2_mini.py --out gpt2-mini --minutes 80        # killed? the same command goes on
    python examples/train_gpt2_mini.py --out gpt2-mini --steps 3000        # a fixed number of steps
    python examples/train_gpt2_mini.py --out gpt2-mini --like training.json  # the steps of an earlier run

Writes ``log.csv`` (losses), ``sigma.csv`` (σ as intervals), ``checkpoint.pt``, and at the end the exports ``float32`` and
``float16`` with tokenizer, ``training.json`` and a model card. Steps are the truth: the weights depend on the seed and the
plan of steps only (bit for bit with the same torch, processor and number of threads); ``--minutes`` chooses that plan (see
``gpt2_mini/plan.py``) and never enters the mathematics.

What lipscope ships is ``float16``, as ``src/lipscope/models/data/gpt2-mini``; the logs are in ``docs/concepts``, where
``make_training.py`` writes the page. The weights shipped now are older than this form of the script, which does not make
them again: they were trained by AdamW, in float32. Muon comes with torch 2.9.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from gpt2_mini.books import Batches, encode, read_books, train_tokenizer
from gpt2_mini.export import export
from gpt2_mini.plan import Plan
from gpt2_mini.probe import held_out_loss, measure_sigma, probe_tokens, windows
from gpt2_mini.step import next_token_loss, seeded_gpt2, set_rate


@dataclass(frozen=True)
class Settings:
    """Everything the weights depend on, beside the plan and the books.

    ``tokens_per_step`` tokens go into each update; sequences have half of ``positions`` tokens during the first
    ``short_until`` of the plan, which is faster, and all of them afterwards.
    """

    layers: int = 4
    width: int = 256
    heads: int = 8
    positions: int = 512
    vocabulary: int = 4096
    tokens_per_step: int = 2048
    short_until: float = 0.8
    peak_rate: float = 6e-3
    warmup: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    threads: int = 2
    log_every: int = 100
    save_every: int = 50
    replan_every: int = 25
    held_out_windows: int = 12

    def logs_at(self, step: int) -> bool:
        """Every ``log_every`` steps, and a few times before, when everything moves fastest."""
        return step % self.log_every == 0 or (step < self.log_every and step in (1, 4, 16, 32, 64))


def build_model(settings: Settings) -> GPT2LMHeadModel:
    """GPT-2 with its own initialisation, from the seed."""
    # The same function as GPT-2's gelu_new, in one pass over memory.
    return seeded_gpt2(settings, activation_function="gelu_pytorch_tanh")


def build_optimisers(model: GPT2LMHeadModel, settings: Settings) -> tuple[torch.optim.Muon, torch.optim.AdamW]:
    """Muon for the matrices of the layers, AdamW without decay for the rest; steps of the same size, so of one rate."""
    matrices = [p for p in model.transformer.h.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return (
        torch.optim.Muon(
            matrices, lr=settings.peak_rate, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, lr=settings.peak_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )


class Trainer:
    """The run in ``out``: starts it, or goes on from its checkpoint."""

    def __init__(self, settings: Settings, plan: Plan, out: Path, books_folder: Path | None = None) -> None:
        self.settings, self.plan, self.out = settings, plan, out
        out.mkdir(parents=True, exist_ok=True)
        # Each worker takes a share of a step on one core: they wait for each other once a step, not once a product.
        torch.set_num_threads(1)
        self.workers = ThreadPoolExecutor(settings.threads, initializer=torch.set_num_threads, initargs=(1,))
        self.books = read_books(books_folder)
        self.tokenizer = self._tokenizer()
        train_ids = encode(list(self.books.train.values()), self.tokenizer)
        positions = settings.positions
        self.batches = Batches(train_ids, positions, settings.tokens_per_step // positions, settings.seed)
        self.train_ids = train_ids
        self.held_out = {
            "alice": encode([self.books.alice], self.tokenizer),
            "tails": encode(list(self.books.tails.values()), self.tokenizer),
        }
        self.probe = probe_tokens(self.books.alice, self.tokenizer)
        self.model = build_model(settings)
        self.optimisers = build_optimisers(self.model, settings)
        self.step, self.seconds, self.losses, self.gradients = 0, 0.0, [], []
        if (out / "checkpoint.pt").exists():
            self._resume()
        for name in ("log.csv", "sigma.csv"):
            # Saving comes before logging, so the checkpoint's own step is logged again, like all that follow.
            _drop_rows_from(out / name, self.step)

    def run(self, minutes: float | None = None) -> GPT2LMHeadModel:
        """Train to the end of the plan; with ``minutes`` the end moves so that it comes in time."""
        self.model.train()
        clock, mark, marked_step = time.perf_counter(), self.seconds, self.step
        before = self.seconds
        while True:
            if self.settings.logs_at(self.step):
                self.log()
            if minutes is not None and self.step - marked_step == self.settings.replan_every:
                per_step = (self.seconds - mark) / self.settings.replan_every
                self.plan = self.plan.within(self.step, 60 * minutes - self.seconds, per_step)
                mark, marked_step = self.seconds, self.step
            if self.step >= self.plan.steps:
                break
            self.update()
            self.seconds = before + time.perf_counter() - clock
            if self.step % self.settings.save_every == 0 or self.step >= self.plan.steps:
                self._save()
        if not self.settings.logs_at(self.step):
            self.log()
        return self.model

    def update(self) -> None:
        """One step: the next batch, its loss, its gradient."""
        short = self.plan.progress(self.step) < self.settings.short_until
        inputs, targets = self.batches.at(self.step, self.settings.positions // (2 if short else 1))
        parts = list(
            self.workers.map(
                self._share, inputs.chunk(self.settings.threads), targets.chunk(self.settings.threads), repeat(len(inputs))
            )
        )
        loss = sum(part[0] for part in parts)
        for place, parameter in enumerate(self.model.parameters()):
            parameter.grad = sum(part[1][place] for part in parts)
        gradient = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        if not math.isfinite(loss) or not math.isfinite(gradient.item()):
            raise RuntimeError(f"loss {loss} or gradient {gradient.item()} is not finite at step {self.step}")
        for optimiser in self.optimisers:
            set_rate(optimiser, self.plan.rate(self.step))
            optimiser.step()
        self.losses.append(loss)
        self.gradients.append(gradient.item())
        self.step += 1

    def _share(self, inputs: Tensor, targets: Tensor, rows: int) -> tuple[float, tuple[Tensor, ...]]:
        """What some of a step's ``rows`` add to its loss and to the gradient.

        Products in bfloat16 take a fifth of the time; weights, normalisation, loss and gradients stay in float32.
        """
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = next_token_loss(self.model, inputs, targets) * (len(inputs) / rows)
        return loss.item(), torch.autograd.grad(loss, list(self.model.parameters()))

    def log(self) -> None:
        """One row of losses, and σ where it is due."""
        half, most = self.settings.positions // 2, self.settings.held_out_windows
        row: dict[str, Any] = {
            "step": self.step,
            "tokens": self.step * self.settings.tokens_per_step,
            "learning_rate": self.plan.rate(self.step),
            "train_loss": sum(self.losses) / len(self.losses) if self.losses else None,
            "gradient_norm": sum(self.gradients) / len(self.gradients) if self.gradients else None,
        }
        for name, ids in self.held_out.items():
            row[f"{name}_loss"] = held_out_loss(self.model, windows(ids, half, most))
        _append(self.out / "log.csv", [row])
        sigma = [{"step": self.step, **found} for found in measure_sigma(self.model, self.probe)]
        _append(self.out / "sigma.csv", sigma)
        worst = [max(r["estimate"] for r in sigma if r["layer"] == k) for k in range(self.settings.layers)]
        shown = {name: None if value is None else round(value, 5) for name, value in row.items()}
        print(f"{self.seconds:7.0f} s of {self.plan.steps} steps", shown, "σ", [round(s, 3) for s in worst], flush=True)
        self.losses, self.gradients = [], []

    def _tokenizer(self) -> Any:
        folder = self.out / "tokenizer"
        if not folder.exists():
            train_tokenizer(self.books, self.settings.vocabulary).save_pretrained(folder)
        return PreTrainedTokenizerFast.from_pretrained(folder)

    def _save(self) -> None:
        """Model, optimiser, random state, position and plan, written so that a kill leaves the old file or the new one."""
        state = {
            "settings": asdict(self.settings), "knots": self.plan.knots, "step": self.step, "seconds": self.seconds,
            "losses": self.losses, "gradients": self.gradients, "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers], "random": torch.get_rng_state(),
        }  # fmt: skip
        torch.save(state, self.out / "checkpoint.tmp")
        os.replace(self.out / "checkpoint.tmp", self.out / "checkpoint.pt")

    def _resume(self) -> None:
        state = torch.load(self.out / "checkpoint.pt", weights_only=True)
        if state["settings"] != asdict(self.settings):
            raise ValueError(f"{self.out} was started with {state['settings']}; use these settings or another --out")
        self.plan = Plan(tuple((int(s), float(p)) for s, p in state["knots"]), self.plan.peak, self.plan.warmup)
        self.step, self.seconds = state["step"], state["seconds"]
        self.losses, self.gradients = state["losses"], state["gradients"]
        self.model.load_state_dict(state["model"])
        for optimiser, kept in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(kept)
        torch.set_rng_state(state["random"])


def _append(path: Path, rows: list[dict[str, Any]]) -> None:
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def _drop_rows_from(path: Path, step: int) -> None:
    if not path.exists():
        return
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    # A kill in the middle of writing leaves a line that is too short.
    whole = [line for line in lines if line.count(",") == header.count(",")]
    kept = [line for line in whole if int(line.split(",", 1)[0]) < step]
    path.write_text("\n".join([header, *kept]) + "\n", encoding="utf-8")


def main() -> None:
    """Train and export."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run; an unfinished run there goes on")
    parser.add_argument("--steps", type=int, default=3000, help="updates, or the first guess with --minutes")
    parser.add_argument("--minutes", type=float, help="time to train in all, over all restarts; moves the last step")
    parser.add_argument("--like", type=Path, help="training.json of an earlier run: take exactly its steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.like is not None and arguments.minutes is not None:
        parser.error("--like takes the steps of an earlier run, --minutes chooses new ones: give one of them")
    settings = Settings(seed=arguments.seed, threads=arguments.threads)
    plan = Plan.of_steps(arguments.steps, settings.peak_rate, settings.warmup)
    if arguments.like is not None:
        knots = json.loads(arguments.like.read_text(encoding="utf-8"))["knots"]
        plan = Plan(tuple((int(step), float(p)) for step, p in knots), settings.peak_rate, settings.warmup)
    trainer = Trainer(settings, plan, arguments.out)
    trainer.run(arguments.minutes)
    export(trainer, build_model(settings))


if __name__ == "__main__":
    main()
