"""Commands for how large σ can be: ``bounds``, never more than this, and ``attack``, the worst input that was found."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from lipscope.cli import options as opt
from lipscope.cli.options import Target, option
from lipscope.cli.source import find, keep, read_ids, refuse
from lipscope.cli.terminal import echo, notice, print_table, progress_bar, show
from lipscope.rounding import interval, round_down, round_up

if TYPE_CHECKING:
    from lipscope.bounds.registry import BoundTable
    from lipscope.cli.source import Found
    from lipscope.studies.worst_case.growth_in_n import Growth
    from lipscope.studies.worst_case.tokens import TokenAttack


def bounds(
    source: opt.Source,
    head: opt.Head = None,
    text: opt.TextOrNone = None,
    say: opt.Say = None,
    n: Annotated[
        int | None, option("Number of tokens; without a text or tokens, bounds for all inputs of that length.", "--n")
    ] = None,
    radius: opt.Radius = None,
    seed: opt.Seed = 0,
    tokens: opt.Tokens = None,
    by_regime: Annotated[
        bool,
        option(
            "Instead, up to which length the worst σ of every head grows as √n, and from which on its bound is level.",
            "--regimes",
        ),
    ] = False,
    target: Target = Target(),
    out: Annotated[
        Path | None, option("With --regimes: directory for rows and figure of one head's (n, R) map.", panel=opt.OUTPUT)
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """List how large σ could be: for all tokens of norm at most R, and provably at given ones."""
    found = find(source, target, seed=seed, text=text, say=say)
    if by_regime:
        _print_regimes(found, radius, n, head, out, as_json)
        return
    refuse(["--out"] if out is not None else [], "--regimes", "these are bounds")
    if found.model is None:
        from lipscope.attention.io import load_tokens
        from lipscope.bounds.registry import table

        X = None if tokens is None else load_tokens(tokens)
        listed = table(found.part(head), X, radius, n)
        title = f"Bounds for {found.title(head)}, tokens of norm ≤ {listed.radius:.6g}, n = {listed.n}"
        if listed.sigma is not None:
            title += f"\nmeasured σ ∈ {interval(listed.sigma.lower, listed.sigma.upper, 6)}"
        show(listed.to_rows(), as_json, lambda: _print_bounds(listed, title))
        return
    refuse(["--tokens"] if tokens is not None else [], "a weights file", f"{source} is a model")
    from lipscope.models.layer_bounds import layer_bounds

    any_tokens = text is None and say is None and n is not None
    given: dict[str, Any] = {"n": n} if any_tokens else {"input_ids": read_ids(found.model, text, say, n, seed)}
    of_model = layer_bounds(found.model, found.layer, head=head, radius=radius, **given)
    title = of_model.title() + ("" if any_tokens or say is not None else f", from {found.text}")
    title += f"\n{'; '.join(found.model.notes)}" if found.model.notes else ""
    show(of_model.to_rows(), as_json, lambda: _print_bounds(of_model.table, title))


Method = StrEnum("Method", ["construct", "ascend", "tokens"])
_TOKENS, _ASCEND = "For method tokens", "For method ascend"


def attack(
    source: opt.Source,
    method: Annotated[
        Method, option("Inputs with closed forms, gradient ascent from them, or words of a text.", default=True)
    ] = Method.construct,
    head: opt.Head = None,
    radius: opt.Radius = None,
    lengths: opt.Lengths = "2:97:log",
    text: opt.TextOrNone = None,
    say: Annotated[str | None, option("The words themselves, instead of a text.", panel=_TOKENS)] = None,
    n: Annotated[int | None, option("Number of tokens taken from the text, 32 by default.", "--n", panel=_TOKENS)] = None,
    k: Annotated[int, option("Most tokens to replace.", "--k", panel=_TOKENS, default=True)] = 1,
    candidates: Annotated[int, option("Substitutions measured per round.", panel=_TOKENS, default=True)] = 64,
    beam: Annotated[int, option("Paths kept from round to round.", panel=_TOKENS, default=True)] = 1,
    restarts: Annotated[int, option("Number of starts.", panel=_ASCEND, default=True)] = 16,
    steps: Annotated[int, option("Most steps per start.", panel=_ASCEND, default=True)] = 200,
    seed: opt.Seed = 0,
    target: Target = Target(),
    out: Annotated[
        Path | None, option("Directory for the rows, the worst inputs, and figures (PNG and HTML).", panel=opt.OUTPUT)
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Look for the input at which a layer is least smooth, and follow its σ over the number of tokens."""
    found = find(source, target, seed=seed, text=text, say=say, n=n)
    where: dict[str, Any] = {"layer": found.layer, "head": head}
    if method is Method.tokens:
        from lipscope.studies.worst_case.tokens import attack_tokens

        if found.model is None:
            raise ValueError(f"method tokens needs a model: {found.name} has no vocabulary")
        if radius is not None:
            raise ValueError("--radius does not apply to method tokens: words have the norms they have")
        where["input_ids"] = read_ids(found.model, text, say, n, seed)
        with progress_bar() as progress:
            worst = attack_tokens(found.model, **where, k=k, candidates=candidates, beam=beam, progress=progress)
        _report_tokens(worst, found, head, out, as_json)
        return
    of_tokens = [f"--{name}" for name, value in (("say", say), ("n", n)) if value is not None]
    refuse(of_tokens, "method tokens", f"this is {method.value}")
    from lipscope.studies.worst_case.growth_in_n import attack as search

    where |= {"text": found.text, "lengths": lengths, "radius": radius}
    how: dict[str, Any] = {"method": method.value, "restarts": restarts, "steps": steps, "seed": seed}
    with progress_bar() as progress:
        study = search(found.model or found.part(None), **where, **how, progress=progress, notice=notice)
    _report_growth(study, found, head, out, as_json)


