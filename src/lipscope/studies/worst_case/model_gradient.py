"""∂σ/∂e for a layer of a model: how σ of attention in layer L answers to the token embeddings, through all layers before it.

With the top singular pair (u, v) of the layer's Jacobian J and s(x) = ⟨u, attention(x)⟩ at the tokens x that the layer sees,

    ∂σ/∂x = ∂⟨u, J(x)v⟩/∂x = (Hessian of s at x)·v        ∂σ/∂e = (∂x/∂e)ᵀ ∂σ/∂x

The Hessian product comes from differentiating twice through a plain-torch attention core fed with the model's own
queries, keys and values (so rotary embeddings and QK-norm count); the pull-back to the embeddings is one backward pass
through the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.attention.core import Linearisation, ungroup_queries
from lipscope.models.anatomy import Layer, tokens_of
from lipscope.models.capture import replaying
from lipscope.models.model import Model
from lipscope.models.recorded import Recorded
from lipscope.models.scopes import scope_map, scope_tokens
from lipscope.models.seam import CoreCall, observing_core
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Auto


@dataclass(frozen=True, eq=False)
class EmbeddingGradient:
    """σ of a layer at recorded tokens and its gradients.

    Attributes:
        sigma: σ, one item per input.
        at_layer: ∂σ/∂x at the tokens that attention sees, (B, n, d).
        at_embeddings: ∂σ/∂e at the output of the embedding table, (B, n, d_e).
        embeddings: that output.
    """

    sigma: SpectralNorm
    at_layer: Tensor
    at_embeddings: Tensor
    embeddings: Tensor


class _ReachedError(Exception):
    """Stops a forward pass whose rest is not needed."""


def embedding_gradient(handle: Model, recording: Recorded, layer: int, head: int | None = None) -> EmbeddingGradient:
    """∂σ/∂e of a layer (scope ``attention``), or of one head before W_O, at recorded inputs.

    Args:
        handle: the model.
        recording: a recorded forward pass on token ids.
        layer: layer index.
        head: head index, or None for the whole layer.

    Raises:
        ValueError: when the model has no embedding table.
        NotImplementedError: when the layer does more between its core and W_O than a linear map.
    """
    where = handle.layer(layer)
    scope, heads = ("attention", None) if head is None else ("head", [head])
    sigma = recording[layer].sigma(scope, heads=heads, solver=Auto(vectors=True))
    assert sigma.left is not None
    assert sigma.right is not None
    B, n = recording.hosts[where.index].tokens.shape[:2]
    left = sigma.left.reshape(B, -1, n, sigma.left.shape[-1])[:, 0]
    right = sigma.right.reshape(B, -1, n, sigma.right.shape[-1])[:, 0]
    values = sigma.estimate.reshape(B)
    at_layer = _hessian_product(handle, where, recording, left, right, values, head)
    x, e = _from_embeddings(handle, where, recording)
    (at_embeddings,) = torch.autograd.grad(x, e, at_layer.to(x))
    return EmbeddingGradient(sigma, at_layer, at_embeddings, e.detach())


def _hessian_product(
    handle: Model, where: Layer, recording: Recorded, left: Tensor, right: Tensor, values: Tensor, head: int | None
) -> Tensor:
    with torch.enable_grad():
        x = scope_tokens(where, recording, "attention").detach().clone().requires_grad_()
        if where.through_seam:
            outputs = _core_outputs(handle, where, recording, x)
            cotangent = _before_projection(handle, where, outputs, left, head)
        else:
            scope = "attention" if head is None else "head"
            outputs = scope_map(handle.model, where, recording, scope, handle.layers)(x)
            cotangent = left if head is None else _on_head(outputs, left, head, where.heads)
        (slope,) = torch.autograd.grad((outputs * cotangent).sum(), x, create_graph=True)
        along = (slope * right).sum((1, 2))
        (gradient,) = torch.autograd.grad(along.sum(), x)
    # ⟨u, Jv⟩ = σ: holds only if what was differentiated is the map that was measured.
    if bool(((along.detach().double() - values).abs() > 1e-3 * values).any()):
        raise NotImplementedError(
            f"layer {where.index} ({where.name}) does more than a linear map between attention and its output projection, "
            "so the gradient of its σ is not available"
        )
    return gradient


def _core_outputs(handle: Model, where: Layer, recording: Recorded, x: Tensor) -> Tensor:
    """Heads side by side (B, n, H·dv), by operations that can be differentiated twice."""
    seen: list[CoreCall] = []

    def observe(call: CoreCall) -> None:
        seen.append(call)
        raise _ReachedError

    with replaying(handle.model, recording.documents), observing_core(observe):
        try:
            recording.hosts[where.index](x)
        except _ReachedError:
            call = seen[0]
        else:
            raise RuntimeError(f"the replay of layer {where.index} never reached its attention core")
    core = Linearisation.at(call.q, call.k, call.v, call.rule)
    outputs = ungroup_queries(core.o, call.q.shape[1]).transpose(1, 2).flatten(2)
    return outputs if recording.real is None else outputs * recording.real[..., None].to(outputs)


def _before_projection(handle: Model, where: Layer, outputs: Tensor, left: Tensor, head: int | None) -> Tensor:
    """The output direction u as the heads see it: through W_Oᵀ, or on one head alone."""
    if head is not None:
        return _on_head(outputs, left, head, where.heads)
    with replaying(handle.model):
        joined = torch.zeros_like(outputs).requires_grad_()
        (cotangent,) = torch.autograd.grad(where.out(joined), joined, left.to(outputs))
    return cotangent


def _on_head(outputs: Tensor, left: Tensor, head: int, heads: int) -> Tensor:
    parts = torch.zeros_like(outputs).reshape(*outputs.shape[:2], heads, -1)
    parts[:, :, head] = left.to(parts)
    return parts.flatten(2)


def embedding_table(handle: Model) -> nn.Module:
    """The module that turns token ids into vectors.

    Raises:
        ValueError: when the model has none.
    """
    try:
        table = handle.model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        table = None
    if not isinstance(table, nn.Module) or not isinstance(getattr(table, "weight", None), Tensor):
        raise ValueError(f"{handle.name} has no token embeddings, so there are no tokens to substitute")
    return table


def _from_embeddings(handle: Model, where: Layer, recording: Recorded) -> tuple[Tensor, Tensor]:
    """The tokens that the layer's attention sees, as a function of the embeddings: both tensors, in one graph."""
    embeddings: list[Tensor] = []
    reached: list[Tensor] = []
    calls = count()

    def embedded(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().clone().requires_grad_())
        return embeddings[-1]

    def entering(module: nn.Module, args: Any, kwargs: Any) -> None:
        if next(calls) == where.occurrence:
            tokens = tokens_of(args, kwargs)
            assert tokens is not None
            reached.append(tokens)
            raise _ReachedError

    # The table may sit in several modules that share its weights; the one that is called counts.
    weight = embedding_table(handle).weight
    tables = [part for part in handle.model.modules() if isinstance(part, nn.Embedding) and part.weight is weight]
    hooks = [part.register_forward_hook(embedded) for part in tables]
    hooks.append(where.host.register_forward_pre_hook(entering, with_kwargs=True))
    try:
        with replaying(handle.model, recording.documents), torch.enable_grad():
            recording.run()
    except _ReachedError:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    if len(embeddings) != 1 or not reached:
        raise ValueError(f"{handle.name} does not embed its tokens once: substitutions cannot be scored")
    return reached[0], embeddings[0]
