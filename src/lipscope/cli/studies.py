"""Commands for studies: ``compare-attention`` (variants), ``meanfield`` (growing n), ``sensitivity``, ``paper``."""

from __future__ import annotations

import dataclasses
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipscope.cli import options as opt
from lipscope.cli.options import Target, option
from lipscope.cli.source import find, keep, look_at_source, look_first
from lipscope.cli.sweep import gentle_end, task_bar
from lipscope.cli.terminal import echo, notice, print_table, progress_bar, show
from lipscope.rounding import duration, interval, round_down, round_up
from lipscope.runs.writing import csv_text

if TYPE_CHECKING:
    from lipscope.studies.mean_field.study import PlateauStudy
    from lipscope.studies.paper.run import Reproduction
    from lipscope.studies.sensitivity import Sensitivity
    from lipscope.studies.variants import Comparison


def compare_attention(
    source: opt.Source = "random",
    text: opt.TextOrNone = None,
    n: opt.N = 32,
    lengths: opt.Lengths = "8,16,32,64,128",
    radius: Annotated[float | None, option("Norm R of the tokens; √d for random tokens, their own for a model.")] = None,
    inputs: opt.Inputs = 4,
    search: Annotated[int, option("Ascent steps for the worst σ on the ball; 0 for none.", default=True)] = 60,
    kinds: Annotated[
        str | None,
        option(
            "Comma-separated kinds, all by default: dot-product, 1/d-scaled, soft-capped, qk-norm, cosine, l2, sigmoid, "
            "sinkhorn."
        ),
    ] = None,
    cap: Annotated[float, option("c of the soft-capped kind.", default=True)] = 50.0,
    eps: Annotated[float, option("ε of the normalisation in qk-norm and cosine.", default=True)] = 1e-2,
    tau: Annotated[float, option("τ of cosine attention.", default=True)] = 12.0,
    seed: opt.Seed = 0,
    target: Target = Target(),
    out: Annotated[Path | None, option("Directory for the rows, comparison.json and its figure.", panel=opt.OUTPUT)] = None,
    as_csv: opt.AsCsv = False,
    as_json: opt.AsJson = False,
) -> None:
    """Compare the smoothness of attention variants: σ, growth in n and R, the worst found, and bounds.

    All have the same weights and see the same tokens. For a model, --mask replaces its own.
    """
    look_at_source(source, text, target)
    from lipscope.attention.variants import VARIANTS
    from lipscope.models.text import parse_lengths
    from lipscope.studies.variants import compare

    chosen = parse_lengths(lengths)
    found = find(source, target, seed=seed, any_mask=True, text=text)
    if found.model is None:
        attention, tokens = found.part(None), None
    else:
        from lipscope.models.corpora import read_text
        from lipscope.models.text import chunks_of

        ids = chunks_of(found.model, read_text(found.text), max([n, *chosen]), inputs, seed)
        at = found.model.record(input_ids=ids)[found.layer]
        attention, tokens = at.weights().for_input(0), at.tokens()
    if target.mask is not None:
        attention = attention.with_mask(target.mask)
    options = {"soft-capped": {"softcap": cap}, "qk-norm": {"eps": eps}, "cosine": {"eps": eps, "tau": tau}}
    names = VARIANTS if kinds is None else tuple(part.strip() for part in kinds.split(","))
    where: dict[str, Any] = {"n": n, "radius": radius, "tokens": tokens, "lengths": chosen, "inputs": inputs, "seed": seed}
    with progress_bar() as progress:
        study = compare(attention, **where, search=search, names=names, options=options, progress=progress)
    content = {"weights": found.name} | study.to_dict()
    if out is not None:
        from lipscope.studies.charts import comparison_chart

        chart = comparison_chart(study, f"{found.name}, mask {study.mask}")
        keep(out, found.identified(study.to_rows()), chart, endings=["png"], comparison=content)
    if as_csv and not as_json:
        echo(csv_text(study.summary()), data=True)
    else:
        show(content, as_json, lambda: _print_comparison(study, found.name))


