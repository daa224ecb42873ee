"""What the bounds need to know of a layer's weights: norms, and triangular factors that stand for tall matrices.

A head enters every bound through products such as W_O W_V (d_out × d) of rank at most d_head. With thin QR factors
W_O = Q R_O, W_Kᵀ = Q R_K, τW_Qᵀ = Q R_Q, all norms are those of d_head × d_head matrices:

    ‖W_O z‖ = ‖R_O z‖     ‖W_Kᵀ q‖ = ‖R_K q‖     ‖W_O C τW_Q‖ = ‖R_O C R_Qᵀ‖
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lipscope.attention.layer import Attention
from lipscope.attention.validation import power_above, times_power
from lipscope.bounds.spectral_upper import top_eigenvalue


@dataclass(frozen=True, eq=False)
class HeadWeights:
    """One head in float64, seen through its output weights (or without them)."""

    R_O: Tensor | None  # stands for W_O of this head, (r, dv); None for the identity
    R_K: Tensor  # stands for W_Kᵀ, (r, dk)
    R_Q: Tensor  # stands for τW_Qᵀ, (r, dk)
    VK: Tensor  # R_O W_V W_Kᵀ, (r, dk): maps a scaled query q_i to V a_i
    V: Tensor  # stands for W_O W_V, (r, m), in coordinates of the span of the rows of W_V and W_K
    K: Tensor  # W_Kᵀ in the same coordinates, (m, dk)
    KQ: Tensor  # W_K τW_Qᵀ, (dk, dk): a_i·b_j = q_iᵀ KQ k_j
    basis: Tensor  # orthonormal columns that span the rows of W_V and W_K, (d, m)
    out: float  # ‖W_O‖ of this head, 1 for the identity
    out_size: float  # ‖W_O‖_F likewise, for rounding
    query: float  # |τ|‖W_Q‖ of this head
    value: float  # ‖W_O W_V‖, the rounding of the product included
    value_error: float  # that rounding
    interaction: float  # ‖A‖ = τ‖W_Kᵀ W_Q‖
    query_bias: float  # τ‖W_Kᵀ b_Q‖
    key_bias: float  # τ‖W_Qᵀ b_K‖
    value_bias: float  # ‖W_O b_V‖
    sizes: tuple[float, float, float]  # Frobenius norms |τ|‖W_Q‖, ‖W_K‖ and ‖W_V‖, for rounding
    biases: tuple[float, float, float]  # |τ|‖b_Q‖, ‖b_K‖ and ‖b_V‖, likewise


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """All heads of a layer, with W_O inside (``image``) and without (``plain``)."""

    # Heads followed by their block of W_O; the same objects as ``plain`` when the layer has no W_O
    image: tuple[HeadWeights, ...]
    plain: tuple[HeadWeights, ...]  # heads alone
    out: float  # ‖W_O‖, 1 without W_O
    # The norms below by name: of a wide layer each takes as long as σ, and set bounds do not ask for them.
    norm: Callable[[str], float]

    @cached_property
    def queries(self) -> float:
        """|τ|‖W_Q‖ of the heads stacked."""
        return self.norm("q")

    @cached_property
    def keys(self) -> float:
        """‖W_K‖ likewise; keys and values that several heads share count once per head."""
        return self.norm("k")

    @cached_property
    def values(self) -> float:
        """‖W_V‖ likewise."""
        return self.norm("v")

    @cached_property
    def total(self) -> float:
        """‖Σ_h W_O^h W_V^h‖."""
        return self.norm("ov")

    def head(self, h: int) -> LayerWeights:
        """Those of one head alone."""
        w = self.plain[h]
        return LayerWeights((w,), (w,), 1.0, {"q": w.query, "k": w.sizes[1], "v": w.value, "ov": w.value}.__getitem__)


def spectral(M: Tensor) -> float:
    """Spectral norm of a matrix from its SVD in float64, rounded up by a relative 1e-12."""
    return float(torch.linalg.matrix_norm(M.detach().double(), 2)) * (1 + 1e-12)


def over_heads(plain: Iterable[float], out: float, image: Iterable[float] | None = None, p: float = 2.0) -> float:
    """A bound for all heads from those of each: min( Σ_h image_h, ‖W_O‖·√Σ_h plain_h² ), image with W_O, plain before it.

    In the norm (Σ_i‖x_i‖^p)^{1/p} with p < 2 the root of squares is none: (Σ_h plain_h^p)^{1/p} stands in its place.
    """
    plain = list(plain)
    joint, top = out * math.hypot(*plain), max(plain)
    if p < 2 and 0 < top < math.inf:
        joint = out * top * sum((value / top) ** p for value in plain) ** (1 / p)
    return joint if image is None else min(sum(image), joint)


def triangle(M: Tensor) -> Tensor:
    """R with ‖Rz‖ = ‖Mz‖ for every z, at most as tall as M is wide."""
    return M if M.shape[0] <= M.shape[1] else torch.linalg.qr(M, mode="r").R


def layer_weights(layer: Attention) -> LayerWeights:
    """The weights of ``layer`` as the bounds see them; computed once for the same tensors, whatever mask goes with them."""
    tensors = (layer.k, layer.v, layer.out, layer.q_bias, layer.k_bias, layer.v_bias)
    state = (layer.heads, layer.kv_heads, layer.tau, *(_version(t) for t in (layer.q, *tensors)))
    known: _Known = _CACHE.setdefault(layer.q, [])
    for others, before, weights in known:
        if state == before and all(a is b for a, b in zip(others, tensors, strict=True)):
            return weights
    weights = _compute(layer)
    # References are kept so that ``is`` stays meaningful (ids are reused); entries of earlier in-place versions are dropped.
    known[:] = [entry for entry in known if entry[1][:3] != state[:3]]
    known.append((tensors, state, weights))
    return weights


def _version(tensor: Tensor | None) -> int:
    """How often a tensor was changed in place, as training does with parameters."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


