"""Penalties on one layer, or over those of a model, differentiable in the weights: σ, and cheaper parts of its bounds.

``spectral_penalty`` finds the top singular pair (u, v) of J(X; W) first and then holds it fixed: where σ is simple,
dσ/dW = d⟨u, J v⟩/dW, and a pair that is only nearly converged gives a lower bound of σ and its gradient. For an
``Attention`` the bilinear form is a plain torch expression of W_Q, W_K, W_V, W_O and the biases,

    ⟨u, J v⟩,   J v = W_O( T V + P dV − rowsum(T)·O ),   T = W∘(dQ Kᵀ + Q dKᵀ)

The penalties on attention rows and logits are

    g_k(p) = p₍ₖ₎(1 − p₍ₖ₎ + p₍ₖ₊₁₎)        JaSMin_0 = max_i log g₁(P_i)        JaSMin_k = max_i log(g₁(P_i)/g_k(P_i))

and (max |s_ij| − limit)². g₁ bounds the norm of the softmax Jacobian diag(p) − ppᵀ; Yudin et al. 2025 (arXiv 2507.07814)
minimise it. Everything is computed in full precision, inside autocast too, and modules are back in their mode afterwards.

Of a model, one pass in eval mode records the tokens that every attention layer sees. Then each layer is replayed at those
tokens with its parameters in the graph: through the seam as queries, keys and values, from which the core is computed by
operations with second derivatives; otherwise as the model's own eager attention. Tokens count as data, so a layer answers
for its own weights only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from lipscope.attention.core import scores_and_weights
from lipscope.attention.layer import Attention
from lipscope.attention.operators import AttentionOperator
from lipscope.attention.variants import Variant
from lipscope.measure.sigma import check_tokens
from lipscope.models.model import Model
from lipscope.models.recorded import RecordedLayer
from lipscope.spectral.autodiff import AutodiffOperator, TensorMap
from lipscope.spectral.golub_kahan import GolubKahan
from lipscope.spectral.operator import Operator
from lipscope.training.attach import full_precision, undisturbed
from lipscope.training.rescale import raw_scores

# Accurate enough for a direction of descent, at a few products per step.
SOLVER = GolubKahan(rtol=1e-3, interval=None, max_steps=100, vectors=True)
Kind: TypeAlias = Literal["spectral", "jasmin", "max-logit", "weights"]


def spectral_penalty(attention: Attention | Variant | TensorMap, X: Tensor, *, solver: GolubKahan | None = None) -> Tensor:
    """σ(X) = ‖J(X)‖₂ as a scalar with a gradient in the weights, the mean over inputs for a batch.

    The tokens count as data: no gradient flows into X. Inside autocast, too, everything is computed in full precision.

    Args:
        attention: an ``Attention`` or ``Variant`` whose tensors require gradients, or any torch callable with parameters
            inside (an ``nn.Module`` that maps tokens to tokens). Modules run in eval mode for the moment, so that dropout
            does not blur σ. An ``Attention`` may be the same object at every step although its tensors change.
        X: tokens (n, d) or (B, n, d); a module needs a batch dimension when its forward does.
        solver: how the singular pair is found; fewer steps give a lower bound of σ.

    Returns:
        A scalar.

    Raises:
        ValueError: when X cannot be measured, or nothing inside requires gradients.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64, requires_grad=True)
        >>> layer = lipscope.Attention(q=torch.zeros(2, 2).double(), k=W, v=W)          # averaging: σ = ‖W_V‖
        >>> penalty = lipscope.training.spectral_penalty(layer, torch.randn(5, 2).double())
        >>> penalty.backward()
        >>> round(penalty.item(), 6), round(float(W.grad.norm()), 6)
        (1.0, 1.0)
    """
    batched = check_tokens(X)
    solver = dataclasses.replace(solver or SOLVER, vectors=True)
    with full_precision(X.device.type):
        if isinstance(attention, Attention):
            if batched.shape[-1] != attention.width:
                raise ValueError(f"X has tokens of width {batched.shape[-1]}, but the layer takes width {attention.width}")
            # A fresh description: what an old one has cached may belong to earlier values of its tensors.
            layer = dataclasses.replace(attention)
            batched = batched.to(layer.q)
            values = layer.bilinear(batched, *top_pair(AttentionOperator.at(layer, batched), solver))
        else:
            with undisturbed(attention) if isinstance(attention, nn.Module) else nullcontext():
                values = sigma_of_map(attention, batched, solver, batched=X.ndim == 3)
    if not values.requires_grad:
        raise ValueError("nothing in attention requires gradients, so there is nothing to regularise: set requires_grad")
    return values.mean()


def jasmin_penalty(attention: Attention, X: Tensor, k: int = 0) -> Tensor:
    """JaSMin of a layer at tokens X (n, d) or (B, n, d), with a gradient in W_Q, W_K and their biases; see ``jasmin``."""
    with full_precision(attention.device.type):
        _, P, _ = scores_and_weights(attention, check_tokens(X).to(attention.q))
        return jasmin(P, k)


def max_logit_penalty(attention: Attention, X: Tensor, *, limit: float = 0.0) -> Tensor:
    """Squared excess of the largest |logit| over ``limit`` at tokens X, mean over heads and inputs; see ``max_logit``."""
    with full_precision(attention.device.type):
        raw, _, visible = scores_and_weights(attention, check_tokens(X).to(attention.q))
        return max_logit(raw, visible, limit=limit)


def weight_penalty(attention: Attention) -> Tensor:
    """‖W_Q^h‖ + ‖W_K^h‖ + ‖W_V^h‖, mean over heads: the norms that every bound on a ball is made of.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, requires_grad=True)
        >>> weight_penalty(lipscope.Attention(W, 2 * W, 3 * W)).item()
        6.0
    """
    groups = ((attention.q, attention.heads), (attention.k, attention.kv_heads), (attention.v, attention.kv_heads))
    with full_precision(attention.device.type):
        norms = [torch.linalg.matrix_norm(matrix.unflatten(0, (heads, -1)), 2).mean() for matrix, heads in groups]
    return torch.stack(norms).sum()


def jasmin(P: Tensor, k: int = 0) -> Tensor:
    """JaSMin of attention weights P (…, n, n): mean over heads and inputs of max_i log g₁(P_i), or log(g₁/g_k) for k > 0.

    Rows in which g is 0 have a vanishing softmax Jacobian (they see one key only) and are left out, as are rows that see
    fewer than k keys.

    Example:
        >>> import torch
        >>> jasmin(torch.tensor([[0.5, 0.5], [0.9, 0.1]]))          # max(log 0.5, log 0.18)
        tensor(-0.6931)
    """
    if k < 0 or k == 1:
        raise ValueError(f"k must be 0 or at least 2 (g₁/g₁ is constant), got {k}")
    floor = torch.finfo(P.dtype).tiny
    first = g_k(P)
    counts = first > floor
    value = first.clamp_min(floor).log()
    if k:
        other = g_k(P, k)
        counts = counts & (other > floor)
        value = value - other.clamp_min(floor).log()
    worst = value.masked_fill(~counts, float("-inf")).amax(-1)
    known = counts.any(-1)
    if not bool(known.any()):
        return P.new_zeros(())
    return worst[known].mean()


def g_k(p: Tensor, k: int = 1) -> Tensor:
    """p₍ₖ₎(1 − p₍ₖ₎ + p₍ₖ₊₁₎) for rows of probabilities (…, n); values beyond the n-th count as 0.

    Example:
        >>> import torch
        >>> g_k(torch.tensor([0.5, 0.3, 0.2]), 2)
        tensor(0.2700)
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    largest = p.topk(min(k + 1, p.shape[-1]), dim=-1).values
    largest = torch.nn.functional.pad(largest, (0, k + 1 - largest.shape[-1]))
    here, following = largest[..., k - 1], largest[..., k]
    return here * (1 - here + following)


