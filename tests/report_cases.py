"""Rows, runs and hostile texts for the tests of reports."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lipscope.measure.columns import COLUMNS

HOSTILE = (
    "<script>window.hacked = 1</script>",
    "</script><script>window.hacked = 1</script>",
    '<img src=x onerror="window.hacked = 1">',
    "\"'><svg onload=window.hacked=1>",
    "{{ 7 * 7 }} ${7 * 7} %{x}",
    "\u202egnirts\u202c \u200f\u200e \u2028 \u2029",
    "&lt;b&gt; &amp; <b>bold</b>",
    "x" * 10_000,
)


def make_rows(
    *, layers: int = 3, heads: int | None = 4, lengths: tuple[int, ...] = (8, 16, 32, 64), inputs: int = 2, **changes: Any
) -> list[dict[str, Any]]:
    """Rows with σ = (1 + layer)(1 + head/10)·n^0.3, a little scatter, and bounds above it."""
    return list(_rows(layers, heads, lengths, inputs, changes))


def _rows(
    layers: int, heads: int | None, lengths: tuple[int, ...], inputs: int, changes: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for layer in range(layers):
        for head in [None] if heads is None else range(heads):
            for n in lengths:
                for which in range(inputs):
                    scatter = 1 + 0.05 * math.sin(7 * layer + 3 * (head or 0) + n + 11 * which)
                    sigma = (1 + layer) * (1 + (head or 0) / 10) * n**0.3 * scatter
                    row = {
                        "model": "toy", "layer": layer, "head": head, "scope": "attention" if heads is None else "head",
                        "mask": "causal", "n": n, "input": which, "lower": 0.99 * sigma, "estimate": sigma,
                        "upper": 1.05 * sigma, "upper_kind": "probabilistic", "delta": 1e-6, "certified": 2.5 * sigma,
                        "refined": 100 * sigma, "castin2024": 300 * sigma, "refined_global": 200.0 * n**0.5 * (1 + layer),
                        "castin2024_global": 900.0 * n**0.5 * (1 + layer), "radius_max": 9.0 + layer,
                        "radius_rms": 8.0 + layer + 0.1 * which, "radius_norm": 12.0, "entropy": 3.0 - 0.2 * layer,
                        "max_logit": 4.0, "sink_mass": 0.1 * (layer + 1) + 0.01 * (head or 0), "iterations": 16,
                        "status": "converged", "converged": True, "solver": "golub_kahan", "dtype": "float32",
                        "seconds": 0.01, "notes": "",
                    }  # fmt: skip
                    yield {name: row.get(name) for name in COLUMNS} | changes


def make_view(tokens: list[str], **changes: Any) -> dict[str, Any]:
    """A token view on the given tokens: the first carries half of the worst direction."""
    n = len(tokens)
    rest = 0.5 / max(n - 1, 1)
    view = {
        "model": "toy", "text": "book", "layer": 2, "head": 3, "scope": "head", "n": n, "input": 0, "lower": 4.9,
        "estimate": 5.0, "upper": 5.1, "upper_kind": "probabilistic", "delta": 1e-6, "tokens": tokens,
        "energy": [0.5] + [rest] * (n - 1), "singular_values": [5.0, 3.0, 2.0],
        "influence": [[round(1 / (1 + abs(i - j)) + 0.1 * j, 4) for j in range(n)] for i in range(n)],
    }  # fmt: skip
    return view | changes


def write_run(
    directory: Path, rows: list[dict[str, Any]], *, views: list[dict[str, Any]] | None = None, text: str = "book"
) -> Path:
    """Files as ``lipscope scan --out`` writes them."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    run = {
        "format": 1, "command": f"lipscope scan toy --text '{text}'", "created": "2024-05-01T12:00:00+00:00",
        "about": {"model": "toy", "text": text, "seed": 3, "solver": {"rtol": 0.001, "delta": 1e-6}},
        "environment": {"versions": {"lipscope": "0.1.0", "torch": "2.6"}, "processor": "abacus", "cores": 2, "threads": 1},
    }  # fmt: skip
    (directory / "run.json").write_text(json.dumps(run), encoding="utf-8")
    (directory / "tokens.json").write_text(json.dumps(views or []), encoding="utf-8")
    return directory