def _report_growth(study: Growth, found: Found, head: int | None, out: Path | None, as_json: bool) -> None:
    rows, title = found.identified(study.to_rows(), head), found.title(head)
    if out is not None:
        from safetensors.torch import save

        from lipscope.studies.charts import growth_chart, history_chart

        charts, last = [growth_chart(study, f"Worst inputs of {title}\n{study.domain}")], study.worst[-1]
        if last.ascent is not None:
            charts.append(history_chart(last.ascent, f"Ascent on σ of {title}, n = {last.n}"))
        keep(out, rows, *charts, worst=save({f"n{w.n}": w.tokens.contiguous() for w in study.worst}))
    fits = {name: vars(fit) for name, fit in study.fits.items()}
    content = {"set": study.domain, "radius": study.radius, "rows": rows, "fits": fits}
    show(content, as_json, lambda: _print_growth(study, title))


def _print_growth(study: Growth, title: str) -> None:
    on_text = ["σ on the text"] if any(w.given is not None for w in study.worst) else []
    names = ["n", "worst input", "σ ≥", "σ ≤", "closed form ≥", *on_text, "least bound"]
    cells = []
    for w in study.worst:
        built = max((c.predicted for c in w.built if c.predicted is not None), default=None)
        ends = [round_down(w.sigma.lower, 5), round_up(w.sigma.upper, 5), "–" if built is None else round_down(built, 5)]
        given = ["–" if w.given is None else f"{w.given:.5g}" for _ in on_text]
        cells.append([str(w.n), w.source, *ends, *given, round_up(min(w.bounds.values()))])
    least = min(study.worst[-1].bounds, key=lambda name: study.worst[-1].bounds[name])
    caption = f"{study.domain}; σ of the worst input lies between σ ≥ and σ ≤; {least} bounds all of them"
    title = f"Worst inputs of {title}"
    print_table(names, cells, text=["worst input"], whole=["worst input"], title=title, caption=caption)
    for note in dict.fromkeys(c.note for w in study.worst for c in w.built if c.note):
        echo(note)
    for name in ("worst", "pair", "groups"):
        if name in study.fits:
            echo(f"{name}: {study.fits[name]}")


