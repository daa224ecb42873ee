"""One of two processes that decide together, in a file of its own: a process that is started imports what it runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch

from lipscope.training.readings import JointDecision


def decide(rank: int, meeting: str, found: str) -> None:
    """Only the first process has anything to ask for."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    decision, wish = JointDecision(), SimpleNamespace(save=True, stop=False)
    took = [decision.take(wish if rank == 0 and step == 1 else None, joint=True, due=step % 2 == 0) for step in range(1, 5)]
    Path(found, str(rank)).write_text(json.dumps(took))
    torch.distributed.destroy_process_group()
