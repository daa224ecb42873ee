"""One multi-head attention layer, described by its tensors.

q_i = W_Q x_i + b_Q     k_j = W_K x_j + b_K     v_j = W_V x_j + b_V
s_ij = τ q_i·k_j + B_ij     P_i = softmax_j(s_ij)     o_i = Σ_j P_ij v_j
attention(X) = concat_h(o^h) W_Oᵀ + b_O

With rotary embeddings q_i and k_j are rotated by R_i and R_j, so that s_ij = τ (R_i q_i)·(R_j k_j) + B_ij.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from lipscope.attention.core import Linearisation, Point, Triple, group_queries, ungroup_queries
from lipscope.attention.masks import Mask, MaskLike, as_mask
from lipscope.attention.norms import LayerNorm, Normalisation, RMSNorm
from lipscope.attention.operators import AttentionOperator, HeadOperator, LayerProjections, NormAttentionOperator
from lipscope.attention.rotary import Rotary, Rotation
from lipscope.attention.scores import ScoreRule
from lipscope.attention.tiled import AnyLinearisation, core_at
from lipscope.attention.validation import derived, moved, validate
from lipscope.doors import at_least
from lipscope.spectral.operator import Operator

# What ``Attention.operator`` linearises.
SCOPES = ("attention", "head", "norm+attention")


class Layer(ABC):
    """An attention layer that can be measured: it answers for its own Jacobian. ``Attention`` and ``Variant`` do."""

    q: Tensor
    heads: int
    mask: MaskLike

    @property
    def width(self) -> int:
        """Token dimension d."""
        return self.q.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the weights."""
        return self.q.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return self.q.device

    @property
    def head_width(self) -> int:
        """Dimension dk of one query or key."""
        return self.q.shape[0] // self.heads

    def to(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Self:
        """The same layer in another dtype or on another device."""
        return moved(self, dtype, device)

    @abstractmethod
    def with_mask(self, mask: MaskLike) -> Self:
        """The same layer under another mask."""

    @abstractmethod
    def operator(self, X: Tensor, scope: str = "attention", norm: Normalisation | None = None) -> Operator:
        """The Jacobian at tokens X (B, n, d), in their dtype and on their device; one item per input, or per (input, head).

        Scopes are ``"attention"`` (all heads and W_O), ``"head"`` (each head before W_O) and ``"norm+attention"``
        (u ↦ attention(norm(u)), with X = u). A layer may refuse all but the first, and what does not fit it.
        """

    @abstractmethod
    def bilinear(self, X: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """The form ⟨u, J(X) v⟩, (B,), for u (B, n, d_out) and v (B, n, d), differentiable in X and in the weights."""

    @abstractmethod
    def __call__(self, X: Tensor) -> Tensor:
        """Apply the layer to tokens (n, d) or (B, n, d)."""


@dataclass(frozen=True, eq=False)
class Attention(Layer):
    """An immutable description of one multi-head attention layer; calling it applies the layer.

    Weights are laid out as in ``nn.Linear`` (rows are outputs), heads are consecutive blocks of rows. Tensors are kept,
    not copied: do not change one in place afterwards.

    Attributes:
        q: query weights, ``(heads·dk, d)``.
        k: key weights, ``(kv_heads·dk, d)``.
        v: value weights, ``(kv_heads·dv, d)``.
        out: output weights, ``(d_out, heads·dv)``; None leaves the heads concatenated.
        heads: number of query heads.
        kv_heads: number of key/value heads, a divisor of ``heads`` (grouped queries); ``heads`` by default.
        q_bias: query bias ``(heads·dk,)``.
        k_bias: key bias ``(kv_heads·dk,)``.
        v_bias: value bias ``(kv_heads·dv,)``.
        out_bias: output bias ``(d_out,)``.
        scale: τ, 1/√dk by default.
        mask: who sees whom: a mask object, a short string such as ``"causal"``, or a tensor.
        softcap: c in c·tanh(s/c), or None.
        bias: term added to the scores, ``(n, n)``, ``(heads, n, n)`` or ``(B, heads, n, n)`` (ALiBi, relative positions).
        sinks: one extra logit per head, ``(heads,)``, of a virtual token with value zero.
        rotary: rotations of queries and keys by position, or None.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(4, dtype=torch.float64)
        >>> layer = lipscope.Attention(q=W, k=W, v=W, out=W, heads=2, mask="causal")
        >>> layer(torch.ones(3, 4, dtype=torch.float64)).shape
        torch.Size([3, 4])
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None = None
    heads: int = 1
    kv_heads: int = 0
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    out_bias: Tensor | None = None
    scale: float | None = None
    mask: MaskLike = None
    softcap: float | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    rotary: Rotary | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "mask", as_mask(self.mask))
        validate(self)

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, *, mask: MaskLike = None) -> Attention:
        """Describe a torch ``nn.MultiheadAttention`` used as self-attention; its weights are copied.

        Args:
            module: the module, in eval mode or without dropout.
            mask: who sees whom (the module itself does not know).

        Returns:
            The same map as ``module(x, x, x)``.

        Raises:
            ValueError: when the module is not plain self-attention, or has dropout switched on.
        """
        if not module._qkv_same_embed_dim:
            raise ValueError("from_torch needs self-attention: kdim and vdim must equal embed_dim")
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError("from_torch does not support add_bias_kv or add_zero_attn")
        if module.training and module.dropout > 0:
            raise ValueError(f"module is in training mode with dropout {module.dropout}: call .eval() first")
        assert module.in_proj_weight is not None
        tensors = (module.in_proj_weight, module.out_proj.weight, module.in_proj_bias, module.out_proj.bias)
        qkv, out, qkv_bias, out_bias = (None if t is None else t.detach().clone() for t in tensors)
        return cls.from_fused(qkv, out, heads=module.num_heads, qkv_bias=qkv_bias, out_bias=out_bias, mask=mask)

    @classmethod
    def from_fused(
        cls,
        qkv: Tensor,
        out: Tensor | None = None,
        *,
        heads: int,
        kv_heads: int = 0,
        qkv_bias: Tensor | None = None,
        out_bias: Tensor | None = None,
        transposed: bool = False,
        **options: Any,
    ) -> Attention:
        """Split a fused projection [W_Q; W_K; W_V].

        Args:
            qkv: fused weights, ``((heads + 2·kv_heads)·dh, d)``, or the transpose (GPT-2's ``Conv1D``).
            out: output weights, transposed likewise.
            heads: number of query heads.
            kv_heads: number of key/value heads, ``heads`` by default.
            qkv_bias: fused bias.
            out_bias: output bias.
            transposed: weights are stored (in, out), as in GPT-2's ``Conv1D``.
            **options: any other field of ``Attention``.
        """
        at_least(1, heads=heads)
        if transposed:
            qkv, out = qkv.mT, None if out is None else out.mT
        shared = kv_heads or heads
        count = heads + 2 * shared
        dh, rest = divmod(qkv.shape[0], count)
        if rest:
            raise ValueError(
                f"qkv has {qkv.shape[0]} output rows, which {count} heads (queries, keys and values) do not divide"
                + ("" if transposed else "; GPT-2's Conv1D weights need transposed=True")
            )
        if qkv_bias is not None and qkv_bias.shape != (qkv.shape[0],):
            raise ValueError(f"qkv_bias has shape {tuple(qkv_bias.shape)}, but qkv has {qkv.shape[0]} output rows")
        sizes = [heads * dh, shared * dh, shared * dh]
        q_bias, k_bias, v_bias = (None, None, None) if qkv_bias is None else qkv_bias.split(sizes)
        biases: dict[str, Any] = {"q_bias": q_bias, "k_bias": k_bias, "v_bias": v_bias, "out_bias": out_bias}
        q, k, v = qkv.split(sizes)
        return cls(q, k, v, out, heads, kv_heads, **biases, **options)

    @property
    def value_width(self) -> int:
        """Dimension dv of one value."""
        return self.v.shape[0] // self.kv_heads

    @property
    def output_width(self) -> int:
        """Dimension of one output token."""
        return self.heads * self.value_width if self.out is None else self.out.shape[0]

    @property
    def tau(self) -> float:
        """The scale τ of the scores."""
        return 1 / math.sqrt(self.head_width) if self.scale is None else self.scale

    def with_mask(self, mask: MaskLike) -> Self:
        return derived(self, mask=as_mask(mask))

    def head(self, index: int) -> Attention:
        """Query head ``index`` alone, before W_O, as a one-head layer."""
        if not 0 <= index < self.heads:
            raise ValueError(f"head must lie between 0 and {self.heads - 1}, got {index}")
        shared = index * self.kv_heads // self.heads

        def rows(t: Tensor | None, at: int, width: int) -> Any:
            return None if t is None else t[at * width : (at + 1) * width]

        dk, dv = self.head_width, self.value_width
        bias, mask = self.bias, self.mask
        if bias is not None and bias.ndim > 2 and bias.shape[-3] > 1:
            bias = bias[..., index : index + 1, :, :]
        return derived(
            self,
            q=rows(self.q, index, dk), k=rows(self.k, shared, dk), v=rows(self.v, shared, dv), out=None,
            q_bias=rows(self.q_bias, index, dk), k_bias=rows(self.k_bias, shared, dk),
            v_bias=rows(self.v_bias, shared, dv), out_bias=None, heads=1, kv_heads=1, scale=self.tau,
            bias=bias, mask=cast(Mask, mask).for_head(index), sinks=rows(self.sinks, index, 1),
        )  # fmt: skip

    def for_input(self, index: int) -> Attention:
        """The layer as batch item ``index`` sees it: masks, biases and positions that differ between inputs are cut down."""
        bias = self.bias
        if bias is not None and bias.ndim == 4 and bias.shape[0] > 1:
            bias = bias[index : index + 1]
        rotary = None if self.rotary is None else self.rotary.for_input(index)
        return derived(self, mask=cast(Mask, self.mask).for_input(index), bias=bias, rotary=rotary)

    @cached_property
    def each_head(self) -> list[Attention]:
        """The heads alone, the same objects every time: bounds keep the norms of a layer's weights."""
        return [self.head(h) for h in range(self.heads)]

    @cached_property
    def qkv(self) -> Tensor:
        """The matrix [τW_Q; W_K; W_V]: one product gives the three projections, with the scale inside the queries."""
        return torch.cat([self.tau * self.q, self.k, self.v]).detach()

    @property
    def qkv_by_head(self) -> Triple:
        """The three parts of ``qkv``: (heads, dk, d), (kv_heads, dk, d) and (kv_heads, dv, d)."""
        q, k, v = self.qkv.split([len(t) for t in (self.q, self.k, self.v)])
        return q.unflatten(0, (self.heads, -1)), k.unflatten(0, (self.kv_heads, -1)), v.unflatten(0, (self.kv_heads, -1))

    @cached_property
    def column_squares(self) -> Tensor:
        """Squared norms of the columns of every head's τW_Q, W_K and W_V, (heads + 2·kv_heads, d)."""
        return torch.cat([torch.linalg.vector_norm(t, dim=1) for t in self.qkv_by_head]).square()

    def split_heads(self, projected: Tensor) -> Triple:
        """Split (B, n, rows of qkv) into scaled q (B, H, n, dk), k (B, Hkv, n, dk), v (B, Hkv, n, dv), each contiguous."""
        B, n, _ = projected.shape
        q, k, v = projected.split([self.q.shape[0], self.k.shape[0], self.v.shape[0]], dim=-1)

        def heads(t: Tensor, count: int) -> Tensor:
            return t.reshape(B, n, count, -1).transpose(1, 2).contiguous()

        return heads(q, self.heads), heads(k, self.kv_heads), heads(v, self.kv_heads)

    def rotation(self, n: int, batch: int) -> Rotation | None:
        """The rotations of n tokens, or None without rotary embeddings."""
        return None if self.rotary is None else self.rotary.rotation(n, batch)

    def project(self, X: Tensor, *, biases: bool = True, graph: bool = False) -> Triple:
        """Scaled queries, keys and values of tokens (B, n, d), two of them rotated; ``graph`` keeps that of weights."""

        def shifted(target: Tensor, vector: Tensor | None, factor: float) -> Tensor:
            if vector is None or not biases:
                return target
            # Out of place: for one token the heads are views of one tensor, which autograd does not let us change.
            return target + factor * (vector if graph else vector.detach()).reshape(target.shape[1], 1, -1)

        weights = torch.cat([self.tau * self.q, self.k, self.v]) if graph else self.qkv
        q, k, v = self.split_heads(X @ weights.mT)
        q, k, v = shifted(q, self.q_bias, self.tau), shifted(k, self.k_bias, 1.0), shifted(v, self.v_bias, 1.0)
        rotation = self.rotation(X.shape[1], X.shape[0])
        return (q, k, v) if rotation is None else (rotation.apply(q), rotation.apply(k), v)

    def score_rule(self, n: int, batch: int, *, tiled: bool = False, graph: bool = False) -> ScoreRule:
        """Mask, bias, soft-cap and sinks for sequences of n tokens; ``tiled`` leaves the mask a rule, not a matrix.

        Bias and sinks keep their ``graph``, or are detached.
        """
        mask = cast(Mask, self.mask)
        first, additive = slice(0, 1), mask.additive(n)
        for tensor in (mask.sees(first, first, n), additive):
            if tensor is not None and (tensor.shape[0] not in (1, batch) or tensor.shape[1] not in (1, self.heads)):
                raise ValueError(
                    f"mask {mask} is for {tensor.shape[0]} inputs and {tensor.shape[1]} heads, "
                    f"but there are {batch} inputs and {self.heads} heads"
                )
        bias, sinks = (t if t is None or graph else t.detach() for t in (self.bias, self.sinks))
        if bias is not None:
            if bias.shape[-1] != n:
                raise ValueError(f"bias is for n = {bias.shape[-1]} tokens but the input has n = {n}")
            if bias.ndim == 4 and bias.shape[0] not in (1, batch):
                raise ValueError(f"bias is for {bias.shape[0]} inputs, but there are {batch}")
            additive = bias if additive is None else bias + additive.detach().to(bias)
        elif additive is not None:
            additive = additive.detach()
        return ScoreRule(
            softcap=self.softcap,
            additive=None if additive is None else additive.to(dtype=self.dtype, device=self.device),
            allowed=None if tiled or (allowed := mask.allowed(n)) is None else allowed.to(self.device),
            sinks=sinks,
            mask=mask if tiled else None,
        )

    def core(self, X: Tensor, *, tiled: bool | None = None) -> AnyLinearisation:
        """The attention core linearised at tokens (B, n, d); see ``core_at``."""
        return core_at(*self.project(X), self.score_rule(X.shape[1], X.shape[0], tiled=True), tiled=tiled)

    def linearise(self, X: Tensor) -> Linearisation:
        """The attention core linearised at tokens (B, n, d), with its n×n matrices."""
        return Linearisation.at(*self.project(X), self.score_rule(X.shape[1], X.shape[0]))

    def jacobian_parts(
        self, X: Tensor, *, tiled: bool | None = None, offset: Tensor | None = None
    ) -> tuple[LayerProjections, AnyLinearisation, Tensor]:
        """What products with the Jacobian at X (B, n, d) need, without common terms (see ``Point``), and sizes of its parts.

        These are norms of the mean part and of the parts by way of scores, each as if nothing in it cancelled, (B, H, 2).
        """
        rotation, point = self.rotation(X.shape[1], X.shape[0]), Point.of(self, X, offset)
        rule = self.score_rule(X.shape[1], len(X), tiled=True)
        core = core_at(point.q, point.k, point.v, rule, tiled=tiled, shift=point.shift, size=point.score_size)
        return LayerProjections(self, rotation), core, point.parts(self, core)

    def merge_heads(self, grouped: Tensor) -> Tensor:
        """Head outputs (B, Hkv, G·n, dv) → tokens (B, n, d_out), through W_O but without b_O."""
        joined = ungroup_queries(grouped, self.heads).transpose(1, 2).flatten(2)
        return joined if self.out is None else joined @ self.out.detach().mT

    def split_output(self, G: Tensor) -> Tensor:
        """The transpose of ``merge_heads``: (B, n, d_out) → (B, Hkv, G·n, dv)."""
        tokens = G.flatten(0, 1)
        joined = tokens if self.out is None else tokens @ self.out.detach()
        return group_queries(joined.reshape(*G.shape[:2], self.heads, -1).transpose(1, 2), self.kv_heads)

    def __call__(self, X: Tensor) -> Tensor:
        Y = self.merge_heads(self.core(X if X.ndim == 3 else X[None]).o)
        if self.out_bias is not None:
            Y = Y + self.out_bias.detach()
        return Y if X.ndim == 3 else Y[0]

    def operator(self, X: Tensor, scope: str = "attention", norm: Normalisation | None = None) -> Operator:
        """The Jacobian at tokens X (B, n, d), in their dtype and on their device, at one of ``SCOPES``; see ``Layer``."""
        if X.shape[-1] != self.width:
            raise ValueError(f"X has tokens of width {X.shape[-1]}, but the layer takes width {self.width}")
        layer = self.to(dtype=X.dtype, device=X.device)
        if scope == "norm+attention":
            if not isinstance(norm, LayerNorm | RMSNorm):
                raise ValueError("scope 'norm+attention' needs norm, a LayerNorm or an RMSNorm")
            return NormAttentionOperator.at(layer, norm, X)
        if norm is not None:
            raise ValueError(f"norm belongs to scope 'norm+attention', not to {scope!r}")
        if scope == "attention":
            return AttentionOperator.at(layer, X)
        if scope == "head":
            return HeadOperator.at(layer, X)
        raise ValueError(f"unknown scope {scope!r} for an Attention layer; scopes are: {', '.join(SCOPES)}")

    def bilinear(self, X: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """The form ⟨u, W_O(T V + P dV − rowsum(T)·O)⟩, (B,), for u (B, n, d_out) and v (B, n, d); see ``attention.core``."""
        with torch.enable_grad():
            (q, *fixed), (dq, *moving) = self.project(X, graph=True), self.project(right, biases=False, graph=True)
            k, v, dk, dv = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (*fixed, *moving))
            P, W = self.score_rule(X.shape[1], X.shape[0], graph=True).probabilities(q @ k.mT)
            T = W * (dq @ k.mT + q @ dk.mT)
            moved = T @ v + P @ dv - T.sum(-1, keepdim=True) * (P @ v)
            joined = moved.transpose(1, 2).flatten(2)
            outputs = joined if self.out is None else joined @ self.out.mT
            return (outputs * left).flatten(1).sum(-1)

    def __repr__(self) -> str:
        shared = "" if self.kv_heads == self.heads else f", kv_heads={self.kv_heads}"
        extras = "".join(f", {name}" for name in ("softcap", "bias", "sinks", "rotary") if getattr(self, name) is not None)
        return (
            f"Attention(d={self.width}, heads={self.heads}{shared}, dk={self.head_width}, dv={self.value_width}, "
            f"mask={self.mask}, {str(self.dtype).removeprefix('torch.')}{extras})"
        )
