"""From a plan to content-addressed tasks, grouped so that one model load and one forward pass serve many rows.

A *task* is the smallest unit that is stored: one layer at one scope on the inputs of one forward pass. Its key is the hash
of all that determines its numbers, so that a task measured before is recognised whatever plan, engine or machine asks for
it. A *job* is what an engine hands to a worker: a forward pass and tasks on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from lipscope.measure.memory import AUTOGRAD_SCOPES
from lipscope.models.load import ZOO
from lipscope.models.model import Model
from lipscope.runs.plan import Block, ModelChoice, Plan
from lipscope.runs.registry import TaskKind, kind_path, quantity_path
from lipscope.runs.schema import digest
from lipscope.runs.work import forget_models, loaded_model, model_fingerprint
from lipscope.spectral.result import dtype_name

# A job of more work than this is cut: about half a minute of one core, so that little is lost with a worker.
_JOB_FLOPS = 1e12
# Operator pairs of a solve, with room for the harder ones.
PAIRS = 20


@dataclass(frozen=True)
class Work:
    """Estimated size of a task."""

    flops: float
    inputs: int  # sequences in its forward pass
    rows: int  # rows that it gives


def task_work(handle: Model, setting: dict[str, Any], *, n: int, inputs: int, effort: float = 1.0) -> Work:
    """Work of one task: ``PAIRS`` pairs of products for each input. The forward pass costs less than one layer: left out.

    With P weights in the map, H heads of d_h and n tokens, a pair (J·u, Jᵀ·g) takes

        4·n·P + 16·n²·H·d_h      floating-point operations (twice that where autograd computes it: scopes around attention)
    """
    layer, scope = handle.layer(setting["layer"]), setting["scope"]
    layers = len(handle.layers) if scope == "model" else 1
    inside = layer.host if scope in ("head", "attention", "norm+attention") else layer.block
    width = int(handle.probe_recording.hosts[layer.index].tokens.shape[-1])
    parameters = sum(p.numel() for p in inside.parameters()) * layers
    pair = (2 if scope in AUTOGRAD_SCOPES else 1) * (4.0 * n * parameters + 16.0 * n * n * layers * width)
    heads = setting.get("heads")
    return Work(effort * inputs * PAIRS * pair, inputs, inputs * (1 if heads is None else len(heads)))


@dataclass(frozen=True)
class Task:
    """One layer at one scope on the inputs of one pass."""

    key: str  # content hash of ``identity``
    identity: dict[str, Any]  # everything that determines the rows, as JSON values
    labels: dict[str, str | None]  # names for people: model, text, kind
    work: Work  # its estimated size


@dataclass(frozen=True)
class Job:
    """A forward pass and tasks on it; what a worker receives."""

    kind: str  # import path of the kind
    model: ModelChoice  # how to load the model
    fingerprint: str  # what the loaded model must be
    dtype: str | None  # dtype of the computation, or None for that of the weights
    threads: int
    payload: dict[str, Any]  # the pass
    tasks: tuple[Task, ...]
    views: int = 0  # how many of the worst places of its block are looked at token by token
    live: Model | None = None  # the model itself, in this process only
    streamed: bool = False  # one layer is in memory at a time

    @property
    def flops(self) -> float:
        """Estimated work."""
        return sum(task.work.flops for task in self.tasks)


@dataclass(frozen=True)
class Expansion:
    """A plan with its models looked at: every task that it asks for."""

    plan: Plan
    jobs: tuple[Job, ...]  # the jobs, model by model, one for every forward pass, in the plan's order

    @property
    def tasks(self) -> list[Task]:
        """All tasks."""
        return [task for job in self.jobs for task in job.tasks]

    def pending(self, finished: Collection[str]) -> list[Job]:
        """The jobs without the tasks in ``finished``."""
        left = [(job, tuple(task for task in job.tasks if task.key not in finished)) for job in self.jobs]
        return [dataclasses.replace(job, tasks=tasks) for job, tasks in left if tasks]


def expand(plan: Plan) -> Expansion:
    """Look at every model and text of a plan, and list its tasks. Nothing is measured.

    Raises:
        FileNotFoundError: when a model or a text is not there; names those that are.
        ValueError: when a layer, head, scope or length does not exist in a model, or a text is too short.
        MemoryError: when a block's ``memory`` is too small for one of its lengths.
    """
    if all(block.live is None for block in plan.blocks):
        forget_models()
    seen: set[str] = set()
    names: dict[str, str] = {}
    # Model by model, not block by block: one model at a time is in memory, and each is loaded once.
    wanted: dict[tuple[ModelChoice, str | None], list[tuple[int, Block, str]]] = {}
    for number, block in enumerate(plan.blocks, start=1):
        for named in block.models:
            choice = named if block.live is not None else _anywhere(named)
            wanted.setdefault((choice, block.dtype), []).append((number, block, named.name))
    jobs: list[Job] = []
    for (choice, dtype), uses in wanted.items():
        for number, block, name in uses:
            try:
                if block.live is None:
                    handle, fingerprint = loaded_model(choice, dtype)
                else:  # where nothing outlives the process, its weights need not be hashed
                    handle = block.live.model
                    fingerprint = model_fingerprint(handle) if block.live.kept else digest(["live", id(handle)])
                _refuse_twins(names, f"{fingerprint} {choice.loader}", f"model {name!r}")
                _refuse_namesakes(names, handle, fingerprint)
                jobs += _jobs_of(plan, block, choice, handle, fingerprint, names, seen)
            except (ValueError, FileNotFoundError) as error:
                where = f"block {number}: " if len(plan.blocks) > 1 else ""
                raise type(error)(f"{where}{error}") from error
    return Expansion(plan, tuple(jobs))


def handed_out(jobs: Iterable[Job]) -> list[Job]:
    """Jobs as workers get them: model by model, none of much more than half a minute, the largest first.

    The pass of a job that is cut runs once in every part: its bits are the same. That of a streamed model is cut into its
    layers: a worker that dies takes no other one with it.
    """
    by_model: dict[tuple[str, str | None], list[Job]] = {}
    for job in jobs:
        parts = (dataclasses.replace(job, tasks=part) for part in _split(job.tasks, job.streamed))
        by_model.setdefault((job.fingerprint, job.dtype), []).extend(parts)
    return [job for same in by_model.values() for job in sorted(same, key=lambda job: -job.flops)]


def _anywhere(choice: ModelChoice) -> ModelChoice:
    """A directory by its full path: workers may start in another one."""
    directory = Path(choice.name).expanduser()
    if choice.name in ZOO or not directory.is_dir():
        return choice
    return dataclasses.replace(choice, name=str(directory.resolve()))


def _jobs_of(
    plan: Plan, block: Block, choice: ModelChoice, handle: Model, fingerprint: str, names: dict[str, str], seen: set[str]
) -> list[Job]:
    path = kind_path(block.kind)
    kind: TaskKind = resolve_name(path)()
    common: dict[str, Any] = {
        "kind": path,
        "model": fingerprint,
        "loader": choice.loader,
        "dtype": dtype_name(handle.dtype),
        "solver": block.solver,
        "seed": block.seed,
        "threads": plan.threads,
        "quantities": [quantity_path(q) for q in block.quantities],
        "options": dict(block.options),
    }
    if block.certificate is not None:
        common["certificate"] = block.certificate
    live = block.live
    held = {} if live is None or live.solver is None else {"solver": live.solver}
    jobs = []
    for one in kind.expand(block, handle):
        if one.text is not None:
            _refuse_twins(names, one.identity["text"], f"text {one.text!r}")
        labels = {"model": handle.name, "text": one.text, "kind": block.kind}
        tasks = []
        for setting in one.settings:
            identity = common | one.identity | setting
            key = digest(identity)
            if key not in seen:
                seen.add(key)
                work = task_work(handle, setting, n=one.n, inputs=one.inputs, effort=kind.effort)
                tasks.append(Task(key, identity, labels, work))
        if tasks:
            payload, model = one.payload | held, None if live is None else live.model
            job = Job(path, choice, fingerprint, block.dtype, plan.threads, payload, tuple(tasks), block.views, model)
            jobs.append(dataclasses.replace(job, streamed=handle.stream is not None))
    return jobs


def _split(tasks: Sequence[Task], by_layer: bool) -> Iterable[tuple[Task, ...]]:
    """Tasks of one pass in parts of bounded work, of one layer each if ``by_layer``."""
    part: list[Task] = []
    for task in tasks:
        other = by_layer and part and part[-1].identity["layer"] != task.identity["layer"]
        if part and (other or sum(t.work.flops for t in part) + task.work.flops > _JOB_FLOPS):
            yield tuple(part)
            part = []
        part.append(task)
    if part:
        yield tuple(part)


def _refuse_twins(names: dict[str, str], fingerprint: str, name: str) -> None:
    """Two names for one content would be one measurement: say so instead of leaving one name without rows."""
    known = names.setdefault(fingerprint, name)
    if known != name:
        raise ValueError(f"{known} and {name} have the same content, so they are one measurement: name one of them")


def _refuse_namesakes(names: dict[str, str], handle: Model, fingerprint: str) -> None:
    """Rows call a model by its name: two contents under one name could not be told apart."""
    if names.setdefault(f"name {handle.name} {handle.dtype}", fingerprint) != fingerprint:
        raise ValueError(f"two models are called {handle.name!r}: rename one of the directories, or sweep them separately")
