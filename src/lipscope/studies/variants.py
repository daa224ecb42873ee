"""σ of every kind of attention on the same tokens: its value, its growth in n and in R, the worst found, and the bounds.

Growth is the exponent of a power law fitted to σ over lengths (tokens of norm R) and over radii (n tokens, scaled). An input
of n tokens begins one of more tokens, so values at two lengths are not independent: the interval of an exponent comes from
the exponents of single inputs. The worst σ is searched by ascent over all tokens in the ball B_R; it lies between what was
found and the least bound that holds on that ball.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.variants import VARIANTS, Variant, family
from lipscope.bounds.bound import Bound
from lipscope.bounds.registry import set_bounds
from lipscope.doors import at_least, checked, positive
from lipscope.measure.sigma import check_tokens, local_lipschitz
from lipscope.rounding import Shown
from lipscope.runs.fit import GrowthFit, fit_growth
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Solver
from lipscope.studies.rows import Row, study_row
from lipscope.studies.worst_case.ascent import Progress, maximise

__all__ = ["Comparison", "Kind", "compare", "random_layer", "sphere_tokens"]

LENGTHS = (8, 16, 32, 64, 128)
SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of attention in a comparison.

    Attributes:
        name: its name in ``lipscope.attention.variants.VARIANTS``.
        sigma: σ at n tokens of radius R, one per input.
        at_lengths: σ by number of tokens, one per input.
        by_length: median σ by number of tokens.
        by_radius: median σ by radius.
        growth_n: power law in n, or None with fewer than three lengths. Its interval is for the mean exponent of inputs like
            these; with a single input, for that input and by the scatter about its line.
        growth_radius: power law in R, or None with fewer than three radii; its interval likewise.
        worst: the largest σ found on the ball, or None when it was not searched.
        bounds: upper bounds for all n tokens in the ball, least first.
    """

    name: str
    sigma: SpectralNorm
    at_lengths: dict[int, SpectralNorm]
    by_length: dict[int, float]
    by_radius: dict[float, float]
    growth_n: GrowthFit | None
    growth_radius: GrowthFit | None
    worst: SpectralNorm | None
    bounds: tuple[Bound, ...]

    @property
    def median(self) -> float:
        """Median σ over the inputs."""
        return float(self.sigma.estimate.quantile(0.5))

    def summary(self) -> Row:
        """One line of the comparison: median σ with the ends over all inputs, growth, the worst found, the least bound."""
        row: Row = {"attention": self.name, "sigma": self.median}
        row |= {"lower": float(self.sigma.lower.min()), "upper": float(self.sigma.upper.max())}
        for label, fit in (("n", self.growth_n), ("radius", self.growth_radius)):
            row |= {f"growth_{label}{end}": getattr(fit, f"alpha{end}", None) for end in ("", "_low", "_high")}
        row["worst_found"] = None if self.worst is None else float(self.worst.lower)
        least = self.bounds[0] if self.bounds else None
        return row | {"bound": getattr(least, "value", None), "bound_name": getattr(least, "name", None)}


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Shown):
    """All kinds, in the order they were asked for.

    Attributes:
        kinds: one entry per kind of attention.
        n: number of tokens.
        radius: R.
        mask: the mask in words.
        tokens: where the tokens come from, in words.
        left_out: kinds that do not take this mask.
        without: what the given layer has and all kinds go without, in words.
    """

    kinds: tuple[Kind, ...]
    n: int
    radius: float
    mask: str
    tokens: str
    left_out: tuple[str, ...] = field(default=())
    without: tuple[str, ...] = field(default=())

    def __getitem__(self, name: str) -> Kind:
        kinds = {kind.name: kind for kind in self.kinds}
        if name not in kinds:
            raise KeyError(f"no attention {name!r} in this comparison; there are: {', '.join(kinds)}")
        return kinds[name]

    def summary(self) -> list[Row]:
        """One line per kind."""
        return [{**kind.summary(), "n": self.n, "R": self.radius, "mask": self.mask} for kind in self.kinds]

    def to_rows(self) -> list[Row]:
        """One row per kind, length and input, with the columns of a scan."""
        return [
            study_row(row, kind=kind.name, attention=kind.name, R=self.radius)
            for kind in self.kinds
            for sigma in ({self.n: kind.sigma} | kind.at_lengths).values()
            for row in sigma.to_rows()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON: rows, curves, and all bounds."""
        details = {
            kind.name: {
                "by_length": {str(n): value for n, value in kind.by_length.items()},
                "by_radius": {f"{r:g}": value for r, value in kind.by_radius.items()},
                "bounds": [bound.to_row() for bound in kind.bounds],
            }
            for kind in self.kinds
        }
        return {"n": self.n, "R": self.radius, "mask": self.mask, "tokens": self.tokens, "left_out": list(self.left_out),
                "without": list(self.without), "rows": self.summary(), "details": details}  # fmt: skip


@checked
def compare(
    layer: Attention,
    *,
    n: int = 32,
    radius: float | None = None,
    tokens: Tensor | None = None,
    lengths: Sequence[int] = LENGTHS,
    radii: Sequence[float] | None = None,
    inputs: int = 4,
    search: int = 60,
    names: Sequence[str] = VARIANTS,
    options: dict[str, dict[str, Any]] | None = None,
    seed: int = 0,
    solver: Solver | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Measure every kind of attention with the weights of ``layer`` on the same tokens.

    Args:
        layer: the weights and the mask; biases, rotary embeddings and other extras are left out.
        n: number of tokens at which σ, the worst σ and the bounds are given.
        radius: R, the norm of random tokens; √d by default. With ``tokens``, their largest norm.
        tokens: instead of random tokens on the sphere, (B, m, d): every length takes the first tokens of each input, every
            radius scales them. m must be at least n and every length.
        lengths: numbers of tokens for the growth in n.
        radii: radii for the growth in R; ¼, ½, 1, 2 and 4 times R by default.
        inputs: random inputs per length.
        search: most ascent steps for the worst σ on the ball; 0 for none.
        names: kinds of attention, all by default.
        options: parameters by kind, e.g. ``{"cosine": {"tau": 5.0}}``.
        seed: seed of tokens and search.
        solver: ``Auto()`` by default.
        progress: called with (kinds done, kinds, what).

    Example:
        >>> import lipscope
        >>> layer = lipscope.studies.variants.random_layer(8, heads=2)
        >>> found = lipscope.studies.variants.compare(layer, n=6, lengths=[4, 8, 16], inputs=2, search=0)
        >>> all(kind.sigma.estimate.max() <= kind.bounds[0].value for kind in found.kinds if kind.bounds)
        True
    """
    at_least(0, search=search)
    if n < 2 or inputs < 1:
        raise ValueError(f"n must be at least 2 and inputs at least 1, got n = {n}, inputs = {inputs}")
    for what, given in (("lengths", lengths), ("radii", radii or ())):
        for value in given:
            positive(**{what: value})
    layer = layer.to(torch.float64)
    if tokens is not None:
        tokens = check_tokens(tokens).double()
        need = max([n, *lengths])
        if tokens.shape[1] < need or tokens.shape[2] != layer.width:
            raise ValueError(f"tokens must be at least {need} of width {layer.width}, got shape {tuple(tokens.shape)}")
        size = float(tokens[:, :n].norm(dim=-1).max())
        scale = 1.0 if radius is None else radius / size
        tokens, radius = scale * tokens, scale * size
    radius = math.sqrt(layer.width) if radius is None else radius
    positive(radius=radius)
    chosen = tuple(share * radius for share in SHARES) if radii is None else tuple(sorted(radii))

    def draw(m: int, R: float) -> Tensor:
        if tokens is None:
            return sphere_tokens(m, layer.width, R, inputs, seed)
        return tokens[:, :m] * (R / radius)

    def sigma(member: Attention | Variant, m: int, R: float) -> SpectralNorm:
        return local_lipschitz(member, draw(m, R), solver=solver)

    members = family(layer, names, options)
    if not members:
        raise ValueError(
            f"names must hold a kind of attention that takes mask {layer.mask}, got {', '.join(names) or 'none'}"
        )
    kinds = []
    for done, (name, member) in enumerate(members.items()):
        if progress is not None:
            progress(done, len(members), name)
        here = sigma(member, n, radius)
        along_n = {m: here if m == n else sigma(member, m, radius) for m in sorted(set(lengths))}
        along_R = {R: (here if radius == R else sigma(member, n, R)).estimate for R in chosen}
        starts = {"inputs": draw(n, radius)[:2]}
        if isinstance(member, Variant):
            # Normalisations are steepest at the origin.
            starts["small"] = 0.01 * starts["inputs"][:1]
        ascent: dict[str, Any] = {"restarts": 8, "steps": search, "seed": seed, "starts": starts, "solver": solver}
        finite = [bound for bound in set_bounds(member, radius, n) if math.isfinite(bound.value)]
        kinds.append(
            Kind(
                name=name,
                sigma=here,
                at_lengths=along_n,
                by_length={m: float(found.estimate.quantile(0.5)) for m, found in along_n.items()},
                by_radius={R: float(values.quantile(0.5)) for R, values in along_R.items()},
                growth_n=growth({m: found.estimate for m, found in along_n.items()}),
                growth_radius=growth(along_R),
                worst=maximise(member, n, radius=radius, **ascent).sigma if search else None,
                bounds=tuple(sorted(finite, key=lambda bound: bound.value)),
            )
        )
    where = f"{inputs} random inputs on the sphere" if tokens is None else f"{len(tokens)} given inputs"
    left_out = tuple(name for name in names if name not in members)
    return Comparison(tuple(kinds), n, radius, str(layer.mask), where, left_out, extras(layer))


def extras(layer: Attention) -> tuple[str, ...]:
    """What a layer has that no kind takes over from it.

    Example:
        >>> import dataclasses
        >>> layer = random_layer(4)
        >>> extras(layer), extras(dataclasses.replace(layer, softcap=50.0))
        ((), ('soft-cap',))
    """
    # A bias of zeros is what a model without one is read as.
    biases = (layer.q_bias, layer.k_bias, layer.v_bias, layer.out_bias)
    there = {
        "biases": any(bias is not None and bool(bias.any()) for bias in biases),
        "rotary embeddings": layer.rotary is not None,
        "sinks": layer.sinks is not None,
        "score bias": layer.bias is not None,
        "soft-cap": layer.softcap is not None,
    }
    return tuple(name for name, found in there.items() if found)


@checked
def random_layer(width: int = 16, *, heads: int = 2, mask: str | None = None, seed: int = 0) -> Attention:
    """A layer with weights drawn from N(0, 1/d), as at initialisation, float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> Tensor:
        return torch.randn(width, width, generator=generator, dtype=torch.float64) / math.sqrt(width)

    return Attention(draw(), draw(), draw(), draw(), heads, mask=mask)


@checked
def sphere_tokens(n: int, width: int, radius: float, inputs: int, seed: int = 0) -> Tensor:
    """Random tokens of norm R, (inputs, n, d), float64; shorter sequences are beginnings of longer ones."""
    rows = []
    for i in range(inputs):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + i)
        # Token by token: torch draws other numbers for another n otherwise.
        drawn = torch.stack([torch.randn(width, generator=generator, dtype=torch.float64) for _ in range(n)])
        rows.append(radius * torch.nn.functional.normalize(drawn, dim=-1))
    return torch.stack(rows)


def growth(values: dict[Any, Tensor]) -> GrowthFit | None:
    """The power law of σ at every n (or R), one value per input and always in the same order of inputs."""
    if len(values) < 3 or not all(bool((v > 0).all()) for v in values.values()):
        return None
    x = [float(key) for key, v in values.items() for _ in v]
    inputs = [i for v in values.values() for i in range(len(v))]
    return fit_growth(x, [float(s) for v in values.values() for s in v], inputs=inputs if max(inputs) else None)
