"""What a run will take: work by a formula, time by measuring a sample of its own tasks, memory by ``models.memory``.

Work is that of ``tasks.task_work``. Memory of one worker: Python and torch, the weights of the models it keeps, and what σ
of a scope takes beside them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lipscope.attention.masks import as_mask
from lipscope.attention.scores import ScoreRule
from lipscope.attention.tiled import current_tiling
from lipscope.measure.memory import MemoryPlan, Shape, Strategy, solve_plan
from lipscope.models.capture import model_dtype
from lipscope.models.memory import RECORDED, plan_layers
from lipscope.models.streaming import blocks_of
from lipscope.runs.run import grouped
from lipscope.runs.tasks import PAIRS, Job, Task, handed_out
from lipscope.runs.work import KEEP_BYTES, model_of, run_job, weight_bytes

BASE_BYTES = 400 << 20
# A core's rate before anything was measured, only used to choose the sample.
NOMINAL_RATE = 2e10
# Copies of the weights of one attention that finding, measuring and bounding it hold at the peak, its own among them: q, k
# and v as they were found, and factors of all of them in float64. Norms of weights for set bounds take so many times d³
# operations. Both are fitted to one layer of a 7B model.
_COPIES, _NORMS = 9, 16
# How often the weights of a streamed model are read before the first pass, and bytes a second that a disk is taken to give.
LOAD_READS, READ_RATE = 4, 1 << 30


def ways(skeleton: nn.Module, stored: int, n: int, inputs: int, rate: float) -> dict[str, tuple[int, float]]:
    """Peak bytes and seconds of a scan (scope attention, one length) with the model in memory, and with it streamed.

    The parameters of the skeleton need no storage; ``stored`` are their bytes on disk, ``rate`` is that of products.
    """
    config: Any = skeleton.config
    config = (
        config.get_text_config() if hasattr(config, "get_text_config") and not hasattr(config, "hidden_size") else config
    )
    if not isinstance(getattr(config, "hidden_size", None), int):
        raise ValueError(
            f"no plan can be made of {type(skeleton).__name__}, whose configuration gives no one hidden_size: "
            "`lipscope describe` loads the model and measures a layer"
        )
    # Without attention the mixers are measured: of no more weights than their blocks have.
    dtype, width, heads = model_dtype(skeleton), int(config.hidden_size), int(getattr(config, "num_attention_heads", 1))
    blocks = list(blocks_of(skeleton))
    inside = {part for block in blocks for part in block.modules()}
    mixers = [part for block in blocks for part in block.modules() if "attention" in type(part).__name__.lower()]
    attention = max(sum(p.numel() for p in part.parameters()) for part in mixers or blocks)
    kv, key = getattr(config, "num_key_value_heads", None) or heads, getattr(config, "head_dim", None) or width // heads
    shape = Shape(width, width, heads, kv, key, key, dtype, lambda n, inputs: ScoreRule(mask=as_mask("causal")))
    measuring = _COPIES * attention * dtype.itemsize + solve_plan(shape, n, Strategy(inputs, current_tiling())).total
    tokens = RECORDED * inputs * n * width * dtype.itemsize
    whole = sum(p.numel() for p in skeleton.parameters()) * dtype.itemsize
    alone = [p.numel() for part in skeleton.modules() if part not in inside for p in part.parameters(recurse=False)]
    unit = max(*alone, *(sum(p.numel() for p in block.parameters()) for block in blocks)) * dtype.itemsize
    pair = 4.0 * n * attention + 16.0 * n * n * width
    finding = 2.0 * (width + 1) * attention + _NORMS * float(width) ** 3
    work = len(blocks) * (inputs * PAIRS * pair + finding) + 2.0 * inputs * n * whole / dtype.itemsize
    return {
        "in memory": (BASE_BYTES + stored + whole + len(blocks) * tokens + measuring, work / rate + stored / READ_RATE),
        "streamed": (
            BASE_BYTES + max(unit * 3 // 2, measuring) + 2 * tokens,
            work / rate + (LOAD_READS + 1) * stored / READ_RATE,
        ),
    }


def product_rate(device: torch.device | None = None, n: int = 128, width: int = 1024) -> float:
    """Floating-point operations per second of (n × d)·(d × d) in float32 on a device, the best of a few."""
    a, b, best = torch.ones(n, width, device=device), torch.ones(width, width, device=device), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        float((a @ b)[0, 0])  # a GPU has ended when a number is read
        best = min(best, time.perf_counter() - start)
    return 2.0 * n * width * width / best


Group = tuple[str | None, str]


def group_of(task: Task) -> Group:
    """Tasks of one group run at one rate: same model, same scope."""
    return task.labels["model"], task.identity["scope"]


@dataclass(frozen=True)
class Estimate:
    """What is left to do, in words that can be printed."""

    tasks: int  # tasks left
    rows: int
    seconds: float  # time on ``workers`` workers
    bytes: float  # memory of all workers together
    planned: int  # of these, what measuring takes in one worker beside its weights


def estimate(jobs: Sequence[Job], rates: dict[Group, float], workers: int = 1) -> Estimate:
    """Time and memory of the jobs at the given rates.

    Workers are taken to run at the rate of one alone, and the longest job to be the least time.
    """
    tasks = [task for job in jobs for task in job.tasks]
    lengths = [
        sum(task.work.flops / rates.get(group_of(task), NOMINAL_RATE) for task in job.tasks) for job in handed_out(jobs)
    ]
    seconds = max(sum(lengths) / workers, max(lengths, default=0.0))
    largest, memory = 0, 0
    weights: dict[str, int] = {}
    for job, plan in _plans(jobs):
        weights[job.fingerprint] = weight_bytes(model_of(job))
        largest = max(largest, plan.total)
        memory = max(memory, BASE_BYTES + weights[job.fingerprint] + plan.total)
    # A process keeps models while they fit; this one has loaded all of them to look at the plan.
    memory += max(0, min(sum(weights.values()), KEEP_BYTES) - max(weights.values(), default=0))
    return Estimate(len(tasks), sum(task.work.rows for task in tasks), seconds, workers * memory, largest)


def largest_plan(jobs: Sequence[Job], n: int) -> MemoryPlan:
    """The memory plan of the pass of n tokens that takes most."""
    longest = [job for job in jobs if job.tasks[0].identity["n"] == n]
    return max((plan for _, plan in _plans(longest)), key=lambda plan: plan.total)


def _plans(jobs: Iterable[Job]) -> Iterator[tuple[Job, MemoryPlan]]:
    """What a pass and the layers of one scope on it take beside the weights; of passes that take the same, the first."""
    seen = set()
    for job in jobs:
        for scope, tasks in grouped(job.tasks, lambda task: task.identity["scope"]).items():
            first, layers = tasks[0], tuple(task.identity["layer"] for task in tasks)
            n, inputs, limit = first.identity["n"], first.work.inputs, first.identity.get("memory", {}).get("limit")
            if (one := (job.fingerprint, n, layers, inputs, scope, limit)) not in seen:
                seen.add(one)
                yield job, plan_layers(model_of(job), n, layers, inputs=inputs, scope=scope, memory=limit)


def calibrate(jobs: Sequence[Job], known: dict[Group, float]) -> dict[Group, float]:
    """Rates by model and scope: those that are known, and of the others that of one task, whose rows are dropped."""
    rates = dict(known)
    unknown = ((job, task) for job in jobs for task in job.tasks if group_of(task) not in known)
    for group, choices in grouped(unknown, lambda choice: group_of(choice[1])).items():
        # The largest of at most two seconds at the nominal rate, else the smallest of all.
        quick = [choice for choice in choices if choice[1].work.flops <= 2 * NOMINAL_RATE]
        job, task = (max if quick else min)(quick or choices, key=lambda choice: choice[1].work.flops)
        start = time.perf_counter()
        list(run_job(replace(job, tasks=(task,))))
        rates[group] = task.work.flops / max(time.perf_counter() - start, 1e-9)
    return rates
