"""Models of a process: loaded once, kept while they fit a budget, and checked to be the ones that the plan saw."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from contextlib import suppress
from typing import NamedTuple

import torch

from lipscope.models.load import load
from lipscope.models.model import Model
from lipscope.runs.estimate import KEEP_BYTES
from lipscope.runs.fingerprints import model_fingerprint
from lipscope.runs.plan import ModelChoice
from lipscope.runs.registry import load_object


class LoadedModel(NamedTuple):
    """A model and what it is."""

    handle: Model
    fingerprint: str


_loaded: OrderedDict[tuple[ModelChoice, str | None], LoadedModel] = OrderedDict()


def loaded_model(choice: ModelChoice, dtype: str | None, fingerprint: str | None = None) -> LoadedModel:
    """The model, loaded unless this process has it.

    Args:
        choice: which, and how.
        dtype: ``"float32"``, ``"float64"``, or None for that of the weights.
        fingerprint: what it must be.

    Raises:
        ValueError: when the model found under that name is another one.
    """
    key = (choice, dtype)
    if key not in _loaded:
        _make_room(KEEP_BYTES // 2)
        # What has the fingerprint that the plan saw has passed its self-tests there.
        handle = _load(choice, dtype, check=fingerprint is None)
        _loaded[key] = LoadedModel(handle, model_fingerprint(handle))
        _return_free_memory()
    _loaded.move_to_end(key)
    model = _loaded[key]
    _make_room(KEEP_BYTES)
    if fingerprint is not None and model.fingerprint != fingerprint:
        raise ValueError(
            f"model {choice.name!r} is not the one that the plan was made with: its weights or configuration have the "
            f"fingerprint {model.fingerprint[:12]} here and {fingerprint[:12]} there. Give every machine the same model"
        )
    return model


def _make_room(most: int) -> None:
    """Let go of the models that were used longest ago, until ``most`` bytes of weights are left or one model."""
    while len(_loaded) > 1 and sum(weight_bytes(handle) for handle, _ in _loaded.values()) > most:
        _loaded.popitem(last=False)


def forget_models() -> None:
    """Load models anew when they are asked for: the files behind a name may have changed."""
    _loaded.clear()
    _return_free_memory()


def _return_free_memory() -> None:
    """Give what former models and the loading left back to the system, where the C library can: it would keep a gigabyte."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def weight_bytes(handle: Model) -> int:
    """Bytes of a model's parameters."""
    return sum(p.numel() * p.element_size() for p in handle.model.parameters())


def _load(choice: ModelChoice, dtype: str | None, *, check: bool) -> Model:
    wanted = None if dtype is None else getattr(torch, dtype)
    if choice.loader is not None:
        made = load_object(choice.loader)(choice.name, wanted)
        if not isinstance(made, Model):
            raise ValueError(f"loader {choice.loader} must return a lipscope.Model, got {type(made).__name__}")
        return made
    return load(
        choice.name, part=choice.part, dtype=wanted, allow_pickle=choice.allow_pickle,
        trust_remote_code=choice.trust_remote_code, check=check,
    )  # fmt: skip