def max_logit(scores: Tensor, visible: Tensor | None = None, *, limit: float = 0.0) -> Tensor:
    """Mean over heads and inputs of max(0, max_ij |s_ij| − limit)², over visible pairs.

    ``scores`` (B, H, n, n) carry their scale, and no mask; ``visible``, broadcastable, is None for everywhere.
    """
    if limit < 0:
        raise ValueError(f"limit must not be negative, got {limit:g}")
    sizes = scores.abs()
    if visible is not None:
        sizes = sizes.masked_fill(~visible, 0.0)
    return (sizes.amax((-1, -2)) - limit).clamp_min(0).square().mean()


def sigma_of_map(function: TensorMap, X: Tensor, solver: GolubKahan, *, batched: bool = True) -> Tensor:
    """σ of every input of a map at X (B, …), with a gradient in whatever parameters the map uses."""
    operator = AutodiffOperator(function, X, batched=batched, check=False)
    return operator.bilinear(*top_pair(operator, solver))


def top_pair(operator: Operator, solver: GolubKahan) -> tuple[Tensor, Tensor]:
    """Left and right top singular vectors, shaped as outputs and inputs, one per item."""
    M, N = operator.shape
    if min(M, N) <= 16:
        # So small that the matrices themselves are cheapest.
        U, _, Vh = torch.linalg.svd(operator.to_dense(), full_matrices=False)
        left, right = U[..., 0], Vh[..., 0, :]
    else:
        output = solver.solve(operator)
        assert output.left is not None
        assert output.right is not None
        left, right = output.left[:, 0], output.right[:, 0]
    return left.reshape(-1, *operator.output_shape), right.reshape(-1, *operator.input_shape)


