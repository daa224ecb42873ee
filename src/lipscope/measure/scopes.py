"""The scopes: which map around attention σ belongs to. This is the only list of them; it needs no torch."""

from __future__ import annotations

from collections.abc import Iterable

SCOPES = {
    "head": "one attention head, before the output matrix",
    "attention": "all heads of a layer with the output matrix, without residual and normalisation",
    "norm+attention": "the normalisation before attention and attention",
    "attention+residual": "attention with its residual connection",
    "block": "a whole Transformer block",
    "model": "the whole model, from the first block's tokens to its last hidden state",
}

# What an attention layer by itself has: the others need the block or model around it.
LAYER_SCOPES = ("attention", "head", "norm+attention")


def check_scope(scope: str, known: Iterable[str] = SCOPES, of: str = "a model") -> str:
    """The scope; refuses an unknown one, naming those that exist.

    Example:
        >>> check_scope("block")
        'block'
    """
    names = tuple(known)
    if scope not in names:
        raise ValueError(f"unknown scope {scope!r}; scopes of {of} are: {', '.join(names)}")
    return scope
