"""BERT with a real causal mask: the same weights, and no token sees its future.

``transformers`` calls that a BERT decoder. The loader is named in plans, so that a worker finds it by itself.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.initialization import no_init_weights

from lipscope.models.checkpoints import Loaded
from lipscope.models.load import load_named
from lipscope.models.model import Model

LOADER = "lipscope.studies.paper.causal_bert:causal_bert"
SUFFIX = "-causal"


def causal_bert(name: str, dtype: torch.dtype | None = None) -> Model:
    """A model of BERT's kind under a causal mask.

    Args:
        name: what ``lipscope.load`` takes; its configuration must know ``is_decoder``.
        dtype: float32 or float64; that of the weights by default.

    Returns:
        The model. Loading runs the self-tests, one of which asks that nothing leaks from later tokens, exactly.

    Raises:
        ValueError: when the model has no causal form.
    """
    found = masked(load_named(name))
    return Model(found.model, found.tokenizer, name=found.name, notes=found.notes, dtype=dtype)


def masked(found: Loaded) -> Loaded:
    """The same weights in a model that masks the future."""
    config: Any = getattr(found.model, "config", None)
    if getattr(config, "is_decoder", None) is not False:
        raise ValueError(f"{found.name} is no bidirectional model of BERT's kind, so it has no causal form")
    causal = copy.deepcopy(config)
    causal.is_decoder = True
    # No weights are drawn: they would be replaced at once. What draws all the same leaves the generator as it was.
    with torch.random.fork_rng(devices=[]), no_init_weights():
        # In the dtype of the weights before they are copied: half of their digits would be lost otherwise.
        model = type(found.model)(causal).to(next(found.model.parameters()).dtype)
    model.load_state_dict(found.model.state_dict())
    notes = (*found.notes, "a causal mask that the model was not trained with")
    return Loaded(model.eval(), found.tokenizer, found.name + SUFFIX, notes)
