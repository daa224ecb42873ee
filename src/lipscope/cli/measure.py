"""Commands that measure: ``scan`` a model on a text, ``plan`` that, ``measure`` weights at tokens, ``tokens`` one by one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipscope.cli import options as opt
from lipscope.cli.options import Loading, Weights, as_dtype, indices, option
from lipscope.cli.source import DEFAULT_TEXT, load_model, look_first, media_given, read_ids
from lipscope.cli.terminal import announce, announce_verified, echo, notice, print_table, progress_bar, show, waiting
from lipscope.doors import at_least
from lipscope.measure.scopes import check_scope
from lipscope.rounding import duration, interval, printable, round_down, round_up, show_bytes, span
from lipscope.runs.writing import write_file

if TYPE_CHECKING:
    from rich.text import Text

    from lipscope.models.model import Model
    from lipscope.models.tokens import TokenView
    from lipscope.report.charts import Chart
    from lipscope.runs.run import Run
    from lipscope.spectral.result import SpectralNorm


Sort = StrEnum("Sort", {"sigma": "sigma", "max_logit": "max-logit"})
LayerScope = StrEnum("LayerScope", ["attention", "head"])


def scan(
    model: opt.ModelName,
    text: opt.TextOrNone = None,
    audio: opt.Audio = None,
    image: opt.Image = None,
    features: opt.Features = None,
    layers: opt.Layers = "all",
    per_head: opt.PerHead = False,
    head: opt.HeadChoice = None,
    lengths: opt.LengthsOrNone = None,
    inputs: opt.Inputs = 4,
    batch_size: opt.BatchSize = None,
    scope: opt.Scope = None,
    pack: opt.Pack = False,
    rtol: opt.Rtol = 1e-3,
    seed: opt.Seed = 0,
    certificate: opt.Certificate = None,
    memory: opt.Memory = None,
    loading: Loading = Loading(),
    stream: Annotated[
        bool | None,
        option(
            "Read the weights layer by layer while measuring; by default when they do not fit into memory.",
            panel=opt.FOR_A_MODEL,
        ),
    ] = None,
    out: Annotated[
        Path | None, option("Directory for rows.csv, rows.json, fits.csv, run.json and tokens.json.", panel=opt.OUTPUT)
    ] = None,
    views: Annotated[int | None, option(f"{opt.VIEWS}; 3 with --out, else 0.", panel=opt.OUTPUT)] = None,
    as_json: opt.AsJson = False,
    as_csv: opt.AsCsv = False,
    top: opt.Top = 20,
    sort: Annotated[
        Sort, option("What is largest first: σ, or the logits, with what would tame them.", panel=opt.OUTPUT, default=True)
    ] = Sort.sigma,
) -> None:
    """Measure σ of a model's layers, or heads, on a text, a clip or an image."""
    chosen = indices("layers", layers)
    at_least(1, top=top, batch_size=1 if batch_size is None else batch_size)
    check_scope(scope or "attention")
    media = media_given(text, audio, image, features)
    if not media:
        text, lengths = text or DEFAULT_TEXT, lengths or "16:128:log"
    look_first(model, text, chosen, out=out)
    from torch import get_num_threads

    from lipscope.models import memory as model_memory
    from lipscope.models.media import signals
    from lipscope.models.text import parse_lengths
    from lipscope.runs.files import write_run
    from lipscope.runs.run import SCAN_STORE
    from lipscope.runs.scan import scan as run
    from lipscope.runs.store import Store
    from lipscope.runs.work import environment
    from lipscope.spectral.solvers import Auto

    heads = per_head if head is None else indices("head", head) or True
    what = scope or ("head" if heads else "attention")
    # Elsewhere a view takes a pass per column of the Jacobian: only when it is asked for.
    cheap = out is not None and not pack and what in ("head", "attention")
    looks = (3 if cheap else 0) if views is None else views
    cut = None if lengths is None else parse_lengths(lengths)
    # What cannot be written to is said before anything is measured.
    with Store(None if out is None else out / SCAN_STORE, write=out is not None, notice=notice) as store:
        with waiting(f"loading {model}"):
            handle = load_model(model, loading, stream=stream)
        if handle.stream is not None and stream is None:
            notice(f"the weights of {handle.name} do not fit into memory, so they are streamed layer by layer")
        if media:
            heard = signals(handle, **media, lengths=cut, count=inputs)
            longest, batch = max(one.n for one in heard), 1
            if heard[0].note:
                notice(heard[0].note)
        else:
            longest = max(cut or ())
            handle.check_lengths([longest])
            batch = model_memory.batch_size(longest, inputs, pack=pack, asked=batch_size or 0)
        places = handle.check_layers(chosen, what)
        announce(
            longest,
            memory,
            lambda: model_memory.plan_layers(handle, longest, places, inputs=batch, scope=what, memory=memory),
        )
        if certificate == "verified":
            announce_verified((handle.probe_recording[i].attention for i in places), longest, what, memory)
        with progress_bar() as progress:
            result = run(
                handle, text, **media, layers=chosen, heads=heads, lengths=lengths, inputs=inputs, scope=scope,
                solver=Auto(rtol=rtol, seed=seed), seed=seed, pack=pack, certificate=certificate, views=looks,
                memory=memory, batch_size=batch_size or 0, store=store, partial=True, progress=progress,
            )  # fmt: skip
    if as_json:
        echo(result.to_json(), data=True)
    elif as_csv:
        echo(result.csv_text(), data=True)
    else:
        _print_scan(result, result.about["text"], top, handle if sort is Sort.max_logit else None)
    if (why := result.about.get("stopped")) is not None:
        on = "Run the same command again to go on" if out is not None else "With --out DIR, a stopped scan can go on"
        echo(f"lipscope: {why}; what is shown was measured before. {on}", err=True)
    # After the table, which is there whatever becomes of the files.
    if out is not None:
        asked: dict[str, Any] = {"text": text, "layers": layers, "per_head": per_head, "head": head, "lengths": lengths}
        asked |= {"inputs": inputs, "batch_size": batch_size, "scope": scope, "stream": stream, **media}
        asked |= {"pack": pack, "rtol": rtol, "seed": seed, "certificate": certificate, "memory": memory}
        command = command_line(["scan", model], asked | loading.settings() | {"views": looks, "out": out})
        write_run(result, out, command=command, environment=environment(get_num_threads()))
        notice(f"rows are in {out}")
    if why is not None:
        raise typer.Exit(130 if why == "interrupted" else 2)


