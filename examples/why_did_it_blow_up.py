"""A fine-tune that blows up, the alarm that says so, and the same training with each remedy.

    python examples/why_did_it_blow_up.py [--steps 40] [--rate 2e-2] [--write PAGE]

gpt2-mini is trained further on `alice` by the Hugging Face ``Trainer``, with far too high a learning rate. The callback
is one line; what it says is printed, and then the held-out loss of the run as it is, with QK-clip, and at a tenth of the
learning rate. Everything is offline. ``--write`` replaces the output that a page shows below this command, and its picture.
"""

from __future__ import annotations

import torch
from transformers import TrainerCallback

from lipscope.report import Chart, Panel, Series, draw
from lipscope.report.palette import CYCLE
from lipscope.training import LipschitzCallback, QKClipCallback
from watched_training import collected_warnings, gpt2_mini, parser, show, train, windows


def losses(steps: int, rate: float, callbacks: list[TrainerCallback]) -> tuple[float, float, dict[int, float]]:
    """Fine-tune; the held-out loss before and after, and the loss of the batches by step."""
    model, (*rows, held_out) = gpt2_mini(), windows(64).split(8)

    def loss() -> float:
        with torch.no_grad():
            return float(model.eval()(input_ids=held_out, labels=held_out).loss)

    before = loss()
    trainer = train(
        model, torch.cat(rows), callbacks, max_steps=steps, learning_rate=rate, warmup_steps=steps,
        lr_scheduler_type="constant_with_warmup", logging_steps=1,
    )  # fmt: skip
    return before, loss(), {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}


def picture(curves: dict[str, dict[int, float]], watched: LipschitzCallback) -> Chart:
    """The loss of all runs, and the largest logits of the one that is watched with its first alarm."""
    looks = zip(("orange", "green", "blue"), ("line", "dashes", "dots"), strict=True)
    loss = [
        Series(name, [*by], [*by.values()], look, colour)
        for (name, by), (colour, look) in zip(curves.items(), looks, strict=True)
    ]
    steps = [record.step for record in watched.records]
    logits = [
        Series(f"layer {layer}", steps, [record.readings[layer].max_logit for record in watched.records], "line", colour)
        for layer, colour in enumerate(CYCLE[: len(watched.records[0].readings)])
    ]
    alarms = [record.step for record in watched.records if record.alarms][:1]
    heights = [value for series in logits for value in series.y]
    for step in alarms:
        logits.append(Series("first alarm", [step, step], [min(heights), max(heights)], "dots", "grey", group="guide"))
    words = "Loss of the batches by step, as it is and with two remedies; largest logit of every layer of the run as it is."
    panels = [Panel(loss, "step", "loss of the batch", "what everybody sees", from_zero=False),
              Panel(logits, "step", "largest logit", "what the callback sees", y_log=True)]  # fmt: skip
    return Chart("blow-up-run", "A learning rate that rises to 0.02", panels, words, columns=2)


def main() -> None:
    """Print the alarms of the first run, and the losses of all three."""
    options = parser(__doc__, steps=40, rate=2e-2).parse_args()
    printed = collected_warnings()
    watched, curves = LipschitzCallback(every=5), {}
    for name, rate, callbacks in (
        ("as it is", options.rate, [watched]),
        ("with QKClip(tau=50)", options.rate, [QKClipCallback(tau=50.0, every=5)]),
        ("with a tenth of the learning rate", options.rate / 10, []),
    ):
        before, after, curves[name] = losses(options.steps, rate, callbacks)
        printed.append(f"{name}: held-out loss {before:.2f} → {after:.2f}")
    show(printed, __file__, options.write)
    chart = picture(curves, watched)
    if options.write:
        draw(chart, options.write.parent / f"{chart.name}.svg")


if __name__ == "__main__":
    main()
