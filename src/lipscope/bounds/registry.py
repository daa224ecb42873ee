"""Which bound holds where, how to evaluate bounds by name, and ``table``: every bound that applies to a layer, beside σ.

The bounds are the functions under a decorator ``@bound`` in the modules imported here. A combination of bound, mask and
score rule that does not hold raises an error that lists the bounds that do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal, Full, Mask
from lipscope.attention.operators import AttentionOperator
from lipscope.attention.validation import balanced, scaled_back
from lipscope.attention.variants import Variant
from lipscope.bounds import certificates, exponent, pairs, sets, softmax_jacobian, variants  # noqa: F401  they define the bounds
from lipscope.bounds.bound import ENTRIES, FEATURES, MASKS, MOST_TOKENS, Bound, Entry
from lipscope.bounds.constants import additive_length
from lipscope.rounding import Shown, interval
from lipscope.spectral.result import SpectralNorm, reshape_batch, summarise, with_certificate
from lipscope.spectral.solvers import Auto


def names(layer: Attention | Variant | None = None) -> tuple[str, ...]:
    """The bounds that hold for a layer's mask and score rule; all of them without a layer.

    Example:
        >>> "refined.masked" in names()
        True
    """
    return tuple(ENTRIES if layer is None else (entry.name for entry in _holding(layer)))


def evaluate(
    name: str,
    layer: Attention | Variant,
    *,
    x: Tensor | None = None,
    radius: float | None = None,
    n: int | None = None,
) -> Bound:
    """Evaluate one bound by name.

    Args:
        name: one of ``names()``.
        layer: the layer, or a variant.
        x: tokens (n, d), for local bounds; they also give ``radius`` and ``n`` when those are None.
        radius: R, for set bounds.
        n: number of tokens, for set bounds.

    Returns:
        The bound.

    Raises:
        ValueError: when the bound does not hold for this layer, or an argument that it needs is missing.

    Example:
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> round(evaluate("refined.unmasked", Attention(q=0 * W, k=W, v=W), radius=1.0, n=10).value, 9)
        1.0
    """
    require(name, layer)
    entry = ENTRIES[name]
    if x is not None:
        if x.ndim != 2:
            raise ValueError(f"x must have shape (n, d), got {tuple(x.shape)}")
        radius = float(torch.linalg.vector_norm(x.double(), dim=-1).max()) if radius is None else radius
        n = x.shape[0] if n is None else n
    given = {"x": x, "radius": radius, "n": n}
    _refuse_size(layer, radius, n if x is None or n != len(x) else None)
    if any(given[argument] is None for argument in entry.needs):
        raise ValueError(f"{name} needs {', '.join(entry.needs).replace('x', 'tokens x of shape (n, d)')}")
    found = {bound.name: bound for bound in entry.at(layer, **given)}
    if name not in found:
        raise ValueError(f"{name} says nothing of this layer at this length; there are: {', '.join(found) or 'none'}")
    return found[name]


def applicable(
    layer: Attention | Variant,
    *,
    x: Tensor | None = None,
    radius: float | None = None,
    n: int | None = None,
    side: str | None = None,
    sources: Sequence[str] | None = None,
) -> Iterator[Bound]:
    """Every bound that holds for a layer and needs no more than what is given, in the order in which they are defined.

    Without tokens x (n, d) there are no local bounds; ``sources`` are the only ones, in their order.
    """
    given = {"x": x, "radius": radius, "n": n}
    entries = [entry for entry in _holding(layer) if side in (None, entry.side)]
    if sources is not None:
        entries = [entry for source in sources for entry in entries if entry.source == source]
    wanted = {entry.name for entry in entries}
    evaluated = set()
    for entry in entries:
        # A function that is several bounds is evaluated once.
        if entry.function not in evaluated and all(given[argument] is not None for argument in entry.needs):
            evaluated.add(entry.function)
            yield from (bound for bound in entry.at(layer, **given) if bound.name in wanted)


def set_bounds(layer: Attention | Variant, radius: float, n: int, sources: Sequence[str] | None = None) -> tuple[Bound, ...]:
    """Upper bounds for all inputs of n tokens in the ball B_R, Frobenius norms; of some ``sources`` only, in their order."""
    found = applicable(layer, radius=radius, n=n, side="upper", sources=sources)
    return tuple(bound for bound in found if bound.norm == "Frobenius" and bound.kind == "set")


def least(source: str, layer: Attention | Variant, radius: float, n: int) -> float | None:
    """The least set bound of a source for n tokens of norm at most ``radius``; None when it has none for this layer.

    Where a closed form gives the same number, the form that looks at the whole mask is left out. That form takes a layer
    made for one length at that length: n may be the number of its real tokens, and padding neither sees nor is seen.
    """
    kind = mask_kind(layer)
    made = additive_length(layer) or n
    values = [
        bound.value
        for entry in _holding(layer)
        if entry.source == source and kind not in entry.superseded and "x" not in entry.needs
        for bound in entry.at(layer, radius=radius, n=made if entry.superseded else n)
    ]
    return min(values, default=None)


def mask_kind(layer: Attention | Variant) -> str:
    """The column of the grid that a layer's mask belongs to."""
    return "full" if isinstance(layer.mask, Full) else "causal" if isinstance(layer.mask, Causal) else "other"


