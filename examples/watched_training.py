"""What the examples of a watched training share: gpt2-mini on `alice`, the Hugging Face ``Trainer``, offline and quiet."""

from __future__ import annotations

import argparse
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from lipscope.models.checkpoints import auto_tokenizer
from lipscope.models.corpora import read_text
from lipscope.models.load import GPT2_MINI


def windows(length: int) -> torch.Tensor:
    """The text as disjoint windows of tokens."""
    ids = torch.tensor(auto_tokenizer(GPT2_MINI)("\n\n".join(read_text("alice")), verbose=False)["input_ids"])
    return ids[: len(ids) // length * length].reshape(-1, length)


def gpt2_mini() -> Any:
    """The model that is trained further."""
    return AutoModelForCausalLM.from_pretrained(GPT2_MINI, dtype=torch.float32)


def train(model: Any, rows: torch.Tensor, callbacks: list[TrainerCallback], **options: Any) -> Trainer:
    """Train on batches of 8 windows."""
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory, per_device_train_batch_size=8, save_strategy="no", report_to=[], use_cpu=True, seed=0,
            disable_tqdm=True, dataloader_pin_memory=False, **options,
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)  # examples print what they show themselves
        trainer.train()
    return trainer


def parser(about: str, steps: int, rate: float) -> argparse.ArgumentParser:
    """The options that both have."""
    found = argparse.ArgumentParser(description=about.splitlines()[0])
    found.add_argument("--steps", type=int, default=steps)
    found.add_argument("--rate", type=float, default=rate)
    found.add_argument("--write", type=Path, help="page whose output below this command is replaced")
    return found


def collected_warnings() -> list[str]:
    """A list that warnings go to from now on, without the line of code that they come from."""
    printed: list[str] = []
    warnings.showwarning = lambda message, *_: printed.append(f"warning: {message}")
    return printed


def show(printed: list[str], script: str, page: Path | None) -> None:
    """Print, and replace the output that a page shows below the command."""
    print("\n".join(printed))
    if page:
        command = re.escape(f"    python examples/{Path(script).name}")
        shown = re.compile(rf"({command}[^\n]*\n\n```\n).*?```\n", flags=re.DOTALL)
        old = page.read_text(encoding="utf-8")
        page.write_text(shown.sub(lambda m: m[1] + "\n".join([*printed, "```\n"]), old), encoding="utf-8")
