"""The two pages of a run, written from its rows: what was found, and how it was reproduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lipscope.report.html import Document, Section, Table
from lipscope.rounding import duration, round_up, span
from lipscope.studies.paper import analysis
from lipscope.studies.paper.analysis import FitRow, Row
from lipscope.studies.paper.cast import Cast
from lipscope.studies.paper.differences import VARIANTS
from lipscope.studies.paper.findings import findings
from lipscope.studies.paper.plan import GROWTH, NORM_SCOPES, PUBLISHED_EXPONENT, PUBLISHED_FACTOR, Settings

_PAPER = "Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024, arXiv 2312.14820"
_TOPIC_FIGURES = {
    "Growth on real text": ("growth-random", "growth-pretrained", "long-range"), "Radius against n": ("radius",),
    "The worst case": ("adversarial",), "LayerNorm": ("layernorm",),
}  # fmt: skip


def findings_page(rows: Sequence[Row], cast: Cast, about: dict[str, Any], drawn: Sequence[str]) -> Document:
    """What the rows say, by topic, with the tables behind it."""
    topics: dict[str, list[str]] = {}
    for finding in findings(rows, cast):
        topics.setdefault(finding.topic, []).append(finding.text)
    sections = [
        Section(topic, bullets=texts, figures=[name for name in _TOPIC_FIGURES.get(topic, ()) if name in drawn])
        for topic, texts in topics.items()
    ]
    sections.append(Section("Fitted exponents", table=exponent_table(analysis.fit_table(rows))))
    norms = norm_table(rows)
    if norms.rows:
        sections.append(Section("LayerNorm study", table=norms))
    lead = [f"Written by `lipscope paper --{about['mode']}` from {len(rows)} rows. Every sentence states numbers of this "
            "run, and is left out when they do not support it.", _circumstances(about)]  # fmt: skip
    return Document("How smooth is attention? What this run found", lead, sections)


def reproduction_page(rows: Sequence[Row], cast: Cast, settings: Settings, about: dict[str, Any]) -> Document:
    """What was measured, who stood in for whom, and what each difference from the published scripts does."""
    lead = [
        f"The experiments of {_PAPER}, measured again. This page was written by `lipscope paper --{about['mode']}`; do not "
        "edit it by hand.",
        _circumstances(about),
        "σ is the local Lipschitz constant ‖J(X)‖₂ at scope `attention` (all heads and W_O, without residual and "
        "normalisation) unless a scope is named. The *companion estimator* is √‖Jᵀf(X)‖, what the paper's public scripts "
        "compute; it is not σ.",
        "What was found is in `FINDINGS.md`, beside this page.",
    ]
    sections = [
        Section("What was measured", table=_measured(rows)),
        Section("Which model stood in for which", bullets=_stand_ins(rows, cast)),
        Section(
            "Differences from the published scripts",
            [
                "Each difference is measured alone, on the same inputs as the reference: the ratio is the number with the "
                "difference over the number without it. They were seen in the scripts' public revision; whether the "
                "published figures came from exactly that revision is unknown."
            ],
            [f"**{name}**: {text}. {_effect(rows, name)}" for name, text in VARIANTS.items()],
            _differences(rows),
        ),
        Section("Choices of ours", bullets=_choices(rows, settings, about)),
        Section(
            "Fitted exponents",
            [
                f"σ ≈ c·n^α with a 95 % bootstrap interval. For reference, the public repository draws {PUBLISHED_FACTOR}·n^"
                f"{PUBLISHED_EXPONENT} for random GPT-2, layer 6. The exponents of all curves are in `FINDINGS.md` and in "
                "`exponents.csv`, beside this page."
            ],
        ),
    ]
    return Document("The paper's experiments, measured again", lead, sections)


def exponent_table(fits: Sequence[FitRow]) -> Table:
    """Both estimators of a curve side by side."""
    curves = {(r.curve.model, r.curve.layer, r.curve.condition): r.curve for r in fits}
    cells = {(r.curve.model, r.curve.layer, r.curve.condition, r.estimator): r.fit for r in fits}
    rows = []
    for key, curve in curves.items():
        row = [curve.model, str(curve.layer), curve.mask, curve.condition]
        for estimator in (analysis.SIGMA, analysis.COMPANION):
            fit = cells.get((*key, estimator))
            row += ["–", "–"] if fit is None else [
                analysis.power_law(fit),
                span(fit.alpha_low, fit.alpha_high, decimals=3),
            ]  # fmt: skip
        rows.append(row)
    return Table(["model", "layer", "mask", "inputs", "σ fits", "α, 95 %", "companion fits", "α, 95 %"], rows)


def norm_table(rows: Sequence[Row]) -> Table:
    """The LayerNorm study: three scopes, radii, bounds."""
    lines = [
        [
            row.model, str(row.layer), str(row.n), *(_number(row.sigma.get(scope)) for scope in NORM_SCOPES),
            _number(row.radius), _number(row.image_radius), _bound(row.global_bound), _bound(row.published_bound),
        ]
        for row in analysis.norm_table(rows)
    ]  # fmt: skip
    header = ["model", "layer", "n", *(f"σ {scope}" for scope in NORM_SCOPES), "largest token", "image radius",
              "global bound (refined)", "global bound (paper)"]  # fmt: skip
    return Table(header, lines)


def _measured(rows: Sequence[Row]) -> Table:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["experiment"], row["model"]), []).append(row)
    lines = []
    for (experiment, model), found in groups.items():
        lengths = sorted({row["n"] for row in found})
        span = f"{lengths[0]} … {lengths[-1]} ({len(lengths)})" if len(lengths) > 1 else str(lengths[0])
        texts = sorted({str(row["text"]) for row in found if row.get("text")})
        layers = ", ".join(map(str, sorted({row["layer"] for row in found})))
        scopes = ", ".join(sorted({row["scope"] for row in found}))
        lines.append([experiment, model, layers, scopes, span, ", ".join(texts) or "constructed", str(len(found))])
    return Table(["experiment", "model", "layers", "scopes", "n", "text", "rows"], lines)


def _stand_ins(rows: Sequence[Row], cast: Cast) -> list[str]:
    sentences = []
    for member in cast.members:
        mine = [row for row in rows if row["model"] == member.name]
        if not mine:
            continue
        layers = sorted({row["layer"] for row in analysis.of(mine, GROWTH)})
        role = f"stands in for {member.stands_for}" if member.stands_for else "is measured as itself"
        notes = f" ({mine[0]['notes']})" if mine[0].get("notes") else ""
        where = f"; layers {', '.join(map(str, layers))}, its first and its middle one" if layers else ""
        sentences.append(f"`{member.name}`{notes} {role}{where}.")
    return sentences + [f"{sentence}." for sentence in cast.absent]


def _effect(rows: Sequence[Row], variant: str) -> str:
    table = [row for row in analysis.difference_table(rows) if row.variant == variant]
    if not table:
        return "Not measured in this run: no model here has it."
    parts = [f"{row.ratio:.3g} ({span(row.ratio_low, row.ratio_high, 3)}) for {row.model}" for row in table]
    return f"Ratio {'; '.join(parts)}."


def _differences(rows: Sequence[Row]) -> Table:
    lines = [
        [r.variant, r.model, str(r.layer), str(r.n), str(r.inputs), _number(r.reference), _number(r.value), _number(r.ratio),
         span(r.ratio_low, r.ratio_high, 3)]
        for r in analysis.difference_table(rows)
    ]  # fmt: skip
    header = ["difference", "model", "layer", "n", "inputs", "without", "with", "ratio", "range"]
    return Table(header, lines)


def _choices(rows: Sequence[Row], settings: Settings, about: dict[str, Any]) -> list[str]:
    found = [
        "Layers 0 and 6 of the paper's models of 12 layers are the first and the middle one; models of another depth are "
        "measured at their own first and middle layer.",
        f"Text is `{about['text']}`, cut into disjoint pieces; special tokens of a model's tokenizer count towards n.",
    ]
    short = {row["model"] for row in analysis.of(rows, GROWTH)}
    late = sorted(
        m for m in short if min(r["n"] for r in analysis.of(rows, GROWTH) if r["model"] == m) > settings.lengths[0]
    )
    if late:
        found.append(f"n = {settings.lengths[0]} leaves no room for text beside the special tokens of {', '.join(late)}.")
    found += [
        f"σ is estimated to a relative {settings.rtol:g}; its interval is at most {settings.interval:.0%} wide where the "
        f"solver converged. Certificates are computed for {settings.certificates} of {settings.inputs} inputs per length "
        f"({settings.long_inputs} inputs in the long range).",
        "Adversarial points are built from one head, before W_O, the one with the largest score gain; the paper's text does "
        "not fix the head. Models whose weights alone do not make the scores (rotary positions) have none.",
    ]
    return found


def _circumstances(about: dict[str, Any]) -> str:
    """How long it took, and how long the plain loop would have taken."""
    threads = f"{about['threads']} torch thread" + ("s" if about["threads"] > 1 else "")
    text = f"The tasks took {duration(about['measured_seconds'])} added up, each with {threads}."
    book = about.get("textbook")
    if book:
        text += (
            f" Of that, the {book['points']} values of σ on real text took {duration(book['own_seconds'])} with their upper "
            "ends. For these values alone, the textbook loop (power iteration with torch.func.jvp and vjp, one input at a "
            f"time, one thread, no upper ends) would need about {duration(book['seconds'])}, scaled up from "
            f"{book['samples']} inputs measured in this run."
        )
    return text


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _bound(value: float | None) -> str:
    return "–" if value is None else round_up(value)
