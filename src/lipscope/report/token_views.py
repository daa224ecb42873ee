"""Token views for the store of a sweep: its worst inputs are found again from its plan, and looked at token by token.

A store may come from someone else, so its plan is read and never obeyed: only named models and local directories are loaded,
from safetensors, without loaders, kinds or model code that the plan may name. The model and the input must have the digests
that the rows were measured with.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lipscope.report.settings import report_data
from lipscope.runs.plan import Block, ModelChoice
from lipscope.runs.run import Run
from lipscope.runs.worst_tokens import worst_inputs

# For other maps every column of the Jacobian takes a pass through the model.
QUICK_SCOPES = ("head", "attention")


def measure_views(
    run: Run, count: int, *, every_scope: bool = False, say: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Look at the worst ``count`` layers or heads of every setting of a sweep.

    Args:
        run: from ``load_run``.
        count: how many of every setting.
        every_scope: also scopes other than ``head`` and ``attention``, which take far longer.
        say: called with what could not be looked at, and why.

    Returns:
        The views, as ``TokenView.to_dict`` writes them, with ``model`` and ``text``.
    """
    if run.story.plan is None:
        return []
    blocks = list(_blocks(run.story.plan))
    views: list[dict[str, Any]] = []
    for setting in report_data([run]).settings:
        where = f"token views of {setting.model}, scope {setting.scope}"
        if setting.kind != "text" or setting.scope == "model":
            say(f"{where} are left out: they exist for text, layer by layer")
            continue
        if setting.scope not in QUICK_SCOPES and not every_scope:
            say(f"{where} are left out, as they take long; --views {count} measures them all the same")
            continue
        try:
            views += _views(blocks, worst_inputs(setting.rows, count))
        except (ValueError, OSError) as error:
            say(f"{where} are left out: {' '.join(str(error).split())}")
    return views


def _views(blocks: Sequence[Block], wanted: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    from lipscope.models.tokens import token_view

    for row in wanted:
        handle, ids = _find(blocks, row)
        view = token_view(handle, ids, row["layer"], scope=row["scope"], head=row["head"]).to_dict()
        yield view | {"model": row["model"], "text": row["text"], "input": row["input"]}


def _find(blocks: Sequence[Block], row: Mapping[str, Any]) -> tuple[Any, list[int]]:
    """The model that a row was measured on, and its token ids."""
    from lipscope.runs.kinds import Text
    from lipscope.runs.rows import SHORT_DIGEST, digest
    from lipscope.runs.work import loaded_model

    reasons = []
    for block in blocks:
        if row["text"] not in block.texts or row["n"] not in block.sizes:
            continue
        for choice in block.models:
            if not _at_hand(choice):
                reasons.append(f"model {choice.name!r} is not here, or needs more trust than a report gives")
                continue
            handle, fingerprint = loaded_model(choice, block.dtype)
            if handle.name != row["model"]:
                continue
            if fingerprint[:SHORT_DIGEST] != row.get("model_digest"):
                reasons.append(f"the model called {choice.name!r} here is not the one that was measured")
                continue
            for one in Text().expand(block, handle):
                for ids in one.payload["ids"] if one.n == row["n"] and one.text == row["text"] else ():
                    if digest(ids)[:SHORT_DIGEST] == row.get("input_digest"):
                        return handle, ids
            reasons.append(f"the text {row['text']!r} here is not the one that was measured")
    raise ValueError("; ".join(dict.fromkeys(reasons)) or "the plan in the store does not name the model and the text")


def _at_hand(choice: ModelChoice) -> bool:
    """Whether a model can be loaded without a network and without trusting the store."""
    from lipscope.models.load import ZOO

    if choice.loader is not None or choice.allow_pickle or choice.trust_remote_code:
        return False
    if choice.name in ZOO:
        return ZOO[choice.name].missing is None
    return Path(choice.name).expanduser().is_dir()


def _blocks(plan: str) -> Iterator[Block]:
    """The blocks of a plan that measure text, without what they name to be imported."""
    given = tomllib.loads(plan)
    given.pop("threads", None)
    for table in given.pop("block", [{}]):
        settings = {**given, **table}
        settings.pop("quantities", None)
        if settings.pop("kind", "text") == "text":
            yield Block(**settings)
