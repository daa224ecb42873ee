"""The scopes: which map around attention σ belongs to. This is the only list of them; it needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

SCOPES = {
    "head": "one attention head, before the output matrix",
    "attention": "all heads of a layer with the output matrix, without residual and normalisation",
    "norm+attention": "the normalisation before attention and attention",
    "attention+residual": "attention with its residual connection",
    "block": "a whole Transformer block",
    "model": "the whole model, from the first block's tokens to its last hidden state",
    "cross-queries": "cross-attention with its output matrix, in the decoder's tokens",
    "cross-keys": "cross-attention with its output matrix, in the encoder's tokens",
}
# Those of a decoder that attends to an encoder.
CROSS_SCOPES = ("cross-queries", "cross-keys")

# What an attention layer by itself has: the others need the block or model around it.
LAYER_SCOPES = ("attention", "head", "norm+attention")


# How much a certified upper end may cost: see docs/concepts/certificates.md.
RUNGS = {
    "fast": "closed form, at most about the cost of the measurement",
    "tight": "closer, at up to twenty times that cost",
    "verified": "within a few per cent, from a factorisation of J Jᵀ",
}
Rung: TypeAlias = Literal["fast", "tight", "verified"]
# True stands for the cheapest rung, False for none, None for the cheapest where it costs no more than the measurement.
Certificate: TypeAlias = bool | Rung | None


def check_certificate(certificate: Any) -> Certificate:
    """What may be asked for as a certificate, as it is; refuses anything else."""
    if not (isinstance(certificate, bool | None) or (isinstance(certificate, str) and certificate in RUNGS)):
        raise ValueError(f"certificate must be true, false or one of {', '.join(RUNGS)}, got {certificate!r}")
    return certificate  # type: ignore[return-value]


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
