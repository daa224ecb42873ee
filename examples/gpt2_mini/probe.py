"""What is logged while training: loss on held-out windows, and σ of every layer on fixed held-out tokens.

σ is measured on a copy of the model in eval mode and with the random state put back, so that training goes on exactly as
if nothing had been measured.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import lipscope
from lipscope.models.text import Chunker

PROBE_LENGTH, PROBE_INPUTS, PROBE_SEED = 64, 4, 0
KEPT = ("layer", "scope", "mask", "n", "input", "lower", "estimate", "upper", "upper_kind", "entropy", "max_logit",
        "sink_mass")  # fmt: skip


def probe_tokens(text: str, tokenizer: Any) -> Tensor:
    """The fixed inputs on which σ is followed, (inputs, n)."""
    return torch.tensor(Chunker([text], tokenizer).chunks([PROBE_LENGTH], PROBE_INPUTS, PROBE_SEED)[PROBE_LENGTH])


def measure_sigma(model: nn.Module, ids: Tensor) -> list[dict[str, Any]]:
    """σ of every layer on every input, scope attention, as intervals."""
    with torch.random.fork_rng(devices=[]):
        copied = copy.deepcopy(model).eval()
        rows = lipscope.load(copied).record(input_ids=ids).rows()
    return [{name: row[name] for name in KEPT} for row in rows]


def windows(ids: Tensor, length: int, most: int | None = None) -> Tensor:
    """Disjoint windows of length + 1 tokens (each token is a target once), ``most`` of them spread over the text."""
    count = (len(ids) - 1) // length
    chosen = range(count) if most is None or count <= most else [k * count // most for k in range(most)]
    return torch.stack([ids[k * length : k * length + length + 1] for k in chosen])


@torch.no_grad()
def total_loss(model: nn.Module, rows: Tensor, batch: int = 16) -> tuple[float, int]:
    """Sum of −ln p over the targets of the windows in nats, and their number."""
    training = model.training
    model.eval()
    nats = 0.0
    for part in rows.split(batch):
        logits = model(input_ids=part[:, :-1], use_cache=False).logits
        nats += float(nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    model.train(training)
    return nats, rows.shape[0] * (rows.shape[1] - 1)


def held_out_loss(model: nn.Module, rows: Tensor) -> float:
    """Mean loss in nats per token."""
    nats, tokens = total_loss(model, rows)
    return nats / tokens
