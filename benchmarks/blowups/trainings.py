"""Six trainings that blow up, each beside a healthy twin: small models of installed text, seeds fixed, one thread.

A case is one mistake; its twin is the same training without it: same weights, data and seed. Five are fine-tunes of a small
model that was trained for a moment on `alice` and goes on with `moby-dick`. Every window is 32 bytes of text and the same 32
bytes again: copying needs attention, so that a training whose attention breaks shows it in the loss.
``kind`` is the model: Llama, or Qwen3, which has QK-norm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lipscope.models.corpora import read_text

STEPS, BASE_STEPS, ROWS, TOKENS = 120, 280, 8, 64
RATE = 3e-3
SHAPE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 4, "max_position_embeddings": TOKENS, "tie_word_embeddings": False, "attention_bias": True,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}, "attn_implementation": "eager"}  # fmt: skip


@dataclass
class Training:
    """What one run needs beside its seed."""

    model: nn.Module
    rate: Callable[[int], float]  # learning rate of a step, counted from 1
    bytes: Tensor  # the text it reads
    held_out: Tensor  # (B, n), the end of the same text
    qk_rate: float = 1.0  # multiplies the learning rate of W_Q and W_K
    autocast: bool = False  # bfloat16 products
    batch: Callable[[int, Tensor], Tensor] = field(default=lambda step, ids: ids)  # what becomes of a batch

    def precision(self) -> Any:
        """The arithmetic of a forward pass."""
        return torch.autocast("cpu", torch.bfloat16) if self.autocast else nullcontext()

    def loss(self, ids: Tensor) -> Tensor:
        """Mean −ln p(next byte)."""
        with self.precision():
            found: Tensor = self.model(input_ids=ids, labels=ids).loss
        return found

    def optimizer(self) -> torch.optim.Optimizer:
        """AdamW without weight decay; W_Q and W_K in a group of their own where they are separate."""
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        qk = [p for name, p in named if "q_proj" in name or "k_proj" in name]
        rest = [p for name, p in named if not ("q_proj" in name or "k_proj" in name)]
        groups = [{"params": qk, "times": self.qk_rate}, {"params": rest, "times": 1.0}]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=RATE, weight_decay=0.0)

    def batches(self, seed: int, steps: int = STEPS) -> Iterator[tuple[int, float, Tensor]]:
        """(step, learning rate, batch) of every step."""
        generator = torch.Generator().manual_seed(seed)
        for step in range(1, steps + 1):
            yield step, self.rate(step), self.batch(step, windows(self.bytes, ROWS, generator))


@functools.cache
def text(name: str) -> Tensor:
    """A text as ASCII codes."""
    data = "\n\n".join(read_text(name)).encode("ascii", "replace")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def windows(ids: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Random pieces of a text, each of them twice, (rows, TOKENS)."""
    half = TOKENS // 2
    pieces = ids[torch.randint(len(ids) - half, (rows,), generator=generator)[:, None] + torch.arange(half)]
    return torch.cat([pieces, pieces], 1)


def fresh(kind: str, seed: int) -> nn.Module:
    """A model with random weights."""
    torch.manual_seed(seed)
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16))
    return LlamaForCausalLM(LlamaConfig(**SHAPE))


@functools.cache
def trained_weights(kind: str, seed: int) -> dict[str, Tensor]:
    training = _on("alice", fresh(kind, seed), _warm_up(RATE, 20))
    optimizer = training.optimizer()
    for _, rate, ids in training.batches(seed + 1000, BASE_STEPS):
        advance(training, optimizer, rate, ids)
    return {name: value.detach().clone() for name, value in training.model.state_dict().items()}


def trained(kind: str, seed: int) -> nn.Module:
    """A model after one healthy training on `alice`."""
    weights, model = trained_weights(kind, seed), fresh(kind, seed)
    model.load_state_dict(weights)
    return model


def advance(
    training: Training,
    optimizer: torch.optim.Optimizer,
    rate: float,
    ids: Tensor,
    penalty: Callable[[Tensor], Tensor] | None = None,
    skip: Callable[[float], bool] = lambda size: False,
) -> tuple[float, float, bool]:
    """One step: its loss, its gradient norm, and whether it was left out.

    Gradients are clipped at 1, as the Hugging Face Trainer does; a gradient that is not finite is left out.
    """
    loss = training.loss(ids)
    (loss if penalty is None else loss + penalty(ids)).backward()
    size = float(nn.utils.clip_grad_norm_([p for p in training.model.parameters() if p.grad is not None], 1.0))
    for group in optimizer.param_groups:
        group["lr"] = rate * group["times"]
    skipped = skip(size) or not math.isfinite(size)
    if not skipped:
        optimizer.step()
    optimizer.zero_grad()
    return loss.item(), size, skipped


