"""``LipschitzCallback`` for Lightning: σ in the loggers of the ``Trainer``, thresholds through its own switches.

    Trainer(callbacks=[LipschitzCallback(every=100)])

What is read goes to every logger of the Trainer, and into ``trainer.callback_metrics``, where checkpoints and early stopping
find it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipscope.training.callbacks import Clipping, Following, Watching

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise ImportError("the Lightning callback needs lightning: pip install 'lipscope[train]'") from error

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn


class _Following(Following, Callback):
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count optimiser steps from here on, also in a resumed training."""
        self._last = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After every batch; nothing happens before the optimiser has stepped."""
        step = trainer.global_step
        record, save, stop = self.after_step(step, joint=trainer.world_size > 1, batch=batch)
        if record is not None:
            _log(trainer, pl_module, record.scalars(), step)
        if save:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / f"lipscope-step={step}.ckpt")
        trainer.should_stop = trainer.should_stop or stop

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the hooks off the model."""
        self._finish()


class LipschitzCallback(Watching, _Following):
    """Measures σ every k optimiser steps of a Lightning ``Trainer``, and once when it only validates or tests.

    Args:
        every: measure at the first step and at multiples of this.
        model: the module to watch; by default the one transformers model inside the ``LightningModule``, else that itself.
        **options: those of ``lipscope.training.Monitor``: ``probe``, ``heads``, ``layers``, ``thresholds``, …

    Attributes:
        monitor: the ``Monitor`` at work.
        records: what was measured so far.

    A threshold with action ``save`` writes ``lipscope-step=N.ckpt`` below the Trainer's ``default_root_dir``, one with
    ``stop`` ends training. In a distributed run the first process measures, and all act at multiples of ``every`` on what
    any of them asks for.
    """

    def __init__(self, every: int = 100, *, model: nn.Module | None = None, **options: Any) -> None:
        super().__init__(every, options)
        self._model = model

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Watch the model from the beginning, so that its first batch becomes the probe."""
        self.attach(pl_module if self._model is None else self._model, first=trainer.is_global_zero)

    # Not through state_dict: Lightning refuses two callbacks of one kind that have one.
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the probe and where thresholds stand."""
        if self.monitor is not None:
            checkpoint.setdefault("lipscope", {})[self.key] = self.monitor.state_dict()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on with the probe and the thresholds of a checkpoint."""
        saved = checkpoint.get("lipscope", {}).get(self.key)
        if self.monitor is not None and saved is not None:
            self.monitor.load_state_dict(saved)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation or test without training: one measurement on the first batch."""
        if trainer.state.fn != "fit" and (record := self._outside_training(trainer.global_step)) is not None:
            _log(trainer, None, record.scalars(), record.step)

    on_test_end = on_validation_end


class QKClipCallback(Clipping, _Following):
    """Holds logits at most ``tau`` while a Lightning ``Trainer`` fits, by rescaling W_Q and W_K; see ``QKClip``.

    Args:
        tau: what no logit may exceed.
        model: the module to hold; by default the one transformers model inside the ``LightningModule``.
        **options: those of ``lipscope.training.QKClip``: ``every``, ``layers``, ``inputs``, ``tokens``, ``part``, ``base``.

    Attributes:
        records: what was rescaled so far.
    """

    def __init__(self, tau: float, *, model: nn.Module | None = None, **options: Any) -> None:
        super().__init__(tau, options)
        self._model = model

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse now what cannot be rescaled."""
        self.start(pl_module if self._model is None else self._model, trainer.world_size)


def _log(trainer: Trainer, pl_module: LightningModule | None, values: dict[str, float], step: int) -> None:
    # Not through log_dict alone: it reaches the loggers every log_every_n_steps steps only.
    for logger in trainer.loggers:
        logger.log_metrics(values, step=step)
    if pl_module is not None:
        pl_module.log_dict(values, logger=False, on_step=True, on_epoch=False)