class ModelPenalty:
    """A penalty over the attention layers of a model, differentiable in its weights.

    ``penalty(input_ids=ids)`` returns a scalar to be added to the loss. A few short inputs are enough: cost grows with
    inputs × n² × layers. It is computed in full precision,
    also inside autocast. Training mode, gradients in flight and the random state are left as they were.

    Args:
        model: a Hugging Face model in float32 or float64 whose attention goes through the ``transformers`` interface.
        kind: ``"spectral"`` (σ of scope attention), ``"jasmin"``, ``"max-logit"``, or ``"weights"`` (τ‖W_Q‖ + ‖W_K‖ +
            ‖W_V‖, as norms of the maps from tokens to scaled queries, keys and values).
        layers: layer indices, all by default.
        k: for ``"jasmin"``, see ``jasmin``.
        limit: for ``"max-logit"``, see ``max_logit``.
        solver: for ``"spectral"`` and ``"weights"``; fewer ``max_steps`` are cheaper and give a lower bound of σ.

    Attributes:
        values: the penalty of every layer at the last call, as plain numbers.

    Raises:
        ValueError: when the kind is unknown, the model is in half precision, keeps its own attention or has trained
            position biases or sinks (T5, gpt-oss), or none of its parameters requires gradients.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=2, n_head=2))
        >>> penalty = ModelPenalty(model, "spectral")
        >>> ids = torch.arange(6)[None]
        >>> loss = model(input_ids=ids, labels=ids).loss + 0.1 * penalty(input_ids=ids)
        >>> loss.backward()
        >>> len(penalty.values), model.training
        (2, True)
    """

    def __init__(
        self,
        model: nn.Module,
        kind: Kind = "spectral",
        *,
        layers: Sequence[int] | None = None,
        k: int = 0,
        limit: float = 0.0,
        solver: GolubKahan | None = None,
    ) -> None:
        if kind not in get_args(Kind):
            raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("no parameter of model requires gradients, so there is nothing to regularise")
        narrow = next((p.dtype for p in model.parameters() if p.dtype not in (torch.float32, torch.float64)), None)
        if narrow is not None:
            raise ValueError(
                f"model has {narrow} parameters; a penalty needs float32 or float64 (autocast the loss instead)"
            )
        self.kind, self.k, self.limit = kind, k, limit
        self.solver = dataclasses.replace(solver or SOLVER, vectors=True)
        self.values: list[float] = []
        with undisturbed(model):
            self.handle = Model(model)
        missing = [layer.name for layer in self.handle.layers if not layer.through_seam]
        if missing:
            raise ValueError(f"{missing[0]} keeps its own attention: a penalty needs the transformers attention interface")
        self.layers = [layer.index for layer in (self.handle.layers if layers is None else map(self.handle.layer, layers))]
        with undisturbed(model):
            self._try_layers()

    def __call__(self, **inputs: Any) -> Tensor:
        """The mean penalty over layers at these inputs (``input_ids``, ``attention_mask``, … as for the model)."""
        with undisturbed(self.handle.model):
            with torch.no_grad():
                recorded = self.handle.record(inputs)
            values = torch.stack([self._layer(recorded[layer]) for layer in self.layers])
        self.values = values.detach().tolist()
        return values.mean()

    def _try_layers(self) -> None:
        """Refuse now what every call would refuse: cores whose score terms are parameters."""
        for layer in (self.handle.probe_recording[i] for i in self.layers):
            try:
                layer.core(layer.tokens().detach(), graph=True, frozen=False)
            except NotImplementedError as error:
                raise ValueError(
                    f"{layer.layer.name} has trained position biases or sinks in its scores, which a penalty cannot "
                    f"differentiate: {error}"
                ) from error

    def _layer(self, layer: RecordedLayer) -> Tensor:
        x = layer.tokens().detach()
        if self.kind == "spectral":
            return sigma_of_map(lambda t: _attention(layer, t), x, self.solver).mean()
        if self.kind == "weights":
            return self._weights(layer, x)
        call, padding = layer.core(x, graph=True, frozen=False), layer.recorded.real
        raw = raw_scores(call)
        # Padded tokens are no queries of anybody.
        real = None if padding is None else padding[:, None, :, None].to(raw.device)
        if self.kind == "max-logit":
            visible = call.rule.scores(raw.detach())[0] > -torch.inf
            return max_logit(raw, visible if real is None else visible & real, limit=self.limit)
        P = call.rule.probabilities(raw)[0]
        return jasmin(P if real is None else P.masked_fill(~real, 0.0), self.k)

    def _weights(self, layer: RecordedLayer, x: Tensor) -> Tensor:
        """Norms of x ↦ τq, k, v. All inputs share the same matrices, so one is as good as all of them."""

        def part(name: str) -> Tensor:
            def function(t: Tensor) -> Tensor:
                tokens = t.expand(x.shape[0], -1, -1).contiguous()
                projected: Tensor = getattr(layer.core(tokens, graph=True, frozen=False), name)
                return projected[:1].transpose(1, 2).flatten(2)

            return sigma_of_map(function, x[:1], self.solver).mean()

        return part("q") + part("k") + part("v")


def _attention(layer: RecordedLayer, x: Tensor) -> Tensor:
    """The attention map of the layer with its parameters in the graph, (B, n, d)."""
    output: Tensor = layer.layer.out(layer.joined_heads(x, frozen=False).to(x))
    output, real = output.reshape(*x.shape[:2], -1), layer.recorded.real
    return output if real is None else output * real[..., None].to(output)
