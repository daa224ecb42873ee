"""Figures and tables of docs/theory: σ against every bound as n and R grow, and bound/σ over random and bad inputs.

    python docs/theory/make_figures.py [--out docs/theory]

Writes bounds-n.svg, bounds-r.svg, ratios.md and grid.md. One head, d = 2, V = I, A = diag(−1, ½): repulsive, so that the
paper's lower bound is at its strongest. σ is measured at the groups construction, improved by gradient ascent where the
Jacobian is small.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path

import torch

import lipscope
from lipscope.bounds import certificates, registry
from lipscope.bounds.constants import Constants
from lipscope.bounds.pairs import lower_groups, lower_meanfield, lower_pair, lower_proposition34
from lipscope.bounds.sets import castin2024_general, castin2024_meanfield, refined_masked, refined_unmasked
from lipscope.report.palette import palette

A = torch.diag(torch.tensor([-1.0, 0.5], dtype=torch.float64))
V = torch.eye(2, dtype=torch.float64)


def layer(mask: str) -> lipscope.Attention:
    """The head with A = τW_KᵀW_Q: W_K = I, τ = 1."""
    return lipscope.Attention(A, V, V, scale=1.0, mask=mask)


def worst_sigma(mask: str, R: float, n: int) -> float:
    """σ at the best construction, or at random tokens where those are worse."""
    found = [f(layer(mask), R, n) for f in (lower_groups, lower_pair, lower_proposition34)]
    one = layer(mask)
    measured = [lipscope.local_lipschitz(one, b.tokens, certificate=False).estimate for b in found if b is not None]
    return max(*measured, random_sigma(mask, R, n))


def random_sigma(mask: str, R: float, n: int) -> float:
    """σ at tokens uniform on the sphere of radius R."""
    X = torch.randn(n, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X = R * X / X.norm(dim=-1, keepdim=True)
    return float(lipscope.local_lipschitz(layer(mask), X, certificate=False).estimate)


def curves(mask: str, pairs: list[tuple[float, int]]) -> dict[str, list[float]]:
    """Every line of one panel, at the given (R, n)."""
    constants = Constants.of_norms(1.0, 1.0)
    ours = refined_masked if mask == "causal" else refined_unmasked
    lines = {
        "paper, Theorem 3.3": [castin2024_general(constants, R, n).value for R, n in pairs],
        "ours (refined)": [ours(constants, R, n).value for R, n in pairs],
        "ours, every n": [ours(constants, R).value for R, n in pairs],
        "σ at the worst known input": [worst_sigma(mask, R, n) for R, n in pairs],
        "lower: groups": [lower_groups(layer(mask), R, n).value for R, n in pairs],
        "σ at random tokens": [random_sigma(mask, R, n) for R, n in pairs],
    }
    lines["lower: mean-field"] = [lower_meanfield(layer(mask), R).value for R, n in pairs]
    if mask == "full":
        lines["paper, Theorem 3.5"] = [castin2024_meanfield(constants, R).value for R, n in pairs]
        pair = [lower_proposition34(layer(mask), R, n) for R, n in pairs]
        lines["paper, Proposition 3.4"] = [bound.value for bound in pair]
    return lines


BLUE, ORANGE, AMBER, GREEN = (palette("light")[name] for name in ("blue", "orange", "amber", "green"))
STYLES = {
    "σ at the worst known input": {"color": "black", "marker": "o", "markersize": 3},
    "σ at random tokens": {"color": "grey", "marker": "o", "markersize": 3},
    "ours (refined)": {"color": BLUE},
    "ours, every n": {"color": BLUE, "linestyle": ":"},
    "paper, Theorem 3.3": {"color": ORANGE},
    "paper, Theorem 3.5": {"color": ORANGE, "linestyle": ":"},
    "paper, Proposition 3.4": {"color": AMBER, "linestyle": "--"},
    "lower: groups": {"color": GREEN, "linestyle": "--"},
    "lower: mean-field": {"color": GREEN, "linestyle": ":"},
}


def draw(path: Path, axis: str, panels: dict[str, tuple[list[float], dict[str, list[float]]]], border: float | None) -> None:
    """Two panels, unmasked and causal, on logarithmic axes."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "lipscope"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    for panel, (title, (xs, lines)) in zip(axes, panels.items(), strict=True):
        for name, values in lines.items():
            panel.plot(xs, values, label=name, **STYLES[name])
        if border is not None and title == "unmasked":
            panel.axvline(border, color="lightgrey", zorder=0)
            panel.text(border, 0.6, r" $n = e^{2\gamma R^2}$", color="grey", fontsize=8)
        panel.set(title=title, xlabel=axis, yscale="log", xscale="log" if axis == "n" else "linear")
        panel.set_ylim(0.5, 2e4)
        panel.legend(fontsize=7, loc="upper left")
    axes[0].set_ylabel("local Lipschitz constant, and bounds")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def ratios() -> str:
    """Median and largest bound/σ of every bound over random and adversarial inputs, as Markdown."""
    kinds = ("random", "constructed")
    names = ["certificates.parts", "certificates.row_gram", "least certificate",
             "yudin2025.improved", "yudin2025.published", "refined", "castin2024.general",
             "castin2024.meanfield"]  # fmt: skip
    lines = ["| bound | " + " | ".join(f"{mask}, {kind}" for mask in ("unmasked", "causal") for kind in kinds) + " |"]
    lines.append("|---|" + "---|" * 4)
    columns = [collect(mask, kind) for mask in ("full", "causal") for kind in kinds]
    for name in names:
        cells = []
        for column in columns:
            values = column.get(name, [])
            cells.append(f"{statistics.median(values):.3g} ({max(values):.3g})" if values else "–")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def collect(mask: str, kind: str, cases: int = 200) -> dict[str, list[float]]:
    """bound/σ for random heads of width 1 to 8 with 2 to 32 tokens."""
    found: dict[str, list[float]] = {}
    for seed in range(cases):
        G = torch.Generator().manual_seed(seed)
        d, n = int(torch.randint(1, 9, (), generator=G)), int(torch.randint(2, 33, (), generator=G))
        W = [torch.randn(d, d, generator=G, dtype=torch.float64) / math.sqrt(d) for _ in range(3)]
        one = lipscope.Attention(*W, mask=mask)
        X = torch.randn(n, d, generator=G, dtype=torch.float64)
        if kind == "constructed":
            X = lower_groups(one, 1.5, n).tokens
        sigma = float(lipscope.local_lipschitz(one, X, solver=lipscope.Dense()).estimate)
        R = float(X.norm(dim=-1).max())
        bounds = {b.name: b.value for b in certificates.local_bounds(one, X)}
        bounds["least certificate"] = min(bounds.values())
        bounds |= {b.name: b.value for b in registry.applicable(one, x=X, sources=["yudin2025"])}
        bounds["refined"] = (refined_masked if mask == "causal" else refined_unmasked)(one, R, n).value
        bounds["castin2024.general"] = castin2024_general(one, R, n).value
        if mask == "full":
            bounds["castin2024.meanfield"] = castin2024_meanfield(one, R).value
        for name, value in bounds.items():
            found.setdefault(name, []).append(value / sigma)
    return found


