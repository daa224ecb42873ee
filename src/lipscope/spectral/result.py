"""What a solver fills in, one row per batch item, and what a measurement says: an interval for σ and how it came about."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import chain, product
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lipscope.rounding import Shown, interval, round_up
from lipscope.spectral.operator import Operator


class Status(StrEnum):
    """How a solve ended. ``Status.explanation`` says what it means and what to do."""

    EXACT = "exact"
    CONVERGED = "converged"
    ESTIMATED = "estimated"
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
        "The iteration reached the requested width of the interval, and no singular value is larger than the estimate by "
        "more than rtol, or four times the rounding where that is more, except with probability 1e-3 over the random start. "
        "The lower end is a value that the map really attains; the upper end holds except with the stated "
        "probability delta. Ask for a smaller interval to narrow it."
    ),
    Status.ESTIMATED: (
        "The error estimate of the value fell below rtol, which does not show that no larger value was overlooked: nobody "
        "asked (interval=None), or rounding hides what would have to be seen. So it does where it may be more than a tenth "
        "of the value, which then has no correct digit. The interval is valid. Ask for an interval, or compute in float64."
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
            status=[Status.MAX_STEPS] * B,
            token_energy=None if tokens is None else like.new_zeros(B, tokens),
            right=like.new_zeros(B, k, N) if vectors else None,
            left=like.new_zeros(B, k, M) if vectors else None,
        )

    def record_energy(self, items: Tensor, energy: Tensor | None) -> None:
        """Store the token shares of the worst direction of the listed items."""
        if self.token_energy is not None and energy is not None:
            self.token_energy[items] = energy

    def record_vectors(self, items: Tensor, right: Tensor, left: Tensor | None) -> None:
        """Store the singular vectors ``(items, k, ·)`` of the listed items."""
        if self.right is not None and self.left is not None:
            self.right[items] = right
            if left is not None:
                self.left[items] = left

    def doubt(self, items: Tensor, others: list[Status]) -> None:
        """The listed items are no better known than what they rest on."""
        worst = list(Status)
        for item, other in zip(items.tolist(), others, strict=True):
            self.status[item] = max(self.status[item], other, key=worst.index)

    @property
    def stopped(self) -> Tensor:
        """Whether every item met its stopping rule (B,)."""
        return torch.tensor([status is not Status.MAX_STEPS for status in self.status], device=self.estimate.device)

    @property
    def vectors(self) -> tuple[Tensor, Tensor]:
        """Right and left singular vectors, (B, k, N) and (B, k, M), of a solver that was asked for them."""
        assert self.right is not None
        assert self.left is not None
        return self.right, self.left

    def restart(self, items: Tensor, largest: SolverOutput) -> None:
        """Instead of k values of the listed items their largest ones, with vectors; the others are not known (−∞)."""
        for name in ("estimate", "upper", "residual"):
            getattr(self, name)[items] = getattr(largest, name)
        self.iterations[items] += largest.iterations
        self.singular_values[items] = -torch.inf
        self.singular_values[items, 0] = largest.estimate
        for item, status in zip(items.tolist(), largest.status, strict=True):
            self.status[item] = status
        for vectors, top in zip(self.vectors, largest.vectors, strict=True):
            vectors[items] = 0.0
            vectors[items, 0] = top[:, 0]

    @classmethod
    def cat(cls, parts: list[SolverOutput]) -> SolverOutput:
        """Join the outputs of consecutive sub-batches."""
        return replace(parts[0], **_joined(parts))


# What is said of ‖J‖_F.
SIZES = ("typical", "typical_low", "typical_high", "stable_rank")
# A Python number for one problem, a tensor for a batch.
Numbers: TypeAlias = Any
# One word per problem of a batch, nested like its shape.
Nested: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, eq=False, repr=False)
class SpectralNorm(Shown):
    """The largest singular value σ of a Jacobian as an interval, with everything needed to judge it.

    Fields are Python numbers for one problem and tensors for a batch: shape ``(B,)``, for scope ``head`` ``(H,)`` or
    ``(B, H)``; ``result[i]`` and ``result[i, h]`` are the parts of it. Always ``lower ≤ estimate ≤ upper``.

    Attributes:
        lower: a gain that some direction attains (less the rounding allowance): σ ≥ lower.
        estimate: best estimate of σ.
        upper: σ ≤ upper, in the sense of ``upper_kind``.
        upper_kind: ``"exact"`` (dense SVD), ``"probabilistic"`` (fails with probability at most ``delta``),
            ``"certified"`` (closed form, deterministic) or ``"verified"`` (a factorisation, deterministic); nested tuples
            for a batch, like ``status``.
        delta: failure probability of a probabilistic upper bound, else None.
        iterations: operator pairs (J, Jᵀ) spent.
        residual: ‖Jᵀu − estimate·v‖ for the returned singular pair; *some* singular value lies within it.
        converged: whether the requested accuracy was reached.
        status: how the solve ended; see ``message``.
        singular_values: the k leading singular values, last dimension k.
        scope: which map was measured.
        mask: the attention mask in words, or None for a general map.
        tokens: sequence length n, or None.
        dtype: dtype of the computation.
        input_dtype: dtype of the data that was handed in.
        solver: name of the solver.
        rounding: relative rounding allowance that was added to both ends.
        token_energy: share of the worst direction on each token, last dimension n, summing to one.
        right: leading right singular vectors (unit input directions), when asked for.
        left: leading left singular vectors (the matching output directions), when asked for.
        certified: the certified upper bound where one was computed, whether or not it is the least.
        typical: ‖J‖_F/√(number of inputs), the root-mean-square gain of a random direction, where ‖J‖_F is known.
        stable_rank: ‖J‖_F²/σ² with the estimate of σ: how many directions are about as bad as the worst one.
        typical_low: where ‖J‖_F was estimated from random directions, the lower end of typical, else None.
        typical_high: its upper end; the true value lies outside with probability at most 0.05.
    """

    lower: Numbers
    estimate: Numbers
    upper: Numbers
    upper_kind: str | Nested
    delta: float | None
    iterations: Numbers
    residual: Numbers
    converged: Numbers
    status: Status | Nested
    singular_values: Tensor
    scope: str
    mask: str | None
    tokens: int | None
    dtype: str
    input_dtype: str
    solver: str
    rounding: Numbers
    token_energy: Tensor | None = None
    right: Tensor | None = None
    left: Tensor | None = None
    certified: Numbers = None
    typical: Numbers = None
    stable_rank: Numbers = None
    typical_low: Numbers = None
    typical_high: Numbers = None

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the batch: ``()`` for a single problem."""
        return tuple(self.estimate.shape) if isinstance(self.estimate, Tensor) else ()

    def __getitem__(self, index: int | tuple[int, ...]) -> SpectralNorm:
        """One problem of a batch with plain numbers, or, of a batch (B, H), all heads of one input."""
        where = index if isinstance(index, tuple) else (index,)
        if len(where) > len(self.batch_shape):
            raise IndexError(f"a result of shape {self.batch_shape} has no item {index}")

        def part(value: Any) -> Any:
            for i in where:
                value = value[i]
            return value

        def number(value: Tensor) -> Numbers:
            return part(value) if len(where) < value.ndim else part(value).item()

        return _with_fields(self, number, part, part)

    @property
    def message(self) -> str:
        """What the status means and what to do, one paragraph for each distinct status."""
        return "\n\n".join(dict.fromkeys(Status(str(one.status)).explanation for _, one in self._one_by_one()))

    def _one_by_one(self) -> Iterator[tuple[tuple[int, ...], SpectralNorm]]:
        shape = self.batch_shape
        return ((index, self[index] if shape else self) for index in product(*map(range, shape)))

    def __float__(self) -> float:
        ends = "" if self.batch_shape else f" = {self.lower:.6g}, {self.estimate:.6g}, {self.upper:.6g}"
        raise TypeError(f"a result is an interval, not one number: say which is meant, .lower, .estimate or .upper{ends}")

    def to_rows(self) -> list[dict[str, Any]]:
        """One plain dictionary per problem: numbers, strings and booleans only."""
        names = ("input", "head") if len(self.batch_shape) == 2 else ("head",) if self.scope == "head" else ("input",)
        return [
            dict(zip(names, index, strict=False))
            | {"scope": self.scope, "mask": self.mask, "n": self.tokens}
            | {"lower": one.lower, "estimate": one.estimate, "upper": one.upper, "upper_kind": one.upper_kind}
            | {"delta": self.delta if one.upper_kind == "probabilistic" else None, "certified": one.certified}
            | {name: getattr(one, name) for name in SIZES}
            | {"iterations": one.iterations, "residual": one.residual, "converged": one.converged}
            | {"status": str(one.status), "solver": self.solver, "dtype": self.dtype, "input_dtype": self.input_dtype}
            | {"rounding": one.rounding}
            for index, one in self._one_by_one()
        ]

    def __str__(self) -> str:
        rows = self.to_rows()
        head = f"σ[{self.scope}]"
        about = [f"mask {self.mask}"] if self.mask else []
        about += [f"n = {self.tokens}"] if self.tokens is not None else []
        about += [self.dtype if self.dtype == self.input_dtype else f"{self.dtype} (from {self.input_dtype})"]
        kinds = list(dict.fromkeys(row["upper_kind"] for row in rows))
        kind = " or ".join(kinds)
        if "probabilistic" in kinds:
            kind += f", fails with probability ≤ {self.delta:g}"
        lines = [f"{head}: {', '.join(about)}; upper end {kind}; solver {self.solver}"]
        shown = rows if len(rows) <= _MAX_LINES else rows[: _MAX_LINES - 1]
        lines += [_line(row, mixed=len(kinds) > 1) for row in shown]
        if len(shown) < len(rows):
            lines.append(f"  … and {len(rows) - len(shown)} more; to_rows() has them all")
        unfinished = sum(row["status"] == Status.MAX_STEPS for row in rows)
        if unfinished:
            lines.append(f"{unfinished} of {len(rows)} did not converge. {Status.MAX_STEPS.explanation}")
        return "\n".join(lines)


