"""The Jacobian of any torch map, on one cached graph.

    Jᵀg = ∂⟨g, f(X)⟩/∂X        Jv = ∂⟨Jᵀg, v⟩/∂g        ⟨u, Jv⟩ = ⟨∂⟨u, f(X)⟩/∂X, v⟩

The map is evaluated once. Jᵀ·g is a backward pass through that graph. J·v comes from the same graph: g ↦ Jᵀg is linear, so
differentiating ⟨Jᵀg, v⟩ with respect to g gives J·v; the graph of g ↦ Jᵀg is built once too. Forward mode is not used: it is
missing for fused attention kernels and costs several evaluations of the map per product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lipscope.spectral.basis import random_direction, scaled_norm, unit_rows
from lipscope.spectral.operator import DerivedOperator, Operator

TensorMap = Callable[[Tensor], Tensor]


class AutodiffOperator(Operator):
    """Input Jacobian of ``function`` at X of shape (B, …); the function must treat batch items independently.

    Args:
        function: a torch callable (a module in eval mode, or any function) that returns one tensor (B, …).
        X: the point, floating, batch first.
        batched: False when the function takes and returns one item without a batch dimension; then B = 1.
        check: look for dropout, randomness, mixed batch items and wrong second derivatives, and estimate the rounding error.
            Inside a training step there is no time for it; the weights of a module are then used as they are.

    Raises:
        ValueError: when the map is in training mode with dropout, is random, mixes batch items, or does not depend
            differentiably on its input.
    """

    def __init__(self, function: TensorMap, X: Tensor, *, batched: bool = True, check: bool = True) -> None:
        if isinstance(function, nn.MultiheadAttention):
            raise ValueError("nn.MultiheadAttention takes three arguments: measure lipscope.Attention.from_torch(module)")
        if not X.ndim:
            raise ValueError("X must have batch items first, got a single number")
        if check and isinstance(function, nn.Module):
            refuse_training_dropout(function)
            function = in_precision(function, X.dtype)
        if not batched:
            function = _with_batch_dimension(function)
        self.batch = X.shape[0]
        self.dtype, self.device = X.dtype, X.device
        self._X = X.detach().clone().requires_grad_(True)
        with differentiable_attention(), torch.enable_grad():
            self._Y = _evaluate(function, self._X, finite=check)
            self._g = torch.zeros_like(self._Y).requires_grad_(True)
            self._pullback = _differentiate(self._Y, self._X, self._g, create_graph=True)
            self.input_shape, self.output_shape = tuple(X.shape[1:]), tuple(self._Y.shape[1:])
            self._errors = torch.full((self.batch,), super().rounding_error, dtype=torch.float64, device=self.device)
            if check:
                _refuse_randomness(function, self._X, self._Y)
                self._refuse_mixing()
                try:
                    self._errors += self._sensitivity(function, _LastDigits(self.batch))
                except RuntimeError:  # of maps that are evaluated again when they are differentiated (checkpoints)
                    self._errors += self._sensitivity(function)
                _refuse_randomness(function, self._X, self._Y)  # what the map keeps of its last call is X's again

    @property
    def rounding_error(self) -> float:
        """The largest that was measured; without checks, as usual."""
        return float(self._errors.max())

    @property
    def rounding_errors(self) -> Tensor:
        """Measured, item by item: what products change when nothing but their rounding does; without checks, as usual."""
        return self._errors

    def bilinear(self, left: Tensor, right: Tensor) -> Tensor:
        """The form ⟨u, J v⟩ of every item, (B,), differentiable in the parameters of the map; u and v are held fixed."""
        with torch.enable_grad():
            slope = _differentiate(self._Y, self._X, left.detach().reshape(self._Y.shape).to(self._Y), create_graph=True)
            return (slope * right.detach().reshape(slope.shape).to(slope)).flatten(1).sum(-1)

    def _sensitivity(self, function: TensorMap, inside: AbstractContextManager[Any] = nullcontext()) -> Tensor:  # noqa: B008
        """Further relative error to allow for, (B,): eight times the most that a product changes with its rounding alone.

        What cancels in a product shows when c·g, which is rounded elsewhere, is compared with g, and c·u with u. Where J·u
        and Jᵀ·g do not fit together, ⟨g, Ju⟩ differs from ⟨Jᵀg, u⟩. And Jᵀ·g is compared with that of maps whose input, and
        ``inside`` which every other number, has other last digits: several of them, as one may change little by chance.
        All this for random u and g, the same for every item, and, but for the adjoints, for Jᵀ·g and J·u in their places,
        which lean towards the top singular vectors.
        """
        info, (M, N) = torch.finfo(self.dtype), self.shape
        u, g = (size**0.5 * random_direction(size, seed, self).expand(self.batch, -1) for seed, size in enumerate((N, M), 1))
        changes, pulled, adjoint = [], [], torch.zeros(0)
        for _ in range(2):
            Ju, Jg = self.matvec(u), self.rmatvec(g)
            gaps = self.matvec(_FACTOR * u) / _FACTOR - Ju, self.rmatvec(_FACTOR * g) / _FACTOR - Jg
            # Of a map with few inputs or outputs one of them may be short by chance.
            size = torch.maximum(scaled_norm(Ju), scaled_norm(Jg)).clamp_min(info.tiny / info.eps)
            changes += [scaled_norm(gap) / size for gap in gaps]
            pulled.append((g, Jg, size))
            if not adjoint.numel():
                adjoint = ((Ju.double() * g).sum(-1) - (u * Jg.double()).sum(-1)).abs() / size
            u, g = unit_rows(Jg, scaled_norm(Jg)), unit_rows(Ju, scaled_norm(Ju))
        generator = torch.Generator().manual_seed(2)
        for _ in range(_DRAWS):
            signs = torch.randint(0, 2, self.input_shape, generator=generator).to(self._X) * 2 - 1
            X = (self._X.detach() * (1 + info.eps * signs)).requires_grad_(True)
            with inside:
                Y = function(X)
            for g, Jg, size in pulled:
                gap = _differentiate(Y, X, g.reshape(Y.shape)).reshape(self.batch, -1) - Jg
                changes.append(scaled_norm(gap) / size)
            del Y  # with its graph, before the next one is made
        change = torch.stack(changes).amax(0)
        if bool((adjoint > (64 * change).clamp_min(1e-3)).any()):
            raise ValueError(f"{_NOT_TWICE} (the products J·u and Jᵀ·g are not adjoint)")
        allowance: Tensor = 8 * torch.maximum(change, adjoint)
        if not bool((self._errors + allowance < 0.1).all()):
            raise FloatingPointError(
                f"the Jacobian changes by {float(change.max()):.1e} of itself with the last digits of {self.dtype}: there "
                "are no digits to measure. Compute in float64, or look for a kink of the map at this input."
            )
        return allowance

    def rmatvec(self, g: Tensor) -> Tensor:
        """The product Jᵀ·g: one backward pass."""
        return _differentiate(self._Y, self._X, g.reshape(self._Y.shape)).reshape(self.batch, -1)

    def matvec(self, u: Tensor) -> Tensor:
        """The product J·u: one backward pass through the graph of g ↦ Jᵀg."""
        if not self._pullback.requires_grad:
            raise ValueError(_NOT_TWICE)
        product = _differentiate(self._pullback, self._g, u.reshape(self._X.shape), missing=_NOT_TWICE)
        return product.reshape(self.batch, -1)

    def select(self, items: Tensor) -> Operator:
        """The listed items. The graph is shared, so the products still run on the whole batch."""
        return _Selection(self, items)

    def _refuse_mixing(self) -> None:
        """The batch must be block-diagonal: a cotangent on some items may reach those items only.

        Two different items differ in some binary digit of their index, so two passes per digit see every pair.
        """
        noise = torch.randn(self._Y.shape, dtype=self.dtype, generator=torch.Generator().manual_seed(0)).to(self.device)
        item = torch.arange(self.batch, device=self.device)
        for digit in range((self.batch - 1).bit_length()):
            for value in (0, 1):
                chosen = (item >> digit) & 1 == value
                g = noise * chosen.reshape(-1, *[1] * (noise.ndim - 1))
                if bool(self.rmatvec(g)[~chosen].any()):
                    raise ValueError(
                        "the map mixes batch items: the output of one depends on another. Batch items come first in X; "
                        "measure one input at a time, or put layers such as BatchNorm into eval mode."
                    )


class _LastDigits(TorchDispatchMode):
    """Inside it, entries of every new tensor that depends on the input lose half of their last digit, at random.

    This is stochastic arithmetic (Parker, *Monte Carlo arithmetic*, 1997). Where batch items come first they lose alike. A
    tensor loses its digits where it stands, so that what an operation kept of its result for the way back loses them too:
    the slope 1 − y² of a saturated y = tanh(x) has hardly more digits than 1 − y. It sees the operations of which functions
    are made, below differentiation: a bias is added in a linear layer before anything else is done to the sum.
    """

    def __init__(self, batch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._batch, self._random = batch, np.random.default_rng(2)  # torch refuses to draw inside vmap

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operation(*args, **(kwargs or {}))
        name, given = operation.overloadpacket.__name__, tree_leaves((args, kwargs))
        tensors = [t for t in given if _is_strided(t)]
        exact = any(one in _EXACT for one in (name.removesuffix("_"), *given) if isinstance(one, str | float))
        # Without gradients: what goes on inside a custom function, but not what a module does to its own weights.
        recorded = torch.is_grad_enabled()
        if exact or not any(t.requires_grad and (recorded or not t.is_leaf) for t in tensors):
            return found
        # Views share their numbers with others, unless these are changed in place anyway.
        shared = {t.untyped_storage().data_ptr() for t in tensors}
        for new in tree_leaves(found):
            if not _is_strided(new) or not (new.is_floating_point() or new.is_complex()):
                continue
            if (recorded and name.endswith("_") and new is args[0]) or new.untyped_storage().data_ptr() not in shared:
                self._lose(new)
        return found

    def _lose(self, new: Tensor) -> None:
        items = self._batch if new.ndim and new.shape[0] % self._batch == 0 else 1
        info, drawn = torch.finfo(new.dtype), self._random.integers(0, 2, new.numel() // items, dtype=np.int8)
        lost = torch.from_numpy(drawn).to(new).repeat(items).reshape(new.shape)
        # Numbers that stand for infinity keep to it.
        lost *= torch.where(new.abs() < info.max / 4, new, 0.0) * (-info.eps / 2)
        new += lost


def _is_strided(value: Any) -> bool:
    """Whether it is a tensor with a storage of its own; sparse ones have none."""
    return isinstance(value, Tensor) and value.layout is torch.strided


class _Selection(DerivedOperator):
    """Some items of an autodiff operator, by scattering into its full batch and gathering from it."""

    def __init__(self, base: Operator, items: Tensor) -> None:
        super().__init__(base)
        self.batch, self._items = int(items.numel()), items

    @property
    def rounding_error(self) -> float:
        return float(self.rounding_errors.max())

    @property
    def rounding_errors(self) -> Tensor:
        return self.base.rounding_errors[self._items]

    def matvec(self, u: Tensor) -> Tensor:
        return self._through(self.base.matvec, u)

    def rmatvec(self, g: Tensor) -> Tensor:
        return self._through(self.base.rmatvec, g)

    def select(self, items: Tensor) -> Operator:
        return _Selection(self.base, self._items[items])

    def _through(self, product: TensorMap, x: Tensor) -> Tensor:
        """Each round carries every item at most once, so repeated items take several rounds."""
        images, waiting = [], list(enumerate(self._items.tolist()))
        while waiting:
            chosen = {item: position for position, item in reversed(waiting)}
            full = x.new_zeros(self.base.batch, x.shape[1])
            full[list(chosen)] = x[list(chosen.values())]
            image = product(full)
            images += [(position, image[item]) for item, position in chosen.items()]
            waiting = [(position, item) for position, item in waiting if chosen[item] != position]
        return torch.stack([row for _, row in sorted(images, key=itemgetter(0))])


def refuse_training_dropout(module: nn.Module) -> None:
    """Raise when some submodule would drop units at random."""
    for name, part in module.named_modules():
        if not part.training:
            continue
        rate = getattr(part, "p", None) if isinstance(part, nn.modules.dropout._DropoutNd) else None
        rate = getattr(part, "dropout", rate)
        if isinstance(rate, int | float) and not isinstance(rate, bool) and rate > 0:
            where = f"submodule {name!r}" if name else "the module"
            raise ValueError(
                f"{where} is in training mode with dropout {rate:g}, so its output is random and has no Jacobian. "
                "Call .eval() on the module first."
            )


def in_precision(module: nn.Module, dtype: torch.dtype) -> TensorMap:
    """The module with its floating parameters and buffers cast to ``dtype``; the module itself is left alone."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    if all(t.dtype == dtype or not t.is_floating_point() for t in tensors.values()):
        return module
    cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    return lambda x: torch.func.functional_call(module, cast, (x,))


