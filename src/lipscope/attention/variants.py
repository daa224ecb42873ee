"""Attention with other scores or weights: L2, scaled cosine, QK-normalised, sigmoid and Sinkhorn (``attention.sinkhorn``).

    P = weights(⟨q̃_i, k̃_j⟩)      o_i = Σ_j P_ij ṽ_j      out = concat_h(o^h) W_Oᵀ

Token by token, features q̃, k̃, ṽ (``attention.features``); then an n×n core; then W_O. With ẑ = z/√(|z|² + ε), by head,

    L2               softmax of −|q_i − q_j|²/√dk, keys tied          v_j = W_V A x_j, A = W_QᵀW_Q/√dk  Kim et al. 2021
    scaled cosine    softmax of τ q̂_i·k̂_j                             v_j = ν v̂_j                       Qi et al. 2023
    QK-normalised    softmax of τ q̂_i·k̂_j                             v_j = W_V x_j
    sigmoid          P_ij = sigmoid(τ q_i·k_j + b), dP = P(1 − P)∘dS  v_j = W_V x_j                     Ramapuram et al. 2024

Rows of sigmoid attention do not add up to one; b = −log n, the default, keeps their sums near one when scores are small.
Variants have no biases. Their weights may carry gradients: calling a variant is differentiable in weights and tokens.

``family`` has the same weights through every kind of attention, so that they can be compared. Biases, rotary embeddings,
sinks and score biases of a layer are left out: what differs between the members is the rule that makes attention weights of
inner products, and nothing else. A layer whose scale τ is not 1/√dk (models often come with τ inside W_Q) is read as one
with W_Q·τ√dk and 1/√dk, which is the same attention.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self, TypeAlias, cast

import torch
from torch import Tensor

from lipscope.attention.core import Linearisation, Triple, largest_product
from lipscope.attention.features import Feature, LiftedKey, LiftedQuery, Normalised
from lipscope.attention.layer import Attention, Layer
from lipscope.attention.masks import Full, Mask, MaskLike, as_mask
from lipscope.attention.norms import Normalisation
from lipscope.attention.operators import AttentionOperator
from lipscope.attention.scores import ScoreRule
from lipscope.attention.sinkhorn import newton_step, potential, sinkhorn_core
from lipscope.attention.validation import derived
from lipscope.spectral.operator import Operator

Features: TypeAlias = tuple[Feature, Feature, Feature]


@dataclass(frozen=True, eq=False)
class VariantProjections:
    """The features of a variant at tokens X (B, n, d): its projections."""

    features: Features
    X: Tensor

    def jvp(self, U: Tensor) -> Triple:
        """How the features move with the tokens."""
        q, k, v = self.features
        return q.jvp(U), k.jvp(U), v.jvp(U)

    def vjp(self, cotangents: Triple) -> Tensor:
        """The transpose."""
        parts = zip(self.features, cotangents, strict=True)
        return torch.stack([feature.vjp(cotangent) for feature, cotangent in parts]).sum(0)

    def select(self, items: Tensor) -> VariantProjections:
        """Keep the listed inputs."""
        q, k, v = self.features
        return VariantProjections((q.select(items), k.select(items), v.select(items)), self.X[items])


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Variant(Layer):
    """A multi-head attention layer whose scores or weights are not those of ``Attention``; calling it applies it."""

    q: Tensor  # query weights, ``(heads·dk, d)``
    v: Tensor  # value weights, ``(heads·dv, d)``
    out: Tensor | None = None  # output weights, ``(d_out, heads·dv)``; None leaves the heads concatenated
    heads: int = 1
    mask: MaskLike = None  # who sees whom: a mask object, a short string such as ``"causal"``, or a tensor

    kind: ClassVar[str]
    masks: ClassVar[tuple[type[Mask], ...]] = (Mask,)
    numbers: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "mask", self._fitting(self.mask))
        for name in self.numbers:
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} must be positive and finite, got {value}")
        # The plain layer on the same weights says what does not fit together.
        _ = self.plain

    def __repr__(self) -> str:
        return repr(self.plain).replace("Attention", type(self).__name__, 1)

    @classmethod
    def _fitting(cls, mask: MaskLike) -> Mask:
        found = as_mask(mask)
        if not isinstance(found, cls.masks):
            raise ValueError(f"mask {found} does not fit {cls.kind} attention: it takes mask full only")
        return found

    @cached_property
    def plain(self) -> Attention:
        """Dot-product attention with the same weights; W_K is W_Q where a variant has no keys of its own."""
        return Attention(self.q, getattr(self, "k", self.q), self.v, self.out, self.heads, mask=self.mask)

    @property
    def output_width(self) -> int:
        """Dimension of one output token."""
        return self.v.shape[0] if self.out is None else self.out.shape[0]

    def with_mask(self, mask: MaskLike) -> Self:
        return derived(self, mask=self._fitting(mask))

    @abstractmethod
    def features(self, X: Tensor) -> Features:
        """Queries, keys and values of tokens (B, n, d)."""

    @abstractmethod
    def weights(self, scores: Tensor) -> Tensor:
        """The weights P of scores (B, H, n, n) by torch operations that can be differentiated as often as one likes."""

    @abstractmethod
    def linearise(self, q: Tensor, k: Tensor, v: Tensor) -> Linearisation:
        """The core at features q̃, k̃, ṽ, for products with its Jacobian."""

    def visible(self, n: int) -> Tensor | None:
        """True where query i sees key j, (·, ·, n, n); None for everywhere."""
        mask = cast(Mask, self.mask)
        if isinstance(mask, Full):
            return None
        additive = mask.additive(n)
        if additive is not None and bool(additive.any()):
            raise ValueError(f"mask {mask} adds to scores, and {self.kind} attention takes masks that hide or show only")
        allowed = mask.allowed(n)
        return None if allowed is None else allowed.to(self.device)

    def merge_heads(self, o: Tensor) -> Tensor:
        """Head outputs (B, H, n, dv) → tokens (B, n, d_out)."""
        joined = o.transpose(1, 2).flatten(2)
        return joined if self.out is None else joined @ self.out.mT

    def split_output(self, G: Tensor) -> Tensor:
        """The transpose of ``merge_heads``: (B, n, d_out) → (B, H, n, dv)."""
        joined = G if self.out is None else G @ self.out
        return joined.reshape(*G.shape[:2], self.heads, -1).transpose(1, 2).contiguous()

    @torch.no_grad()
    def jacobian_parts(
        self, X: Tensor, *, tiled: bool | None = None, offset: Tensor | None = None
    ) -> tuple[VariantProjections, Linearisation, Tensor | None]:
        """What products with the Jacobian at X (B, n, d) need; the n×n matrices are formed whatever ``tiled`` says.

        Sizes of its parts (see ``Attention.jacobian_parts``) where a normalisation makes dz − ẑ(ẑ·dz) cancel.
        """
        features = self.features(X)
        core = self.linearise(*(feature.value for feature in features))
        if not isinstance(features[0], Normalised):
            return VariantProjections(features, X), core, None
        (q, q_off, dq, dq_off), (k, k_off, dk, dk_off), (v, v_off, _, dv_off) = (f.sizes(X) for f in features)
        P = core.P.double()

        def through(slope: Tensor) -> Tensor:
            """At least the norm of P times such slopes of tokens."""
            return ((P @ slope[..., None]).amax((-2, -1)) * (P.sum(-2) * slope).amax(-1)).sqrt()

        # Errors to first order: one factor of every product is off.
        mean = through(dv_off) * ((2 + q_off * k + q * k_off) / (2 + core.score_size)).clamp_min(1.0)
        keys = through((v * q)[..., None] * dk_off + (v_off * q + v * q_off)[..., None] * dk)
        queries = (v * k)[..., None] * dq_off + (v_off * k + v * k_off)[..., None] * dq
        return VariantProjections(features, X), core, torch.stack([mean, keys + queries.amax(-1)], dim=-1)

    def __call__(self, X: Tensor) -> Tensor:
        batched = X if X.ndim == 3 else X[None]
        q, k, v = (feature.value for feature in self.features(batched))
        Y = self.merge_heads(self.weights(q @ k.mT) @ v)
        return Y if X.ndim == 3 else Y[0]

    def operator(self, X: Tensor, scope: str = "attention", norm: Normalisation | None = None) -> Operator:
        """The Jacobian at tokens X (B, n, d), in their dtype and on their device, at scope ``"attention"`` only."""
        if scope != "attention" or norm is not None:
            raise ValueError(f"{self.kind} attention is measured at scope 'attention' only, without a norm")
        if X.shape[-1] != self.width:
            raise ValueError(f"X has tokens of width {X.shape[-1]}, but the layer takes width {self.width}")
        return AttentionOperator.at(self.to(dtype=X.dtype, device=X.device), X)

    def bilinear(self, X: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """The form ⟨u, J(X) v⟩, (B,), for u (B, n, d_out) and v (B, n, d), as ⟨∂⟨u, f(X)⟩/∂X, v⟩ with its graph."""
        with torch.enable_grad():
            X = X if X.requires_grad else X.detach().clone().requires_grad_()
            Y = self(X)
            (slope,) = torch.autograd.grad(Y, X, left.reshape(Y.shape), create_graph=True)
            return (slope * right.reshape(X.shape)).flatten(1).sum(-1)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class DotProductVariant(Variant):
    """Linear features τ q_i, k_j and v_j."""

    k: Tensor  # key weights, ``(heads·dk, d)``
    scale: float | None = None  # τ, 1/√dk by default

    @property
    def tau(self) -> float:
        """The scale τ of the scores."""
        return 1 / math.sqrt(self.head_width) if self.scale is None else self.scale

    @cached_property
    def scaled(self) -> Attention:
        """Dot-product attention with the same weights and the same scale."""
        return derived(self.plain, scale=self.tau)

    def features(self, X: Tensor) -> Features:
        """Features τ q_i, k_j and v_j."""
        return (
            Feature.at(X, self.q, self.heads, self.tau),
            Feature.at(X, self.k, self.heads),
            Feature.at(X, self.v, self.heads),
        )


class _Softmax(Variant):
    """Weights that are a softmax of inner products of features."""

    def weights(self, scores: Tensor) -> Tensor:
        return ScoreRule(allowed=self.visible(scores.shape[-1])).probabilities(scores)[0]

    def linearise(self, q: Tensor, k: Tensor, v: Tensor) -> Linearisation:
        """The softmax core, with values about their mean, which changes no product and spares a cancellation."""
        return Linearisation.at(q, k, v - v.mean(-2, keepdim=True), ScoreRule(allowed=self.visible(q.shape[-2])))


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class L2Attention(_Softmax):
    """L2 attention with tied queries and keys, Lipschitz on the whole space (Kim, Papamakarios, Mnih 2021).

    P_ij ∝ exp(−t|W_Q x_i − W_Q x_j|²), head = P X Aᵀ W_Vᵀ with A = t·W_QᵀW_Q, t = 1/√dk: the theorem needs the keys tied
    to the queries and the factor A before W_V.

    Example:
        >>> import torch
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> L2Attention(q=W, v=W)(torch.zeros(3, 2, dtype=torch.float64)).shape
        torch.Size([3, 2])
    """

    kind: ClassVar[str] = "l2"

    @property
    def t(self) -> float:
        """The factor t = 1/√dk."""
        return 1 / math.sqrt(self.head_width)

    def value_weights(self) -> Tensor:
        """The matrices W_V A of every head, ``(heads·dv, d)``."""
        Q = self.q.reshape(self.heads, self.head_width, self.width)
        V = self.v.reshape(self.heads, -1, self.width)
        return (self.t * (V @ Q.mT) @ Q).flatten(0, 1)

    def features(self, X: Tensor) -> Features:
        """Features (2t q_i, 1), (q_j, −t|q_j|²) and W_V A x_j."""
        q = LiftedQuery.at(X, self.q, self.heads, self.t)
        return q, LiftedKey(self.q, self.heads, q.z, self.t), Feature.at(X, self.value_weights(), self.heads)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class CosineAttention(_Softmax):
    """Scaled cosine similarity attention of LipsFormer: queries, keys and values normalised (Qi et al. 2023)."""

    k: Tensor  # key weights, ``(heads·dk, d)``
    tau: float = 12.0  # τ, the scale of the cosines
    nu: float = 1.0  # ν, the size of the values
    eps: float = 1e-2  # ε of the normalisation, not zero: the constant grows as ε^{−½}

    kind: ClassVar[str] = "cosine"
    numbers: ClassVar[tuple[str, ...]] = ("tau", "nu", "eps")

    def features(self, X: Tensor) -> Features:
        """Features τ q̂_i, k̂_j and ν v̂_j."""
        return (
            Normalised.at(X, self.q, self.heads, self.tau, eps=self.eps),
            Normalised.at(X, self.k, self.heads, eps=self.eps),
            Normalised.at(X, self.v, self.heads, self.nu, eps=self.eps),
        )


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class QKNormAttention(_Softmax):
    """Attention with normalised queries and keys (Henry et al. 2020, Dehghani et al. 2023); values as they are."""

    k: Tensor  # key weights, ``(heads·dk, d)``
    # τ, the scale of the cosines; √dk by default, which is what RMSNorm on queries and keys amounts to
    tau: float | None = None
    eps: float = 1e-2  # ε of the normalisation

    kind: ClassVar[str] = "qk-norm"
    numbers: ClassVar[tuple[str, ...]] = ("cosine_scale", "eps")

    @property
    def cosine_scale(self) -> float:
        """The scale τ."""
        return math.sqrt(self.head_width) if self.tau is None else self.tau

    def features(self, X: Tensor) -> Features:
        """Features τ q̂_i, k̂_j and W_V x_j."""
        return (
            Normalised.at(X, self.q, self.heads, self.cosine_scale, eps=self.eps),
            Normalised.at(X, self.k, self.heads, eps=self.eps),
            Feature.at(X, self.v, self.heads),
        )


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SigmoidAttention(DotProductVariant):
    """Attention with P_ij = sigmoid(τ q_i·k_j + b).

    Example:
        >>> import torch
        >>> W = torch.eye(1, dtype=torch.float64)
        >>> SigmoidAttention(q=0 * W, k=W, v=W)(torch.ones(4, 1, dtype=torch.float64))[0]      # 4·sigmoid(−log 4)
        tensor([0.8000], dtype=torch.float64)
    """

    shift: float | None = None  # b, −log n by default, n the number of tokens

    kind: ClassVar[str] = "sigmoid"

    def shift_at(self, n: int) -> float:
        """The shift b for n tokens."""
        return -math.log(n) if self.shift is None else self.shift

    def weights(self, scores: Tensor) -> Tensor:
        """The sigmoid of scores + b, where they are visible."""
        n = scores.shape[-1]
        P = torch.sigmoid(scores + self.shift_at(n))
        visible = self.visible(n)
        return P if visible is None else P * visible

    def linearise(self, q: Tensor, k: Tensor, v: Tensor) -> Linearisation:
        """The softmax core with W = P(1 − P) and without its row term, which is the part that comes from Σ_j P_ij = 1."""
        P = self.weights(q @ k.mT)
        return Linearisation(q, k, v, P, P * (1 - P), torch.zeros_like(P[..., :1] * v), largest_product(q, k))


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class SinkhornAttention(DotProductVariant):
    """Attention with doubly stochastic weights; no mask, since a triangular doubly stochastic matrix is the identity.

    Example:
        >>> import torch
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> layer = SinkhornAttention(q=W, k=W, v=W)
        >>> X = torch.randn(5, 2, dtype=torch.float64)
        >>> bool(torch.allclose(layer(X).sum(0), X.sum(0)))       # columns add up to one: no token is lost
        True
    """

    kind: ClassVar[str] = "sinkhorn"
    masks: ClassVar[tuple[type[Mask], ...]] = (Full,)

    def weights(self, scores: Tensor) -> Tensor:
        """The weights P. Two Newton steps from the solution carry the derivatives of P up to the third order."""
        g = potential(scores.detach())
        # One step squares the error, so after two steps g(S + dS) is right up to terms of fourth order in dS.
        for _ in range(2):
            g = g + newton_step(scores, g)
        return torch.softmax(scores + g, dim=-1)

    def linearise(self, q: Tensor, k: Tensor, v: Tensor) -> Linearisation:
        """The core with the projection that makes up its derivative."""
        return sinkhorn_core(q, k, v)


VARIANTS = ("dot-product", "1/d-scaled", "soft-capped", "qk-norm", "cosine", "l2", "sigmoid", "sinkhorn")

# The soft-cap of Gemma 2 for attention logits.
SOFTCAP = 50.0


def variant(name: str, layer: Attention, **options: Any) -> Attention | Variant:
    """One kind of attention with the weights of ``layer``.

    Args:
        name: one of ``VARIANTS``.
        layer: where W_Q, W_K, W_V, W_O and the mask come from; its biases and other extras are left out.
        **options: parameters of the kind, such as ``softcap``, ``tau``, ``nu``, ``eps``, ``shift``.

    Returns:
        An ``Attention`` for dot products, a ``Variant`` otherwise.

    Raises:
        ValueError: when there is no such kind, or its mask or parameters do not fit.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> variant("l2", lipscope.Attention(W, W, W)).kind
        'l2'
    """
    keys, values = _ungrouped(layer.k, layer), _ungrouped(layer.v, layer)
    queries = layer.q if layer.scale is None else layer.q * (layer.scale * math.sqrt(layer.head_width))
    shared: dict[str, Any] = {"q": queries, "v": values, "out": layer.out, "heads": layer.heads, "mask": layer.mask}
    if name in ("dot-product", "1/d-scaled", "soft-capped"):
        scale = 1 / layer.head_width if name == "1/d-scaled" else None
        options = {"scale": scale, "softcap": SOFTCAP if name == "soft-capped" else None} | options
        return Attention(k=keys, **shared, **options)
    if name == "l2":
        return L2Attention(**shared, **options)
    kinds: dict[str, Any] = {
        "qk-norm": QKNormAttention, "cosine": CosineAttention, "sigmoid": SigmoidAttention, "sinkhorn": SinkhornAttention,
    }  # fmt: skip
    if name not in kinds:
        raise ValueError(f"there is no attention {name!r}; kinds are: {', '.join(VARIANTS)}")
    made: Variant = kinds[name](k=keys, **shared, **options)
    return made


def family(
    layer: Attention, names: Sequence[str] = VARIANTS, options: dict[str, dict[str, Any]] | None = None
) -> dict[str, Attention | Variant]:
    """All kinds of attention with the weights of ``layer``; those that do not take its mask are left out."""
    kept = [name for name in names if name != "sinkhorn" or isinstance(layer.mask, Full)]
    return {name: variant(name, layer, **(options or {}).get(name, {})) for name in kept}


def _ungrouped(weights: Tensor, layer: Attention) -> Tensor:
    """One block of rows per query head."""
    shared = weights.reshape(layer.kv_heads, -1, layer.width)
    return shared.repeat_interleave(layer.heads // layer.kv_heads, dim=0).flatten(0, 1)
