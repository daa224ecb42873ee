"""What the rows say: sentences by rules that cannot overstate, and the two pages of a run, what was found and how.

A claim on growth needs a 95 % interval of the exponent no wider than 0.2. Such an interval covers at most one of the rivals
0, ¼, ½ and 1, and the claim is the one that it covers, or the two it lies between; what is not decided is counted as
undecided. Each rule looks at the rows and gives no sentence, or one with its count and at most three examples: the extremes,
and the layer that the paper draws. No rule knows what should come out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from lipscope.report.charts import Chart
from lipscope.report.html import Document, Section, Table
from lipscope.rounding import counted, duration, span
from lipscope.studies.paper import analysis
from lipscope.studies.paper.analysis import COMPANION, SIGMA, UNDECIDED, WIDEST, FitRow, Row
from lipscope.studies.paper.cast import SUFFIX, Cast
from lipscope.studies.paper.differences import VARIANTS
from lipscope.studies.paper.plan import ADVERSARIAL, BORDER, DIFFERENCES, GROWTH, PUBLISHED, SECOND, Settings, published

# How near a curve has to lie to another one to be called it, and a number to another one to be called unchanged.
_CLOSE, _CHANGED = 0.05, 0.1

TEXT, SCRIPTS, WORST, MASKS, NORM, MODELS = (
    "What σ does on real text", "What the published scripts compute instead", "The worst case, and where it ends",
    "Masked against unmasked", "What layer normalisation changes", "Which models, and how sure this is",
)  # fmt: skip


def findings(rows: Sequence[Row], cast: Cast) -> dict[str, list[str]]:
    """Every sentence that the rows support, by topic, in the order of the page."""
    fits = analysis.fit_table(rows)
    found = {topic: [text for rule in rules for text in rule(rows, fits)] for topic, rules in _RULES.items()}
    found[MODELS] += [f"{sentence}." for sentence in cast.absent]
    if stand_ins := [f"{m.name} stands in for {m.stands_for}" for m in cast.members if m.stands_for and not m.masked]:
        missing = " and ".join(dict.fromkeys(m.stands_for for m in cast.members if m.stands_for))
        found[MODELS].append(f"{', '.join(stand_ins)}: nothing here is a measurement of {missing}.")
    return {topic: texts for topic, texts in found.items() if texts}


def _counts(table: Sequence[FitRow], what: str, *, shown: bool = True) -> str:
    """How many exponents are which; where ``shown``, with the extremes and the paper's own layer as examples."""
    found = Counter(row.verdict for row in table)
    parts = [f"{name} in {found[name]}" for name in sorted(found, key=lambda name: (name == UNDECIDED, -found[name]))]
    if found[UNDECIDED]:
        parts[-1] += f", with an interval wider than {WIDEST:g}"
    decided = sorted((row for row in table if row.verdict != UNDECIDED), key=lambda row: row.fit.alpha)
    own = [row for row in decided if row.curve.is_published]
    examples = [
        f"{row.place} {analysis.exponent(row.fit)}" for row in dict.fromkeys([*decided[:1], *decided[-1:], *own[:1]])
    ]
    text = f"{what} has, over {counted(len(table), 'curve')}, the exponent {'; '.join(parts)}"
    return text + (f" (for example {', '.join(examples)})." if examples and shown else ".")


