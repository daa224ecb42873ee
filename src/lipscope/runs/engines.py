"""Who runs the jobs: this process, or a Dask cluster. Every engine gives the same rows, bit for bit.

Jobs are values, and what a worker does with one (``lipscope.runs.work``) depends on nothing else. Engines only decide
where and in which order. A Dask scheduler sees bytes: unpickling what passes through it then imports this module, which
needs neither torch nor transformers.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lipscope.runs.tasks import Job
    from lipscope.runs.work import Outcome


def run_packed_job(job: bytes) -> bytes:
    """Run a pickled job and pickle its outcomes."""
    from lipscope.runs.work import run_job

    return pickle.dumps(list(run_job(pickle.loads(job))))


def introduce() -> dict[str, Any]:
    """Versions and hardware of a worker that is ready to work: all that a job needs is imported."""
    from lipscope.runs.work import environment

    return environment(1)


class EngineError(RuntimeError):
    """The engine cannot go on; the message says why and what to do. Everything finished so far is kept."""


class Engine(AbstractContextManager["Engine"], Protocol):
    """Runs jobs in any order and yields the outcome of each task once, and None while it waits for one.

    It is entered before, and leaves nothing running that it started.
    """

    name: str

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome | None]:
        """The outcomes, as they come."""


class InProcess(AbstractContextManager["InProcess"]):
    """One job after the other in this process; every task counts as soon as it is done.

    Args:
        stop: raise the error of the first task that fails; else failures are kept beside the rows.
    """

    name = "in-process"

    def __init__(self, *, stop: bool = False) -> None:
        self.stop = stop

    def __exit__(self, *_: object) -> None:
        pass

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome]:
        """The outcomes, task by task."""
        from lipscope.runs.work import run_job

        for job in jobs:
            yield from run_job(job, stop=self.stop)


class Dask:
    """A Dask cluster: an existing one, or worker processes on this machine.

    A job whose worker dies runs again on another one (``distributed`` gives up after three deaths, and the job counts as
    failed). Local clusters listen on 127.0.0.1 only and start no dashboard.

    Args:
        scheduler: address of an existing scheduler, ``tcp://host:port``.
        workers: start a local cluster of so many processes.
        timeout: seconds to wait for the scheduler.
        patience: seconds to wait for a worker when there is none.

    Raises:
        EngineError: when Dask is not installed, the scheduler does not answer, or no worker comes.
    """

    def __init__(
        self, scheduler: str | None = None, *, workers: int | None = None, timeout: float = 5.0, patience: float = 60.0
    ) -> None:
        if (scheduler is None) == (workers is None):
            raise ValueError("give either the address of a scheduler or a number of workers")
        if workers is not None:
            check_workers(workers)
        if find_spec("distributed") is None:
            raise EngineError("Dask is not installed: pip install 'lipscope[cluster]'")
        self.scheduler, self.workers, self.timeout, self.patience = scheduler, workers, timeout, patience
        self.name = f"dask {scheduler}" if scheduler else f"dask, {workers} local workers"
        self._client: Any = None
        self._cluster: Any = None
        self._log_levels: dict[logging.Logger, int] = {}
        self._seen: tuple[float, dict[str, Any]] = (0.0, {})

    def __enter__(self) -> Dask:
        distributed = import_module("distributed")
        # Lost workers and connections are this engine's to report; tracebacks of the event loop help nobody.
        for name in ("distributed", "distributed.client", "asyncio", "tornado", "tornado.application"):
            log = logging.getLogger(name)
            self._log_levels.setdefault(log, log.level)
            log.setLevel(logging.CRITICAL + 1)
        if self.workers is not None:
            with warnings.catch_warnings(), import_module("dask").config.set(_LOCAL_WORKERS):
                # Its status page may have to move to another port; nobody asked for one.
                warnings.simplefilter("ignore", UserWarning)
                self._cluster = distributed.LocalCluster(
                    n_workers=self.workers, threads_per_worker=1, processes=True, host="127.0.0.1",
                    dashboard_address=None, silence_logs=50, memory_limit=0,
                )  # fmt: skip
        try:
            self._connect(distributed)
            self._check_workers()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _connect(self, distributed: Any) -> None:
        try:
            self._client = distributed.Client(self._cluster or self.scheduler, timeout=self.timeout, set_as_default=False)
        except (OSError, TimeoutError) as error:
            raise EngineError(
                f"no Dask scheduler answers at {self.scheduler} within {self.timeout:g} s. Start one with `dask scheduler`, "
                "check the address and the firewall, or use --workers N for this machine"
            ) from error
        except ValueError as error:
            raise EngineError(
                f"the scheduler's address must look like tcp://host:8786, got {self.scheduler!r}: {error}"
            ) from error

    def __exit__(self, *_: object) -> None:
        for part in (self._client, self._cluster):
            if part is not None:
                with suppress(Exception):
                    part.close()
        self._client = self._cluster = None
        self._seen = (0.0, {})
        for log, level in self._log_levels.items():
            log.setLevel(level)

    def run(self, jobs: Sequence[Job]) -> Iterator[Outcome | None]:
        """The outcomes, job by job, as workers finish them. Few jobs are under way at once: a plan may have very many."""
        from lipscope.runs.tasks import handed_out

        if any(job.live is not None for job in jobs):
            raise EngineError("a plan that holds a model in memory runs in this process only: name the model")
        waiting = iter(handed_out(jobs))
        under_way: dict[Any, Job] = {}
        results = import_module("distributed").as_completed(loop=self._client.loop)
        while True:
            # One job at work and one in waiting for every worker; a worker runs one at a time whatever its threads.
            room = 2 * max(len(self.connected()), 1) - len(under_way)
            for _, job in zip(range(room), waiting, strict=False):
                future = self._client.submit(run_packed_job, pickle.dumps(job), pure=False)
                under_way[future] = job
                results.add(future)
            if not under_way:
                return
            yield from self._until(results.has_ready)
            future = next(results)
            yield from self._outcomes(future, under_way.pop(future))

    def _until(self, ready: Callable[[], object]) -> Iterator[None]:
        """Wait; give up when there has been no worker for a while."""
        seen = time.monotonic()
        while not ready():
            if self._client.status not in ("running", "connecting"):
                raise EngineError(f"the connection to the scheduler is lost ({self._client.status}). {_RESUME}")
            if self.connected():
                seen = time.monotonic()
            elif time.monotonic() - seen > self.patience:
                raise EngineError(f"the cluster has had no worker for {self.patience:g} s: start some. {_RESUME}")
            time.sleep(0.02)
            yield None

    def _outcomes(self, future: Any, job: Job) -> list[Outcome]:
        from lipscope.runs.work import Outcome, environment

        try:
            if future.status == "finished":
                outcomes: list[Outcome] = pickle.loads(future.result(timeout=self.patience))
                _refuse_other_versions("a worker", outcomes[0].environment)
                return outcomes
            error = future.exception(timeout=self.patience) if future.status == "error" else None
        except (OSError, TimeoutError) as lost:
            raise EngineError(f"a finished job could not be fetched from its worker: {lost}. {_RESUME}") from lost
        if error is None:
            raise EngineError(
                f"the scheduler dropped a job ({future.status}): it ended or was restarted, or another client cancelled the "
                f"job. {_RESUME}"
            )
        line = " ".join(f"{type(error).__name__}: {error}".split())
        where = environment(job.threads)
        return [Outcome(task, (), line, line, 0.0, where) for task in job.tasks]

    def connected(self) -> dict[str, Any]:
        """The workers, as of at most a second ago."""
        asked, found = self._seen
        if time.monotonic() - asked > 1 or not found:
            try:
                found = self._client.scheduler_info(n_workers=-1)["workers"]
            except (OSError, TimeoutError) as error:
                raise EngineError(f"the connection to the scheduler is lost: {error}. {_RESUME}") from error
            self._seen = (time.monotonic(), found)
        return found

    def _check_workers(self) -> None:
        """Wait for the first worker, and refuse workers that would measure something else."""
        for _ in self._until(self.connected):
            pass
        try:
            there = self._client.run(introduce, on_error="return")
        except Exception as error:
            raise EngineError(f"the workers cannot run lipscope: {error}") from error
        for address, found in there.items():
            if isinstance(found, Exception):
                raise EngineError(
                    f"worker {address} cannot import lipscope ({found}): install it there, in the same version"
                )
            _refuse_other_versions(f"worker {address}", found)


def check_workers(workers: int) -> None:
    """Refuse numbers of processes that this machine cannot serve."""
    most = 4 * (os.cpu_count() or 1)
    if not 1 <= workers <= most:
        raise ValueError(f"workers must be at least 1 and at most {most}, four for each core of this machine; got {workers}")


# Dask's workers give memory back whenever 64 KiB are free, so every step of the solver pays for its pages anew: measured,
# that more than doubles the time of small problems. Nobody looks at the profile of a cluster without a dashboard.
_LOCAL_WORKERS = {
    "distributed.nanny.pre-spawn-environ.MALLOC_TRIM_THRESHOLD_": 128 << 20,
    "distributed.nanny.pre-spawn-environ.MALLOC_MMAP_THRESHOLD_": 32 << 20,
    "distributed.worker.profile.enabled": False,
}


def _refuse_other_versions(who: str, found: dict[str, Any]) -> None:
    from lipscope.runs.work import environment

    here = environment(1)["versions"]
    for package in ("lipscope", "torch", "transformers"):
        has, wanted = found["versions"].get(package), here.get(package)
        if has != wanted:
            raise EngineError(
                f"{who} has {package} {has}, this process has {wanted}: rows would differ. Install the same versions "
                "everywhere"
            )


_RESUME = "Finished tasks are kept: run the same command again to go on"


def make_engine(scheduler: str | None = None, workers: int | None = None) -> Engine:
    """The engine that the command line asks for."""
    if scheduler is not None and workers is not None:
        raise ValueError("--scheduler and --workers exclude each other: a cluster that exists, or a new one on this machine")
    if scheduler is None and workers is None:
        return InProcess()
    return Dask(scheduler, workers=workers)
