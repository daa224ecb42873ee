"""A layer of a model as the search sees it: its weights, its mask at n tokens, real activations, and where those may lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.attention.layer import Attention
from lipscope.attention.masks import as_mask
from lipscope.attention.norms import LayerNorm, Normalisation, RMSNorm
from lipscope.models.anatomy import Layer, first_tensor
from lipscope.models.capture import Recording, replaying
from lipscope.models.handle import Model
from lipscope.models.scopes import scope_tokens


@dataclass(frozen=True, eq=False)
class LayerAtText:
    """One layer on one text.

    Attributes:
        attention: the layer (or one of its heads, before W_O), float64, under its mask for this many tokens.
        activations: the tokens that it sees, (n, d), float64.
        norm: the normalisation they come from, or None.
    """

    attention: Attention
    activations: Tensor
    norm: Normalisation | None

    @property
    def radius(self) -> float:
        """Largest norm of a token of this text."""
        return float(self.activations.norm(dim=-1).max())


def layer_at_text(handle: Model, layer: int, ids: Tensor, head: int | None = None) -> LayerAtText:
    """A layer's attention at the tokens ``ids`` (n,).

    Raises:
        ValueError: when the layer's projections are not one affine map for all tokens.
    """
    where = handle.layer(layer)
    recording = handle.record(handle.token_inputs(input_ids=ids))
    attention = handle.attention(layer, recording)
    if attention is None:
        raise ValueError(
            f"layer {where.index} of {handle.name} does not project all tokens by the same affine map (rotary embeddings, "
            "QK-norm, or code of its own), so there are no weights to construct inputs from; use method tokens"
        )
    attention = _with_plain_mask(attention.for_input(0)).to(torch.float64)
    if head is not None:
        handle.check_heads(layer, [head])
        attention = attention.head(head)
    X = scope_tokens(where, recording, "attention")[0].detach().double()
    return LayerAtText(attention, X, _normalisation(handle, where, recording))


def _with_plain_mask(attention: Attention) -> Attention:
    """The same mask under its name, where it has one: closed forms know full and causal ones."""
    mask = as_mask(attention.mask)
    n = getattr(getattr(mask, "tensor", None), "shape", (0,))[-1]
    if n == 0 or (mask.additive(n) is not None and bool(mask.additive(n).any())):  # type: ignore[union-attr]
        return attention
    seen = mask.allowed(n)
    everything = torch.ones(n, n, dtype=torch.bool, device=attention.device)
    if seen is None or bool(seen.all()):
        return attention.with_mask(None)
    return attention.with_mask("causal") if bool((seen == everything.tril()).all()) else attention


def _normalisation(handle: Model, where: Layer, recording: Recording) -> Normalisation | None:
    """The module whose output is what attention sees, when it is a LayerNorm or RMSNorm; found by watching one pass."""
    tokens = recording.hosts[where.index].tokens
    sources: list[tuple[nn.Module, Tensor]] = []

    def leaving(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        result = first_tensor(output)
        if result is not None and result.shape == tokens.shape and torch.equal(result, tokens) and args:
            sources.append((module, args[0].detach()))

    parts = [part for part in handle.model.modules() if "norm" in type(part).__name__.lower()]
    hooks = [part.register_forward_hook(leaving) for part in parts]
    try:
        with replaying(handle.model, recording.documents), torch.no_grad():
            recording.run()
    finally:
        for hook in hooks:
            hook.remove()
    for module, entered in sources:
        for norm in _readings(module):
            # Believed only when it reproduces the module.
            if norm.weight.shape == tokens.shape[-1:] and torch.allclose(norm(entered), tokens, rtol=1e-4, atol=1e-5):
                return norm
    return None


def _readings(module: nn.Module) -> list[Normalisation]:
    """What a normalisation's tensors may mean; Gemma stores g − 1."""
    if isinstance(module, nn.LayerNorm):
        return [LayerNorm.from_torch(module)]
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1:
        return []
    found = (getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon"))
    eps = next((float(value) for value in found if isinstance(value, (int, float))), 0.0)
    return [
        RMSNorm(weight.detach().clone(), eps),
        RMSNorm(1 + weight.detach(), eps),
        LayerNorm(weight.detach().clone(), None, eps),
    ]