def _with_batch_dimension(function: TensorMap) -> TensorMap:
    def batched(X: Tensor) -> Tensor:
        Y = function(X[0])
        return Y[None] if isinstance(Y, Tensor) else Y

    return batched


@contextmanager
def differentiable_attention() -> Iterator[None]:
    """Use attention kernels that can be differentiated twice; fused ones cannot."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _evaluate(function: TensorMap, X: Tensor, *, finite: bool = True) -> Tensor:
    try:
        Y: Any = function(X)
    except RuntimeError as error:
        if "in-place" in str(error):
            raise ValueError("the map changes its input in place: let it work on a copy (x.clone())") from error
        if "same dtype" in str(error):
            raise ValueError(f"the map does not take {X.dtype}: give X in the map's dtype ({error})") from error
        raise
    if not isinstance(Y, Tensor):
        raise ValueError(
            f"the map returned {type(Y).__name__}, not a tensor: wrap it so that it returns the one tensor to measure, "
            "for example lambda x: module(x)[0]"
        )
    if Y.is_complex():
        raise ValueError("the map returned complex numbers: return their real and imaginary parts, torch.view_as_real(y)")
    if Y.ndim == 0 or Y.shape[0] != X.shape[0]:
        raise ValueError(f"the map returned shape {tuple(Y.shape)} for {X.shape[0]} inputs: batch items must come first")
    if finite and not bool(torch.isfinite(Y).all()):
        raise FloatingPointError("the map returned NaN or infinite values at this input")
    if not Y.requires_grad:
        raise ValueError("the map's output does not depend differentiably on its input (is it detached, or no_grad?)")
    return Y


def _refuse_randomness(function: TensorMap, X: Tensor, Y: Tensor) -> None:
    """Evaluate again: dropout and other random maps give another answer, and have no Jacobian."""
    again, Y = function(X).detach(), Y.detach()  # with gradients: a map may be made of them
    difference = (again - Y).abs().max() if again.shape == Y.shape else torch.tensor(float("inf"))
    if difference > 64 * torch.finfo(Y.dtype).eps * Y.abs().max():
        raise ValueError(
            f"the map is random: two evaluations at the same input differ by {float(difference):.3g}. "
            "Switch dropout and sampling off (module.eval()) or fix the random numbers inside the map."
        )


def _differentiate(Y: Tensor, X: Tensor, g: Tensor, *, create_graph: bool = False, missing: str = "") -> Tensor:
    """The gradient of ⟨g, Y⟩ in X; torch's complaints about missing second derivatives become one that says what to do."""
    try:
        (gradient,) = torch.autograd.grad(Y, X, g, retain_graph=True, create_graph=create_graph, allow_unused=True)
    except RuntimeError as error:
        if "derivative" in str(error) or "differentiate twice" in str(error):
            raise ValueError(f"{_NOT_TWICE} ({error})") from error
        raise
    if gradient is None:
        raise ValueError(missing or "the map's output does not depend on its input")
    return gradient


# A number that changes every digit of what it multiplies.
_FACTOR = 1.37
# What rounds nothing: copies, and what picks entries (a slope may ask which entry equals the largest, and norms of infinite
# order do) or integers, which may be indices. Names of operations, and arguments that make them so.
_EXACT: frozenset[Any] = (
    frozenset(
        {"amax", "amin", "aminmax", "max", "min", "median", "nanmedian", "floor", "ceil", "round", "trunc", "sign", "sgn"}
    )
    | {"copy", "fill", "zero", "masked_fill", "index_put", "index_copy", "index_fill", "scatter", "masked_scatter"}
    | {math.inf, -math.inf}
)
# How often the last digits are drawn: with one draw the allowance of one map varies by a factor of ten and more.
_DRAWS = 4
_NOT_TWICE = (
    "the map cannot be differentiated twice: some operation inside has no second derivative in torch (a custom or fused "
    "kernel, probably). Use its plain torch form, for example attn_implementation='eager' for Hugging Face models."
)
