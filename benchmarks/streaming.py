"""A model of 7 billion parameters, streamed: peak memory and time of a scan of all layers, and what larger ones would take.

    python benchmarks/streaming.py DIRECTORY [--layers 32] [--write docs/performance.md]

DIRECTORY gets a Llama-shaped checkpoint in bfloat16 with random weights, 13.5 GB for all 32 layers, which is removed at the
end. The scan runs in a process of its own, whose peak resident size is the memory. Time is compared with reading the
weights once, as fast as the disk gives them, and doing the products that were counted at the speed of a plain product of
matrices of the layer's size. That speed is taken between the layers of the same run, the median of all, so that whatever
else the machine does slows both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import torch

from lipscope.rounding import duration, show_bytes
from lipscope.runs.estimate import ways
from sections import Goal, machine, timed, write_goals, write_section

GIB = 1 << 30
N = 128
LLAMA = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
LAYERS = 32
# Llama and Code Llama: width, inner width, heads, key heads, layers, words.
SHAPES = {
    "7B": (4096, 11008, 32, 32, 32, 32000),
    "13B": (5120, 13824, 40, 40, 40, 32000),
    "34B": (8192, 22016, 64, 8, 48, 32000),
    "70B": (8192, 28672, 64, 8, 80, 32000),
    "405B": (16384, 53248, 128, 8, 126, 128256),
}
MEMORY_GOAL, TIME_GOAL = 3 * GIB, 3.0
TEXT = ["the quick brown fox jumps over the lazy dog and runs away from it. " * 20]


def make_checkpoint(directory: Path, layers: int) -> int:
    """Write the checkpoint, one file per layer; returns its bytes."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    config = LlamaConfig(**LLAMA, num_hidden_layers=layers, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(directory)
    d, m = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    generator = torch.Generator()

    def drawn(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(shape, generator=generator)).to(torch.bfloat16)

    index: dict[str, str] = {}
    ones = torch.ones(d, dtype=torch.bfloat16)
    for layer in range(-1, layers):
        generator.manual_seed(layer + 1)
        if layer < 0:
            tensors = {"model.embed_tokens.weight": drawn(LLAMA["vocab_size"], d), "model.norm.weight": ones}
        else:
            shapes = {f"self_attn.{name}_proj": (d, d) for name in "qkvo"}
            shapes |= {"mlp.gate_proj": (m, d), "mlp.up_proj": (m, d), "mlp.down_proj": (d, m)}
            tensors = {f"model.layers.{layer}.{name}.weight": drawn(*shape) for name, shape in shapes.items()}
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"model.layers.{layer}.{norm}.weight"] = ones.clone()
        file = f"model-{layer + 1:05}.safetensors"
        save_file(tensors, directory / "unfinished")
        (directory / "unfinished").replace(directory / file)
        index |= dict.fromkeys(tensors, file)
        print(f"made {file}", flush=True)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}), encoding="utf-8")
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def scan(directory: Path) -> None:
    """The process that is measured: prints what it took as JSON."""
    import lipscope
    from lipscope.models.load import ByteTokenizer

    start = time.perf_counter()
    model = lipscope.load(directory, ByteTokenizer(), stream=True)
    loaded = time.perf_counter() - start

    rates: list[float] = []
    aside = 0.0

    def told_of(done: int, total: int, what: str) -> None:
        nonlocal aside
        here = time.perf_counter()
        rates.append(product_rate())
        aside += time.perf_counter() - here
        print(f"{done} of {total}: {what}, {here - start:.0f} s, {rates[-1] / 1e9:.0f} GFLOP/s", file=sys.stderr, flush=True)

    result = lipscope.scan(model, TEXT, lengths=[N], inputs=1, progress=told_of)
    seconds = time.perf_counter() - start - aside
    peak = next(
        int(line.split()[1]) << 10
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        if line.startswith("VmHWM")
    )
    rows = [dict(row) for row in result.rows]
    told = {"seconds": seconds, "loaded": loaded, "peak": peak, "pairs": sum(row["iterations"] for row in rows)}
    told |= {"cpu": time.process_time(), "rate": median(rates), "fastest": max(rates)}
    print(json.dumps(told | {"rows": len(rows), "sigma": [rows[0]["lower"], rows[0]["upper"]]}))


def reading_seconds(directory: Path) -> float:
    """Every byte once, in large pieces, as the disk (or what the system keeps of it in memory) gives them."""
    buffer = bytearray(1 << 26)

    def read() -> None:
        for file in sorted(directory.glob("*.safetensors")):
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass

    return timed(read, 1)[0]


def product_rate() -> float:
    """Floating-point operations per second of (n × d)·(d × d) in float32: what a product through a layer is made of."""
    d = LLAMA["hidden_size"]
    a, b = torch.randn(N, d), torch.randn(d, d)
    a @ b
    return 2 * N * d * d * 5 / timed(lambda: [a @ b for _ in range(5)])[0]


