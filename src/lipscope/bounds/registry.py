"""Which bound holds where: the one table of bounds × masks × score rules, and how to evaluate a bound by name.

A layer uses *features*; a bound supports a set of them. A combination that is not in the table raises an error that lists
the ones that are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal, Full, Mask
from lipscope.bounds import block_inf, castin2024, large_radius, newhouse2025, refined, yudin2025
from lipscope.bounds.bound import Bound, Side
from lipscope.bounds.certificates import local_bounds
from lipscope.bounds.constants import additive_length

MaskKind: TypeAlias = Literal["full", "causal", "other"]
Feature: TypeAlias = Literal["query_bias", "additive", "softcap", "sinks", "rotary", "several_heads"]

MASKS: tuple[MaskKind, ...] = ("full", "causal", "other")
FEATURES: tuple[Feature, ...] = ("query_bias", "additive", "softcap", "sinks", "rotary", "several_heads")
_ANY = frozenset(FEATURES)


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    Attributes:
        name: the bound.
        masks: masks it holds for (``other``: windows, prefixes, padding, packing, tensors, combinations).
        features: what the layer may use besides plain dot-product scores; key and value biases are always allowed.
        needs: ``"radius"`` (R alone), ``"radius, n"`` or ``"input"``.
        side: upper or lower.
        scores: ``"dot"`` (softmax of scaled dot products) or ``"l2"`` (softmax of negative squared distances).
    """

    name: str
    masks: frozenset[MaskKind]
    features: frozenset[Feature]
    needs: Literal["radius", "radius, n", "input", "weights"]
    side: Side = "upper"
    scores: Literal["dot", "l2"] = "dot"


def _entry(
    name: str,
    needs: Literal["radius", "radius, n", "input", "weights"],
    masks: tuple[MaskKind, ...] = MASKS,
    without: tuple[Feature, ...] = (),
    side: Side = "upper",
    scores: Literal["dot", "l2"] = "dot",
) -> Entry:
    return Entry(name, frozenset(masks), _ANY - frozenset(without), needs, side, scores)


_PLAIN: tuple[Feature, ...] = FEATURES

TABLE: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        _entry("castin2024.general", "radius, n"),
        _entry("castin2024.meanfield", "radius", masks=("full",), without=("additive",)),
        _entry("refined.unmasked", "radius, n", masks=("full",)),
        _entry("refined.masked", "radius, n", masks=("causal",)),
        _entry("refined.visibility", "radius, n"),
        _entry("block_inf.max_token", "radius"),
        _entry("block_inf.frobenius", "radius, n"),
        _entry("newhouse2025.attention", "radius", without=("query_bias", "softcap", "sinks", "rotary")),
        _entry("kim2021.l2mha", "weights", masks=("full",), without=_PLAIN[:-1], scores="l2"),
        _entry("yudin2025.published", "input", without=("rotary",)),
        _entry("yudin2025.improved", "input"),
        _entry("certificates.row_column", "input"),
        _entry("certificates.block_norm", "input"),
        _entry("certificates.row_gram", "input", without=("several_heads",)),
        _entry("certificates.factored", "input"),
        _entry("large_radius.limit", "input", without=("softcap", "sinks")),
        _entry("lower.pair", "radius, n", masks=("full", "causal"), without=_PLAIN, side="lower"),
        _entry("lower.proposition34", "radius, n", masks=("full", "causal"), without=_PLAIN, side="lower"),
        _entry("lower.groups", "radius, n", masks=("full", "causal"), without=_PLAIN, side="lower"),
        _entry("lower.meanfield", "radius", masks=("full",), without=_PLAIN, side="lower"),
    )
}

_SET: dict[str, Callable[[Attention, float, int], Bound]] = {
    "castin2024.general": castin2024.general,
    "castin2024.meanfield": lambda layer, radius, n: castin2024.meanfield(layer, radius),
    "refined.unmasked": refined.unmasked,
    "refined.masked": refined.masked,
    "refined.visibility": refined.visibility,
    "block_inf.max_token": lambda layer, radius, n: block_inf.max_token(layer, radius, n or None),
    "block_inf.frobenius": block_inf.frobenius,
    "newhouse2025.attention": lambda layer, radius, n: newhouse2025.attention(layer, radius),
}
_LOCAL: dict[str, Callable[[Attention, Tensor], Bound]] = {
    "yudin2025.published": yudin2025.published,
    "yudin2025.improved": yudin2025.improved,
    "large_radius.limit": large_radius.limit,
}


