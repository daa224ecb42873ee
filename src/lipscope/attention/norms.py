"""LayerNorm and RMSNorm as maps that bounds can reason about: Jacobian, local norm, and the radius of the image.

    LayerNorm  y = g∘z + β,  z = (x − mean x)/s,  s = √(var x + ε)       RMSNorm  y = g∘z,  z = x/s,  s = √(mean x² + ε)
    Dy = diag(g)(1/s)(C − zzᵀ/d)        C = I − 11ᵀ/d for LayerNorm, I for RMSNorm

Every z has norm at most √d (and mean zero for LayerNorm), so the image lies in a ball whatever the input: behind its own
normalisation an attention layer has a finite Lipschitz constant on its real input set. As ε → 0 the map itself is not
Lipschitz: ‖Dy‖ ≤ ‖g‖_∞/s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class NormLinearisation:
    """A normalisation at tokens (B, n, d): everything its Jacobian products need."""

    g: Tensor  # gains (d,)
    z: Tensor  # normalised tokens before the gains
    s: Tensor  # scales (B, n, 1)
    centred: bool  # LayerNorm subtracts the mean

    def jvp(self, u: Tensor) -> Tensor:
        """Dy·u = g∘(Cu − z⟨z,u⟩/d)/s."""
        return self.g * self._project(u)

    def vjp(self, w: Tensor) -> Tensor:
        """Dyᵀ·w = (C − zzᵀ/d)(g∘w)/s."""
        return self._project(self.g * w)

    def select(self, items: Tensor) -> NormLinearisation:
        """Keep the listed batch items."""
        return NormLinearisation(self.g, self.z[items], self.s[items], self.centred)

    def _project(self, u: Tensor) -> Tensor:
        d = u.shape[-1]
        along = (self.z * u).sum(-1, keepdim=True) / d
        centre = u.mean(-1, keepdim=True) if self.centred else 0.0
        return (u - centre - self.z * along) / self.s

    def local_norm(self, steps: int = 80) -> Tensor:
        """An upper bound for ‖Dy‖₂ of every token, shape (B, n): its square exceeds ‖Dy‖₂² by about 10⁻¹²(‖g‖_∞/s)².

        That is for rounding, 400 times the largest error found, and matters where the derivative nearly vanishes.

        s²·Dy Dyᵀ = G² − UUᵀ with G = diag(g) and U of at most two columns, G1/√d and √θ Gẑ, where ẑ = z/‖z‖,
        t = ‖z‖²/d and θ = 2t − t². By Sylvester's law the number of eigenvalues above λ is the number of g_i² above λ,
        plus the positive eigenvalues of I − Uᵀ(G² − λ)⁻¹U, minus the columns of U; λ_max follows by bisection.
        """
        g = self.g.double()
        z = self.z.double()
        d = z.shape[-1]
        size2 = z.square().sum(-1, keepdim=True)
        t = (size2 / d).clamp(max=1.0)
        columns = [g * z * ((2 * t - t.square()) / size2.clamp_min(1e-300)).sqrt()]
        if self.centred:
            columns.append((g / math.sqrt(d)).expand_as(z))
        U = torch.stack(columns, dim=-1)
        square = g.square()
        high = square.max().expand(z.shape[:-1]).clone() * (1 + 1e-14)
        low = torch.zeros_like(high)
        for _ in range(steps):
            middle = (low + high) / 2
            gap = square - middle[..., None]
            gap = torch.where(gap == 0, torch.full_like(gap, 1e-300), gap)
            S = torch.eye(U.shape[-1], dtype=U.dtype, device=U.device) - U.mT @ (U / gap[..., None])
            above = (gap > 0).sum(-1) + (_eigenvalues(S) > 0).sum(-1) - U.shape[-1] > 0
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return (high + 1e-12 * square.max()).sqrt() / self.s[..., 0].double()


def _eigenvalues(S: Tensor) -> Tensor:
    """Eigenvalues of symmetric 1×1 or 2×2 matrices; closed form, since entries may be as large as 1e300."""
    if S.shape[-1] == 1:
        return S[..., 0]
    a, b, c = S[..., 0, 0], S[..., 0, 1], S[..., 1, 1]
    half = torch.hypot((a - c) / 2, b)
    middle = (a + c) / 2
    return torch.stack([middle - half, middle + half], dim=-1)


class _Normalisation:
    """What LayerNorm and RMSNorm share; ``centred`` says whether the mean is subtracted."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: ClassVar[bool]

    def __post_init__(self) -> None:
        weight, bias = self.weight, self.bias
        if weight.ndim != 1 or not weight.is_floating_point():
            raise ValueError(f"weight must be a floating vector (d,), got {weight.dtype} {tuple(weight.shape)}")
        if bias is not None and bias.shape != weight.shape:
            raise ValueError(f"bias has shape {tuple(bias.shape)}, but weight has shape {tuple(weight.shape)}")
        if not self.eps >= 0:
            raise ValueError(f"eps must not be negative, got {self.eps}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(d={len(self.weight)}, eps={self.eps:g})"

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise tokens (…, d)."""
        at, offset = self.linearise(x), self.offset(x)
        y = at.g * at.z
        return y if offset is None else y + offset

    def offset(self, x: Tensor) -> Tensor | None:
        """β as tokens x have it: their dtype and device."""
        return None if self.bias is None else self.bias.detach().to(x)

    def linearise(self, x: Tensor) -> NormLinearisation:
        """The Jacobian at tokens (B, n, d)."""
        if x.shape[-1] != self.weight.numel():
            raise ValueError(f"tokens have width {x.shape[-1]}, but the normalisation has width {self.weight.numel()}")
        about = x
        if self.centred:
            # Twice: the mean of large entries is rounded, what is left of it is not.
            about = x - x.mean(-1, keepdim=True)
            about = about - about.mean(-1, keepdim=True)
        # By a power of two, squares stay within the range of floats, and no digit changes.
        size = about.detach().abs().amax(-1, keepdim=True).clamp_min(max(math.sqrt(self.eps), torch.finfo(x.dtype).tiny))
        size = torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent)
        s = ((about / size).square().mean(-1, keepdim=True) + self.eps / size / size).sqrt() * size
        return NormLinearisation(self.weight.detach().to(x), about / s, s, self.centred)

    def image_radius(self) -> float:
        """Largest norm R = max ‖g∘z + β‖ of an output, over ‖z‖ ≤ √d (and Σz = 0 when centred): at most √d‖g‖_∞ + ‖β‖.

        A convex quadratic over a ball: by duality R² = min over λ > λ_max(H) of λd + bᵀ(λ − H)⁻¹b + ‖β‖², H = C G² C,
        b = C Gβ. Every λ gives a valid upper bound, so the one-dimensional search need not be exact.
        """
        g = self.weight.detach().double()
        d = g.numel()
        beta = torch.zeros_like(g) if self.bias is None else self.bias.detach().double()
        simple = math.sqrt(d) * float(g.abs().max()) + float(torch.linalg.vector_norm(beta))
        if not self.centred and self.bias is None:
            return simple
        H, b = torch.diag(g.square()), g * beta
        if self.centred:
            H = H - H.mean(0, keepdim=True)
            H = H - H.mean(1, keepdim=True)
            b = b - b.mean()
        values, vectors = torch.linalg.eigh(H)
        inner = (vectors.mT @ b).square()
        top = float(values[-1]) * (1 + 1e-12)
        if top <= 0:
            return float(torch.linalg.vector_norm(beta))
        levels = top * (1 + 10 ** torch.linspace(-14, 8, 2201, dtype=torch.float64, device=values.device))

        def squares(some: Tensor) -> Tensor:
            return torch.add(some * d, (inner / (some[:, None] - values)).sum(-1))

        # Convex in λ: the least of all levels is within a step of the least of every fortieth.
        near = 40 * int(squares(levels[::40]).argmin())
        best = float(squares(levels[max(0, near - 40) : near + 41]).min())
        return min(simple, math.sqrt(best + float(beta.square().sum())))


@dataclass(frozen=True, eq=False, repr=False)
class LayerNorm(_Normalisation):
    """LayerNorm with gains g, offsets β and ε.

    Attributes:
        weight: gains g (d,).
        bias: offsets β (d,), or None.
        eps: ε.

    Example:
        >>> import torch
        >>> norm = LayerNorm(torch.ones(4, dtype=torch.float64))
        >>> round(norm.image_radius(), 6)
        2.0
    """

    weight: Tensor
    bias: Tensor | None = None
    eps: float = 1e-5
    centred: ClassVar[bool] = True

    @classmethod
    def from_torch(cls, module: nn.LayerNorm) -> LayerNorm:
        """Describe a torch ``nn.LayerNorm`` over the last dimension; its tensors are copied."""
        if len(module.normalized_shape) != 1:
            raise ValueError(f"LayerNorm must act on the last dimension only, got {module.normalized_shape}")
        weight = torch.ones(module.normalized_shape) if module.weight is None else module.weight.detach().clone()
        bias = None if module.bias is None else module.bias.detach().clone()
        return cls(weight, bias, module.eps)


@dataclass(frozen=True, eq=False, repr=False)
class RMSNorm(_Normalisation):
    """RMSNorm with gains g and ε; its image has radius √d·‖g‖_∞.

    Attributes:
        weight: gains g (d,).
        eps: ε.
    """

    weight: Tensor
    eps: float = 1e-6
    bias: ClassVar[None] = None  # type: ignore[misc]
    centred: ClassVar[bool] = False


Normalisation = LayerNorm | RMSNorm