_Known: TypeAlias = list[tuple[tuple[Tensor | None, ...], tuple[float, ...], LayerWeights]]
# By the query weights, as long as these live; tensors have no equality that a plain dictionary could use.
_CACHE: WeakIdKeyDictionary = WeakIdKeyDictionary()
# Rows of a Gram matrix that are made at a time.
_STRIP = 512


def _compute(layer: Attention) -> LayerWeights:
    with torch.no_grad():
        # One head at a time in float64: a copy of all of them would be the largest thing in memory.
        plain = tuple(_head(layer.head(h).to(torch.float64)) for h in range(layer.heads))
        # Without the queries: what is remembered for a tensor must not keep it alive.
        shared, tau = layer.heads // layer.kv_heads, abs(layer.tau)
        norm = partial(_joint_norm, ref(layer.q), layer.k, layer.v, layer.out, shared, tau, [w.query for w in plain])
        if layer.out is None:
            return LayerWeights(plain, plain, 1.0, norm)
        blocks = layer.out.split(layer.value_width, dim=1)
        singles = (layer.head(h).to(torch.float64) for h in range(layer.heads))
        image = tuple(_through(w, single, block.double()) for w, single, block in zip(plain, singles, blocks, strict=True))
        return LayerWeights(image, plain, _root_norm(layer.out), norm)


