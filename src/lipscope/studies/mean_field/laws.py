"""Laws that tokens are drawn from: balls, spheres, Gaussians, mixtures, and the tokens of a real model.

A law has a ``radius``: the least R with all of its mass in the ball B_R, infinite for a Gaussian. That radius decides
whether a bound can hold for every sample size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lipscope.studies.mean_field.measures import as_points, draw


class Law(Protocol):
    """Anything that gives independent tokens."""

    @property
    def dimension(self) -> int:
        """The d of R^d."""
        ...

    @property
    def radius(self) -> float:
        """The least R with the law inside B_R; infinite when there is none."""
        ...

    def sample(self, size: int, seed: int = 0) -> Tensor:
        """``size`` independent tokens (size, d), float64; the same for the same seed."""
        ...


@dataclass(frozen=True)
class Ball:
    """The uniform law in the ball of radius R."""

    dimension: int
    radius: float

    def __post_init__(self) -> None:
        _check(self.dimension, "radius", self.radius)

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
        _check(self.dimension, "std", self.std)

    def sample(self, size: int, seed: int = 0) -> Tensor:
        """Independent normal entries."""
        return self.std * torch.randn(size, self.dimension, generator=_generator(size, seed), dtype=torch.float64)

    def __str__(self) -> str:
        return f"gaussian:{self.std:g}"


@dataclass(frozen=True, eq=False)
class GaussianMixture:
    """Σ_k c_k N(m_k, s_k² I); with all s_k = 0 a mixture of Dirac masses, which has a finite radius.

    Attributes:
        means: m_k (K, d).
        stds: s_k ≥ 0, one per centre.
        weights: c_k (K,), of sum 1.
    """

    means: Tensor
    stds: tuple[float, ...]
    weights: Tensor

    def __post_init__(self) -> None:
        if len(self.stds) != len(self.means) or len(self.weights) != len(self.means):
            raise ValueError(f"{len(self.means)} means need as many stds and weights")
        if not all(0 <= s < math.inf for s in self.stds):
            raise ValueError(f"std must be non-negative and finite, got {self.stds}")

    @property
    def dimension(self) -> int:
        """The d of R^d."""
        return int(self.means.shape[1])

    @property
    def radius(self) -> float:
        """Infinite, unless every component is a Dirac mass."""
        return math.inf if any(self.stds) else float(self.means[self.weights > 0].norm(dim=-1).max())

    def sample(self, size: int, seed: int = 0) -> Tensor:
        """A component for every token, then normal noise."""
        which = draw(self.weights, size, seed)
        noise = torch.randn(size, self.dimension, generator=_generator(size, seed + 1), dtype=torch.float64)
        return self.means[which] + torch.tensor(self.stds, dtype=torch.float64)[which, None] * noise

    def __str__(self) -> str:
        spread = ", ".join(f"{s:g}" for s in sorted(set(self.stds)))
        return f"mixture of {len(self.means)} Gaussians of deviation {spread}"


@dataclass(frozen=True, eq=False)
class Empirical:
    """Draws with replacement from given tokens, e.g. what a layer of a model really receives on a text."""

    tokens: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", as_points(self.tokens))

    @property
    def dimension(self) -> int:
        """The d of R^d."""
        return int(self.tokens.shape[1])

    @property
    def radius(self) -> float:
        """Largest norm of a token."""
        return float(self.tokens.norm(dim=-1).max())

    def sample(self, size: int, seed: int = 0) -> Tensor:
        """Rows chosen with equal chances."""
        return self.tokens[torch.randint(len(self.tokens), (size,), generator=_generator(size, seed))]

    def __str__(self) -> str:
        return f"{len(self.tokens)} real tokens"


MOST_CLUSTERS = 100_000
LAW_SYNTAX = "ball:R, sphere:R, gaussian:S, mixture:K:R:S (K Gaussian clusters of deviation S on the sphere of radius R)"


def parse_law(text: str, dimension: int, default_size: float | None = None) -> Law:
    """A law from a short string.

    Args:
        text: ``ball:R``, ``sphere:R``, ``gaussian:S`` (standard deviation S per coordinate) or ``mixture:K:R:S``.
        dimension: the d of R^d.
        default_size: the norm that stands for R when it is left out; a Gaussian then gets S = default_size/√d.

    Example:
        >>> print(parse_law("sphere:2", dimension=3), parse_law("gaussian", 4, default_size=1.0))
        sphere:2 gaussian:0.5
    """
    name, *given = text.split(":")
    try:
        numbers = [float(part) for part in given]
    except ValueError:
        raise ValueError(_unknown(text)) from None
    if not numbers and default_size is not None:
        numbers = [default_size / math.sqrt(dimension) if name == "gaussian" else default_size]
        if name == "mixture":
            numbers = [4, default_size, default_size / (4 * math.sqrt(dimension))]
    match name, numbers:
        case "ball", [radius]:
            return Ball(dimension, radius)
        case "sphere", [radius]:
            return Sphere(dimension, radius)
        case "gaussian", [std]:
            return Gaussian(dimension, std)
        case "mixture", [count, _, _] if count > MOST_CLUSTERS:
            raise ValueError(f"a mixture has at most {MOST_CLUSTERS} clusters, got {count:g} in {text!r}")
        case "mixture", [count, radius, std] if count >= 1 and count == int(count):
            # The centres are part of the law, so they do not follow the seed of a sample.
            centres = Sphere(dimension, radius).sample(int(count), seed=12345)
            shares = torch.full((int(count),), 1 / count, dtype=torch.float64)
            return GaussianMixture(centres, (std,) * int(count), shares)
    raise ValueError(_unknown(text))


def _unknown(text: str) -> str:
    return f"unknown law {text!r}; laws are: {LAW_SYNTAX}"


def _check(dimension: int, name: str, value: float) -> None:
    if dimension < 1:
        raise ValueError(f"dimension must be at least 1, got {dimension}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}")


def _generator(size: int, seed: int) -> torch.Generator:
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    return torch.Generator().manual_seed(seed)


def _directions(size: int, dimension: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(size, dimension, generator=generator, dtype=torch.float64)
    unit: Tensor = normal / normal.norm(dim=-1, keepdim=True)
    return unit
