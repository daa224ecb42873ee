"""Engines: a real Dask scheduler with worker processes gives the rows of this process, also when a worker is killed."""

from __future__ import annotations

import json
import logging.handlers
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lipscope
from lipscope.cli.main import app
from lipscope.runs import Dask, Plan, Store, expand, run_plan
from lipscope.runs.engines import EngineError, make_engine
from lipscope.runs.plan import ModelChoice
from lipscope.runs.sweep import Step
from lipscope.runs.tasks import handed_out
from sweep_cases import TEXT, plan_of, save_models

TESTS, SOURCE = Path(__file__).parent, Path(lipscope.__file__).parent.parent


class Cluster:
    """A scheduler and two workers, each a process of its own."""

    def __init__(self, directory: Path, workers: int = 2) -> None:
        self.environment = os.environ | {"PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}", "DASK_LOGGING__DISTRIBUTED": "error"}
        self.directory = directory
        self.processes = [self._start("scheduler", "--port", "0", "--no-dashboard", "--no-show")]
        file = directory / "scheduler.json"
        deadline = time.monotonic() + 60
        while not file.exists():
            assert time.monotonic() < deadline
            assert self.processes[0].poll() is None
            time.sleep(0.05)
        self.workers = [self._start("worker", "--no-nanny", "--nthreads", "1", "--no-dashboard") for _ in range(workers)]
        self.processes += self.workers
        self.address = _address(file)

    def _start(self, what: str, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "dask", what, "--host", "127.0.0.1", "--scheduler-file",
                   str(self.directory / "scheduler.json"), *options]  # fmt: skip
        return subprocess.Popen(command, env=self.environment, stderr=subprocess.DEVNULL, cwd=self.directory)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _address(file: Path) -> str:
    deadline = time.monotonic() + 10
    while True:
        try:
            return str(json.loads(file.read_text())["address"])
        except (ValueError, KeyError):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    directory = tmp_path_factory.mktemp("sweep")
    save_models(directory)
    return plan_of(directory, kind="sweep_cases:SlowText", options={"sleep": 0.05})