def _on_text(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    if table := _of_text(fits, SIGMA):
        decided = [row for row in table if row.verdict != UNDECIDED]
        if below := sum(row.fit.alpha_high < 0.5 for row in decided):
            yield f"σ grows more slowly than √n on {below} of {counted(len(table), 'curve')}: the interval lies below ½."
        yield _counts(table, "It" if below else "σ")
        yield f"n^¼ is excluded in {sum(row.verdict != '¼' for row in decided)} of {len(table)}."
    if level := sum(row.fit.better == "saturating" and row.fit.alpha_low > 0 for row in table):
        yield f"A curve that levels off describes {level} of those that grow better (AIC)."


def _on_second_text(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    if table := [row for row in fits if row.curve.experiment == SECOND and row.estimator == SIGMA]:
        yield _counts(table, f"On the paper's second text, {table[0].curve.rows[0]['text']}, σ", shown=False)
        first = {(row.curve.model, row.curve.layer): row.verdict for row in _of_text(fits, SIGMA)}
        both = [(row.verdict, first.get((row.curve.model, row.curve.layer), UNDECIDED)) for row in table]
        decided = [pair for pair in both if UNDECIDED not in pair]
        same = sum(one == other for one, other in decided)
        yield f"On {same} of {counted(len(decided), 'curve')} that both texts decide, they agree on the exponent."


def _radius(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    if table := analysis.radius_correlations(rows):
        grows, falls = sum(c.low > 0 for c in table), sum(c.high < 0 for c in table)
        yield (
            f"The largest token norm of an input grows with n in {grows} of {counted(len(table), 'layer')}, falls in "
            f"{falls} and is undecided in {len(table) - grows - falls} (95 % interval of the correlation)."
        )


def _published(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    """Whose curve is the one drawn in the public repository?"""
    parts = []
    for estimator, name in ((COMPANION, "√‖Jᵀf(X)‖, which the scripts compute"), (SIGMA, "σ")):
        for row in _of_text(fits, estimator):
            if row.curve.is_published:
                points = zip(*row.curve.values(analysis.COLUMN[estimator]), strict=True)
                gap = median(abs(y / published(n) - 1) for n, y in points)
                parts.append(f"{'follows' if gap <= _CLOSE else 'is not'} {name} (median distance {gap:.1%})")
    if parts:
        yield (
            f"The curve {PUBLISHED}, drawn in the public repository for random GPT-2, layer 6, {' and '.join(parts)}; "
            "whether the published figures came from that revision is unknown."
        )


def _companion(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    if table := _of_text(fits, COMPANION):
        yield _counts(table, "The scripts' number √‖Jᵀf(X)‖")
    if ratios := [row[COMPANION] / row["estimate"] for row in analysis.of(rows, GROWTH) if row.get(COMPANION) is not None]:
        above, below = sum(r > 1 for r in ratios), sum(r < 1 for r in ratios)
        yield (
            f"Over {counted(len(ratios), 'input')} it is {_reach(ratios)} times σ, above it {above} times and below it "
            f"{below} times" + (": it is no bound of σ." if above and below else ".")
        )


def _differences(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    table = analysis.difference_table(rows)
    # A difference counts as one where the whole range of the ratio is off by more than a tenth.
    moved = [row for row in table if row.low > 1 + _CHANGED or row.high < 1 - _CHANGED]
    moved.sort(key=lambda row: -abs(math.log(row.value)))
    strongest = list({row.table: row for row in reversed(moved)}.values())[::-1]
    examples = ", ".join(f"{row.table} {row.value:.2g} times for {row.model}" for row in strongest[:3])
    if table:
        yield (
            f"Of {len({row.table for row in table})} differences between the scripts and σ, {len(strongest)} change the "
            f"number of some model by more than {_CHANGED:.0%} at every input" + (f" ({examples})." if examples else ".")
        )


_POINTS = {
    "groups": "At the best split of the tokens into two groups", "ascent": "After gradient ascent on the tokens",
    "proposition 3.4": "At the tokens of the paper's Proposition 3.4",
}  # fmt: skip


def _worst_case(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    table = [row for row in fits if row.curve.experiment == ADVERSARIAL and row.estimator == SIGMA]
    for kind in dict.fromkeys(str(row.curve.rows[0]["points"]) for row in table):
        group = [row for row in table if row.curve.rows[0]["points"] == kind]
        first = group[0] is table[0]
        yield _counts(group, f"{_POINTS.get(kind, kind)}{', a curve per layer and radius,' if first else ''} σ", shown=first)
    built_or_climbed = [row for row in rows if row.get("points") is not None]
    gains = []
    for found in analysis.grouped(built_or_climbed, "model", "layer", "head", "n", "radius", "experiment").values():
        built = [one["estimate"] for one in found if one["points"] != "ascent"]
        gains += [one["estimate"] / max(built) for one in found if built and one["points"] == "ascent"]
    if gains and min(gains) >= 1:
        yield (
            f"A short gradient ascent reaches {median(gains):.2g} times the best construction in the median and "
            f"{max(gains):.2g} times at most, over {counted(len(gains), 'run')}."
        )


def _border(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    if known := [row for row in analysis.of(rows, ADVERSARIAL) if row.get("log_growth") is not None]:
        least, last = min(row["log_growth"] for row in known) / math.log(10), max(row["n"] for row in known)
        words = ", beyond every length measured here" if least > math.log10(last) else ""
        yield f"At these radii √n growth is proved up to n = 10^{math.floor(10 * least) / 10:g} or more{words}."
    built = [row for row in analysis.of(rows, BORDER) if row["points"] == "groups" and row.get("refined")]
    if {math.log(row["n"]) > row["log_growth"] for row in built} == {False, True}:
        yield (
            "With tokens so short that proved growth ends within these lengths, the proven upper bound is "
            f"{_reach([row['refined'] / row['lower'] for row in built])} times the σ attained, before that border and "
            "beyond it."
        )


def _masks(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    ratios = [pair["ratio"] for pair in analysis.masked_ratios(rows)]
    if not ratios:
        return
    yield (
        f"On the same text and weights σ is larger under the causal mask in {sum(r > 1 for r in ratios)} of {len(ratios)} "
        f"comparisons ({_reach(ratios)} times, {median(ratios):.2g} in the median)."
    )
    exponents = {(row.curve.model, row.curve.layer): row.fit for row in _of_text(fits, SIGMA) if row.verdict != UNDECIDED}
    both = [(fit, exponents[model + SUFFIX, k]) for (model, k), fit in exponents.items() if (model + SUFFIX, k) in exponents]
    if both:
        apart = sum(masked.alpha_low > free.alpha_high for free, masked in both)
        yield f"Its exponent is larger under the mask in {apart} of {counted(len(both), 'layer')}, intervals apart."


def _normalisation(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    table = analysis.norm_table(rows)
    for scope, words in (("norm+attention", "the normalisation before it"), ("attention+residual", "the residual after it")):
        if ratios := [row["sigma"][scope] / row["sigma"]["attention"] for row in table if scope in row["sigma"]]:
            yield (
                f"Measured with {words}, σ is {_reach(ratios)} times that of attention alone: larger in "
                f"{sum(r > 1 for r in ratios)} of {len(ratios)} layers and lengths."
            )
    bounds = [(row["known"][analysis.GLOBAL_BOUND], row["sigma"]["attention"]) for row in table]
    slack = [bound / sigma for bound, sigma in bounds if bound is not None]
    if slack and min(slack) >= 1:
        yield (
            f"Normalised tokens are bounded, so attention has a global constant; the proven one is {_reach(slack)} times "
            "the σ measured."
        )


def _certificates(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    certified = [row for row in rows if row.get("certified") is not None]
    ratios = [row["certified"] / row["estimate"] for row in certified if math.isfinite(row["certified"])]
    if broken := sum(row["certified"] < row["lower"] for row in certified):
        yield f"{broken} certified upper bounds lie below a value that is attained: a fault."
    elif ratios:
        yield f"All {len(ratios)} certified upper bounds hold, at {median(ratios):.3g} times σ in the median."


def _unfinished(rows: Sequence[Row], fits: Sequence[FitRow]) -> Iterator[str]:
    if count := sum(row.get("converged") is False for row in rows):
        yield f"{count} of {len(rows)} rows did not reach the accuracy asked for; their intervals say so."


def _reach(values: Sequence[float]) -> str:
    return f"{min(values):.2g} to {max(values):.2g}"


def _of_text(fits: Sequence[FitRow], estimator: str) -> list[FitRow]:
    return [row for row in fits if row.estimator == estimator and row.curve.condition == analysis.REAL_TEXT]


_Rule = Callable[[Sequence[Row], Sequence[FitRow]], Iterator[str]]
_RULES: dict[str, tuple[_Rule, ...]] = {
    TEXT: (_on_text, _on_second_text, _radius),
    SCRIPTS: (_published, _companion, _differences),
    WORST: (_worst_case, _border),
    MASKS: (_masks,),
    NORM: (_normalisation,),
    MODELS: (_certificates, _unfinished),
}


_PAPER = "Castin, Ablin, Peyré, *How Smooth Is Attention?*, ICML 2024, arXiv 2312.14820"
# One figure a topic; the others are in the directory of figures.
FIGURES = {TEXT: "exponents", SCRIPTS: "published", WORST: "border", MASKS: "masks", NORM: "layernorm"}
# Statements and plots of the paper by their content: their numbers are known here for the theorems only.
_PLOTS = (
    ("σ against n on real text; random, pretrained, masked and unmasked", "growth-random, growth-pretrained, masks",
     "numbers differ: the scripts' number is not σ; what σ does instead is the first finding"),
    ("the fit 0.445·n^0.25 for random GPT-2, layer 6 (public repository)", "published",
     "follows the scripts' number where the findings say so, not σ"),
    ("σ against n on long text", "long-range", "measured for models of BERT's kind"),
    ("Proposition 3.4: σ at constructed tokens grows like √n", "adversarial, border", "agrees, up to the border 1 + e^E"),
    ("Theorem 3.3: upper bound for n tokens", "border", "agrees; a sharper one is drawn beside it"),
    ("Theorem 3.5: upper bound for every n", "—", "in `docs/theory`: its exponent is optimal for W_1, halved for W_2"),
    ("norms of tokens against n", "radius", "measured"),
    ("LayerNorm before attention", "layernorm", "measured; no plot of the paper is known to us"),
)  # fmt: skip


def findings_page(rows: Sequence[Row], cast: Cast, about: dict[str, Any], drawn: Sequence[Chart]) -> Document:
    """What the rows say, in the order in which one asks."""
    words = {chart.name: chart.words for chart in drawn}
    sections = [
        Section(topic, [" ".join(texts)], figures={name: words[name] for name in (FIGURES.get(topic),) if name in words})
        for topic, texts in findings(rows, cast).items()
    ]
    lead = [
        f"Written by `lipscope paper --{about['mode']}` from {counted(len(rows), 'row')}; [how it was "
        f"measured](reproduction.md). A sentence on growth needs a 95 % interval of the exponent no wider than "
        f"{analysis.WIDEST:g}, which covers at most one of 0, ¼, ½ and 1; what is undecided is counted as undecided. Every "
        "number behind a count is in `FINDINGS.csv`.",
    ]
    return Document("How smooth is attention? What was found", lead, sections)


def reproduction_page(rows: Sequence[Row], cast: Cast, settings: Settings, about: dict[str, Any]) -> Document:
    """What was measured, on which models, and what each difference from the published scripts is."""
    lead = [
        f"The experiments of {_PAPER}, measured again by `lipscope paper --{about['mode']}`, which wrote this page. What "
        "was found is in [FINDINGS.md](FINDINGS.md), every number in `FINDINGS.csv` beside it.",
        _circumstances(about),
        "σ is the local Lipschitz constant ‖J(X)‖₂ at scope `attention` (all heads and W_O, without residual and "
        "normalisation) unless a scope is named. The *companion estimator* is √‖Jᵀf(X)‖, what the paper's public scripts "
        "compute; it is not σ. Exponents are those of σ ≈ c·n^α with a 95 % bootstrap interval.",
    ]
    measured = {row["variant"] for row in analysis.of(rows, DIFFERENCES)}
    second = len(analysis.of(rows, SECOND))
    news = ("exponents", f"measured, {counted(second, 'row')}") if second else ("—", "not measured here")
    plots = [*_PLOTS, ("σ against n on AG_NEWS", *news)]
    sections = [
        Section("What was measured", table=_measured(rows)),
        Section("The models", bullets=_models(rows, cast)),
        Section(
            "Which plot is which",
            ["Plots of the paper are named by their content, theorems by their number."],
            table=Table(["in the paper", "here, in `figures/`", "what agrees"], plots),
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
