"""What rescaling costs: the language-model loss on the calibration text, where the model has a head for it.

Causal models: mean −ln p(next token) in nats. Masked models: the same at 15 % of the tokens, drawn from a seed and hidden.
A model without a head has no loss; the relative change of its last hidden state stands in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_CAUSAL, _MASKED = ("LMHeadModel", "ForCausalLM"), ("ForMaskedLM",)
_HIDDEN_SHARE = 0.15


def loss_kind(model: nn.Module, tokenizer: Any) -> str | None:
    """``causal``, ``masked``, or None when the model has no language-model head that can be used."""
    name = type(model).__name__
    if name.endswith(_CAUSAL):
        return "causal"
    if name.endswith(_MASKED) and getattr(tokenizer, "mask_token_id", None) is not None:
        return "masked"
    return None


@torch.no_grad()
def language_loss(model: nn.Module, ids: Tensor, kind: str, tokenizer: Any = None, seed: int = 0) -> float:
    """Mean loss in nats per predicted token on inputs (B, n)."""
    if kind == "causal":
        logits = model(input_ids=ids, use_cache=False).logits
        return float(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()))
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.rand(ids.shape, generator=generator) < _HIDDEN_SHARE
    special = torch.isin(ids.cpu(), torch.tensor(sorted(tokenizer.all_special_ids)))
    hidden &= ~special
    if not bool(hidden.any()):
        hidden[:, ids.shape[1] // 2] = True
    hidden = hidden.to(ids.device)
    logits = model(input_ids=ids.masked_fill(hidden, tokenizer.mask_token_id)).logits
    return float(nn.functional.cross_entropy(logits[hidden].float(), ids[hidden]))
