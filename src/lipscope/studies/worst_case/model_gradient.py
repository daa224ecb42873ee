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

from lipscope.models.anatomy import tokens_of
from lipscope.models.capture import ReachedError, replaying
from lipscope.models.model import Model
from lipscope.models.recorded import RecordedLayer
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Auto


@dataclass(frozen=True, eq=False)
class EmbeddingGradient:
    """σ of a layer at recorded tokens and its gradients."""

    sigma: SpectralNorm  # σ, one item per input
    at_layer: Tensor  # ∂σ/∂x at the tokens that attention sees, (B, n, d)
    at_embeddings: Tensor  # ∂σ/∂e at the output of the embedding table, (B, n, d_e)
    embeddings: Tensor  # that output


def embedding_gradient(layer: RecordedLayer, head: int | None = None) -> EmbeddingGradient:
    """∂σ/∂e of a layer (scope ``attention``), or of one head before W_O, at a recorded forward pass on token ids.

    Refuses a model without embedding table, and a layer that does more between its core and W_O than a linear map.
    """
    scope, heads = ("attention", None) if head is None else ("head", [head])
    sigma = layer.sigma(scope, heads=heads, solver=Auto(vectors=True))
    assert sigma.left is not None
    assert sigma.right is not None
    B, n = layer.tokens().shape[:2]
    left = sigma.left.reshape(B, -1, n, sigma.left.shape[-1])[:, 0]
    right = sigma.right.reshape(B, -1, n, sigma.right.shape[-1])[:, 0]
    at_layer = _hessian_product(layer, left, right, sigma.estimate.reshape(B), head)
    x, e = _from_embeddings(layer)
    (at_embeddings,) = torch.autograd.grad(x, e, at_layer.to(x))
    return EmbeddingGradient(sigma, at_layer, at_embeddings, e.detach())


def _hessian_product(layer: RecordedLayer, left: Tensor, right: Tensor, values: Tensor, head: int | None) -> Tensor:
    with torch.enable_grad():
        x = layer.tokens().detach().clone().requires_grad_()
        seam, cotangent = layer.layer.through_seam, left
        outputs = layer.joined_heads(x) if seam else layer.map("attention" if head is None else "head")(x)
        if head is not None:
            parts = torch.zeros_like(outputs).reshape(*outputs.shape[:2], layer.heads, -1)
            parts[:, :, head] = left.to(parts)
            cotangent = parts.flatten(2)
        elif seam:  # u as the heads see it, through W_Oᵀ
            with replaying(layer.model.model):
                joined = torch.zeros_like(outputs).requires_grad_()
                (cotangent,) = torch.autograd.grad(layer.layer.out(joined), joined, left.to(outputs))
        (slope,) = torch.autograd.grad((outputs * cotangent).sum(), x, create_graph=True)
        along = (slope * right).sum((1, 2))
        (gradient,) = torch.autograd.grad(along.sum(), x)
    # ⟨u, Jv⟩ = σ: holds only if what was differentiated is the map that was measured.
    if bool(((along.detach().double() - values).abs() > 1e-3 * values).any()):
        raise NotImplementedError(
            f"layer {layer.index} ({layer.layer.name}) does more than a linear map between attention and its output "
            "projection, so the gradient of its σ is not available"
        )
    return gradient


def embedding_table(handle: Model) -> nn.Module:
    """The module that turns token ids into vectors."""
    try:
        table = handle.model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        table = None
    if not isinstance(table, nn.Module) or not isinstance(getattr(table, "weight", None), Tensor):
        raise ValueError(f"{handle.name} has no token embeddings, so there are no tokens to substitute")
    return table


def _from_embeddings(layer: RecordedLayer) -> tuple[Tensor, Tensor]:
    """The tokens that the layer's attention sees, as a function of the embeddings: both tensors, in one graph."""
    embeddings: list[Tensor] = []
    calls, model = count(), layer.model
    reached: Tensor | None = None

    def embedded(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().clone().requires_grad_())
        return embeddings[-1]

    def entering(module: nn.Module, args: Any, kwargs: Any) -> None:
        if next(calls) == layer.layer.occurrence:
            raise ReachedError(tokens_of(args, kwargs))

    # The table may sit in several modules that share its weights; the one that is called counts.
    weight = embedding_table(model).weight
    tables = [part for part in model.model.modules() if isinstance(part, nn.Embedding) and part.weight is weight]
    hooks = [part.register_forward_hook(embedded) for part in tables]
    hooks.append(layer.layer.host.register_forward_pre_hook(entering, with_kwargs=True))
    try:
        with replaying(model.model, layer.recorded.documents), torch.enable_grad():
            layer.recorded.run()
    except ReachedError as stopped:
        reached = stopped.found
    finally:
        for hook in hooks:
            hook.remove()
    if len(embeddings) != 1 or reached is None:
        raise ValueError(f"{model.name} does not embed its tokens once: substitutions cannot be scored")
    return reached, embeddings[0]
