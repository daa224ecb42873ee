"""The kind of task behind every experiment on real text, and the estimator of the paper's scripts as a further column."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from lipscope.bounds.certificates import certified_upper
from lipscope.models.inputs import position_limit
from lipscope.models.model import Model
from lipscope.models.recorded import Recorded
from lipscope.models.text import special_tokens
from lipscope.runs.kinds import Text, add_quantities
from lipscope.runs.plan import Block
from lipscope.runs.registry import Measured, Pass, Row
from lipscope.spectral.solvers import Auto
from lipscope.studies.paper.companion import companion_estimator
from lipscope.studies.paper.layers import chosen_layers, existing_scopes, weights_of

KIND = "lipscope.studies.paper.real_text:RealText"
COMPANION = "lipscope.studies.paper.real_text:companion"


class RealText(Text):
    """σ on text, at layers chosen by the model's depth; options ``experiment``, ``layers`` and ``certificates``.

    Lengths without room for text beside the special tokens, or beyond the model's positions, are left out.
    """

    def expand(self, block: Block, handle: Model) -> Iterator[Pass]:
        """Passes as for plain text, with the layers and scopes that this model has."""
        layers = chosen_layers(len(handle.layers), block.options["layers"])
        scopes = existing_scopes(handle, layers[-1], block.scopes)
        fitting = dataclasses.replace(block, layers=layers, scopes=scopes, lengths=lengths_with_room(block.sizes, handle))
        yield from super().expand(fitting, handle)

    def measure(self, handle: Model, recorded: Recorded, payload: dict[str, Any], task: dict[str, Any]) -> list[Row]:
        """The rows of one layer and scope, with certificates for the first inputs."""
        rows = recorded[task["layer"]].rows(
            task["scope"], solver=Auto(**task["solver"]), certificate=False, first_input=payload["first"]
        )
        rows = add_quantities(Measured(handle, recorded, task, rows))
        _certify(handle, recorded, rows, task)
        width = recorded[task["layer"]].tokens(task["scope"]).shape[-1]
        return [row | {"experiment": task["options"]["experiment"], "width": width} for row in rows]


def companion(at: Measured) -> list[Row]:
    """The quantity ``companion``: √‖Jᵀf(X)‖, what the paper's public scripts compute. **Not** σ."""
    layer, scope = at.settings["layer"], at.settings["scope"]
    if scope == "head":
        raise ValueError("the companion estimator is computed for whole maps, not at scope 'head'")
    here = at.recording[layer]
    plain = here.attention if scope == "attention" else None
    values = companion_estimator(plain or here.map(scope), here.tokens(scope).contiguous())
    assert isinstance(values, torch.Tensor)
    return [{"companion": float(value)} for value in values]


def lengths_with_room(lengths: tuple[int, ...], handle: Model) -> tuple[int, ...]:
    """Those of the lengths that leave room for text, within the model's positions."""
    extra = 0 if handle.tokenizer is None else sum(map(len, special_tokens(handle.tokenizer)))
    limit = position_limit(handle.model)
    fitting = tuple(n for n in lengths if n > extra and (limit is None or n <= limit))
    if not fitting:
        raise ValueError(f"none of the lengths {', '.join(map(str, lengths))} leaves room for text in {handle.name}")
    return fitting


def _certify(handle: Model, recorded: Recorded, rows: list[Row], task: dict[str, Any]) -> None:
    """The certified upper bound of the first ``certificates`` inputs of a length, where the layer has one."""
    wanted = [row for row in rows if row["input"] < int(task["options"].get("certificates", 0)) and not row.get("certified")]
    if task["scope"] != "attention" or not wanted:
        return
    here = recorded[task["layer"]]
    X = here.tokens()
    # One object for all lengths keeps the norms of its weights; rotary layers are made for their length.
    shared = weights_of(handle, task["layer"])
    plain = shared or here.attention
    if plain is None:
        return
    for row in wanted:
        item = row["input"] - rows[0]["input"]
        layer = plain if plain is shared else plain.for_input(item)
        row["certified"] = float(certified_upper(layer, X[item : item + 1].double())[0])
