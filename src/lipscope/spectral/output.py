"""What a solver fills in: one row per batch item, and how each item ended."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from lipscope.spectral.operator import Operator


class Status(StrEnum):
    """How a solve ended. ``Status.explanation`` says what it means and what to do."""

    EXACT = "exact"
    CONVERGED = "converged"
    MAX_STEPS = "max_steps"

    @property
    def explanation(self) -> str:
        """A paragraph: what happened, why, and what to do about it."""
        return _EXPLANATIONS[self]


_EXPLANATIONS = {
    Status.EXACT: (
        "The Jacobian was small enough to be formed and decomposed by a dense SVD. The value is exact up to rounding, "
        "and the interval only covers that rounding."
    ),
    Status.CONVERGED: (
        "The iteration reached the requested relative accuracy and width of the interval. The lower end is a value that "
        "the map really attains; the upper end holds except with the stated probability delta over the random start. "
        "Ask for a smaller interval to narrow it."
    ),
    Status.MAX_STEPS: (
        "The iteration used up max_steps before its error estimate fell below rtol or its interval was narrow enough. "
        "Usually several singular values lie close together at the top of the spectrum, or rtol is below what the dtype "
        "can resolve. The interval is still valid, only wider. Raise max_steps, ask for a larger rtol or interval, or "
        "compute in float64 when rtol is below 1e-6."
    ),
}


@dataclass
class SolverOutput:
    """Raw solver results for a batch: tensors of length B (float64), before the rounding allowance."""

    solver: str
    delta: float | None
    estimate: Tensor
    upper: Tensor
    singular_values: Tensor
    iterations: Tensor
    residual: Tensor
    converged: Tensor
    status: list[Status]
    token_energy: Tensor | None
    right: Tensor | None
    left: Tensor | None

    @classmethod
    def empty(cls, operator: Operator, k: int, vectors: bool, solver: str, delta: float | None) -> SolverOutput:
        """Room for the results of every item of ``operator``."""
        B, (M, N) = operator.batch, operator.shape
        zeros = torch.zeros(B, dtype=torch.float64, device=operator.device)
        like = torch.zeros(0, dtype=operator.dtype, device=operator.device)
        tokens = operator.input_shape[0] if len(operator.input_shape) == 2 else None
        return cls(
            solver=solver,
            delta=delta,
            estimate=zeros.clone(),
            upper=zeros.clone(),
            singular_values=zeros[:, None].repeat(1, k),
            iterations=torch.zeros(B, dtype=torch.int64, device=operator.device),
            residual=zeros.clone(),
            converged=torch.zeros(B, dtype=torch.bool, device=operator.device),
            status=[Status.MAX_STEPS] * B,
            token_energy=None if tokens is None else like.new_zeros(B, tokens),
            right=like.new_zeros(B, k, N) if vectors else None,
            left=like.new_zeros(B, k, M) if vectors else None,
        )

    def record_energy(self, items: Tensor, energy: Tensor | None) -> None:
        """Store the token shares of the worst direction of the listed items."""
        if self.token_energy is not None and energy is not None:
            self.token_energy[items] = energy

    def record_vectors(self, items: Tensor, right: Tensor, left: Tensor) -> None:
        """Store the singular vectors ``(items, k, ·)`` of the listed items."""
        if self.right is not None and self.left is not None:
            self.right[items] = right
            self.left[items] = left

    def doubt(self, items: Tensor, ok: Tensor) -> None:
        """The listed items have not converged where something they rest on is not ``ok``."""
        self.converged[items] &= ok
        for item in items[~ok].tolist():
            self.status[item] = Status.MAX_STEPS

    def restart(self, items: Tensor, largest: SolverOutput) -> None:
        """Instead of k values of the listed items their largest ones, with vectors; the others are not known (−∞)."""
        assert self.right is not None
        assert self.left is not None
        assert largest.right is not None
        assert largest.left is not None
        for name in ("estimate", "upper", "residual", "converged"):
            getattr(self, name)[items] = getattr(largest, name)
        self.iterations[items] += largest.iterations
        self.singular_values[items] = -torch.inf
        self.singular_values[items, 0] = largest.estimate
        for item, status in zip(items.tolist(), largest.status, strict=True):
            self.status[item] = status
        self.right[items], self.left[items] = 0.0, 0.0
        self.right[items, 0], self.left[items, 0] = largest.right[:, 0], largest.left[:, 0]

    @classmethod
    def cat(cls, parts: list[SolverOutput]) -> SolverOutput:
        """Join the outputs of consecutive sub-batches."""
        joined: dict[str, Any] = {}
        for field in fields(cls):
            values = [getattr(part, field.name) for part in parts]
            if isinstance(values[0], Tensor):
                joined[field.name] = torch.cat(values)
            elif isinstance(values[0], list):
                joined[field.name] = [entry for value in values for entry in value]
            else:
                joined[field.name] = values[0]
        return cls(**joined)
