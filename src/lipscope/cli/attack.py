"""``lipscope attack``: the worst input of a layer, by construction, by ascent, or by replacing words of a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lipscope.cli.tables import print_table
from lipscope.rounding import interval, round_down, round_up

if TYPE_CHECKING:
    from lipscope.attention.layer import Attention
    from lipscope.studies.worst_case.growth_in_n import Growth
    from lipscope.studies.worst_case.tokens import TokenAttack


class Method(StrEnum):
    """How the worst input is looked for."""

    construct = "construct"
    ascend = "ascend"
    tokens = "tokens"


def register(app: typer.Typer, clear_errors: Callable[[bool], AbstractContextManager[None]]) -> None:
    """Add the command to the application."""

    @app.command()
    def attack(
        target: Annotated[
            str,
            typer.Argument(
                metavar="MODEL|WEIGHTS", show_default=False,
                help="A model as for scan, or a safetensors file with the weights of one layer as for measure.",
            ),
        ],
        method: Annotated[
            Method, typer.Option(help="Inputs with closed forms, gradient ascent from them, or words of a text.")
        ] = Method.construct,
        layer: Annotated[
            int | None, typer.Option(help="Layer of a model, 0 by default; negative ones count from the end.")
        ] = None,
        head: Annotated[int | None, typer.Option(help="One head before W_O; the whole layer by default.")] = None,
        radius: Annotated[
            float | None,
            typer.Option(help="Largest norm R of a token. For a model, the image of its own normalisation by default, "
                              "or the largest norm on the text when it has none."),
        ] = None,
        lengths: Annotated[str, typer.Option(help="Numbers of tokens: 8,16,32 or 2:97:log or 8:64:8.")] = "2:97:log",
        text: Annotated[
            str, typer.Option(help="For a model: a name from `lipscope corpora`, a file, or a directory; for tokens, "
                                   "the text itself works too.")
        ] = "python-docs",
        k: Annotated[int, typer.Option("--k", help="tokens: most tokens to replace.")] = 1,
        candidates: Annotated[int, typer.Option(help="tokens: substitutions measured per round.")] = 64,
        beam: Annotated[int, typer.Option(help="tokens: paths kept from round to round.")] = 1,
        restarts: Annotated[int, typer.Option(help="ascend: number of starts.")] = 16,
        steps: Annotated[int, typer.Option(help="ascend: most steps per start.")] = 200,
        seed: Annotated[int, typer.Option(help="Seed of the noise, and of where in the text the inputs lie.")] = 0,
        heads: Annotated[int | None, typer.Option(help="WEIGHTS: number of query heads, as for measure.")] = None,
        kv_heads: Annotated[int | None, typer.Option(help="WEIGHTS: number of key/value heads.")] = None,
        transposed: Annotated[bool, typer.Option(help="WEIGHTS: stored (in, out), as in GPT-2's Conv1D.")] = False,
        mask: Annotated[str, typer.Option(help="WEIGHTS: full, causal, window:W, …")] = "full",
        scale: Annotated[float | None, typer.Option(help="WEIGHTS: score scale τ; 1/√dk by default.")] = None,
        softcap: Annotated[float | None, typer.Option(help="WEIGHTS: c in c·tanh(s/c).")] = None,
        out: Annotated[
            Path | None, typer.Option(help="Directory for the rows, the worst inputs, and figures (PNG and HTML).")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print rows as JSON instead of a table.")] = False,
        part: Annotated[str | None, typer.Option(help="'encoder' of an encoder–decoder model.")] = None,
        allow_pickle: Annotated[bool, typer.Option(help="Accept pickled weights, which can run code when opened.")] = False,
        trust_remote_code: Annotated[bool, typer.Option(help="Run model code from the hub.")] = False,
        debug: Annotated[bool, typer.Option(help="Show the traceback when something goes wrong.")] = False,
    ) -> None:  # fmt: skip
        """Look for the input at which a layer is least smooth, and follow its σ over the number of tokens."""
        with clear_errors(debug):
            from lipscope.cli.models import progress_bar
            from lipscope.models.text import parse_lengths

            weights = Path(target) if target.endswith(".safetensors") else None
            search: dict[str, Any] = {"method": method.value, "restarts": restarts, "steps": steps, "seed": seed}
            if weights is not None:
                if layer is not None:
                    raise ValueError(f"--layer {layer} belongs to a model: a weights file holds one layer")
                if method is Method.tokens:
                    raise ValueError("method tokens needs a model: a weights file has no vocabulary")
                from lipscope.attention.io import load_layer

                given = load_layer(
                    weights, heads=heads, kv_heads=kv_heads, transposed=transposed, mask=mask, scale=scale, softcap=softcap
                )
                study = _weights_growth(given, parse_lengths(lengths), radius, head, search)
                _report_growth(
                    study, f"{weights.name}" + _of_head(head), {"model": weights.name, "head": head}, out, as_json
                )
                return
            from lipscope.models.load import load

            layer = layer or 0
            handle = load(target, part=part, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
            title = f"{handle.name}, layer {handle.layer(layer).index}{_of_head(head)}"
            who = {"model": handle.name, "layer": handle.layer(layer).index, "head": head}
            if method is Method.tokens:
                from lipscope.studies.worst_case.tokens import attack_tokens

                if radius is not None:
                    raise ValueError("--radius does not apply to method tokens: words have the norms they have")
                words = _words(text, handle, parse_lengths(lengths)[-1], seed)
                with progress_bar() as progress:
                    found = attack_tokens(
                        handle, words, layer=layer, head=head, k=k, candidates=candidates, beam=beam, progress=progress
                    )
                _report_tokens(found, title, who, out, as_json)
                return
            study = _model_growth(handle, parse_lengths(lengths), radius, layer, head, text, search)
            _report_growth(study, title, who | {"text": text}, out, as_json)


def _of_head(head: int | None) -> str:
    return "" if head is None else f", head {head}"


def _weights_growth(
    layer: Attention, lengths: list[int], radius: float | None, head: int | None, search: dict[str, Any]
) -> Growth:
    from lipscope.cli.models import progress_bar
    from lipscope.studies.worst_case.growth_in_n import growth

    if radius is None:
        raise ValueError("a weights file needs --radius: the largest norm of a token")
    one = layer if head is None else layer.head(head)
    with progress_bar() as progress:
        return growth(one, lengths, radius=radius, progress=progress, **search)


def _model_growth(
    handle: Any, lengths: list[int], radius: float | None, layer: int, head: int | None, text: str,
    search: dict[str, Any],
) -> Growth:  # fmt: skip
    import torch

    from lipscope.cli.models import progress_bar
    from lipscope.models.corpora import read_text
    from lipscope.models.text import Chunker
    from lipscope.studies.worst_case.growth_in_n import growth
    from lipscope.studies.worst_case.model_layer import LayerAtText, layer_at_text

    if min(lengths) < 2:
        raise ValueError(f"lengths must be at least 2, got {min(lengths)}")
    if handle.tokenizer is None:
        raise ValueError(f"{handle.name} has no tokenizer, so there is no text to take activations and masks from")
    chunker = Chunker(read_text(text), handle.tokenizer)
    extra = len(chunker.prefix) + len(chunker.suffix)
    if skipped := [n for n in lengths if n <= extra]:
        lengths = [n for n in lengths if n > extra]
        if not lengths:
            raise ValueError(f"lengths must be more than the {extra} special tokens of {handle.name}, got {skipped}")
        typer.echo(f"lengths {skipped} leave no room for text beside {extra} special tokens: left out", err=True)
    chunks = chunker.chunks(lengths, 1, search["seed"])
    known: dict[int, LayerAtText] = {}

    def at(n: int) -> LayerAtText:
        if n not in known:
            known[n] = layer_at_text(handle, layer, torch.tensor(chunks[n][0]), head)
        return known[n]

    where: dict[str, Any] = {"radius": radius}
    if radius is None:
        norm = at(lengths[-1]).norm
        where = {"norm": norm}
        said = f"tokens lie in the image of the layer's own {type(norm).__name__}"
        if norm is None:
            where = {"radius": max(at(n).radius for n in lengths)}
            said = f"no normalisation comes before this layer: the radius is the largest token norm on {text}"
        typer.echo(said, err=True)
    where |= {"starts": lambda n: at(n).activations} | search
    with progress_bar() as progress:
        return growth(lambda n: at(n).attention, lengths, progress=progress, **where)


def _words(text: str, handle: Any, n: int, seed: int) -> str:
    """The text itself, or a stretch of n tokens from a corpus, a file or a directory."""
    from lipscope.models.corpora import CORPORA, read_text
    from lipscope.models.text import Chunker

    try:
        named = text in CORPORA or Path(text).expanduser().exists()
    except OSError:  # too long to be the name of a file
        named = False
    if not named:
        return text
    chunker = Chunker(read_text(text), handle.tokenizer)
    extra = len(chunker.prefix) + len(chunker.suffix)
    ids = chunker.chunks([n], 1, seed)[n][0][len(chunker.prefix) : n - len(chunker.suffix) if extra else n]
    decode = getattr(handle.tokenizer, "decode", None)
    return str(decode(ids)) if decode is not None else "".join(handle.tokenizer.convert_ids_to_tokens(ids))


def _report_growth(study: Growth, title: str, who: dict[str, Any], out: Path | None, as_json: bool) -> None:
    from lipscope.studies.rows import identified

    rows = identified(study.to_rows(), **who)
    if out is not None:
        _write_growth(study, rows, title, out)
    if as_json:
        fits = {name: vars(fit) for name, fit in study.fits.items()}
        typer.echo(json.dumps({"set": study.domain, "radius": study.radius, "rows": rows, "fits": fits}, indent=2))
        return
    cells = []
    for w in study.worst:
        built = max((c.predicted for c in w.built if c.predicted is not None), default=None)
        cells.append([
            str(w.n), w.source, round_down(w.sigma.lower, 5), round_up(w.sigma.upper, 5),
            "–" if built is None else round_down(built, 5), "–" if w.given is None else f"{w.given:.5g}",
            round_up(min(w.bounds.values())),
        ])  # fmt: skip
    names = ["n", "worst input", "σ ≥", "σ ≤", "closed form ≥", "σ on the text", "least bound"]
    least = min(study.worst[-1].bounds, key=lambda name: study.worst[-1].bounds[name])
    caption = f"{study.domain}; σ of the worst input lies between σ ≥ and σ ≤; {least} bounds all of them"
    title = f"Worst inputs of {title}"
    print_table(names, cells, text=["worst input"], whole=["worst input"], title=title, caption=caption)
    for note in dict.fromkeys(c.note for w in study.worst for c in w.built if c.note):
        typer.echo(note)
    for name in ("worst", "pair", "groups"):
        if name in study.fits:
            typer.echo(f"{name}: {study.fits[name]}")


def _write_growth(study: Growth, rows: list[dict[str, Any]], title: str, out: Path) -> None:
    from safetensors.torch import save_file

    from lipscope.studies.rows import write_rows
    from lipscope.studies.worst_case.figures import growth_figure, history_figure

    write_rows(rows, out)
    save_file({f"n{w.n}": w.tokens.contiguous() for w in study.worst}, out / "worst.safetensors")
    growth_figure(study, f"Worst inputs of {title}\n{study.domain}").save(out / "growth")
    last = study.worst[-1]
    if last.ascent is not None:
        history_figure(last.ascent, f"Ascent on σ of {title}, n = {last.n}").save(out / "ascent")
    typer.echo(f"rows, worst inputs and figures are in {out}", err=True)


def _report_tokens(found: TokenAttack, title: str, who: dict[str, Any], out: Path | None, as_json: bool) -> None:
    before, after = found.before.to_rows()[0], found.after.to_rows()[0]
    content = {
        "before_text": found.before_text, "after_text": found.after_text, "retokenises": found.retokenises,
        "before": before, "after": after, "substitutions": found.steps(),
    }  # fmt: skip
    if out is not None:
        from lipscope.studies.rows import identified, write_rows
        from lipscope.studies.worst_case.figures import tokens_figure

        write_rows(identified(found.to_rows(), **who), out)
        (out / "substitutions.json").write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
        tokens_figure(found, f"Substitutions in {title}").save(out / "tokens")
        typer.echo(f"the result and figures are in {out}", err=True)
    if as_json:
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
        return
    rows = [
        [str(row["round"]), str(row["position"]), repr(row["before"]), repr(row["after"]), f"{row['predicted']:+.4g}",
         f"{row['sigma']:.5g}"]
        for row in found.steps()
    ]  # fmt: skip
    print_table(
        ["round", "position", "token", "replaced by", "first-order change", "σ"], rows, text=["token", "replaced by"],
        title=f"Token substitutions in {title}",
        caption=f"σ before ∈ {interval(before['lower'], before['upper'], 5)}, after ∈ "
        f"{interval(after['lower'], after['upper'], 5)}; {len(found.tried)} candidates measured",
    )  # fmt: skip
    if not rows:
        typer.echo("No candidate raised σ.")
    typer.echo(f"before: {found.before_text}")
    typer.echo(f"after:  {found.after_text}")
    if found.retokenises is False:
        typer.echo("Read anew, the text after gives other tokens: the attack acts on token ids.")
