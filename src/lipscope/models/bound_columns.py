"""Set bounds beside measured rows: how large σ could be for any tokens as long as these, and for any input at all."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from lipscope.attention.layer import Attention
from lipscope.attention.norms import Normalisation
from lipscope.bounds.registry import least
from lipscope.models.capture import Recording

Columns = dict[str, float | None]
SOURCES = ("refined", "castin2024")
NO_BOUNDS: Columns = {name: None for source in SOURCES for name in (source, f"{source}_global")}


def bound_columns(
    attention: Attention, recording: Recording, lengths: Sequence[int], radii: Sequence[float], anywhere: float | None,
    heads: Sequence[int] | None,
) -> list[Columns]:  # fmt: skip
    """The columns of every row, ordered (input, head): ``refined``, ``castin2024``, and both with ``_global``.

    Each is the least of its source's set bounds that hold for the layer's mask and score rule (``bounds.names``), at the
    largest token norm of that input, and at the largest norm that the layer's normalisation can put out.

    Args:
        attention: the layer.
        recording: where it was recorded.
        lengths: number of real tokens of every input.
        radii: largest token norm of every input.
        anywhere: R of the normalisation, None without one.
        heads: the heads of scope ``head``; None for the whole layer.
    """
    singles = [attention] if heads is None else [_heads(attention)[h] for h in heads]
    real = recording.real
    padded = real is not None
    rows = []
    known: dict[tuple[str, int, int], float | None] = {}
    for b, (n, radius) in enumerate(zip(lengths, radii, strict=True)):
        for which, layer in enumerate(singles):
            one = layer.for_input(b) if padded else layer
            columns = dict(NO_BOUNDS)
            for source in SOURCES:
                if real is not None and one.rotary is not None:
                    # Real tokens may stand at any place, so that all offsets of the padded sequence count.
                    n = real.shape[1]
                columns[source] = least(source, one, radius, n)
                # Without padding all inputs of a recording have the same length and mask.
                key = (source, which, b if padded else 0)
                if anywhere is not None and key not in known:
                    known[key] = least(source, one, anywhere, n)
                columns[f"{source}_global"] = known.get(key)
            rows.append(columns)
    return rows


def norm_radius(norm: Normalisation | None) -> float | None:
    """The largest norm a normalised token can have, None without normalisation."""
    if norm is None:
        return None
    if norm not in _RADII:
        _RADII[norm] = norm.image_radius()
    return _RADII[norm]


def _heads(attention: Attention) -> list[Attention]:
    if attention not in _HEADS:
        _HEADS[attention] = [attention.head(h) for h in range(attention.heads)]
    return _HEADS[attention]


_RADII: WeakKeyDictionary[Normalisation, float] = WeakKeyDictionary()
_HEADS: WeakKeyDictionary[Attention, list[Attention]] = WeakKeyDictionary()