_MAX_LINES = 24
# Rounding that may be more than this part of a value leaves it no correct digit.
_NO_DIGIT = 0.1


def summarise(
    output: SolverOutput,
    operator: Operator,
    *,
    scope: str,
    mask: str | None = None,
    input_dtype: str | None = None,
) -> SpectralNorm:
    """Turn a solver's raw output into a batched ``SpectralNorm``, adding the rounding allowance to both ends."""
    allowance = operator.rounding_errors.to(output.estimate.device)
    floor = torch.as_tensor(operator.rounding_floor, dtype=torch.float64, device=output.estimate.device)
    relative = torch.where(output.estimate > 0, floor / output.estimate, 0.0).maximum(allowance).clamp_max(1.0)
    everyone = torch.arange(operator.batch, device=output.estimate.device)
    hidden = (floor > _NO_DIGIT * output.estimate).expand(operator.batch).tolist()
    output.doubt(everyone, [Status.ESTIMATED if lost else Status.EXACT for lost in hidden])
    converged = [status in (Status.EXACT, Status.CONVERGED) for status in output.status]
    lower = output.estimate * (1 - relative)
    upper = torch.maximum(output.upper * (1 + allowance), output.upper + floor)
    # Numbers so small have few digits, and may have been rounded inwards.
    tiny = torch.finfo(torch.float64).tiny
    lower = torch.where(lower < tiny, torch.nextafter(lower, torch.zeros_like(lower)), lower)
    upper = torch.where((upper < tiny) & (upper > 0), torch.nextafter(upper, torch.ones_like(upper)), upper)
    right = left = None
    if output.right is not None and output.left is not None:
        right = torch.stack([operator.lift_right(vector) for vector in output.right.unbind(1)], dim=1)
        left = output.left.reshape(*output.left.shape[:2], *operator.output_shape)
    return SpectralNorm(
        lower=lower,
        estimate=output.estimate,
        upper=upper,
        upper_kind=("exact" if output.solver == "dense" else "probabilistic",) * operator.batch,
        delta=output.delta,
        iterations=output.iterations,
        residual=output.residual,
        converged=torch.tensor(converged, device=lower.device),
        status=tuple(output.status),
        singular_values=output.singular_values,
        scope=scope,
        mask=mask,
        tokens=operator.input_shape[0] if len(operator.input_shape) == 2 else None,
        dtype=dtype_name(operator.dtype),
        input_dtype=input_dtype or dtype_name(operator.dtype),
        solver=output.solver,
        rounding=relative,
        token_energy=output.token_energy,
        right=right,
        left=left,
    )


