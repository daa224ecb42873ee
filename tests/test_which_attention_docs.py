"""What docs/how-to/which-attention.md and train-smoother.md say in words is what their tables have."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "docs" / "how-to"
PAGE = (FOLDER / "which-attention.md").read_text(encoding="utf-8")


def table(page: str, name: str) -> list[dict[str, str]]:
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", page, flags=re.DOTALL)
    assert found is not None
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def numbers(rows: list[dict[str, str]], column: str) -> dict[str, float]:
    return {row["attention"]: float(row[column].split()[0]) for row in rows}


def test_typical_tokens_and_growth():
    rows = table(PAGE, "random")
    sigma = numbers(rows, "σ, median")
    assert sorted(sigma, key=sigma.__getitem__)[:3] in (["l2", "sinkhorn", "1/d-scaled"], ["l2", "1/d-scaled", "sinkhorn"])
    assert all(value > sigma["dot-product"] / 2 for name, value in sigma.items() if name != "l2")
    in_R, in_n = numbers(rows, "exponent in R"), numbers(rows, "exponent in n")
    assert in_R["dot-product"] > 0.5
    assert abs(in_R["qk-norm"]) < 0.05
    assert abs(in_R["cosine"] + 1) < 0.1
    assert all(abs(value) < 0.1 for name, value in in_n.items() if name != "sigmoid")
    assert in_n["sigmoid"] > 0.1
    trained = numbers(table(PAGE, "gpt2-mini"), "exponent in n")
    assert max(trained.values()) > 0.3


def test_worst_cases_and_bounds():
    rows = table(PAGE, "random")
    worst, bound = numbers(rows, "worst σ found"), numbers(rows, "least bound")
    order = sorted(worst, key=worst.__getitem__)
    assert set(order[:3]) == {"1/d-scaled", "sinkhorn", "l2"}
    assert set(order[-2:]) == {"qk-norm", "cosine"}
    assert all(worst[name] <= bound[name] for name in worst)
    for some in (rows, table(PAGE, "gpt2-mini")):
        sigma, in_R = numbers(some, "σ, median"), numbers(some, "exponent in R")
        assert abs(sigma["soft-capped"] / sigma["dot-product"] - 1) < 0.01
        assert 0 < in_R["dot-product"] - in_R["soft-capped"] < 0.1
    assert worst["soft-capped"] >= 0.99 * worst["dot-product"]
    ratios = {row["bound"].strip("`"): float(row["bound / worst σ found"]) for row in table(PAGE, "bounds")
              if row["attention"] == "cosine"}  # fmt: skip
    assert ratios["qi2023.scsa"] > 1000
    assert ratios["nair2025.scsa"] > 1000
    assert 10 < ratios["bounded_scores.softmax"] < 100


def test_what_the_penalty_did():
    page = (FOLDER / "train-smoother.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- tables -->\n(.*?)<!-- /tables -->", page, flags=re.DOTALL)
    assert found is not None
    losses, layers = found[1].strip().split("\n\n")

    def cells(text: str) -> list[list[str]]:
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]

    plain, smooth = cells(losses)
    assert all(abs(float(plain[k]) - float(smooth[k])) < 0.01 for k in (2, 3))
    assert 2.5 < float(smooth[4]) < 3.5
    rows = cells(layers)
    factors = [float(row[3]) for row in rows if row[0] == "spectral"]
    assert min(factors) == factors[0] > 1
    assert all(factor > 3 for factor in factors[1:])
    exponents = {(row[0], row[1]): float(row[4].split()[0]) for row in rows}
    assert all(exponents["spectral", layer] < exponents["none", layer] for layer in ("1", "2"))
