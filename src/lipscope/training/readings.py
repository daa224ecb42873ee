"""What the monitor reports: readings on the probe batch, the record of a step, and thresholds that must not be crossed.

When one is crossed there is a warning, a checkpoint, or a stop. σ is an interval: it counts as above a threshold when its
lower end is, and as below when its upper end is. Where several processes train together, the first one measures, each reads
the backward bound of its own batches, and all of them act at the same step on what any of them asks for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lipscope.models.recorded import RecordedLayer
from lipscope.rounding import interval, round_down, round_up
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Solver


@dataclass(frozen=True)
class Reading:
    """σ of one layer, or of one head, on the probe batch: the largest over its inputs."""

    layer: int
    head: int | None  # index of the head, or None for the whole layer
    # None where scores are so large that they leave no correct digits for σ: what follows is read all the same
    lower: float | None  # σ is at least this: a direction attains it
    estimate: float | None  # best estimate of σ
    upper: float | None  # σ is at most this, except with probability ``delta``
    delta: float | None  # failure probability of the upper end, None when it is exact
    # Largest visible logit, after scale, soft-cap and bias; None when the model does not show its queries
    max_logit: float | None
    entropy: float | None  # entropy of an attention row in nats, mean over rows (and heads)
    sink_mass: float | None  # attention on the first token and on sinks, mean over rows (and heads)
    iterations: int  # operator pairs (J, Jᵀ) spent, the most over the inputs
    sigma_change: float | None = None  # change of the estimate per step since the reading before, None at the first
    logit_change: float | None = None  # the same of the largest logit, since it was last looked at
    sigma_base: float | None = None  # estimate of σ without low-rank adapters, in the base model on the same probe
    logit_head: int | None = None  # of a whole layer, the head that has the largest logit

    @property
    def name(self) -> str:
        """``layer_2`` or ``layer_2/head_5``."""
        return f"layer_{self.layer}" + ("" if self.head is None else f"/head_{self.head}")


def read_layer(layer: RecordedLayer, scope: str, heads: bool, solver: Solver | None) -> list[Reading]:
    """σ of a layer and, if asked for, of its heads, and what attention looks like there; without a solver only that."""
    readings = [_reading(layer.index, None, _sigma(layer, scope, solver), slice(None), layer.statistics)]
    if heads:
        result = _sigma(layer, "head", solver)
        for h in range(layer.heads):
            of_head = {name: values[:, h : h + 1] for name, values in layer.statistics.items()}
            readings.append(_reading(layer.index, h, result, (slice(None), h), of_head))
    return readings


def _sigma(layer: RecordedLayer, scope: str, solver: Solver | None) -> SpectralNorm | None:
    """σ, unless scores are so large that they leave no digits for it: that is when the others are wanted most."""
    try:
        return None if solver is None else layer.sigma(scope, solver=solver, certificate=False)
    except FloatingPointError:
        if not layer.statistics:
            raise
        return None


def _reading(
    layer: int, head: int | None, result: SpectralNorm | None, items: Any, statistics: dict[str, Tensor]
) -> Reading:
    """The largest σ over the inputs, as an interval, and what attention looks like on all of them."""
    shape = {name: float(values.max() if name == "max_logit" else values.mean()) for name, values in statistics.items()}
    logit, entropy, sink = map(shape.get, ("max_logit", "entropy", "sink_mass"))
    loudest = None if logit is None or head is not None else int(statistics["max_logit"].amax(0).argmax())
    if result is None:
        return Reading(layer, head, None, None, None, None, logit, entropy, sink, 0, logit_head=loudest)
    lower, estimate, upper = (float(end[items].max()) for end in (result.lower, result.estimate, result.upper))
    iterations = int(torch.as_tensor(result.iterations)[items].max())
    return Reading(layer, head, lower, estimate, upper, result.delta, logit, entropy, sink, iterations, logit_head=loudest)


@dataclass(frozen=True)
class Record:
    """One training step as the monitor saw it."""

    step: int  # number of the step
    readings: tuple[Reading, ...] = ()  # σ on the probe batch; empty between measurements
    # By layer, the largest ‖dL/dx‖/‖dL/dy‖ over the inputs of this step: a lower bound of σ there
    backward: Mapping[int, float] = field(default_factory=dict)
    backward_peak: Mapping[int, float] = field(default_factory=dict)  # the largest of these since the last measurement
    alarms: tuple[Alarm, ...] = ()  # thresholds that were crossed
    scope: str = "attention"  # which map σ belongs to

    @property
    def save(self) -> bool:
        """Whether a threshold asks for a checkpoint."""
        return any(alarm.action == "save" for alarm in self.alarms)

    @property
    def stop(self) -> bool:
        """Whether a threshold asks to stop training."""
        return any(alarm.action == "stop" for alarm in self.alarms)

    def scalars(self, prefix: str = "lipscope") -> dict[str, float]:
        """All numbers under names for a logger, such as ``lipscope/layer_0/sigma`` and ``lipscope/layer_0/max_logit``.

        Example:
            >>> Record(5, backward={0: 1.5}, backward_peak={0: 2.5}).scalars()
            {'lipscope/layer_0/sigma_backward': 2.5}
        """
        numbers: dict[str, float] = {}
        for reading in self.readings:
            values = {
                "sigma": reading.estimate, "sigma_lower": reading.lower, "sigma_upper": reading.upper,
                **{name: getattr(reading, name) for name in _SCALARS},
            }  # fmt: skip
            numbers |= {f"{prefix}/{reading.name}/{name}": value for name, value in values.items() if value is not None}
        layers = [reading.estimate for reading in self.readings if reading.head is None and reading.estimate is not None]
        if layers:
            numbers[f"{prefix}/sigma_max"] = max(layers)
        return numbers | {f"{prefix}/layer_{layer}/sigma_backward": gain for layer, gain in self.backward_peak.items()}

    def rows(self) -> list[dict[str, Any]]:
        """One plain dictionary per reading, with the keys ``COLUMNS``; empty between measurements."""
        return [
            {"step": self.step, "scope": self.scope, **asdict(reading)}
            | {"backward": self.backward_peak.get(reading.layer) if reading.head is None else None}
            for reading in self.readings
        ]

    def __str__(self) -> str:
        lines = [f"step {self.step}, scope {self.scope}"]
        for reading in self.readings:
            lower, upper = reading.lower, reading.upper
            about = ["no digits of σ" if lower is None or upper is None else f"σ ∈ {interval(lower, upper)}"]
            for name, value in (("max logit", reading.max_logit), ("entropy", reading.entropy), ("sink", reading.sink_mass)):
                about += [] if value is None else [f"{name} {value:.3g}"]
            if reading.sigma_base is not None:
                about.append(f"σ ≈ {reading.sigma_base:.3g} without adapters")
            if reading.head is None and reading.layer in self.backward_peak:
                about.append(f"in training ≥ {round_down(self.backward_peak[reading.layer], 3)}")
            lines.append(f"  {reading.name.replace('_', ' ').replace('/', ' ')}: {', '.join(about)}")
        return "\n".join(lines + [f"  {alarm.message}" for alarm in self.alarms])


_SCALARS = ("max_logit", "entropy", "sink_mass", "sigma_change", "logit_change", "sigma_base")
COLUMNS = ("step", "scope", *Reading.__dataclass_fields__, "backward")


Action = Literal["warn", "save", "stop"]
_LOOKS = ("max_logit", "logit_change", "entropy", "sink_mass")
_QUANTITIES = ("sigma", *_LOOKS, "backward")


@dataclass(frozen=True)
class Threshold:
    """A line that a quantity must not cross.

    Attributes:
        quantity: ``sigma``, ``max_logit``, ``logit_change`` (per step), ``entropy``, ``sink_mass`` or ``backward`` (the
            free lower bound).
        above: alarm when the quantity is larger than this.
        below: alarm when it is smaller than this.
        action: ``warn``, ``save`` (a checkpoint, and a warning) or ``stop`` (training, and a warning).
        layers: layers it applies to, all by default.
        pause: least number of steps between two warnings of one place; alarms and actions come whenever it is crossed.

    Example:
        >>> Threshold("max_logit", above=50.0, action="stop").describe()
        'max_logit above 50'
    """

    quantity: str = "sigma"
    above: float | None = None
    below: float | None = None
    action: Action = "warn"
    layers: Sequence[int] | None = None
    pause: int = 100

    def __post_init__(self) -> None:
        if self.quantity not in _QUANTITIES:
            raise ValueError(f"quantity must be one of {', '.join(_QUANTITIES)}, got {self.quantity!r}")
        if self.action not in get_args(Action):
            raise ValueError(f"action must be one of {', '.join(get_args(Action))}, got {self.action!r}")
        if (self.above is None) == (self.below is None):
            raise ValueError(f"a threshold on {self.quantity} needs exactly one of above and below")

    def describe(self) -> str:
        """The condition in words."""
        return f"{self.quantity} above {self.above:g}" if self.above is not None else f"{self.quantity} below {self.below:g}"

    def crossed(self, value: float) -> bool:
        """Whether a value lies beyond the line."""
        return value > self.above if self.above is not None else self.below is not None and value < self.below

    def values(self, record: Record) -> list[tuple[int, int | None, float]]:
        """(layer, head, value) of everything in the record that the threshold applies to."""
        found: list[tuple[int, int | None, float]]
        if self.quantity == "backward":
            found = [(layer, None, gain) for layer, gain in record.backward.items()]
        else:
            end = "lower" if self.above is not None else "upper"
            column = end if self.quantity == "sigma" else self.quantity
            found = [(r.layer, r.head, value) for r in record.readings if (value := getattr(r, column)) is not None]
        return [entry for entry in found if self.layers is None or entry[0] in self.layers]


# What a monitor is told by default: the two signals that warn best in benchmarks/blowups, σ not being one of them.
ALARM = (Threshold("max_logit", above=50.0), Threshold("logit_change", above=1.6))


@dataclass(frozen=True)
class Alarm:
    """A threshold that was crossed."""

    layer: int
    head: int | None  # index of the head, or None
    value: float  # what was read; NaN where the layer gives NaN or infinite values
    threshold: Threshold  # the line
    since: int = 0  # the step at which it was first seen beyond the line
    fine: int | None = None  # the last step at which it was not, None when there was none
    worst_head: int | None = None  # the head it comes from, None when that is not known

    @property
    def action(self) -> Action:
        """What the threshold asks for."""
        return self.threshold.action

    @property
    def place(self) -> str:
        """Which line was crossed where: the same at every crossing."""
        return f"{self.threshold.describe()}, layer {self.layer}, head {self.head}"

    @property
    def message(self) -> str:
        """One line: where, what, since when, and what to do."""
        line = self.threshold
        where = f"layer {self.layer}" + ("" if self.worst_head is None else f", head {self.worst_head}")
        before = "at the first reading" if self.fine is None else f"since step {self.since}, not at step {self.fine}"
        if math.isnan(self.value):
            return f"{where}: what it gives is NaN or infinite {before}: {self.remedy}"
        what, value = f"{line.quantity} is", f"{self.value:.4g}"
        if line.quantity == "sigma":
            what = f"σ is at {'least' if line.above is not None else 'most'}"
        if line.quantity in ("sigma", "backward"):
            value = round_down(self.value) if line.above is not None else round_up(self.value)
        limit = line.describe().removeprefix(f"{line.quantity} ")
        return f"{where}: {what} {value}, {limit} {before}: {self.remedy}"

    @property
    def remedy(self) -> str:
        """What to do about it, as far as benchmarks/blowups supports it."""
        line = self.threshold
        if math.isnan(self.value):
            return "go back to a checkpoint before it, and lower the learning rate"
        remedy = _REMEDIES.get((line.quantity, line.above is not None), "look at what the step before it changed")
        if line.quantity == "max_logit" and line.above is not None and 0 < line.above < self.value:
            which = "of its worst head" if self.worst_head is None else f"of head {self.worst_head}"
            remedy += f" (here: the scores {which} times {line.above / self.value:.3g})"
        return remedy


_LOGITS = "lower the learning rate, or use QK-norm; QKClip lessens it"
_REMEDIES = {
    ("sigma", True): "lower the learning rate",
    ("max_logit", True): _LOGITS,
    ("logit_change", True): _LOGITS,
    ("entropy", False): f"attention collapses onto few tokens: {_LOGITS}",
    ("backward", True): "one batch: skip it; step after step: lower the learning rate",
    ("sink_mass", True): "the first token takes the attention: look at whether the loss rises with it",
}


class Guard:
    """Raises an alarm when a line is crossed, and again only after the quantity has come back."""

    def __init__(self, thresholds: Sequence[Threshold]) -> None:
        self.thresholds = tuple(thresholds)
        for threshold in self.thresholds:
            if not isinstance(threshold, Threshold):
                raise TypeError(f"thresholds must be Threshold objects, got {type(threshold).__name__}")
        # What they are about beside σ: a forward pass shows it.
        self.looks = [name for name in _LOOKS if any(line.quantity == name for line in self.thresholds)]
        self._last: int | None = None  # the step of the last reading
        # Since when which place is beyond a line, when it last was not, and when a line last spoke: a checkpoint keeps it.
        self.state: dict[str, dict[str, int]] = {"beyond": {}, "fine": {}, "spoken": {}}

    def check(self, record: Record) -> tuple[Alarm, ...]:
        """The alarms that this record raises."""
        alarms, beyond, fine = [], self.state["beyond"], self.state["fine"]
        self._last = record.step if record.readings else self._last
        loudest = {reading.layer: reading.logit_head for reading in record.readings if reading.head is None}
        for threshold in self.thresholds:
            for layer, head, value in threshold.values(record):
                of_logits = head is None and threshold.quantity in ("max_logit", "logit_change")
                worst = loudest.get(layer) if of_logits else head
                alarm = Alarm(layer, head, value, threshold, record.step, worst_head=worst)
                if not threshold.crossed(value):
                    beyond.pop(alarm.place, None)
                    fine[alarm.place] = record.step
                elif alarm.place not in beyond:
                    beyond[alarm.place] = record.step
                    alarms.append(replace(alarm, fine=fine.get(alarm.place)))
        return tuple(alarms)

    def lost(self, layer: int, step: int) -> tuple[Alarm, ...]:
        """The alarms of a layer that gives NaN or infinite values, which are beyond every line: one for each action."""
        asked = {line.action: line for line in self.thresholds}
        return tuple(Alarm(layer, None, math.nan, line, step, self._last) for line in asked.values())

    def warnings(self, alarms: Sequence[Alarm], step: int) -> list[str]:
        """What to say: of every line the worst place, and nothing of a place again before its pause is over."""
        said, spoken = [], self.state["spoken"]
        for threshold in self.thresholds:
            mine = [
                alarm for alarm in alarms
                if alarm.threshold is threshold and step - spoken.get(alarm.place, -threshold.pause) >= threshold.pause
            ]  # fmt: skip
            if mine:
                spoken |= {alarm.place: step for alarm in mine}
                worst = (max if threshold.above is not None else min)(mine, key=lambda alarm: alarm.value)
                more = f" (and {len(mine) - 1} more)" if len(mine) > 1 else ""
                said.append(f"{worst.message}{more} [{threshold.action}]")
        return said


class JointDecision:
    """What a training is asked to do after a step.

    Processes that exchange messages must all know when. That is at multiples of ``every``; what is asked for in between
    waits until then. A single process acts at once.
    """

    def __init__(self) -> None:
        self._save = self._stop = False

    def take(self, record: Any, *, joint: bool, due: bool) -> tuple[Any, bool, bool]:
        """The record with the bounds of all processes (``joint``: several), and whether to save and stop now (``due``)."""
        if record is not None:
            self._save, self._stop = self._save or record.save, self._stop or record.stop
        if joint and not due:
            return record, False, False
        save, stop = self._save, self._stop
        self._save = self._stop = False
        if joint:
            save, stop, peaks = together(save, stop, getattr(record, "backward_peak", {}))
            record = replace(record, backward_peak=peaks) if isinstance(record, Record) else record
        return record, save, stop


def together(save: bool, stop: bool, peaks: Mapping[int, float]) -> tuple[bool, bool, Mapping[int, float]]:
    """One reduction for all processes: what any of them asks for, and the largest backward bound of every layer."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return save, stop, peaks
    # Of one size everywhere, also where a monitor has switched itself off and knows of no layers.
    values = torch.zeros(2 + _MOST_LAYERS, dtype=torch.float64)
    values[:2] = torch.tensor([save, stop])
    for layer, gain in peaks.items():
        values[2 + layer :][:1] = gain
    # NCCL takes no tensors of the CPU.
    values = values.cuda() if torch.distributed.get_backend() == "nccl" else values
    torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX)
    found = values.tolist()
    return bool(found[0]), bool(found[1]), {layer: gain for layer, gain in enumerate(found[2:]) if gain > 0}


_MOST_LAYERS = 1022
