"""Figures and tables of docs/how-to/which-attention.md: attention variants by the same ruler.

    python docs/how-to/make_which_attention.py [--page docs/how-to/which-attention.md]

Compares all kinds of attention twice: with random weights on random tokens of the sphere, unmasked, and with the weights of
a layer of gpt2-mini on the tokens that this layer sees on a held-out book, causal. Draws which-attention.svg and
which-attention-gpt2-mini.svg and writes the tables between the page's markers. A few minutes on one core.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import lipscope
from lipscope.models.corpora import read_text
from lipscope.models.text import Chunker
from lipscope.report import draw
from lipscope.rounding import interval, round_down, round_up
from lipscope.studies.charts import comparison_chart
from lipscope.studies.variants import Comparison, compare, random_layer

sys.path.insert(0, str(Path(__file__).parent.parent / "concepts"))

from drawing import table, write

WIDTH, HEADS, N, INPUTS, SEARCH, LAYER = 16, 2, 24, 4, 25, 2
LENGTHS = (8, 16, 24, 48, 96)


def on_random_weights() -> Comparison:
    """Width 16, two heads, tokens of norm √d."""
    return compare(random_layer(WIDTH, heads=HEADS), n=N, lengths=LENGTHS, inputs=INPUTS, search=SEARCH)


def on_gpt2_mini() -> Comparison:
    """One layer of gpt2-mini on the book that it was not trained on, with its own causal mask."""
    handle = lipscope.load("gpt2-mini")
    pieces = Chunker(read_text("alice"), handle.tokenizer).chunks([max(LENGTHS)], INPUTS, 0)[max(LENGTHS)]
    at = handle.record(input_ids=torch.tensor(pieces))[LAYER]
    return compare(at.weights().for_input(0), n=N, tokens=at.tokens(), lengths=LENGTHS, search=0)


def rows_of(found: Comparison) -> str:
    """The comparison as Markdown."""
    names = ["attention", "σ, median", "interval of all inputs", "exponent in n", "exponent in R"]
    searched = found.kinds[0].worst is not None
    names += [*(["worst σ found"] if searched else []), "least bound", "by"]
    rows = []
    for row in found.summary():
        cells = [row["attention"], f"{row['sigma']:.3g}", interval(row["lower"], row["upper"], 3)]
        for label in ("n", "radius"):
            exponent, low, high = (row[f"growth_{label}{end}"] for end in ("", "_low", "_high"))
            cells.append("–" if exponent is None else f"{exponent:.2f} {interval(low, high, decimals=2)}")
        cells += [round_down(row["worst_found"], 3)] if searched else []
        cells += ["–", "none known"] if row["bound"] is None else [round_up(row["bound"], 3), f"`{row['bound_name']}`"]
        rows.append(cells)
    note = f"n = {found.n}, R = {found.radius:.3g}, mask {found.mask}, {found.tokens}."
    note += f" Left out, since it does not take this mask: {', '.join(found.left_out)}." if found.left_out else ""
    return "\n".join([table(names, rows), "", note])


def bounds_of(found: Comparison, names: tuple[str, ...]) -> str:
    """All bounds of some kinds beside the worst σ found."""
    rows = []
    for name in names:
        worst = found[name].worst
        assert worst is not None
        for bound in found[name].bounds:
            rows.append([name, f"`{bound.name}`", round_up(bound.value, 3), f"{bound.value / float(worst.lower):.3g}"])
    return table(("attention", "bound", "value", "bound / worst σ found"), rows)


def main() -> None:
    """Refresh the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=Path(__file__).parent / "which-attention.md")
    page: Path = parser.parse_args().page.resolve()
    random, trained = on_random_weights(), on_gpt2_mini()
    title = f"random weights, d = {WIDTH}, {HEADS} heads, mask {random.mask}"
    draw(comparison_chart(random, title), page.parent / "which-attention.svg")
    title = f"gpt2-mini, layer {LAYER}, mask {trained.mask}"
    draw(comparison_chart(trained, title), page.parent / "which-attention-gpt2-mini.svg")
    write(page, "random", rows_of(random))
    write(page, "bounds", bounds_of(random, ("cosine", "qk-norm", "l2", "sigmoid", "sinkhorn")))
    write(page, "gpt2-mini", rows_of(trained))


if __name__ == "__main__":
    main()
