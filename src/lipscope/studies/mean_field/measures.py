"""Probability measures with finitely many atoms: clouds on R^d, and clouds on [0,1] × R^d for masked attention.

    μ = Σ_i w_i δ_{x_i}          μ̄ = Σ_i w_i δ_{(s_i, x_i)}          w_i ≥ 0, Σ_i w_i = 1

A sequence of n tokens is the uniform cloud w_i = 1/n; with a mask that looks at order, token i also has position s_i = i/n.
Everything is float64: transport distances and exponentials of scores have no digits to spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# A total mass this far from one is a mistake; closer, it is the rounding of single precision and is divided out.
NORMALISATION_TOLERANCE = 1e-6


@dataclass(frozen=True, eq=False)
class Measure:
    """Atoms with weights on R^d; immutable.

    Attributes:
        points: the atoms (n, d); anything ``torch.as_tensor`` takes.
        weights: their masses (n,), non-negative with sum 1; uniform when None.

    Example:
        >>> mu = Measure([[0.0, 0.0], [1.0, 0.0]], [0.25, 0.75])
        >>> mu.size, mu.dimension, mu.radius
        (2, 2, 1.0)
    """

    points: Tensor
    weights: Tensor = None  # type: ignore[assignment]  # None is replaced by uniform weights below

    def __post_init__(self) -> None:
        points = as_points(self.points)
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "weights", as_weights(self.weights, len(points)))

    @classmethod
    def from_tokens(cls, X: Tensor) -> Measure:
        """The uniform cloud of a token sequence (n, d): order is forgotten."""
        return cls(X)

    @classmethod
    def mixture(cls, parts: Sequence[Measure], weights: Sequence[float] | Tensor | None = None) -> Measure:
        """Σ_k c_k μ_k, with equal shares c_k when ``weights`` is None."""
        if not parts:
            raise ValueError("parts is empty: a mixture needs at least one measure")
        if len({part.dimension for part in parts}) > 1:
            raise ValueError(f"parts have different dimensions {[part.dimension for part in parts]}")
        shares = as_weights(weights, len(parts))
        masses = [share * part.weights for share, part in zip(shares, parts, strict=True)]
        return cls(torch.cat([part.points for part in parts]), torch.cat(masses))

    @classmethod
    def gaussian_mixture(
        cls, means: Tensor, std: float | Sequence[float], size: int, *, weights: Any = None, seed: int = 0
    ) -> Measure:
        """A cloud of ``size`` points drawn from Σ_k c_k N(m_k, s_k² I).

        Args:
            means: the centres m_k (K, d).
            std: the standard deviations s_k, one number for all or one per centre; 0 gives Dirac masses.
            size: number of points.
            weights: the shares c_k, equal when None.
            seed: seed of the draw.

        Returns:
            A uniform cloud.
        """
        from lipscope.studies.mean_field.laws import GaussianMixture

        centres = as_points(means)
        spread = [float(std)] * len(centres) if isinstance(std, int | float) else [float(s) for s in std]
        law = GaussianMixture(centres, tuple(spread), as_weights(weights, len(centres)))
        return cls(law.sample(size, seed))

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
        """The image of the measure under x_i ↦ points_i."""
        return Measure(points, self.weights)

    def support(self) -> Measure:
        """Without the atoms of weight zero."""
        kept = self.weights > 0
        return self if bool(kept.all()) else Measure(self.points[kept], self.weights[kept])

    def split(self, parts: int = 2, atoms: Sequence[int] | None = None) -> Measure:
        """The same measure with the listed atoms (all by default) written as ``parts`` equal atoms in the same place."""
        index, share = split_index(self.size, parts, atoms)
        return Measure(self.points[index], self.weights[index] / share)

    def merge(self) -> Measure:
        """The same measure with atoms in exactly the same place written as one; atoms come out sorted."""
        points, index = torch.unique(self.points, dim=0, return_inverse=True)
        return Measure(points, self.weights.new_zeros(len(points)).index_add_(0, index, self.weights))

    def sample(self, size: int, seed: int = 0) -> Measure:
        """The uniform cloud of ``size`` independent draws."""
        return Measure(self.points[draw(self.weights, size, seed)])


@dataclass(frozen=True, eq=False)
class PositionedMeasure:
    """Atoms (s_i, x_i) with weights on [0,1] × R^d; immutable. The first coordinate is the position in the sequence.

    Attributes:
        positions: s_i ∈ [0, 1], (n,).
        points: x_i, (n, d).
        weights: masses (n,), non-negative with sum 1; uniform when None.

    Example:
        >>> mu = PositionedMeasure.from_tokens([[1.0], [2.0], [3.0], [4.0]])
        >>> mu.positions.tolist()
        [0.25, 0.5, 0.75, 1.0]
    """

    positions: Tensor
    points: Tensor
    weights: Tensor = None  # type: ignore[assignment]  # None is replaced by uniform weights below

    def __post_init__(self) -> None:
        points = as_points(self.points)
        positions = _tensor(self.positions).to(torch.float64)
        if positions.shape != (len(points),):
            raise ValueError(f"positions has shape {tuple(positions.shape)}, but ({len(points)},) is needed: one per point")
        if not bool(((positions >= 0) & (positions <= 1)).all()):
            raise ValueError("positions must lie in [0, 1]; a sequence of n tokens has positions i/n")
        object.__setattr__(self, "positions", positions)
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "weights", as_weights(self.weights, len(points)))

    @classmethod
    def from_tokens(cls, X: Tensor) -> PositionedMeasure:
        """A token sequence (n, d) as the uniform cloud of (i/n, x_i), i = 1 … n."""
        points = as_points(X)
        n = len(points)
        return cls(torch.arange(1, n + 1, dtype=torch.float64) / n, points)

    @property
    def size(self) -> int:
        """Number of atoms."""
        return len(self.points)

    @property
    def dimension(self) -> int:
        """The d of [0,1] × R^d."""
        return int(self.points.shape[1])

    @property
    def radius(self) -> float:
        """Largest norm of an x_i that carries mass."""
        return self.space_marginal().radius

    @property
    def is_uniform(self) -> bool:
        """Whether all weights are the same number."""
        return bool((self.weights == self.weights[0]).all())

    def push(self, points: Tensor) -> PositionedMeasure:
        """The image under (s_i, x_i) ↦ (s_i, points_i): positions stay."""
        return PositionedMeasure(self.positions, points, self.weights)

    def support(self) -> PositionedMeasure:
        """Without the atoms of weight zero."""
        kept = self.weights > 0
        if bool(kept.all()):
            return self
        return PositionedMeasure(self.positions[kept], self.points[kept], self.weights[kept])

    def split(self, parts: int = 2, atoms: Sequence[int] | None = None) -> PositionedMeasure:
        """The same measure with the listed atoms (all by default) written as ``parts`` equal atoms in the same place."""
        index, share = split_index(self.size, parts, atoms)
        return PositionedMeasure(self.positions[index], self.points[index], self.weights[index] / share)

    def merge(self) -> PositionedMeasure:
        """The same measure with atoms in exactly the same place written as one; sorted by position."""
        places = torch.cat([self.positions[:, None], self.points], dim=1)
        places, index = torch.unique(places, dim=0, return_inverse=True)
        weights = self.weights.new_zeros(len(places)).index_add_(0, index, self.weights)
        return PositionedMeasure(places[:, 0], places[:, 1:], weights)

    def sample(self, size: int, seed: int = 0) -> PositionedMeasure:
        """The uniform cloud of ``size`` independent draws of (position, point)."""
        index = draw(self.weights, size, seed)
        return PositionedMeasure(self.positions[index], self.points[index])

    def space_marginal(self) -> Measure:
        """The law of x: positions forgotten."""
        return Measure(self.points, self.weights)

    def position_marginal(self) -> tuple[Tensor, Tensor]:
        """The law θ of s: its atoms in increasing order, and their masses. Atoms of mass zero do not count."""
        charged = self.support()
        places, index = torch.unique(charged.positions, return_inverse=True)
        return places, charged.weights.new_zeros(len(places)).index_add_(0, index, charged.weights)


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
