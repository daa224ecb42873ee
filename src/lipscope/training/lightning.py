"""``LipschitzCallback`` for Lightning: σ in the loggers of the ``Trainer``, thresholds through its own switches.

    Trainer(callbacks=[LipschitzCallback(every=100)])

What is read goes to every logger of the Trainer, and into ``trainer.callback_metrics``, where checkpoints and early stopping
find it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipscope.training.monitor import Monitor
from lipscope.training.readings import JointDecision, Record

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise ImportError("the Lightning callback needs lightning: pip install 'lipscope[train]'") from error

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn


class LipschitzCallback(Callback):
    """Measures σ every k optimiser steps of a Lightning ``Trainer``, and once when it only validates or tests.

    Args:
        every: measure at the first step and at multiples of this.
        model: the module to watch; by default the one transformers model inside the ``LightningModule``, else that itself.
        **options: those of ``lipscope.training.Monitor``: ``probe``, ``heads``, ``layers``, ``thresholds``, …

    Attributes:
        monitor: the ``Monitor`` at work.
        records: what was measured so far.

    A threshold with action ``save`` writes ``lipscope-step=N.ckpt`` below the Trainer's ``default_root_dir``, one with
    ``stop`` ends training. In a distributed run the first process measures and decides for all, at multiples of ``every``.
    """

    def __init__(self, every: int = 100, *, model: nn.Module | None = None, **options: Any) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._options = {"every": every, **options}
        self._model = model
        self.monitor: Monitor | None = None
        self.records: list[Record] = []
        self._decision = JointDecision()
        self._last = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch the model from the beginning, so that its first batch becomes the probe."""
        if trainer.is_global_zero:
            self.monitor = Monitor(pl_module if self._model is None else self._model, **self._options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count optimiser steps from here on, also in a resumed training."""
        self._last = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After every batch; nothing happens before the optimiser has stepped."""
        step = trainer.global_step
        if step == self._last:
            return
        self._last = step
        record = None if self.monitor is None else self.monitor.step(batch, step=step)
        if record is not None and record.readings:
            self._log(trainer, pl_module, record)
        due = step % int(self._options["every"]) == 0
        save, stop = self._decision.take(record, joint=trainer.world_size > 1, due=due)
        if save:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / f"lipscope-step={step}.ckpt")
        trainer.should_stop = trainer.should_stop or stop

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation without training: one measurement on the first batch."""
        self._evaluated(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """One measurement on the first batch."""
        self._evaluated(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the hooks off the model."""
        if self.monitor is not None:
            self.monitor.close()

    def _evaluated(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" or self.monitor is None:
            return
        record = self.monitor.measure(step=trainer.global_step)
        if record.readings:
            self._log(trainer, None, record)

    def _log(self, trainer: Trainer, pl_module: LightningModule | None, record: Record) -> None:
        self.records.append(record)
        values = record.scalars()
        # Not through log_dict alone: it reaches the loggers every log_every_n_steps steps only.
        for logger in trainer.loggers:
            logger.log_metrics(values, step=record.step)
        if pl_module is not None:
            pl_module.log_dict(values, logger=False, on_step=True, on_epoch=False)