def test_a_killed_worker_changes_nothing(
    cluster: Cluster, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expansion = expand(plan)
    here = run_plan(expansion, tmp_path / "here.db")
    engine = Dask(cluster.address)
    seen: list[Step] = []

    def kill_one(step: Step) -> None:
        seen.append(step)
        if step.tasks == 5:
            # Both workers have a job under way and another one waiting.
            assert len(engine.connected()) == 2
            os.kill(cluster.workers[0].pid, signal.SIGKILL)

    deadline = time.monotonic() + 60
    with engine:
        while len(engine.connected()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    there = run_plan(expansion, tmp_path / "there.db", engine=engine, progress=kill_one)
    assert cluster.workers[0].wait(timeout=10) == -signal.SIGKILL
    assert (there.measured, there.failed, there.rows) == (32, 0, 240)
    assert there.digest == here.digest
    assert list(dict.fromkeys(step.tasks for step in seen)) == list(range(33))
    with Store(tmp_path / "here.db") as one, Store(tmp_path / "there.db") as other:
        mine, theirs = one.rows(), other.rows()
        assert len(other.environments()) == 1
    assert [r | {"seconds": 0} for r in mine] == [r | {"seconds": 0} for r in theirs]
    # A worker of another version is refused before a row is kept.
    with monkeypatch.context() as other:
        other.setattr("lipscope.runs.work.environment", lambda threads: {"versions": {"lipscope": "0.0.0"}})
        with pytest.raises(EngineError, match=r"has lipscope .*, this process has 0\.0\.0"), Dask(cluster.address):
            pass
    # One worker is left: another number of workers, the same table.
    alone = run_plan(expansion, tmp_path / "alone.db", engine=Dask(cluster.address))
    assert (alone.digest, alone.failed) == (here.digest, 0)
    # A scheduler that dies ends the sweep with one clear sentence, and no word from Dask's event loop.
    words = logging.handlers.BufferingHandler(1000)
    logging.getLogger("distributed.client").addHandler(words)
    lost = Dask(cluster.address)
    with pytest.raises(EngineError, match="Finished tasks are kept: run the same command again"):
        run_plan(expansion, tmp_path / "lost.db", engine=lost, progress=lambda _: cluster.processes[0].kill())
    assert words.buffer == []
    # And a cluster without workers says so.
    cluster.workers[1].kill()
    cluster.workers[1].wait()
    deserted = Cluster(tmp_path, workers=0)
    with closing(deserted), pytest.raises(EngineError, match=r"has had no worker for 0\.5 s"):
        run_plan(expansion, tmp_path / "nobody.db", engine=Dask(deserted.address, patience=0.5))


def test_layers_of_a_streamed_model_spread_over_workers(tmp_path: Path) -> None:
    """Each worker reads the files itself; one that is killed costs the layer that it was at."""
    import torch
    import transformers

    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 260}
    made = transformers.LlamaModel(transformers.LlamaConfig(**size, num_hidden_layers=8)).bfloat16()
    made.save_pretrained(tmp_path / "deep", max_shard_size="20KB")
    assert len(list((tmp_path / "deep").glob("*.safetensors"))) > 8
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    about = {"kind": "sweep_cases:SlowText", "options": {"sleep": 0.1}, "scopes": ["attention"], "lengths": [8], "inputs": 2}
    model = ModelChoice(str(tmp_path / "deep"), loader="sweep_cases:streamed")
    expansion = expand(plan_of(tmp_path, models=[model], **about))
    handed = [[task.identity["layer"] for task in job.tasks] for job in handed_out(expansion.jobs)]
    assert handed == [[layer] for layer in range(8)]
    here = run_plan(expansion, tmp_path / "here.db")
    with closing(Cluster(tmp_path)) as cluster:
        engine = Dask(cluster.address)
        with engine:
            while len(engine.connected()) < 2:
                time.sleep(0.1)

        def kill_one(step: Step) -> None:
            if step.tasks == 3 and cluster.workers[0].poll() is None:
                os.kill(cluster.workers[0].pid, signal.SIGKILL)

        there = run_plan(expansion, tmp_path / "there.db", engine=engine, progress=kill_one)
        assert cluster.workers[0].wait(timeout=10) == -signal.SIGKILL
    assert (there.measured, there.failed, there.digest) == (8, 0, here.digest)
    with Store(tmp_path / "there.db") as store:
        assert sorted(row["layer"] for row in store.rows()) == sorted(2 * list(range(8)))


def test_a_plan_says_whether_a_model_is_streamed(tmp_path: Path) -> None:
    import transformers

    size = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 30522}
    transformers.LlamaModel(transformers.LlamaConfig(**size, num_hidden_layers=3)).save_pretrained(tmp_path / "deep")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    common = [
        "sweep", "--model", str(tmp_path / "deep"), "--text", str(tmp_path / "text.txt"), "--lengths", "8", "--inputs", "1",
        "--tokenizer", "gpt2-mini",
    ]  # fmt: skip
    tables = []
    for options in (["--stream"], []):
        store = tmp_path / f"{len(options)}.db"
        told = CliRunner().invoke(app, [*common, "--store", str(store), *options])
        assert told.exit_code == 0, told.output
        with Store(store) as kept:
            # Streamed, a checkpoint is known by its files and not by its numbers.
            known = ("seconds", "key", "model_digest")
            tables.append([{k: v for k, v in row.items() if k not in known} for row in kept.rows()])
            assert ("stream" in str(kept.plan())) == bool(options)
    assert tables[0] == tables[1]


def test_local_workers_from_the_command_line(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{SOURCE}{os.pathsep}{TESTS}")
    small = plan_of(Path(plan.blocks[0].texts[0]).parent, lengths=[6], layers=[0], scopes=["attention"])
    (tmp_path / "plan.toml").write_text(small.text, encoding="utf-8")
    arguments = ["sweep", str(tmp_path / "plan.toml"), "--store", str(tmp_path / "run.db"), "--trust-module", "sweep_cases"]
    result = CliRunner().invoke(app, [*arguments, "--workers", "1"])
    assert result.exit_code == 0, result.output
    here = run_plan(small, tmp_path / "here.db")
    assert here.digest in result.output
    again = CliRunner().invoke(app, [*arguments, "--workers", "2"])
    assert "kept from before   2" in again.output


def test_a_scheduler_that_is_not_there(plan: Plan, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    start = time.monotonic()
    with pytest.raises(EngineError, match=f"no Dask scheduler answers at {address} within 1 s"), Dask(address, timeout=1):
        pass
    assert time.monotonic() - start < 10
    with pytest.raises(EngineError, match="address must look like"), Dask("nonsense://x", timeout=1):
        pass


def test_engines_are_chosen_by_the_options() -> None:
    assert make_engine().name == "in-process"
    assert make_engine(workers=3).name == "dask, 3 local workers"
    with pytest.raises(ValueError, match="exclude each other"):
        make_engine("tcp://a:1", 2)
    with pytest.raises(ValueError, match="at least 1"):
        make_engine(workers=0)
