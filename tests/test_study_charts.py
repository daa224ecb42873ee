"""The charts of every study: both renderers draw their numbers, and the numbers are those of the study."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import lipscope
from chart_cases import assert_drawn_alike
from lipscope.models.tokens import token_view
from lipscope.report.charts import Panel
from lipscope.studies.charts import (
    comparison_chart,
    growth_chart,
    history_chart,
    plateau_chart,
    regime_chart,
    tokens_chart,
)
from lipscope.studies.mean_field.attention import MeanFieldAttention
from lipscope.studies.mean_field.measures import parse_law
from lipscope.studies.mean_field.study import convergence_study
from lipscope.studies.paper.charts import charts
from lipscope.studies.sensitivity import Sensitivity
from lipscope.studies.variants import compare, random_layer
from lipscope.studies.worst_case import growth, regime_map
from lipscope.studies.worst_case.tokens import TokenAttack, Trial
from paper_cases import CAST, text_rows
from report_cases import make_rows
from test_paper_findings import adversarial, difference, norms

EYE = torch.eye(2, dtype=torch.float64)
LAYER = lipscope.Attention(-3 * EYE, EYE, EYE, scale=1.0)


@pytest.mark.parametrize("radius", [1.2, 40.0])
def test_charts_of_an_attack(radius: float) -> None:
    study = growth(LAYER, [2, 4, 8], radius=radius, method="ascend", restarts=4, steps=3)
    chart = growth_chart(study, "worst inputs")
    assert_drawn_alike(chart)
    curves = {one.name: list(one.y) for one in chart.series}
    assert curves["worst σ found"] == [float(w.sigma.estimate) for w in study.worst]
    assert curves["upper bound: refined"] == [w.bounds["refined.unmasked"] for w in study.worst]
    (panel,) = chart.panels
    assert isinstance(panel, Panel)
    # e^{R²} lies out of sight, and is told.
    told = [one.name for one in panel.drawn if not len(one.x)]
    assert told == ([] if radius < 2 else [name for name in told if name.startswith("upper bound: paper, Theorem 3.5: ")])
    assert len(told) == (radius > 2)
    found = study.worst[-1].ascent
    assert found is not None
    steps = history_chart(found, "ascent")
    assert_drawn_alike(steps)
    assert [list(one.y) for one in steps.series] == found.history.T.tolist()


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("where", ["ball", "sphere", "ellipsoid"])
def test_map_of_a_head(mask: str, where: str) -> None:
    gains = torch.tensor([1.1, 0.7], dtype=torch.float64) if where == "ellipsoid" else torch.ones(2, dtype=torch.float64)
    on: dict[str, Any] = {"radius": 1.4} if where == "ball" else {"norm": lipscope.RMSNorm(gains, eps=0.0)}
    found = regime_map(lipscope.Attention(-EYE, EYE, EYE, scale=1.0, mask=mask), [2, 4, 8], **on, restarts=4, steps=5)
    chart = regime_chart(found, "regimes")
    assert_drawn_alike(chart)
    curves = {one.name: dict(zip(one.x, one.y, strict=True)) for one in chart.series}
    # Past both borders the lower bound no longer grows and the upper one does not leave it behind.
    assert found.here.log_plateau < math.log(found.lengths[-1])
    assert found.upper[-1] < 7 * found.lower[-1]
    for name in ("constructions", "ascent"):
        assert all(value <= curves["upper bound"][n] for n, value in curves[name].items())
    assert all(found.lower[k] <= found.lower[k + 1] for k in range(len(found.lower) - 1))
    with pytest.raises(ValueError, match="a map is of one head, got 2"):
        regime_map(lipscope.Attention(EYE, EYE, EYE, heads=2), radius=1.0)


def test_a_map_of_a_head_counts_its_output_projection() -> None:
    """Else the lower bound is 0.5 where the upper one is 0.06."""
    found = regime_map(lipscope.Attention(-EYE, EYE, EYE, out=0.01 * EYE, scale=1.0), [2], radius=1.5, restarts=1, steps=1)
    assert all(low <= high for low, high in zip(found.lower, found.upper, strict=True))


def test_chart_of_substitutions() -> None:
    trials = tuple(Trial(k // 3, k, 7 * k, 2.0, 0.1 * k, 2.0 + 0.2 * (k - 2)) for k in range(6))
    found = object.__new__(TokenAttack)
    object.__setattr__(found, "tried", trials)
    chart = tokens_chart(found, "substitutions")
    assert_drawn_alike(chart)
    assert [one.name for one in chart.series] == ["round 1: 0 of 3 raise σ", "round 2: 3 of 3 raise σ"]
    assert [y for one in chart.series for y in one.y] == [trial.sigma for trial in trials]


@pytest.mark.parametrize("law", ["ball:1", "gaussian:1"])
def test_chart_of_a_convergence_study(law: str) -> None:
    study = convergence_study(MeanFieldAttention(LAYER), parse_law(law, 2, default_size=1.0), [4, 8, 12, 16], repeats=2)
    chart = plateau_chart(study, "plateau")
    assert_drawn_alike(chart)
    medians = next(one for one in chart.series if one.name == "σ of the cloud (median)" and one.listed)
    assert list(medians.y) == study.medians("sigma")
    (bound,) = [one for one in chart.series if one.group == "bound"]
    assert list(bound.y) == ([study.bound] * 4 if math.isfinite(study.bound) else study.medians("bound"))


def test_chart_of_a_comparison() -> None:
    found = compare(random_layer(4), n=4, lengths=[2, 4, 6], inputs=1, search=1, names=["dot-product", "l2", "sigmoid"])
    chart = comparison_chart(found, "kinds")
    assert_drawn_alike(chart)
    over_n, over_radius, ranges = chart.panels
    assert isinstance(over_n, Panel)
    assert isinstance(over_radius, Panel)
    assert isinstance(ranges, Panel)
    for k, kind in enumerate(found.kinds):
        assert dict(zip(over_n.series[k].x, over_n.series[k].y, strict=True)) == kind.by_length
        assert dict(zip(over_radius.series[k].x, over_radius.series[k].y, strict=True)) == kind.by_radius
    at = {one.name: dict(zip(one.x, one.y, strict=True)) for one in ranges.series if one.listed}
    assert at["typical σ"] == {k: kind.median for k, kind in enumerate(found.kinds)}
    assert at["least bound"] == {k: kind.bounds[0].value for k, kind in enumerate(found.kinds) if kind.bounds}
    assert list(ranges.x_names) == [kind.name for kind in found.kinds]


def test_charts_of_the_paper() -> None:
    rows = text_rows("gpt2-random", 6, 0.2, 0.1, companion=(0.445, 0.25), certified=0.9) + adversarial(0.5)
    rows += norms(radius_norm=27.7, refined_global=100.0) + difference("dropout", 1.25)
    rows += text_rows("bert-random", 0, 0.2, 0.1, companion=(0.4, 0.2), certified=9.0)
    rows += text_rows("bert-random-causal", 0, 0.3, 0.1)
    bounds = {"refined": 9.0, "castin2024": 20.0, "predicted": 0.9, "log_growth": 2.5, "exponent": 2.4}
    rows += [row | {"model": "gpt2-random"} for row in adversarial(0.5, "groups", experiment="border", **bounds)]
    made = {chart.name: chart for chart in charts(rows, CAST)}
    assert made.keys() == {
        "exponents", "published", "border", "masks", "growth-random", "radius", "adversarial", "layernorm", "differences",
    }  # fmt: skip
    for chart in made.values():
        assert_drawn_alike(chart)
    sigma = [y for one in made["growth-random"].series if one.name == "σ" for y in one.y]
    drawn = [row for row in rows if row["experiment"] == "growth" and row["model"] in {m.name for m in CAST.members}]
    assert sorted(sigma) == sorted(row["estimate"] for row in drawn)
    far = [[one.name for one in panel.far] for panel in made["growth-random"].panels if isinstance(panel, Panel)]
    assert sorted(far) == [[], ["certified upper bound"]]


def test_plot_draws_every_result_alike() -> None:
    torch.manual_seed(0)
    layer, X = random_layer(8, heads=2), torch.randn(3, 6, 8)
    sigma = lipscope.local_lipschitz(layer, X)
    chart = lipscope.plot(sigma)
    assert_drawn_alike(chart)
    assert chart.series[0].y == sigma.estimate.tolist()
    assert chart.series[0].low == sigma.lower.tolist()
    assert len(lipscope.plot(lipscope.local_lipschitz(layer, X[0])).series[0].y) == 1
    table = lipscope.bounds.table(layer, X[0])
    chart = lipscope.plot(table, "bounds")
    assert_drawn_alike(chart)
    upper = next(one for one in chart.series if one.name == "upper bounds")
    assert list(upper.y) == [bound.value for bound in table.bounds if bound.side == "upper"]
    assert chart.title == "bounds"
    assert_drawn_alike(lipscope.plot(lipscope.Run(tuple(make_rows()))))
    row = {"kind": "fp8-k", "layer": 0, "predicted": 2.0, "predicted_low": 1.0, "predicted_high": 3.0, "measured": 2.5}
    damage = Sensitivity("m", "a text", "nats", (row, row | {"layer": 1, "predicted": 1.0, "predicted_low": 0.5}), 1, {})
    chart = lipscope.plot(damage)
    assert_drawn_alike(chart)
    assert list(chart.series[0].y) == [row["predicted"] for row in damage.rows]
    assert list(chart.series[1].y) == [row["measured"] for row in damage.rows]
    study = growth(LAYER, [2, 4], radius=1.2, method="construct")
    assert lipscope.plot(study, "worst").panels[0].series == growth_chart(study, "worst").panels[0].series
    regimes = regime_map(LAYER, [2, 4], radius=1.2, steps=2)
    ascended = growth(LAYER, [2, 4], radius=1.2, method="ascend", restarts=2, steps=2).worst[0].ascent
    for found in (study, regimes, ascended, *study.worst[0].built):
        assert len(repr(found)) < 1000, repr(found)
    for found in (study, regimes, ascended):
        assert len(found.to_pandas()) == len(found.to_rows()) > 1
        assert "worst σ" in found._repr_html_()
        lipscope.plot(found)
    view = token_view(lipscope.load("gpt2-mini"), "to be or not to be", 1)
    assert len(repr(view)) < 200
    assert [row["share"] for row in view.to_rows()] == view.energy.tolist()
    assert lipscope.plot(view, "shares").series[0].y == [pytest.approx(row["share"], rel=1e-4) for row in view.to_rows()]
    assert "of the worst direction on" in view._repr_html_()
    with pytest.raises(TypeError, match="no chart of a int, only of: Run, SpectralNorm, BoundTable"):
        lipscope.plot(3)
