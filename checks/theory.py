"""Search for inputs at which a claim of lipscope is false, by code that shares nothing with what it checks.

    python checks/theory.py                               20,000 inputs and 20,000 solves; ten minutes on two idle cores
    python checks/theory.py --quick                       a twentieth of it
    python checks/theory.py --seed 0 --only layers:17     one number again, as a violation prints it
    python checks/theory.py --write docs/theory/check.md  and write the table

σ is that of a dense Jacobian (``oracle``) at random, constructed and ascended inputs (``draws``). Bounds, certificates and
both ends of every interval are held against it (``layers``), also where rounding is made to hurt (``hostile``); bounds for
every n against ascended measures (``measures``); transport distances against SciPy's linear programme (``transport``); the
probabilistic end against how often it fails (``ends``). The exit status is 1 when a claim was violated.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from draws import INPUTS
from ends import BATCH, DELTA, STRATA, check_ends, judge_ends, limits
from hostile import check_cancelling, check_hostile
from layers import check_layer
from ledger import Ledger, Row
from lipscope.bounds import registry
from measures import check_measures
from transport import check_transport

ROOT = Path(__file__).parent.parent
SHOWN = 5  # violations of one claim that are printed while searching
CHECKS: dict[str, Callable[[int, int], Ledger]] = {
    "layers": check_layer, "rounding": check_hostile, "cancelling": check_cancelling, "transport": check_transport,
    "measures": check_measures, "ends": check_ends,
}  # fmt: skip
MARKS = re.compile(r"(<!-- begin checks/theory.py -->\n).*?(<!-- end checks/theory.py -->)", re.DOTALL)


def sizes(cases: int) -> dict[str, int]:
    """Numbers of every kind for so many inputs of layers, and about as many solves."""
    rounds = max(1, math.ceil(1.25 * cases / BATCH / len(STRATA)))
    return {"layers": math.ceil(cases / INPUTS), "rounding": math.ceil(cases / 10), "cancelling": math.ceil(cases / 20),
            "transport": math.ceil(cases / 10), "measures": math.ceil(cases / 160),
            "ends": rounds * len(STRATA)}  # fmt: skip


def work(kind: str, seed: int, numbers: list[int], until: float) -> tuple[str, int, Ledger]:
    """Some numbers of one kind, as far as the time goes."""
    torch.set_num_threads(1)
    ledger, done = Ledger(), 0
    for number in numbers:
        if time.time() > until:
            break
        ledger.add(CHECKS[kind](seed, number))
        done += 1
    return kind, done, ledger


def search(counts: dict[str, int], seed: int, minutes: float, jobs: int) -> tuple[Ledger, dict[str, int]]:
    """All numbers of every kind, shared among processes; what is not begun in time is left out and said."""
    until = time.time() + 60 * minutes
    pieces = [(kind, list(range(count)[at::64])) for kind, count in counts.items() for at in range(min(64, count))]
    pieces.sort(key=lambda piece: piece[0] == "layers")  # the longest last: time that is short is short for them
    ledger, done = Ledger(), dict.fromkeys(counts, 0)

    def collect(results: Iterable[tuple[str, int, Ledger]]) -> None:
        for kind, count, found in results:
            done[kind] += count
            for name, row in found.items():
                for violation in row.violations[: max(0, SHOWN - len(ledger.row(name).violations))]:
                    print(f"VIOLATED {violation}", flush=True)
            ledger.add(found)

    if jobs == 1:
        collect(work(kind, seed, numbers, until) for kind, numbers in pieces)
    else:
        with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
            futures = [pool.submit(work, kind, seed, numbers, until) for kind, numbers in pieces]
            collect(future.result() for future in futures)
    judge_ends(ledger, f"--seed {seed}")
    return ledger, done


def number(x: float) -> str:
    """A ratio to four digits; so close to one that no digit shows, its distance."""
    if not math.isfinite(x):
        return "–"
    return f"1 {'−' if x < 1 else '+'} {abs(x - 1):.0e}" if 0 < abs(x - 1) < 1e-4 else f"{x:.4g}"


def table(title: str, rows: dict[str, Row], ratio: str) -> list[str]:
    """Rows of claims as Markdown."""
    lines = ["", f"| {title} | cases | violated | {ratio} | decided by mpmath | refused |", "|---|---|---|---|---|---|"]
    for name, row in sorted(rows.items()):
        cells = (f"{row.cases:,}", f"{len(row.violations):,}", number(row.closest), f"{row.judged:,}", f"{row.refused:,}")
        lines.append(f"| {name.partition(': ')[2] or name} | " + " | ".join(cells) + " |")
    return lines


# The tables of the page: how the names of their claims begin, a title, and what the ratio is. The first takes the rest.
TABLES = (
    ("", "upper bound", "least bound/σ"),
    ("lower.", "lower bound", "least σ reached/bound"),
    ("interval: ", "interval", "least upper end/σ"),
    ("rounding: ", "where rounding hurts", "least upper end or bound/σ"),
    ("cancelling: ", "where products of weights cancel", "least bound/σ, or σ reached/lower bound"),
    ("transport: ", "distance against the linear programme", "least ratio"),
    ("every n: ", "bound for every n, on sets of tokens", "least bound/constant found"),
    ("mean field: ", "Lipschitz constant on measures", "least bound/ratio of distances"),
)
PREFIXES = tuple(start for start, _, _ in TABLES if start)


def page(ledger: Ledger, done: dict[str, int], counts: dict[str, int], seed: int, minutes: float) -> str:
    """What was found, as Markdown."""
    rows = dict(ledger)
    inputs = rows.pop("inputs", Row()).cases
    ends = {name: rows.pop(name) for name in list(rows) if name.startswith("end: ")}
    solves, failures = (sum(getattr(row, what) for row in ends.values()) for what in ("cases", "failures"))
    broken = {name: row.violations for name, row in sorted(ledger.items()) if row.violations}
    short = [f"{done[kind]:,} of {count:,} numbers of {kind}" for kind, count in counts.items() if done[kind] < count]
    lines = [
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, commit {commit()}, seed {seed}, {minutes:.0f} minutes: "
        f"{inputs:,} inputs of {done['layers']:,} layers, {done['rounding'] + done['cancelling']:,} layers made for "
        f"rounding, {done['transport']:,} pairs of measures, {done['measures']:,} sets of tokens, {solves:,} solves. "
        f"**{sum(map(len, broken.values())):,} violations.**" + (f" Time ran out at {', '.join(short)}." if short else "")
    ]
    for name, found in broken.items():
        lines += ["", f"**{name}**: {len(found):,}, such as"]
        lines += [f"`{violation.replace('|', '/')[:400]}`" for violation in found[:2]]
    if missing := [name for name in registry.names() if name not in rows]:
        lines += ["", f"Registered, and of no layer here: {', '.join(missing)}."]
    for start, title, ratio in TABLES:
        chosen = [name for name in rows if name.startswith(start) and (start or not name.startswith(PREFIXES))]
        lines += table(title, {name: rows[name] for name in chosen}, ratio) if chosen else []
    return "\n".join([*lines, *(failing(ends, solves, failures) if ends else [])]) + "\n"


def failing(ends: dict[str, Row], solves: int, failures: int) -> list[str]:
    """How often the upper end failed, as Markdown."""
    low, high = limits(failures, solves, 0.025)
    ordered = sorted(ends.items(), key=lambda item: -item[1].failures / item[1].cases)
    rows = [(name.removeprefix("end: "), row.cases, row.failures) for name, row in ordered[:12]]
    if len(ordered) > len(rows):
        rest = [row for _, row in ordered[12:]]
        rows.append((f"the other {len(rest)} kinds", sum(row.cases for row in rest), sum(row.failures for row in rest)))
    return [
        "",
        f"The upper end at δ = {DELTA} failed in {failures:,} of {solves:,} solves, {failures / solves:.2%}: with 95 % "
        f"confidence the rate is between {low:.2%} and {high:.2%} (Clopper–Pearson). Of {len(ends)} kinds the worst are",
        "",
        "| problem | solves | failed | rate | upper limit (97.5 %) |",
        "|---|---|---|---|---|",
        *(f"| {name} | {m:,} | {k:,} | {k / m:.1%} | {limits(k, m, 0.025)[1]:.1%} |" for name, m, k in rows),
    ]


def commit() -> str:
    """The last commit that changed the source, and whether the source differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    last = git("log", "-1", "--format=%h", "--", "src") or "unknown"
    return last + (" with changes" if git("status", "--short", "src") else "")


