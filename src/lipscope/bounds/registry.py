"""Which bound holds where: the one table of bounds × masks × score rules, and how to evaluate a bound by name.

A layer uses *features*; a bound supports a set of them. A combination that is not in the table raises an error that lists
the ones that are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal, Full, Mask
from lipscope.attention.variants import SigmoidAttention, Variant
from lipscope.bounds import (
    block_inf,
    bounded_scores,
    castin2024,
    kim2021,
    large_radius,
    nair2025,
    newhouse2025,
    qi2023,
    ramapuram2024,
    refined,
    sinkhorn,
    yudin2025,
)
from lipscope.bounds.bound import Bound, Side
from lipscope.bounds.certificates import local_bounds
from lipscope.bounds.constants import additive_length

MaskKind: TypeAlias = Literal["full", "causal", "other"]
Needs: TypeAlias = Literal["radius", "radius, n", "input", "weights"]
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
        needs: ``"radius"`` (R alone), ``"radius, n"``, ``"input"`` or ``"weights"`` (n alone).
        side: upper or lower.
        scores: the kinds of attention it is about: ``"dot"`` (softmax of scaled dot products) or those of ``Variant``.
    """

    name: str
    masks: frozenset[MaskKind]
    features: frozenset[Feature]
    needs: Needs
    side: Side = "upper"
    scores: tuple[str, ...] = ("dot",)


def _entry(
    name: str,
    needs: Needs,
    masks: tuple[MaskKind, ...] = MASKS,
    without: tuple[Feature, ...] = (),
    side: Side = "upper",
    scores: tuple[str, ...] = ("dot",),
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
        _entry("kim2021.l2mha", "weights", masks=("full",), without=_PLAIN[:-1], scores=("l2",)),
        _entry("qi2023.scsa", "weights", masks=("full",), without=_PLAIN[:-1], scores=("cosine",)),
        _entry("nair2025.scsa", "weights", masks=("full",), without=_PLAIN[:-1], scores=("cosine",)),
        _entry("bounded_scores.softmax", "radius, n", without=_PLAIN[:-1], scores=("l2", "cosine", "qk-norm")),
        _entry("ramapuram2024.local", "input", without=_PLAIN[:-1], scores=("sigmoid",)),
        _entry("ramapuram2024.ball", "radius, n", without=_PLAIN[:-1], scores=("sigmoid",)),
        _entry("sinkhorn.doubly_stochastic", "radius", masks=("full",), without=_PLAIN[:-1], scores=("sinkhorn",)),
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


# Bounds for variants, from the layer, R and n.
_VARIANT: dict[str, Callable[[Any, float, int], Bound]] = {
    "kim2021.l2mha": lambda layer, radius, n: kim2021.of_layer(layer, n),
    "qi2023.scsa": lambda layer, radius, n: qi2023.scsa(layer, n),
    "nair2025.scsa": lambda layer, radius, n: nair2025.scsa(layer, n),
    "bounded_scores.softmax": bounded_scores.softmax,
    "ramapuram2024.ball": ramapuram2024.ball,
    "sinkhorn.doubly_stochastic": lambda layer, radius, n: sinkhorn.doubly_stochastic(layer, radius),
}


def mask_kind(layer: Attention | Variant) -> MaskKind:
    """The column of the table a layer's mask belongs to."""
    return "full" if isinstance(layer.mask, Full) else "causal" if isinstance(layer.mask, Causal) else "other"


def features(layer: Attention | Variant) -> frozenset[Feature]:
    """What a layer uses besides its plain scores of one head."""
    if isinstance(layer, Variant):
        return frozenset(("several_heads",) if layer.heads > 1 else ())
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


def supports(name: str, layer: Attention | Variant) -> bool:
    """Whether bound ``name`` holds for a layer's mask and score rule."""
    entry = _find(name)
    kind = layer.kind if isinstance(layer, Variant) else "dot"
    return kind in entry.scores and mask_kind(layer) in entry.masks and features(layer) <= entry.features


def require(name: str, layer: Attention | Variant) -> None:
    """Refuse a combination that is not in the table, listing those that are.

    Raises:
        ValueError: when the bound is unknown or does not hold for this layer.
    """
    entry = _find(name)
    if supports(name, layer):
        return
    used = ", ".join(sorted(features(layer))) or "none"
    others = [other for other in TABLE if supports(other, layer)]
    rule = f"{' and '.join(entry.scores)} attention only" if entry.scores != ("dot",) else (
        f"masks {', '.join(m for m in MASKS if m in entry.masks)} with features among "
        f"{', '.join(f for f in FEATURES if f in entry.features) or 'none'}"
    )  # fmt: skip
    raise ValueError(
        f"{name} does not hold for mask {layer.mask} with features {used}: it holds for {rule}. "
        f"For this layer there are: {', '.join(others)}"
    )


def evaluate(name: str, layer: Attention | Variant, *, x: Tensor | None = None, radius: float | None = None,
             n: int | None = None) -> Bound:  # fmt: skip
    """Evaluate one bound of the table by name.

    Args:
        name: a key of ``TABLE``.
        layer: the layer, or a variant.
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
        if isinstance(layer, Variant):
            assert isinstance(layer, SigmoidAttention)
            return ramapuram2024.local(layer, x)
        if name in _LOCAL:
            return _LOCAL[name](layer, x)
        found = {bound.name: bound for bound in local_bounds(layer, x)}
        if name not in found:
            raise ValueError(f"{name} is not computed for this layer and length; there are: {', '.join(found)}")
        return found[name]
    if x is not None:
        radius = float(torch.linalg.vector_norm(x.double(), dim=-1).max()) if radius is None else radius
        n = x.shape[0] if n is None else n
    if entry.needs == "weights":
        radius = 0.0 if radius is None else radius
    if radius is None or (n is None and ("n" in entry.needs.split(", ") or entry.needs == "weights")):
        raise ValueError(f"{name} needs {'n' if entry.needs == 'weights' else entry.needs}")
    if isinstance(layer, Variant):
        return _VARIANT[name](layer, radius, n or 0)
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
        lines.append(
            "| " + " | ".join([f"`{entry.name}`", entry.side, entry.needs, *masks, *allowed, ", ".join(entry.scores)]) + " |"
        )
    return "\n".join(lines)


def _find(name: str) -> Entry:
    if name not in TABLE:
        raise ValueError(f"unknown bound {name!r}; bounds are: {', '.join(TABLE)}")
    return TABLE[name]
