"""What the page shows, as plain values: words and tables for the templates, charts and cells for its script."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from lipscope.measure.columns import COLUMNS
from lipscope.report.charts import (
    Chart,
    entropy_chart,
    growth_chart,
    layers_chart,
    radius_chart,
    rank_sentence,
    scopes_chart,
    sink_chart,
)
from lipscope.report.compare import Comparison, comparison_chart, comparison_sentences, comparisons
from lipscope.report.data import Cell, Point, ReportData, Setting
from lipscope.report.figures_page import Looks, page_chart
from lipscope.report.heat import heat_map
from lipscope.report.palette import palette
from lipscope.report.summary import above, below, cards, exponent, exponents, interval, listed, number, sentences, tells
from lipscope.report.token_page import page_view, worst_tokens
from lipscope.runs.run import Row, Run

_RANKED = 20
_WHY = (("radius", radius_chart, "radius_rms"), ("entropy", entropy_chart, "entropy"), ("sink", sink_chart, "sink_mass"))


class Page:
    """The page of a report.

    Args:
        data: what it shows.
        version: changes when the data do; a served page looks at it.

    Attributes:
        words: what the templates show.
        charts: static charts by their number.
        script: what the page's script works with.
    """

    def __init__(self, data: ReportData, version: str = "") -> None:
        self._data = data
        self._looks = Looks()
        self.charts: dict[str, dict[str, Any]] = {}
        matched = comparisons(data)
        title, lead = _title(data, changes=bool(matched))
        settings = [self._setting(index, setting) for index, setting in enumerate(data.settings)]
        self.words: dict[str, Any] = {
            "title": title, "lead": lead, "settings": [words for words, _ in settings],
            "comparisons": [self._comparison(index, one) for index, one in enumerate(matched)],
            "unmatched": "The two runs have no layers, scope and length in common, so nothing is compared layer by layer."
            if len(data.runs) > 1 and not matched else "",
            "runs": [_run_words(run) for run in data.runs], "count": sum(len(run.rows) for run in data.runs),
            "columns": list(COLUMNS.items()),
        }  # fmt: skip
        self.script: dict[str, Any] = {
            "version": version, "palettes": {theme: palette(theme) for theme in ("light", "dark")}, "looks": self._looks.all,
            "charts": self.charts, "settings": [script for _, script in settings],
        }  # fmt: skip

    def _add(self, name: str, chart: Chart | None, caption: str = "") -> str | None:
        if chart is None:
            return None
        self.charts[name] = page_chart(chart, self._looks) | {"caption": caption}
        return name

    def _setting(self, index: int, setting: Setting) -> tuple[dict[str, Any], dict[str, Any]]:
        run = self._data.runs[setting.run]
        heat = heat_map(setting)
        views = self._data.views(setting)
        numbers = {(cell.layer, cell.head): k for k, cell in enumerate(setting.cells)}
        why = [self._add(f"{index}-{name}", make(setting), rank_sentence(setting, column)) for name, make, column in _WHY]
        side = [s for s in self._data.settings if (s.run, s.model, s.text) == (setting.run, setting.model, setting.text)]
        scopes = f"scopes-{setting.run}-{setting.model}-{setting.text}"
        if scopes not in self.charts:
            self._add(
                scopes, scopes_chart(side), "Intervals of all inputs; scopes are different maps, so read each on its own."
            )
        rendered = []
        for k, view in enumerate(views):
            words, chart = page_view(view)
            name = f"{index}-tokens-{k}"
            self.charts[name] = chart
            rendered.append(words | {"chart": name, "cell": numbers.get((view["layer"], view["head"]))})
        shown = {(view["layer"], view["head"]): k for k, view in reversed(list(enumerate(views)))}
        words = {
            "label": self._data.label(setting), "cards": cards(setting), "sentences": sentences(setting, run), "heat": heat,
            "heat_low": number(heat.low), "heat_high": number(heat.high),
            "ranking": [{"cell": numbers[cell.layer, cell.head], "words": _rank_words(cell)}
                        for cell in setting.ranked()[:_RANKED]],
            "charts": {"layers": self._add(f"{index}-layers", layers_chart(setting)),
                       "scopes": scopes if scopes in self.charts else None},
            "why": [name for name in why if name is not None], "views": rendered,
            "views_command": _views_command(run),
            "scopes_command": _scopes_command(setting),
        }  # fmt: skip
        worst = numbers[setting.worst.layer, setting.worst.head]
        script = {
            "worst": worst,
            "cells": [
                self._cell(setting, run, cell, shown.get((cell.layer, cell.head)), views) for cell in setting.cells
            ],
        }  # fmt: skip
        return words, script

    def _cell(self, setting: Setting, run: Run, cell: Cell, view: int | None, views: Sequence[Row]) -> dict[str, Any]:
        return {
            "where": f"{cell.where[0].upper()}{cell.where[1:]}: σ ≈ {number(cell.last.median)} at n = {cell.last.n}",
            "facts": _facts(cell), "table": _table(cell), "chart": page_chart(growth_chart(setting, cell), self._looks),
            "view": view,
            "tokens": worst_tokens(views[view]) if view is not None else "Its worst tokens were not measured; to see them:",
            "measure": None if view is not None else _tokens_command(setting, cell),
        }  # fmt: skip

    def _comparison(self, index: int, comparison: Comparison) -> dict[str, Any]:
        return {
            "sentences": comparison_sentences(comparison), "n": comparison.n, "names": comparison.names,
            "chart": self._add(f"compare-{index}", comparison_chart(comparison)),
            "changes": [
                {"where": c.before.where, "a": _interval(c.a), "b": _interval(c.b), "ratio": number(c.ratio),
                 "clear": c.clear}
                for c in comparison.largest()
            ],
        }  # fmt: skip


_NAMED = 3


def _title(data: ReportData, *, changes: bool) -> tuple[str, str]:
    if changes:
        names = " and ".join(run.name for run in data.runs)
        return names, "Two runs side by side: how smooth is attention, and what changed?"
    models = list(dict.fromkeys(str(setting.model or "this model") for setting in data.settings))
    if not models:
        title = "Nothing measured yet"
    elif len(models) <= _NAMED:
        several = f"{', '.join(models[:-1])} and {models[-1]}" if len(models) > 1 else models[0]
        title = f"How smooth {'are' if len(models) > 1 else 'is'} {several}?"
    else:
        title = f"How smooth are {len(models)} models?"
    return title, "How far the output of attention can move when its input moves a little: σ, its local Lipschitz constant."


def _run_words(run: Run) -> dict[str, Any]:
    story = run.story
    facts = [("rows", str(len(run.rows))), ("lengths n", listed(sorted({row["n"] for row in run.rows})))]
    named = (
        ("models", "model"), ("texts", "text"), ("scopes", "scope"), ("masks", "mask"), ("floating type", "dtype"),
        ("upper ends", "upper_kind"), ("solver", "solver"),
    )  # fmt: skip
    for label, column in named:
        values = sorted({str(row[column]) for row in run.rows if row.get(column)})
        facts.append((label, _some(values) or "not recorded"))
    for label, numbers in (
        ("failure probability δ", story.delta),
        ("relative tolerance", story.rtol),
        ("seeds", story.seeds),
    ):
        facts.append((label, ", ".join(f"{value:g}" for value in numbers) or "not recorded"))
    for environment in story.environments[:3]:
        versions = environment.get("versions", {})
        facts.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
        cores, threads = environment.get("cores"), environment.get("threads")
        facts.append(
            ("machine", f"{environment.get('processor') or environment.get('machine')}, {cores} cores, {threads} threads")
        )
    if not story.environments:
        facts.append(("versions", "not recorded"))
    if story.created:
        facts.append(("measured", story.created.replace("T", " ").replace("+00:00", " UTC")))
    if run.tasks is not None:
        facts.append(("tasks asked for, done, failed", ", ".join(map(str, run.tasks))))
    return {"name": run.name, "facts": facts, "command": story.command, "plan": story.plan, "failures": run.failures[:50]}


def _facts(cell: Cell) -> list[list[str]]:
    point, fit = cell.last, cell.fit
    inputs = f"{point.inputs} input{'' if point.inputs == 1 else 's'}"
    facts = [["σ of all inputs", f"in {interval(point.lower, point.upper)}, n = {point.n}, {inputs}"]]
    if fit is not None:
        growth = f"n^{exponent(fit.alpha)}, {fit.level:.0%}: {exponents(fit)}"
        facts.append(["growth", growth + (f"; AIC: {fit.better}" if tells(fit) else "")])
    median = "" if point.inputs == 1 else " (median)"
    for label, value, bound in (
        ("certificate at these inputs", point.certified, "certified"),
        ("refined bound, tokens of that norm", point.refined, "refined"),
        ("paper's bound, tokens of that norm", point.paper, "castin2024"),
        ("refined bound, any input", point.refined_global, "refined_global"),
        ("paper's bound, any input", point.paper_global, "castin2024_global"),
    ):
        if value is not None and (ratio := cell.over_sigma(bound)) is not None:
            facts.append([label, f"≤ {above(value)}, {number(ratio)} × σ{median}"])
    for label, value in (
        ("token norm |x|", point.radius),
        ("attention entropy", point.entropy),
        ("on first token and sinks", point.sink_mass),
    ):
        if value is not None:
            facts.append([label, number(value)])
    return facts


def _table(cell: Cell) -> list[list[str]]:
    names = ["n", "inputs", "lower", "median", "upper", "certificate", "refined", "paper"]
    return [names] + [
        [str(p.n), str(p.inputs), below(p.lower), number(p.median), above(p.upper)]
        + ["–" if value is None else above(value) for value in (p.certified, p.refined, p.paper)]
        for p in cell.points
    ]


def _interval(point: Point) -> str:
    return f"{number(point.median)} in {interval(point.lower, point.upper)}"


def _rank_words(cell: Cell) -> str:
    return f"{cell.where}: {_interval(cell.last)}"


def _tokens_command(setting: Setting, cell: Cell) -> str | None:
    if not setting.model or setting.scope == "model":
        return None
    place = ["--layer", str(cell.layer)]
    place += ["--head", str(cell.head)] if cell.head is not None else ["--scope", str(setting.scope)]
    return shlex.join(["lipscope", "tokens", setting.model, *place, "--text", "…"])


def _views_command(run: Run) -> str:
    """What measures the token views of the six worst places."""
    if run.path is not None and run.tasks is not None:
        return f"lipscope report {shlex.quote(run.path.name)} --tokens 6"
    return f"{run.story.command or 'lipscope scan … --out DIR'} --tokens 6"


def _scopes_command(setting: Setting) -> str:
    words = ["lipscope", "sweep", "--model", setting.model or "MODEL", "--text", setting.text or "TEXT"]
    return shlex.join([*words, "--scope", "attention", "--scope", "norm+attention", "--scope", "attention+residual"])


def _some(values: Sequence[str]) -> str:
    return ", ".join(values[:6]) + (f" and {len(values) - 6} more" if len(values) > 6 else "")
