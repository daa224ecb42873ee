"""What watching σ costs a training: a step with the monitor's hooks against one without, and one measurement.

    python benchmarks/monitor.py [--write docs/performance-log.md]

Two copies of a small GPT-2 (the shape of gpt2-mini) train in turns on the same random tokens, one of them watched. Their
steps are compared in rounds of ten pairs, median with median, as CPU time on one thread, so that the ratio depends little on
what else the machine does, and a step that was disturbed does not count. Everything is on that a monitor has by default.
The overhead at k = 100 is what the hooks add to every step plus a hundredth of a measurement, over the plain step. Target:
at most 2 %, in a measurement whose quartiles exclude 3 %; where they lie on both sides of it the goal is undecided.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lipscope.training import Monitor
from sections import Goal, write_goals, write_section

EVERY, MEASUREMENTS, TARGET, EXCLUDED = 100, 4, 0.02, 0.03
SHAPE = {"n_layer": 4, "n_embd": 256, "n_head": 8, "n_positions": 512, "vocab_size": 4096}
# Rows, tokens, and rounds that are timed, of so many pairs of steps: less than five minutes in all.
BATCHES, PAIRS = ((8, 128, 16), (16, 128, 6)), 10


def cpu_seconds(function) -> float:
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

    def step(self, ids: torch.Tensor) -> None:
        """Forward, backward, update; the monitor collects the backward bound."""
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.step(step=1)


def compare(rows: int, n: int, rounds: int) -> dict[str, float]:
    """Medians in seconds: plain step, added by hooks, one measurement, set-up; and the overhead as a ratio."""
    torch.manual_seed(0)
    plain = Training(GPT2LMHeadModel(GPT2Config(**SHAPE, bos_token_id=0, eos_token_id=0)))
    watched = Training(copy.deepcopy(plain.model))
    begin = time.process_time()
    watched.monitor = Monitor(watched.model, every=EVERY)
    set_up = time.process_time() - begin
    generator = torch.Generator().manual_seed(0)
    pairs: list[tuple[float, float]] = []
    for turn in range(rounds * PAIRS + 3):
        ids = torch.randint(SHAPE["vocab_size"], (rows, n), generator=generator)
        order = (plain, watched) if turn % 2 else (watched, plain)
        spent = {training: cpu_seconds(lambda training=training, ids=ids: training.step(ids)) for training in order}
        if turn >= 3:  # the first steps warm up, and the first step of the watched model measures
            pairs.append((spent[plain], spent[watched]))
    measurements = []
    for _ in range(MEASUREMENTS):
        watched.step(torch.randint(SHAPE["vocab_size"], (rows, n), generator=generator))
        measurements.append(cpu_seconds(watched.monitor.measure))
    assert watched.monitor.reason is None, watched.monitor.reason
    step = statistics.median(a for a, _ in pairs)
    sides = [zip(*pairs[i : i + PAIRS], strict=True) for i in range(0, len(pairs), PAIRS)]
    low, hooks, high = statistics.quantiles((b / a - 1 for a, b in (map(statistics.median, side) for side in sides)), n=4)
    measurement = statistics.median(measurements)
    return {
        "step": step, "hooks": hooks, "low": low, "high": high, "measurement": measurement, "set_up": set_up,
        "overhead": hooks + measurement / EVERY / step,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="Markdown file whose section to replace.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"Written by `benchmarks/monitor.py`. CPU time on one thread, torch {torch.__version__}; only the ratios travel.",
        "",
        f"## Watching σ while training, every k = {EVERY} steps",
        "",
        "GPT-2 with 4 layers, d = 256, 8 heads; a watched and an unwatched copy train in turns. *Hooks*: what reading the "
        f"backward bound at every step adds, median and quartiles over rounds of {PAIRS} pairs of steps. "
        "*Measurement*: σ of every layer, logits, entropy and sink mass on 2 inputs of 64 tokens, in plain steps. "
        "*Set-up*: once, when the monitor is made. "
        f"*Overhead*: hooks plus a measurement every {EVERY} steps; the target is at most {TARGET:.0%}, by quartiles "
        f"that exclude {EXCLUDED:.0%}. Load of the machine when it began: "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.",
        "",
        "| batch × tokens | plain step, s | hooks | measurement, steps | set-up, steps | overhead |",
        "|---|---|---|---|---|---|",
    ]
    goals = []
    for rows, n, rounds in BATCHES:
        found = compare(rows, n, rounds)
        case = f"training watched every {EVERY} steps, GPT-2 with 4 layers, batch {rows} × {n}"
        hooks = f"{found['hooks']:+.2%} ({found['low']:+.1%} … {found['high']:+.1%})"
        why = f"hooks add {hooks}, a measurement takes {found['measurement'] / found['step']:.2f} steps"
        overhead = found["overhead"]
        share = overhead - found["hooks"]
        decided = (found["low"] + share < EXCLUDED) == (found["high"] + share < EXCLUDED)
        measured = f"{overhead:.2%} (quartiles {found['low'] + share:+.1%} … {found['high'] + share:+.1%})"
        goals.append(Goal(case, f"≤ {TARGET:.0%} of step time", measured, overhead <= TARGET, why, decided=decided))
        lines.append(
            f"| {rows} × {n} | {found['step']:.3f} | {hooks} | {found['measurement'] / found['step']:.2f} | "
            f"{found['set_up'] / found['step']:.2f} | {found['overhead']:.2%} |"
        )
    print("\n".join(lines))
    write_goals(__file__, goals)
    if arguments.write:
        write_section(arguments.write, "benchmarks/monitor.py", lines)


if __name__ == "__main__":
    main()
