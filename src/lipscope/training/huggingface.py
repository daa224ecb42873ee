"""``LipschitzCallback`` for the Hugging Face ``Trainer``: σ in the Trainer's own logs, thresholds through its control.

    Trainer(model, args, train_dataset=data, callbacks=[LipschitzCallback(every=100)])

What is read goes through ``Trainer.log``, hence to TensorBoard, W&B, MLflow, Trackio, the progress bar and
``state.log_history`` alike. Where ``report_to`` names Trackio, alarms go to ``trackio.alert`` as well.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, cast

from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from lipscope.training.callbacks import Clipping, Watching
from lipscope.training.readings import Alarm


class LipschitzCallback(Watching, TrainerCallback):
    """Measures σ every k optimiser steps of a ``Trainer``, and once when it only evaluates.

    Args:
        every: measure at the first step and at multiples of this.
        **options: those of ``lipscope.training.Monitor``: ``probe``, ``heads``, ``layers``, ``thresholds``, …

    Attributes:
        monitor: the ``Monitor`` at work, once the Trainer has a model.
        records: what was measured so far.

    A threshold with action ``save`` asks the Trainer for a checkpoint, one with ``stop`` for the end of training. In a
    distributed run the first process measures, and all act at multiples of ``every`` on what any of them asks for.
    """

    def __init__(self, every: int = 100, **options: Any) -> None:
        super().__init__(every, options)
        self._training = False
        self._watched: nn.Module | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Watch the model from the beginning, so that its first batch becomes the probe."""
        self._watch(state, kwargs.get("model"))

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Watch the model that is trained; in a resumed training, go on with its probe and thresholds."""
        self._training, self._last = True, None
        self._watch(state, kwargs.get("model"))
        if self.monitor is not None and (saved := _kept(state).get(self.key)) is not None:
            self.monitor.load_state_dict(saved)
        if self.monitor is not None and "trackio" in (args.report_to or ()) and _alert not in self.monitor.on_alarm:
            self.monitor.on_alarm.append(_alert)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After every optimiser step (not after every batch of an accumulated one)."""
        record, save, stop = self.after_step(state.global_step, joint=args.world_size > 1)
        if record is not None:
            _log(record.scalars(), control)
        if self.monitor is not None and (record is not None or save or stop):
            _kept(state)[self.key] = self.monitor.state_dict()
        control.should_save = control.should_save or save
        control.should_training_stop = control.should_training_stop or stop

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Evaluation without training: one measurement on the first batch that was evaluated."""
        if not self._training and (record := self._outside_training(state.global_step)) is not None:
            _log(record.scalars(), control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the hooks off the model."""
        self._training = False
        self._finish()

    def _watch(self, state: TrainerState, model: nn.Module | None) -> None:
        if model is None:
            return
        # A second call of train() begins with new hooks; one that switched itself off stays off.
        again = self.monitor is not None and self.monitor.closed and self.monitor.reason is None
        if self._watched is not model or again:
            self._watched = model
            self.attach(model, first=state.is_world_process_zero)


class QKClipCallback(Clipping, TrainerCallback):
    """Holds logits at most ``tau`` while a ``Trainer`` trains, by rescaling W_Q and W_K; see ``lipscope.training.QKClip``.

    Args:
        tau: what no logit may exceed.
        **options: those of ``QKClip``: ``every``, ``layers``, ``inputs``, ``tokens``, ``part``, ``base``.

    Attributes:
        records: what was rescaled so far.
    """

    def __init__(self, tau: float, **options: Any) -> None:
        super().__init__(tau, options)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuse now what cannot be rescaled."""
        self.start(kwargs["model"], args.world_size)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """After every optimiser step."""
        record, *_ = self.after_step(state.global_step, joint=False)
        if record is not None:
            _log(record.scalars(), control)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the hook off the model."""
        self._finish()


def _kept(state: TrainerState) -> dict[str, Any]:
    """What the Trainer writes into its checkpoints for callbacks, by name: a list only while it is made."""
    return cast("dict[str, Any]", state.stateful_callbacks)


def _alert(alarm: Alarm) -> None:
    # Older versions have no alerts.
    if alert := getattr(importlib.import_module("trackio"), "alert", None):
        alert(title=f"lipscope: {alarm.threshold.describe()}", text=alarm.message)


def _log(values: dict[str, float], control: TrainerControl) -> None:
    trainer = _calling_trainer()
    if trainer is not None:
        # Logging takes the wish to log back; the Trainer's own row of this step is still to come. Not through a method of
        # a subclass: those of TRL would put what they have counted for that row into this one.
        wanted = control.should_log
        Trainer.log(trainer, values)
        control.should_log = wanted


def _calling_trainer() -> Trainer | None:
    """The Trainer whose event this is: it hands its callbacks the model and the data, but not its loggers."""
    frame = inspect.currentframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer):
            return owner
        frame = frame.f_back
    return None
