"""For test suites: ``assert_isolated`` fails when an output depends on a token it must not see, and names the culprit."""

from __future__ import annotations

from typing import Any

from lipscope.doors import checked
from lipscope.models.isolation import check
from lipscope.models.verdicts import Isolation

__all__ = ["assert_isolated"]


def assert_isolated(model: Any, inputs: dict[str, Any] | None = None, **claims: Any) -> Isolation:
    """Check a model; the arguments are those of ``lipscope.check``: ``causal``, ``window``, ``documents``, ``padding``, ….

    Returns:
        The verdicts, all of which held.

    Raises:
        AssertionError: when a claim is broken, with the module that lets the leak through, or could not be tested.

    Example:
        >>> import torch
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
        >>> assert_isolated(layer, {"tokens": torch.randn(1, 6, 8)}).held
        True
    """
    found = checked(check)(model, inputs=inputs, **claims)
    if not found.held:
        raise AssertionError(str(found))
    return found
