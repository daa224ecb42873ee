"""A fine-tune that blows up, the alarm that says so, and the same training with each remedy.

    python examples/why_did_it_blow_up.py [--steps 40] [--rate 2e-2] [--write PAGE]

gpt2-mini is trained further on `alice` by the Hugging Face ``Trainer``, with far too high a learning rate. The callback
is one line; what it says is printed, and then the held-out loss of the run as it is, with QK-clip, and at a tenth of the
learning rate. Everything is offline. ``--write`` replaces the output that a page shows below this command.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from lipscope.models.checkpoints import auto_tokenizer
from lipscope.models.corpora import read_text
from lipscope.models.load import GPT2_MINI
from lipscope.training import LipschitzCallback, QKClipCallback

LENGTH = 64


def windows() -> torch.Tensor:
    """The text as disjoint windows of tokens."""
    ids = torch.tensor(auto_tokenizer(GPT2_MINI)("\n\n".join(read_text("alice")), verbose=False)["input_ids"])
    return ids[: len(ids) // LENGTH * LENGTH].reshape(-1, LENGTH)


def train(steps: int, rate: float, callbacks: list[TrainerCallback]) -> tuple[float, float]:
    """Fine-tune; the held-out loss before and after."""
    model = AutoModelForCausalLM.from_pretrained(GPT2_MINI, dtype=torch.float32)
    *rows, held_out = windows().split(8)
    data = [{"input_ids": row, "labels": row} for row in torch.cat(rows)]

    def loss() -> float:
        with torch.no_grad():
            return float(model.eval()(input_ids=held_out, labels=held_out).loss)

    before = loss()
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory, max_steps=steps, per_device_train_batch_size=8, learning_rate=rate, warmup_steps=steps,
            lr_scheduler_type="constant_with_warmup", logging_strategy="no", save_strategy="no", report_to=[], use_cpu=True,
            seed=0, disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)  # only what the alarm says is printed
        trainer.train()
    return before, loss()


def main() -> None:
    """Print the alarms of the first run, and the losses of all three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rate", type=float, default=2e-2)
    parser.add_argument("--write", type=Path, help="page whose output below this command is replaced")
    options = parser.parse_args()
    printed: list[str] = []
    # Warnings are shown without the line of code that they come from.
    warnings.showwarning = lambda message, *_: printed.append(f"warning: {message}")
    for name, rate, callbacks in (
        ("as it is", options.rate, [LipschitzCallback(every=5)]),
        ("with QKClip(tau=50)", options.rate, [QKClipCallback(tau=50.0, every=5)]),
        ("with a tenth of the learning rate", options.rate / 10, []),
    ):
        before, after = train(options.steps, rate, callbacks)
        printed.append(f"{name}: held-out loss {before:.2f} → {after:.2f}")
    print("\n".join(printed))
    if options.write:
        shown = re.compile(r"(    python examples/why_did_it_blow_up\.py[^\n]*\n\n```\n).*?```\n", flags=re.DOTALL)
        page = options.write.read_text(encoding="utf-8")
        options.write.write_text(shown.sub(lambda m: m[1] + "\n".join([*printed, "```\n"]), page), encoding="utf-8")


if __name__ == "__main__":
    main()
