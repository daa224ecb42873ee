"""What a sweep will take: a cost model, stated here and calibrated by measuring a sample of its own tasks.

Work of one task: the forward pass is left out (it costs less than one measured layer), and σ of B inputs takes about k = 20
pairs of products (J·u, Jᵀ·g) for each input. With P weights in the map, H heads of d_h and n tokens, a pair takes

    4·n·P + 16·n²·H·d_h        floating-point operations (twice that where autograd computes it: scopes around attention)

Memory of one worker: Python and torch, the weights of the models it keeps, the recorded pass (3 tensors per layer), two
Krylov bases of 32 vectors (never more than the solver's own limit of 1 GiB), and 8 score matrices per head, or the tiles
that stand for them; scopes that go through autograd keep the activations of their blocks as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lipscope.attention.tiled import current_tiling
from lipscope.measure.cost import PAIRS, pair_flops

if TYPE_CHECKING:
    from lipscope.models.model import Model
    from lipscope.runs.tasks import Job, Task

BASE_BYTES = 400 << 20
# Weights that a process keeps; the model in use stays whatever its size.
KEEP_BYTES = 1 << 29
_KRYLOV_BYTES = 1 << 30
_BLOCK_ACTIVATIONS = 34
_AUTOGRAD = ("norm+attention", "attention+residual", "block", "model")

# A core's rate before anything was measured, only used to choose the sample.
NOMINAL_RATE = 2e10


@dataclass(frozen=True)
class Work:
    """Estimated size of a task.

    Attributes:
        flops: floating-point operations.
        bytes: memory beside the weights.
        weights: bytes of the model.
        rows: rows that it gives.
    """

    flops: float
    bytes: float
    weights: float
    rows: int


def task_work(handle: Model, setting: dict[str, Any], *, n: int, inputs: int, effort: float = 1.0) -> Work:
    """The cost model of this module for one task."""
    layer, scope = handle.layer(setting["layer"]), setting["scope"]
    layers = len(handle.layers) if scope == "model" else 1
    inside = layer.host if scope in ("head", "attention", "norm+attention") else layer.block
    width = _width(handle, setting["layer"])
    size = handle.dtype.itemsize
    autograd = 2 if scope in _AUTOGRAD else 1
    parameters = sum(p.numel() for p in inside.parameters()) * layers
    # With the probabilities at hand, every entry of a score matrix takes 8·(d_k + d_v) operations.
    pair = autograd * pair_flops(n, parameters, n * n * layers, 16 * width)
    scores = min(8 * layer.heads * n * n, _most_scores(inputs, size))
    activations = _BLOCK_ACTIVATIONS * n * width * layers if scope in _AUTOGRAD else 0
    memory = inputs * size * (3 * len(handle.layers) * n * width + scores * layers + activations)
    memory += min(_KRYLOV_BYTES, inputs * size * 64 * n * width)
    weights = sum(p.numel() * p.element_size() for p in handle.model.parameters())
    heads = setting.get("heads")
    return Work(effort * inputs * PAIRS * pair, memory, weights, inputs * (1 if heads is None else len(heads)))


def _most_scores(inputs: int, element_size: int) -> float:
    """Numbers per input beyond which tiles take the place of score matrices, with what is kept of them."""
    tiling = current_tiling()
    return (8 * tiling.dense + tiling.keep) / (inputs * element_size)


def _width(handle: Model, layer: int) -> int:
    call = handle.probe_recording.hosts[handle.layer(layer).index]
    return int(call.tokens.shape[-1])


Group = tuple[str | None, str]


def group_of(task: Task) -> Group:
    """Tasks of one group run at one rate: same model, same scope."""
    return task.labels["model"], task.identity["scope"]


@dataclass(frozen=True)
class Estimate:
    """What is left to do, in words that can be printed.

    Attributes:
        tasks: tasks left.
        rows: rows that they give.
        seconds: time on ``workers`` workers.
        bytes: memory of all workers together.
        rates: floating-point operations per second by model and scope, as measured.
    """

    tasks: int
    rows: int
    seconds: float
    bytes: float
    rates: dict[Group, float]


def estimate(jobs: Sequence[Job], rates: dict[Group, float], workers: int = 1) -> Estimate:
    """Time and memory of the jobs at the given rates.

    Workers are taken to run at the rate of one alone, and the longest job to be the least time.
    """
    tasks = [task for job in jobs for task in job.tasks]
    lengths = [sum(_seconds(task, rates) for task in job.tasks) for job in jobs]
    seconds = max(sum(lengths) / workers, max(lengths, default=0.0))
    memory = max((BASE_BYTES + task.work.weights + task.work.bytes for task in tasks), default=0.0)
    # A process keeps models while they fit; this one has loaded all of them to look at the plan.
    models = sum({task.labels["model"]: task.work.weights for task in tasks}.values())
    memory += max(0.0, min(models, KEEP_BYTES) - max((task.work.weights for task in tasks), default=0.0))
    return Estimate(len(tasks), sum(task.work.rows for task in tasks), seconds, workers * memory, rates)


def calibrate(
    jobs: Sequence[Job], run: Callable[[Job], Iterable[object]], known: dict[Group, float] | None = None, budget: float = 2.0
) -> dict[Group, float]:
    """Rates by model and scope, from one task of each that should take at most ``budget`` seconds; the rows are dropped.

    Args:
        jobs: what is left to do.
        run: runs a job.
        known: rates known from finished tasks; not measured again.
        budget: seconds at the nominal rate.
    """
    from dataclasses import replace

    rates = dict(known or {})
    samples: dict[Group, tuple[Job, Task]] = {}
    for job in jobs:
        for task in job.tasks:
            group = group_of(task)
            if group not in rates and (group not in samples or _fits_better(task, samples[group][1], budget)):
                samples[group] = (job, task)
    for group, (job, task) in samples.items():
        alone = replace(job, tasks=(task,))
        start = time.perf_counter()
        for _ in run(alone):
            pass
        rates[group] = task.work.flops / max(time.perf_counter() - start, 1e-9)
    return rates


def _fits_better(task: Task, than: Task, budget: float) -> bool:
    """The largest task within the budget, else the smallest of all."""
    most = budget * NOMINAL_RATE
    mine, other = task.work.flops, than.work.flops
    return mine > other if mine <= most and other <= most else mine < other


def _seconds(task: Task, rates: dict[Group, float]) -> float:
    return task.work.flops / rates.get(group_of(task), NOMINAL_RATE)