def _on(name: str, model: nn.Module, rate: Callable[[int], float], **options: Any) -> Training:
    ids = text(name)
    end = windows(ids[-20_000:], 8, torch.Generator().manual_seed(0))
    return Training(model, rate, ids[:-20_000], end, **options)


def _warm_up(peak: float, steps: int = 60) -> Callable[[int], float]:
    return lambda step: peak * min(1.0, step / steps)


def learning_rate(seed: int, bad: bool, kind: str = "llama") -> Training:
    """A learning rate that rises from 1e-3 to 0.2; the twin's warm-up ends at 3e-3."""
    ramp = _warm_up(RATE) if not bad else lambda step: 1e-3 * 200 ** (step / STEPS)
    return _on("moby-dick", trained(kind, seed), ramp)


def qk_growth(seed: int, bad: bool, kind: str = "llama") -> Training:
    """W_Q and W_K learn 100 times faster than the rest; the twin does too, but has QK-norm."""
    return _on("moby-dick", trained(kind if bad else "qwen3", seed), _warm_up(RATE), qk_rate=100.0)


def bf16_logits(seed: int, bad: bool, kind: str = "llama") -> Training:
    """bfloat16 products; a part that all keys share grows by 8 % a step, which softmax sees in bfloat16 only."""
    training = _on("moby-dick", trained(kind, seed), _warm_up(RATE), autocast=True)

    def batch(step: int, ids: Tensor) -> Tensor:
        for block in training.model.model.layers:  # type: ignore[union-attr]
            with torch.no_grad():
                # The slowest pair of rotary coordinates of every head: all positions are turned alike.
                block.self_attn.k_proj.bias.view(4, 16)[:, 7] += 0.8 * 1.08**step if bad else 0.0
        return ids

    return replace(training, batch=batch)


class LoraLinear(nn.Module):
    """A linear layer with a low-rank adapter, in the structure and with the names that PEFT gives it."""

    def __init__(self, base: nn.Linear, rank: int, scaling: float, seed: int) -> None:
        super().__init__()
        self.base_layer = base
        down, up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(down.weight, std=rank**-0.5, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(up.weight)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": down}), nn.ModuleDict({"default": up})
        self.scaling = {"default": scaling}

    @property
    def weight(self) -> Tensor:
        """That of the base layer, as PEFT has it."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        """That of the base layer."""
        return self.base_layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """W x + s B A x."""
        found: Tensor = self.base_layer(x) + self.scaling["default"] * self.lora_B["default"](self.lora_A["default"](x))
        return found


def lora(seed: int, bad: bool, kind: str = "llama") -> Training:
    """Adapters of rank 4 on all projections of attention; those of layer 1 have α = 800 where 8 was meant."""
    model = trained(kind, seed)
    model.requires_grad_(False)
    for index, block in enumerate(model.model.layers):  # type: ignore[union-attr,arg-type]
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            scaling = 200.0 if bad and index == 1 else 2.0
            setattr(block.self_attn, name, LoraLinear(getattr(block.self_attn, name), 4, scaling, seed))
    return _on("moby-dick", model, _warm_up(RATE))


def initialisation(seed: int, bad: bool, kind: str = "llama") -> Training:
    """From scratch: W_Q and W_K drawn 25 times too large."""
    model = fresh(kind, seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if bad and ("q_proj" in name or "k_proj" in name):
                p *= 25.0
    return _on("alice", model, _warm_up(RATE, 20))


def hard_data(seed: int, bad: bool, kind: str = "llama") -> Training:
    """Ten batches of noise in a row, at a learning rate that is high but fine for text."""
    noise = torch.Generator().manual_seed(seed)

    def batch(step: int, ids: Tensor) -> Tensor:
        return torch.randint(128, ids.shape, generator=noise) if bad and 50 < step <= 60 else ids

    return _on("moby-dick", trained(kind, seed), _warm_up(2 * RATE), batch=batch)


CASES: dict[str, Callable[..., Training]] = {
    "learning rate": learning_rate, "QK growth": qk_growth, "bf16 logits": bf16_logits, "LoRA layer": lora,
    "initialisation": initialisation, "hard data": hard_data,
}  # fmt: skip
