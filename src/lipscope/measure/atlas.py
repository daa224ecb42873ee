"""Where a layer stands among others: the atlas, σ of attention layers at several lengths. It needs no torch.

docs/concepts/make_atlas.py writes ``atlas.csv``: models at text, and random twins of common sizes. No sentence may
overstate: a layer counts as smaller only where its whole interval, over all inputs, lies below the other's; every layer of
the atlas counts once, at the nearest length that is within a factor of √2; layers of the same model, which would vote for
themselves, do not count; and trained and random ones are not thrown together.
"""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files

from lipscope.rounding import counted

Entry = dict[str, str]


@cache
def entries() -> tuple[Entry, ...]:
    """The rows of the atlas, as they are written."""
    return tuple(csv.DictReader(files("lipscope.measure").joinpath("atlas.csv").read_text(encoding="utf-8").splitlines()))


def standing(model: str | None, scope: str | None, n: int, lower: float, upper: float) -> str | None:
    """How σ of a layer of ``model``, at n tokens between ``lower`` and ``upper``, compares; None without others like it.

    Example:
        >>> standing("mine", "attention", 64, 1e9, 2e9).split(" (")[0]
        'larger than 100 %'
    """
    nearest: dict[tuple[str, str], Entry] = {}
    for entry in entries() if scope == "attention" else ():
        length, place = int(entry["n"]), (entry["model"], entry["layer"])
        if entry["model"] != model and n * n <= 2 * length * length and length * length <= 2 * n * n:
            before = nearest.setdefault(place, entry)
            nearest[place] = min(before, entry, key=lambda one: abs(int(one["n"]) - n))
    said = []
    for weights in ("trained", "random"):
        others = [entry for entry in nearest.values() if entry["weights"] == weights]
        if others:
            models = counted(len({entry["model"] for entry in others}), f"{weights} model")
            counts = sum(float(one["upper"]) < lower for one in others), sum(float(one["lower"]) > upper for one in others)
            # Shares are rounded down.
            below, beyond = (f"{100 * count // len(others)} % ({count} of {len(others)})" for count in counts)
            said.append(f"larger than {below} and smaller than {beyond} of the attention layers of {models}")
    return f"{', '.join(said)}, in the atlas at a similar length" if said else None
