"""What a worker does with a job: load the model, run the pass, measure task after task.

Nothing here depends on the engine, on the number of workers or on what ran before, so every engine gives the same bits.
Models are loaded once per process, kept while they fit a budget, and checked to be the ones that the plan saw.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import socket
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lipscope import __version__
from lipscope.models import load as model_loading
from lipscope.models.model import Model
from lipscope.runs.plan import ModelChoice
from lipscope.runs.registry import Row, TaskKind
from lipscope.runs.schema import DIGEST_SIZE, digest

if TYPE_CHECKING:
    from lipscope.runs.tasks import Job, Task

# Weights that a process keeps; the model in use stays whatever its size.
KEEP_BYTES = 1 << 29
_PACKAGES = ("torch", "transformers", "numpy", "scipy", "safetensors", "dask", "distributed")


def environment(threads: int) -> dict[str, Any]:
    """Versions and hardware of this process, and the torch threads of its tasks."""
    return _fixed() | {"threads": threads}


@cache
def _fixed() -> dict[str, Any]:
    versions = {"lipscope": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "versions": versions, "host": socket.gethostname(), "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(), "processor": _processor(), "cores": os.cpu_count(), "memory_bytes": _memory(),
        "blas": f"{'MKL' if torch.backends.mkl.is_available() else 'no MKL'}, {torch.backends.cpu.get_cpu_capability()}",
    }  # fmt: skip


def _processor() -> str:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return platform.processor()


def _memory() -> int | None:
    with suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


class LoadedModel(NamedTuple):
    """A model and what it is."""

    handle: Model
    fingerprint: str


_loaded: OrderedDict[tuple[ModelChoice, str | None], LoadedModel] = OrderedDict()


def loaded_model(choice: ModelChoice, dtype: str | None, fingerprint: str | None = None) -> LoadedModel:
    """The model, loaded unless this process has it; refuses one that has not the ``fingerprint`` it must have.

    ``dtype`` is ``"float32"``, ``"float64"``, or None for that of the weights.
    """
    key = (choice, dtype)
    if key not in _loaded:
        _make_room(KEEP_BYTES // 2)
        # The same fingerprint as at planning time: the self-tests have run already.
        handle = _load(choice, dtype, check=fingerprint is None)
        _loaded[key] = LoadedModel(handle, model_fingerprint(handle))
        _return_free_memory()
    _loaded.move_to_end(key)
    model = _loaded[key]
    _make_room(KEEP_BYTES)
    if fingerprint is not None and model.fingerprint != fingerprint:
        raise ValueError(
            f"model {choice.name!r} is not the one that the plan was made with: its weights or configuration have the "
            f"fingerprint {model.fingerprint[:12]} here and {fingerprint[:12]} there. Give every machine the same model"
        )
    return model


def _make_room(most: int) -> None:
    """Let go of the models that were used longest ago, until ``most`` bytes of weights are left or one model."""
    while len(_loaded) > 1 and sum(weight_bytes(handle) for handle, _ in _loaded.values()) > most:
        _loaded.popitem(last=False)


def forget_models() -> None:
    """Load models anew when they are asked for: the files behind a name may have changed."""
    _loaded.clear()
    _return_free_memory()


def _return_free_memory() -> None:
    """Give what former models and the loading left back to the system, where the C library can: it would keep a gigabyte."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def model_fingerprint(handle: Model) -> str:
    """Hash of a loaded model: its class, its configuration and every weight, in the dtype of the computation.

    The name and the place it was loaded from do not enter, nor does the version of transformers that saved it.
    """
    if handle.stream is not None:
        return handle.stream.fingerprint
    model = handle.model
    state = hashlib.blake2b(digest_size=DIGEST_SIZE)
    config: Any = getattr(model, "config", None)
    about = repr(model)
    if hasattr(config, "to_dict"):
        known = {name: value for name, value in config.to_dict().items() if not name.startswith("_")}
        about = json.dumps({name: known[name] for name in known.keys() - _INCIDENTAL}, sort_keys=True, default=str)
    state.update(f"{type(model).__name__} {about}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        state.update(memoryview(plain.numpy()))
    return state.hexdigest()


_INCIDENTAL = {"transformers_version", "name_or_path", "dtype", "torch_dtype", "architectures"}


def weight_bytes(handle: Model) -> int:
    """Bytes of a model's parameters; of a streamed one, of its largest layer."""
    if handle.stream is not None:
        return max(sum(p.numel() * p.element_size() for p in unit.parameters()) for unit in handle.stream.units)
    return sum(p.numel() * p.element_size() for p in handle.model.parameters())


def _load(choice: ModelChoice, dtype: str | None, *, check: bool) -> Model:
    wanted = None if dtype is None else getattr(torch, dtype)
    if choice.loader is not None:
        made = resolve_name(choice.loader)(choice.name, wanted)
        if not isinstance(made, Model):
            raise ValueError(f"loader {choice.loader} must return a lipscope.Model, got {type(made).__name__}")
        return made
    return model_loading.load(
        choice.name, choice.tokenizer, part=choice.part, dtype=wanted, allow_pickle=choice.allow_pickle,
        trust_remote_code=choice.trust_remote_code, stream=choice.stream, check=check,
    )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What became of one task."""

    task: Task
    rows: tuple[tuple[str, Row], ...]  # (key, row) pairs; empty when it failed
    error: str | None  # one line, when it failed
    trace: str | None  # the traceback, when it failed
    seconds: float  # time it took
    environment: dict[str, Any]  # where it ran


# Replaying puts hooks into the model and sets torch's threads: one task at a time in a process, also where a cluster
# gives its workers several threads.
_one_at_a_time = threading.RLock()


def run_job(job: Job, *, stop: bool = False) -> Iterator[Outcome]:
    """Measure the tasks of a job one after the other.

    An error is the outcome of its task, and the others go on; with ``stop`` it is raised.
    """
    kind: TaskKind = resolve_name(job.kind)()
    where = environment(job.threads)
    start = time.perf_counter()
    with _one_at_a_time, torch_threads(job.threads):
        try:
            handle = model_of(job)
            recorded = kind.record(handle, job.payload)
        except Exception as error:
            if stop:
                raise
            for task in job.tasks:
                yield _failed(task, error, start, where)
            return
        for task in job.tasks:
            start = time.perf_counter()
            try:
                rows = kind.measure(handle, recorded, job.payload, task.identity)
                # The content address of a row is that of its task, and its place in it.
                places = [{name: row.get(name) for name in kind.coordinates} for row in rows]
                keyed = tuple((digest([task.key, place]), row) for place, row in zip(places, rows, strict=True))
                if len({key for key, _ in keyed}) < len(keyed):
                    raise ValueError(f"kind {job.kind} gave rows that {', '.join(kind.coordinates)} do not tell apart")
                yield Outcome(task, keyed, None, None, time.perf_counter() - start, where)
            except Exception as error:
                if stop:
                    raise
                yield _failed(task, error, start, where)


def model_of(job: Job) -> Model:
    """The model of a job: the one it holds, or the one it names."""
    return job.live if job.live is not None else loaded_model(job.model, job.dtype, job.fingerprint).handle


def _failed(task: Task, error: Exception, start: float, where: dict[str, Any]) -> Outcome:
    line = " ".join(f"{type(error).__name__}: {error}".split())
    trace = "".join(traceback.format_exception(error))
    return Outcome(task, (), line, trace, time.perf_counter() - start, where)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many torch threads for a while; then as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
