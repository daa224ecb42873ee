"""The kinds of task behind the experiments: σ on real text, and σ at inputs built from a head's weights.

On real text the estimator of the paper's scripts is a further column. Built inputs are those of one head of a layer, before
W_O, since Proposition 3.4 of the paper speaks of one head: that with the largest score gain E/R² = max(γ_max/4, 2|γ_min|),
where γ are the real eigenvalues of A = τW_KᵀW_Q. At every n and R: the paper's two-token input, the best m : n−m split of
two tokens, and at some n a short gradient ascent from them. With the option ``border`` the radius is the one at which √n
growth is proved up to about that many tokens, so that its end can be seen.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds.certificates import certified_upper
from lipscope.bounds.domain import ball
from lipscope.bounds.exponent import HeadOnSet, best_pair, regimes
from lipscope.bounds.pairs import HeadPairs, proposition34_case, real_eigenvalues, strongest_head
from lipscope.bounds.registry import least
from lipscope.models.inputs import position_limit
from lipscope.models.model import Model
from lipscope.models.recorded import Recorded
from lipscope.models.text import special_tokens
from lipscope.runs.kinds import Text, add_quantities
from lipscope.runs.plan import Block
from lipscope.runs.registry import Measured, Pass, Row
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Auto
from lipscope.studies.paper.cast import chosen_layers, weights_of
from lipscope.studies.paper.differences import companion_at, companion_estimator
from lipscope.studies.worst_case import construct, maximise

REAL_TEXT = "lipscope.studies.paper.kinds:RealText"
COMPANION = "lipscope.studies.paper.kinds:companion"
ADVERSARIAL_POINTS = "lipscope.studies.paper.kinds:AdversarialPoints"
PAPER, GROUPS, ASCENT = "proposition 3.4", "groups", "ascent"


class RealText(Text):
    """σ on text, at layers chosen by the model's depth; options ``experiment``, ``layers`` and ``certified``.

    Lengths without room for text beside the special tokens, or beyond the model's positions, are left out.
    """

    def expand(self, block: Block, handle: Model) -> Iterator[Pass]:
        """Passes as for plain text, with the layers and scopes that this model has."""
        layers = chosen_layers(len(handle.layers), block.options["layers"])
        # Without a normalisation before attention there is no ``norm+attention``.
        scopes = tuple(s for s in block.scopes if s != "norm+attention" or handle.layer(layers[-1]).normed)
        extra = 0 if handle.tokenizer is None else sum(map(len, special_tokens(handle.tokenizer)))
        limit = position_limit(handle.model)
        lengths = tuple(n for n in block.sizes if n > extra and (limit is None or n <= limit))
        if not lengths:
            raise ValueError(f"none of the lengths {', '.join(map(str, block.sizes))} leaves room for text in {handle.name}")
        yield from super().expand(dataclasses.replace(block, layers=layers, scopes=scopes, lengths=lengths), handle)

    def measure(self, handle: Model, recorded: Recorded, payload: dict[str, Any], task: dict[str, Any]) -> list[Row]:
        """The rows of one layer and scope; at the lengths ``certified`` the first input has the certified upper bound."""
        here, scope, options = recorded[task["layer"]], task["scope"], task["options"]
        rows = here.rows(scope, solver=Auto(**task["solver"]), certificate=False, first_input=payload["first"])
        rows = add_quantities(Measured(handle, recorded, task, rows))
        # One object for all lengths keeps the norms of its weights; rotary layers are made for their length.
        shared = weights_of(handle, task["layer"])
        for row in rows:
            wanted = row["input"] == 0 and row["n"] in options["certified"]
            if scope == "attention" and wanted and (plain := shared or here.attention):
                layer = plain if plain is shared else plain.for_input(0)
                row["certified"] = float(certified_upper(layer, here.tokens()[:1].double())[0])
        width = here.tokens(scope).shape[-1]
        return [row | {"experiment": options["experiment"], "width": width} for row in rows]


def companion(at: Measured) -> list[Row]:
    """The quantity ``companion``: √‖Jᵀf(X)‖, what the paper's public scripts compute. **Not** σ."""
    scope = at.settings["scope"]
    if scope == "head":
        raise ValueError("the companion estimator is computed for whole maps, not at scope 'head'")
    return [{"companion": value} for value in companion_at(at.recording[at.settings["layer"]], scope).tolist()]


