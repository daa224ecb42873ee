"""Figure, tables and sentences of docs/concepts/speech.md: σ of a speech encoder against clip length and noise.

    python docs/concepts/make_speech.py               ten minutes of one core
    python docs/concepts/make_speech.py --rows F      rows of an earlier run, instead of measuring

The sound is made here: vowels as a pulse train through three formant resonators (Klatt 1980, formants of Peterson and Barney
1952), hisses between them, pauses, in three voices; white noise is added at several signal-to-noise ratios. Rows are kept in
build/speech.json. The model is `whisper-tiny-en`, whose encoder has 1,500 tokens for every clip of up to 30 seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.signal import chirp, lfilter

import lipscope
from drawing import FOLDER, table, write
from lipscope.models.media import signals
from lipscope.report.charts import Chart, Panel, Series
from lipscope.report.draw_print import draw
from lipscope.rounding import span

MODEL, RATE, ROWS = "whisper-tiny-en", 16_000, Path("build/speech.json")
# First three formants in Hz of "heed", "had", "hod", "who'd", "head": means of men (Peterson and Barney 1952, table II).
VOWELS = ((270, 2290, 3010), (660, 1720, 2410), (730, 1090, 2440), (300, 870, 2240), (530, 1840, 2480))
WIDTHS = (60, 90, 150)  # of the formants, in Hz
VOICES = (100, 150, 220)  # pitches in Hz
SECONDS, NOISY, RATIOS = (1, 3, 10, 30), 10, (20, 10, 0, -10)
SHARES = (50, 150, 500, 1500)  # leading tokens of a clip of 30 s
COLOURS = ("blue", "orange", "green", "purple")
Floats = NDArray[np.float64]


def resonator(sound: Floats, frequency: float, width: float) -> Floats:
    """One formant: y_t = A·x_t + B·y_{t−1} + C·y_{t−2} with gain 1 at 0 Hz (Klatt 1980)."""
    C = -np.exp(-2 * np.pi * width / RATE)
    B = 2 * np.exp(-np.pi * width / RATE) * np.cos(2 * np.pi * frequency / RATE)
    return np.asarray(lfilter([1 - B - C], [1, -B, -C], sound))


def speech(seconds: float, pitch: float, seed: int) -> Floats:
    """Syllables of a hiss and a vowel, about four in a second, with pauses; root mean square 0.1."""
    generator = np.random.default_rng(seed)
    parts: list[Floats] = []
    while sum(map(len, parts)) < seconds * RATE:
        n, hissing = int(RATE * generator.uniform(0.12, 0.28)), int(RATE * generator.uniform(0.03, 0.08))
        fall = pitch * generator.uniform(0.9, 1.2) * np.linspace(1.1, 0.9, n)
        pulses = np.diff(np.floor(np.cumsum(fall) / RATE), prepend=0.0)
        for formant, width in zip(VOWELS[generator.integers(len(VOWELS))], WIDTHS, strict=True):
            pulses = resonator(pulses, formant, width)
        vowel = pulses * np.hanning(n)
        hiss = np.diff(generator.standard_normal(hissing), prepend=0.0) * np.hanning(hissing)
        parts += [0.2 * hiss / np.abs(hiss).max(), vowel / np.abs(vowel).max()]
        if generator.random() < 0.2:
            parts.append(np.zeros(int(RATE * generator.uniform(0.1, 0.4))))
    sound = np.concatenate(parts)[: int(seconds * RATE)]
    return np.asarray(0.1 * sound / np.sqrt(np.square(sound).mean()))


def noisy(sound: Floats, decibels: float, seed: int) -> Floats:
    """White noise added at a ratio of powers, 10·log10(speech / noise)."""
    noise = np.random.default_rng(seed).standard_normal(len(sound))
    power = np.square(sound).mean() / 10 ** (decibels / 10)
    return np.asarray(sound + noise * np.sqrt(power / np.square(noise).mean()))


def clips() -> Iterator[tuple[dict[str, Any], Floats]]:
    """What each sound is, and its samples."""
    for voice, pitch in enumerate(VOICES):
        for seconds in SECONDS:
            yield {"kind": "speech", "voice": voice, "seconds": seconds}, speech(seconds, pitch, voice)
        for ratio in RATIOS:
            sound = noisy(speech(NOISY, pitch, voice), ratio, 100 + voice)
            yield {"kind": "noisy", "voice": voice, "seconds": NOISY, "ratio": ratio}, sound
    times = np.arange(NOISY * RATE) / RATE
    others = {
        "silence": np.zeros(NOISY * RATE),
        "chirp": 0.1 * chirp(times, 100, NOISY, 7000, "logarithmic"),
        "white noise": 0.1 * np.random.default_rng(7).standard_normal(NOISY * RATE),
    }
    for kind, sound in others.items():
        yield {"kind": kind, "voice": 0, "seconds": NOISY}, np.asarray(sound)


def measure() -> list[dict[str, Any]]:
    """One row for every clip and layer, and for leading tokens of the longest clips."""
    handle, rows = lipscope.load(MODEL), []
    kept = ("layer", "n", "lower", "estimate", "upper", "entropy", "max_logit")
    for what, sound in clips():
        [signal] = signals(handle, audio=torch.from_numpy(sound).float())
        recorded = handle.record(signal.inputs)
        found = [what | {name: row[name] for name in kept} for row in recorded.rows(certificate=False)]
        if what["kind"] == "speech" and what["seconds"] == SECONDS[-1]:
            for layer in recorded:
                attention = layer.attention
                assert attention is not None
                for n in SHARES[:-1]:
                    sigma = lipscope.local_lipschitz(attention, layer.tokens()[0, :n], certificate=False)
                    ends = {name: float(getattr(sigma, name)) for name in ("lower", "estimate", "upper")}
                    found.append(what | {"kind": "leading", "layer": layer.index, "n": n} | ends)
        rows += found
        print(what, [f"{row['estimate']:.3g}" for row in found], flush=True)
    return rows


def by_voice(rows: Sequence[dict[str, Any]], layer: int, **what: Any) -> list[dict[str, Any]]:
    """The rows of one layer at one setting, voice by voice."""
    mine = [row for row in rows if row["layer"] == layer and all(row.get(name) == value for name, value in what.items())]
    return sorted(mine, key=lambda row: row["voice"])


def change(rows: Sequence[dict[str, Any]], layer: int, before: dict[str, Any], after: dict[str, Any]) -> tuple[str, str]:
    """By what factor σ changes, over the voices (intervals of σ included), and whether all of them agree on the side."""
    pairs = list(zip(by_voice(rows, layer, **before), by_voice(rows, layer, **after), strict=True))
    low = [new["lower"] / old["upper"] for old, new in pairs]
    high = [new["upper"] / old["lower"] for old, new in pairs]
    side = "rises" if min(low) > 1 else "falls" if max(high) < 1 else "undecided"
    return span(min(low), max(high), decimals=2), side


def settings() -> dict[str, tuple[str, Sequence[float], list[dict[str, Any]], dict[str, Any], dict[str, Any]]]:
    """The comparisons: label of the axis, its values, what each is, and the two that are compared."""
    lengths = [{"kind": "speech", "seconds": s} for s in SECONDS]
    clean: dict[str, Any] = {"kind": "speech", "seconds": NOISY}
    noise = [{"kind": "noisy", "ratio": r} for r in RATIOS]
    shares = [{"kind": "leading", "n": n} for n in SHARES[:-1]] + [{"kind": "speech", "seconds": SECONDS[-1]}]
    return {
        "clip length": ("seconds of speech in the window", SECONDS, lengths, lengths[0], lengths[-1]),
        "noise": ("speech to noise in dB", RATIOS, noise, clean, noise[-1]),
        "tokens": ("leading tokens n of a clip of 30 s", SHARES, shares, shares[0], shares[-1]),
    }


def chart(rows: Sequence[dict[str, Any]], layers: Sequence[int]) -> Chart:
    """σ of every layer: medians of the voices, with the range of all of them."""
    panels = []
    for name, (label, values, what, _, _) in settings().items():
        series = []
        for layer in layers:
            found = [by_voice(rows, layer, **one) for one in what]
            middle = [sorted(row["estimate"] for row in here)[len(here) // 2] for here in found]
            low, high = (
                [end(row[side] for row in here) for here in found] for end, side in ((min, "lower"), (max, "upper"))
            )
            band = Series(f"layer {layer}, range", values, middle, "band", COLOURS[layer], low, high, listed=False)
            series += [band, Series(f"layer {layer}", values, middle, "line", COLOURS[layer])]
        panels.append(Panel(series, label, "σ, scope attention", name, name != "noise", True, values, (), False))
    words = "σ of the four layers of whisper-tiny-en against seconds of speech, noise, and number of tokens."
    return Chart("speech", "σ of a speech encoder", panels, words, columns=3)


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Tables and sentences."""
    layers = sorted({row["layer"] for row in rows})
    header = ["", *(f"layer {layer}" for layer in layers)]
    lines = []
    others = [(kind, {"kind": kind}) for kind in ("silence", "chirp", "white noise")]
    steps = [(f"{s} s of speech", {"kind": "speech", "seconds": s}) for s in SECONDS]
    steps += [(f"{NOISY} s, {r} dB", {"kind": "noisy", "ratio": r}) for r in RATIOS]
    for name, what in steps + [(f"{NOISY} s of {kind}", what) for kind, what in others]:
        found = [by_voice(rows, layer, **what) for layer in layers]
        lines.append([name, *(span(min(r["lower"] for r in f), max(r["upper"] for r in f), 3) for f in found)])
    text = [table(header, lines), ""]
    sentences = []
    changes = {}
    for name, (_, _, _, before, after) in settings().items():
        changes[name] = [change(rows, layer, before, after) for layer in layers]
    names = {"clip length": f"{SECONDS[0]} s → {SECONDS[-1]} s of speech", "noise": f"clean → {RATIOS[-1]} dB",
             "tokens": f"{SHARES[0]} → {SHARES[-1]} tokens"}  # fmt: skip
    cells = [[names[name], *(f"{factor}, {side}" for factor, side in found)] for name, found in changes.items()]
    text += [table(["factor of σ", *header[1:]], cells), ""]
    for name, found in changes.items():
        sides = {side: [str(layer) for layer, (_, s) in zip(layers, found, strict=True) if s == side]
                 for side in ("rises", "falls", "undecided")}  # fmt: skip
        said = [
            f"{side} in layer{'s' * (len(k) > 1)} {', '.join(k)}" for side, k in sides.items() if k and side != "undecided"
        ]
        if sides["undecided"]:
            said.append(f"does not change to the same side in all voices in layer{'s' * (len(sides['undecided']) > 1)} "
                        f"{', '.join(sides['undecided'])}")  # fmt: skip
        sentences.append(f"- {names[name]}: σ {'; it '.join(said)}.")
    return "\n".join([*text, *sentences])


def main() -> None:
    """Measure, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="rows of an earlier run")
    asked = parser.parse_args()
    rows = measure() if asked.rows is None else json.loads(asked.rows.read_text(encoding="utf-8"))
    ROWS.parent.mkdir(exist_ok=True)
    ROWS.write_text(json.dumps(rows), encoding="utf-8")
    draw(chart(rows, sorted({row["layer"] for row in rows})), FOLDER / "speech.svg")
    write("speech.md", "numbers", report(rows))


if __name__ == "__main__":
    main()
