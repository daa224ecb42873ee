"""What the page shows, as plain values: words and tables for the templates, charts and cells for its script."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from lipscope.measure.atlas import standing
from lipscope.measure.columns import COLUMNS
from lipscope.report.charts import Chart
from lipscope.report.compare import Comparison, comparison_chart, comparison_sentences, comparisons
from lipscope.report.draw_page import Looks, matrix, page_chart
from lipscope.report.palette import palette
from lipscope.report.run_charts import (
    damage_chart,
    growth_chart,
    heat_map,
    layers_chart,
    scatter_charts,
    scopes_chart,
    where_chart,
)
from lipscope.report.settings import ABOUT, BOUNDS, Cell, ReportData, Setting
from lipscope.report.summary import answer, cards, exponent, exponents, sentences, tells
from lipscope.rounding import above, below, counted, enclosure, number
from lipscope.runs.fit import TOO_FEW
from lipscope.runs.run import LIVE_DOCUMENTS, LONGEST_VIEW, Row, Run, at_longest

_RANKED = 20
# Strongest pairs of tokens that a token view lists.
_PAIRS = 8
_LONGEST_LABEL = 14


class Page:
    """The page of a report: ``words`` for its templates, ``script`` for its script, which both refer to ``charts`` by name.

    ``version`` changes when the data do; a served page looks at it.
    """

    def __init__(self, data: ReportData, version: str = "") -> None:
        self.version, self.runs = version, data.runs
        self._data = data
        self._looks: Looks = []
        self.charts: dict[str, dict[str, Any]] = {}
        matched = comparisons(data)
        settings = [self._setting(index, setting) for index, setting in enumerate(data.settings)]
        self.words: dict[str, Any] = {
            "title": _title(data, matched), "settings": [words for words, _ in settings],
            "comparisons": [(one, comparison_sentences(one), self._add(f"compare-{index}", comparison_chart(one)))
                            for index, one in enumerate(matched)],
            "answers": [(setting.name if len(data.settings) > 1 else "", answer(setting)) for setting in data.settings],
            "unmatched": len(data.runs) > 1 and not matched,
            "runs": [(_run_name(run, which, data), run) for which, run in enumerate(data.runs)],
            "count": sum(len(run.rows) for run in data.runs), "columns": list(COLUMNS.items()),
        }  # fmt: skip
        self.script: dict[str, Any] = {
            "version": version, "palettes": {theme: palette(theme) for theme in ("light", "dark")}, "looks": self._looks,
            "charts": self.charts, "settings": [script for _, script in settings],
        }  # fmt: skip

    def _add(self, name: str, chart: Chart | None, caption: str = "") -> str | None:
        if chart is None:
            return None
        self.charts[name] = page_chart(chart, self._looks, caption)
        return name

    def _setting(self, index: int, setting: Setting) -> tuple[dict[str, Any], dict[str, Any]]:
        run, views = self._data.runs[setting.run], self._data.views(setting)
        numbers = {(cell.layer, cell.head): k for k, cell in enumerate(setting.cells)}
        shown = {(view["layer"], view["head"]): k for k, view in reversed(list(enumerate(views)))}
        damage = damage_chart(at_longest(setting.rows), "Predicted and measured damage")
        words = {
            "label": self._data.label(setting), "cards": cards(setting), "sentences": sentences(setting, run),
            "heat": heat_map(setting),
            "ranking": [{"cell": numbers[cell.layer, cell.head], "words": f"{cell.where}: {cell.last.sigma}"}
                        for cell in setting.ranked()[:_RANKED]],
            "charts": {"layers": self._add(f"{index}-layers", layers_chart(setting)), "scopes": self._scopes(setting),
                       "damage": self._add(f"{index}-damage", damage)},
            "why": [self._add(f"{index}-{chart.name}", chart) for chart in scatter_charts(setting)],
            "views": [self._view(f"{index}-tokens-{k}", view) | {"cell": numbers.get((view["layer"], view["head"]))}
                      for k, view in enumerate(views)],
            "views_command": _views_command(run), "scopes_command": scopes_command(setting),
        }  # fmt: skip
        script = {
            "worst": numbers[setting.worst.layer, setting.worst.head],
            "cells": [self._cell(setting, cell, shown.get((cell.layer, cell.head)), views) for cell in setting.cells],
        }
        return words, script

    def _scopes(self, setting: Setting) -> str | None:
        """The chart of scopes, which all settings of one model and text share."""
        name = f"scopes-{setting.run}-{setting.model}-{setting.text}"
        if name in self.charts:
            return name
        caption = "Intervals of all inputs; scopes are different maps, so read each on its own."
        return self._add(name, scopes_chart(self._data.beside(setting)), caption)

    def _view(self, name: str, view: Row) -> dict[str, Any]:
        words, self.charts[name] = page_view(view, self._looks)
        return words | {"chart": name}

    def _cell(self, setting: Setting, cell: Cell, view: int | None, views: Sequence[Row]) -> dict[str, Any]:
        return {
            "where": f"{cell.where[0].upper()}{cell.where[1:]}: σ ≈ {number(cell.last.median)} at n = {cell.last.n}",
            "link": f"L{cell.layer}" + ("" if cell.head is None else f"H{cell.head}"),
            "facts": cell_facts(cell), "table": cell_table(cell), "view": view,
            "chart": page_chart(growth_chart(setting, cell), self._looks),
            "tokens": [] if view is None else worst_tokens(views[view]), "at": None if view is None else views[view]["n"],
            "measure": None if view is not None else tokens_command(setting, cell),
        }  # fmt: skip


_NAMED = 3


def _title(data: ReportData, matched: Sequence[Comparison]) -> str:
    if matched:
        return " and ".join(matched[0].names)
    models = list(dict.fromkeys(str(setting.model or "this model") for setting in data.settings))
    if not models:
        return "Nothing measured yet"
    if len(models) > _NAMED:
        return f"How smooth are {len(models)} models?"
    return f"How smooth {'are' if len(models) > 1 else 'is'} {_and(models)}?"


def _and(names: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _run_name(run: Run, which: int, data: ReportData) -> str:
    names = list(dict.fromkeys(setting.name for setting in data.settings if setting.run == which))
    return _and(names) if 0 < len(names) <= _NAMED else run.name


def cell_facts(cell: Cell) -> list[list[str]]:
    """Names and values that stand beside the growth of a cell."""
    point, fit = cell.last, cell.fit
    inputs = counted(point.inputs, "input")
    facts = [["σ of all inputs", f"in {enclosure(point.lower, point.upper)}, n = {point.n}, {inputs}"]]
    if fit is not None:
        growth = f"n^{exponent(fit.alpha)}" if fit.is_decided else TOO_FEW
        growth += f", {fit.level:.0%}: {exponents(fit)}"
        facts.append(["growth", growth + (f"; AIC: {fit.better}" if tells(fit) else "")])
    facts += [[label, number(point.about[name])] for name, label in ABOUT.items() if name in point.about]
    if any(row["typical_low"] is not None for row in at_longest(cell.rows)):
        facts.append(["typical gain and stable rank", "estimated from random directions"])
    row = cell.rows[0]
    if found := standing(row["model"], row["scope"], point.n, point.lower, point.upper):
        facts.append(["in the atlas", found])
    median = "" if point.inputs == 1 else " (median)"
    for bound, (_, _, label) in BOUNDS.items():
        if (ratio := cell.over_sigma(bound)) is not None:
            facts.append([label, f"≤ {above(point.bounds[bound])}, {number(ratio)} × σ{median}"])
        elif shorter := [p for p in cell.points if bound in p.bounds]:
            why = "beyond, it would cost more than σ" if bound == "certified" else "not for all longer inputs"
            facts.append([label, f"≤ {above(shorter[-1].bounds[bound])} at n = {shorter[-1].n}; {why}"])
    return facts


def cell_table(cell: Cell) -> list[list[str]]:
    """The numbers of a growth curve, with a header."""
    names = ["n", "inputs", "lower", "median", "upper", "certificate", "refined", "paper"]
    return [names] + [
        [str(p.n), str(p.inputs), below(p.lower), number(p.median), above(p.upper)]
        + [above(p.bounds[bound]) if bound in p.bounds else "–" for bound in ("certified", "refined", "castin2024")]
        for p in cell.points
    ]


def tokens_command(setting: Setting, cell: Cell) -> str | None:
    """What measures the token view of a place; None where there is none."""
    if not setting.model or setting.scope == "model":
        return None
    place = ["--layer", str(cell.layer)]
    place += ["--head", str(cell.head)] if cell.head is not None else ["--scope", str(setting.scope)]
    n = max((p.n for p in cell.points if p.n <= LONGEST_VIEW), default=cell.points[0].n)
    kind, _, file = (setting.text or "").partition(" ")
    if kind in ("audio", "image", "features"):
        return shlex.join(["lipscope", "tokens", setting.model, *place, f"--{kind}", file or "FILE"])
    text = ["--text", setting.text] if setting.text not in (None, LIVE_DOCUMENTS) else []
    return shlex.join(["lipscope", "tokens", setting.model, *place, *text, "--n", str(n)])


def _views_command(run: Run) -> str:
    """What measures the token views of the six worst places."""
    if run.path is not None and run.tasks is not None:
        return f"lipscope sweep plan.toml --store {shlex.quote(run.path.name)}  # with views = 6 in the plan"
    return f"{run.provenance.command or 'lipscope scan … --out DIR'} --views 6"


def scopes_command(setting: Setting) -> str:
    """What measures other scopes: those that every model with blocks has."""
    kind, _, file = (setting.text or "").partition(" ")
    if kind in ("audio", "image", "features"):
        place = [f"--{kind}", file or "FILE", "--scope", "block", "--out", "DIR"]
        return shlex.join(["lipscope", "scan", setting.model or "MODEL", *place])
    words = ["lipscope", "sweep", "--model", setting.model or "MODEL", "--text", setting.text or "TEXT"]
    words += ["--lengths", ",".join(map(str, setting.lengths))]
    return shlex.join([*words, "--scope", "attention", "--scope", "attention+residual", "--scope", "block"])


def page_view(view: Row, looks: Looks | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """A stored view (``TokenView.to_dict``) as words for the template and as a chart for the script."""
    tokens, energy = list(view["tokens"]), [float(share) for share in view["energy"]]
    entries = [(v, i, j) for i, line in enumerate(view["influence"]) for j, v in enumerate(line) if i != j and v > 0]
    head = "" if view.get("head") is None else f", head {view['head']}"
    title = f"Layer {view['layer']}{head}, n = {view['n']}"
    words: dict[str, Any] = {
        "title": title,
        "sigma": f"{number(view['estimate'])} in {enclosure(view['lower'], view['upper'])}",
        "input": view.get("input"), "count": len(tokens), "most": max(energy, default=0.0) or 1.0,
        "tokens": list(zip(tokens, energy, strict=True)),
        "pairs": [
            {"i": i, "j": j, "moving": tokens[j], "moved": tokens[i], "value": number(value)}
            for value, i, j in sorted(entries, reverse=True)[:_PAIRS]
        ],
        "singular": [value for value in view["singular_values"] if value > 0],
    }  # fmt: skip
    names = [_short(token) for token in tokens]
    looks = [] if looks is None else looks
    if (where := where_chart(view)) is not None:
        words["tokens"] = []  # their places are drawn
        if not view["influence"]:
            return words, page_chart(where, looks)
    chart = {
        "title": "Influence of every token on every other", "columns": 1,
        "caption": "‖∂out_i/∂x_j‖₂: no entry is σ itself, which lies between the largest entry and the norm of the matrix.",
        "words": f"Influence matrix of {title}; strongest: "
        + "; ".join(f"token {pair['j']} on {pair['i']}: {pair['value']}" for pair in words["pairs"][:4]),
        "panels": [*(page_chart(where, looks)["panels"] if where is not None else ()),
                   matrix(view["influence"], names, names, "moving this token (x_j) …", "… moves the output here (out_i)",
                          "Influence" if where else "")],
    }  # fmt: skip
    return words, chart


def worst_tokens(view: Row, count: int = 3) -> list[list[str]]:
    """The tokens with the largest shares, and these."""
    order = sorted(range(len(view["tokens"])), key=lambda k: -view["energy"][k])[:count]
    return [[_short(view["tokens"][k]).strip() or "␣", f"{view['energy'][k]:.0%}"] for k in order]


def _short(token: str) -> str:
    return token if len(token) <= _LONGEST_LABEL else f"{token[: _LONGEST_LABEL - 1]}…"
