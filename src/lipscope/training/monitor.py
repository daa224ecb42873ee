"""``Monitor``: σ of every attention layer while a model trains, at a cost one does not notice.

Every k steps σ is measured on a small probe batch, as an interval, together with the largest logit, the entropy and the
attention on the first token. In between, the logits are looked at, and the backward pass gives a lower bound for free.
Training is not disturbed: its weights are the same bits with and without the monitor. Nor is it ever stopped by a mistake in
here: the monitor switches itself off, with one warning that says why.

Weights move little in k steps, so the top singular vectors of the last measurement are nearly those of this one. They
enter the start of the next solve, mixed with a random direction, which keeps the interval valid (see
``spectral.bidiagonalisation``).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.doors import at_least
from lipscope.measure.scopes import CROSS_SCOPES
from lipscope.measure.scopes import SCOPES as MODEL_SCOPES
from lipscope.models.capture import NotFiniteError
from lipscope.models.model import Model
from lipscope.models.recorded import Recorded
from lipscope.models.refusals import backbone
from lipscope.runs.writing import csv_lines, open_log, refuse_special
from lipscope.spectral.golub_kahan import GolubKahan
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SolverOutput
from lipscope.spectral.solvers import Solver
from lipscope.training.attach import (
    OwnHook,
    adapters,
    named_arguments,
    probe_batch,
    undisturbed,
    unwrapped,
    without_adapters,
)
from lipscope.training.backward_bound import LayerGain, paused, watched_layers
from lipscope.training.readings import ALARM, COLUMNS, Alarm, Guard, Reading, Record, Threshold, read_layer

# Seeds between two measurements: one solve may use as many as it has steps.
_STRIDE = 100_003


class WarmStart:
    """A solver that starts each problem of a measurement where it ended on the same problem of the last measurement."""

    def __init__(self, config: GolubKahan) -> None:
        self.config = replace(config, k=1, vectors=True)
        self._known: dict[int, Tensor] = {}
        self._next = self._measurement = 0

    def begin(self) -> None:
        """A new measurement: its first problem is near the first one of the last measurement, and so on."""
        self._next = 0
        self._measurement += 1

    def solve(self, operator: Operator) -> SolverOutput:
        """Leading singular values of every item."""
        number, self._next = self._next, self._next + 1
        start = self._known.get(number)
        if start is not None and start.shape != (operator.batch, operator.shape[1]):
            start = None
        # Another random direction every time: the interval needs one that knows nothing of the start it is mixed with.
        output = replace(self.config, seed=self.config.seed + _STRIDE * self._measurement).solve(operator, start)
        assert output.right is not None
        self._known[number] = output.right[:, 0].clone()
        return output


SCOPES = tuple(scope for scope in MODEL_SCOPES if scope not in ("head", "model", *CROSS_SCOPES))
# Between two measurements of σ the logits are looked at so many times, for the alarm: one forward pass of the probe. But not
# at closer steps than in benchmarks/blowups, where the default line for their change per step was chosen.
LOOKS, LOOK_APART = 10, 5


class Monitor:
    """Watches σ of a model's attention layers while it trains.

    Args:
        model: the model, also compiled or data-parallel, or a module with a transformers model inside.
        probe: the probe batch: the model's arguments, token ids (B, n), or embedded tokens (B, n, d). By default the
            beginning of the first batch that the model sees.
        every: measure at the first step and whenever the number of the step is a multiple of this; thresholds on logits,
            entropy and sinks are looked at ten times as often, at most every 5 steps.
        heads: also measure every head.
        layers: which layers; by default all, or those with low-rank adapters where there are any.
        scope: attention, norm+attention, attention+residual or block.
        inputs: inputs of the probe batch to keep.
        tokens: tokens of each to keep.
        backward: read the free lower bound from backward passes, at steps of these looks, or always where a threshold is
            about it; with scope attention only, to which it belongs.
        thresholds: lines that must not be crossed, each with an action; by default those of ``readings.ALARM``, a warning
            when the largest logit is above 50 or grows by more than 1.6 a step. ``()`` for none.
        on_alarm: called with every ``Alarm``; what it raises is said, and training goes on.
        csv: a file that every measurement is appended to.
        writer: a TensorBoard ``SummaryWriter``, or what has its ``add_scalar``, that every measurement is written to.
        part: ``"encoder"`` of an encoder–decoder model.
        solver: accuracy of σ; by default 1 % with an interval of at most 25 %.
        measures: whether σ is measured; in all processes of a training but the first only the backward bound is read.

    Attributes:
        reason: why the monitor has switched itself off, or None.
        notes: what it cannot do for this model.
        closed: whether its hooks are off the model.

    Example:
        >>> import torch, lipscope
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        >>> monitor = lipscope.training.Monitor(layer, every=10)
        >>> x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
        >>> layer(x).square().sum().backward()
        >>> record = monitor.step()
        >>> reading = record.readings[0]
        >>> reading.lower <= reading.estimate <= reading.upper, 0 < record.backward[0]
        (True, True)
        >>> monitor.close()
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        probe: Any = None,
        every: int = 100,
        heads: bool = False,
        layers: Sequence[int] | None = None,
        scope: str = "attention",
        inputs: int = 2,
        tokens: int = 64,
        backward: bool = True,
        thresholds: Sequence[Threshold] = ALARM,
        on_alarm: Callable[[Alarm], object] | Sequence[Callable[[Alarm], object]] = (),
        csv: str | os.PathLike[str] | None = None,
        writer: Any = None,
        part: str | None = None,
        solver: GolubKahan | None = None,
        measures: bool = True,
    ) -> None:
        check_options(every=every, inputs=inputs, tokens=tokens, scope=scope, thresholds=thresholds)
        self.on_alarm = [on_alarm] if callable(on_alarm) else list(on_alarm)
        self.every, self.heads, self.layers, self.scope = every, heads, layers, scope
        self.inputs, self.tokens, self.part, self.writer, self.backward = inputs, tokens, part, writer, backward
        self.measures = measures
        self.csv = None if csv is None else _checked_csv(Path(csv))
        self.reason: str | None = None
        self.notes: list[str] = []
        self.steps = 0
        self.closed = False
        self._guard = Guard(thresholds)
        self._looks = bool(self._guard.looks)
        self._always = any(line.quantity == "backward" for line in thresholds)
        self._batch: Any = probe
        self._handle: Model | None = None
        self._probe: dict[str, Tensor] | None = None
        self._solver = WarmStart(solver or GolubKahan(rtol=1e-2, interval=0.25))
        self._gains: list[LayerGain] = []
        self._peak: dict[int, float] = {}
        self._measured = False
        self._base: dict[str, float] | None = None
        self._earlier: dict[str, tuple[int, float]] = {}
        self._call: Any = None  # arguments of the model's first call
        self._capture: Any = None
        try:
            self.model, self._compiled = unwrapped(model)
            self._prepare()
            if probe is None and measures:
                # The inputs of the model's first call become the probe batch.
                hook = OwnHook(self.model, self._keep_batch, compilable=True)
                self._capture = self.model.register_forward_pre_hook(hook, with_kwargs=True)
        except Exception as error:
            self.model = model
            self.switch_off(error)

    def _prepare(self) -> None:
        """Find the attention layers and put the hooks of the backward bound on."""
        with undisturbed(self.model), paused():
            self._handle = handle = Model(self.model, part=self.part)
            self._chosen = handle.check_layers(self.layers, self.scope)
            if self.layers is None and (adapted := set(adapters(handle.model))):
                # The others keep their weights.
                self._chosen = [i for i in self._chosen if adapted & {*handle.layer(i).host.modules()}] or self._chosen
            if not self.backward:
                return
            if self._compiled:
                self.notes.append("no backward bound: the model is compiled, and compiled code does not call hooks")
            elif self.scope != "attention":
                # ‖Jᵀg‖/‖g‖ is read at attention itself, and says nothing about maps with a norm or a residual path.
                self.notes.append(f"no backward bound: it is for scope attention, and σ is measured for scope {self.scope}")
            else:
                self._gains = watched_layers(handle, backbone(self.model, self.part), self._chosen, self.switch_off)
                watched = {gain.index for gain in self._gains}
                if without := [str(index) for index in self._chosen if index not in watched]:
                    self.notes.append(
                        f"no backward bound for layers {', '.join(without)}: what comes through attention cannot be told "
                        "from the rest of the gradient there"
                    )

    def step(self, batch: Any = None, *, step: int | None = None) -> Record:
        """Call it after every optimiser step.

        Args:
            batch: the batch of this step; it is only looked at when there is no probe batch yet.
            step: number of the step; counted from 1 by default.

        Returns:
            The backward bounds of the step and, every k steps, the readings. Never raises.
        """
        self.steps = self.steps + 1 if step is None else step
        first = not self._measured
        measured = first or self.steps % self.every == 0
        between = min(self.every, max(LOOK_APART, self.every // LOOKS))
        record = self._record(batch, measured=measured, look=self._looks and self.steps % between == 0)
        for gain in self._gains:
            gain.watching = self._always or (self.steps + 1) % between == 0
        if first and self._gains and not record.backward:
            self.notes.append("no backward bound: no gradient has come (compiled since, or all below is frozen?)")
        return record

    def measure(self, batch: Any = None, *, step: int | None = None) -> Record:
        """Measure now, in training or not; see ``step``."""
        self.steps = self.steps if step is None else step
        return self._record(batch, measured=True, look=True)

    def backward_gains(self) -> dict[int, float]:
        """By layer, the largest ‖dL/dx‖/‖dL/dy‖ of the backward passes since this was last asked; see ``backward_bound``."""
        found = {gain.index: value for gain in self._gains if (value := gain.collect()) is not None}
        # One transfer from the device for all layers.
        return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True)) if found else {}

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training needs to go on alike, as JSON values: the probe's ids, thresholds, last readings."""
        probe = self._probe or {}
        ids = {name: value.tolist() for name, value in probe.items() if not value.is_floating_point()}
        whole = len(ids) == len(probe)
        return {"probe": ids if whole else {}, "thresholds": self._guard.state, "earlier": self._earlier}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``; what cannot be read is said, and left out."""
        try:
            if state["probe"] and self._probe is None:
                self._batch = {name: torch.tensor(ids) for name, ids in state["probe"].items()}
                self._uncapture()
            for name, known in self._guard.state.items():
                known |= {str(key): int(step) for key, step in state["thresholds"][name].items()}
            self._earlier = {
                str(name): (int(step), float(value)) for name, (step, value) in state.get("earlier", {}).items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            say(f"lipscope.training: the monitor's state in the checkpoint cannot be read, it starts anew: {error!r}")

    @property
    def probe_batch(self) -> Any:
        """What σ is measured on: the batch as it came, and cut to the probe's size once measured; None before it came."""
        if self._probe is not None:
            return self._probe
        return named_arguments(self.model, *self._call) if self._batch is None and self._call is not None else self._batch

    def __repr__(self) -> str:
        state = self.reason or ("closed" if self.closed else f"every {self.every} steps, {self.steps} seen")
        return f"<Monitor of {type(self.model).__name__}, scope {self.scope}: {state}>"

    def close(self) -> None:
        """Take all hooks off the model."""
        self.closed = True
        for gain in self._gains:
            gain.remove()
        self._gains = []
        self._uncapture()

    def _uncapture(self) -> None:
        if self._capture is not None:
            self._capture.remove()
            self._capture = self._call = None

    def switch_off(self, error: Exception) -> None:
        """Stop watching, once and for all, and say why."""
        if self.reason is not None:
            return
        self.reason = " ".join(str(error).split()) or type(error).__name__
        self.close()
        say(f"lipscope.training has switched itself off, training goes on without it: {self.reason}")

    def _record(self, batch: Any, *, measured: bool, look: bool) -> Record:
        if self.reason is not None:
            return Record(self.steps, scope=self.scope)
        try:
            backward = self.backward_gains()
            for layer, gain in backward.items():
                self._peak[layer] = max(gain, self._peak.get(layer, 0.0))
            readings = self._readings(batch, measured) if (measured or look) and self.measures else ()
            record = Record(self.steps, readings, backward, dict(self._peak), scope=self.scope)
            record = replace(record, alarms=self._tell(self._guard.check(record)))
            if not measured:
                return replace(record, readings=())
            if not self._measured and self.measures:
                self._say_what_is_not_there(readings)
            self._measured, self._peak = True, {}
            self._write(record)
            return record
        except Exception as error:
            alarms = self._tell(self._guard.lost(error.layer, self.steps)) if isinstance(error, NotFiniteError) else ()
            self.switch_off(error)
            return Record(self.steps, alarms=alarms, scope=self.scope)

    def _tell(self, alarms: tuple[Alarm, ...]) -> tuple[Alarm, ...]:
        for words in self._guard.warnings(alarms, self.steps):
            say(f"lipscope.training, step {self.steps}: {words}")
        for alarm, told in ((alarm, told) for alarm in alarms for told in self.on_alarm):
            try:
                told(alarm)
            except Exception as error:
                say(f"lipscope.training: on_alarm failed: {error}")
        return alarms

    def _say_what_is_not_there(self, readings: tuple[Reading, ...]) -> None:
        """Thresholds that can never be crossed, since the model does not show what they are about."""
        self._looks = any(reading.max_logit is not None for reading in readings) and self._looks
        if self._guard.looks and not self._looks:
            say(
                "lipscope.training: this model keeps its logits to itself, so thresholds on "
                f"{', '.join(self._guard.looks)} say nothing; σ is measured: give Threshold('sigma', above=…)"
            )

    def _readings(self, batch: Any, measured: bool) -> tuple[Reading, ...]:
        handle = self._handle
        assert handle is not None
        with undisturbed(self.model), paused():
            if self._probe is None:
                given = batch if self.probe_batch is None else self.probe_batch
                if given is None:
                    raise ValueError("there is no probe batch: the model has not run yet; give probe=… or step(batch)")
                self._probe, self._batch = probe_batch(handle, given, self.inputs, self.tokens), None
                self._uncapture()
            self._follow_weights(handle)
            recorded = handle.record(self._probe, fresh=True)
            if not measured:
                return tuple(map(self._beside_earlier, self._read(recorded, None)))
            self._solver.begin()
            readings = self._read(recorded, self._solver)
            if self._base is None:
                # Once: the base model does not change.
                self._base = {}
                if adapters(handle.model):
                    with without_adapters(handle.model):
                        found = self._read(handle.record(self._probe, fresh=True), self._solver.config)
                    self._base = {reading.name: reading.estimate for reading in found if reading.estimate is not None}
            return tuple(map(self._beside_earlier, readings))

    def _read(self, recorded: Recorded, solver: Solver | None) -> list[Reading]:
        layers = (read_layer(recorded[index], self.scope, self.heads, solver) for index in self._chosen)
        return [reading for layer in layers for reading in layer]

    def _beside_earlier(self, reading: Reading) -> Reading:
        """The reading with what has changed since the one before, and beside the base model."""
        changes = [
            self._change(f"{reading.name}/{name}", value)
            for name, value in (("sigma", reading.estimate), ("logit", reading.max_logit))
        ]
        base = (self._base or {}).get(reading.name)
        return replace(reading, sigma_change=changes[0], logit_change=changes[1], sigma_base=base)

    def _change(self, name: str, value: float | None) -> float | None:
        """Per step since the same was read before."""
        before = self._earlier.get(name, (self.steps, 0.0))
        if value is None:
            return None
        self._earlier[name] = self.steps, value
        return (value - before[1]) / (self.steps - before[0]) if self.steps > before[0] else None

    def _follow_weights(self, handle: Model) -> None:
        """Half-precision weights are measured in a float32 copy, which follows them."""
        live = backbone(self.model, self.part)
        if handle.model is live:
            return
        with torch.no_grad():
            for tensors in (nn.Module.parameters, nn.Module.buffers):
                for copied, current in zip(tensors(handle.model), tensors(live), strict=True):
                    copied.copy_(current)

    def _keep_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._call is None:
            self._call = args, kwargs

    def _write(self, record: Record) -> None:
        if self.writer is not None:
            for tag, value in record.scalars().items():
                self.writer.add_scalar(tag, value, record.step)
        if self.csv is not None:
            new = not self.csv.exists()
            with open_log(self.csv) as file:
                rows = [[row.get(name) for name in COLUMNS] for row in record.rows()]
                file.write(csv_lines([COLUMNS, *rows] if new else rows))


