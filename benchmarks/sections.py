"""Each benchmark owns one section of docs/performance-log.md and leaves the others alone; goals and plots are beside it."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

# What every benchmark says about its goals, collected by benchmarks/goals.py.
GOALS = Path(__file__).resolve().parent.parent / "build" / "goals"


@dataclass(frozen=True)
class Goal:
    """One case of the suite: what was asked, what was measured, and why it is missed where it is.

    A goal that is asserted fails the script that measures it and ``make bench`` when it is missed; others are reported. A
    goal whose quartiles lie on both sides of its limit is not decided by the measurement.
    """

    case: str
    goal: str
    measured: str
    met: bool
    reason: str = ""
    asserted: bool = False
    decided: bool = True

    @property
    def verdict(self) -> str:
        """``met``, ``missed``, or ``undecided`` where the scatter of the measurement straddles the limit."""
        return ("met" if self.met else "missed") if self.decided else "undecided"


def write_goals(script: str, goals: Sequence[Goal]) -> None:
    """Keep the goals of one benchmark for the table of all of them."""
    GOALS.mkdir(parents=True, exist_ok=True)
    path = GOALS / f"{Path(script).stem}.json"
    path.write_text(json.dumps([asdict(goal) for goal in goals], indent=1), encoding="utf-8")
    for goal in goals:
        verdict = goal.verdict if goal.verdict == "met" else f"{goal.verdict}: {goal.reason}"
        print(f"goal: {goal.case}: {goal.measured} (asked {goal.goal}): {verdict}", flush=True)


def failures(goals: Sequence[Goal]) -> list[str]:
    """Which asserted goals are missed, in words."""
    return [
        f"{goal.case}: {goal.measured}, asked {goal.goal} ({goal.reason})"
        for goal in goals
        if goal.asserted and not goal.met
    ]


def write_section(path: Path, script: str, lines: list[str]) -> None:
    """Replace the section of ``script``, or add it at the end.

    Args:
        path: the Markdown file; made when it is missing.
        script: the benchmark, which names the section's marks.
        lines: the new content.
    """
    begin, end = f"<!-- begin {script} -->", f"<!-- end {script} -->"
    section = "\n".join([begin, *lines, end])
    text = path.read_text(encoding="utf-8") if path.exists() else "# Performance\n"
    if begin in text and end in text:
        before, rest = text.split(begin, 1)
        text = before + section + rest.split(end, 1)[1]
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    path.write_text(text, encoding="utf-8")


def machine() -> str:
    """The machine in a few words."""
    name = platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0] if models else name
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def timed(function: Callable[[], object], repeats: int = 1) -> tuple[float, object]:
    """Best time of a few runs, and the last value."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        value = function()
        times.append(time.perf_counter() - start)
    return min(times), value


def exponent(lengths: Sequence[float], values: Sequence[float]) -> float:
    """Least-squares slope in log–log coordinates."""
    x, y = torch.tensor(lengths).double().log(), torch.tensor(values).double().log()
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum())


@dataclass(frozen=True)
class Curve:
    """One line of a plot."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    style: str = "o-"


def plot(
    page: Path | None, name: str, curves: Sequence[Curve], *, x: str, y: str, title: str, log: bool = True
) -> list[str]:
    """Draw curves into an SVG beside the page, and the lines that show it there; nothing without a page."""
    if page is None:
        return []
    import matplotlib

    matplotlib.use("svg")
    # The same data give the same file.
    matplotlib.rcParams["svg.hashsalt"] = name
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for curve in curves:
        axes.plot(curve.x, curve.y, curve.style, label=curve.label)
    axes.set(xlabel=x, ylabel=y, title=title, xscale="log" if log else "linear", yscale="log" if log else "linear")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize="small")
    folder = page.parent / "performance"
    folder.mkdir(exist_ok=True)
    figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
    pyplot.close(figure)
    return ["", f"![{title}](performance/{name}.svg)", ""]
