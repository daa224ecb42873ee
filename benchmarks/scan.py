"""All layers and all heads of GPT-2 (random weights): lipscope against the textbook loop, in one run.

    python benchmarks/scan.py [--inputs 10] [--textbook-inputs 2] [--n 98]

The textbook loop treats one input at a time, so it is timed on a few inputs per layer and its time per input is compared.
Errors are relative, against float64 at rtol 1e-10, on the inputs that the textbook loop measured.
"""

from __future__ import annotations

import argparse
import platform
import time

import torch

import lipscope
from lipscope.models.corpora import read_text
from lipscope.models.text import Chunker
from textbook import forward, power_loop


def main() -> None:
    """Measure, and print one line per method."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--n", type=int, default=98)
    parser.add_argument("--inputs", type=int, default=10)
    parser.add_argument("--textbook-inputs", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rtol", type=float, default=1e-4)
    options = parser.parse_args()

    handle = lipscope.load("gpt2-random")
    chunks = Chunker(read_text("python-docs"), handle.tokenizer).chunks([options.n], options.inputs)[options.n]
    start = time.perf_counter()
    recording = handle.record(handle.token_inputs(input_ids=torch.tensor(chunks)))
    recorded = time.perf_counter() - start
    layers = range(options.layers)
    # The estimate to its accuracy, whatever the width of its interval: what the textbook loop gives has no interval.
    solver = lipscope.GolubKahan(rtol=options.rtol, interval=None)

    def solve(scope: str) -> tuple[float, list[torch.Tensor]]:
        begin = time.perf_counter()
        estimates = [handle.solve(i, recording, scope, solver=solver).estimate for i in layers]
        return time.perf_counter() - begin, estimates

    attention_time, attention = solve("attention")
    head_time, _ = solve("head")

    few = options.textbook_inputs
    loop_time, errors, loop_errors, steps = 0.0, [], [], []
    for i in layers:
        module = handle.layers[i].host
        layer = lipscope.Attention.from_fused(
            module.c_attn.weight.detach(), module.c_proj.weight.detach(), heads=12, transposed=True, mask="causal"
        )
        X = recording.hosts[i].tokens[:few]
        begin = time.perf_counter()
        values = [power_loop(lambda x, layer=layer: forward(layer, x, True), x) for x in X]
        loop_time += time.perf_counter() - begin
        exact = lipscope.local_lipschitz(layer, X.double(), solver=lipscope.GolubKahan(rtol=1e-10)).estimate
        errors.append(float(((attention[i][:few] - exact) / exact).abs().max()))
        loop_errors.append(float(((torch.tensor([v for v, _ in values]) - exact) / exact).abs().max()))
        steps += [s for _, s in values]

    per_input = attention_time / options.inputs
    loop_per_input = loop_time / few
    threads, version = torch.get_num_threads(), torch.__version__
    print(f"GPT-2, random weights, {options.layers} layers, n = {options.n}, {options.inputs} inputs, float32")
    print(f"{platform.processor() or platform.machine()}, {threads} threads, torch {version}")
    mean_steps = sum(steps) / len(steps)
    for name, seconds, error, remark in (
        ("textbook loop", loop_per_input, max(loop_errors), f"{mean_steps:.0f} steps on average"),
        ("lipscope, layers", per_input, max(errors), f"{loop_per_input / per_input:.1f}× faster"),
        ("lipscope, all heads", head_time / options.inputs, None, f"{head_time / attention_time:.2f}× the layers"),
    ):
        worst = "" if error is None else f"{error:.1e}"
        print(f"{name:20} {seconds:8.3f} s per input   worst error {worst:>8}   {remark}")
    print(f"recording all layers took {recorded:.2f} s")


if __name__ == "__main__":
    main()
