"""``bounds.table``: every bound that applies to a layer, sorted, beside the measured σ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.operators import AttentionOperator
from lipscope.attention.variants import Variant
from lipscope.bounds.bound import Bound
from lipscope.bounds.constants import additive_length
from lipscope.bounds.registry import applicable
from lipscope.rounding import interval
from lipscope.spectral.result import SpectralNorm, reshape_batch, summarise, with_certificate
from lipscope.spectral.solvers import Auto


@dataclass(frozen=True, eq=False)
class BoundTable:
    """Bounds sorted by value within their side: upper bounds first, then lower bounds, then other norms and limits.

    Attributes:
        bounds: all applicable bounds.
        sigma: the measured σ at the given input, or None.
        radius: R.
        n: number of tokens.
    """

    bounds: tuple[Bound, ...]
    sigma: SpectralNorm | None
    radius: float
    n: int

    def ratio(self, bound: Bound) -> float | None:
        """Bound/σ for upper bounds in the Frobenius norm, when σ was measured."""
        if self.sigma is None or bound.side == "lower" or not _comparable(bound):
            return None
        return bound.value / float(self.sigma.estimate) if float(self.sigma.estimate) > 0 else None

    def to_rows(self) -> list[dict[str, Any]]:
        """One plain dictionary per bound."""
        sigma = None if self.sigma is None else float(self.sigma.estimate)
        return [{**bound.to_row(), "sigma": sigma, "ratio": self.ratio(bound)} for bound in self.bounds]

    def __getitem__(self, name: str) -> Bound:
        for bound in self.bounds:
            if bound.name == name:
                return bound
        raise KeyError(f"no bound {name!r} in this table; there are: {', '.join(bound.name for bound in self.bounds)}")

    def __str__(self) -> str:
        head = f"Bounds for tokens of norm ≤ {self.radius:.6g}, n = {self.n}"
        if self.sigma is not None:
            s = self.sigma
            head += f"; measured σ = {float(s.estimate):.6g} ∈ {interval(s.lower, s.upper, 6)}"
        width = max(len(bound.name) for bound in self.bounds)
        lines = [head]
        for bound in self.bounds:
            ratio = self.ratio(bound)
            extra = f"  ×{ratio:.4g}" if ratio is not None else ""
            norm = "" if bound.norm == "Frobenius" else f"  (norm {bound.norm})"
            lines.append(f"  {bound.name:<{width}}  {bound.kind:<5} {bound.sign} {bound.shown()}{extra}{norm}")
        return "\n".join(lines)


def table(
    layer: Attention | Variant, X: Tensor | None = None, radius: float | None = None, n: int | None = None
) -> BoundTable:
    """All bounds that hold for a layer, with the measured σ and lower-bound constructions.

    Set bounds are for tokens in the ball B_R; with tokens given, R is their largest norm and n their number unless said
    otherwise, and local bounds and σ itself are added. Several heads, biases, grouped queries, soft-cap, additive bias
    and sinks are handled as docs/theory says.

    Args:
        layer: the layer, or a variant.
        X: tokens (n, d), or None for set bounds only.
        radius: R; needed without X.
        n: number of tokens; needed without X unless the layer's bias or mask is made for one length.

    Returns:
        A ``BoundTable``; print it, index it by name, or take ``to_rows()``.

    Raises:
        ValueError: when neither X nor radius and n are given, or tokens are longer than the radius.

    Example:
        >>> import torch, lipscope.bounds
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> found = lipscope.bounds.table(lipscope.Attention(q=0 * W, k=W, v=W), radius=1.0, n=10)
        >>> round(found["refined.unmasked"].value, 6)
        1.0
    """
    if X is not None:
        X = _checked(X, layer)
        longest = float(torch.linalg.vector_norm(X.double(), dim=-1).max())
        if radius is not None and longest > radius * (1 + 1e-9):
            raise ValueError(f"X has a token of norm {longest:.6g}, which is more than radius = {radius:.6g}")
        if n is not None and n != X.shape[0]:
            raise ValueError(f"n = {n}, but X has {X.shape[0]} tokens")
        radius, n = longest if radius is None else radius, X.shape[0]
    elif n is None:
        n = additive_length(layer)
    if radius is None or n is None:
        raise ValueError("give tokens X, or a radius and a number of tokens n")
    bounds = sorted(applicable(layer, x=X, radius=radius, n=n), key=_order)
    sigma = None if X is None else _measure(layer, X, bounds)
    return BoundTable(tuple(bounds), sigma, radius, n)


def _checked(X: Tensor, layer: Attention | Variant) -> Tensor:
    """Tokens in a dtype that can be measured."""
    if X.ndim != 2:
        raise ValueError(f"X must have shape (n, d), got {tuple(X.shape)}: make one table per input")
    if X.shape[1] != layer.width or 0 in X.shape:
        raise ValueError(f"X must have shape (n, {layer.width}), got {tuple(X.shape)}")
    if not X.is_floating_point() or not bool(torch.isfinite(X).all()):
        raise ValueError("X must be floating point, without NaN or infinite values")
    return X.detach() if X.dtype in (torch.float32, torch.float64) else X.detach().float()


def _measure(layer: Attention | Variant, X: Tensor, bounds: Sequence[Bound]) -> SpectralNorm:
    """σ at X; its upper end is the least certificate where that is below the solver's."""
    operator = AttentionOperator.at(layer.to(X.dtype, X.device), X[None])
    result = summarise(Auto().solve(operator), operator, scope="attention", mask=str(layer.mask))
    certified = [bound.value for bound in bounds if bound.name.startswith("certificates.")]
    if certified:
        result = with_certificate(result, torch.tensor([min(certified)], dtype=torch.float64, device=X.device))
    return reshape_batch(result, ())


def _order(bound: Bound) -> tuple[int, float]:
    if not _comparable(bound):
        return 2, bound.value
    return (1, -bound.value) if bound.side == "lower" else (0, bound.value)


def _comparable(bound: Bound) -> bool:
    """A bound for σ at this n in the Frobenius norm; not a limit, another norm, or a supremum over n."""
    return bound.kind != "limit" and bound.norm == "Frobenius" and bound.name != "lower.meanfield"