class AdversarialPoints:
    """σ of one head at constructed inputs.

    Options: ``experiment``, ``layers``, ``radii``, ``ascent_lengths``, ``restarts`` and ``steps``.
    """

    coordinates = ("layer", "head", "scope", "mask", "n", "input", "radius", "points")
    effort = 1.0

    def expand(self, block: Block, handle: Model) -> Iterator[Pass]:
        """One pass per length and radius, with a task per layer; none for a model without plain weights."""
        border = block.options.get("border")
        for layer in chosen_layers(len(handle.layers), block.options["layers"]):
            if (weights := weights_of(handle, layer)) is None:
                continue
            index = strongest_head(weights)
            head = head_of(weights, index)
            for radius in block.options["radii"] if border is None else [border_radius(head, border)]:
                for n in block.sizes:
                    point = {"n": n, "radius": float(radius), "ascend": n in block.options["ascent_lengths"]}
                    known = {"borders": n == max(block.sizes) or border is not None}
                    yield Pass(point, point | known, n, 1, None, ({"layer": layer, "scope": "head", "heads": [index]},))

    def record(self, handle: Model, payload: dict[str, Any]) -> None:
        """No text is read."""

    def measure(self, handle: Model, recorded: None, payload: dict[str, Any], task: dict[str, Any]) -> list[Row]:
        """One row per input built."""
        layer = weights_of(handle, task["layer"])
        assert layer is not None
        head, radius, n = head_of(layer, task["heads"][0]), payload["radius"], payload["n"]
        solver = Auto(**task["solver"])
        case = f"proposition34.{proposition34_case(real_eigenvalues(head))}"
        least_of = {source: least(source, head, radius, n) for source in ("refined", "castin2024")}
        bounds = {source: value for source, value in least_of.items() if value is not None}
        bounds |= borders_of(head, radius) if payload["borders"] else {}
        place = {"model": handle.name, "layer": task["layer"], "head": task["heads"][0], "scope": "head", "input": 0,
                 "document": None, "radius": radius, "experiment": task["options"]["experiment"],
                 "notes": "; ".join(handle.notes)}  # fmt: skip

        def row(name: str, X: Tensor, sigma: SpectralNorm, predicted: float | None, about: str) -> Row:
            norms, found = X.norm(dim=-1), sigma.to_rows()[0]
            size = {"radius_max": float(norms.max()), "radius_rms": float(norms.square().mean().sqrt())}
            own = {"points": name, "predicted": predicted, "construction": about, "companion": companion_estimator(head, X),
                   "certified": found.get("certified") or float(certified_upper(head, X[None])[0])}  # fmt: skip
            return {**found, **place, **size, **own, **bounds}

        built = construct(head, n, radius=radius, names=(case, GROUPS), pairs=[pairs_of(head, radius)], solver=solver)
        rows = []
        for c in built:
            about = f"{c.name}, m = {c.m}; {c.note}".rstrip("; ")
            rows.append(row(PAPER if c.name == case else GROUPS, c.tokens, c.sigma, c.predicted, about))
        if payload["ascend"]:
            found = maximise(
                head, n, radius=radius, built=built, restarts=task["options"]["restarts"], steps=task["options"]["steps"],
                seed=task["seed"], solver=solver, dtype=torch.float32,
            )  # fmt: skip
            about = f"from {found.labels[found.best]}; start seed {found.start_seed}"
            rows.append(row(ASCENT, found.tokens, found.sigma, None, about))
        return rows


# What does not depend on n is computed once for all lengths: the models of a run do not change.
@lru_cache(maxsize=8)
def head_of(layer: Attention, index: int) -> Attention:
    """One head in float64."""
    return layer.head(index).to(torch.float64)


@lru_cache(maxsize=8)
def pairs_of(head: Attention, radius: float) -> HeadPairs:
    """Its pairs of tokens on a ball."""
    return HeadPairs(head, 0, ball(radius))


@lru_cache(maxsize=8)
def borders_of(head: Attention, radius: float) -> dict[str, float]:
    """Its borders in n on a ball."""
    regime = vars(regimes(head, ball(radius))[0])
    return {name: regime[name] for name in ("exponent", "log_growth", "log_plateau")}


def border_radius(head: Attention, n: int) -> float:
    """The radius at which √n growth of a head is proved up to about n tokens: E = ln n, and E grows as R² but for biases."""
    radius = 1.0
    for _ in range(4):
        on = HeadOnSet(head, 0, ball(radius))
        u, w = best_pair(on.A, radius, shift=on.shift)
        radius *= math.sqrt(math.log(n) / max(float((u - w) @ (on.A @ w + on.shift)), 1e-12))
    return radius
