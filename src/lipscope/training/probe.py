"""One measurement on the probe batch: a forward pass, then σ of every layer by warm-started Golub–Kahan.

Weights move little in k steps, so the top singular vectors of the last measurement are nearly those of this one. They
enter the start of the next solve, mixed with a random direction, which keeps the interval valid (see
``spectral.bidiagonalisation``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lipscope.models.model import Model
from lipscope.models.recorded import RecordedLayer
from lipscope.spectral.golub_kahan import GolubKahan
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SolverOutput, SpectralNorm
from lipscope.training.readings import Reading

# Seeds between two measurements: one solve may use as many as it has steps.
_STRIDE = 100_003


class WarmStart:
    """A solver that starts each problem of a measurement where it ended on the same problem of the last measurement."""

    def __init__(self, config: GolubKahan) -> None:
        self.config = replace(config, k=1, vectors=True)
        self._known: list[Tensor] = []
        self._next = self._measurement = 0

    def begin(self) -> None:
        """A new measurement: its first problem is near the first one of the last measurement, and so on."""
        self._next = 0
        self._measurement += 1

    def solve(self, operator: Operator) -> SolverOutput:
        """Leading singular values of every item."""
        number, self._next = self._next, self._next + 1
        start = self._known[number] if number < len(self._known) else None
        if start is not None and start.shape != (operator.batch, operator.shape[1]):
            start = None
        # Another random direction every time: the interval needs one that knows nothing of the start it is mixed with.
        output = replace(self.config, seed=self.config.seed + _STRIDE * self._measurement).solve(operator, start)
        assert output.right is not None
        self._known[number : number + 1] = [output.right[:, 0].clone()]
        return output


class Probe:
    """σ and the shape of attention on fixed inputs, again and again, while the weights change in between."""

    def __init__(
        self, handle: Model, inputs: dict[str, Any], *, layers: Sequence[int], heads: bool, scope: str, solver: GolubKahan
    ) -> None:
        self.handle, self.inputs, self.layers, self.heads, self.scope = handle, inputs, list(layers), heads, scope
        self._solvers = {(i, by): WarmStart(solver) for i in self.layers for by in ("layer", "head")}

    def measure(self) -> tuple[Reading, ...]:
        """One forward pass and one solve per layer. The model must be in eval mode; see ``undisturbed``."""
        recorded = self.handle.record(self.inputs, fresh=True)
        return tuple(reading for index in self.layers for reading in self._layer(recorded[index]))

    def _layer(self, layer: RecordedLayer) -> list[Reading]:
        result = layer.sigma(self.scope, solver=self._solver(layer, "layer"), certificate=False)
        readings = [_reading(layer.index, None, result, slice(None), layer.statistics)]
        if self.heads:
            result = layer.sigma("head", solver=self._solver(layer, "head"), certificate=False)
            for h in range(layer.heads):
                of_head = {name: values[:, h : h + 1] for name, values in layer.statistics.items()}
                readings.append(_reading(layer.index, h, result, (slice(None), h), of_head))
        return readings

    def _solver(self, layer: RecordedLayer, by: str) -> WarmStart:
        solver = self._solvers[layer.index, by]
        solver.begin()
        return solver


def _reading(layer: int, head: int | None, result: SpectralNorm, items: Any, statistics: dict[str, Tensor]) -> Reading:
    """The largest σ over the inputs, as an interval, and what attention looks like on all of them."""
    shape = {name: float(values.max() if name == "max_logit" else values.mean()) for name, values in statistics.items()}
    return Reading(
        layer=layer,
        head=head,
        lower=float(result.lower[items].max()),
        estimate=float(result.estimate[items].max()),
        upper=float(result.upper[items].max()),
        delta=result.delta,
        max_logit=shape.get("max_logit"),
        entropy=shape.get("entropy"),
        sink_mass=shape.get("sink_mass"),
        iterations=int(torch.as_tensor(result.iterations)[items].max()),
    )
