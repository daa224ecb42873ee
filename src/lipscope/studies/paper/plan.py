"""The experiments as a sweep: one plan of five blocks, whose rows tell by ``experiment`` where they belong."""

from __future__ import annotations

from typing import Any

from lipscope.models.corpora import CORPORA
from lipscope.runs.plan import Block, Plan
from lipscope.studies.paper import adversarial_points, differences, real_text
from lipscope.studies.paper.cast import Cast, Member
from lipscope.studies.paper.layers import FIRST_AND_MIDDLE
from lipscope.studies.paper.settings import TEXT, TEXT_WITHOUT_PACKAGES, Settings

GROWTH, LONG, ADVERSARIAL, LAYERNORM, DIFFERENCES = "growth", "long range", "adversarial", "layernorm", "differences"
NORM_SCOPES = ("attention", "norm+attention", "attention+residual")


def paper_text() -> str:
    """The paper's text, or the one that every Python has."""
    return TEXT if CORPORA[TEXT].available else TEXT_WITHOUT_PACKAGES


def paper_plan(settings: Settings, cast: Cast) -> Plan:
    """All experiments for all models of a cast.

    Args:
        settings: sizes.
        cast: models.

    Returns:
        A plan whose tasks have the same keys whenever settings, models and text are the same, so that a run resumes.
    """
    members, text = cast.members, (paper_text(),)
    solver: dict[str, Any] = {"rtol": settings.rtol, "interval": settings.interval}
    unmasked = [m for m in members if not m.masked]

    def block(experiment: str, chosen: list[Member], kind: str, lengths: tuple[int, ...], inputs: int, **more: Any) -> Block:
        options = {"experiment": experiment, "layers": FIRST_AND_MIDDLE} | more.pop("options", {})
        return Block(models=tuple(m.choice for m in chosen), kind=kind, lengths=lengths, inputs=inputs, options=options,
                     **solver, **more)  # fmt: skip

    curves: dict[str, Any] = {
        "texts": text, "quantities": (real_text.COMPANION,), "options": {"certificates": settings.certificates}
    }  # fmt: skip
    blocks = [block(GROWTH, list(members), real_text.KIND, settings.lengths, settings.inputs, **dict(curves))]
    bidirectional = [m for m in unmasked if m.family == "bert"]
    if settings.long_lengths:
        blocks.append(
            block(
                LONG,
                bidirectional,
                real_text.KIND,
                settings.long_lengths,
                settings.long_inputs,
                batch_tokens=2048,
                **dict(curves),
            )
        )
    attack = {"radii": list(settings.radii), "ascent_lengths": list(settings.ascent_lengths),
              "restarts": settings.ascent_restarts, "steps": settings.ascent_steps}  # fmt: skip
    blocks.append(block(ADVERSARIAL, unmasked, adversarial_points.KIND, settings.adversarial_lengths, 1, options=attack))
    blocks.append(
        block(LAYERNORM, unmasked, real_text.KIND, settings.norm_lengths, settings.norm_inputs, texts=text,
              scopes=NORM_SCOPES, options={"layers": settings.norm_layers, "certificates": 0})
    )  # fmt: skip
    blocks.append(
        block(
            DIFFERENCES,
            list(members),
            differences.KIND,
            (settings.difference_length,),
            settings.difference_inputs,
            texts=text,
        )
    )
    return Plan(tuple(blocks), settings.threads)
