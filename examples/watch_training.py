"""Train gpt2-mini a little further, too fast, and watch σ of its attention: what a monitored training looks like.

    python examples/watch_training.py [--steps 60] [--rate 3e-3] [--csv sigma.csv] [--write docs/how-to/watch-training.md]

The Hugging Face ``Trainer`` reads `alice` with a learning rate that is too high for a trained model. Every 20 steps σ of
every layer is measured on the first batch, and a threshold on the largest logit warns. Everything is offline. ``--write``
replaces the output that a page shows below this command.
"""

from __future__ import annotations

from lipscope.training import LipschitzCallback, Threshold
from watched_training import collected_warnings, gpt2_mini, parser, show, train, windows


def main() -> None:
    """Train, and print what the monitor saw."""
    arguments = parser(__doc__, steps=60, rate=3e-3)
    arguments.add_argument("--csv", help="also append the readings to this file")
    options = arguments.parse_args()
    printed = collected_warnings()
    callback = LipschitzCallback(every=20, csv=options.csv, thresholds=[Threshold("max_logit", above=15.0)])
    trainer = train(
        gpt2_mini(), windows(128), [callback], max_steps=options.steps, learning_rate=options.rate,
        lr_scheduler_type="constant", logging_steps=20,
    )  # fmt: skip
    losses = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    for record in callback.records:
        printed.append(str(record) if record.step not in losses else f"{record}\n  loss {float(losses[record.step]):.3f}")
    show(printed, __file__, options.write)


if __name__ == "__main__":
    main()
