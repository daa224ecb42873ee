"""The two pages of a run, from its rows: what was found, and how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lipscope.report.charts import Chart
from lipscope.report.html import Document, Section, Table
from lipscope.rounding import counted, duration, span
from lipscope.studies.paper import analysis
from lipscope.studies.paper.analysis import SIGMA, UNDECIDED, Row
from lipscope.studies.paper.cast import Cast
from lipscope.studies.paper.differences import VARIANTS
from lipscope.studies.paper.findings import CLOSE, LIKE_ROOT, MASKS, NORM, SCRIPTS, TEXT, WORST, at_radii, findings
from lipscope.studies.paper.plan import DIFFERENCES, GROWTH, LONG, SECOND, Settings

PAPER = "*How Smooth Is Attention?* (Castin, Ablin, Peyré, ICML 2024)"
# One figure a topic; the others are in the directory of figures.
FIGURES = {TEXT: "exponents", SCRIPTS: "published", WORST: "border", MASKS: "masks", NORM: "layernorm"}


def findings_page(rows: Sequence[Row], cast: Cast, about: dict[str, Any], drawn: Sequence[Chart]) -> Document:
    """What the rows say, in the order in which one asks."""
    words = {chart.name: chart.words for chart in drawn}
    sections = [
        Section(topic, texts, figures={name: words[name] for name in (FIGURES.get(topic),) if name in words})
        for topic, texts in findings(analysis.every_number(rows), cast).items()
    ]
    lengths = [row["n"] for row in analysis.of(rows, GROWTH)]
    reach = f" ({min(lengths)} … {max(lengths)} tokens on real text)" if lengths else ""
    lead = [
        f"The experiments of {PAPER}, measured again. σ is the local Lipschitz constant of an attention layer at an input: "
        "how many times larger a small change of the tokens can come out. The paper proves that it grows with the number n "
        "of tokens like √n at most, and reports about n^¼ on real text.",
        f"Growth is told by the exponent α of σ ≈ c·n^α over the lengths measured{reach}. A claim needs a 95 % interval no "
        f"wider than {analysis.WIDEST:g}, which covers at most one of 0, ¼, ½ and 1; other curves are undecided. Written by "
        f"`lipscope paper --{about['mode']}` from {counted(len(rows), 'row')}; every count is of lines in `FINDINGS.csv`. "
        "[How it was measured](reproduction.md).",
    ]
    return Document("How smooth is attention? What was found", lead, sections)


def reproduction_page(rows: Sequence[Row], cast: Cast, settings: Settings, about: dict[str, Any]) -> Document:
    """What was measured, on which models, and what each difference from the published scripts is."""
    lead = [
        f"The experiments of {PAPER}, arXiv 2312.14820, measured again by `lipscope paper --{about['mode']}`, which wrote "
        "this page. What was found is in [FINDINGS.md](FINDINGS.md), every number in `FINDINGS.csv` beside it.",
        _circumstances(about),
        "σ is the local Lipschitz constant ‖J(X)‖₂ at scope `attention` (all heads and W_O, without residual and "
        "normalisation) unless a scope is named. The *companion estimator* is √‖Jᵀf(X)‖, what the paper's public scripts "
        "compute; it is not σ. Exponents are those of σ ≈ c·n^α with a 95 % bootstrap interval.",
    ]
    measured = {row["variant"] for row in analysis.of(rows, DIFFERENCES)}
    sections = [
        Section("What was measured", table=_measured(rows)),
        Section("The models", bullets=_models(rows, cast)),
        Section(
            "Which plot is which",
            ["Plots of the paper are named by their content, as we do not know their numbers; theorems by their number."],
            table=Table(["in the paper", "here, in `figures/`", "what agrees"], _plots(rows)),
        ),
        Section(
            "Differences from the published scripts",
            [
                "Each is measured alone, on the same inputs as σ itself. They were seen in the scripts' public revision; "
                "whether the published figures came from exactly that revision is unknown."
            ],
            [f"**{name}**: {text}{'' if name in measured else ' (not measured: no model here has it)'}."
             for name, text in VARIANTS.items()],
        ),
        Section("Choices of ours", bullets=_choices(rows, settings, about)),
    ]  # fmt: skip
    return Document("The paper's experiments, measured again", lead, sections)


def _plots(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Which plot or statement of the paper is which of ours, and whether the rows agree with it."""
    numbers = analysis.every_number(rows)
    lines = {name: [one for one in numbers if one.table == name] for name in {one.table for one in numbers}}

    def like_root(points: str) -> str:
        verdicts = [one.verdict in LIKE_ROOT for one in at_radii(numbers, points) if one.verdict != UNDECIDED]
        if not verdicts:
            return "undecided"
        return "agrees" if all(verdicts) else "agrees on some curves" if any(verdicts) else "does not agree"

    def known(name: str, words: str) -> str:
        return words if lines.get(name) else "not measured here"

    above = lines.get(analysis.PAPER_BOUND_RATIO, ())
    holds = (
        "holds at all constructed tokens" if above and not any(one.smaller for one in above) else "does not hold: a fault"
    )
    drawn = lines.get(analysis.DISTANCE + SIGMA, ())
    return [
        ("σ against n on real text, random and pretrained", "growth-random, growth-pretrained, exponents",
         known(analysis.COMPANION_RATIO, "numbers differ where the scripts' number does; see the findings")),
        ("the same masked and unmasked", "masks", known(analysis.MASK_RATIO, "measured on the same weights and text")),
        ("the fit 0.445·n^0.25 for random GPT-2, layer 6 (public repository)", "published",
         known(analysis.DISTANCE + SIGMA, "σ does not follow it" if drawn and drawn[0].low > CLOSE else "see the findings")),
        ("σ against n on AG_NEWS", "exponents", "measured" if analysis.of(rows, SECOND) else "not measured here"),
        ("σ against n on long text", "long-range", "measured for models of BERT's kind" if analysis.of(rows, LONG) else "—"),
        ("Proposition 3.4: σ at its tokens grows like √n", "adversarial", like_root("proposition 3[.]4")),
        ("√n growth in the worst case", "adversarial, border", f"{like_root('groups')}, with the best groups"),
        ("Theorem 3.3: upper bound for n tokens", "border", known(analysis.PAPER_BOUND_RATIO, holds)),
        ("Theorem 3.5: upper bound for every n", "—", "not measured; in `docs/theory`"),
        ("norms of tokens against n", "radius", "measured"),
        ("LayerNorm before attention", "layernorm", "measured; no plot of the paper is known to us"),
    ]  # fmt: skip


