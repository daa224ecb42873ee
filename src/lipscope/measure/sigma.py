"""``local_lipschitz``: from a map and tokens to σ as an interval.

Its certified upper end is a closed form at the same tokens, deterministic, entered where it is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention, Layer
from lipscope.attention.masks import MaskLike
from lipscope.attention.norms import Normalisation
from lipscope.attention.validation import balanced, scaled_back
from lipscope.attention.variants import Variant
from lipscope.bounds.certificates import affordable, certified_and_sized, height_within
from lipscope.bounds.verified import MEMORY, verified_upper
from lipscope.measure.memory import plan_memory, read_bytes, within_memory
from lipscope.measure.scopes import LAYER_SCOPES, Certificate, Rung, check_certificate
from lipscope.measure.typical import with_typical
from lipscope.spectral.autodiff import AutodiffOperator, TensorMap
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SpectralNorm, dtype_name, join_batches, reshape_batch, summarise, with_certificate
from lipscope.spectral.solvers import Auto, Solver, triplets, within


def local_lipschitz(
    map: Layer | TensorMap,
    X: Tensor,
    *,
    scope: str | None = None,
    mask: MaskLike = None,
    solver: Solver | None = None,
    dtype: torch.dtype | None = None,
    norm: Normalisation | None = None,
    certificate: Certificate = None,
    memory: float | str | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> SpectralNorm:
    """Local Lipschitz constant σ(X) = ‖J(X)‖₂ of a map at tokens X, as an interval.

    Frobenius norms on both sides: ‖map(X + E) − map(X)‖_F ≤ σ(X)·‖E‖_F + o(‖E‖_F).

    Args:
        map: an ``Attention`` layer, a ``Variant`` of it, or any torch callable (module in eval mode, function).
        X: tokens (n, d), or a batch (B, n, d). Give (1, n, d) to a module that needs a batch dimension.
        scope: for an ``Attention``, ``"attention"`` (all heads and W_O, the default), ``"head"`` (each head before
            W_O, in one go) or ``"norm+attention"`` (u ↦ attention(norm(u)), with X = u). For another callable, a label
            for the result; ``"map"`` by default.
        mask: replaces the layer's own mask (attention layers only).
        solver: ``Auto()`` by default.
        dtype: dtype of the computation, float32 or float64. By default the wider one of X and the layer's weights, and
            at least float32.
        norm: the normalisation of scope ``"norm+attention"``.
        certificate: for an ``Attention``, also compute the certified upper bound, and report the least upper end with its
            kind. It is computed in float64, up to 2,048 tokens from a dozen n×n matrices of one head at a time, beyond (or
            within a small ``memory``) from strips of rows, in memory that grows like n. ``"fast"`` (or True), ``"tight"`` or
            ``"verified"`` says how much it may cost. None: ``"fast"``, when that is estimated to cost no more than the
            measurement and the value is not exact already.
        memory: most bytes above the weights, a number or a size such as ``"4GiB"`` (attention layers only): see
            ``measure.memory.plan_memory`` for what is done to keep to it. ‖J‖_F is then known beside a certificate alone.
        progress: called with the share of a verified certificate that is done.

    Returns:
        A ``SpectralNorm``: numbers for X of shape (n, d), tensors of shape (B,) for a batch; scope ``"head"`` adds a
        dimension of length H.

    Raises:
        ValueError: when X, the scope or the mask does not fit the map.
        MemoryError: when ``memory`` is too small for n tokens.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> layer = lipscope.Attention(q=0 * W, k=W, v=W)      # uniform averaging: σ = ‖W_V‖ = 1
        >>> result = lipscope.local_lipschitz(layer, torch.randn(5, 2, dtype=torch.float64))
        >>> round(result.estimate, 12)
        1.0
    """
    batched = check_tokens(X)
    layer = as_layer(map, mask, bare=X.ndim == 2)
    compute = dtype or working_dtype(layer, X)
    if compute not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be float32 or float64, got {compute}")
    scope = scope or ("map" if isinstance(layer, TorchMap) else "attention")
    solver = solver or Auto()
    attention = layer if isinstance(layer, Attention) else None
    if attention is None and certificate:
        raise ValueError("a certificate needs an Attention layer: general maps have no closed-form bound")
    if attention is None and memory is not None:
        raise ValueError("memory is planned for Attention layers only: what a general map takes is not known beforehand")
    about: dict[str, Any] = {"scope": scope, "mask": None if layer.mask is None else str(layer.mask)}
    about["input_dtype"] = _given_dtypes(layer, X)
    tokens = batched.to(compute)
    limit = None if memory is None else read_bytes(memory)
    given, known, power = attention, norm, 0
    if attention is not None:
        layer, tokens, norm, power = _in_units(attention.to(compute, tokens.device), tokens, norm, scope)
        attention = layer
    asked: dict[str, Any] = {"layer": given, "X": batched, "norm": known, "certificate": certificate, "progress": progress}
    if attention is None or limit is None:
        result = sigma(layer.operator(tokens, scope, norm), solver, power=power, **about, **asked)
    else:
        inputs, n = tokens.shape[:2]
        how: dict[str, Any] = {"dtype": compute, "inputs": inputs, "limit": limit, "triplets": triplets(solver)}
        plan = plan_memory(attention, n, scope=scope, **how)
        about |= {"solver": within(solver, plan.room), "power": power}
        with within_memory(limit, plan.tiling):
            if plan.alone:
                parts = (attention.for_input(b).operator(tokens[b : b + 1], scope, norm) for b in range(inputs))
                result = join_batches([sigma(part, **about) for part in parts])
            else:
                result = sigma(attention.operator(tokens, scope, norm), **about)
            # When the operator, and what it keeps of its products, is gone.
            result = add_certificate(result, **asked, memory=limit)
    shape = () if X.ndim == 2 else (X.shape[0],)
    return reshape_batch(result, (*shape, layer.heads) if scope == "head" else shape)


def sigma(
    operator: Operator,
    solver: Solver | None = None,
    *,
    scope: str,
    mask: str | None = None,
    input_dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    layer: Attention | None = None,
    X: Tensor | None = None,
    norm: Normalisation | None = None,
    heads: Sequence[int] | None = None,
    certificate: Certificate = None,
    memory: int | None = None,
    typical: bool | None = None,
    power: int = 0,
    progress: Callable[[float], None] = lambda done: None,
) -> SpectralNorm:
    """From the Jacobian to σ: the one place that solves, allows for rounding, enters ‖J‖_F and certificates, and shapes.

    ``mask`` and ``input_dtype`` (of what was handed in; by default the operator's) are words for the result, which is a flat
    batch unless it has a ``shape``. The certificate is that of ``layer`` at tokens X, with ``norm`` for scope
    ``"norm+attention"`` and ``heads`` for scope ``"head"``; without tokens there is none. Its matrices take at most
    ``memory`` bytes. Where ‖J‖_F has no closed form, or one that costs more than σ, it is estimated
    (``measure.typical``) if ``typical`` wants it: by default unless certificates are not wanted. The operator is that of
    ``layer`` at X in units in which σ is 2^-power of what it is.
    """
    result = summarise((solver or Auto()).solve(operator), operator, scope=scope, mask=mask, input_dtype=input_dtype)
    result = scaled_back(result, power)
    if X is not None:
        how: dict[str, Any] = {"heads": heads, "norm": norm, "memory": memory, "progress": progress}
        result = add_certificate(result, layer, X, certificate=certificate, **how)
        if result.typical is None and (certificate is not False if typical is None else typical):
            result = with_typical(result, operator, math.prod(X.shape[1:]), power)
    return result if shape is None else reshape_batch(result, shape)


def _in_units(
    layer: Attention, X: Tensor, norm: Normalisation | None, scope: str
) -> tuple[Attention, Tensor, Normalisation | None, int]:
    """Layer, tokens and normalisation in units in which nothing leaves the range of floats, and the power of σ.

    See ``balanced``; the output of a normalisation has the unit of its gains, whatever that of its input.
    """
    if norm is None or X.shape[-1] != layer.width:
        layer, X, _, power = balanced(layer, X, heads=scope == "head")
        return layer, X, norm, power
    scaled, gains, offset, power = balanced(layer, norm.weight[None], norm.bias)
    if scaled is layer:
        return layer, X, norm, 0
    before, after = (math.frexp(float(g.abs().max()))[1] for g in (norm.weight, gains))
    norm = replace(norm, weight=gains[0]) if norm.bias is None else replace(norm, weight=gains[0], bias=offset)
    return scaled, X, norm, power + before - after


@dataclass(frozen=True)
class TorchMap:
    """Any torch callable on tokens as a layer: its Jacobian comes from automatic differentiation."""

    function: TensorMap
    bare: bool = False  # it takes tokens without a batch dimension
    mask = None
    dtype = None
    heads = 1

    def operator(self, X: Tensor, scope: str = "map", norm: Normalisation | None = None) -> Operator:
        """The Jacobian at tokens X (B, n, d); the scope is a label."""
        if scope == "head" or norm is not None:
            raise ValueError(f"scope {scope!r} needs an Attention layer: a callable is measured as one map")
        return AutodiffOperator(self.function, X, batched=not self.bare)


def as_layer(map: Layer | TensorMap, mask: MaskLike = None, *, bare: bool = False) -> Layer | TorchMap:
    """A layer as it is (under another mask, if one is given), any other callable wrapped."""
    if isinstance(map, Attention | Variant):
        return map if mask is None else map.with_mask(mask)
    if mask is not None:
        raise ValueError("mask applies to Attention layers only; put the mask inside the callable")
    if not callable(map):
        raise TypeError(f"map must be an Attention or a callable, got {type(map).__name__}")
    return TorchMap(map, bare)


def working_dtype(layer: Layer | TorchMap, X: Tensor) -> torch.dtype:
    """The wider dtype of tokens and weights, at least float32."""
    given = X.dtype if layer.dtype is None else torch.promote_types(X.dtype, layer.dtype)
    return given if given in (torch.float32, torch.float64) else torch.float32


def _given_dtypes(layer: Layer | TorchMap, X: Tensor) -> str:
    tokens = dtype_name(X.dtype)
    if layer.dtype is None or layer.dtype == X.dtype:
        return tokens
    return f"{tokens} tokens, {dtype_name(layer.dtype)} weights"


def check_tokens(X: Tensor) -> Tensor:
    """Refuse tokens that cannot be measured, and return them with a batch dimension."""
    if not isinstance(X, Tensor):
        raise TypeError(f"X must be a torch tensor, got {type(X).__name__}")
    if not X.is_floating_point():
        raise ValueError(f"X must be floating point, got {X.dtype}: embed the token ids first")
    if X.ndim not in (2, 3):
        raise ValueError(f"X must have shape (n, d) or (B, n, d), got {tuple(X.shape)}")
    if 0 in X.shape:
        raise ValueError(f"X is empty: shape {tuple(X.shape)}")
    bad = ~torch.isfinite(X)
    if bool(bad.any()):
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(f"X holds {int(bad.sum())} NaN or infinite values, the first at index {where}")
    return X.detach() if X.ndim == 3 else X.detach()[None]


def certificate_at(
    layer: Attention,
    X: Tensor,
    scope: str = "attention",
    norm: Normalisation | None = None,
    memory: int | None = None,
    rung: Rung | None = "fast",
) -> tuple[Tensor, Tensor]:
    """Certified upper bounds and ‖J‖_F at tokens X (B, n, d) per item of the operator: (B,), or (B·H,) for scope ``"head"``.

    For scope ``"norm+attention"`` X are the tokens before ``norm``, which enters the certificate by its local norm at every
    token. The matrices take at most ``memory`` bytes. Without a ``rung`` there are no certificates.
    """
    heads = 1 if scope == "head" else layer.heads
    height = None if memory is None else height_within(layer, X.shape[1], heads, memory)
    how: dict[str, Any] = {"rung": rung, "height": height}
    if scope == "norm+attention" and norm is not None:
        at = norm.linearise(X.double())
        X, scope = at.g * at.z, "attention"
        how |= {"gains": at.local_norm(), "offset": norm.offset(X), "norm": at}
    certified, frobenius = certified_and_sized(layer, X, scope, **how)
    return certified.flatten(), frobenius.flatten()


def add_certificate(
    result: SpectralNorm,
    layer: Attention | None,
    X: Tensor,
    *,
    certificate: Certificate = None,
    heads: Sequence[int] | None = None,
    norm: Normalisation | None = None,
    memory: int | None = None,
    progress: Callable[[float], None] = lambda done: None,
) -> SpectralNorm:
    """The same flat batch with ‖J‖_F and certified upper ends, where they are known and wanted.

    The batch has one item per input, or per input and head of ``heads`` (all by default). ``layer`` is None when what was
    measured is not known as an ``Attention``. A ``certificate`` is wanted by default when it costs no more than the
    measurement; one that does not exist is refused. An exact result has no need of one.
    """
    if check_certificate(certificate) is False:
        return result
    scope = result.scope
    if layer is None or scope not in LAYER_SCOPES or (scope == "norm+attention" and norm is None):
        if certificate:
            raise ValueError(
                f"no certificate for scope {scope!r} of this layer: it exists for attention and head (and "
                "norm+attention behind LayerNorm or RMSNorm) of layers whose projections are known"
            )
        return result
    exact = "probabilistic" not in result.upper_kind
    if certificate is None and not exact and not affordable(layer, X.shape[1], result, X.shape[0], scope):
        return result
    layer = layer.to(device=X.device)
    rung: Rung | None = certificate if isinstance(certificate, str) else None if exact and certificate is None else "fast"
    closed = None if rung == "verified" else rung
    certified, frobenius = certificate_at(layer, X, scope, norm, memory, closed)
    if heads is not None:
        items = head_items(X.shape[0], layer.heads, heads).to(certified.device)
        certified, frobenius = certified[items], frobenius[items]
    typical = frobenius / math.sqrt(X.shape[1] * X.shape[2])
    result = replace(result, typical=typical, stable_rank=(frobenius / result.estimate).square())
    if rung == "verified":
        how: dict[str, Any] = {"heads": heads, "memory": memory or MEMORY, "progress": progress}
        verified = verified_upper(layer, X, scope, estimate=result.estimate, **how)
        return with_certificate(result, verified.flatten(), "verified")
    return result if rung is None else with_certificate(result, certified)


def head_items(inputs: int, heads: int, chosen: Sequence[int]) -> Tensor:
    """Where the chosen heads are in a flat batch (input, head)."""
    return torch.tensor([b * heads + h for b in range(inputs) for h in chosen])
