"""The certified upper end of σ: a closed form at the same tokens, deterministic, entered where it is wanted."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.norms import Normalisation
from lipscope.bounds.certificates import affordable, certified_upper, height_within
from lipscope.measure.scopes import LAYER_SCOPES
from lipscope.spectral.result import SpectralNorm, with_certificate


def certificate_at(
    layer: Attention,
    X: Tensor,
    scope: str = "attention",
    norm: Normalisation | None = None,
    memory: int | None = None,
) -> Tensor:
    """Certified upper bounds at tokens X (B, n, d), one per item of the operator: (B,), or (B·H,) for scope ``"head"``.

    For scope ``"norm+attention"`` X are the tokens before ``norm``, which enters by its exact norm at every token. The
    matrices take at most ``memory`` bytes.
    """
    heads = 1 if scope == "head" else layer.heads
    height = None if memory is None else height_within(X.shape[1], heads, memory)
    if scope != "norm+attention" or norm is None:
        return certified_upper(layer, X, scope, height=height).flatten()
    at = norm.linearise(X.double())
    # The square of the local norm is known up to rounding relative to (‖g‖_∞/s)².
    gains = torch.hypot(at.local_norm(), 1e-6 * at.g.abs().max() / at.s[..., 0])
    return certified_upper(layer, norm(X.double()), gains=gains, height=height)


def add_certificate(
    result: SpectralNorm,
    layer: Attention | None,
    X: Tensor,
    *,
    wanted: bool | None = None,
    heads: Sequence[int] | None = None,
    norm: Normalisation | None = None,
    memory: int | None = None,
) -> SpectralNorm:
    """The same flat batch with certified upper ends, where there are some and they are wanted.

    The batch has one item per input, or per input and head of ``heads`` (all by default). ``layer`` is None when what was
    measured is not known as an ``Attention``. A certificate is ``wanted`` by default when it costs no more than the
    measurement.

    Raises:
        ValueError: when a certificate is asked for that does not exist.
    """
    if wanted is False:
        return result
    scope = result.scope
    if layer is None or scope not in LAYER_SCOPES or (scope == "norm+attention" and norm is None):
        if wanted:
            raise ValueError(
                f"no certificate for scope {scope!r} of this layer: it exists for attention and head (and "
                "norm+attention behind LayerNorm or RMSNorm) of layers whose projections are known"
            )
        return result
    if wanted is None and not affordable(layer, X.shape[1], result, X.shape[0], scope):
        return result
    certified = certificate_at(layer.to(device=X.device), X, scope, norm, memory)
    if heads is not None:
        certified = certified[head_items(X.shape[0], layer.heads, heads).to(certified.device)]
    return with_certificate(result, certified)


def head_items(inputs: int, heads: int, chosen: Sequence[int]) -> Tensor:
    """Where the chosen heads are in a flat batch (input, head)."""
    return torch.tensor([b * heads + h for b in range(inputs) for h in chosen])