def plan(
    model: opt.ModelName,
    lengths: opt.Lengths = "128",
    inputs: opt.Inputs = 1,
    part: opt.Part = None,
    dtype: opt.Dtype = None,
    device: opt.Device = None,
    revision: opt.Revision = None,
    trust_remote_code: opt.TrustRemoteCode = False,
) -> None:
    """Say what a scan of a saved model would take: in memory and streamed, from its configuration and headers alone."""
    look_first(model)
    from lipscope.models.load import saved_model
    from lipscope.models.memory import batch_size
    from lipscope.models.refusals import as_device, backbone
    from lipscope.models.stored import fits, free_memory
    from lipscope.models.streaming import NotStreamedError, blocks_of, sources
    from lipscope.models.text import parse_lengths
    from lipscope.runs.estimate import READ_RATE, product_rate, ways

    if inputs < 1:
        raise ValueError(f"inputs must be at least 1, got {inputs}")
    place, precision = as_device(device or "cpu"), as_dtype(dtype)
    checkpoint, whole = saved_model(model, precision, revision=revision, trust_remote_code=trust_remote_code)
    skeleton, only = backbone(whole, part), ""
    try:
        sources(whole, skeleton, checkpoint)
    except NotStreamedError as error:
        only = f", or not at all: {error}"
    stored = sum(tensor.size for tensor in checkpoint.tensors.values())
    count = sum(p.numel() for p in skeleton.parameters())
    about = f"{count:,} parameters in {len(blocks_of(skeleton))} layers, {show_bytes(stored)} on disk"
    rows, rate = [], product_rate(place)
    for n in parse_lengths(lengths):
        for way, (size, seconds) in ways(skeleton, stored, n, batch_size(n, inputs), rate).items():
            if way == "in memory" or not only:
                rows.append([str(n), way, show_bytes(size), duration(seconds)])
    where = device or "this machine"
    caption = f"scope attention; time at the speed of products on {where}, and of a disk of {show_bytes(READ_RATE)} a second"
    print_table(["n", "way", "peak memory", "time"], rows, text=["way"], title=f"{model}: {about}", caption=caption)
    taken = "in memory" if only or fits(checkpoint.directory, precision, place) else "streamed"
    free = free_memory(place)
    echo(f"lipscope scan takes it {taken}{only}" + ("." if free is None else f": {show_bytes(free)} of memory are free."))


