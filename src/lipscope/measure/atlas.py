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
SCOPE = "attention"


@cache
def entries() -> tuple[Entry, ...]:
    """The rows of the atlas, as they are written."""
    return tuple(csv.DictReader(files("lipscope.measure").joinpath("atlas.csv").read_text(encoding="utf-8").splitlines()))


def standing(model: str | None, n: int, lower: float, upper: float) -> str | None:
    """How σ of an attention layer of ``model``, at n tokens between ``lower`` and ``upper``, compares; None without others.

    Example:
        >>> standing("mine", 64, 1e9, 2e9).split(" of ")[0]
        'larger than 100 % (40'
    """
    nearest: dict[tuple[str, str], Entry] = {}
    for entry in entries():
        length, place = int(entry["n"]), (entry["model"], entry["layer"])
        if entry["model"] != model and n * n <= 2 * length * length and length * length <= 2 * n * n:
            before = nearest.setdefault(place, entry)
            nearest[place] = min(before, entry, key=lambda one: abs(int(one["n"]) - n))
    said = []
    for weights in ("trained", "random"):
        others = [entry for entry in nearest.values() if entry["weights"] == weights]
        if others:
            below = sum(float(entry["upper"]) < lower for entry in others)
            beyond = sum(float(entry["lower"]) > upper for entry in others)
            models = counted(len({entry["model"] for entry in others}), f"{weights} model")
            said.append(
                f"larger than {_share(below, len(others))} and smaller than {_share(beyond, len(others))} of the "
                f"attention layers of {models}"
            )
    return None if not said else f"{', '.join(said)}, in the atlas at a similar length"


def _share(part: int, whole: int) -> str:
    """A share rounded down."""
    return f"{100 * part // whole} % ({part} of {whole})"
