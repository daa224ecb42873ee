"""The experiments of the paper as data, and as a sweep: one plan, whose rows name their ``experiment``.

What the paper fixes (lengths, layers, radii) and what we chose (how long an ascent is, where certificates are computed) is
said in ``Settings``; ``QUICK`` is a sample of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lipscope.models.corpora import CORPORA
from lipscope.runs.plan import Block, Plan
from lipscope.studies.paper import differences, kinds
from lipscope.studies.paper.cast import FIRST_AND_MIDDLE, Cast, Member

# What the paper's public repository draws for random GPT-2, layer 6.
PUBLISHED, PUBLISHED_AT = "0.445·n^0.25", ("gpt2-random", 6)

TEXT, TEXT_WITHOUT_PACKAGES, SECOND_TEXT = "alice", "python-docs", "ag_news"
GROWTH, LONG, LAYERNORM, DIFFERENCES = "growth", "long range", "layernorm", "differences"
ADVERSARIAL, BORDER, SECOND = "adversarial", "border", "growth, second text"
NORM_SCOPES = ("attention", "norm+attention", "attention+residual")


@dataclass(frozen=True)
class Settings:
    """Sizes of every experiment; by default those of the paper, and our choices where it makes none."""

    name: str = "full"
    lengths: tuple[int, ...] = tuple(range(2, 99, 2))  # numbers of tokens on real text
    long_lengths: tuple[int, ...] = (102, 202, 302, 402, 502)  # further ones for models of BERT's kind
    inputs: int = 10  # inputs per length, disjoint in the text
    long_inputs: int = 3  # those of the further lengths
    second_inputs: int = 3  # those of the second text
    radii: tuple[float, ...] = (15.5, 21.5, 100.0, 10.0)  # norms of the adversarial tokens
    adversarial_lengths: tuple[int, ...] = tuple(range(2, 98, 5))  # numbers of adversarial tokens
    ascent_lengths: tuple[int, ...] = (2, 17, 47, 97)  # those among them from which gradient ascent starts
    ascent_steps: int = 20  # steps per start
    norm_layers: int = 6  # layers of the LayerNorm study, evenly spread
    norm_lengths: tuple[int, ...] = (8, 16, 32, 64)  # its numbers of tokens
    norm_inputs: int = 2  # its inputs per length
    border: int = 16  # about up to where √n growth is proved at the radius that is looked for
    difference_length: int = 48  # number of tokens at which differences from the published scripts are measured
    difference_inputs: int = 10  # inputs for that
    # numbers of tokens at which one input of the first text also gets the certified upper bound
    certified: tuple[int, ...] = (2, 18, 34, 50, 66, 82, 98, 102, 502)
    ascent_restarts: int = 4  # starts per ascent
    rtol: float = 1e-3  # relative accuracy of σ
    interval: float = 0.2  # widest relative interval around σ to stop with
    threads: int = 1  # torch threads; part of every row's identity


FULL = Settings()
QUICK = Settings(
    name="quick",
    lengths=(2, 4, 8, 16, 32),
    long_lengths=(64,),
    inputs=2,
    long_inputs=1,
    second_inputs=2,
    radii=(15.5, 100.0),
    adversarial_lengths=(7, 32),
    ascent_lengths=(7,),
    ascent_steps=10,
    norm_layers=3,
    norm_lengths=(8, 24),
    norm_inputs=1,
    border=8,
    difference_length=16,
    difference_inputs=4,
    certified=(8, 32, 64),
)
MODES = {"quick": QUICK, "full": FULL}


def published(n: float) -> float:
    """The curve of the public repository."""
    return float(0.445 * n**0.25)


def paper_text() -> str:
    """The paper's text, or the one that every Python has."""
    return TEXT if CORPORA[TEXT].available else TEXT_WITHOUT_PACKAGES


def paper_plan(settings: Settings, cast: Cast) -> Plan:
    """All experiments for all models of a cast.

    Its tasks have the same keys whenever settings, models and text are the same, so that a run resumes.
    """
    members, text = cast.members, (paper_text(),)
    solver: dict[str, Any] = {"rtol": settings.rtol, "interval": settings.interval}
    unmasked = [m for m in members if not m.masked]

    def block(experiment: str, chosen: list[Member], kind: str, lengths: tuple[int, ...], inputs: int, **more: Any) -> Block:
        options = {"experiment": experiment, "layers": FIRST_AND_MIDDLE} | more.pop("options", {})
        return Block(models=tuple(m.choice for m in chosen), kind=kind, lengths=lengths, inputs=inputs, options=options,
                     **solver, **more)  # fmt: skip

    def curves(experiment: str, chosen: list[Member], lengths: tuple[int, ...], inputs: int, **more: Any) -> Block:
        certified = list(settings.certified) if experiment != SECOND else []
        more = {"texts": text} | more | {"quantities": (kinds.COMPANION,), "options": {"certified": certified}}
        return block(experiment, chosen, kinds.REAL_TEXT, lengths, inputs, **more)

    bidirectional = [m for m in unmasked if m.family == "bert"]
    attack = {"radii": list(settings.radii), "ascent_lengths": list(settings.ascent_lengths),
              "restarts": settings.ascent_restarts, "steps": settings.ascent_steps}  # fmt: skip
    shorter = attack | {"radii": [], "ascent_lengths": [], "border": settings.border}
    norms: dict[str, Any] = {"layers": settings.norm_layers, "certified": []}
    built, length = settings.adversarial_lengths, (settings.difference_length,)
    # The paper's second text, where it is on this machine.
    second = [SECOND_TEXT] if CORPORA[SECOND_TEXT].available else []
    blocks = (
        curves(GROWTH, list(members), settings.lengths, settings.inputs),
        curves(LONG, bidirectional, settings.long_lengths, settings.long_inputs, batch_tokens=2048),
        *(curves(SECOND, list(members), settings.lengths, settings.second_inputs, texts=(name,)) for name in second),
        block(ADVERSARIAL, unmasked, kinds.ADVERSARIAL_POINTS, built, 1, options=attack),
        block(BORDER, unmasked, kinds.ADVERSARIAL_POINTS, built, 1, options=shorter),
        block(LAYERNORM, unmasked, kinds.REAL_TEXT, settings.norm_lengths, settings.norm_inputs, texts=text,
              scopes=NORM_SCOPES, options=norms),
        block(DIFFERENCES, list(members), differences.KIND, length, settings.difference_inputs, texts=text),
    )  # fmt: skip
    return Plan(blocks, settings.threads)
