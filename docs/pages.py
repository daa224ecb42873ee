"""Write every generated page and figure anew, say which are stale, and how long each takes.

    python docs/pages.py               write those whose code has changed since they were written; minutes
    python docs/pages.py --list        only say which are stale
    python docs/pages.py --all NAME …  write these, stale or not; --long also those that take longer than ten minutes

docs/pages.json records for each what wrote it: hashes of its script and of the package's source, the hash of what was
written, and the seconds it took. A page is *stale* when the source has changed since, which may or may not change its
numbers; it is *wrong about itself* when its script has changed, or its numbers were edited by hand. tests/test_pages.py
fails for the second and only for the second (for pages that take long, only when they were edited by hand).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "docs" / "pages.json"
# What a script writes into a page that is otherwise written by hand.
MARKED = re.compile(r"<!-- (?:numbers|tables|begin)\b.*?<!-- end\b[^>]*-->", re.DOTALL)


@dataclass(frozen=True)
class Page:
    """Something a script writes.

    Attributes:
        name: how it is called on the command line.
        script: the script that writes it, from the project's root.
        writes: files, or folders of files, that it writes; of a Markdown page with markers what stands between them.
        command: how it is run; ``python SCRIPT`` by default.
        long: takes longer than ten minutes; what is older than its script is then said, but not refused.
        follows: other files that what it writes depends on beside the package.
        copies: files, or folders, to copy to where they belong afterwards.
    """

    name: str
    script: str
    writes: tuple[str, ...]
    command: tuple[str, ...] = ()
    long: bool = False
    follows: tuple[str, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()

    @property
    def words(self) -> list[str]:
        """The command to run."""
        return [sys.executable, *(self.command or (self.script,))]


def concept(name: str, *writes: str, script: str | None = None, follows: tuple[str, ...] = ()) -> Page:
    """A page of docs/concepts with its figures."""
    files = tuple(f"docs/concepts/{file}" for file in writes)
    return Page(name, script or f"docs/concepts/make_{name}.py", files, follows=("docs/concepts/drawing.py", *follows))


BENCHMARKS = ("local_lipschitz", "scan", "long_context", "model_scan", "typical_gain", "cost_model", "experiments",
              "monitor", "goals")  # fmt: skip
PAPER_FIGURES = ("exponents", "published", "border", "masks", "layernorm", "growth-random", "growth-pretrained",
                 "long-range", "radius", "adversarial", "differences")  # fmt: skip
PAGES = (
    Page("reference", "docs/make_reference.py", ("docs/reference",)),
    Page("architecture", "docs/make_architecture.py", ("docs/architecture.md", "docs/architecture.svg")),
    Page("overview", "docs/make_overview.py", ("docs/overview.svg",)),
    Page("report-picture", "docs/make_report_picture.py", ("docs/report.png",)),
    concept("certificates", "certificates.md", "certificates.svg"),
    concept("growth", "growth.md", "growth.svg"),
    concept("masks", "masks.md", "masks.svg"),
    concept("normalisation", "normalisation.md", "normalisation.svg"),
    concept("scopes", "scopes.md", "scopes.svg"),
    concept("sigma", "sigma.md", "sigma.svg"),
    concept("training", "training.md", "sigma-training.svg"),
    concept(
        "mean-field", "mean-field.md", "mean-field-constants.svg", "mean-field-plateau.svg", "mean-field-gaussian.svg",
        script="docs/concepts/make_mean_field_figures.py", follows=("docs/concepts/measure_pairs.py",),
    ),
    concept(
        "worst-case", "worst-case-numbers.md", "worst-case-n.svg", "worst-case-norm.svg",
        script="docs/concepts/make_worst_case.py", follows=("docs/concepts/say_worst_case.py",),
    ),
    Page("what-sigma-predicts", "docs/concepts/make_what_sigma_predicts.py",
         ("docs/concepts/what-sigma-predicts.md", "docs/concepts/what-sigma-predicts.svg"), long=True,
         follows=("docs/concepts/drawing.py",)),
    Page("speech", "docs/concepts/make_speech.py", ("docs/concepts/speech.md", "docs/concepts/speech.svg"), long=True,
         follows=("docs/concepts/drawing.py",)),
    Page("packing", "examples/train_packed_gpt2.py", ("docs/concepts/packing.md", "docs/concepts/packing.svg"),
         ("examples/train_packed_gpt2.py", "--out", "build/packed-gpt2", "--page", "docs/concepts/packing.md"), long=True),
    Page("atlas", "docs/concepts/make_atlas.py", ("docs/concepts/atlas.md", "src/lipscope/measure/atlas.csv"), long=True,
         follows=("docs/concepts/drawing.py",)),
    Page("bounds", "docs/theory/make_figures.py",
         ("docs/theory/grid.md", "docs/theory/ratios.md", "docs/theory/bounds-n.svg", "docs/theory/bounds-r.svg")),
    Page("ladder", "docs/theory/make_ladder.py", ("docs/theory/certificates.md", "docs/theory/ladder.svg"),
         follows=("docs/concepts/drawing.py", "docs/theory/ladder.jsonl")),
    Page("theory-mean-field", "docs/theory/make_mean_field.py",
         ("docs/theory/mean-field.md", "docs/theory/regimes-full.svg", "docs/theory/regimes-causal.svg",
          "docs/theory/in-law.svg")),
    Page("which-attention", "docs/how-to/make_which_attention.py",
         ("docs/how-to/which-attention.md", "docs/how-to/which-attention.svg", "docs/how-to/which-attention-gpt2-mini.svg")),
    Page("train-smoother", "examples/train_smooth_gpt2.py", ("docs/how-to/train-smoother.md", "docs/how-to/smooth-gpt2.svg"),
         ("examples/train_smooth_gpt2.py", "--out", "build/smooth-gpt2", "--page", "docs/how-to/train-smoother.md"),
         long=True),
    Page("why-did-it-blow-up", "benchmarks/blowups/tables.py",
         ("docs/how-to/why-did-it-blow-up.md", "docs/how-to/blow-up.svg"),
         ("benchmarks/blowups/tables.py", "--write", "docs/how-to/why-did-it-blow-up.md"),
         follows=("benchmarks/blowups/record.py", "benchmarks/blowups/trainings.py", "benchmarks/blowups/rows.csv")),
    Page("performance", "benchmarks/goals.py", ("docs/performance-log.md", "docs/performance"), ("-c",
         "import subprocess; subprocess.run(['make', 'bench'], check=True)"), long=True,
         follows=tuple(f"benchmarks/{name}.py" for name in BENCHMARKS)),
    Page("families", "checks/families.py", ("docs/families.md",), ("checks/families.py", "--write"),
         follows=("checks/architectures.py",)),
    Page("gpt2-attention", "docs/make_gpt2_attention.py", ("docs/gpt2-attention.md", "docs/gpt2-attention.svg"),
         follows=("docs/gpt2-attention.csv",)),
    Page("paper", "src/lipscope/studies/paper/pages.py",
         ("docs/FINDINGS.md", "docs/FINDINGS.csv", "docs/reproduction.md", "docs/figures"),
         ("-m", "lipscope", "paper", "--full", "--out", "build/paper"), long=True,
         follows=("src/lipscope/studies/paper/findings.py",),
         copies=(*((f"build/paper/{name}", f"docs/{name}") for name in ("FINDINGS.md", "FINDINGS.csv", "reproduction.md")),
                 *((f"build/paper/figures/{name}.png", f"docs/figures/{name}.png") for name in PAPER_FIGURES))),
)  # fmt: skip


def digest(parts: Iterable[bytes]) -> str:
    """A short hash."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big") + part)
    return found.hexdigest()[:16]


