"""The attention core as a pair of autograd Functions: backward is the analytic Jᵀ, its backward is the analytic J.

    forward      (q, k, v) ↦ O
    backward     g ↦ Jᵀg            one pass of ``Linearisation.vjp``
    its backward u ↦ J·u            one pass of ``Linearisation.jvp``: Jᵀg is linear in g

so that J·u of any map with attention inside is obtained by differentiating g ↦ Jᵀg, without forward mode and without
keeping the many intermediate n×n tensors that autograd would keep for a softmax differentiated twice.

The seam: our attention core in place of a Hugging Face model's own.

``transformers`` calls one function per attention layer with q (after rotary embeddings and QK-norm), k and v (not
repeated for grouped queries), the mask, the scale, the window, the soft-cap and the sinks. Inside ``using_seam(model)``
that function is ours. The mask function is registered with it: without one, ``transformers`` hands over no mask at all
and causality is silently lost. Models that do not go through this function keep their own eager attention.

The mask function receives the rule itself, a function of (input, head, query, key). For long sequences it answers with a
``SymbolicMask``: a tensor for everybody who looks at its shape or passes it on, and the rule for our attention core, which
evaluates it tile by tile. Whoever computes with it gets the true boolean matrix. It cannot be changed: a write into it, also
one through a view of it, is noticed by torch's version counter and refused (of those made in inference mode, which lipscope
does not use, torch counts only some).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import prepare_padding_mask, sdpa_mask

from lipscope.attention.core import Triple, group_queries, ungroup_queries
from lipscope.attention.masks import Causal, Full, Mask, MaskFunction, Packed, RealTokens, Window, hidden, same_mask
from lipscope.attention.scores import ScoreRule
from lipscope.attention.tiled import AnyLinearisation, core_at


def attention_core(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
    """Heads' outputs (B, n, H, dv) for scaled queries (B, H, n, dk), keys (B, Hkv, m, dk) and values (B, Hkv, m, dv)."""
    output: Tensor = _Core.apply(q, k, v, rule)  # type: ignore[no-untyped-call]
    return output


