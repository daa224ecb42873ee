"""Which signal warns of a blow-up, how early, and which remedy saves the run: tables and figure of the recorded trainings.

    python benchmarks/blowups/tables.py [--write docs/how-to/why-did-it-blow-up.md]

A training has *blown up* at the first step at which its held-out loss is 0.3 nats above that of its healthy twin at the same
step. A signal's threshold is 1.2 times the largest value of any healthy twin of the *other* seeds; it is then tried on the
blow-ups and the twins of the seed that was left out. What has not been recorded yet is recorded first: half an hour on one
core that is free.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from record import LAYERS, OUT, REMEDIES, record_all
from trainings import CASES, STEPS

from lipscope.report.charts import Chart, Panel, Series
from lipscope.report.draw_print import draw
from lipscope.training.readings import ALARM

BLOWN, MARGIN, RECENT = 0.3, 1.2, 50
Run = list[dict[str, str]]
Runs = dict[tuple[str, str, int, str], Run]
Curve = list[tuple[int, int | None, float]]  # step, layer, value: larger is worse


def read() -> Runs:
    """All runs by case, run, seed and remedy."""
    found: Runs = {}
    for path in sorted(OUT.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        first = rows[0]
        found[first["case"], first["run"], int(first["seed"]), first["remedy"]] = rows
    return found


def of_run(name: str) -> Callable[[Run], Curve]:
    """A number of the whole model."""
    return lambda run: [(int(row["step"]), None, _finite(row[name])) for row in run if row.get(name)]


def of_layers(name: str, sign: float = 1.0) -> Callable[[Run], Curve]:
    """A number of every layer."""
    return lambda run: [
        (int(row["step"]), layer, sign * _finite(value))
        for row in run for layer in range(LAYERS) if (value := row.get(f"{name}_{layer}"))
    ]  # fmt: skip


def recent(signal: Callable[[Run], Curve]) -> Callable[[Run], Curve]:
    """Times its own median over the last 50 steps, from the 20th step on."""

    def curve(run: Run) -> Curve:
        found, past = [], dict[int | None, list[tuple[int, float]]]()
        for step, layer, value in signal(run):
            before = [old for at, old in past.get(layer, []) if at >= step - RECENT]
            if step > 20 and before and statistics.median(before) > 0:
                found.append((step, layer, value / statistics.median(before)))
            past.setdefault(layer, []).append((step, value))
        return found

    return curve


def change(signal: Callable[[Run], Curve], *, times_rate: bool = False) -> Callable[[Run], Curve]:
    """By how much it grows per step between two readings, times the learning rate if asked for."""

    def curve(run: Run) -> Curve:
        rates = {int(row["step"]): float(row["rate"]) for row in run}
        found, last = [], dict[int | None, tuple[int, float]]()
        for step, layer, value in signal(run):
            if layer in last:
                at, old = last[layer]
                found.append((step, layer, (value - old) / (step - at) * (rates[step] if times_rate else 1.0)))
            last[layer] = step, value
        return found

    return curve


def _finite(value: str) -> float:
    number = float(value)
    return number if math.isfinite(number) else 1e30


LOSS, GRADIENT, LOGIT = of_run("loss"), of_run("grad_norm"), of_layers("max_logit")
SIGMA, BACKWARD = of_layers("sigma"), of_layers("backward")
SIGNALS: dict[str, Callable[[Run], Curve]] = {
    "loss": LOSS, "loss, × recent": recent(LOSS), "gradient norm": GRADIENT, "gradient norm, × recent": recent(GRADIENT),
    "max logit": LOGIT, "max logit, × recent": recent(LOGIT), "max logit, change per step": change(LOGIT),
    "max logit, change × learning rate": change(LOGIT, times_rate=True), "entropy (low)": of_layers("entropy", -1.0),
    "σ": SIGMA, "σ, × recent": recent(SIGMA), "backward bound": BACKWARD, "backward bound, × recent": recent(BACKWARD),
}  # fmt: skip


def held_out(run: Run) -> dict[int, float]:
    """The held-out loss by step."""
    return {int(row["step"]): _finite(row["held_out"]) for row in run if row["held_out"]}


def blown_up(run: Run, twin: Run) -> int | None:
    """The first step at which the held-out loss is beyond that of the twin."""
    healthy = held_out(twin)
    return next((step for step, loss in held_out(run).items() if loss > healthy[step] + BLOWN), None)


def threshold(name: str, twins: Sequence[Run]) -> float:
    """What no healthy twin reaches, with a margin; of a negative signal (entropy) nearer to zero."""
    largest = max(value for twin in twins for _, _, value in SIGNALS[name](twin))
    return largest * MARGIN if largest > 0 else largest / MARGIN


def crossing(name: str, run: Run, limit: float) -> tuple[int, int | None] | None:
    """Step and layer of the first value beyond a limit."""
    return next(((step, layer) for step, layer, value in SIGNALS[name](run) if value > limit), None)


class Verdict:
    """What one signal is worth: steps of warning of every blow-up (negative: too late; None: never), and false alarms."""

    def __init__(self, name: str, runs: Runs, seeds: Sequence[int]) -> None:
        self.name = name
        self.limit = threshold(name, [run for key, run in runs.items() if key[1] == "healthy" and not key[3]])
        self.steps: dict[tuple[str, int], int | None] = {}
        self.false = 0
        for seed in seeds:
            others = [run for key, run in runs.items() if key[1] == "healthy" and key[2] != seed and not key[3]]
            limit = threshold(name, others)
            for case in CASES:
                bad, twin = (runs[case, run, seed, ""] for run in ("blow-up", "healthy"))
                self.false += crossing(name, twin, limit) is not None
                seen, when = crossing(name, bad, limit), blown_up(bad, twin)
                self.steps[case, seed] = None if seen is None or when is None else when - seen[0]

    @property
    def warned(self) -> list[int]:
        """Steps of warning where it came in time."""
        return [steps for steps in self.steps.values() if steps is not None and steps > 0]

    def row(self) -> list[str]:
        """A line of the table."""
        early, runs = self.warned, len(self.steps)
        late = sum(steps is not None and steps <= 0 for steps in self.steps.values())
        by_case = []
        for case in CASES:
            found = [steps for (name, _), steps in self.steps.items() if name == case]
            by_case.append("/".join("–" if steps is None else str(steps) for steps in found))
        limit = f"{abs(self.limit):.3g}"
        return [self.name, limit, f"{len(early)} of {runs}", str(late), f"{self.false} of {runs}", *by_case]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def cases_table(runs: Runs, seeds: Sequence[int]) -> str:
    """What was run."""
    rows = []
    for case, make in CASES.items():
        found = [(runs[case, "blow-up", seed, ""], runs[case, "healthy", seed, ""]) for seed in seeds]
        steps = "/".join(str(blown_up(*pair)) for pair in found)
        worst = "/".join(f"{max(held_out(bad).values()):.2f}" for bad, _ in found)
        ends = "/".join(f"{list(held_out(bad).values())[-1]:.2f}" for bad, _ in found)
        healthy = "/".join(f"{list(held_out(twin).values())[-1]:.2f}" for _, twin in found)
        rows.append([case, " ".join((make.__doc__ or "").split()), steps, worst, ends, healthy])
    return table(["case", "what is wrong", "blown up at step", "worst loss", "last loss", "last loss of the twin"], rows)


def remedies_table(runs: Runs) -> str:
    """What every remedy does to the blow-ups and to the twins."""
    seeds = sorted({key[2] for key in runs if key[3]})
    rows = []
    for remedy in REMEDIES:
        cells, saved, tried, costs = [], 0, 0, []
        for case in CASES:
            for seed in seeds:
                bad, good = (runs.get((case, run, seed, remedy)) for run in ("blow-up", "healthy"))
                twin = runs[case, "healthy", seed, ""]
                if bad is None or good is None:
                    continue
                tried += 1
                if len(bad) < STEPS:
                    cells.append("refused")
                    continue
                excess = last(bad) - last(twin)
                kept = blown_up(bad, twin) is None
                saved += kept
                off = next((f" (off at step {row['step']})" for row in bad if row["acted"] == "-1"), "")
                cells.append(f"{excess:+.2f}" + (" **saved**" if kept else "") + off)
                if len(good) == STEPS:
                    costs.append(last(good) - last(twin))
        if tried:
            cost = f"{statistics.mean(costs):+.3f} (worst {max(costs):+.3f})" if costs else "–"
            rows.append([remedy or "none", f"{saved} of {tried}", cost if remedy else "", *cells])
    return table(["remedy", "saves", "costs the twins", *CASES], rows)


def last(run: Run) -> float:
    """Mean held-out loss of the last ten steps."""
    return statistics.mean(list(held_out(run).values())[-5:])


def default_alarm(runs: Runs, seeds: Sequence[int]) -> str:
    """What the alarm that a monitor has by default would have said."""
    names = {"max_logit": "max logit", "logit_change": "max logit, change per step"}
    warned, late, silent, false = [], [], [], 0
    for case in CASES:
        for seed in seeds:
            bad, twin = (runs[case, run, seed, ""] for run in ("blow-up", "healthy"))
            seen = [found for line in ALARM if (found := crossing(names[line.quantity], bad, line.above or 0.0))]
            false += any(crossing(names[line.quantity], twin, line.above or 0.0) is not None for line in ALARM)
            when = blown_up(bad, twin)
            assert when is not None, (case, seed)
            (silent if not seen else warned if min(seen)[0] < when else late).append((case, seed))
            if seen and min(seen)[0] < when:
                warned[-1] = case, when - min(seen)[0]
    lines = " and ".join(line.describe() for line in ALARM)
    steps = statistics.median(steps for _, steps in warned)
    missed = ", ".join(dict.fromkeys(case for case, _ in late + silent))
    return (
        f"The default alarm ({lines}, its numbers rounded up from this table) warns in {len(warned)} of "
        f"{len(CASES) * len(seeds)} blow-ups, a median of {steps:g} steps ahead; it comes late or not at all in: {missed}. "
        f"It speaks in {false} of the {len(CASES) * len(seeds)} healthy twins, which its numbers were chosen on."
    )


def chart(runs: Runs, case: str = "QK growth", seed: int = 0) -> Chart:
    """One blow-up: its loss, its largest logit and σ, beside the twin and the run with QK-clip."""
    bad, twin = (runs[case, run, seed, ""] for run in ("blow-up", "healthy"))
    curves = {"as it is": (bad, "orange", "line"), "healthy twin": (twin, "blue", "dashes")}
    losses = [
        Series(name, [*held_out(run)], [*held_out(run).values()], look, colour)
        for name, (run, colour, look) in curves.items()
    ]
    for remedy, colour in (("QKClip", "green"), ("learning rate ÷ 10", "purple")):
        loss = held_out(runs[case, "blow-up", seed, remedy])
        losses.append(Series(f"with {remedy}", [*loss], [*loss.values()], "dots", colour))
    panels = [Panel(losses, "step", "held-out loss", "what everybody sees")]
    for signal, label, line in (("max logit", "largest logit", ALARM[0].above), ("σ", "σ", None)):
        series = []
        for name, (run, colour, look) in curves.items():
            largest: dict[int, float] = {}
            for step, _, value in SIGNALS[signal](run):
                largest[step] = max(value, largest.get(step, 0.0))
            series.append(Series(name, [*largest], [*largest.values()], look, colour, listed=False))
        if line is not None:
            series.append(Series("the default alarm", [1, STEPS], [line, line], "dots", "grey", group="guide"))
        panels.append(Panel(series, "step", label, f"{label}, over all layers", y_log=True))
    words = (
        f"{case}: held-out loss, largest logit and σ by step. The logit of the run that blows up crosses the line of the "
        f"alarm before its loss has left that of the twin, at step {blown_up(bad, twin)}."
    )
    return Chart("blow-up", f"{case}, seed {seed}: blown up at step {blown_up(bad, twin)}", panels, words, columns=3)


def write(page: Path, name: str, content: str) -> None:
    """Put content between the markers of a page."""
    pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
    old = page.read_text(encoding="utf-8")
    if not re.search(pattern, old, flags=re.DOTALL):
        raise ValueError(f"{page} has no markers <!-- begin {name} --> … <!-- end {name} -->")
    new = re.sub(pattern, lambda found: f"{found[1]}\n{content}\n\n{found[2]}", old, flags=re.DOTALL)
    page.write_text(new, encoding="utf-8")


def main() -> None:
    """Print the tables, and write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", type=Path, help="page whose tables and figure are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record_all(seeds=2)
    record_all(seeds=1, remedies=True)
    runs = read()
    pairs = [(case, run) for case in CASES for run in ("blow-up", "healthy")]
    seeds = [seed for seed in sorted({key[2] for key in runs}) if all((*pair, seed, "") in runs for pair in pairs)]
    verdicts = sorted((Verdict(name, runs, seeds) for name in SIGNALS), key=lambda v: (-len(v.warned), v.false))
    signals = table(["signal", "threshold", "warned", "late", "false alarms", *CASES], [v.row() for v in verdicts])
    found = {
        "cases": cases_table(runs, seeds),
        "signals": f"{signals}\n\n{default_alarm(runs, seeds)}",
        "remedies": remedies_table(runs),
    }
    print("\n\n".join(found.values()))
    if options.write:
        for name, content in found.items():
            write(options.write, name, content)
        draw(chart(runs), options.write.parent / "blow-up.svg")


if __name__ == "__main__":
    main()