def measure(
    weights_file: Annotated[
        Path,
        typer.Argument(
            metavar="WEIGHTS",
            help="safetensors file with tensors q, k, v, out (as in nn.Linear) or a fused qkv; optional q_bias, k_bias, "
            "v_bias, qkv_bias, out_bias, bias, sinks.",
            show_default=False,
        ),
    ],
    tokens: Annotated[Path, option("safetensors file with one tensor of shape (n, d) or (B, n, d).")],
    scope: Annotated[LayerScope, option("The whole layer, or each head before W_O.", default=True)] = LayerScope.attention,
    rtol: opt.Rtol = 1e-4,
    delta: Annotated[float, option("Allowed failure probability of the upper end.", default=True)] = 1e-6,
    interval: Annotated[float, option("Go on until upper/lower − 1 is at most this.", default=True)] = 0.1,
    max_steps: Annotated[int, option("Most operator pairs (J, Jᵀ) per input.", default=True)] = 300,
    seed: opt.Seed = 0,
    certificate: opt.Certificate = None,
    dtype: opt.Dtype = None,
    memory: opt.Memory = None,
    weights: Weights = Weights(),
    as_json: opt.AsJson = False,
) -> None:
    """Measure σ of an attention layer given by its weights, at given tokens."""
    from lipscope.attention.io import load_layer, load_tokens
    from lipscope.measure.memory import plan_memory, read_bytes
    from lipscope.measure.sigma import local_lipschitz, working_dtype
    from lipscope.spectral.solvers import Auto

    layer = load_layer(weights_file, **weights.settings())
    X, precision = load_tokens(tokens), as_dtype(dtype)
    n, inputs = X.shape[-2], 1 if X.ndim == 2 else X.shape[0]
    planned: dict[str, Any] = {"dtype": precision or working_dtype(layer, X), "inputs": inputs, "scope": scope.value}
    limit = None if memory is None else read_bytes(memory)
    announce(n, memory, lambda: plan_memory(layer, n, limit=limit, **planned))
    if certificate == "verified":
        announce_verified([layer], n, scope.value, memory)
    solver = Auto(rtol=rtol, delta=delta, interval=interval, max_steps=max_steps, seed=seed)
    asked: dict[str, Any] = {"certificate": certificate, "dtype": precision, "memory": memory}
    with progress_bar("measuring") as progress:
        asked["progress"] = lambda done: progress(done, 1.0, "verifying σ")
        result = local_lipschitz(layer, X, scope=scope.value, solver=solver, **asked)
    show(result.to_rows(), as_json, lambda: _print_result(result))


def tokens(
    model: opt.ModelName,
    say: opt.Say = None,
    text: opt.TextOrNone = None,
    audio: opt.Audio = None,
    image: opt.Image = None,
    features: opt.Features = None,
    n: opt.NOrNone = None,
    seed: opt.Seed = 0,
    layer: opt.Layer = None,
    head: opt.Head = None,
    scope: Annotated[str, option("attention, norm+attention, attention+residual, block.", default=True)] = "attention",
    pairs: Annotated[int, option("How many pairs of tokens to list.", default=True)] = 8,
    loading: Loading = Loading(),
    out: Annotated[Path | None, option("Also write the view as JSON to this file.", panel=opt.OUTPUT)] = None,
    as_json: Annotated[bool, option("Print the view as JSON.", "--json", panel=opt.OUTPUT)] = False,
) -> None:
    """Show which tokens carry the worst direction of a layer, and which pairs influence each other most."""
    look_first(model, text, None if layer is None else [layer])
    from lipscope.models.media import Signal, signals
    from lipscope.models.tokens import token_view

    media = media_given(text if say is None else say, audio, image, features)
    handle = load_model(model, loading)
    what: Signal | list[int]
    if media:
        what, *more = signals(handle, **media, lengths=None if n is None else [n])
        for words in filter(None, (what.note, f"the first of {len(more) + 1} windows of the clip" if more else "")):
            notice(words)
        text = " ".join(map(str, *media.items()))
    else:
        what = read_ids(handle, text, say, n, seed).tolist()
    view = token_view(handle, what, layer or 0, scope=scope, head=head)
    content = json.dumps({"model": handle.name, "text": text} | view.to_dict(), ensure_ascii=False)
    if as_json:
        echo(content, data=True)
    else:
        _print_tokens(view, handle.name, pairs)
    if out is not None:
        write_file(out, content)
        notice(f"the view is in {out}")


