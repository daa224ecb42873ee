"""For test suites: ``assert_isolated`` fails when an output depends on a token it must not see, and names the culprit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lipscope.models.isolation import check
from lipscope.models.verdicts import Isolation

__all__ = ["assert_isolated"]


def assert_isolated(
    model: Any,
    inputs: dict[str, Any] | None = None,
    *,
    causal: bool | None = None,
    window: int | None = None,
    documents: Sequence[int] | None = None,
    padding: str | None = None,
    batch: bool = True,
    cache: bool = False,
    n: int = 32,
) -> Isolation:
    """Check a model, see ``lipscope.check``; the arguments are the same.

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
    found = check(
        model,
        n=n,
        inputs=inputs,
        causal=causal,
        window=window,
        documents=documents,
        padding=padding,
        batch=batch,
        cache=cache,
    )
    asked = {"causal": causal, "window": window, "documents": documents, "padding": padding, "cache": cache}
    untested = [verdict for verdict in found.verdicts if verdict.held is None and asked.get(verdict.claim.split()[0])]
    if found.held is not True or untested:
        raise AssertionError(str(found))
    return found