def wide_layers() -> str:
    """The default certificate over σ for layers and heads in the shape of BERT, as Markdown."""
    width, heads, n = 768, 12, 98
    lines = ["| size of the weights | positions | σ of the layer | certificate/σ | median over heads | largest over heads |"]
    lines.append("|---|---|---|---|---|---|")
    X = torch.randn(1, n, width, generator=torch.Generator().manual_seed(1))
    for size in (0.02, 0.03, 0.05):
        for turned in (False, True):
            G = torch.Generator().manual_seed(0)
            W = [size * torch.randn(width, width, generator=G) for _ in range(4)]
            table = lipscope.Rotary.from_base(width // heads, n=n) if turned else None
            one = lipscope.Attention(*W, heads=heads, rotary=table)
            sigma = float(lipscope.local_lipschitz(one, X, certificate=False).estimate)
            ratio = float(certificates.certified_upper(one, X)) / sigma
            alone = lipscope.local_lipschitz(one, X, scope="head", certificate=False).estimate
            each = (certificates.certified_upper(one, X, "head") / alone).flatten()
            cells = [f"{size}", "rotary" if turned else "none", f"{sigma:.3g}", f"{ratio:.3g}"]
            lines.append("| " + " | ".join([*cells, f"{each.median():.3g}", f"{each.max():.3g}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    R = 1.3
    lengths = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384]
    by_n = {title: (lengths, curves(mask, [(R, n) for n in lengths]))
            for title, mask in (("unmasked", "full"), ("causal", "causal"))}  # fmt: skip
    draw(out / "bounds-n.svg", "n", by_n, border=math.exp(2 * R**2))
    radii = [0.1 * step for step in range(1, 26)]
    by_r = {title: (radii, curves(mask, [(r, 64) for r in radii]))
            for title, mask in (("unmasked", "full"), ("causal", "causal"))}  # fmt: skip
    draw(out / "bounds-r.svg", "R", by_r, border=None)
    note = "Written by `docs/theory/make_figures.py`"
    (out / "ratios.md").write_text(
        f"# How far the bounds are from σ\n\n{note}: bound/σ, median and (largest) over 200 heads of width 1–8 with 2–32 "
        "tokens; random Gaussian tokens, and the tokens of `lower.groups` with R = 1.5.\n\n" + ratios() + "\n\n"
        "## Wide layers\n\nThe default certificate (`fast`: of whole layers of this width `certificates.parts` alone, "
        "without the row Gram) over σ for random layers with d = 768, 12 heads and n = 98 tokens, and for their single "
        "heads. Larger weights make attention sharper.\n\n" + wide_layers() + "\n"
    )
    (out / "grid.md").write_text(grid(note))


def grid(note: str) -> str:
    """Which bound holds where."""
    return (
        f"# Which bound holds where\n\n{note} from the decorators `@bound` in `lipscope.bounds`. A combination that is not "
        "ticked raises an error that lists those that are; `only` stands where a layer must have the feature. Key and "
        "value biases and grouped queries are always allowed; `other masks` are windows, prefixes, padding, packing, "
        "tensors and combinations.\n\n" + registry.markdown() + "\n\n"
        "The last column says which kind of attention a bound is about: `dot` is `Attention`, the others are those of "
        "`lipscope.attention.variants`, whose layers have no biases; see [variants.md](variants.md). `yudin2025.published` "
        "and `newhouse2025.attention` are stated for scores without positions; with rotary embeddings `yudin2025.improved` "
        "and `block_inf.max_token` take their places. For rotary embeddings `castin2024.meanfield` bounds σ for every n "
        "that the tables have positions for; it says nothing of measures, whose points have no positions. What A itself "
        "must have is not in the table: `lower.proposition34` needs a real eigenvalue, `large_radius.limit` a unique "
        "largest score in every row and so A ≠ 0.\n"
    )


if __name__ == "__main__":
    main()