class _Core(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        core = core_at(q, k, v, rule)
        ctx.core, ctx.heads = core, q.shape[1]
        ctx.save_for_backward(q, k, v)
        # A copy, because the saved core must not hold the very tensor that holds this node.
        return ungroup_queries(core.o, q.shape[1]).transpose(1, 2).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (g,) = grad_outputs
        gq, gk, gv = _Pullback.apply(g, ctx.core, ctx.heads, *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return gq, gk, gv, None


class _Pullback(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, core: AnyLinearisation, heads: int, q: Tensor, k: Tensor, v: Tensor) -> Triple:
        ctx.core, ctx.heads = core, heads
        ctx.shapes = (q.shape, k.shape, v.shape)
        gq, gk, gv = core.vjp(group_queries(g.transpose(1, 2), k.shape[1]))
        return ungroup_queries(gq, heads), gk, gv

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = grad_outputs
        product = ctx.core.jvp(group_queries(dq, ctx.shapes[1][1]), dk, dv)
        # Jᵀg also depends on q, k and v. That derivative is not provided: NaN stays unseen when only J·u is asked for,
        # and spoils visibly what would otherwise be silently wrong.
        missing = [product.new_full((), float("nan")).expand(shape) for shape in ctx.shapes]
        return ungroup_queries(product, ctx.heads).transpose(1, 2), None, None, *missing


NAME = "lipscope"
# Models whose attention the core cannot stand for: masks or biases made of the tokens, several calls in one layer.
KEEPS_ITS_OWN: WeakSet[nn.Module] = WeakSet()


@dataclass(frozen=True, eq=False)
class CoreCall:
    """One call of the attention core: what the model handed over. q carries the scale; the mask includes the window."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    rule: ScoreRule
    window: int | None = None


CoreObserver = Callable[[CoreCall], CoreCall | None]
_observers: list[CoreObserver] = []


@contextmanager
def observing_core(observer: CoreObserver) -> Iterator[None]:
    """Hand every call of the core to ``observer`` before it is computed; it may return another one, or raise to stop."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


_documents: list[Packed | None] = []


@contextmanager
def packed(lengths: Sequence[int] | None) -> Iterator[None]:
    """Inside, tokens see only tokens of their own document, for documents of these lengths packed into one sequence."""
    _documents.append(None if lengths is None else Packed(tuple(lengths), causal=False))
    try:
        yield
    finally:
        _documents.pop()


@contextmanager
def using_seam(model: nn.Module) -> Iterator[None]:
    """Run ``model`` on our attention core, or on its own eager one where it does not use the attention interface.

    On exit the model's attention implementation and the registries of ``transformers`` are as they were.
    """
    through_seam = any(
        hasattr(sys.modules.get(type(part).__module__), "ALL_ATTENTION_FUNCTIONS") and hasattr(part, "config")
        for part in model.modules()
        if "Attention" in type(part).__name__ or type(part).__name__.endswith("MLA")
    )
    through_seam = through_seam and model not in KEEPS_ITS_OWN
    with (
        _registered(AttentionInterface, seam_attention),
        _registered(AttentionMaskInterface, seam_mask),
        _configured(model, "_attn_implementation_internal", NAME if through_seam else "eager"),
        plain_experts(model),
    ):
        yield


def plain_experts(model: nn.Module) -> AbstractContextManager[None]:
    """Run mixtures of experts in plain torch: their grouped kernels have neither float64 nor second derivatives."""
    return _configured(model, "_experts_implementation_internal", "eager")


@contextmanager
def _configured(model: nn.Module, setting: str, value: str) -> Iterator[None]:
    """Inside, every config that the model's parts consult has this setting.

    Not its property: that would overwrite the settings of sub-configs, which are consulted by parts of their own.
    """
    # Each config once: transformers takes its time to say what a config has.
    configs = {id(found): found for part in model.modules() if (found := getattr(part, "config", None)) is not None}
    with ExitStack() as restored:
        for config in (found for found in configs.values() if hasattr(found, setting)):
            restored.callback(setattr, config, setting, getattr(config, setting))
            setattr(config, setting, value)
        yield


def seam_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with ``transformers``: heads' outputs (B, n, H, dv), no weights."""
    if dropout:
        raise ValueError(f"{type(module).__name__} runs with dropout {dropout:g}: call .eval() on the model first")
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} query heads cannot share {key.shape[1]} key heads")
    for name, term in (("position bias", position_bias), ("attention mask", attention_mask), ("sink", s_aux)):
        if term is not None and term.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"the {name} of {type(module).__name__} depends on the tokens (or its parameters still require "
                "gradients); its derivative is not part of the attention core"
            )
    dtype = query.dtype
    working = dtype if dtype == torch.float64 else torch.float32
    tau = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", False))
    seen: Mask | None = None
    if attention_mask is None and query.shape[2] == key.shape[2] and (causal or sliding_window):
        # What fused kernels do when they get no mask.
        seen = Window(sliding_window, causal) if sliding_window else Causal()
    if isinstance(attention_mask, SymbolicMask) and attention_mask.shape[-1] == key.shape[2]:
        seen, attention_mask = attention_mask.rule, None
    rule = score_rule(attention_mask, position_bias, softcap, s_aux, working, key.shape[2])
    for mask in (seen, _documents[-1] if _documents else None):
        if mask is not None:
            rule = _also(rule, mask, key.shape[2], query.device)
    call = CoreCall(module, query.to(working) * tau, key.to(working), value.to(working), rule, sliding_window)
    for observer in list(_observers):
        call = observer(call) or call
    return attention_core(call.q, call.k, call.v, call.rule).to(dtype), None


def seam_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask function registered with ``transformers``: always an explicit boolean mask, True where visible.

    Long sequences get a ``SymbolicMask``, which is one without its n×n matrix; its rule is called by name where it is the
    full, causal or windowed one.
    """
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    given = inspect.signature(sdpa_mask).bind(*args, **kwargs)
    given.apply_defaults()
    asked = given.arguments
    inputs, n, device, window = (asked[name] for name in ("batch_size", "kv_length", "device", "local_size"))
    plain = asked["q_length"] == n and not asked["q_offset"] and not asked["kv_offset"] and not asked["use_vmap"]
    if plain and n >= LONG:
        rule: Mask = MaskFunction(asked["mask_function"], inputs, n, device)
        candidates = [Causal(), Full(), *((Window(window), Window(window, causal=False)) if window else ())]
        rule = next((named for named in candidates if same_mask(named, rule, n)), rule)
        padding = prepare_padding_mask(asked["attention_mask"], n, 0)
        if padding is not None and not bool(padding.all()):
            rule = rule & RealTokens(padding.bool().cpu(), keys_only=True)
        return SymbolicMask.of(rule, inputs, n, device)
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    return mask


def score_rule(
    mask: Tensor | None,
    bias: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    dtype: torch.dtype,
    n_keys: int,
) -> ScoreRule:
    """Mask (boolean or additive), position bias, soft-cap and sinks in the core's own words."""
    additive, allowed = None if bias is None else bias.detach().to(dtype), None
    if mask is not None:
        mask = mask.detach()[..., :n_keys]
        if mask.dtype == torch.bool:
            allowed = mask
        else:
            allowed = ~hidden(mask)
            finite = mask.masked_fill(~allowed, 0.0).to(dtype)
            if bool(finite.any()):
                additive = finite if additive is None else additive + finite
    return ScoreRule(
        softcap=softcap or None,
        additive=additive,
        allowed=allowed,
        sinks=None if sinks is None else sinks.detach().to(dtype),
    )