def _checked_csv(path: Path) -> Path:
    """Measurements are appended, so that a resumed training goes on in the same file; other files are left alone."""
    if refuse_special(path).exists():
        with path.open(encoding="utf-8") as file:
            header = file.readline().strip()
        if header != ",".join(COLUMNS):
            raise ValueError(f"csv={str(path)!r} exists and is no file of this monitor: its first line is {header[:80]!r}")
    elif not path.parent.is_dir():
        raise ValueError(f"csv={str(path)!r} cannot be written: there is no directory {str(path.parent)!r}")
    return path


def check_options(
    *, every: int, inputs: int = 2, tokens: int = 64, scope: str = "attention", thresholds: Sequence[Any] = (), **_: Any
) -> None:
    """Refuse what a ``Monitor`` refuses, where it is said: not when training starts."""
    at_least(1, every=every, inputs=inputs, tokens=tokens)
    if scope not in SCOPES:
        raise ValueError(f"scope must be one of {', '.join(SCOPES)}, got {scope!r} (heads=True measures heads)")
    if scope != "attention" and any(getattr(line, "quantity", None) == "backward" for line in thresholds):
        raise ValueError(f"a threshold on backward needs scope attention, to which that bound belongs, got {scope!r}")
    Guard(thresholds)


def say(message: str) -> None:
    """A warning, also where warnings are errors: training must not stop for it."""
    try:
        warnings.warn(message, UserWarning, stacklevel=4)
    except UserWarning:
        logging.getLogger("lipscope.training").warning(message)
