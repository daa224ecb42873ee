"""What the callbacks of all frameworks share: options that are refused when they are given, and steps that count once."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lipscope.training.monitor import Monitor, check_options
from lipscope.training.qk_clip import ClipRecord, QKClip, check_clip
from lipscope.training.readings import JointDecision, Record


class Watching:
    """One ``Monitor`` at a time, what it measured, and what the processes of a training decide together."""

    def __init__(self, every: int, options: Mapping[str, Any]) -> None:
        unknown = set(options) - set(inspect.signature(Monitor).parameters)
        if unknown:
            raise TypeError(f"{min(unknown)!r} is no option of lipscope.training.Monitor")
        check_options(every=every, **options)
        self._options: dict[str, Any] = {"every": every, **options}
        self.monitor: Monitor | None = None
        self.records: list[Record] = []
        self._decision = JointDecision()
        self._last: int | None = None

    def _after(self, step: int, *, joint: bool, batch: Any = None) -> tuple[Record | None, bool, bool]:
        """What was measured after a step, and whether to save and to stop. A callback that was attached twice acts once."""
        if step == self._last:
            return None, False, False
        self._last = step
        record = None if self.monitor is None else self.monitor.step(batch, step=step)
        return self._kept(record), *self._decision.take(record, joint=joint, due=step % int(self._options["every"]) == 0)

    def _outside_training(self, step: int) -> Record | None:
        return None if self.monitor is None else self._kept(self.monitor.measure(step=step))

    def _kept(self, record: Record | None) -> Record | None:
        """The record where something was measured."""
        if record is None or not record.readings:
            return None
        self.records.append(record)
        return record


class Clipping:
    """One ``QKClip`` at a time, and what it did."""

    def __init__(self, tau: float, options: Mapping[str, Any]) -> None:
        check_clip(tau, **options)
        self._tau, self._options = tau, dict(options)
        self.clip: QKClip | None = None
        self.records: list[ClipRecord] = []
        self._last: int | None = None

    def start(self, model: Any, processes: int) -> None:
        """Attach to the model, or to another one than before."""
        if processes > 1:
            raise ValueError("QKClip works in one process: several would rescale their copies of the weights differently")
        if self.clip is None or self.clip.model is not model:
            self._finish()
            self.clip = QKClip(model, self._tau, **self._options)

    def _after(self, step: int, batch: Any = None) -> ClipRecord | None:
        """What was rescaled after a step, None when nothing was."""
        if self.clip is None or step == self._last:
            return None
        self._last = step
        record = self.clip.step(batch, step=step)
        if not record.heads:
            return None
        self.records.append(record)
        return record

    def _finish(self) -> None:
        if self.clip is not None:
            self.clip.close()
        self.clip = self._last = None
