"""What training a small GPT-2 takes in both examples: the model from its seed, the loss, the learning rate of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel


def seeded_gpt2(settings: Any, **options: Any) -> GPT2LMHeadModel:
    """GPT-2 without dropout and with its own initialisation, from the seed.

    Args:
        settings: with ``layers``, ``width``, ``heads``, ``positions``, ``vocabulary`` and ``seed``.
        **options: more of ``GPT2Config``.
    """
    config = GPT2Config(
        vocab_size=settings.vocabulary, n_positions=settings.positions, n_embd=settings.width, n_layer=settings.layers,
        n_head=settings.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, **options,
    )  # fmt: skip
    torch.manual_seed(settings.seed)
    return GPT2LMHeadModel(config)


def next_token_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean −ln p(target) over a batch, in nats per token."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next step, for all parameters."""
    for group in optimiser.param_groups:
        group["lr"] = rate
