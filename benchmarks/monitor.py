"""What watching σ costs a training: a step with the monitor's hooks against one without, looks and one measurement.

    python benchmarks/monitor.py [--write docs/performance-log.md] [--rounds 1.0]

Two copies of a small GPT-2 (the shape of gpt2-mini) train in turns on the same random tokens, one of them watched; which
goes first alternates. Their steps are compared in rounds of 20 pairs, median with median, as CPU time on one thread, so that
the ratio depends little on what else the machine does, and a step that was disturbed does not count. Everything is on that a
monitor has by default. The overhead at k = 100 is what the hooks add to a step, idle in nine of ten and at work in the
tenth, plus nine looks at the logits and one measurement in a hundred, over the plain step; every round measures all of them.
Target: at most 2 % in the median over rounds, whose quartiles exclude 3 %; where they lie on both sides of it the goal is
undecided. Eight minutes of CPU time.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lipscope.training import Monitor
from lipscope.training.monitor import LOOKS
from sections import Goal, write_goals, write_section

EVERY, TARGET, EXCLUDED = 100, 0.02, 0.03
SHAPE = {"n_layer": 4, "n_embd": 256, "n_head": 8, "n_positions": 512, "vocab_size": 4096}
# Rows, tokens, and rounds that are timed, of so many pairs of steps.
BATCHES, PAIRS = ((8, 128, 8), (16, 128, 4)), 20
# A step at which logits are looked at; before the next one hooks are idle, and before this one at work.
LOOK = EVERY // LOOKS


def cpu_seconds(function: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


class Training:
    """One model and its optimiser."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.monitor: Monitor | None = None
        self.number = 1

    def step(self, ids: torch.Tensor) -> None:
        """Forward, backward, update; the monitor collects the backward bound."""
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.step(step=self.number)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def compare(rows: int, n: int, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Quartiles over the rounds: a plain step in seconds; hooks, look, measurement and overhead as shares of it."""
    torch.manual_seed(0)
    plain = Training(GPT2LMHeadModel(GPT2Config(**SHAPE, bos_token_id=0, eos_token_id=0)))
    watched = Training(copy.deepcopy(plain.model))
    set_up = cpu_seconds(lambda: setattr(watched, "monitor", Monitor(watched.model, every=EVERY)))
    monitor, generator = watched.monitor, torch.Generator().manual_seed(0)
    assert monitor is not None

    def pair(turn: int) -> tuple[float, float]:
        ids = torch.randint(SHAPE["vocab_size"], (rows, n), generator=generator)
        order = (plain, watched) if turn % 2 else (watched, plain)
        spent = {training: cpu_seconds(lambda training=training: training.step(ids)) for training in order}
        return spent[plain], spent[watched]

    def added(number: int, pairs: int) -> tuple[float, float]:
        watched.number = number
        pair(0)  # what it does at the end of one step decides about the next
        a, b = map(statistics.median, zip(*map(pair, range(pairs)), strict=True))
        return a, b / a - 1

    for turn in range(4):  # the first steps warm up, and the first step of the watched model measures
        pair(turn)
    found: dict[str, list[float]] = {"step": [], "hooks": [], "look": [], "measurement": [], "overhead": []}
    for _ in range(rounds):
        (step, idle), (_, at_work) = added(1, PAIRS), added(LOOK - 1, PAIRS // 2)
        hooks = idle + (at_work - idle) / LOOK
        look = statistics.median(cpu_seconds(lambda: monitor.step(step=LOOK)) for _ in range(5)) / step
        measurement = statistics.median(cpu_seconds(monitor.measure) for _ in range(3)) / step
        overhead = hooks + ((LOOKS - 1) * look + measurement) / EVERY
        for name, value in zip(found, (step, hooks, look, measurement, overhead), strict=True):
            found[name].append(value)
    assert monitor.reason is None, monitor.reason
    shares = {name: quartiles(values) for name, values in found.items()}
    return shares | {"set_up": (set_up / shares["step"][1],) * 3}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="Markdown file whose section to replace.")
    parser.add_argument("--rounds", type=float, default=1.0, help="this times as many rounds, to try the script")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"Written by `benchmarks/monitor.py`. CPU time on one thread, torch {torch.__version__}; only the ratios travel.",
        "",
        f"## Watching σ while training, every k = {EVERY} steps",
        "",
        "GPT-2 with 4 layers, d = 256, 8 heads; a watched and an unwatched copy train in turns. Medians over rounds of "
        f"{PAIRS} pairs of steps, with the quartiles of the rounds. *Hooks*: what reading the backward bound adds to a "
        "step, in the mean. *Look*: the logits of 2 inputs of 64 tokens, for the alarm. *Measurement*: that and σ. "
        f"*Set-up*: once, when the monitor is made. *Overhead*: hooks, plus {LOOKS - 1} looks and a measurement every "
        f"{EVERY} steps; the target is at most {TARGET:.0%}, by quartiles that exclude {EXCLUDED:.0%}. Load of the machine "
        f"when it began: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
        "",
        "| batch × tokens | rounds | plain step, s | hooks | look, steps | measurement, steps | set-up, steps | overhead |",
        "|---|---|---|---|---|---|---|---|",
    ]
    goals = []
    for rows, n, rounds in BATCHES:
        rounds = max(2, round(rounds * arguments.rounds))
        found = compare(rows, n, rounds)
        step, look, measurement, set_up = (found[name][1] for name in ("step", "look", "measurement", "set_up"))
        hooks, overhead = (
            f"{middle:+.2%} ({low:+.2%} … {high:+.2%})" for low, middle, high in (found["hooks"], found["overhead"])
        )
        low, middle, high = found["overhead"]
        case = f"training watched every {EVERY} steps, GPT-2 with 4 layers, batch {rows} × {n}"
        why = f"hooks add {hooks}, a look takes {look:.3f} and a measurement {measurement:.2f} steps"
        decided = (low < EXCLUDED) == (high < EXCLUDED)
        goals.append(Goal(case, f"≤ {TARGET:.0%} of step time", overhead, middle <= TARGET, why, decided=decided))
        costs = f"{hooks} | {look:.3f} | {measurement:.2f} | {set_up:.2f} | {overhead}"
        lines.append(f"| {rows} × {n} | {rounds} | {step:.3f} | {costs} |")
    print("\n".join(lines))
    write_goals(__file__, goals)
    if arguments.write:
        write_section(arguments.write, "benchmarks/monitor.py", lines)


if __name__ == "__main__":
    main()
