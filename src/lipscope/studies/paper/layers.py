"""Which layers and scopes of a model an experiment looks at, and a layer's weights under its mask in words."""

from __future__ import annotations

import dataclasses
from weakref import WeakKeyDictionary

from lipscope.attention.layer import Attention
from lipscope.models.model import Model

FIRST_AND_MIDDLE = "first and middle"


def chosen_layers(count: int, which: str | int) -> tuple[int, ...]:
    """Layer indices: the paper's layers 0 and 6 of 12 are the first and the middle one; or so many evenly spread ones.

    Example:
        >>> chosen_layers(12, FIRST_AND_MIDDLE), chosen_layers(6, FIRST_AND_MIDDLE), chosen_layers(30, 4)
        ((0, 6), (0, 3), (0, 10, 19, 29))
    """
    if which == FIRST_AND_MIDDLE:
        return tuple(dict.fromkeys((0, count // 2)))
    wanted = min(int(which), count)
    return tuple(dict.fromkeys(round(i * (count - 1) / max(1, wanted - 1)) for i in range(wanted)))


def existing_scopes(handle: Model, layer: int, scopes: tuple[str, ...]) -> tuple[str, ...]:
    """The scopes that a layer has: without a normalisation before attention there is no ``norm+attention``."""
    return tuple(scope for scope in scopes if scope != "norm+attention" or handle.layer(layer).normed)


# Norms of weights are kept with the object that holds the weights, so each layer has one object.
_known: WeakKeyDictionary[Model, dict[int, Attention | None]] = WeakKeyDictionary()


def weights_of(handle: Model, layer: int) -> Attention | None:
    """The layer as an ``Attention`` for any number of tokens; None when its weights alone do not make it one.

    That is so with rotary positions and query or key norms, and with masks that count tokens.
    """
    layers = _known.setdefault(handle, {})
    if layer not in layers:
        layers[layer] = _weights(handle, layer)
    return layers[layer]


def _weights(handle: Model, layer: int) -> Attention | None:
    where = handle.layer(layer)
    found = handle.probe_recording[layer].attention
    if found is None or where.mask not in ("full", "causal") or found.rotary is not None:
        return None
    if found.bias is not None:
        if bool(found.bias.any()):
            return None
        found = dataclasses.replace(found, bias=None)
    return found.with_mask(where.mask)
