"""A token view on the page: the text with the energy of the worst direction, the influence matrix, singular values."""

from __future__ import annotations

from typing import Any

from lipscope.report.summary import interval, number
from lipscope.runs.run import Row

_PAIRS = 8
_LONGEST_LABEL = 14
_STRONG = 0.05


def page_view(view: Row) -> tuple[dict[str, Any], dict[str, Any]]:
    """A stored view (``TokenView.to_dict``) as words for the template and as a matrix for the script."""
    tokens, energy = list(view["tokens"]), [float(share) for share in view["energy"]]
    most = max(energy, default=0.0) or 1.0
    title = place_of(view)
    words: dict[str, Any] = {
        "title": title,
        "sigma": f"{number(view['estimate'])} in {interval(view['lower'], view['upper'])}",
        "words": "Share of each token in the worst direction: the stronger the colour, the more of it lies on the token. "
        f"{len(tokens)} tokens"
        + (f", input {view['input']} of this length, counted from 0." if view.get("input") is not None else "."),
        "tokens": [
            {
                "text": token, "share": f"{share:.1%}", "shade": f"{85 * share / most:.1f}", "strong": share >= _STRONG,
                "label": f"{share:.0%}" if share >= _STRONG else "",
            }
            for token, share in zip(tokens, energy, strict=True)
        ],
        "pairs": [
            {"i": i, "j": j, "moving": tokens[j], "moved": tokens[i], "value": number(value)}
            for value, i, j in _strongest(view["influence"])
        ],
        "singular": [
            {"text": number(value), "width": f"{100 * value / max(view['singular_values']):.1f}"}
            for value in view["singular_values"] if value > 0
        ],
    }  # fmt: skip
    matrix = {
        "title": "Influence of every token on every other",
        "caption": "‖∂out_i/∂x_j‖₂: no entry is σ itself, which lies between the largest entry and the norm of the matrix.",
        "words": f"Influence matrix of {title}; strongest: "
        + "; ".join(f"token {pair['j']} on {pair['i']}: {pair['value']}" for pair in words["pairs"][:4]),
        "names": [_short(token) for token in tokens], "z": view["influence"],
    }  # fmt: skip
    return words, matrix


def place_of(view: Row) -> str:
    """Where a view looks."""
    head = "" if view.get("head") is None else f", head {view['head']}"
    return f"Layer {view['layer']}{head}, n = {view['n']}"


def worst_tokens(view: Row, count: int = 3) -> list[list[str]]:
    """The tokens with the largest shares, and these."""
    order = sorted(range(len(view["tokens"])), key=lambda k: -view["energy"][k])[:count]
    return [[_short(view["tokens"][k]).strip() or "␣", f"{view['energy'][k]:.0%}"] for k in order]


def _strongest(matrix: list[list[float]]) -> list[tuple[float, int, int]]:
    entries = [(value, i, j) for i, line in enumerate(matrix) for j, value in enumerate(line) if i != j and value > 0]
    return sorted(entries, reverse=True)[:_PAIRS]


def _short(token: str) -> str:
    return token if len(token) <= _LONGEST_LABEL else f"{token[: _LONGEST_LABEL - 1]}…"
