"""Cheap checks of what pages say beyond their examples: ``make lint`` runs them, in well under a second.

    python docs/check_pages.py

Every function is a check; what it finds wrong is printed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "concepts"))

from say_worst_case import said

ROOT = Path(__file__).parent.parent


def read(path: str) -> str:
    """The text of a file of the project."""
    return (ROOT / path).read_text(encoding="utf-8")


def fenced(page: str, language: str) -> list[str]:
    """Blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL)


def marked(page: str, begin: str, end: str) -> str:
    """What stands between two markers."""
    return page.split(begin, 1)[1].split(end, 1)[0]


def table(text: str) -> list[dict[str, str]]:
    """Rows of the first Markdown table by column."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def numbers(rows: list[dict[str, str]], column: str) -> dict[str, float]:
    """A column by kind of attention."""
    return {row["attention"]: float(row[column].split()[0]) for row in rows}


def readme() -> Iterator[str]:
    """A short example with its output, commands that exist, the paper, and links that lead somewhere."""
    page, makefile = read("README.md"), read("Makefile")
    if len([line for line in fenced(page, "python")[0].splitlines() if line]) > 10:
        yield "the Python example has more than ten lines"
    if "σ ∈ [" not in fenced(page, "text")[0]:
        yield "the Python example does not show its interval"
    for line in fenced(page, "sh")[0].splitlines():
        if not re.search(rf"^{line.split()[1]}:", makefile, flags=re.MULTILINE):
            yield f"the Makefile has no target for `{line}`"
    entry = "".join(fenced(page, "bibtex"))
    for word in ("How Smooth Is Attention?", "Castin", "Ablin", "Peyr", "Conference on Machine Learning", "2024"):
        if word not in entry:
            yield f"the paper's entry lacks {word}"
    for target in re.findall(r"\]\(([^)#]+)", page):
        if "://" not in target and not (ROOT / target).exists():
            yield f"{target} does not exist"


def benchmarks() -> Iterator[str]:
    """Those that ``make bench`` runs leave goals, but for the experiments, which compare, and the tables made of them."""
    suite = marked(read("Makefile"), "bench:", "\n\n")
    names = [line.split("benchmarks/")[1].split(".py")[0] for line in suite.splitlines() if "benchmarks/" in line]
    for name in names[:-2]:
        if name != "experiments" and "write_goals(" not in read(f"benchmarks/{name}.py"):
            yield f"benchmarks/{name}.py leaves no goals"
        if name != "experiments" and f'"{name}"' not in read("benchmarks/goals.py"):
            yield f"goals.py does not know {name}.py"
    if names[-2:] != ["goals", "questions"]:
        yield "goals.py and questions.py are not the last steps"


def mean_field() -> Iterator[str]:
    """Every figure is there and every table is filled."""
    page = read("docs/concepts/mean-field.md")
    for name in re.findall(r"\]\((mean-field-\w+\.svg)\)", page):
        if not (ROOT / "docs" / "concepts" / name).is_file():
            yield f"{name} does not exist"
    found = dict(re.findall(r"<!-- numbers: (\w+) -->\n(.*?)<!-- end -->", page, flags=re.DOTALL))
    for name in ("constants", "pairs", "plateau", "cesaro", "gaussian"):
        if found.get(name, "").count("\n|") < 3:
            yield f"the table {name} is empty"


def worst_case() -> Iterator[str]:
    """Sentences are those of the tables."""
    page = read("docs/concepts/worst-case.md")
    if said(page, read("docs/concepts/worst-case-numbers.md")) != page:
        yield "its sentences are not those of its numbers; run docs/concepts/say_worst_case.py"


def which_attention() -> Iterator[str]:
    """What is said of the kinds of attention holds in the tables."""
    page = read("docs/how-to/which-attention.md")
    random, mini, bounds = (table(marked(page, f"<!-- {name} -->", "<!-- /")) for name in ("random", "gpt2-mini", "bounds"))
    sigma, worst, bound = (numbers(random, name) for name in ("σ, median", "worst σ found", "least bound"))
    in_R, in_n = numbers(random, "exponent in R"), numbers(random, "exponent in n")
    of_cosine = {
        row["bound"].strip("`"): float(row["bound / worst σ found"]) for row in bounds if row["attention"] == "cosine"
    }
    by_sigma, by_worst = sorted(sigma, key=sigma.__getitem__), sorted(worst, key=worst.__getitem__)
    smooth = {"l2", "sinkhorn", "1/d-scaled"}
    claims = {
        "l2 has the least σ, then 1/d-scaled and sinkhorn": by_sigma[0] == "l2" and {*by_sigma[:3]} == smooth,
        "no σ but that of l2 is below half of dot-product's": all(
            sigma[k] > sigma["dot-product"] / 2 for k in {*sigma} - {"l2"}
        ),
        "dot-product grows with R": in_R["dot-product"] > 0.5,
        "qk-norm does not depend on R": abs(in_R["qk-norm"]) < 0.05,
        "cosine falls like 1/R": abs(in_R["cosine"] + 1) < 0.1,
        "only sigmoid grows with n": all((in_n[k] > 0.1) if k == "sigmoid" else abs(in_n[k]) < 0.1 for k in in_n),
        "with trained weights some grow with n": max(numbers(mini, "exponent in n").values()) > 0.3,
        "the same three have the least worst cases": {*by_worst[:3]} == smooth,
        "qk-norm and cosine have the largest": {*by_worst[-2:]} == {"qk-norm", "cosine"},
        "no worst case exceeds its bound": all(worst[k] <= bound[k] for k in worst),
        "a soft-cap lowers no worst case": worst["soft-capped"] >= 0.99 * worst["dot-product"],
        "two bounds of cosine are a thousand times too large": min(of_cosine[k] for k in ("qi2023.scsa", "nair2025.scsa"))
        > 1000,
        "the third is not": 10 < of_cosine["bounded_scores.softmax"] < 100,
    }
    for rows in (random, mini):
        size, growth = numbers(rows, "σ, median"), numbers(rows, "exponent in R")
        claims["a soft-cap hardly changes σ of typical tokens"] = abs(size["soft-capped"] / size["dot-product"] - 1) < 0.01
        claims["and its growth a little"] = 0 < growth["dot-product"] - growth["soft-capped"] < 0.1
        yield from (claim for claim, holds in claims.items() if not holds)


def train_smoother() -> Iterator[str]:
    """What is said of the penalty holds in the tables."""
    losses, layers = marked(read("docs/how-to/train-smoother.md"), "<!-- tables -->\n", "<!-- /").strip().split("\n\n")
    plain, smooth = ([cell.strip() for cell in line.strip("|").split("|")] for line in losses.splitlines()[2:])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in layers.splitlines()[2:]]
    factors = [float(row[3]) for row in rows if row[0] == "spectral"]
    slope = {(row[0], row[1]): float(row[4].split()[0]) for row in rows}
    claims = {
        "the loss stays within 0.01": all(abs(float(plain[k]) - float(smooth[k])) < 0.01 for k in (2, 3)),
        "a step takes about three times as long": 2.5 < float(smooth[4]) < 3.5,
        "σ falls everywhere, least in the first layer": min(factors) == factors[0] > 1,
        "and by more than 3 in the others": min(factors[1:]) > 3,
        "it grows more slowly with n there": all(slope["spectral", layer] < slope["none", layer] for layer in ("1", "2")),
    }
    yield from (claim for claim, holds in claims.items() if not holds)


CHECKS = (readme, benchmarks, mean_field, worst_case, which_attention, train_smoother)


def main() -> None:
    """Print what is wrong."""
    wrong = [f"{check.__name__}: {complaint}" for check in CHECKS for complaint in check()]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
