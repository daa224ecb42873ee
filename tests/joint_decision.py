"""A program of its own: a training in two processes that is watched, the second one forked from the first.

    python joint_decision.py DIRECTORY

Each writes what it saw into a file of the directory that is called like its rank. This program is none of pytest's, whose
threads must not be forked, and forked because two programs would import torch twice.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from lipscope.training import Monitor, QKClip, Threshold
from lipscope.training.callbacks import Watching


def gpt2() -> GPT2LMHeadModel:
    """The same small model in both processes."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=20, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        initializer_range=0.5, bos_token_id=0, eos_token_id=0,
    ))  # fmt: skip


def step(model: Any, ids: torch.Tensor) -> float:
    """One step of plain gradient descent."""
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.01 * p.grad
            p.grad = None
    return float(loss)


def data_parallel(rank: int, ids: torch.Tensor) -> dict[str, Any]:
    """Three steps, a reading at the first and at the second; only the second process has a line that it crosses."""
    model = DistributedDataParallel(gpt2())
    line = Threshold("backward", above=0.0 if rank else 1e9, action="stop", layers=[0])
    callback = Watching(every=2, options={"thresholds": [line]})
    callback.attach(model, first=rank == 0)
    alone, messages, own = Monitor(model, measures=False), {"all_reduce": 0, "broadcast": 0, "all_gather": 0}, {}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            messages[name] += 1
            return function(*args, **kwargs)

        return call

    for name in messages:
        setattr(distributed, name, counted(name, getattr(distributed, name)))
    decisions, records = [], []
    for number in range(1, 4):
        step(model, ids)
        own[number] = alone.backward_gains()
        record, *decision = callback.after_step(number, joint=True)
        decisions.append(decision)
        records += [record] if record is not None else []
    found = callback.monitor
    assert found is not None
    assert found.reason is None, found.reason
    reduced = records[-1].backward_peak if records else {}
    alarms = found.state_dict()["thresholds"]["beyond"]
    return {
        "decisions": decisions, "reductions": messages.pop("all_reduce"), "other messages": sum(messages.values()),
        "measured": len(records), "reduced": reduced, "own": own[2], "own alarms": len(alarms),
    }  # fmt: skip


def sharded(ids: torch.Tensor) -> dict[str, Any]:
    """Weights that no process has whole (FSDP2)."""
    model = gpt2()
    for block in model.transformer.h:
        fully_shard(block)
    fully_shard(model)
    monitor = Monitor(model, every=1)
    try:
        QKClip(model, 1.0)
        clip = "accepted"
    except ValueError as error:
        clip = str(error)
    before = step(model, ids)
    monitor.step()
    return {"sharded monitor": monitor.reason, "sharded clip": clip, "sharded loss before": before,
            "sharded loss after": step(model, ids)}  # fmt: skip


def watch(rank: int, directory: Path) -> None:
    """One process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    meeting = f"file://{directory / 'meeting'}"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    ids = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(rank))
    found = data_parallel(rank, ids) | sharded(ids)
    (directory / str(rank)).write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    second = os.fork()
    watch(0 if second else 1, Path(sys.argv[1]))
    if second and os.waitpid(second, 0)[1]:
        raise SystemExit("the second process failed")
