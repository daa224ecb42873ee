"""A program of its own: two processes that decide together, the second one forked from the first.

    python joint_decision.py DIRECTORY

Each writes what it took at four steps into a file of the directory that is called like its rank. This program is none of
pytest's, whose threads must not be forked, and forked because two programs would import torch twice.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from lipscope.training.readings import JointDecision


def decide(rank: int, directory: Path) -> None:
    """Only the first process has anything to ask for."""
    meeting = f"file://{directory / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    decision, wish = JointDecision(), SimpleNamespace(save=True, stop=False)
    took = [decision.take(wish if rank == 0 and step == 1 else None, joint=True, due=step % 2 == 0) for step in range(1, 5)]
    (directory / str(rank)).write_text(json.dumps(took), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    second = os.fork()
    decide(0 if second else 1, Path(sys.argv[1]))
    if second and os.waitpid(second, 0)[1]:
        raise SystemExit("the second process failed")
