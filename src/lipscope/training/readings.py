"""What the monitor reports: readings of layers and heads on the probe batch, and the record of one training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lipscope.rounding import interval, round_down

if TYPE_CHECKING:
    from lipscope.training.thresholds import Alarm


@dataclass(frozen=True)
class Reading:
    """σ of one layer, or of one head, on the probe batch: the largest over its inputs.

    Attributes:
        layer: index of the attention layer.
        head: index of the head, or None for the whole layer.
        lower: σ is at least this: a direction attains it.
        estimate: best estimate of σ.
        upper: σ is at most this, except with probability ``delta``.
        delta: failure probability of the upper end, None when it is exact.
        max_logit: largest visible logit, after scale, soft-cap and bias; None when the model does not show its queries.
        entropy: entropy of an attention row in nats, mean over rows (and heads).
        sink_mass: attention on the first token and on sinks, mean over rows (and heads).
        iterations: operator pairs (J, Jᵀ) spent, the most over the inputs.
    """

    layer: int
    head: int | None
    lower: float
    estimate: float
    upper: float
    delta: float | None
    max_logit: float | None
    entropy: float | None
    sink_mass: float | None
    iterations: int

    @property
    def name(self) -> str:
        """``layer_2`` or ``layer_2/head_5``."""
        return f"layer_{self.layer}" + ("" if self.head is None else f"/head_{self.head}")


@dataclass(frozen=True)
class Record:
    """One training step as the monitor saw it.

    Attributes:
        step: number of the step.
        readings: σ on the probe batch; empty between measurements.
        backward: by layer, the largest ‖dL/dx‖/‖dL/dy‖ over the inputs of this step: a lower bound of σ there.
        backward_peak: the largest of these since the last measurement.
        alarms: thresholds that were crossed.
        scope: which map σ belongs to.
    """

    step: int
    readings: tuple[Reading, ...] = ()
    backward: Mapping[int, float] = field(default_factory=dict)
    backward_peak: Mapping[int, float] = field(default_factory=dict)
    alarms: tuple[Alarm, ...] = ()
    scope: str = "attention"

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
                "max_logit": reading.max_logit, "entropy": reading.entropy, "sink_mass": reading.sink_mass,
            }  # fmt: skip
            numbers |= {f"{prefix}/{reading.name}/{name}": value for name, value in values.items() if value is not None}
        layers = [reading.estimate for reading in self.readings if reading.head is None]
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
            about = [f"σ ∈ {interval(reading.lower, reading.upper)}"]
            for name, value in (("max logit", reading.max_logit), ("entropy", reading.entropy), ("sink", reading.sink_mass)):
                about += [] if value is None else [f"{name} {value:.3g}"]
            if reading.head is None and reading.layer in self.backward_peak:
                about.append(f"in training ≥ {round_down(self.backward_peak[reading.layer], 3)}")
            lines.append(f"  {reading.name.replace('_', ' ').replace('/', ' ')}: {', '.join(about)}")
        return "\n".join(lines + [f"  {alarm.message}" for alarm in self.alarms])


COLUMNS = ("step", "scope", *Reading.__dataclass_fields__, "backward")
