"""``local_lipschitz``: from a map and tokens to σ as an interval."""

from __future__ import annotations

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import MaskLike
from lipscope.attention.norms import Normalisation
from lipscope.attention.variants import Variant
from lipscope.measure.certificate import add_certificate
from lipscope.measure.memory import MemoryPlan, plan_memory, read_bytes
from lipscope.spectral.autodiff import AutodiffOperator, TensorMap
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SpectralNorm, dtype_name, join_batches, reshape_batch, summarise
from lipscope.spectral.solvers import Auto, Solver, triplets, within

ATTENTION_SCOPES = ("attention", "head")


def local_lipschitz(
    map: Attention | Variant | TensorMap,
    X: Tensor,
    *,
    scope: str | None = None,
    mask: MaskLike = None,
    solver: Solver | None = None,
    dtype: torch.dtype | None = None,
    norm: Normalisation | None = None,
    certificate: bool | None = None,
    memory: float | str | None = None,
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
            within a small ``memory``) from strips of rows, in memory that grows like n. None: when that is estimated to
            cost no more than the measurement and the value is not exact already.
        memory: most bytes above the weights, a number or a size such as ``"4GiB"`` (attention layers only): see
            ``attention.memory.plan_memory`` for what is done to keep to it.

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
    compute = dtype or working_dtype(map, X)
    if compute not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be float32 or float64, got {compute}")
    if mask is not None and isinstance(map, Attention | Variant):
        map, mask = map.with_mask(mask), None
    solver = solver or Auto()

    def measure(part: Attention | Variant | TensorMap, tokens: Tensor, solver: Solver) -> SpectralNorm:
        operator = make_operator(part, tokens.to(compute), scope, mask, bare=X.ndim == 2, norm=norm)
        return summarise(
            solver.solve(operator),
            operator,
            scope=scope or ("attention" if isinstance(map, Attention | Variant) else "map"),
            mask=str(map.mask) if isinstance(map, Attention | Variant) else None,
            input_dtype=_given_dtypes(map, X),
        )

    if memory is None:
        result = measure(map, batched, solver)
    else:
        plan, solver = _planned(map, batched, compute, scope, solver, memory)
        with plan.in_force():
            if plan.alone:
                assert isinstance(map, Attention)
                result = join_batches([measure(map.for_input(b), x[None], solver) for b, x in enumerate(batched)])
            else:
                result = measure(map, batched, solver)
    shape = () if X.ndim == 2 else (X.shape[0],)
    if isinstance(map, Attention) and scope == "head":
        shape = (*shape, map.heads)
    if certificate and not isinstance(map, Attention):
        raise ValueError("a certificate needs an Attention layer: general maps have no closed-form bound")
    if isinstance(map, Attention):
        limit = None if memory is None else read_bytes(memory)
        result = add_certificate(result, map, batched, wanted=certificate, norm=norm, memory=limit)
    return reshape_batch(result, shape)


def _planned(
    map: Attention | Variant | TensorMap,
    X: Tensor,
    dtype: torch.dtype,
    scope: str | None,
    solver: Solver,
    memory: float | str,
) -> tuple[MemoryPlan, Solver]:
    """How to keep to ``memory``, and the solver that does."""
    if not isinstance(map, Attention):
        raise ValueError("memory is planned for Attention layers only: what a general map takes is not known beforehand")
    plan = plan_memory(
        map, X.shape[1], dtype=dtype, inputs=len(X), limit=read_bytes(memory), scope=scope or "attention",
        triplets=triplets(solver),
    )  # fmt: skip
    return plan, within(solver, plan.room)


def make_operator(
    map: Attention | Variant | TensorMap,
    X: Tensor,
    scope: str | None = None,
    mask: MaskLike = None,
    *,
    bare: bool = False,
    norm: Normalisation | None = None,
) -> Operator:
    """The Jacobian operator of ``map`` at X (B, n, d) for a scope.

    Args:
        map: an attention layer or any torch callable.
        X: tokens (B, n, d), float32 or float64.
        scope: see ``local_lipschitz``.
        mask: replaces the layer's own mask.
        bare: the callable takes tokens without a batch dimension.
        norm: the normalisation of scope ``"norm+attention"``.

    Returns:
        An operator with one item per input, or per (input, head).
    """
    if isinstance(map, Attention | Variant):
        layer = map if mask is None else map.with_mask(mask)
        return layer.operator(X, scope or "attention", norm)
    if mask is not None:
        raise ValueError("mask applies to Attention layers only; put the mask inside the callable")
    if not callable(map):
        raise TypeError(f"map must be an Attention or a callable, got {type(map).__name__}")
    if scope in ATTENTION_SCOPES[1:]:
        raise ValueError(f"scope {scope!r} needs an Attention layer: a callable is measured as one map")
    return AutodiffOperator(map, X, batched=not bare)


def working_dtype(map: Attention | Variant | TensorMap, X: Tensor) -> torch.dtype:
    """The wider dtype of tokens and weights, at least float32."""
    given = torch.promote_types(X.dtype, map.dtype) if isinstance(map, Attention | Variant) else X.dtype
    return given if given in (torch.float32, torch.float64) else torch.float32


def _given_dtypes(map: Attention | Variant | TensorMap, X: Tensor) -> str:
    tokens = dtype_name(X.dtype)
    if not isinstance(map, Attention | Variant) or map.dtype == X.dtype:
        return tokens
    return f"{tokens} tokens, {dtype_name(map.dtype)} weights"


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