def mask_kind(layer: Attention) -> MaskKind:
    """The column of the table a layer's mask belongs to."""
    return "full" if isinstance(layer.mask, Full) else "causal" if isinstance(layer.mask, Causal) else "other"


def features(layer: Attention) -> frozenset[Feature]:
    """What a layer uses besides plain dot-product scores of one head."""
    assert isinstance(layer.mask, Mask)
    n = additive_length(layer)
    used: dict[Feature, bool] = {
        "query_bias": layer.q_bias is not None and bool(layer.q_bias.any()),
        "additive": layer.bias is not None or (n is not None and layer.mask.additive(n) is not None),
        "softcap": layer.softcap is not None,
        "sinks": layer.sinks is not None,
        "rotary": layer.rotary is not None,
        "several_heads": layer.heads > 1,
    }
    return frozenset(name for name, present in used.items() if present)


def supports(name: str, layer: Attention) -> bool:
    """Whether bound ``name`` holds for a layer's mask and score rule."""
    entry = _find(name)
    return entry.scores == "dot" and mask_kind(layer) in entry.masks and features(layer) <= entry.features


def require(name: str, layer: Attention) -> None:
    """Refuse a combination that is not in the table, listing those that are.

    Raises:
        ValueError: when the bound is unknown or does not hold for this layer.
    """
    entry = _find(name)
    if supports(name, layer):
        return
    used = ", ".join(sorted(features(layer))) or "none"
    others = [other for other in TABLE if supports(other, layer)]
    rule = "L2 attention only" if entry.scores == "l2" else (
        f"masks {', '.join(m for m in MASKS if m in entry.masks)} with features among "
        f"{', '.join(f for f in FEATURES if f in entry.features) or 'none'}"
    )  # fmt: skip
    raise ValueError(
        f"{name} does not hold for mask {layer.mask} with features {used}: it holds for {rule}. "
        f"For this layer there are: {', '.join(others)}"
    )


def evaluate(name: str, layer: Attention, *, x: Tensor | None = None, radius: float | None = None,
             n: int | None = None) -> Bound:  # fmt: skip
    """Evaluate one bound of the table by name.

    Args:
        name: a key of ``TABLE``.
        layer: the layer.
        x: tokens (n, d), for local bounds; they also give ``radius`` and ``n`` when those are None.
        radius: R, for set bounds.
        n: number of tokens, for set bounds.

    Returns:
        The bound.

    Raises:
        ValueError: when the combination is not in the table, or an argument that the bound needs is missing.
    """
    require(name, layer)
    entry = TABLE[name]
    if entry.needs == "input":
        if x is None:
            raise ValueError(f"{name} is a local bound: it needs tokens x of shape (n, d)")
        if name in _LOCAL:
            return _LOCAL[name](layer, x)
        found = {bound.name: bound for bound in local_bounds(layer, x)}
        if name not in found:
            raise ValueError(f"{name} is not computed for this layer and length; there are: {', '.join(found)}")
        return found[name]
    if x is not None:
        radius = float(torch.linalg.vector_norm(x.double(), dim=-1).max()) if radius is None else radius
        n = x.shape[0] if n is None else n
    if radius is None or (n is None and "n" in entry.needs.split(", ")):
        raise ValueError(f"{name} needs {entry.needs}")
    if entry.side == "lower":
        from lipscope.bounds.constructions import closed_form

        bound = closed_form(name, layer, radius, n or 0)
        if bound is None:
            raise ValueError(f"{name} needs a suitable real eigenvalue of A, which this layer does not have")
        return bound
    return _SET[name](layer, radius, n or 0)


def markdown() -> str:
    """The table as Markdown, for the documentation."""
    lines = ["| bound | side | needs | full | causal | other masks | " + " | ".join(FEATURES) + " | scores |"]
    lines.append("|" + "---|" * (7 + len(FEATURES)))
    for entry in TABLE.values():
        masks = ["✓" if mask in entry.masks else "–" for mask in MASKS]
        allowed = ["✓" if feature in entry.features else "–" for feature in FEATURES]
        lines.append("| " + " | ".join([f"`{entry.name}`", entry.side, entry.needs, *masks, *allowed, entry.scores]) + " |")
    return "\n".join(lines)


def _find(name: str) -> Entry:
    if name not in TABLE:
        raise ValueError(f"unknown bound {name!r}; bounds are: {', '.join(TABLE)}")
    return TABLE[name]
