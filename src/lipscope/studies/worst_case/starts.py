"""Where a search begins: every construction, the inputs the user hands over, jittered constructions, and noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lipscope.measure.sigma import check_tokens
from lipscope.studies.worst_case.constructions import Construction
from lipscope.studies.worst_case.domain import Domain

Given: TypeAlias = Tensor | Mapping[str, Tensor] | None

_JITTER = 0.1
_RADII = (1.0, 0.5, 0.25)


@dataclass(frozen=True, eq=False)
class Starts:
    """Start points in the coordinates of a set.

    Attributes:
        z: coordinates (B, n, d), float64.
        labels: one name per start.
    """

    z: Tensor
    labels: tuple[str, ...]


def gather_starts(
    domain: Domain, built: tuple[Construction, ...], given: Given, restarts: int, n: int, width: int, seed: int
) -> Starts:
    """All constructions and all given inputs; then jittered constructions and noise in turns until there are ``restarts``.

    Tokens of given inputs that lie outside the set are moved to its nearest point.
    """
    parts = [(c.name, domain.coordinates(c.tokens.double())) for c in built]
    named = {} if given is None else {"given": given} if isinstance(given, Tensor) else dict(given)
    for name, inputs in named.items():
        batch = check_tokens(inputs).double().cpu()
        if batch.shape[1:] != (n, width):
            raise ValueError(f"starts must have shape ({n}, {width}) or (B, {n}, {width}), got {tuple(inputs.shape)}")
        parts += [(f"{name} {i}" if len(batch) > 1 else name, domain.coordinates(X)) for i, X in enumerate(batch)]
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.nn.functional.normalize(torch.randn(n, width, generator=generator, dtype=torch.float64), dim=-1)

    known = list(parts)
    for index in range(max(0, restarts - len(known))):
        # One in three moves a known input a little, which breaks its symmetry; the others are tokens of a given norm.
        if index % 3 == 2 and known:
            name, z = known[index // 3 % len(known)]
            parts.append((f"{name}, jittered", domain.project(z + _JITTER * domain.size * noise())))
        else:
            share = _RADII[index // 3 % len(_RADII)] if index % 3 == 0 else 1.0
            parts.append((f"noise {share:g}", domain.project(share * domain.size * noise())))
    return Starts(torch.stack([z for _, z in parts]), tuple(name for name, _ in parts))
