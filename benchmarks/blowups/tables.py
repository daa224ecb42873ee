"""Which signal warns of a blow-up, how early, and which remedy saves the run: tables and figure of the recorded trainings.

    python benchmarks/blowups/tables.py [--record] [--write docs/how-to/why-did-it-blow-up.md]

A training has *blown up* at the first step at which its held-out loss is 0.3 nats above that of its healthy twin at the same
step. A signal's threshold is 1.2 times the largest value of any healthy twin of the *other* seeds; it is then tried on the
blow-ups and the twins of the seed that was left out. Everything comes from the rows that are kept in ``rows.csv``, to four
digits. With ``--record`` all trainings run first, unless build/blowups has them: half an hour on one core that is free.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from record import COLUMNS, LATER, LAYERS, OUT, REMEDIES, record_all
from trainings import CASES, STEPS

from lipscope.report.charts import Chart, Panel, Series
from lipscope.report.draw_print import draw
from lipscope.training.readings import ALARM

BLOWN, MARGIN, RECENT = 0.3, 1.2, 50
ROWS = Path(__file__).with_name("rows.csv")
# The seeds of all runs, of those with remedies, and those on whose twins the numbers of the default alarm were chosen.
SEEDS, TREATED, CHOSEN_ON = range(4), range(2), (0, 1)
LOOK = 10  # a monitor with every=100, as by default, looks at the logits at multiples of this
Run = list[dict[str, str]]
Key = tuple[str, str, int, str, int]  # case, run, seed, remedy, the first step with it
Runs = dict[Key, Run]
Curve = list[tuple[int, int | None, float]]  # step, layer, value: larger is worse
ABOUT = ("case", "run", "seed", "remedy", "first")


def recorded() -> Runs:
    """All runs of build/blowups."""
    found: Runs = {}
    for path in sorted(OUT.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        first = rows[0]
        key = first["case"], first["run"], int(first["seed"]), first["remedy"], int(first.get("first") or 1)
        found[key] = rows
    return found


def keep(runs: Runs) -> None:
    """What the tables need of all runs, to four digits, in one file: a line per run and column, a value per step."""
    with ROWS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*ABOUT, "column", "values"])
        for key, run in sorted(runs.items()):
            # Of a run with a remedy only what came of it.
            columns = [name for name in COLUMNS if name not in (*ABOUT, "step")] if not key[3] else ["held_out", "acted"]
            for name in columns:
                values = [_digits(row.get(name) or "") for row in run]
                if any(values):
                    writer.writerow([*key, name, " ".join(value or "-" for value in values)])


def _digits(value: str) -> str:
    try:
        return f"{float(value):.4g}"
    except ValueError:
        return value.replace(" ", "_")  # why a remedy was refused


def read() -> Runs:
    """All runs that are kept, by case, run, seed, remedy and its first step."""
    found: Runs = {}
    with ROWS.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            values = line["values"].split(" ")
            key = line["case"], line["run"], int(line["seed"]), line["remedy"], int(line["first"])
            run = found.setdefault(key, [{"step": str(step)} for step in range(1, len(values) + 1)])
            for row, value in zip(run, values, strict=True):
                row[line["column"]] = "" if value == "-" else value
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
    return {int(row["step"]): _finite(row["held_out"]) for row in run if row.get("held_out")}


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
                bad, twin = (runs[case, run, seed, "", 1] for run in ("blow-up", "healthy"))
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
        found = [(runs[case, "blow-up", seed, "", 1], runs[case, "healthy", seed, "", 1]) for seed in seeds]
        steps = "/".join(str(blown_up(*pair)) for pair in found)
        worst = "/".join(f"{max(held_out(bad).values()):.2f}" for bad, _ in found)
        ends = "/".join(f"{list(held_out(bad).values())[-1]:.2f}" for bad, _ in found)
        healthy = "/".join(f"{list(held_out(twin).values())[-1]:.2f}" for _, twin in found)
        rows.append([case, " ".join((make.__doc__ or "").split()), steps, worst, ends, healthy])
    return table(["case", "what is wrong", "blown up at step", "worst loss", "last loss", "last loss of the twin"], rows)


def remedies_table(runs: Runs) -> str:
    """What every remedy does to the blow-ups and to the twins, from the first step on."""
    rows = []
    for remedy in REMEDIES:
        cells, saved, tried, costs = [], 0, 0, []
        for case in CASES:
            found = []
            for seed in TREATED:
                bad, good = (runs[case, run, seed, remedy, 1] for run in ("blow-up", "healthy"))
                twin = runs[case, "healthy", seed, "", 1]
                tried += 1
                if len(good) == STEPS:
                    costs.append(last(good) - last(twin))
                found.append(outcome(bad, twin) if len(bad) == STEPS else "refused")
                saved += "saved" in found[-1]
            cells.append("/".join(found))
        cost = f"{statistics.mean(costs):+.3f} (worst {max(costs):+.3f})"
        rows.append([remedy or "none", f"{saved} of {tried}", cost if remedy else "", *cells])
    return table(["remedy", "saves", "costs the twins", *CASES], rows)


def outcome(run: Run, twin: Run) -> str:
    """By how much the last loss exceeds that of the twin, and whether the run is saved."""
    off = next((f" (off at step {row['step']})" for row in run if row.get("acted") == "-1"), "")
    return f"{last(run) - last(twin):+.2f}" + (" **saved**" if blown_up(run, twin) is None else "") + off


def later_table(runs: Runs) -> str:
    """What the remedies do to a blow-up from the step after the alarm on, where it came in time."""
    early, rows = in_time(runs, TREATED), []
    for remedy in ("", *LATER):
        found = []
        for (case, seed), at in early.items():
            run = runs[case, "blow-up", seed, remedy, at + 1 if remedy else 1]
            found.append(outcome(run, runs[case, "healthy", seed, "", 1]))
        saved = sum("saved" in cell for cell in found)
        rows.append([remedy or "none", f"{saved} of {len(found)}", *found])
    return table(["from the alarm on", "saves", *(f"{case} {seed}, step {at}" for (case, seed), at in early.items())], rows)


def last(run: Run) -> float:
    """Mean held-out loss of the last ten steps."""
    return statistics.mean(list(held_out(run).values())[-5:])


NAMES = {"max_logit": "max logit", "logit_change": "max logit, change per step"}


def thinned(run: Run, every: int) -> Run:
    """The run with readings at the first step and at multiples of ``every`` only."""
    names = [f"max_logit_{layer}" for layer in range(LAYERS)]
    kept = (row if int(row["step"]) in (1, *range(0, STEPS + 1, every)) else row | dict.fromkeys(names, "") for row in run)
    return list(kept)


def alarm_steps(
    runs: Runs, seeds: Sequence[int], which: str = "blow-up", every: int = LOOK
) -> dict[tuple[str, int], int | None]:
    """The step at which the default alarm speaks, by case and seed."""
    found = {}
    for case, seed in itertools.product(CASES, seeds):
        run = thinned(runs[case, which, seed, "", 1], every)
        seen = [at for line in ALARM if (at := crossing(NAMES[line.quantity], run, line.above or 0.0))]
        found[case, seed] = min((step for step, _ in seen), default=None)
    return found


def in_time(runs: Runs, seeds: Sequence[int], every: int = LOOK) -> dict[tuple[str, int], int]:
    """The steps at which the default alarm speaks before the loss does."""
    found = {}
    for (case, seed), at in alarm_steps(runs, seeds, every=every).items():
        when = blown_up(*(runs[case, run, seed, "", 1] for run in ("blow-up", "healthy")))
        if at is not None and when is not None and at < when:
            found[case, seed] = at
    return found


def default_alarm(runs: Runs, seeds: Sequence[int]) -> str:
    """What the alarm that a monitor has by default would have said."""

    def worth(seeds: Sequence[int], every: int) -> str:
        early = in_time(runs, seeds, every)
        ahead = [
            (blown_up(*(runs[case, run, seed, "", 1] for run in ("blow-up", "healthy"))) or STEPS) - at
            for (case, seed), at in early.items()
        ]
        missed = [case for case in CASES if any((case, seed) not in early for seed in seeds)]
        count = f"{len(early)} of {len(CASES) * len(seeds)} blow-ups, a median of {statistics.median(ahead):g} steps ahead"
        return f"{count} (late or silent, in some seed: {', '.join(missed)})"

    lines = " and ".join(line.describe() for line in ALARM)
    others = [seed for seed in seeds if seed not in CHOSEN_ON]
    spoken = sum(at is not None for at in alarm_steps(runs, seeds, "healthy", every=5).values())
    return (
        f"The default alarm ({lines}) has numbers that were rounded up from the twins of seeds "
        f"{' and '.join(map(str, CHOSEN_ON))}. With readings every 5 steps it warns there in {worth(CHOSEN_ON, 5)}; of the "
        f"seeds {' and '.join(map(str, others))}, which it did not know, in {worth(others, 5)}. It speaks in {spoken} of "
        f"the {len(CASES) * len(seeds)} healthy twins. As a monitor with `every=100` looks, every {LOOK} steps, it warns in "
        f"{worth(seeds, LOOK)}. With readings every 100 steps alone it would be {worth(seeds, 100)}."
    )


def chart(runs: Runs, case: str = "QK growth", seed: int = 0) -> Chart:
    """One blow-up: its loss, its largest logit and σ, beside the twin and the run with QK-clip."""
    bad, twin = (runs[case, run, seed, "", 1] for run in ("blow-up", "healthy"))
    curves = {"as it is": (bad, "orange", "line"), "healthy twin": (twin, "blue", "dashes")}
    losses = [
        Series(name, [*held_out(run)], [*held_out(run).values()], look, colour)
        for name, (run, colour, look) in curves.items()
    ]
    for remedy, colour in (("QKClip", "green"), ("learning rate ÷ 10", "purple")):
        loss = held_out(runs[case, "blow-up", seed, remedy, 1])
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


def tables(runs: Runs) -> dict[str, str]:
    """What the page shows, by the name of its markers."""
    verdicts = sorted((Verdict(name, runs, SEEDS) for name in SIGNALS), key=lambda v: (-len(v.warned), v.false))
    signals = table(["signal", "threshold", "warned", "late", "false alarms", *CASES], [v.row() for v in verdicts])
    return {
        "cases": cases_table(runs, SEEDS),
        "signals": f"{signals}\n\n{default_alarm(runs, SEEDS)}",
        "remedies": remedies_table(runs),
        "later": later_table(runs),
    }


def main() -> None:
    """Print the tables, and write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="run all trainings that build/blowups does not have")
    parser.add_argument("--write", type=Path, help="page whose tables and figure are written")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.record:
        record_all(len(SEEDS))
        record_all(len(TREATED), remedies=True)
        keep(recorded())
        record_all(len(TREATED), alarms=in_time(read(), TREATED))
        keep(recorded())
    runs = read()
    found = tables(runs)
    print("\n\n".join(found.values()))
    if options.write:
        for name, content in found.items():
            write(options.write, name, content)
        draw(chart(runs), options.write.parent / "blow-up.svg")


if __name__ == "__main__":
    main()