def join_batches(results: Sequence[SpectralNorm]) -> SpectralNorm:
    """Flat batches of the same kind of problem as one."""
    return replace(results[0], **_joined(results))


def reshape_batch(result: SpectralNorm, shape: tuple[int, ...]) -> SpectralNorm:
    """View a flat batch as ``shape``; the empty shape makes a batch of one plain numbers."""

    def number(value: Tensor) -> Numbers:
        return value.reshape(shape) if shape else value.item()

    def nested(words: Any) -> Any:
        for size in reversed(shape[1:]):
            words = tuple(words[i : i + size] for i in range(0, len(words), size))
        return words if shape else words[0]

    return _with_fields(result, number, lambda value: value.reshape(*shape, *value.shape[1:]), nested)


def with_certificate(result: SpectralNorm, certified: Tensor, kind: str = "certified") -> SpectralNorm:
    """Enter certified upper bounds (B,) into a flat batch: the least upper end counts, with its kind.

    A certificate is a theorem about exact arithmetic; the upper end is not taken below the estimate that was computed. What
    was verified counts also where another end is lower by less than 1 %: it was asked for to be certain.
    """
    better = certified < result.upper * (1.01 if kind == "verified" else 1.0)
    upper = torch.where(better, torch.maximum(certified, result.estimate), result.upper)
    kinds = tuple(kind if b else before for b, before in zip(better.tolist(), result.upper_kind, strict=True))
    return replace(result, upper=upper, upper_kind=kinds, certified=certified)


