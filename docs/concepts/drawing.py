"""What the scripts of this folder share: tokens of a real layer, one look for figures, and tables written into pages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lipscope
from lipscope.models.corpora import read_text
from lipscope.models.text import chunks_of
from lipscope.report.palette import palette

FOLDER = Path(__file__).parent
MODEL, TEXT = "gpt2-mini", "alice"
# The report's colours, which colour-blind readers can tell apart.
COLOURS = tuple(palette("light")[name] for name in ("blue", "orange", "green", "purple", "sky", "amber"))
BLUE, ORANGE, GREEN, PINK, SKY, YELLOW = COLOURS


class RealLayer:
    """One layer of a model at the tokens that a text gives it.

    Args:
        layer: its index.
        n: number of tokens.
        model: name of the model, or a loaded one.
        seed: where in the text.
    """

    def __init__(self, layer: int, n: int, model: Any = MODEL, seed: int = 0) -> None:
        self.handle = lipscope.load(model)
        self.ids = chunks_of(self.handle, read_text(TEXT), n, seed=seed)
        self.recording = self.handle.record(input_ids=self.ids)
        self.layer = layer
        attention = self.recording[layer].attention
        assert attention is not None
        self.attention: lipscope.Attention = attention
        self.X = self.tokens("attention")

    def tokens(self, scope: str) -> Any:
        """Tokens (n, d) that enter a scope."""
        return self.recording[self.layer].tokens(scope)[0]


def pyplot() -> Any:
    """Matplotlib without a screen, with the same bytes at every run."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "lipscope"
    mpl.rcParams["font.size"] = 12
    mpl.rcParams["axes.spines.right"] = mpl.rcParams["axes.spines.top"] = False
    import matplotlib.pyplot as plt

    return plt


def save(figure: Any, name: str, folder: Path = FOLDER) -> None:
    """Write an SVG file beside the pages."""
    figure.tight_layout()
    figure.savefig(folder / name, metadata={"Date": None})
    pyplot().close(figure)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def write(page: str | Path, name: str, content: str, folder: Path = FOLDER) -> None:
    """Put content between ``<!-- name -->`` and ``<!-- /name -->`` of a page in ``folder``, or at an absolute path."""
    path = folder / page
    text = path.read_text(encoding="utf-8")
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    if not re.search(pattern, text, flags=re.DOTALL):
        raise ValueError(f"{page} has no markers <!-- {name} --> … <!-- /{name} -->")
    new = re.sub(pattern, lambda found: f"{found[1]}\n{content}\n\n{found[2]}", text, flags=re.DOTALL)
    path.write_text(new, encoding="utf-8")
