"""Checkpoints and stops that thresholds ask for: the first process decides, and all of them act together."""

from __future__ import annotations

import torch

from lipscope.training.readings import Record


class JointDecision:
    """What a training is asked to do after a step.

    Processes that exchange messages must all know when. That is at multiples of ``every``; what is asked for in between
    waits until then. A single process acts at once.
    """

    def __init__(self) -> None:
        self._save = self._stop = False

    def take(self, record: Record | None, *, joint: bool, due: bool) -> tuple[bool, bool]:
        """Whether to save and whether to stop now.

        Args:
            record: what this step found; None where another process measures.
            joint: whether there are several processes.
            due: whether all of them take part at this step.
        """
        if record is not None:
            self._save, self._stop = self._save or record.save, self._stop or record.stop
        if joint and not due:
            return False, False
        decision = self._save, self._stop
        self._save = self._stop = False
        return agreed(*decision) if joint else decision


def agreed(save: bool, stop: bool) -> tuple[bool, bool]:
    """What the first process decided, in all of them."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return save, stop
    decision = [(save, stop)]
    torch.distributed.broadcast_object_list(decision, src=0)
    return decision[0]
