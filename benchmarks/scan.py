"""All layers and all heads of GPT-2 (random weights): lipscope against the textbook loop, in one run.

    python benchmarks/scan.py [--inputs 10] [--textbook-inputs 2] [--n 98] [--layers 12] [--write docs/performance-log.md]

The textbook loop treats one input at a time, so it is timed on a few inputs per layer and its time per input is compared:
as it stops by itself, and run on until its error is below 1e-3. Errors are relative, against float64 at rtol 1e-10, on the
inputs that the textbook loop measured.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import torch

import lipscope
from lipscope.models.corpora import read_text
from lipscope.models.text import Chunker
from sections import Goal, write_goals, write_section
from textbook import forward, power_loop

ACCURACY, MOST_STEPS = 1e-3, 1000
# Goals: times faster than the loop, and most times the layers that all heads may take.
FASTER, HEADS = 30, 3


def within(exact: float, value: float) -> bool:
    return abs(value / exact - 1) <= ACCURACY


def judge(loop: float, heads: float, why: str) -> list[Goal]:
    """The goals, and whether this run met them."""
    return [
        Goal("all layers of GPT-2 (random weights) vs textbook loop", f"≥ {FASTER}×", f"{loop:.1f}×", loop >= FASTER, why),
        Goal("all heads of these layers vs the layers", f"≤ {HEADS}×", f"{heads:.2f}×", heads <= HEADS,
             f"the heads take {heads:.2f} times as long as their layers"),
    ]  # fmt: skip


def main() -> None:
    """Measure, print the table, and write it where asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=98)
    parser.add_argument("--inputs", type=int, default=10)
    parser.add_argument("--textbook-inputs", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rtol", type=float, default=1e-4)
    parser.add_argument("--write", type=Path, help="also write the table into this Markdown file, as a section of its own")
    options = parser.parse_args()

    handle = lipscope.load("gpt2-random")
    chunks = Chunker(read_text("python-docs"), handle.tokenizer).chunks([options.n], options.inputs)[options.n]
    start = time.perf_counter()
    recording = handle.record(handle.token_inputs(input_ids=torch.tensor(chunks)))
    recorded = time.perf_counter() - start
    layers = range(options.layers)
    # The estimate to its accuracy, whatever the width of its interval: what the textbook loop gives has no interval.
    solver = lipscope.GolubKahan(rtol=options.rtol, interval=None)

    def solve(scope: str) -> tuple[float, list[lipscope.SpectralNorm]]:
        begin = time.perf_counter()
        found = [recording[i].sigma(scope, solver=solver, certificate=False) for i in layers]
        return time.perf_counter() - begin, found

    attention_time, results = solve("attention")
    attention = [result.estimate for result in results]
    pairs = float(torch.stack([result.iterations for result in results]).double().mean())
    head_time, _ = solve("head")

    few = options.textbook_inputs
    loop_time, accurate_time, errors, loop_errors, steps, accurate_steps = 0.0, 0.0, [], [], [], []
    for i in layers:
        module = handle.layers[i].host
        layer = lipscope.Attention.from_fused(
            module.c_attn.weight.detach(), module.c_proj.weight.detach(), heads=12, transposed=True, mask="causal"
        )
        X = recording.hosts[i].tokens[:few]
        begin = time.perf_counter()
        values = [power_loop(partial(forward, layer, causal=True), x) for x in X]
        loop_time += time.perf_counter() - begin
        exact = lipscope.local_lipschitz(layer, X.double(), solver=lipscope.GolubKahan(rtol=1e-10)).estimate
        errors.append(float(((attention[i][:few] - exact) / exact).abs().max()))
        loop_errors.append(float(((torch.tensor([v for v, _ in values]) - exact) / exact).abs().max()))
        steps += [s for _, s in values]
        close = partial(within, float(exact[0]))
        begin = time.perf_counter()
        accurate_steps.append(power_loop(partial(forward, layer, causal=True), X[0], steps=MOST_STEPS, done=close)[1])
        accurate_time += time.perf_counter() - begin

    per_input = attention_time / options.inputs
    loop_per_input = loop_time / few
    heads = 12 * options.layers
    mean_steps = sum(steps) / len(steps)
    step, pair = loop_per_input / options.layers / mean_steps, per_input / options.layers / pairs
    why = (
        f"the loop takes {mean_steps:.1f} steps on average before its absolute tolerance stops it, with errors up to "
        f"{max(loop_errors):.1e}, and we take {pairs:.1f} pairs of products, with errors up to {max(errors):.1e}; one of "
        f"its steps takes {step / pair:.1f} times as long as one of our pairs. At equal accuracy we are "
        f"{accurate_time / per_input:.1f}× faster"
    )
    goals = judge(loop_per_input / per_input, head_time / attention_time, why)
    lines = [
        f"## Layers and heads of GPT-2 (random weights): {options.layers} layers, n = {options.n}, {options.inputs} inputs",
        "",
        "Written by `benchmarks/scan.py`. float32, times from one run on one machine "
        f"({torch.get_num_threads()} threads, torch {torch.__version__}); only the ratios travel. *Textbook loop* as above, "
        f"on {few} of the inputs of every layer ({mean_steps:.0f} steps on average). *Error*: worst relative "
        "error on these inputs against float64 at rtol 1e-10. Estimates without upper ends, as the loop gives none; the "
        "time of the layers includes reading off their projections, which happens once per model.",
        "",
        "| method | seconds per input | against | worst error |",
        "|---|---|---|---|",
        f"| textbook loop, {options.layers} layers | {loop_per_input:.3f} | | {max(loop_errors):.1e} |",
        f"| textbook loop until its error is below {ACCURACY:.0e} | {accurate_time:.3f} | | {ACCURACY:.0e} |",
        f"| lipscope, {options.layers} layers | {per_input:.3f} | {loop_per_input / per_input:.1f}× faster than the loop, "
        f"{accurate_time / per_input:.1f}× than the loop at that accuracy | {max(errors):.1e} |",
        f"| lipscope, {heads} heads | {head_time / options.inputs:.3f} | {head_time / attention_time:.2f}× the layers | |",
        "",
        f"One forward pass records all layers and inputs, in {recorded:.2f} s. To reach an error of {ACCURACY:.0e} the loop "
        f"takes {sum(accurate_steps) / len(accurate_steps):.0f} steps on average (at most {MOST_STEPS} were allowed; one "
        "input of every layer).",
        "",
        *[
            f"Goal: {goal.case}, {goal.goal}: **{'met' if goal.met else 'missed'}** ({goal.measured}): {goal.reason}."
            for goal in goals
        ],
    ]
    print("\n".join(lines))
    write_goals(__file__, goals)
    if options.write is not None:
        write_section(options.write, "benchmarks/scan.py", lines)


if __name__ == "__main__":
    main()