def _report_tokens(worst: TokenAttack, found: Found, head: int | None, out: Path | None, as_json: bool) -> None:
    content = {name: getattr(worst, name) for name in ("before_text", "after_text", "retokenises")}
    content |= {"before": worst.before.to_rows()[0], "after": worst.after.to_rows()[0], "substitutions": worst.steps()}
    if out is not None:
        from lipscope.studies.charts import tokens_chart

        chart = tokens_chart(worst, f"Substitutions in {found.title(head)}")
        keep(out, found.identified(worst.to_rows(), head, read=False), chart, substitutions=content)
    show(content, as_json, lambda: _print_tokens(worst, found.title(head)))


def _print_tokens(found: TokenAttack, title: str) -> None:
    rows = [
        [str(row["round"]), str(row["position"]), repr(row["before"]), repr(row["after"]), f"{row['predicted']:+.4g}",
         f"{row['sigma']:.5g}"]
        for row in found.steps()
    ]  # fmt: skip
    print_table(
        ["round", "position", "token", "replaced by", "first-order change", "σ"], rows, text=["token", "replaced by"],
        title=f"Token substitutions in {title}",
        caption=f"σ before ∈ {interval(found.before.lower, found.before.upper, 5)}, after ∈ "
        f"{interval(found.after.lower, found.after.upper, 5)}; {len(found.tried)} candidates measured",
    )  # fmt: skip
    if not rows:
        echo("No candidate raised σ.")
    echo(f"before: {found.before_text}")
    echo(f"after:  {found.after_text}")
    if found.retokenises is False:
        echo("Read anew, the text after gives other tokens: the attack acts on token ids.")


def _print_regimes(
    found: Found, radius: float | None, n: int | None, head: int | None, out: Path | None, as_json: bool
) -> None:
    from lipscope.bounds.domain import domain_of
    from lipscope.bounds.exponent import regimes

    if found.model is None:
        norm, layer, most = None, found.part(None), 1024
    else:
        from lipscope.models.inputs import position_limit, probe_inputs

        at = found.model.record(probe_inputs(found.model.model, 8))[found.layer]
        norm, layer = at.norm if radius is None else None, at.weights().for_input(0)
        most = min(position_limit(found.model.model) or 1024, 1024)
    domain, n = domain_of(radius, norm, layer.width), n or most
    rows = [vars(regime) | {"n": n, "regime": regime.at(n)} for regime in regimes(layer, domain)]
    if out is not None:
        from lipscope.studies.charts import regime_chart
        from lipscope.studies.worst_case.growth_in_n import regime_map

        chosen = max(rows, key=lambda row: row["exponent"])["head"] if head is None else head
        with progress_bar() as progress:
            drawn = regime_map(layer.head(chosen), radius=radius, norm=norm, progress=progress)
        chart = regime_chart(drawn, f"Regimes of {found.title(chosen)}, mask {layer.mask}")
        keep(out, found.identified(drawn.found.to_rows(), chosen, read=False), chart, regimes=drawn.to_dict())
    cells = [
        [str(row["head"]), f"{row['exponent']:.4g}", f"10^{round_down(row['log_growth'] / math.log(10), 3)}",
         f"10^{round_up(row['log_plateau'] / math.log(10), 3)}", row["regime"]]
        for row in rows
    ]  # fmt: skip
    names = ["head", "E", "√n growth up to n =", "upper bound level from n =", f"n = {n}"]
    title = f"Regimes of {found.title(None)}, {domain}"
    show(rows, as_json, lambda: print_table(names, cells, text=[names[-1]], title=title))


def _print_bounds(found: BoundTable, title: str) -> None:
    cells = []
    for bound in found.bounds:
        times = "" if (ratio := found.ratio(bound)) is None else f"{ratio:.4g}"
        cells.append([bound.name, bound.kind, bound.sign, bound.shown(), times, bound.norm])
    caption = "set: for all tokens of that norm · local: at these tokens · limit: as token norms grow without bound\n"
    if any(bound.kind == "sup n" for bound in found.bounds):
        caption += "sup n: the supremum over all numbers of tokens, which this number need not reach\n"
    caption += "≥: tokens of that norm reach it" + ("" if found.sigma is None else " · × σ: bound over measured σ")
    names = ["bound", "kind", "", "value", "× σ", "norm"]
    print_table(names, cells, text=["bound", "kind", "norm"], title=title, caption=caption)
