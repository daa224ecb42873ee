"""Measure σ of a GPT-2-shaped attention layer (d = 768, 12 heads, random weights) against sequence length.

A causal and an unmasked layer, several lengths, a few inputs each; prints a table and writes every row as CSV.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import lipscope
from lipscope.rounding import round_down, round_up

WIDTH, HEADS, INPUTS = 768, 12, 4
LENGTHS = (8, 16, 32, 64, 128, 256)


def gpt2_shaped_layer(seed: int) -> lipscope.Attention:
    """Random weights at GPT-2's shape, sharper than its initialisation so that attention is not uniform."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(3 * WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    qkv[: 2 * WIDTH] *= 1.5
    out = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    return lipscope.Attention.from_fused(qkv, out, heads=HEADS)


def main() -> None:
    """Run the demonstration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="folder for sigma.csv")
    folder: Path = parser.parse_args().out
    console = Console()
    layer = gpt2_shaped_layer(seed=0)
    generator = torch.Generator().manual_seed(1)
    tokens = {n: torch.randn(INPUTS, n, WIDTH, generator=generator) for n in LENGTHS}

    rows = []
    jobs = [(mask, n) for mask in ("full", "causal") for n in LENGTHS]
    for mask, n in track(jobs, description="measuring σ", console=console):
        rows += lipscope.local_lipschitz(layer, tokens[n], mask=mask).to_rows()

    table = Table(title="σ of a GPT-2-shaped attention layer, random weights, worst of 4 inputs", title_justify="left")
    for name in ("mask", "n", "lower", "estimate", "upper", "steps"):
        table.add_column(name, justify="left" if name == "mask" else "right")
    for mask, n in jobs:
        worst = max((row for row in rows if (row["mask"], row["n"]) == (mask, n)), key=lambda row: row["estimate"])
        ends = round_down(worst["lower"], decimals=4), round_up(worst["upper"], decimals=4)
        table.add_row(mask, str(n), ends[0], f"{worst['estimate']:.4f}", ends[1], str(worst["iterations"]))
    console.print(table)

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sigma.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    console.print(f"All {len(rows)} measurements: {path.resolve()}")


if __name__ == "__main__":
    main()
