"""Probability measures with finitely many atoms: clouds on R^d, and clouds on [0,1] × R^d for masked attention.

    μ = Σ_i w_i δ_{x_i}          μ̄ = Σ_i w_i δ_{(s_i, x_i)}          w_i ≥ 0, Σ_i w_i = 1

A sequence of n tokens is the uniform cloud w_i = 1/n; with a mask that looks at order, token i also has position s_i = i/n.
Everything is float64: transport distances and exponentials of scores have no digits to spare.

A law is what tokens are drawn from: a ball, a sphere, a Gaussian, a mixture, or the tokens of a real model. Its ``radius``
is the least R with all of its mass in the ball B_R, infinite for a Gaussian; it decides whether a bound can hold for every
sample size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lipscope.attention.validation import refuse_infinite
from lipscope.doors import at_least, positive

# Whatever ``torch.as_tensor`` takes becomes a tensor.
TensorLike: TypeAlias = Annotated[Tensor, "converted"]
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

    points: TensorLike
    weights: TensorLike = None  # type: ignore[assignment]  # None is replaced by uniform weights below
    positions: TensorLike | None = None

    def __post_init__(self) -> None:
        points = as_points(self.points)
        object.__setattr__(self, "points", points)
        object.__setattr__(self, "weights", as_weights(self.weights, len(points)))
        if self.positions is not None:
            positions = as_column("positions", self.positions, len(points))
            if not bool(((positions >= 0) & (positions <= 1)).all()):
                raise ValueError("positions must lie in [0, 1]; a sequence of n tokens has positions i/n")
            object.__setattr__(self, "positions", positions)

    @classmethod
    def from_tokens(cls, X: TensorLike, *, ordered: bool = False) -> Measure:
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
        at_least(1, parts=parts)
        counts = torch.full((self.size,), parts if atoms is None else 1, dtype=torch.int64)
        for atom in atoms or ():
            if not -self.size <= atom < self.size:
                raise ValueError(f"atoms must lie between 0 and {self.size - 1}, got {atom}")
            counts[atom] = parts
        index = torch.repeat_interleave(torch.arange(self.size), counts)
        return self._atoms(index, self.weights[index] / counts[index])

    def merge(self) -> Measure:
        """The same measure with atoms in exactly the same place written as one; sorted, by position first."""
        places = self.points if self.positions is None else torch.cat([self.positions[:, None], self.points], dim=1)
        places, index = torch.unique(places, dim=0, return_inverse=True)
        weights = torch.bincount(index, self.weights)
        return Measure(places, weights) if self.positions is None else Measure(places[:, 1:], weights, places[:, 0])

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
        return places, torch.bincount(index, charged.weights)

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
    refuse_infinite("points", points)
    return points.to(torch.float64)


def as_column(name: str, value: Any, size: int) -> Tensor:
    """One number per atom as float64 (n,)."""
    column = _tensor(value)
    if column.shape != (size,):
        raise ValueError(f"{name} has shape {tuple(column.shape)}, but ({size},) is needed: one per atom")
    return column.to(torch.float64)


def as_weights(value: Any, size: int) -> Tensor:
    """Weights as float64 (n,) of sum one; refuses negative or non-normalised ones."""
    if value is None:
        return torch.full((size,), 1 / size, dtype=torch.float64)
    weights = as_column("weights", value, size)
    refuse_infinite("weights", weights)
    if bool((weights < 0).any()):
        at = int((weights < 0).nonzero()[0])
        raise ValueError(f"weights must not be negative, but weights[{at}] = {float(weights[at]):g}")
    total = float(weights.sum())
    if abs(total - 1) > NORMALISATION_TOLERANCE:
        raise ValueError(f"weights must add up to 1, but their sum is {total:g}; divide them by it")
    # Dividing by a total that is one up to rounding would only change last digits, and atoms that were equal.
    return weights if abs(total - 1) <= 4e-16 * size else weights / total


def _tensor(value: Any) -> Tensor:
    # Lists of Python numbers are float64; torch alone would round them to float32.
    try:
        return value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"points, weights and positions must be tensors or lists of numbers: {error}") from None


def draw(weights: Tensor, size: int, seed: int) -> Tensor:
    """Indices of ``size`` independent draws, by inverting the cumulative weights."""
    uniform = torch.rand(size, generator=_generator(size, seed), dtype=torch.float64)
    charged = weights.nonzero()[:, 0]
    levels = weights[charged].cumsum(0)
    index = torch.searchsorted(levels, uniform * levels[-1], right=True).clamp_max(len(charged) - 1)
    return charged[index]


class Law(Protocol):
    """Anything that gives independent tokens."""

    @property
    def dimension(self) -> int:
        """The d of R^d."""

    @property
    def radius(self) -> float:
        """The least R with the law inside B_R; infinite when there is none."""

    def sample(self, size: int, seed: int = 0) -> Tensor:
        """``size`` independent tokens (size, d), float64; the same for the same seed."""


@dataclass(frozen=True)
class Ball:
    """The uniform law in the ball of radius R."""

    dimension: int
    radius: float

    def __post_init__(self) -> None:
        at_least(1, dimension=self.dimension)
        positive(radius=self.radius)

    def sample(self, size: int, seed: int = 0) -> Tensor:
        """Directions uniform on the sphere, norms R·u^{1/d}."""
        generator = _generator(size, seed)
        unit = _directions(size, self.dimension, generator)
        heights = torch.rand(size, 1, generator=generator, dtype=torch.float64)
        return self.radius * heights ** (1 / self.dimension) * unit

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}:{self.radius:g}"


class Sphere(Ball):
    """The uniform law on the sphere of radius R: what RMS normalisation without gains makes of any isotropic law."""

    def sample(self, size: int, seed: int = 0) -> Tensor:
        """Normalised Gaussians."""
        return self.radius * _directions(size, self.dimension, _generator(size, seed))


@dataclass(frozen=True)
class Gaussian:
    """The normal law N(0, s² I). Its support is all of R^d, so no bound for tokens in a ball holds for every sample."""

    dimension: int
    std: float
    radius = math.inf

    def __post_init__(self) -> None:
        at_least(1, dimension=self.dimension)
        positive(std=self.std)

    def sample(self, size: int, seed: int = 0) -> Tensor:
        """Independent normal entries."""
        return self.std * torch.randn(size, self.dimension, generator=_generator(size, seed), dtype=torch.float64)

    def __str__(self) -> str:
        return f"gaussian:{self.std:g}"


class GaussianMixture:
    """Σ_k c_k N(m_k, s_k² I); with all s_k = 0 a mixture of Dirac masses, which has a finite radius.

    Args:
        means: m_k (K, d).
        stds: s_k ≥ 0, one per centre.
        weights: c_k (K,), of sum 1.
    """

    def __init__(self, means: Tensor, stds: tuple[float, ...], weights: Tensor) -> None:
        if means.ndim != 2 or weights.ndim != 1:
            raise ValueError(
                f"means must have shape (m, d) and weights (m,), got {tuple(means.shape)}, {tuple(weights.shape)}"
            )
        if len(stds) != len(means) or len(weights) != len(means):
            raise ValueError(f"{len(means)} means need as many stds and weights")
        if not all(0 <= s < math.inf for s in stds):
            raise ValueError(f"std must be non-negative and finite, got {stds}")
        self.means, self.stds, self.weights = means, stds, weights
        self.dimension = int(means.shape[1])
        self.radius = math.inf if any(stds) else float(means[weights > 0].norm(dim=-1).max())

    def sample(self, size: int, seed: int = 0) -> Tensor:
        """A component for every token, then normal noise."""
        which = draw(self.weights, size, seed)
        noise = torch.randn(size, self.dimension, generator=_generator(size, seed + 1), dtype=torch.float64)
        return self.means[which] + torch.tensor(self.stds, dtype=torch.float64)[which, None] * noise

    def __str__(self) -> str:
        spread = ", ".join(f"{s:g}" for s in sorted(set(self.stds)))
        return f"mixture of {len(self.means)} Gaussians of deviation {spread}"


class Empirical:
    """Draws with replacement from given tokens, e.g. what a layer of a model really receives on a text."""

    def __init__(self, tokens: TensorLike) -> None:
        self.tokens = as_points(tokens)
        self.dimension = int(self.tokens.shape[1])
        self.radius = float(self.tokens.norm(dim=-1).max())

    def sample(self, size: int, seed: int = 0) -> Tensor:
        """Rows chosen with equal chances."""
        return self.tokens[torch.randint(len(self.tokens), (size,), generator=_generator(size, seed))]

    def __str__(self) -> str:
        return f"{len(self.tokens)} real tokens"


MOST_CLUSTERS = 100_000
LAW_SYNTAX = "ball:R, sphere:R, gaussian:S, mixture:K:R:S (K Gaussian clusters of deviation S on the sphere of radius R)"


def parse_law(text: str, dimension: int, default_size: float | None = None) -> Law:
    """A law from a short string, see ``LAW_SYNTAX``; ``default_size`` stands for an R left out, and S = default_size/√d.

    Example:
        >>> print(parse_law("sphere:2", dimension=3), parse_law("gaussian", 4, default_size=1.0))
        sphere:2 gaussian:0.5
    """
    name, *given = text.split(":")
    unknown = ValueError(f"unknown law {text!r}; laws are: {LAW_SYNTAX}")
    try:
        numbers = [float(part) for part in given]
    except ValueError:
        raise unknown from None
    if not numbers and default_size is not None:
        std = default_size / math.sqrt(dimension)
        numbers = {"gaussian": [std], "mixture": [4, default_size, std / 4]}.get(name, [default_size])
    laws: dict[str, Callable[[int, float], Law]] = {"ball": Ball, "sphere": Sphere, "gaussian": Gaussian}
    match name, numbers:
        case _, [size] if name in laws:
            return laws[name](dimension, size)
        case "mixture", [count, _, _] if count > MOST_CLUSTERS:
            raise ValueError(f"a mixture has at most {MOST_CLUSTERS} clusters, got {count:g} in {text!r}")
        case "mixture", [count, radius, std] if count >= 1 and count == int(count):
            # The centres are part of the law, so they do not follow the seed of a sample.
            centres = Sphere(dimension, radius).sample(int(count), seed=12345)
            return GaussianMixture(centres, (std,) * int(count), as_weights(None, int(count)))
    raise unknown


def _generator(size: int, seed: int) -> torch.Generator:
    at_least(1, size=size)
    return torch.Generator().manual_seed(seed)


def _directions(size: int, dimension: int, generator: torch.Generator) -> Tensor:
    return normalize(torch.randn(size, dimension, generator=generator, dtype=torch.float64), dim=-1)
