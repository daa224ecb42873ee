"""Run the trainings that blow up and their healthy twins, and write every signal of every step to a table.

Loss, gradient norm and the backward bound are read at every step; σ, the largest logit and the entropy of every layer by the
monitor every 5 steps, on two held-out windows. The held-out loss of every second step says when a training has blown up.
With remedies every training runs again with each of them, from its first step on or from a later one. Tables go to
``build/blowups/``; what is there already is kept, so that an interrupted run goes on. ``tables.py`` runs this, and packs
them into ``rows.csv``.
"""

from __future__ import annotations

import csv
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trainings import CASES, TOKENS, Training, advance
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from lipscope.training import ModelPenalty, Monitor, QKClip

EVERY, LAYERS = 5, 3
OUT = Path(__file__).parents[2] / "build" / "blowups"
PER_LAYER = ("max_logit", "entropy", "sigma", "backward")
COLUMNS = ("case", "run", "seed", "remedy", "first", "step", "rate", "loss", "held_out", "grad_norm", "acted",
           *(f"{name}_{layer}" for name in PER_LAYER for layer in range(LAYERS)))  # fmt: skip
# Just above the largest logit of a healthy twin.
TAU = 50.0


class Remedy:
    """Something that is done about a blow-up."""

    kind = "llama"  # the model that is trained
    rate = 1.0  # multiplies the learning rate
    penalty: Callable[[Tensor], Tensor] | None = None  # added to the loss every 4th step

    on = False

    def __init__(self, training: Training) -> None:
        self.training = training

    def begin(self) -> None:
        """What is done once, before the first step with it."""
        self.on = True

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
        return self.on and not size <= 3 * usual


class SoftCap(Remedy):
    """Scores s become τ·tanh(s/τ)."""

    def begin(self) -> None:
        """The weights stay; attention is computed in another way."""
        super().begin()
        AttentionInterface.register("soft-cap", capped_attention)
        AttentionMaskInterface.register("soft-cap", eager_mask)
        self.training.model.set_attn_implementation("soft-cap")  # type: ignore[operator]


def capped_attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """As transformers computes it in its eager form, one key head per query head, with soft-capped scores."""
    scores = TAU * torch.tanh(q @ k.mT * scaling / TAU)
    weights = (scores if mask is None else scores + mask).softmax(-1, dtype=torch.float32).to(q)
    return (weights @ v).transpose(1, 2).contiguous(), weights


class QKNorm(Remedy):
    """The same training of a model that has had QK-norm from its first day."""

    kind = "qwen3"


REMEDIES: dict[str, type[Remedy]] = {
    "": Remedy, "learning rate ÷ 10": LowerRate, "QKClip": Clip, "max-logit penalty": Logits, "σ penalty": Spectral,
    "skip the batch": Skip, "soft-cap": SoftCap, "QK-norm": QKNorm,
}  # fmt: skip
# What can be done in the middle of a run.
LATER = ("learning rate ÷ 10", "QKClip", "skip the batch", "soft-cap")


def run(case: str, bad: bool, seed: int, remedy: str = "", first: int = 1, *, watched: bool = True) -> list[dict[str, Any]]:
    """One training, a row per step; with the remedy from step ``first`` on."""
    training = CASES[case](seed, bad, REMEDIES[remedy].kind)
    about = {"case": case, "run": "blow-up" if bad else "healthy", "seed": seed, "remedy": remedy, "first": first}
    try:
        help_ = REMEDIES[remedy](training)
    except ValueError as error:
        return [about | {"step": 0, "acted": str(error)[:200]}]
    monitor = Monitor(training.model, probe=training.held_out[:2], every=EVERY) if watched else None
    optimizer, rows = training.optimizer(), []
    idle = Remedy(training)
    for step, rate, ids in training.batches(seed):
        if step == first:
            help_.begin()
        now = help_ if step >= first else idle
        penalty = None if step % 4 else now.penalty
        loss, size, skipped = advance(training, optimizer, rate * now.rate, ids, penalty, help_.skip)
        row = about | {"step": step, "rate": rate, "loss": loss, "grad_norm": size, "acted": now.after(step) + skipped}
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


def record_all(seeds: int, *, remedies: bool = False, alarms: Mapping[tuple[str, int], int] | None = None) -> None:
    """Run what has not been run yet; with ``alarms``, what can be done after that step of a blow-up (case, seed)."""
    OUT.mkdir(parents=True, exist_ok=True)
    plan = itertools.product(range(seeds), CASES, (False, True), enumerate(REMEDIES if remedies or alarms else [""]))
    for seed, case, bad, (number, remedy) in plan:
        first = 1 if alarms is None else alarms.get((case, seed), 0) + 1
        if alarms is not None and (not bad or remedy not in LATER or (case, seed) not in alarms):
            continue
        later = "" if alarms is None else "-later"
        path = OUT / f"{case.replace(' ', '-')}-{'bad' if bad else 'good'}-{seed}-{number}{later}.csv"
        if path.exists():
            continue
        start = time.process_time()
        rows = run(case, bad, seed, remedy, first, watched=not remedy)
        with path.with_suffix(".part").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
        path.with_suffix(".part").rename(path)
        spent = time.process_time() - start
        print(f"{path.stem}: {remedy or 'no remedy'}, last loss {rows[-1].get('held_out')}, {spent:.1f} s", flush=True)
