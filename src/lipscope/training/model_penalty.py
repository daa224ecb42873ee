"""Penalties over the attention layers of a model, inside a training loop.

One pass in eval mode records the tokens that every attention layer sees. Then each layer is replayed at those tokens with
its parameters in the graph: through the seam as queries, keys and values, from which the core is computed by operations with
second derivatives; otherwise as the model's own eager attention. Tokens count as data, so a layer answers for its own
weights only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from lipscope.models.model import Model
from lipscope.models.recorded import RecordedLayer
from lipscope.models.seam import CoreCall
from lipscope.spectral.golub_kahan import GolubKahan
from lipscope.training.attach import undisturbed
from lipscope.training.penalties import SOLVER, jasmin, max_logit, sigma_of_map
from lipscope.training.rescale.factors import raw_scores

Kind: TypeAlias = Literal["spectral", "jasmin", "max-logit", "weights"]


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
                _core(layer, layer.tokens().detach())
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
        call, padding = _core(layer, x), layer.recorded.real
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
                projected: Tensor = getattr(_core(layer, t.expand(x.shape[0], -1, -1).contiguous()), name)
                return projected[:1].transpose(1, 2).flatten(2)

            return sigma_of_map(function, x[:1], self.solver).mean()

        return part("q") + part("k") + part("v")


def _core(layer: RecordedLayer, x: Tensor) -> CoreCall:
    """What the attention core receives at tokens x, with the graph to the layer's parameters."""
    return layer.core(x, graph=True, frozen=False)


def _attention(layer: RecordedLayer, x: Tensor) -> Tensor:
    """The attention map of the layer with its parameters in the graph, (B, n, d)."""
    output: Tensor = layer.layer.out(layer.joined_heads(x, frozen=False).to(x))
    output, real = output.reshape(*x.shape[:2], -1), layer.recorded.real
    return output if real is None else output * real[..., None].to(output)