def _line(row: dict[str, Any], *, mixed: bool) -> str:
    where = " ".join(f"{name} {row[name]}" for name in ("input", "head") if name in row)
    span = f"σ ∈ {interval(row['lower'], row['upper'], 6)}, estimate {row['estimate']:.6g}"
    steps = f", {row['iterations']} steps, residual {row['residual']:.1e}" if row["iterations"] else ""
    kind = f", upper {row['upper_kind']}" if mixed else ""
    if row["certified"] is not None and row["upper_kind"] not in ("certified", "verified"):
        kind += f", certified ≤ {round_up(row['certified'], 6)}"
    return f"  {where + ': ' if where else ''}{span}{kind}{steps}, {row['status']}"


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` as ``float32``."""
    return str(dtype).removeprefix("torch.")


def _with_fields(
    result: SpectralNorm, number: Callable[[Any], Any], tensor: Callable[[Any], Any], word: Callable[[Any], Any]
) -> SpectralNorm:
    """The result with functions applied to its fields: one value per problem, one row per problem, one word per problem."""
    changes = dict.fromkeys(("lower", "estimate", "upper", "iterations", "residual", "converged", "rounding"), number)
    changes |= dict.fromkeys(("certified", *SIZES), number)
    changes |= dict.fromkeys(("singular_values", "token_energy", "right", "left"), tensor)
    changes |= dict.fromkeys(("status", "upper_kind"), word)
    given = ((name, change, getattr(result, name)) for name, change in changes.items())
    return replace(result, **{name: change(value) for name, change, value in given if value is not None})


def _joined(parts: Sequence[Any]) -> dict[str, Any]:
    """Fields that hold one entry per problem, one part after the other."""
    joined: dict[str, Any] = {}
    for field in fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        if isinstance(values[0], Tensor):
            joined[field.name] = torch.cat(values)
        elif isinstance(values[0], list | tuple):
            joined[field.name] = type(values[0])(chain.from_iterable(values))
    return joined
