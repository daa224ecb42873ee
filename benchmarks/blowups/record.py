"""Run the trainings that blow up and their healthy twins, and write every signal of every step to a table.

Loss, gradient norm and the backward bound are read at every step; σ, the largest logit and the entropy of every layer by the
monitor every 5 steps, on two held-out windows. The held-out loss of every second step says when a training has blown up.
With remedies every training runs again with each of them, from its first step on. Tables go to ``build/blowups/``; what is
there already is kept, so that an interrupted run goes on. ``tables.py`` runs this, and reads them.
"""

from __future__ import annotations

import csv
import itertools
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from trainings import CASES, TOKENS, Training, advance

from lipscope.training import ModelPenalty, Monitor, QKClip

EVERY, LAYERS = 5, 3
OUT = Path(__file__).parents[2] / "build" / "blowups"
PER_LAYER = ("max_logit", "entropy", "sigma", "backward")
COLUMNS = ("case", "run", "seed", "remedy", "step", "rate", "loss", "held_out", "grad_norm", "acted",
           *(f"{name}_{layer}" for name in PER_LAYER for layer in range(LAYERS)))  # fmt: skip
# Just above the largest logit of a healthy twin.
TAU = 50.0


class Remedy:
    """Something that is done about a blow-up, from the first step on."""

    rate = 1.0  # multiplies the learning rate
    penalty: Callable[[torch.Tensor], torch.Tensor] | None = None  # added to the loss every 4th step

    def __init__(self, training: Training) -> None:
        self.training = training

    def skip(self, size: float) -> bool:
        """Whether to leave out a step whose gradient has this norm."""
        return False

    def after(self, step: int) -> int:
        """What is done after a step: how many times it acted."""
        return 0


class LowerRate(Remedy):
    """The learning rate divided by 10."""

    rate = 0.1


class Clip(Remedy):
    """QK-clip after every step."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.clip = QKClip(training.model, TAU, every=1, inputs=2, tokens=TOKENS, base=True)

    def after(self, step: int) -> int:
        """The heads that were rescaled; −1 once it has switched itself off."""
        heads = len(self.clip.step(step=step).heads)
        return heads if self.clip.reason is None else -1


class Logits(Remedy):
    """A penalty on logits above τ (``max-logit``)."""

    weight, kind, options = 1e-3, "max-logit", {"limit": TAU / 2}

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        penalty = ModelPenalty(training.model, self.kind, **self.options)
        self.penalty = lambda ids: self.weight * penalty(input_ids=ids[:1])


class Spectral(Logits):
    """A penalty on σ (``spectral``)."""

    weight, kind, options = 1e-2, "spectral", {}


class Skip(Remedy):
    """Steps whose gradient norm is above 3 times its median so far are left out."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.sizes: list[float] = []

    def skip(self, size: float) -> bool:
        """Whether this one is."""
        usual = statistics.median(self.sizes[-50:]) if len(self.sizes) >= 5 else math.inf
        self.sizes.append(size)
        return not size <= 3 * usual


REMEDIES: dict[str, type[Remedy]] = {
    "": Remedy, "learning rate ÷ 10": LowerRate, "QKClip": Clip, "max-logit penalty": Logits, "σ penalty": Spectral,
    "skip the batch": Skip,
}  # fmt: skip


def run(case: str, bad: bool, seed: int, remedy: str = "", watched: bool = True) -> list[dict[str, Any]]:
    """One training, a row per step."""
    training = CASES[case](seed, bad)
    about = {"case": case, "run": "blow-up" if bad else "healthy", "seed": seed, "remedy": remedy}
    try:
        help_ = REMEDIES[remedy](training)
    except ValueError as error:
        return [about | {"step": 0, "acted": str(error)[:200]}]
    monitor = Monitor(training.model, probe=training.held_out[:2], every=EVERY) if watched else None
    optimizer, rows = training.optimizer(), []
    for step, rate, ids in training.batches(seed):
        loss, size, skipped = advance(
            training, optimizer, rate * help_.rate, ids, None if step % 4 else help_.penalty, help_.skip
        )  # fmt: skip
        row = about | {"step": step, "rate": rate, "loss": loss, "grad_norm": size, "acted": help_.after(step) + skipped}
        if monitor is not None:
            record = monitor.step(step=step)
            row |= {f"backward_{layer}": gain for layer, gain in record.backward.items()}
            for reading in record.readings:
                found = {"max_logit": reading.max_logit, "entropy": reading.entropy, "sigma": reading.estimate}
                row |= {f"{name}_{reading.layer}": value for name, value in found.items()}
        if step % 2 == 0 or step == 1:
            with torch.no_grad():
                row["held_out"] = float(training.loss(training.held_out))
        rows.append(row)
    if monitor is not None:
        monitor.close()
    return rows


def record_all(seeds: int, *, remedies: bool = False) -> None:
    """Run what has not been run yet."""
    OUT.mkdir(parents=True, exist_ok=True)
    plan = itertools.product(range(seeds), CASES, (False, True), enumerate(REMEDIES if remedies else [""]))
    for seed, case, bad, (number, remedy) in plan:
        path = OUT / f"{case.replace(' ', '-')}-{'bad' if bad else 'good'}-{seed}-{number}.csv"
        if path.exists():
            continue
        start = time.process_time()
        rows = run(case, bad, seed, remedy, watched=not remedy)
        with path.with_suffix(".part").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        path.with_suffix(".part").rename(path)
        spent = time.process_time() - start
        print(f"{path.stem}: {remedy or 'no remedy'}, last loss {rows[-1].get('held_out')}, {spent:.1f} s", flush=True)