def main() -> int:
    """Search, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=20_000, help="inputs of layers; the other searches are in proportion")
    parser.add_argument("--minutes", type=float, default=20.0, help="begin nothing new after this time")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--quick", action="store_true", help="1,000 inputs")
    parser.add_argument("--only", metavar="KIND:NUMBER", help=f"one number of {', '.join(CHECKS)}")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table between its marks in this page")
    asked = parser.parse_args()
    start = time.monotonic()
    if asked.only:
        kind, _, which = asked.only.partition(":")
        counts = done = dict.fromkeys(CHECKS, 0) | {kind: 1}
        ledger = work(kind, asked.seed, [int(which)], math.inf)[2]
        print(*(violation for row in ledger.values() for violation in row.violations), sep="\n")
    else:
        counts = sizes(1_000 if asked.quick else asked.cases)
        print(f"seed {asked.seed}: " + ", ".join(f"{count:,} {kind}" for kind, count in counts.items()), flush=True)
        ledger, done = search(counts, asked.seed, asked.minutes, asked.jobs)
    text = page(ledger, done, counts, asked.seed, (time.monotonic() - start) / 60)
    print(text)
    if asked.write:
        old = asked.write.read_text(encoding="utf-8")
        asked.write.write_text(MARKS.sub(lambda found: found[1] + text + found[2], old), encoding="utf-8")
    return int(any(row.violations for row in ledger.values()))


if __name__ == "__main__":
    sys.exit(main())
