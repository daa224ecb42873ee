"""The page on a speech encoder: the sound is what it says, and its sentences follow their rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import make_speech as page


def row(voice: int, lower: float, upper: float, **what: Any) -> dict[str, Any]:
    return {"layer": 0, "voice": voice, "lower": lower, "estimate": (lower + upper) / 2, "upper": upper} | what


def test_the_sound_has_its_formants_its_power_and_its_noise() -> None:
    pulse = np.zeros(16_000)
    pulse[0] = 1.0
    heard = np.abs(np.fft.rfft(page.resonator(pulse, 700, 60)))  # one bin per Hz
    assert abs(int(heard.argmax()) - 700) <= 5
    assert heard[0] == pytest.approx(1.0, rel=1e-6)
    clip = page.speech(2, 150, 1)
    assert len(clip) == 2 * page.RATE
    assert np.sqrt(np.square(clip).mean()) == pytest.approx(0.1)
    assert (clip == page.speech(2, 150, 1)).all()
    noise = page.noisy(clip, 10, 0) - clip
    assert 10 * np.log10(np.square(clip).mean() / np.square(noise).mean()) == pytest.approx(10)


def test_a_side_is_said_only_where_all_voices_take_it_with_their_whole_intervals() -> None:
    before = [row(voice, 1.0, 1.1, kind="a") for voice in range(3)]
    for ends, side in (((1.2, 1.3), "rises"), ((0.5, 0.9), "falls"), ((1.05, 1.3), "undecided")):
        after = [row(0, *ends, kind="b"), *(row(voice, ends[0], ends[1], kind="b") for voice in (1, 2))]
        assert page.change([*before, *after], 0, {"kind": "a"}, {"kind": "b"})[1] == side
    mixed = [row(0, 1.2, 1.3, kind="b"), row(1, 1.2, 1.3, kind="b"), row(2, 0.5, 0.6, kind="b")]
    factor, side = page.change([*before, *mixed], 0, {"kind": "a"}, {"kind": "b"})
    assert (factor, side) == ("0.45 … 1.30", "undecided")