def meanfield(
    source: opt.Source,
    head: opt.Head = None,
    law: Annotated[
        str | None,
        option(
            "ball[:R], sphere[:R], gaussian[:S], mixture[:K:R:S], or tokens (those of the text). By default tokens for a "
            "model and sphere for weights; R is the typical norm of the model's tokens, or √d."
        ),
    ] = None,
    lengths: opt.Lengths = "16:256:log",
    repeats: Annotated[int, option("Independent draws per length.", default=True)] = 5,
    transport_up_to: Annotated[int, option("Longest n with transport distances (about n³ steps).", default=True)] = 256,
    rtol: opt.Rtol = 1e-4,
    text: opt.TextOrNone = None,
    n: Annotated[
        int | None, option("Tokens per input that a model reads, 64 by default; four inputs.", "--n", panel=opt.FOR_A_MODEL)
    ] = None,
    seed: opt.Seed = 0,
    sink_length: Annotated[int | None, option("Number of tokens against which an attention sink counts as one.")] = None,
    target: Target = Target(),
    out: Annotated[Path | None, option("Directory for the rows, study.json and figures.", panel=opt.OUTPUT)] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Study the mean-field limit of one layer: σ and W_2 ratios as n grows, tokens drawn from a fixed law."""
    look_at_source(source, text, target)
    from lipscope.models.text import parse_lengths
    from lipscope.spectral.solvers import Auto
    from lipscope.studies.mean_field.attention import MeanFieldAttention
    from lipscope.studies.mean_field.study import convergence_study

    chosen, tokens = parse_lengths(lengths), None
    found = find(source, target, seed=seed, text=text, n=n)
    if found.model is None:
        whole = found.part(None)
    else:
        from lipscope.studies.mean_field.attention import model_layer

        whole, tokens = model_layer(found.model, found.layer, found.text, n=64 if n is None else n, seed=seed)
    attention = MeanFieldAttention(whole, sink_length)
    if head is not None:
        attention = attention.head(head)
    drawn, solver = _law(law, whole.width, tokens), Auto(rtol=rtol, seed=seed)
    how: dict[str, Any] = {"repeats": repeats, "seed": seed, "transport_up_to": transport_up_to, "solver": solver}
    with progress_bar() as progress:
        study = convergence_study(attention, drawn, chosen, **how, progress=progress)
    name = found.title(head)
    content = {"layer": name} | study.to_dict()
    if out is not None:
        from lipscope.studies.charts import plateau_chart

        chart = plateau_chart(study, f"{name}: tokens from {study.law}, mask {study.mask}")
        keep(out, found.identified(study.to_rows(), head), chart, study=content)
    show(content, as_json, lambda: _print_meanfield(study, name))


def sensitivity(
    model: opt.ModelName,
    text: opt.Text = "python-docs",
    perturb: Annotated[
        str,
        option(
            "fp8, e5m2, bf16, int8, noise:S or worst:S, then -k, -v, -kv, -input, -output or -weights; several with commas.",
            default=True,
        ),
    ] = "fp8-kv",
    verify: Annotated[bool, option("Also perturb every layer, and measure what it does.", "--verify")] = False,
    per_head: opt.PerHead = False,
    damage: Annotated[
        str | None, option("kl or hidden (the last hidden state); by default kl where there are logits.")
    ] = None,
    n: opt.N = 64,
    inputs: opt.Inputs = 4,
    probes: Annotated[int, option("Backward passes, for all layers together.", default=True)] = 16,
    seed: opt.Seed = 0,
    part: Annotated[str | None, option("'encoder' of an encoder–decoder model.", panel=opt.FOR_A_MODEL)] = None,
    tokenizer: opt.Tokenizer = None,
    emit: Annotated[
        str | None, option("vllm: options that spare layers, if --verify supports it.", panel=opt.OUTPUT)
    ] = None,
    out: Annotated[Path | None, option("Directory for the rows.", panel=opt.OUTPUT)] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Predict what rounding or noise in each layer does to the outputs, beside σ, and verify it."""
    look_first(model, text)
    from lipscope.models.load import load
    from lipscope.studies.sensitivity import sensitivity as run

    if emit not in (None, "vllm"):
        raise ValueError(f"--emit must be vllm, got {emit!r}")
    names = perturb.split(",")
    asked: dict[str, Any] = {"verify": verify, "n": n, "inputs": inputs, "per_head": per_head, "damage": damage}
    source = load(model, part=part, tokenizer=tokenizer) if part else model
    found = run(source, text, perturb=names, probes=probes, tokenizer=tokenizer, seed=seed, **asked)
    content = found.to_dict()
    if out is not None:
        from lipscope.studies.charts import plot

        keep(out, content["rows"], plot(found), endings=["png"], sensitivity=content)
    if emit is None:
        show(content, as_json, lambda: _print_sensitivity(found))
    else:
        content[emit] = found.vllm(names[0])
        show(content, as_json, lambda: echo(content[emit], data=True))
        left = found.together[names[0]]
        notice(
            f"verified on {inputs * n} tokens of {text}, and on nothing else: {left['all']:.3g} {found.damage} with all "
            f"layers rounded, {left['spared']:.3g} with these spared, {left['spared_by_sigma']:.3g} as many by σ"
        )


def paper(
    out: Annotated[Path, option("Where rows, figures and pages go.")],
    full: Annotated[bool, option("All lengths and inputs of the paper, or a sample of them.", "--full/--quick")] = False,
    bert: Annotated[
        str | None, option("Directory or hub name of the pretrained BERT; bert-base-uncased by default.")
    ] = None,
    gpt2: Annotated[str | None, option("Directory or hub name of the pretrained GPT-2; gpt2 by default.")] = None,
    threads: opt.Threads = None,
    workers: opt.Workers = None,
    scheduler: opt.Scheduler = None,
    retry_failed: opt.RetryFailed = False,
) -> None:
    """Measure the experiments of “How Smooth Is Attention?” again: σ beside the estimator of the public scripts.

    Run it again to go on where it stopped. It uses two worker processes where Dask is installed.
    """
    with gentle_end():
        from lipscope.runs.engines import make_engine
        from lipscope.studies.paper.plan import MODES
        from lipscope.studies.paper.run import STORE, reproduce

        if out.exists() and not out.is_dir():
            raise ValueError(f"--out must be a directory, but {out} is a file")
        settings = MODES["full" if full else "quick"]
        if threads is not None:
            settings = dataclasses.replace(settings, threads=threads)
        # Two processes of one thread each use two cores better than one process of two threads.
        if scheduler is None and workers is None and find_spec("distributed") is not None:
            workers = min(2, os.cpu_count() or 1)
        engine = make_engine(scheduler, None if workers == 1 else workers)
        with task_bar(out / STORE, "looking at models and texts, which takes a minute or two") as progress:
            told: dict[str, Any] = {"progress": progress, "notice": notice}
            done = reproduce(out, settings, bert=bert, gpt2=gpt2, engine=engine, retry_failed=retry_failed, **told)
        _print_paper(done)
        if done.summary.failed:
            raise typer.Exit(1)


def _print_comparison(found: Comparison, name: str) -> None:
    def exponent(row: dict[str, Any], label: str) -> str:
        if row[f"growth_{label}"] is None:
            return "–"
        ends = interval(row[f"growth_{label}_low"], row[f"growth_{label}_high"], decimals=2)
        return f"{row[f'growth_{label}']:.2f} {ends}"

    rows = [
        [row["attention"], f"{row['sigma']:.4g}", interval(row["lower"], row["upper"]), exponent(row, "n"),
         exponent(row, "radius"), "–" if row["worst_found"] is None else round_down(row["worst_found"]),
         "–" if row["bound"] is None else round_up(row["bound"]), row["bound_name"] or "none known"]
        for row in found.summary()
    ]  # fmt: skip
    left_out = f"; left out for mask {found.mask}: {', '.join(found.left_out)}" if found.left_out else ""
    without = f", without {', '.join(found.without)}" if found.without else ""
    print_table(
        ["attention", "σ", "interval", "exponent in n", "exponent in R", "worst found", "bound", "by"],
        rows,
        text=["attention", "by"],
        whole=["by"],
        title=f"{name}{without}: {found.tokens}, n = {found.n}, R = {found.radius:.4g}, mask {found.mask}",
        caption="σ is the median over the inputs, and all of them lie in the interval; exponents of power laws with 95 % "
        f"intervals over inputs; worst found and bound are for all tokens of norm ≤ R{left_out}",
    )


def _law(text: str | None, dimension: int, tokens: Any) -> Any:
    from lipscope.studies.mean_field.measures import Empirical, parse_law

    if text == "tokens" or (text is None and tokens is not None):
        if tokens is None:
            raise ValueError(
                "--law tokens needs a model that reads a text; for weights use ball, sphere, gaussian or mixture"
            )
        return Empirical(tokens)
    typical = dimension**0.5 if tokens is None else float(tokens.square().sum(-1).mean().sqrt())
    return parse_law(text or "sphere", dimension, default_size=typical)


def _print_meanfield(study: PlateauStudy, name: str) -> None:
    nearest, cell = "{:.4g}".format, {"lower": round_down, "upper": round_up, "refined": round_up}
    columns = {"σ": "sigma", "lower": "lower", "upper": "upper", "two samples": "ratio", "insertion": "insertion",
               "largest |x|": "radius", "refined": "bound"}  # fmt: skip
    shown = {title: study.medians(column) for title, column in columns.items()}
    # The interval at a length is the one that holds for all of its draws.
    for title, worst in (("lower", min), ("upper", max)):
        shown[title] = [worst(getattr(row, title) for row in study.rows if row.n == n) for n in study.lengths]
    rows = [
        [str(n), *("–" if (value := shown[title][k]) is None else cell.get(title, nearest)(value) for title in columns)]
        for k, n in enumerate(study.lengths)
    ]
    chances = [row.delta for row in study.rows if row.delta is not None]
    chance = f" (an upper end fails with probability ≤ {max(chances):g})" if chances else ""
    distance = "d_2" if study.mask == "causal" else "W_2"
    print_table(
        ["n", *columns],
        rows,
        title=f"{name}: tokens from {study.law}, mask {study.mask}\nmedians over the draws of each length",
        caption=f"σ of every draw at this n lies between lower and upper{chance}; two samples and insertion are ratios of "
        f"{distance} distances, output over input; refined bounds all of them for every n, at the largest norm drawn",
    )
    for fit in (study.plateau(), study.growth()):
        if fit is not None:
            echo(str(fit))
    echo(study.verdict())


def _print_sensitivity(found: Sensitivity) -> None:
    for name in dict.fromkeys(row["kind"] for row in found.rows):
        _print_damage(found, name)


def _print_damage(found: Sensitivity, name: str) -> None:
    from lipscope.report.summary import PREDICTORS, damage_sentence

    shown = {"layer": "d", "head": "d", "estimate": ".4g", "typical": ".3g", "stable_rank": ".3g", "size": ".2g",
             "predicted": ".3g", "predicted_low": ".3g", "predicted_high": ".3g", "measured": ".3g"}  # fmt: skip
    words = PREDICTORS | {"size": "‖δ‖/‖x‖", "predicted": "predicted", "predicted_low": "from", "predicted_high": "to"}
    rows = found.to_rows(name)
    columns = {column: digits for column, digits in shown.items() if rows[0].get(column) is not None}
    print_table(
        [words.get(column, column) for column in columns],
        [[format(row[column], digits) for column, digits in columns.items()] for row in rows],
        title=f"{found.model}: {name} in one layer at a time, on {found.text}",
        caption=f"damage in {found.damage}, with 95 % intervals; {found.backward_passes} backward passes for all layers"
        + ("" if rows[0]["typical_low"] is None else "; typical gain and stable rank estimated from random directions"),
    )
    echo(damage_sentence(rows))


def _print_paper(done: Reproduction) -> None:
    from lipscope.studies.paper.analysis import EXPONENT, REAL_TEXT, exponent, fit_table

    cells = [
        [one.model, str(one.layer), one.table.removeprefix(EXPONENT), exponent(one.value, one.low, one.high), one.verdict]
        for one in fit_table(done.rows) if one.condition == REAL_TEXT
    ]  # fmt: skip
    if cells:
        names = ["model", "layer", "of", "α and its 95 % interval", "verdict"]
        title = "c·n^α on real text; the companion estimator is not σ"
        print_table(names, cells, text=["model", "of", names[3], "verdict"], title=title)
    s = done.summary
    echo(f"{s.rows} rows; {s.measured} tasks measured now in {duration(s.seconds)}, {s.kept} kept from before.")
    for failure in s.failures[:3]:
        echo(f"failed: {failure['model']}, layer {failure['layer']}, n = {failure['n']}: {failure['error']}")
    if book := done.textbook:
        echo(
            f"The {book['points']} values of σ on real text took {duration(book['own_seconds'])} of the tasks' time, with "
            f"upper ends; the textbook loop would need about {duration(book['seconds'])} for these values alone, without "
            f"(scaled up from {book['samples']} inputs measured now)."
        )
    echo(f"Read {done.directory / 'FINDINGS.md'} (or findings.html) and {done.directory / 'reproduction.md'}.")
