"""Tiny saved models, a text and plans for the sweep tests, and a kind and quantities that live outside the package."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from lipscope.models.load import ByteTokenizer, load, load_named
from lipscope.models.model import Model
from lipscope.runs import Plan
from lipscope.runs.kinds import Text
from lipscope.runs.plan import ModelChoice
from lipscope.runs.registry import Measured

LOADER = "sweep_cases:with_bytes"
TEXT = "".join(chr(97 + (7 * i * i + i // 5) % 26) for i in range(1500))


def save_models(directory: Path) -> list[ModelChoice]:
    """A BERT and a GPT-2 of two layers, in float32, that read bytes."""
    # Workers import this file too, and need none of the families.
    from model_families import FAMILIES

    choices = []
    for family in ("bert", "gpt2"):
        model = FAMILIES[family]()
        model.resize_token_embeddings(256, mean_resizing=False)
        torch.manual_seed(2)
        torch.nn.init.normal_(model.get_input_embeddings().weight)
        model.float().save_pretrained(directory / f"tiny-{family}")
        choices.append(ModelChoice(str(directory / f"tiny-{family}"), loader=LOADER))
    (directory / "text.txt").write_text(TEXT, encoding="utf-8")
    return choices


def with_bytes(name: str, dtype: torch.dtype | None) -> Model:
    """The saved model with the tokenizer that it was not saved with."""
    found = load_named(name)
    return Model(found.model, ByteTokenizer(), name=found.name, dtype=dtype)


def streamed(name: str, dtype: torch.dtype | None) -> Model:
    """The same, one layer in memory at a time."""
    return load(name, ByteTokenizer(), dtype=dtype, stream=True)


def plan_of(directory: Path, **settings: Any) -> Plan:
    """Two models of two layers, two scopes, three lengths, the longest in two passes: 32 tasks, 240 rows."""
    chosen: dict[str, Any] = {
        "models": [ModelChoice(str(directory / f"tiny-{family}"), loader=LOADER) for family in ("bert", "gpt2")],
        "texts": [str(directory / "text.txt")], "scopes": ["attention", "head"], "lengths": [6, 9, 24], "inputs": 4,
        "batch_tokens": 60,
    }  # fmt: skip
    return Plan.of(**(chosen | settings))


class SlowText(Text):
    """Text, a little slower: leaves time to be killed."""

    def measure(self, handle: Model, recorded: Any, payload: dict[str, Any], task: dict[str, Any]) -> list[dict[str, Any]]:
        time.sleep(float(task["options"].get("sleep", 0.05)))
        return super().measure(handle, recorded, payload, task)


class Fragile(Text):
    """Text that fails at n = 9 as long as a file exists."""

    def measure(self, handle: Model, recorded: Any, payload: dict[str, Any], task: dict[str, Any]) -> list[dict[str, Any]]:
        if task["n"] == 9 and os.path.exists(task["options"]["broken"]):
            raise ArithmeticError("nine is not a good number")
        return super().measure(handle, recorded, payload, task)


def largest_token(at: Measured) -> list[dict[str, Any]]:
    """A quantity: the largest token norm once more."""
    return [{"largest": row["radius_max"], "twice": 2 * row["radius_max"]} for row in at.rows]


def clashing(at: Measured) -> list[dict[str, Any]]:
    """A quantity that would overwrite a column."""
    return [{"estimate": 0.0} for _ in at.rows]
