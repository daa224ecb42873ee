"""A layer of a model as the search sees it: its weights, its mask at n tokens, real activations, and where those may lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.norms import Normalisation
from lipscope.models.model import Model


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
    at = handle.record(input_ids=ids)[layer]
    attention = at.weights().for_input(0).to(torch.float64)
    if head is not None:
        handle.check_heads(layer, [head])
        attention = attention.head(head)
    return LayerAtText(attention, at.tokens()[0].detach().double(), at.norm)