def command_line(words: list[str], options: dict[str, Any]) -> str:
    """The command that does the same again: every option that has a value."""
    line = ["lipscope", *words]
    for name, value in options.items():
        spelled = name.replace("_", "-")
        if value is True:
            line.append(f"--{spelled}")
        elif value is False and name == "certificate":
            line += ["--certificate", "none"]
        elif value not in (None, False):
            line += [f"--{spelled}", str(value)]
    return shlex.join(line)


# The two ends are there where ‖J‖_F is estimated.
_SIZES = {"typical": "typical gain", "typical_low": "from", "typical_high": "to", "stable_rank": "stable rank"}


def _print_result(result: SpectralNorm) -> None:
    rows = result.to_rows()
    title = f"Local Lipschitz constant σ\nscope {result.scope} · mask {result.mask} · n = {result.tokens} · {result.dtype}"
    if result.dtype != result.input_dtype:
        title += f" (from {result.input_dtype})"
    index = [name for name in ("input", "head") if name in rows[0]]
    sizes = {name: words for name, words in _SIZES.items() if rows[0][name] is not None}
    cells = []
    for row in rows:
        sigma = [round_down(row["lower"], 6), f"{row['estimate']:.6g}", round_up(row["upper"], 6)]
        gains = [f"{row[name]:.3g}" for name in sizes]
        cells.append([*(str(row[name]) for name in index), *sigma, *gains, str(row["iterations"]), row["status"]])
    names = [*index, "lower", "estimate", "upper", *sizes.values(), "steps", "status"]
    kinds, rounding = " or ".join(dict.fromkeys(row["upper_kind"] for row in rows)), max(row["rounding"] for row in rows)
    caption = f"{kinds}, up to the rounding allowance {rounding:.1e}"
    if "probabilistic" in kinds:
        caption = f"lower is attained; upper is {kinds}, a probabilistic one fails with probability ≤ {result.delta:g}"
    elif kinds == "verified":
        caption = f"upper is verified, its rounding included; lower is attained up to the rounding allowance {rounding:.1e}"
    print_table(names, cells, text=["status"], title=title, caption=caption)
    if not all(row["converged"] for row in rows):
        echo(result.message)


# From these on: the cap of Gemma 2 changes a logit by 1 % (c·tanh(s/c), c = 50), and the clip of Kimi K2 rescales (τ = 100).
_SOFT_CAP, _QK_CLIP = 8.71, 100.0


def _print_scan(result: Run, text: str, top: int, for_logits: Model | None = None) -> None:
    """The table of a scan; with the model, sorted by the largest logit, with what would tame it."""
    from lipscope.report.summary import atlas_sentence, directions_sentence, masks_of

    first = result.rows[0]
    summaries = result.worst()
    place = [*(["layer"] if first["scope"] != "model" else []), *(["head"] if summaries[0]["head"] is not None else []), "n"]
    chances = [row["delta"] for row in result.rows if row["delta"] is not None]
    caption = "σ of every input at this n lies between lower and upper"
    caption += f"; an upper end fails with probability ≤ {max(chances):g}" if chances else ""
    names = [*place, "median σ", "lower", "upper"]
    if for_logits is None:
        names += ["|x|", "entropy", "on first"]
        fits = result.fit()
    else:
        if all(s["max_logit"] is None for s in summaries):
            raise ValueError(f"scope {first['scope']} has no logits to sort by")
        summaries.sort(key=lambda s: -float("-inf" if s["max_logit"] is None else s["max_logit"]))
        names, fits = [*names, "entropy", "on first", "max logit", "would act"], {}
        caption += (
            "\nwould act: QK-norm keeps logits below √d_h (gains of 1) · soft-cap 50 changes them by 1 % or more · QK-clip "
            "100 rescales the head"
        )
    rows = []
    for s in summaries[:top]:
        cells = [*(str(s[name]) for name in place), f"{s['median']:.4g}", round_down(s["lower"]), round_up(s["upper"])]
        cells += [f"{s['radius_rms']:.3g}"] if for_logits is None else []
        cells += ["–" if s[name] is None else f"{s[name]:.2f}" for name in ("entropy", "sink_mass")]
        if fits:
            fit = fits.get((s["layer"], s["head"]))  # None where σ is 0, or the scan was stopped
            unknown = "–" if fit is None else "too few lengths"
            cells.append(span(fit.alpha_low, fit.alpha_high, decimals=2) if fit and fit.is_decided else unknown)
        if for_logits is not None:
            cells += logit_cells(for_logits, s)
        rows.append(cells)
    title = f"σ of {first['model']} on {text}, largest {'' if for_logits is None else 'logit '}first\n"
    title += f"scope {first['scope']} · mask {masks_of(result.rows)} · {first['dtype']}"
    title += f"\n{first['notes']}" if first["notes"] else ""
    print_table([*names, *(["α (σ ~ n^α)"] if fits else [])], rows, text=["would act"], title=title, caption=caption)
    worst = max(summaries, key=lambda s: float(s["median"]))
    standing = atlas_sentence(first, *(worst[name] for name in ("layer", "n", "lower", "upper")))
    for words in filter(None, (directions_sentence(result.rows), standing)):
        echo(words)
    ever = [row["refined_global"] for row in result.rows if row["refined_global"] is not None]
    if ever:
        echo(f"Whatever the input, σ stays below {round_up(max(ever))} here: the set bound at the normalisation's radius.")
    if len(summaries) > top:
        echo(f"… and {len(summaries) - top} more; --top, --csv and --out show them")
    if not all(row["converged"] for row in result.rows):
        echo("Some estimates were not shown to have converged; their intervals are valid but wide.")