def _measured(rows: Sequence[Row]) -> Table:
    lines = []
    for (experiment, model), found in analysis.grouped(rows, "experiment", "model").items():
        lengths = sorted({row["n"] for row in found})
        reach = f"{lengths[0]} … {lengths[-1]} ({len(lengths)})" if len(lengths) > 1 else str(lengths[0])
        texts = sorted({str(row["text"]) for row in found if row.get("text")})
        layers = ", ".join(map(str, sorted({row["layer"] for row in found})))
        scopes = ", ".join(sorted({row["scope"] for row in found}))
        lines.append([experiment, model, layers, scopes, reach, ", ".join(texts) or "constructed", str(len(found))])
    return Table(["experiment", "model", "layers", "scopes", "n", "text", "rows"], lines)


def _models(rows: Sequence[Row], cast: Cast) -> list[str]:
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


def _choices(rows: Sequence[Row], settings: Settings, about: dict[str, Any]) -> list[str]:
    found = [
        "Layers 0 and 6 of the paper's models of 12 layers are the first and the middle one; models of another depth are "
        "measured at their own first and middle layer.",
        f"Text is `{about['text']}`, cut into disjoint pieces; special tokens of a model's tokenizer count towards n.",
    ]
    if about.get("second"):
        found.append(f"The second text is AG_NEWS, its file `{about['second']}`, every news item a document; only growth "
                     "with n is measured on it.")  # fmt: skip
    by_model = analysis.grouped(analysis.of(rows, GROWTH), "model")
    if late := sorted(model for (model,), group in by_model.items() if min(row["n"] for row in group) > settings.lengths[0]):
        found.append(f"n = {settings.lengths[0]} leaves no room for text beside the special tokens of {', '.join(late)}.")
    lengths = ", ".join(map(str, settings.certified))
    radii = sorted({row["radius"] for row in rows if row.get("radius") is not None and row["experiment"] == "border"})
    found += [
        f"σ is estimated to a relative {settings.rtol:g}; its interval is at most {settings.interval:.0%} wide where the "
        f"solver converged. Certificates are computed for one input of the first text at n = {lengths}, and at all "
        "adversarial points.",
        "Adversarial points are built from one head, before W_O, the one with the largest score gain; the paper's text does "
        "not fix the head. Models whose weights alone do not make the scores (rotary positions) have none.",
    ]
    if radii:
        found.append(
            f"Where proved growth ends is looked at with tokens of norm {span(radii[0], radii[-1], 3)}, a radius per layer."
        )
    return found


def _circumstances(about: dict[str, Any]) -> str:
    """How long it took, and how long the plain loop would have taken."""
    threads = counted(about["threads"], "torch thread")
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
