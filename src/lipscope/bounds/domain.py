"""Where tokens may lie: the ball B_R, or the image of a normalisation.

Both are affine images x = D z + β of a ball ‖z‖ ≤ ρ (for LayerNorm with Σz = 0), token by token:

    ball          D = I            β = 0       ρ = R
    LayerNorm     D = diag(g) C    β = bias    ρ = √d      C removes the mean
    RMSNorm       D = diag(g)      β = 0       ρ = √d

The search runs on z: ``tokens`` gives X from z, ``coordinates`` the z of the nearest admissible tokens, ``project`` the
nearest admissible z, ``pull_back`` is Dᵀ, and ``affine`` gives D and β. No token of the set is longer than ``radius``, which
is the R of set bounds. With ε > 0 the inside of the ellipsoid is reached by tokens of small variance, its surface in the
limit of large ones; with ε = 0 only the surface ‖z‖ = √d is reached. The sphere of radius R is ``sphere(R, d)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.attention.norms import LayerNorm, Normalisation, RMSNorm

# The searches multiply several norms of tokens, and far beyond this float64 overflows. Scores that are too large for correct
# digits are refused by their own size, which depends on the weights too.
LARGEST_RADIUS = 1e30


@dataclass(frozen=True, eq=False)
class Domain:
    """Tokens of norm at most R, or those that a LayerNorm or an RMSNorm can produce."""

    size: float  # ρ
    radius: float  # of the longest token
    norm: Normalisation | None = None

    def tokens(self, z: Tensor) -> Tensor:
        """g∘z + β."""
        if self.norm is None:
            return z
        y = self.norm.weight.detach().to(z) * z
        return y if self.norm.bias is None else y + self.norm.bias.detach().to(z)

    def coordinates(self, X: Tensor) -> Tensor:
        """(X − β)/g, projected; coordinates with g = 0 carry nothing and get 0."""
        if self.norm is None:
            return self.project(X)
        g = self.norm.weight.detach().to(X)
        centred = X if self.norm.bias is None else X - self.norm.bias.detach().to(X)
        return self.project(torch.where(g == 0, torch.zeros_like(centred), centred / torch.where(g == 0, 1.0, g)))

    def project(self, z: Tensor) -> Tensor:
        """Remove the mean (LayerNorm) and shorten to ρ; for a normalisation with ε = 0 also lengthen."""
        if self.norm is not None and self.norm.centred:
            z = z - z.mean(-1, keepdim=True)
        norms = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
        if self.norm is None or self.norm.eps > 0:
            return z * torch.clamp(self.size / norms.clamp_min(torch.finfo(z.dtype).tiny), max=1.0)
        # Every point of the sphere is as near to its centre as any other; this one has mean zero.
        somewhere = torch.zeros_like(z)
        somewhere[..., 0], somewhere[..., -1] = 1, -1
        return self.size * torch.where(norms > 0, z / torch.where(norms > 0, norms, 1.0), somewhere / math.sqrt(2))

    @property
    def fixed(self) -> bool:
        """Whether only the surface ‖z‖ = ρ is reached: a normalisation with ε = 0."""
        return self.norm is not None and self.norm.eps == 0

    def free_directions(self, like: Tensor) -> Tensor:
        """An orthonormal basis (d, ·) of the z: everything, or what has mean zero."""
        d = like.shape[-1]
        identity = torch.eye(d, dtype=like.dtype, device=like.device)
        if self.norm is None or not self.norm.centred or d == 1:
            return identity
        # A reflection that takes the first unit vector to the mean leaves the others orthogonal to it.
        mirror = torch.full((d,), 1 / math.sqrt(d), dtype=like.dtype, device=like.device) - identity[0]
        return (identity - 2 * torch.outer(mirror, mirror) / mirror.square().sum())[:, 1:]

    def pull_back(self, gradient: Tensor) -> Tensor:
        """C(g∘gradient)."""
        if self.norm is None:
            return gradient
        pulled = self.norm.weight.detach().to(gradient) * gradient
        return pulled - pulled.mean(-1, keepdim=True) if self.norm.centred else pulled

    def affine(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """diag(g)·C and β."""
        if self.norm is None:
            d = like.shape[-1]
            return torch.eye(d, dtype=like.dtype, device=like.device), like.new_zeros(d)
        g = self.norm.weight.detach().to(like)
        D = torch.diag(g)
        if self.norm.centred:
            D = D - D.mean(1, keepdim=True)
        return D, torch.zeros_like(g) if self.norm.bias is None else self.norm.bias.detach().to(like)

    def __str__(self) -> str:
        where = "tokens of" if self.norm is None else f"the image of {type(self.norm).__name__},"
        return f"{where} norm ≤ {self.radius:.6g}"


def ball(radius: float) -> Domain:
    """Tokens of norm at most R."""
    if not 0 < radius < math.inf:
        raise ValueError(f"radius must be positive and finite, got {radius:g}")
    if radius > LARGEST_RADIUS:
        raise ValueError(f"radius must be at most {LARGEST_RADIUS:g}, or float64 overflows, got {radius:g}")
    return Domain(radius, radius)


def sphere(radius: float, width: int) -> Domain:
    """Tokens (…, width) of norm exactly R: what RMSNorm with ε = 0 and equal gains puts out."""
    return image(RMSNorm(torch.full((width,), ball(radius).radius / math.sqrt(width), dtype=torch.float64), eps=0.0))


def image(norm: Normalisation) -> Domain:
    """The tokens that a LayerNorm or an RMSNorm can produce."""
    if not isinstance(norm, LayerNorm | RMSNorm):
        raise TypeError(f"norm must be a LayerNorm or an RMSNorm, got {type(norm).__name__}")
    return Domain(math.sqrt(norm.weight.numel()), norm.image_radius(), norm)


def domain_of(radius: float | None, norm: Normalisation | None, width: int) -> Domain:
    """The set that ``radius`` or ``norm`` describes; refuses both, neither, and a norm of another width."""
    if (radius is None) == (norm is None):
        raise ValueError("give either radius (tokens of norm ≤ R) or norm (the image of a LayerNorm or RMSNorm)")
    if norm is None:
        assert radius is not None
        return ball(float(radius))
    found = image(norm)
    if norm.weight.numel() != width:
        raise ValueError(f"norm has width {norm.weight.numel()}, but the layer takes tokens of width {width}")
    return found
