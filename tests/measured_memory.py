"""A program of its own: peak memory of σ of one layer above what the process held before, and what was planned.

    echo '[{"layer": {"heads": 8, "mask": "causal"}, "width": 64, "tokens": 512}]' | python measured_memory.py

Further keys of a case: ``inputs``, the ``solver``'s options, the ``tiling``, ``certificate``, and the ``share`` of its
planned memory that it gets; a case with a ``scope`` is a scan of a small model. Prints a list of [peak, plan] in bytes.

Every case has a process for itself, forked from this one: memory that other work has left to the C library would hide what
it takes. This program is none of pytest's, whose threads must not be forked.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import lipscope
from lipscope.attention.tiled import Tiling, using_tiling
from lipscope.measure.memory import plan_memory
from lipscope.spectral.solvers import triplets

STEPS = 19


def resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {name} here")


def measure(case: dict[str, Any]) -> list[int]:
    options, d, n, inputs, share = case["layer"], case["width"], case["tokens"], case.get("inputs", 1), case.get("share")
    shared = options.get("kv_heads", options["heads"]) / options["heads"]
    torch.manual_seed(0)
    weights = [torch.randn(int(d * (shared if role in "kv" else 1)), d) / d**0.5 for role in "qkvo"]
    solver = lipscope.GolubKahan(rtol=1e-30, max_steps=STEPS, **case.get("solver", {}))
    # Kernels take memory once.
    small, certificate = lipscope.Attention(*weights[:1] * 4, heads=1), case.get("certificate", False)
    lipscope.local_lipschitz(small, torch.randn(1, 16, d), certificate=certificate, solver=solver)
    layer = lipscope.Attention(*weights, **options)
    plan = plan_memory(layer, n, inputs=inputs, triplets=triplets(solver))
    if share is not None:
        plan = plan_memory(layer, n, inputs=inputs, triplets=triplets(solver), limit=int(share * plan.total))
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts again from here
    before = resident("VmRSS")
    memory = None if share is None else plan.total
    lipscope.local_lipschitz(layer, torch.randn(inputs, n, d), certificate=certificate, solver=solver, memory=memory)
    return [resident("VmHWM") - before, plan.total]


def measure_scan(case: dict[str, Any]) -> list[int]:
    """The same for a scan of one layer of a small GPT-2, as a sweep of the same plan would announce it."""
    from transformers import GPT2Config, GPT2Model

    from lipscope.models.load import ByteTokenizer
    from lipscope.models.memory import plan_layers

    torch.manual_seed(0)
    config = GPT2Config(n_embd=128, n_layer=2, n_head=4, n_positions=1024, vocab_size=256, bos_token_id=0, eos_token_id=0)
    handle = lipscope.load(GPT2Model(config).eval(), ByteTokenizer())
    solver = lipscope.GolubKahan(rtol=1e-30, max_steps=STEPS)
    text = ["".join(chr(97 + (7 * i * i + i // 5) % 26) for i in range(6000))]
    options = {"layers": [0], "scope": case["scope"], "solver": solver}
    lipscope.scan(handle, text, lengths=[16], inputs=1, **options)
    plan = plan_layers(handle, case["tokens"], [0], inputs=case["inputs"], scope=case["scope"])
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident("VmRSS")
    lipscope.scan(handle, text, lengths=[case["tokens"]], inputs=case["inputs"], **options)
    return [resident("VmHWM") - before, plan.total]


def in_a_process(case: dict[str, Any]) -> list[int]:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        with using_tiling(Tiling(**case.get("tiling", {}))):
            found = measure_scan(case) if "scope" in case else measure(case)
            os.write(writer, json.dumps(found).encode())
        os._exit(0)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit(f"the process that measured {case} ended with status {status}")
    with os.fdopen(reader) as pipe:
        found: list[int] = json.load(pipe)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases = json.load(sys.stdin)
    if any("scope" in case for case in cases):
        # Imported once, not in every process.
        for module in ("transformers.models.gpt2.modeling_gpt2", "lipscope.models.memory", "lipscope.runs.scan"):
            import_module(module)
    print(json.dumps([in_a_process(case) for case in cases]))
