"""Sentences written from the rows by rules. A sentence appears only when the numbers support it, with the numbers in it.

Each rule looks at the analysis and gives no sentence, one, or several. No rule knows what the paper says should come out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from lipscope.rounding import span
from lipscope.studies.paper import analysis
from lipscope.studies.paper.analysis import COMPANION, SIGMA, Curve, FitRow, Row
from lipscope.studies.paper.cast import Cast
from lipscope.studies.paper.plan import (
    ADVERSARIAL,
    PUBLISHED_EXPONENT,
    PUBLISHED_FACTOR,
    REAL_TEXT_EXPONENT,
    WORST_CASE_EXPONENT,
)

# The public repository draws its curve for this model and layer.
PUBLISHED_MODEL, PUBLISHED_LAYER = "gpt2-random", 6
_CLOSE = 0.05


@dataclass(frozen=True)
class Finding:
    """A sentence and the topic under which it stands."""

    topic: str
    text: str


def findings(rows: Sequence[Row], cast: Cast) -> list[Finding]:
    """Every sentence that the rows support, by topic."""
    fits = analysis.fit_table(rows)
    found = [finding for rule in _RULES for finding in rule(rows, fits)]
    stand_ins = [member for member in cast.members if member.stands_for and not member.masked]
    notes = [
        f"{m.name} stands in for {m.stands_for}, which was not available; nothing here is a measurement of {m.stands_for}."
        for m in stand_ins
    ]
    return found + [Finding("Models", text) for text in (*notes, *(f"{sentence}." for sentence in cast.absent))]


def _real_text(rows: Sequence[Row], fits: Sequence[FitRow]) -> list[Finding]:
    """Does σ grow like n^{1/4} on real text?"""
    found = []
    for estimator, name in ((SIGMA, "the true σ"), (COMPANION, "the companion estimator")):
        table = [row for row in fits if row.estimator == estimator and row.curve.condition == "real text"]
        if not table:
            continue
        inside = [row for row in table if row.contains(REAL_TEXT_EXPONENT)]
        below = [row for row in table if row.fit.alpha_high < REAL_TEXT_EXPONENT]
        above = [row for row in table if row.fit.alpha_low > REAL_TEXT_EXPONENT]
        low, high = min(row.fit.alpha for row in table), max(row.fit.alpha for row in table)
        found.append(
            f"On real text, {name} fits exponents from {_two(low)} to {_two(high)} over {len(table)} layers: the 95 % "
            f"interval covers 1/4 in {len(inside)}, lies below it in {len(below)} and above it in {len(above)}."
        )
        found += [
            f"{_place(row.curve)}: {name} fits {analysis.power_law(row.fit)}, exponent between "
            f"{_ends(row.fit.alpha_low, row.fit.alpha_high, 3)}{_saturates(row)}."
            for row in table
        ]
    return [Finding("Growth on real text", text) for text in found]


def _saturates(row: FitRow) -> str:
    """A power law is not the only curve; say so where a saturating one describes the data better."""
    if row.fit.better != "saturating" or row.fit.alpha <= 0:
        return ""
    return f"; a curve that levels off at {row.fit.limit:.3g} describes it better (AIC)"


def _published_curve(rows: Sequence[Row], fits: Sequence[FitRow]) -> list[Finding]:
    """Whose curve is the one drawn in the public repository?"""
    here = {
        row.estimator: row
        for row in fits
        if row.curve.condition == "real text" and (row.curve.model, row.curve.layer) == (PUBLISHED_MODEL, PUBLISHED_LAYER)
    }
    drawn = f"{PUBLISHED_FACTOR}·n^{PUBLISHED_EXPONENT}, the curve drawn in the public repository for random GPT-2, layer 6,"
    found = []
    for estimator, name in ((COMPANION, "the companion estimator"), (SIGMA, "the true σ")):
        if estimator not in here:
            continue
        n, values = here[estimator].curve.values("estimate" if estimator == SIGMA else COMPANION)
        gaps = [abs(value / (PUBLISHED_FACTOR * k**PUBLISHED_EXPONENT) - 1) for k, value in zip(n, values, strict=True)]
        fit = here[estimator].fit
        verdict = "is followed by" if median(gaps) <= _CLOSE else "is not that of"
        found.append(
            f"{drawn} {verdict} {name} here: median distance {median(gaps):.1%}, own fit {analysis.power_law(fit)}."
        )
    if found:
        found.append("Whether the published figures came from exactly that revision of the scripts is unknown.")
    return [Finding("The published curve", text) for text in found]


def _companion(rows: Sequence[Row], fits: Sequence[FitRow]) -> list[Finding]:
    """How far is the companion estimator from σ, and in which direction?"""
    ratios = [ratio for curve in analysis.text_curves(rows) for ratio in analysis.companion_ratios(curve)]
    if not ratios:
        return []
    above, below = sum(r > 1 for r in ratios), sum(r < 1 for r in ratios)
    text = f"Over {len(ratios)} inputs the companion estimator is between {min(ratios):.2g} and {max(ratios):.2g} times σ"
    if above and below:
        text += f": above it {above} times, below it {below} times, so it is neither an upper nor a lower bound"
    elif above:
        text += ", above it every time"
    elif below:
        text += ", below it every time"
    return [Finding("The companion estimator", text + ".")]


def _worst_case(rows: Sequence[Row], fits: Sequence[FitRow]) -> list[Finding]:
    """Does σ grow like √n in the worst case?"""
    table = [row for row in fits if row.curve.experiment == ADVERSARIAL and row.estimator == SIGMA]
    found = []
    for kind in dict.fromkeys(str(row.curve.rows[0]["points"]) for row in table):
        group = [row for row in table if row.curve.rows[0]["points"] == kind]
        # These points are constructed, not drawn: there is no scatter, so closeness counts as well as the interval.
        root = [
            row for row in group
            if row.contains(WORST_CASE_EXPONENT) or abs(row.fit.alpha - WORST_CASE_EXPONENT) <= _CLOSE
        ]  # fmt: skip
        falls = [row for row in group if row.fit.alpha_high < 0]
        decay = f", and σ falls with n in {len(falls)}" if falls else ""
        found.append(
            f"Adversarial points “{kind}”: exponents from {_two(min(r.fit.alpha for r in group))} to "
            f"{_two(max(r.fit.alpha for r in group))} over {len(group)} layers and radii; within {_CLOSE:g} of 1/2, or "
            f"with an interval that covers it, in {len(root)}{decay}."
        )
        found += [
            f"{_place(row.curve)}, {row.curve.condition}: σ grows like √n, {analysis.power_law(row.fit)} with the "
            f"exponent between {_ends(row.fit.alpha_low, row.fit.alpha_high, 3)}."
            for row in root
        ]
    climbed = [row for row in rows if row.get("points") == "ascent"]
    gains = [row["estimate"] / best for row in climbed if (best := _best_built(rows, row)) is not None]
    if gains and min(gains) >= 1:
        found.append(
            f"A short gradient ascent reaches {median(gains):.2g} times the σ of the best construction in the median, "
            f"{max(gains):.2g} times at most, over {len(gains)} searches."
        )
    return [Finding("The worst case", text) for text in found]


def _best_built(rows: Sequence[Row], climbed: Row) -> float | None:
    place = ("model", "layer", "head", "n", "radius")
    values = [
        row["estimate"] for row in rows
        if row.get("experiment") == ADVERSARIAL and row["points"] != "ascent"
        and all(row[name] == climbed[name] for name in place)
    ]  # fmt: skip
    return max(values) if values else None


def _radius(rows: Sequence[Row], fits: Sequence[FitRow]) -> list[Finding]:
    """Do longer inputs hold longer tokens?"""
    found = []
    for c in analysis.radius_correlations(rows):
        sign = "grows with n" if c.low > 0 else "falls with n" if c.high < 0 else "shows no sure correlation with n"
        found.append(
            f"{c.model} layer {c.layer}: the largest token norm {sign} (r = {c.r:.2f}, between "
            f"{_ends(c.low, c.high, 2)}, {c.points} inputs)."
        )
    return [Finding("Radius against n", text) for text in found]


def _normalisation(rows: Sequence[Row], fits: Sequence[FitRow]) -> list[Finding]:
    """What do normalisation and residual do?"""
    table = analysis.norm_table(rows)
    found = []
    for model in dict.fromkeys(row.model for row in table):
        mine = [row for row in table if row.model == model]
        for scope in ("norm+attention", "attention+residual"):
            ratios = [row.sigma[scope] / row.sigma["attention"] for row in mine if scope in row.sigma]
            if ratios:
                where = "above" if min(ratios) > 1 else "below" if max(ratios) < 1 else "on both sides of"
                found.append(
                    f"{model}: σ at scope {scope} is {_span(ratios)} times σ of attention alone, "
                    f"{where} it over {len(ratios)} layers and lengths."
                )
        slack = [row.global_bound / row.sigma["attention"] for row in mine if row.global_bound is not None]
        radii = [row.image_radius for row in mine if row.image_radius is not None]
        if slack and radii and min(slack) >= 1:
            found.append(
                f"{model}: normalised tokens are never longer than {_span(radii)}, so attention has a global "
                f"constant; the proven one is {_span(slack)} times the σ measured."
            )
    return [Finding("LayerNorm", text) for text in found]


def _certificates(rows: Sequence[Row], fits: Sequence[FitRow]) -> list[Finding]:
    """Do certificates hold, and how tight are they?"""
    certified = [row for row in rows if row.get("certified") is not None]
    ratios = analysis.certificate_ratios(certified)
    if not ratios:
        return []
    broken = sum(row["certified"] < row["lower"] for row in certified)
    text = (
        f"{broken} certified upper bounds lie below a value that is attained: a fault."
        if broken
        else f"All {len(ratios)} certified upper bounds lie above the value attained; the median is {median(ratios):.3g} "
        f"times σ, the largest {max(ratios):.3g} times."
    )
    return [Finding("Certificates", text)]


def _unfinished(rows: Sequence[Row], fits: Sequence[FitRow]) -> list[Finding]:
    """Rows whose solver stopped early."""
    count = sum(row.get("converged") is False for row in rows)
    text = f"{count} of {len(rows)} rows did not reach the accuracy asked for; their intervals say so."
    return [Finding("Accuracy", text)] if count else []


_RULES: tuple[Callable[[Sequence[Row], Sequence[FitRow]], list[Finding]], ...] = (
    _real_text, _published_curve, _companion, _worst_case, _radius, _normalisation, _certificates, _unfinished,
)  # fmt: skip


def _two(value: float) -> str:
    """Two digits behind the point, and no minus sign before nothing."""
    return f"{round(value, 2) + 0.0:.2f}"


def _ends(low: float, high: float, decimals: int) -> str:
    return span(low, high, decimals=decimals, between=" and ")


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _place(curve: Curve) -> str:
    return f"{curve.model} layer {curve.layer}"
