"""The learning rate as a function of the step alone, and a wall-clock limit that keeps it so.

Progress p runs from 0 to 1 along straight lines between knots (step, p), and the rate is peak·½(1 + cos πp) after a linear
warm-up. A time limit only moves the last knot: when the machine turns out slower or faster than planned, a knot is set at
the present step and a new end is chosen. Steps are the truth: the weights depend on the knots and never on the clock, and
the knots are kept, so that the same run can be had again on any machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Knots = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Plan:
    """When training ends, and how fast it moves there.

    Attributes:
        knots: (step, progress), from (0, 0) to (last step, 1).
        peak: largest learning rate.
        warmup: steps to reach it.
    """

    knots: Knots
    peak: float
    warmup: int

    @classmethod
    def of_steps(cls, steps: int, peak: float, warmup: int) -> Plan:
        """One straight line."""
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        return cls(((0, 0.0), (steps, 1.0)), peak, warmup)

    @property
    def steps(self) -> int:
        """The last step."""
        return self.knots[-1][0]

    def progress(self, step: int) -> float:
        """The progress p at a step."""
        for (left, p), (right, q) in zip(self.knots, self.knots[1:], strict=False):
            if step <= right:
                return p + (q - p) * (step - left) / (right - left)
        return 1.0

    def rate(self, step: int) -> float:
        """Learning rate of the update that follows ``step`` updates."""
        ramp = min(1.0, (step + 1) / (self.warmup + 1))
        return self.peak * ramp * 0.5 * (1 + math.cos(math.pi * self.progress(step)))

    def end_at(self, step: int, last: int) -> Plan:
        """The same up to ``step``, then straight to p = 1 at ``last``."""
        if last <= step:
            raise ValueError(f"the last step must come after step {step}, got {last}")
        past = tuple(knot for knot in self.knots if knot[0] < step)
        return Plan((*past, (step, self.progress(step)), (last, 1.0)), self.peak, self.warmup)

    def within(self, step: int, seconds_left: float, seconds_per_step: float, slack: float = 0.04) -> Plan:
        """The plan that ends in time; itself when it does so within ``slack`` of the remaining steps.

        The rate needs room to fall, so at least 1 % of the planned steps are left.
        """
        remaining = self.steps - step
        fitting = max(round(seconds_left / seconds_per_step), self.steps // 100, 1)
        if remaining <= 0 or abs(fitting - remaining) <= slack * remaining + 1:
            return self
        return self.end_at(step, step + fitting)
