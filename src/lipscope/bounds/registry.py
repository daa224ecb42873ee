"""Which bound holds where, and how to evaluate bounds by name.

The bounds are the functions under a decorator ``@bound`` in the modules imported here. A combination of bound, mask and
score rule that does not hold raises an error that lists the bounds that do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal, Full, Mask
from lipscope.attention.variants import Variant
from lipscope.bounds import certificates, pairs, sets, softmax_jacobian, variants  # noqa: F401  they define the bounds
from lipscope.bounds.bound import ENTRIES, FEATURES, MASKS, Bound, Entry
from lipscope.bounds.constants import additive_length


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
        radius = float(torch.linalg.vector_norm(x.double(), dim=-1).max()) if radius is None else radius
        n = x.shape[0] if n is None else n
    given = {"x": x, "radius": radius, "n": n}
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

    Where a closed form gives the same number, the form that looks at the whole mask is left out.
    """
    kind = mask_kind(layer)
    values = [
        bound.value
        for entry in _holding(layer)
        if entry.source == source and kind not in entry.superseded and "x" not in entry.needs
        for bound in entry.at(layer, radius=radius, n=n)
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
        allowed = ["✓" if feature in entry.features else "–" for feature in FEATURES]
        cells = [f"`{entry.name}`", entry.side, ", ".join(entry.needs), *masks, *allowed, ", ".join(entry.scores)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _holding(layer: Attention | Variant) -> list[Entry]:
    kind = layer.kind if isinstance(layer, Variant) else "dot"
    mask, used = mask_kind(layer), features(layer)
    return [e for e in ENTRIES.values() if kind in e.scores and mask in e.masks and used <= e.features]
