"""The two tables of docs/how-to/check.md: leaks injected and found, architectures without a false alarm.

Also where differences begin that ``check`` calls rounding, and how large they are in float64.

python checks/isolation.py [--write docs/how-to/check.md]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lipscope
from architectures import SMALL, tiny_models
from lipscope.models import leaks
from mutants import MUTANTS, Mutant
from report_card import commit, write_between

# Hybrids that are small in all but their recurrences, which took most of the time.
RECURRENCES = {
    "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_chunk_size": 16, "linear_num_heads": 4,
    "linear_head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
}  # fmt: skip
# Those that see what others must not, by design, and why.
BY_DESIGN = {
    "bert-generation": "an encoder unless is_decoder is set",
    "convbert": "its convolutions run over padding",
    "cpmant": "the tokens of a prompt see each other",
    "mobilebert": "embeds a token with its neighbours, padding among them",
    "nystromformer": "its landmarks are means that include padding",
    "yoso": "hashes padding with the other tokens",
    "recurrent_gemma": "its recurrence runs through padding on the left",
    "rwkv": "its recurrence runs through padding on the left",
}
# Those whose configuration claims what the code does not do.
NOT_DONE = {"moshi": "sliding_window is in the configuration, and no mask applies it"}


def try_mutant(mutant: Mutant) -> tuple[bool, bool, str]:
    """Whether a leak was caught, whether in the right module, and a row of the table."""
    model, place = mutant.build()
    options = dict(mutant.options)
    model.set_attn_implementation(options.pop("attn", "eager"))  # type: ignore[operator]
    found = lipscope.check(model, n=18, **options)
    leak = next((verdict.leak for verdict in found.verdicts if verdict.claim == mutant.claim), None)
    if leak is None:
        return False, False, f"| {mutant.what} | {mutant.family} | {mutant.claim} | **missed** | | |"
    located = (leak.module or "").split(" ")[0] == place
    where = f"`{place}`" if located else f"{leak.module} instead of {place}"
    return (
        True,
        located,
        f"| {mutant.what} | {mutant.family} | {mutant.claim} | {leak.instrument} | {leak.size:.0e} | {where} |",
    )


@dataclass
class Rounded:
    """A difference that was called rounding: the first module that differs at all, and the outputs."""

    comparison: str
    begins: str
    first: float
    outputs: float
    wide: float | None  # in float64
    noise: float  # what one unit in the last place of the embedded tokens makes of the outputs

    def row(self) -> str:
        """Cells of the table."""
        wide = "" if self.wide is None else f"{self.wide:.0e}"
        sizes = f"{self.first:.0e} | {self.outputs:.0e} | {wide} | {self.noise:.0e}"
        return f"{self.comparison} | `{self.begins}` | {sizes}"


@contextmanager
def rounding_noted() -> Iterator[list[Rounded]]:
    """Inside, every comparison that is looked at twice is noted."""
    notes, compared = list[Rounded](), leaks.compared

    def noting(subject: Any, one: Any, other: Any, cut: Any, instrument: str, pick: Any) -> Any:
        found = compared(subject, one, other, cut, instrument, pick)
        rows = cut.rows(one[0])
        if one[0].dtype == torch.float64:
            if notes and notes[-1].wide is None and rows is not None:
                notes[-1].wide = leaks.apart(one[0], pick(other[0]), rows)[0]
        elif found[0] is not None and not found[1]:
            for old, new in sorted(zip(one[1], other[1], strict=False), key=lambda pair: pair[0].exit):
                rows = cut.rows(old.output)
                fits = rows is not None and new.output is not None and new.output.ndim > 1
                if fits and pick(new.output).shape == old.output.shape and bool(torch.isfinite(old.output).all()):
                    size = leaks.apart(old.output, pick(new.output), rows)[0]
                    if size > 0:
                        place = next(name for name, part in subject.model.named_modules() if part is old.module)
                        notes.append(Rounded(instrument, place, size, found[0].size, None, noise_of(subject)))
                        break
        return found

    leaks.compared = noting
    try:
        yield notes
    finally:
        leaks.compared = compared


def noise_of(subject: Any, draws: int = 8) -> float:
    """By how much outputs change when half of the embedded numbers are moved by one unit in the last place."""
    generator, output = torch.Generator().manual_seed(0), subject.seen[0].double()

    def moved(module: Any, args: Any, embedded: Tensor) -> Tensor:
        up = torch.nextafter(embedded, torch.full_like(embedded, torch.inf))
        return torch.where(torch.rand(embedded.shape, generator=generator) < 0.5, embedded, up)

    with subject.model.get_input_embeddings().register_forward_hook(moved), torch.no_grad():
        sizes = [float((subject.run().double() - output).abs().max() / output.abs().max()) for _ in range(draws)]
    return max(sizes)


def look_for_false_alarms(
    implementation: str, dtype: torch.dtype, n: int = 16
) -> tuple[Counter[str], list[str], list[str], list[str]]:
    """Counts, the architectures that passed, what was said of the others, and what was called rounding."""
    counts, passed, said, rounded = Counter[str](), list[str](), list[str](), list[str]()
    for kind, model, _ in tiny_models(implementation=implementation, dtype=dtype):
        if model is None:
            counts["not made"] += 1
            continue
        try:
            with rounding_noted() as notes:
                found = lipscope.check(model, n=n)
        except Exception as error:
            counts["did not run"] += 1
            said.append(f"{kind} did not run: {' '.join(str(error).split())[:120]}")
            continue
        said += [f"{kind}: {v.claim} not tested, {v.skipped}" for v in found.verdicts if v.held is None]
        said += [f"{kind}: {v.claim} {v.remark}" for v in found.verdicts if v.remark]
        if any("by rounding" in v.remark for v in found.verdicts):
            rounded += [f"| {kind} | {implementation}, {str(dtype)[6:]} | {note.row()} |" for note in notes]
        broken = [verdict for verdict in found.verdicts if verdict.held is False]
        if not broken:
            counts["passed" if found.held else "not tested"] += 1
            passed += [kind] if found.held else []
        elif kind in BY_DESIGN or kind in NOT_DONE:
            counts["by design" if kind in BY_DESIGN else "not done"] += 1
        else:
            counts["alarms"] += 1
            said += [f"{kind}: {verdict.claim} broken, {verdict.leak.where}" for verdict in broken if verdict.leak]
    return counts, passed, said, rounded


MOST_PASSES = 40


def count_passes(name: str = "smollm2-135m", n: int = 128) -> tuple[int, str]:
    """The passes that all claims about a model take, counted by its own calls, and a sentence for the page."""
    from lipscope.models.load import load_named

    model, calls = load_named(name).model, list[int]()
    handle = model.register_forward_hook(lambda module, args, output: calls.append(1))
    asked = {"causal": True, "documents": [n // 2, n // 4, n - n // 2 - n // 4], "padding": "left", "cache": True}
    found = lipscope.check(model, n=n, **asked)
    handle.remove()
    claims = ", ".join(f"{verdict.claim} {'held' if verdict.held else 'not held'}" for verdict in found.verdicts)
    boundaries = sum(verdict.boundaries for verdict in found.verdicts)
    said = f"`{name}`, n = {n}, all claims ({claims}): **{len(calls)} forward passes** of at most four sequences"
    return len(
        calls
    ), f"{said} (at most {MOST_PASSES} allowed) and {found.backward_passes} backward ones, {boundaries} boundaries."


def alarm_lines(rows: list[str], remarks: list[str], rounded: list[str]) -> list[str]:
    """The table of architectures, with what was said of them."""
    head = "| path | passed | see it by design | claim what they do not do | alarms | not tested | did not run | not made |"
    lines = [head, "|---|---|---|---|---|---|---|---|", *rows, ""]
    for title, listed in (("By design", BY_DESIGN), ("Claimed and not done", NOT_DONE)):
        lines += [f"{title}: {'; '.join(f'{kind} ({why})' for kind, why in listed.items())}.", ""]
    lines += [*remarks, "", "Differences that were called rounding, relative to the largest number of the same tensor:", ""]
    lines += ["| architecture | path | comparison | begins in | there | outputs | in float64 | one unit on the embeddings |"]
    return [*lines, "|---|---|---|---|---|---|---|---|", *rounded, ""]


def main() -> int:
    """Make both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    SMALL.update(RECURRENCES)
    tried = [try_mutant(mutant) for mutant in MUTANTS]
    caught, located = (sum(row[i] for row in tried) for i in (0, 1))
    families = len({mutant.family for mutant in MUTANTS})
    lines = [f"Commit `{commit()}`, transformers {transformers.__version__}.", ""]
    passes, said = count_passes()
    print(said, flush=True)
    lines += [said, "", f"**{len(MUTANTS)} leaks in {families} families: {caught} caught, {located} located.**", ""]
    lines += [
        "| leak | family | claim | seen by | size | found in |",
        "|---|---|---|---|---|---|",
        *(row[2] for row in tried),
        "",
    ]
    alarms = 0
    rows, names, remarks, called_rounding = [], set[str](), list[str](), list[str]()
    for implementation in ("eager", "sdpa"):
        for dtype in (torch.float32, torch.bfloat16):
            counts, passed, said, rounded = look_for_false_alarms(implementation, dtype)
            alarms += counts["alarms"]
            called_rounding += rounded
            columns = ("passed", "by design", "not done", "alarms", "not tested", "did not run", "not made")
            cells = (counts[name] for name in columns)
            rows.append(f"| {implementation}, {str(dtype)[6:]} | " + " | ".join(map(str, cells)) + " |")
            names |= {*passed}
            remarks += [f"- {implementation}, {str(dtype)[6:]}: {line}" for line in said]
            print(rows[-1], flush=True)
            if asked.write:  # after every path, so that a run that is ended leaves what it found
                more = [
                    *alarm_lines(rows, remarks, called_rounding),
                    f"Passed in at least one path: {', '.join(sorted(names))}.",
                ]
                write_between(asked.write, "checks/isolation.py", [*lines, *more])
    print(f"{caught} of {len(MUTANTS)} caught, {located} located, {alarms} alarms")
    return 0 if caught == located == len(MUTANTS) and not alarms and passes <= MOST_PASSES else 1


if __name__ == "__main__":
    sys.exit(main())