def _also(rule: ScoreRule, mask: Mask, n: int, device: torch.device) -> ScoreRule:
    """The rule with one more mask: a rule for long sequences, a matrix for short ones."""
    if n >= LONG:
        return replace(rule, mask=mask if rule.mask is None else rule.mask & mask)
    allowed = mask.allowed(n)
    if allowed is None:
        return rule
    allowed = allowed.to(device)
    return replace(rule, allowed=allowed if rule.allowed is None else rule.allowed & allowed)


@contextmanager
def _registered(interface: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Register under our name with every instance of the interface, and take it back."""
    known = interface._global_mapping
    undo = partial(interface.register, NAME, known[NAME]) if NAME in known else partial(known.pop, NAME)
    interface.register(NAME, function)
    try:
        yield
    finally:
        undo()


# Tokens from which masks stay rules.
LONG = 512


class SymbolicMask(Tensor):
    """A boolean mask (B, 1, n, n) that is a rule; the matrix is formed only for those who compute with it."""

    _rule: Mask

    @staticmethod
    def of(rule: Mask, inputs: int, n: int, device: torch.device | str = "cpu") -> SymbolicMask:
        """The mask of ``inputs`` sequences of n tokens."""
        with torch.inference_mode(False):
            made: SymbolicMask = Tensor._make_wrapper_subclass(
                SymbolicMask, (inputs, 1, n, n), dtype=torch.bool, device=torch.device(device)
            )
        made._rule = rule
        return made

    @property
    def rule(self) -> Mask:
        """Who sees whom.

        Raises:
            NotImplementedError: when somebody has written into the mask or into a view of it, which share their count of
                writes: what was written went into a matrix that nobody keeps.
        """
        if self._version:
            raise NotImplementedError(_changed("through a view of it"))
        return self._rule

    def dense(self) -> Tensor:
        """The matrix."""
        B, _, n, _ = self.shape
        allowed = self.rule.allowed(n)
        allowed = torch.ones(1, 1, n, n, dtype=torch.bool) if allowed is None else allowed
        # Contiguous, as the tensor that it stands for.
        return allowed.to(self.device).expand(B, 1, n, n).contiguous()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SymbolicMask({self._rule}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse assignment at once; torch makes it a write into a view, which is noticed only later."""
        if getattr(func, "__name__", "") == "__setitem__" and args and isinstance(args[0], SymbolicMask):
            raise NotImplementedError(_changed("__setitem__"))
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            # The same tensor, but writes into it are counted.
            return args[0].detach()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Pass on what leaves the mask as it is; for everything else but changes there is the matrix."""
        asked = func._schema.arguments
        given = dict(zip((argument.name for argument in asked), args, strict=False)) | (kwargs or {})
        written = [given.get(a.name) for a in asked if a.alias_info is not None and a.alias_info.is_write]
        if any(isinstance(entry, SymbolicMask) for entry in tree_leaves(written)):
            raise NotImplementedError(_changed(str(func)))
        first = args[0] if args else None
        if isinstance(first, SymbolicMask) and _leaves_as_is(func, first, args[1:]):
            B, _, n, _ = first.shape
            return SymbolicMask.of(first.rule, B, n, first.device)
        args, kwargs = tree_map_only(SymbolicMask, SymbolicMask.dense, (args, kwargs or {}))
        # Tensors of inference mode have no count of writes to share.
        with torch.inference_mode(False):
            return func(*args, **kwargs)


def _changed(how: str) -> str:
    return (
        f"the model changes its attention mask in place ({how}), and from {LONG} tokens on masks are kept as rules "
        f"that cannot be changed: measure it with fewer tokens, or let its code make a new mask"
    )


def _leaves_as_is(func: Any, mask: SymbolicMask, rest: tuple[Any, ...]) -> bool:
    aten = torch.ops.aten
    if func in (aten.detach.default, aten.alias.default):
        return True
    if func is not aten.slice.Tensor:
        return False
    given: list[Any] = [*rest, *(0, None, None, 1)[len(rest) :]]
    dim, start, end, step = given
    return not start and (end is None or end >= mask.shape[dim]) and step == 1
