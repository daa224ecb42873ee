"""A fine-tune that blows up, the alarm that says so, and the same training with each remedy.

    python examples/why_did_it_blow_up.py [--steps 40] [--rate 2e-2] [--write PAGE]

gpt2-mini is trained further on `alice` by the Hugging Face ``Trainer``, with far too high a learning rate. The callback
is one line; what it says is printed, and then the held-out loss of the run as it is, with QK-clip, and at a tenth of the
learning rate. Everything is offline. ``--write`` replaces the output that a page shows below this command.
"""

from __future__ import annotations

import torch
from transformers import TrainerCallback

from lipscope.training import LipschitzCallback, QKClipCallback
from watched_training import collected_warnings, gpt2_mini, parser, show, train, windows


def losses(steps: int, rate: float, callbacks: list[TrainerCallback]) -> tuple[float, float]:
    """Fine-tune; the held-out loss before and after."""
    model, (*rows, held_out) = gpt2_mini(), windows(64).split(8)

    def loss() -> float:
        with torch.no_grad():
            return float(model.eval()(input_ids=held_out, labels=held_out).loss)

    before = loss()
    train(
        model, torch.cat(rows), callbacks, max_steps=steps, learning_rate=rate, warmup_steps=steps,
        lr_scheduler_type="constant_with_warmup", logging_strategy="no",
    )  # fmt: skip
    return before, loss()


def main() -> None:
    """Print the alarms of the first run, and the losses of all three."""
    options = parser(__doc__, steps=40, rate=2e-2).parse_args()
    printed = collected_warnings()
    for name, rate, callbacks in (
        ("as it is", options.rate, [LipschitzCallback(every=5)]),
        ("with QKClip(tau=50)", options.rate, [QKClipCallback(tau=50.0, every=5)]),
        ("with a tenth of the learning rate", options.rate / 10, []),
    ):
        before, after = losses(options.steps, rate, callbacks)
        printed.append(f"{name}: held-out loss {before:.2f} → {after:.2f}")
    show(printed, __file__, options.write)


if __name__ == "__main__":
    main()