def products(layers: int, pairs: int) -> float:
    """Operations of one forward pass and of so many pairs (J·u, Jᵀ·g) of scope attention."""
    d, m = LLAMA["hidden_size"], LLAMA["intermediate_size"]
    attention = 4 * d * d
    forward = layers * (2 * N * (attention + 3 * d * m) + 4 * N * N * d)
    return forward + pairs * (4 * N * attention + 16 * N * N * d)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        scan(options.directory)
        return
    place = options.directory / "lipscope-streaming"
    place.mkdir(parents=True)
    try:
        size = make_checkpoint(place, options.layers)
        print(f"{options.layers} layers, {show_bytes(size)} on disk", flush=True)
        command = [sys.executable, __file__, str(place), "--child"]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
        told = json.loads(ended.stdout.splitlines()[-1])
        reading, rate = reading_seconds(place), told["rate"]
    finally:
        shutil.rmtree(place)
    work = products(options.layers, told["pairs"])
    ratio, strict = (told["seconds"] / (reading + work / each) for each in (rate, told["fastest"]))
    measured = (
        f"**Measured here:** {told['rows']} layers of the 7B shape at n = {N}, {show_bytes(size)} on disk, "
        f"{told['pairs']} pairs of products: peak {show_bytes(told['peak'])}, {duration(told['seconds'])} "
        f"({duration(told['cpu'])} of processor time), of which loading {duration(told['loaded'])}. Reading the weights "
        f"once took {duration(reading)}, the products would take {duration(work / rate)} at {rate / 1e9:.0f} GFLOP/s, the "
        f"median between the layers of this run: {ratio:.2f} times both together ({strict:.2f} times at "
        f"{told['fastest'] / 1e9:.0f} GFLOP/s, the fastest between two layers)."
    )
    reason = "" if options.layers == LAYERS else f"{options.layers} of {LAYERS} layers were made"
    rest = reason or "the rest is finding the projections, norms of the weights for set bounds, and reading again"
    peak = show_bytes(told["peak"])
    what = "streamed 7B" if options.layers == LAYERS else f"{options.layers} of the {LAYERS} layers of a streamed 7B"
    goals = [
        Goal(f"{what}, peak memory", f"≤ {show_bytes(MEMORY_GOAL)}", peak, told["peak"] <= MEMORY_GOAL, reason),
        Goal(
            f"{what}, time over reading and products",
            f"≤ {TIME_GOAL:g}",
            f"{ratio:.2f}",
            ratio <= TIME_GOAL,
            rest,
            decided=(ratio <= TIME_GOAL) == (strict <= TIME_GOAL),
        ),
    ]
    lines = [
        "## How large a model can I afford?",
        "",
        f"Written by `benchmarks/streaming.py` ({machine()}). Weights are "
        "[streamed](how-to/scan-your-model.md#models-that-do-not-fit-into-memory) from the disk, one layer at a time.",
        "",
        measured,
        "",
        *(f"- {goal.case}: {goal.measured}, asked {goal.goal}: {goal.verdict}" for goal in goals),
        "",
        *predicted(rate, options.layers, told),
        "",
    ]
    print("\n".join(lines), flush=True)
    if options.write is not None:
        write_section(options.write, "benchmarks/streaming.py", lines)
    write_goals(__file__, goals)


def predicted(rate: float, layers: int, told: dict[str, float]) -> list[str]:
    """Memory and time that ``lipscope plan`` gives for Llama shapes, beside what was measured of one of them."""
    from accelerate import init_empty_weights
    from transformers import LlamaConfig, LlamaModel

    shapes = SHAPES if layers == LAYERS else {f"7B, {layers} layers": (*SHAPES["7B"][:4], layers, 32000)} | SHAPES
    lines = [
        f"What `lipscope plan` says at n = {N}, one input, with products at {rate / 1e9:.0f} GFLOP/s and a disk of 1 GiB/s:",
        "",
    ]
    lines += ["| shape | on disk | in memory | streamed | time streamed | measured |", "|---|---|---|---|---|---|"]
    for name, (width, inner, heads, kv, count, words) in shapes.items():
        config = LlamaConfig(
            hidden_size=width, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv,
            num_hidden_layers=count, vocab_size=words,
        )  # fmt: skip
        with init_empty_weights(include_buffers=False):
            model = LlamaModel(config)
        stored = 2 * sum(p.numel() for p in model.parameters())
        planned = ways(model, stored, N, 1, rate)
        (whole, _), (streamed, seconds) = planned["in memory"], planned["streamed"]
        seen = (
            f"{show_bytes(int(told['peak']))}, {duration(told['seconds'])}"
            if count == layers and width == SHAPES["7B"][0]
            else ""
        )
        cells = [name, show_bytes(stored), show_bytes(whole), show_bytes(streamed), duration(seconds), seen]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