def logit_cells(model: Model, summary: Mapping[str, Any]) -> list[str]:
    """The largest logit, and which remedies would change it."""
    logit = summary["max_logit"]
    if logit is None:
        return ["–", "–"]
    config, layer = getattr(model.model, "config", None), model.layer(summary["layer"])
    width = getattr(config, "head_dim", None) or model.probe_recording[layer.index].tokens().shape[-1] // layer.heads
    limits = {"QK-norm": width**0.5, "soft-cap": _SOFT_CAP, "QK-clip": _QK_CLIP}
    return [f"{logit:.4g}", ", ".join(name for name, limit in limits.items() if logit > limit) or "none"]


# Tokens that are shown, of hundreds.
_SHOWN = 24


def _place(chart: Chart, width: int) -> Iterator[Text]:
    """Shares as a heat map over the image, or as a curve over the clip."""
    from rich.text import Text

    from lipscope.report.charts import HeatMap

    panel = chart.panels[0]
    if isinstance(panel, HeatMap):
        cell = 5 if 5 * len(panel.column_names) <= width else 2
        for row in panel.cells:
            line = Text()
            for one in filter(None, row):
                cold = int(255 * (1 - one.shade))
                line.append(f"{one.value:4.0%} " if cell == 5 else "  ", style=f"black on rgb(255,{cold},{cold})")
            yield line
        return
    x, y = panel.series[0].x, panel.series[0].y
    step = -(-len(y) // (width - 20))
    tops = [max(y[k : k + step]) for k in range(0, len(y), step)]
    bars = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * top / (max(y) or 1.0)))] for top in tops)
    yield Text(f"{x[0]:.2f} s {bars} {x[-1]:.2f} s")


def _print_tokens(view: TokenView, name: str, pairs: int) -> None:
    from rich.console import Console
    from rich.text import Text

    from lipscope.report.run_charts import where_chart

    console = Console()
    r = view.result
    where = f"layer {view.layer}" + ("" if view.head is None else f", head {view.head}")
    echo(f"{name}, {where}, scope {r.scope}: σ ∈ {interval(r.lower, r.upper)}, estimate {r.estimate:.4g}")
    console.print("Share of each token in the worst direction (the redder, the more):")
    place = where_chart(view.to_dict())
    if place is not None and place.panels[0].x != "token":  # words say more than their numbers
        console.print(*_place(place, console.width), sep="\n")
        echo(place.words)
    else:
        line, peak = Text(), float(view.energy.max()) or 1.0
        strong = float(view.energy.sort(descending=True).values[:_SHOWN][-1]) if len(view.tokens) > _SHOWN else 0.0
        for token, share in zip(view.tokens, view.energy.tolist(), strict=True):
            if share < strong and not view.influence.numel():  # of hundreds of tokens, those that carry most
                continue
            cold = int(255 * (1 - share / peak))
            line.append(printable(token), style=f"black on rgb(255,{cold},{cold})")
            line.append(f"{share:.0%} " if share >= 0.05 else " ", style="bold")
        console.print(line)
    if not view.influence.numel():
        return
    console.print("Strongest influence of one token on another, ‖∂out_i/∂x_j‖₂:")
    for i, j, value in view.strongest_pairs(pairs):
        echo(f"  {value:8.4g}  moving {view.tokens[j]!r} ({j}) moves the output at {view.tokens[i]!r} ({i})")
