"""The kind of task behind the adversarial experiment: inputs built from a head's weights, at given norms of the tokens.

One head of a layer, before W_O, since Proposition 3.4 of the paper speaks of one head: that with the largest score gain
E/R² = max(γ_max/4, 2|γ_min|), where γ are the real eigenvalues of A = τW_KᵀW_Q. At every n and R: the paper's two-token
input, the best m : n−m split of two tokens, and at some n a short gradient ascent from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds.certificates import certified_upper
from lipscope.bounds.pairs import proposition34_case, real_eigenvalues, strongest_head
from lipscope.bounds.registry import least
from lipscope.models.model import Model
from lipscope.runs.plan import Block
from lipscope.runs.registry import Pass, Row
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Auto
from lipscope.studies.paper.companion import companion_estimator
from lipscope.studies.paper.layers import chosen_layers, weights_of
from lipscope.studies.worst_case import construct, maximise

KIND = "lipscope.studies.paper.adversarial_points:AdversarialPoints"
PAPER, GROUPS, ASCENT = "proposition 3.4", "groups", "ascent"


class AdversarialPoints:
    """σ of one head at constructed inputs.

    Options: ``experiment``, ``layers``, ``radii``, ``ascent_lengths``, ``restarts`` and ``steps``.
    """

    coordinates = ("layer", "head", "scope", "mask", "n", "input", "radius", "points")
    effort = 1.0

    def expand(self, block: Block, handle: Model) -> Iterator[Pass]:
        """One pass per length and radius, with a task per layer; none for a model without plain weights."""
        settings = []
        for layer in chosen_layers(len(handle.layers), block.options["layers"]):
            weights = weights_of(handle, layer)
            if weights is not None:
                settings.append({"layer": layer, "scope": "head", "heads": [strongest_head(weights)]})
        if not settings:
            return
        for radius in block.options["radii"]:
            for n in block.sizes:
                point = {"n": n, "radius": float(radius), "ascend": n in block.options["ascent_lengths"]}
                yield Pass(point, point, n, 1, None, tuple(settings))

    def record(self, handle: Model, payload: dict[str, Any]) -> None:
        """No text is read."""

    def measure(self, handle: Model, recorded: None, payload: dict[str, Any], task: dict[str, Any]) -> list[Row]:
        """One row per input built."""
        layer = weights_of(handle, task["layer"])
        assert layer is not None
        head, radius, n = layer.head(task["heads"][0]).to(torch.float64), payload["radius"], payload["n"]
        solver = Auto(**task["solver"])
        case = f"proposition34.{proposition34_case(real_eigenvalues(head))}"
        built = construct(head, n, radius=radius, names=(case, GROUPS), solver=solver)
        points: list[tuple[str, Tensor, SpectralNorm, float | None, str]] = [
            (
                PAPER if c.name == case else GROUPS,
                c.tokens,
                c.sigma,
                c.predicted,
                f"{c.name}, m = {c.m}; {c.note}".rstrip("; "),
            )
            for c in built
        ]
        if payload["ascend"]:
            found = maximise(
                head, n, radius=radius, built=built, restarts=task["options"]["restarts"], steps=task["options"]["steps"],
                seed=task["seed"], solver=solver, dtype=torch.float32,
            )  # fmt: skip
            points.append((ASCENT, found.tokens, found.sigma, None, f"from {found.labels[found.best]}"))
        bounds = upper_bounds(head, radius, n)
        return [
            _row(handle, task, name, X, sigma, radius)
            | {"predicted": predicted, "construction": about, "companion": companion_estimator(head, X)}
            | {"certified": float(certified_upper(head, X[None])[0])}
            | bounds
            for name, X, sigma, predicted, about in points
        ]


def upper_bounds(head: Attention, radius: float, n: int) -> dict[str, float]:
    """The least refined and the least published set bound for any n tokens of norm at most ``radius``."""
    values = {source: least(source, head, radius, n) for source in ("refined", "castin2024")}
    return {source: value for source, value in values.items() if value is not None}


def _row(handle: Model, task: dict[str, Any], points: str, X: Tensor, sigma: SpectralNorm, radius: float) -> Row:
    norms = X.norm(dim=-1)
    (row,) = sigma.to_rows()
    kept = ("lower", "estimate", "upper", "upper_kind", "delta", "iterations", "status", "converged", "solver")
    return {
        "model": handle.name, "layer": task["layer"], "head": task["heads"][0], "scope": "head", "mask": row["mask"],
        "n": X.shape[0], "input": 0, "document": None, **{name: row[name] for name in kept}, "dtype": row["dtype"],
        "radius": radius, "points": points, "experiment": task["options"]["experiment"],
        "radius_max": float(norms.max()), "radius_rms": float(norms.square().mean().sqrt()),
        "notes": "; ".join(handle.notes),
    }  # fmt: skip
