"""Probability measures with finitely many atoms: clouds on R^d, and clouds on [0,1] × R^d for masked attention.

    μ = Σ_i w_i δ_{x_i}          μ̄ = Σ_i w_i δ_{(s_i, x_i)}          w_i ≥ 0, Σ_i w_i = 1

A sequence of n tokens is the uniform cloud w_i = 1/n; with a mask that looks at order, token i also has position s_i = i/n.
Everything is float64: transport distances and exponentials of scores have no digits to spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# A total mass this far from one is a mistake; closer, it is the rounding of single precision and is divided out.
NORMALISATION_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Measure:
    """Atoms with weights on R^d, or on [0,1] × R^d when they have positions in a sequence; immutable.

    Attributes:
        points: the atoms x_i (n, d); anything ``torch.as_tensor`` takes.
        weights: their masses (n,), non-negative with sum 1; uniform when None.
        positions: s_i ∈ [0, 1], (n,), or None for a measure on R^d.

    Example:
        >>> mu = Measure([[0.0, 0.0], [1.0, 0.0]], [0.25, 0.75])
        >>> mu.size, mu.dimension, mu.radius
        (2, 2, 1.0)
        >>> Measure.from_tokens([[1.0], [2.0], [3.0], [4.0]], ordered=True).positions.tolist()
        [0.25, 0.5, 0.75, 1.0]
    """

    points: Tensor
    weights: Tensor = None  # type: ignore[assignment]  # None is replaced by uniform weights below
    positions: Tensor | None = None

    def __post_init__(self) -> None:
        points = as_points(self.points)
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "weights", as_weights(self.weights, len(points)))
        if self.positions is not None:
            object.__setattr__(self, "positions", as_positions(self.positions, len(points)))

    @classmethod
    def from_tokens(cls, X: Tensor, *, ordered: bool = False) -> Measure:
        """A token sequence (n, d) as the uniform cloud of its tokens; ``ordered`` gives token i the position i/n."""
        points = as_points(X)
        n = len(points)
        return cls(points, positions=torch.arange(1, n + 1, dtype=torch.float64) / n if ordered else None)

    @property
    def size(self) -> int:
        """Number of atoms."""
        return len(self.points)

    @property
    def dimension(self) -> int:
        """The d of R^d."""
        return int(self.points.shape[1])

    @property
    def radius(self) -> float:
        """Largest norm of an atom that carries mass: the least R with support in the ball B_R."""
        return float(self.points[self.weights > 0].norm(dim=-1).max())

    @property
    def is_uniform(self) -> bool:
        """Whether all weights are the same number."""
        return bool((self.weights == self.weights[0]).all())

    def push(self, points: Tensor) -> Measure:
        """The image of the measure under x_i ↦ points_i; positions stay."""
        return replace(self, points=points)

    def support(self) -> Measure:
        """Without the atoms of weight zero."""
        kept = self.weights > 0
        return self if bool(kept.all()) else self._atoms(kept, self.weights[kept])

    def split(self, parts: int = 2, atoms: Sequence[int] | None = None) -> Measure:
        """The same measure with the listed atoms (all by default) written as ``parts`` equal atoms in the same place."""
        index, share = split_index(self.size, parts, atoms)
        return self._atoms(index, self.weights[index] / share)

    def merge(self) -> Measure:
        """The same measure with atoms in exactly the same place written as one; sorted, by position first."""
        places = self.points if self.positions is None else torch.cat([self.positions[:, None], self.points], dim=1)
        places, index = torch.unique(places, dim=0, return_inverse=True)
        weights = self.weights.new_zeros(len(places)).index_add_(0, index, self.weights)
        if self.positions is None:
            return Measure(places, weights)
        return Measure(places[:, 1:], weights, places[:, 0])

    def sample(self, size: int, seed: int = 0) -> Measure:
        """The uniform cloud of ``size`` independent draws of atoms."""
        return self._atoms(draw(self.weights, size, seed), None)

    def space_marginal(self) -> Measure:
        """The law of x: positions forgotten."""
        return replace(self, positions=None)

    def position_marginal(self) -> tuple[Tensor, Tensor]:
        """The law θ of s: its atoms in increasing order, and their masses. Atoms of mass zero do not count."""
        charged = self.support()
        if charged.positions is None:
            raise ValueError("the measure has no positions: give Measure(points, weights, positions)")
        places, index = torch.unique(charged.positions, return_inverse=True)
        return places, charged.weights.new_zeros(len(places)).index_add_(0, index, charged.weights)

    def _atoms(self, index: Tensor, weights: Tensor | None) -> Measure:
        places = None if self.positions is None else self.positions[index]
        return Measure(self.points[index], weights, places)  # type: ignore[arg-type]


def as_points(value: Any) -> Tensor:
    """Points as a detached float64 tensor (n, d); refuses what is not."""
    points = _tensor(value)
    if points.is_complex() or points.dtype == torch.bool:
        raise ValueError(f"points must be real numbers, got {points.dtype}")
    if points.ndim != 2:
        raise ValueError(f"points must have shape (n, d), got {tuple(points.shape)}")
    if 0 in points.shape:
        raise ValueError(f"points is empty: shape {tuple(points.shape)}; a measure needs at least one atom")
    points = points.to(torch.float64)
    if not bool(torch.isfinite(points).all()):
        raise ValueError("points holds NaN or infinite values")
    return points


def _tensor(value: Any) -> Tensor:
    # Lists of Python numbers are float64; torch alone would round them to float32.
    return value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)


def as_weights(value: Any, size: int) -> Tensor:
    """Weights as float64 (n,) of sum one; refuses negative or non-normalised ones."""
    if value is None:
        return torch.full((size,), 1 / size, dtype=torch.float64)
    weights = _tensor(value).to(torch.float64)
    if weights.shape != (size,):
        raise ValueError(f"weights has shape {tuple(weights.shape)}, but ({size},) is needed: one per atom")
    if not bool(torch.isfinite(weights).all()):
        raise ValueError("weights holds NaN or infinite values")
    if bool((weights < 0).any()):
        at = int((weights < 0).nonzero()[0])
        raise ValueError(f"weights must not be negative, but weights[{at}] = {float(weights[at]):g}")
    total = float(weights.sum())
    if abs(total - 1) > NORMALISATION_TOLERANCE:
        raise ValueError(f"weights must add up to 1, but their sum is {total:g}; divide them by it")
    # Dividing by a total that is one up to rounding would only change last digits, and atoms that were equal.
    return weights if abs(total - 1) <= 4e-16 * size else weights / total


def as_positions(value: Any, size: int) -> Tensor:
    """Positions in a sequence as float64 (n,); refuses what lies outside [0, 1]."""
    positions = _tensor(value).to(torch.float64)
    if positions.shape != (size,):
        raise ValueError(f"positions has shape {tuple(positions.shape)}, but ({size},) is needed: one per point")
    if not bool(((positions >= 0) & (positions <= 1)).all()):
        raise ValueError("positions must lie in [0, 1]; a sequence of n tokens has positions i/n")
    return positions


def split_index(size: int, parts: int, atoms: Sequence[int] | None) -> tuple[Tensor, Tensor]:
    """Which atom every atom of the split measure comes from, and into how many its mass went."""
    if parts < 1:
        raise ValueError(f"parts must be at least 1, got {parts}")
    counts = torch.full((size,), parts if atoms is None else 1, dtype=torch.int64)
    for atom in atoms or ():
        if not -size <= atom < size:
            raise ValueError(f"atoms must lie between 0 and {size - 1}, got {atom}")
        counts[atom] = parts
    index = torch.repeat_interleave(torch.arange(size), counts)
    return index, counts[index].to(torch.float64)


def draw(weights: Tensor, size: int, seed: int) -> Tensor:
    """Indices of ``size`` independent draws, by inverting the cumulative weights."""
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    uniform = torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    charged = weights.nonzero()[:, 0]
    levels = weights[charged].cumsum(0)
    index = torch.searchsorted(levels, uniform * levels[-1], right=True).clamp_max(len(charged) - 1)
    return charged[index]