def files(path: Path) -> list[Path]:
    """The file, or all files in a folder."""
    return sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]


def written(path: Path) -> bytes:
    """What a script wrote into a file: all of it, or what stands between markers."""
    data = path.read_bytes()
    marked = MARKED.findall(data.decode("utf-8")) if path.suffix == ".md" else []
    return "\n".join(marked).encode() if marked else data


def source() -> str:
    """Hash of the package's source."""
    paths = sorted((ROOT / "src").rglob("*.py"))
    return digest(part for path in paths for part in (str(path.relative_to(ROOT)).encode(), path.read_bytes()))


def claim(page: Page) -> dict[str, Any]:
    """What a page says of itself: its script, and what is written now."""
    code = [ROOT / page.script, *(ROOT / name for name in page.follows)]
    outputs = [file for name in page.writes for file in files(ROOT / name) if file.exists()]
    return {"script": digest(path.read_bytes() for path in code), "written": digest(map(written, outputs))}


def record() -> dict[str, dict[str, Any]]:
    """What docs/pages.json has."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def wrong(page: Page) -> list[str]:
    """Why a page is not what it says it is."""
    known, now = record().get(page.name), claim(page)
    if known is None:
        return ["docs/pages.json does not know it"]
    reasons = {"written": "it was edited by hand"} | ({} if page.long else {"script": "its script is newer than it"})
    return [reason for name, reason in reasons.items() if known[name] != now[name]]


def stale(page: Page) -> bool:
    """Whether the package has changed since the page was written."""
    return record().get(page.name, {}).get("source") != source()


def write(page: Page) -> None:
    """Run the script, and record what it wrote."""
    print(f"{page.name}: {' '.join(page.words)}", flush=True)
    start = time.monotonic()
    before = source()
    subprocess.run(page.words, cwd=ROOT, check=True)
    for made, place in page.copies:
        for file in files(ROOT / made):
            if (ROOT / place).is_dir() and not (ROOT / place / file.name).exists():
                continue
            shutil.copyfile(file, ROOT / place / file.name if (ROOT / place).is_dir() else ROOT / place)
    seconds = round(time.monotonic() - start, 1)
    known = record() | {page.name: claim(page) | {"source": before, "seconds": seconds}}
    RECORD.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
    print(f"{page.name}: {seconds:g} s", flush=True)


def main() -> None:
    """Say what is stale, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these")
    parser.add_argument("--list", action="store_true", help="write nothing")
    parser.add_argument("--all", action="store_true", help="also what is not stale")
    parser.add_argument("--long", action="store_true", help="also what takes longer than ten minutes")
    asked = parser.parse_args()
    unknown = set(asked.names) - {page.name for page in PAGES}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are: {', '.join(page.name for page in PAGES)}")
    for page in PAGES:
        seconds = record().get(page.name, {}).get("seconds")
        state = "; ".join(wrong(page)) or ("stale" if stale(page) else "up to date")
        print(f"{page.name:16} {'?' if seconds is None else f'{seconds:g} s':>8}  {state}{', long' if page.long else ''}")
    for page in PAGES:
        chosen = page.name in asked.names if asked.names else asked.long or not page.long
        if not asked.list and chosen and (asked.all or stale(page) or wrong(page)):
            write(page)


if __name__ == "__main__":
    main()
