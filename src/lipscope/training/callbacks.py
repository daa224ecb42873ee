"""What the callbacks of all frameworks share: options that are refused when they are given, and steps that count once."""

from __future__ import annotations

from typing import Any

from lipscope.doors import refuse_options
from lipscope.training.monitor import Monitor, check_options
from lipscope.training.qk_clip import QKClip, check_clip
from lipscope.training.readings import ALARM, JointDecision


class Following:
    """One ``Monitor`` or ``QKClip`` at a time, what it found, and what the processes of a training decide together."""

    _finds = "readings"

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self.records: list[Any] = []
        self._at_work: Any = None
        self._decision = JointDecision()
        self._last: int | None = None

    def after_step(self, step: int, *, joint: bool, batch: Any = None) -> tuple[Any, bool, bool]:
        """What was found after a step, and whether to save and to stop. A callback that was attached twice acts once."""
        if step == self._last:
            return None, False, False
        self._last = step
        record = None if self._at_work is None else self._at_work.step(batch, step=step)
        due = step % self._options.get("every", 1) == 0
        record, save, stop = self._decision.take(record, joint=joint, due=due)
        return self._kept(record), save, stop

    def _kept(self, record: Any) -> Any:
        """The record where something was found."""
        if record is None or not getattr(record, self._finds):
            return None
        self.records.append(record)
        return record

    def _finish(self) -> None:
        """Take the hooks off the model."""
        if self._at_work is not None:
            self._at_work.close()


class Watching(Following):
    """Measures σ; the ``monitor`` stays to be asked when training is over."""

    def __init__(self, every: int, options: dict[str, Any]) -> None:
        refuse_options(Monitor, {"every": every, **options})
        check_options(every=every, **options)
        super().__init__({"every": every, **options})
        lines = ", ".join(line.describe() for line in options.get("thresholds", ALARM))
        self.key = f"lipscope monitor ({lines})"  # what a checkpoint keeps its state under

    @property
    def monitor(self) -> Monitor | None:
        """The ``Monitor`` at work, once there is a model."""
        found: Monitor | None = self._at_work
        return found

    def attach(self, model: Any, *, first: bool) -> None:
        """Put a monitor on the model; only the first process measures and writes, all read the backward bound."""
        self._finish()
        options = self._options if first else self._options | {"csv": None, "writer": None}
        self._at_work = Monitor(model, **options, measures=first)

    def _outside_training(self, step: int) -> Any:
        return None if self.monitor is None else self._kept(self.monitor.measure(step=step))


class Clipping(Following):
    """Rescales queries and keys, for what the model was called with last."""

    _finds = "heads"

    def __init__(self, tau: float, options: dict[str, Any]) -> None:
        refuse_options(QKClip, {"tau": tau, **options})
        check_clip(tau, **options)
        super().__init__({"tau": tau, **options})

    def start(self, model: Any, processes: int) -> None:
        """Attach to the model; refuses now what cannot be rescaled."""
        if processes > 1:
            raise ValueError("QKClip works in one process: several would rescale their copies of the weights differently")
        self._finish()
        self._at_work, self._last = QKClip(model, **self._options), None

    def after_step(self, step: int, *, joint: bool, batch: Any = None) -> tuple[Any, bool, bool]:
        """As of every callback; the batch is not looked at."""
        return super().after_step(step, joint=joint)