def features(layer: Attention | Variant) -> frozenset[str]:
    """What a layer uses besides its plain scores of one head."""
    if isinstance(layer, Variant):
        return frozenset(("several_heads",) if layer.heads > 1 else ())
    assert isinstance(layer.mask, Mask)
    n = additive_length(layer)
    used = {
        "query_bias": layer.q_bias is not None and bool(layer.q_bias.any()),
        "additive": layer.bias is not None or (n is not None and layer.mask.additive(n) is not None),
        "softcap": layer.softcap is not None,
        "sinks": layer.sinks is not None,
        "rotary": layer.rotary is not None,
        "several_heads": layer.heads > 1,
    }
    return frozenset(name for name, present in used.items() if present)


def require(name: str, layer: Attention | Variant) -> None:
    """Refuse a bound that does not hold for a layer, listing those that do."""
    if name not in ENTRIES:
        raise ValueError(f"unknown bound {name!r}; bounds are: {', '.join(ENTRIES)}")
    holding = names(layer)
    if name in holding:
        return
    entry = ENTRIES[name]
    if entry.scores == ("dot",):
        allowed = ", ".join(feature for feature in FEATURES if feature in entry.features) or "none"
        rule = f"masks {', '.join(mask for mask in MASKS if mask in entry.masks)} with features among {allowed}"
        rule += f", {', '.join(entry.required)} among them" if entry.required else ""
    else:
        rule = f"{' and '.join(entry.scores)} attention only"
    raise ValueError(
        f"{name} does not hold for mask {layer.mask} with features {', '.join(sorted(features(layer))) or 'none'}: "
        f"it holds for {rule}. For this layer there are: {', '.join(holding)}"
    )


def markdown() -> str:
    """The grid of bounds × masks × features as Markdown, for the documentation."""
    lines = ["| bound | side | needs | full | causal | other masks | " + " | ".join(FEATURES) + " | scores |"]
    lines.append("|" + "---|" * (7 + len(FEATURES)))
    for entry in ENTRIES.values():
        masks = ["✓" if mask in entry.masks else "–" for mask in MASKS]
        allowed = ["only" if f in entry.required else "✓" if f in entry.features else "–" for f in FEATURES]
        cells = [f"`{entry.name}`", entry.side, ", ".join(entry.needs), *masks, *allowed, ", ".join(entry.scores)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _holding(layer: Attention | Variant) -> list[Entry]:
    kind = layer.kind if isinstance(layer, Variant) else "dot"
    mask, used = mask_kind(layer), features(layer)
    return [e for e in ENTRIES.values() if kind in e.scores and mask in e.masks and e.required <= used <= e.features]


@dataclass(frozen=True, eq=False, repr=False)
class BoundTable(Shown):
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
    _refuse_size(layer, radius, n if X is None else None)
    bounds = sorted(applicable(layer, x=X, radius=radius, n=n), key=_order)
    sigma = None if X is None else _measure(layer, X, bounds)
    return BoundTable(tuple(bounds), sigma, radius, n)


def _refuse_size(layer: Attention | Variant, radius: float | None, n: int | None) -> None:
    """Refuse what no set of inputs has, and more tokens than can be looked at one by one where there is no closed form."""
    if radius is not None and not 0 <= radius < math.inf:
        raise ValueError(f"radius must be finite and not negative, got {radius!r}")
    closed = isinstance(layer.mask, Full) or (isinstance(layer, Attention) and isinstance(layer.mask, Causal))
    closed &= getattr(layer, "rotary", None) is None
    most = MOST_TOKENS if closed else 1 << (14 if isinstance(layer, Variant) else 16)
    if n is not None and not 1 <= n <= most:
        why = "" if closed else ", whose mask or positions are looked at token by token"
        raise ValueError(f"n must lie between 1 and {most} for this layer{why}; got {n}")


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
    layer, tokens, power = layer.to(X.dtype, X.device), X[None], 0
    if isinstance(layer, Attention):
        layer, tokens, _, power = balanced(layer, tokens)
    operator = AttentionOperator.at(layer, tokens)
    result = scaled_back(summarise(Auto().solve(operator), operator, scope="attention", mask=str(layer.mask)), power)
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
    return bound.kind not in ("limit", "sup n") and bound.norm == "Frobenius"
