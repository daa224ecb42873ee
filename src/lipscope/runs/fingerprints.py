"""Content hashes: what a measurement was made of, independent of names, places and time."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lipscope.models.model import Model

_SIZE = 16


def digest(value: Any) -> str:
    """Hash of a JSON value, the same on every machine.

    Example:
        >>> digest({"a": 1, "b": 2.0}) == digest({"b": 2.0, "a": 1})
        True
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=_SIZE).hexdigest()


def model_fingerprint(handle: Model) -> str:
    """Hash of a loaded model: its class, its configuration and every weight, in the dtype of the computation.

    The name and the place it was loaded from do not enter, nor does the version of transformers that saved it.
    """
    import torch

    model = handle.model
    state = hashlib.blake2b(digest_size=_SIZE)
    state.update(f"{type(model).__name__} {_configuration(model)}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        state.update(memoryview(plain.numpy()))
    return state.hexdigest()


def _configuration(model: Any) -> str:
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        return repr(model)
    known = {name: value for name, value in config.to_dict().items() if not name.startswith("_") and name not in _INCIDENTAL}
    return json.dumps(known, sort_keys=True, default=str)


_INCIDENTAL = ("transformers_version", "name_or_path", "dtype", "torch_dtype", "architectures")
