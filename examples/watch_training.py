"""Train gpt2-mini a little further, too fast, and watch σ of its attention: what a monitored training looks like.

    python examples/watch_training.py [--steps 60] [--rate 3e-3] [--csv sigma.csv] [--write docs/how-to/watch-training.md]

The Hugging Face ``Trainer`` reads `alice` with a learning rate that is too high for a trained model. Every 20 steps σ of
every layer is measured on the first batch, and a threshold on the largest logit warns. Everything is offline. ``--write``
replaces the output that a page shows below this command.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from lipscope.models.checkpoints import auto_tokenizer
from lipscope.models.corpora import read_text
from lipscope.models.load import GPT2_MINI
from lipscope.training import LipschitzCallback, Threshold

LENGTH = 128


def windows() -> list[dict[str, torch.Tensor]]:
    """The text as disjoint windows of tokens."""
    ids = torch.tensor(auto_tokenizer(GPT2_MINI)("\n\n".join(read_text("alice")), verbose=False)["input_ids"])
    return [{"input_ids": row, "labels": row} for row in ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)]


def main() -> None:
    """Train, and print what the monitor saw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--csv", help="also append the readings to this file")
    parser.add_argument("--write", type=Path, help="page whose output below this command is replaced")
    options = parser.parse_args()
    printed = []
    # Warnings are shown without the line of code that they come from.
    warnings.showwarning = lambda message, *_: printed.append(f"warning: {message}")
    callback = LipschitzCallback(every=20, csv=options.csv, thresholds=[Threshold("max_logit", above=15.0)])
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory, max_steps=options.steps, per_device_train_batch_size=8, learning_rate=options.rate,
            lr_scheduler_type="constant", logging_steps=20, save_strategy="no", report_to=[], use_cpu=True, seed=0,
            disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(GPT2_MINI, dtype=torch.float32)
        trainer = Trainer(model, arguments, train_dataset=windows(), callbacks=[callback])
        trainer.remove_callback(trainer.callback_handler.callbacks[-1])  # its own rows are printed below
        trainer.train()
    losses = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    for record in callback.records:
        printed.append(str(record) if record.step not in losses else f"{record}\n  loss {float(losses[record.step]):.3f}")
    print("\n".join(printed))
    if options.write:
        shown = re.compile(r"(    python examples/watch_training\.py[^\n]*\n\n```\n).*?```\n", flags=re.DOTALL)
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(shown.sub(lambda m: m[1] + "\n".join([*printed, "```\n"]), page), encoding="utf-8")


if __name__ == "__main__":
    main()
