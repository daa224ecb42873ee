"""The three questions of docs/performance.md, answered from the tables of docs/performance-log.md.

    python benchmarks/questions.py [--write docs/performance.md]

Measures nothing: the other benchmarks have written the log.
"""

from __future__ import annotations

import argparse
import re
import statistics
from pathlib import Path

from sections import write_section

LOG = Path(__file__).resolve().parent.parent / "docs" / "performance-log.md"


def section(script: str) -> str:
    """What a benchmark wrote into the log."""
    text = LOG.read_text(encoding="utf-8")
    return text.split(f"<!-- begin benchmarks/{script}.py -->")[1].split("<!-- end")[0]


def tables(text: str) -> list[list[dict[str, str]]]:
    """The Markdown tables of a section, row by row."""
    found: list[list[list[str]]] = []
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        found.append([[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()])
    return [[dict(zip(lines[0], line, strict=True)) for line in lines[2:]] for lines in found]


def seconds(value: float) -> str:
    """To two digits, without an exponent."""
    return f"{value:.2g}" if value < 100 else f"{round(value, -1):.0f}"


def answers() -> list[str]:
    """The page."""
    layer = tables(section("local_lipschitz"))[0]
    ours = [row for row in layer if row["method"] == "lipscope"]
    pairs = statistics.median(int(row["pairs"]) for row in ours)
    _, growth, memory = tables(section("long_context"))
    peak = {row["n"]: row["peak"] for row in memory}
    long = [row | {"whole": seconds(pairs * float(row["causal"]))} for row in growth if row["causal"]]
    passes = {row["what"]: row["forward passes"].strip("*") for row in tables(section("model_scan"))[0]}
    scan = next(value for name, value in passes.items() if "the scan" in name)
    machine = re.search(r"one machine \(([^)]*)\)", section("goals"))
    lines = [
        "# Performance",
        "",
        f"Written by `benchmarks/questions.py` from [the log](performance-log.md) of the last `make bench` on one machine "
        f"({machine.group(1) if machine else 'unknown'}). The log has every table, the goals with their verdicts, and what "
        "was tried and did not help. Seconds are those of this machine; ratios travel.",
        "",
        "## How long will my scan take?",
        "",
        f"One σ takes about {pairs:g} pairs of products with J and Jᵀ. Seconds per layer and input, for a layer of GPT-2's "
        "size (d = 768, 12 heads), causal, float32, with its interval:",
        "",
        "| tokens n | seconds per layer and input |",
        "|---|---|",
        *[f"| {row['n']} | {float(row['seconds']) / 10:.2g} |" for row in ours if row["mask"] == "causal"],
        *[f"| {row['n']} | about {row['whole']} |" for row in long],
        "",
        f"A whole scan of `smollm2-135m` at n = 2,048, all 30 layers of one input, takes as long as {scan} forward passes "
        "of the model. `lipscope sweep --dry-run` estimates a plan before it runs.",
        "",
        "## How long a sequence can I afford?",
        "",
        "Peak memory of one σ above the weights, same layer; `--memory` keeps any length within what you allow, by smaller "
        "tiles and shorter bases.",
        "",
        "| tokens n | peak memory | seconds of one σ |",
        "|---|---|---|",
        *[f"| {row['n']} | {peak[row['n']]} | about {row['whole']} |" for row in long if row["n"] in peak],
        "",
        "## How much faster is it than what I would write?",
        "",
        "Time over lipscope's, which includes an interval; the others return a bare number. Ten inputs of the same layer.",
        "",
        "| mask | n | textbook loop (jvp, vjp) | SciPy `svds` over autograd | power iteration, our products |",
        "|---|---|---|---|---|",
    ]
    for mask, n in dict.fromkeys((row["mask"], row["n"]) for row in layer):
        ratio = {row["method"]: row["ratio"] for row in layer if (row["mask"], row["n"]) == (mask, n)}
        names = ("textbook loop", "SciPy svds over autograd", "power iteration, lipscope's products")
        lines.append(f"| {mask} | {n} | " + " | ".join(ratio[name] for name in names) + " |")
    work = {row["what"]: row for row in tables(section("work_per_row"))[0]}
    now, spent = work["now over before"], work["CPU seconds"]
    lines += [
        "",
        f"Loading `gpt2-mini` with its self-tests takes {spent['loading']} s of CPU time, {now['loading']} of what it took "
        f"before the source was rearranged; one row of one layer after that {spent['one row']} s, {now['one row']} of it.",
    ]
    return lines


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="the page")
    page: Path | None = parser.parse_args().write
    lines = answers()
    print("\n".join(lines))
    if page is not None:
        write_section(page, "benchmarks/questions.py", lines)


if __name__ == "__main__":
    main()