def _joint_norm(
    q: ref[Tensor], k: Tensor, v: Tensor, out: Tensor | None, shared: int, tau: float, queries: list[float], name: str
) -> float:
    """The norms of ``LayerWeights`` by name; ``shared`` heads have the same keys and values."""
    with torch.no_grad():
        if name == "q":
            # When the queries are gone, what their heads say.
            return math.hypot(*queries) * (1 + 1e-12) if (W_Q := q()) is None else tau * _root_norm(W_Q)
        if name == "k" or name == "v" or out is None:
            return math.sqrt(shared) * _root_norm(k if name == "k" else v)
        by_head = v.double().unflatten(0, (len(queries) // shared, -1))
        W_O, W_V = out.double(), by_head.repeat_interleave(shared, 0).flatten(0, 1)
        return _root_norm(W_O @ W_V) + rounding_unit(W_O, W_V) * _frobenius(W_O) * _frobenius(W_V)


def rounding_unit(*matrices: Tensor) -> float:
    """More than the error of a product of these matrices, relative to the product of their Frobenius norms."""
    return (16 + sum(sum(M.shape) for M in matrices)) * torch.finfo(torch.float64).eps


def _frobenius(M: Tensor | None) -> float:
    if M is None:
        return 0.0
    power = power_above(M)
    return float(torch.linalg.vector_norm(times_power(M, -power))) * (1 + 1e-12) * 2.0**power


def _root_norm(M: Tensor) -> float:
    # In a unit by a power of two, which rounds nothing: squares stay within the range of floats.
    M = M.detach().double()
    power = power_above(M)
    M = times_power(M, -power)
    M = M if M.shape[0] <= M.shape[1] else M.mT
    gram = M.new_empty(len(M), len(M))
    for i in range(0, len(M), _STRIP):  # M Mᵀ up to the diagonal, which mirrors the rest
        strip = slice(i, i + _STRIP)
        gram[strip, : i + _STRIP] = M[strip] @ M[: i + _STRIP].mT
        gram[:i, strip] = gram[strip, :i].mT
    return math.sqrt(top_eigenvalue(gram)) * 2.0**power


def _head(single: Attention) -> HeadWeights:
    """A head without its block of W_O."""
    tau = single.tau
    sizes = abs(tau) * _frobenius(single.q), _frobenius(single.k), _frobenius(single.v)
    # One factorisation of values and keys side by side gives the coordinates of both, and the triangles of each.
    basis, R = torch.linalg.qr(torch.cat([single.v, single.k]).mT)
    V, K = R[:, : single.value_width].mT, R[:, single.value_width :]
    R_K, R_Q = triangle(K), triangle(tau * single.q.mT)
    return HeadWeights(
        R_O=None,
        R_K=R_K,
        R_Q=R_Q,
        VK=single.v @ single.k.mT,
        V=V,
        K=K,
        KQ=tau * single.k @ single.q.mT,
        basis=basis,
        out=1.0,
        out_size=math.sqrt(single.value_width),
        query=spectral(R_Q),
        value=spectral(triangle(V.mT)),
        value_error=0.0,
        interaction=spectral(R_K @ R_Q.mT) + rounding_unit(single.q) * sizes[0] * sizes[1],
        query_bias=abs(tau) * _size(single.q_bias, R_K, single.k),
        key_bias=_size(single.k_bias, R_Q, single.q),
        value_bias=_frobenius(single.v_bias),
        sizes=sizes,
        biases=(abs(tau) * _frobenius(single.q_bias), _frobenius(single.k_bias), _frobenius(single.v_bias)),
    )


def _through(plain: HeadWeights, single: Attention, out: Tensor) -> HeadWeights:
    """The same head followed by its block of W_O; queries and keys stay what they are."""
    R_O = triangle(out)
    V, error = R_O @ plain.V, rounding_unit(out, single.v) * _frobenius(out) * plain.sizes[2]
    return replace(
        plain,
        R_O=R_O,
        VK=R_O @ plain.VK,
        V=V,
        out=spectral(R_O),
        out_size=_frobenius(out),
        value=spectral(triangle(V.mT)) + error,
        value_error=error,
        value_bias=_size(single.v_bias, R_O, out),
    )


def _size(vector: Tensor | None, through: Tensor, whole: Tensor) -> float:
    """‖through·vector‖, the rounding of the product included, and that of ``through`` as a triangle of ``whole``."""
    if vector is None:
        return 0.0
    return _frobenius(through @ vector) + rounding_unit(through, whole) * _frobenius(through) * _frobenius(vector)
