"""How the worst σ grows with the number of tokens, beside what the theorems allow.

At every length the constructions are built and, if asked for, ascent starts from them, from noise, and from the worst
input of the length before with its tokens repeated. A power law c·n^α is fitted to the worst σ, with a bootstrap interval
for α.

``attack`` does this for a layer that stands alone or is a model's. A model's layer is taken with the mask, the positions and
the normalisation that it has on a text: the search stays in the image of that normalisation, and may start from the layer's
own tokens.

``regime_map`` draws the (n, R) map of one head. A set of tokens (ball, sphere, image of a normalisation) is scaled to every
radius R. The borders n = 1 + e^E and n = κ divide the plane into √n growth (short inputs, large radii), plateau (long
inputs, small radii) and what lies between. At the set itself upper and lower bound are followed past both borders, and
constructions and ascent are measured at lengths one can measure. Theorems and proofs: docs/theory/mean-field.md, §5.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.norms import LayerNorm, Normalisation
from lipscope.bounds.domain import domain_of
from lipscope.bounds.exponent import Regime, covering_exponent, regimes
from lipscope.bounds.pairs import HeadPairs
from lipscope.bounds.registry import least, set_bounds
from lipscope.bounds.weights import layer_weights
from lipscope.measure.sigma import local_lipschitz
from lipscope.models.corpora import read_text
from lipscope.models.inputs import require_tokenizer
from lipscope.models.load import load
from lipscope.models.model import Model
from lipscope.models.recorded import RecordedLayer
from lipscope.models.text import Chunker, excerpt_for, parse_lengths
from lipscope.rounding import Shown, interval, round_down
from lipscope.runs.fit import GrowthFit, fit_growth
from lipscope.spectral.result import SpectralNorm
from lipscope.studies.rows import Row, sigma_row
from lipscope.studies.worst_case.ascent import Ascent, Progress, maximise
from lipscope.studies.worst_case.constructions import Construction, construct

Method: TypeAlias = Literal["construct", "ascend"]

# n = 2 … 97 in steps of about √2.
LENGTHS = (2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 97)
# Relative difference below which two measured σ count as equal.
_SAME = 1e-6
SOURCES = ("refined", "castin2024")
SCALES = tuple(2.0 ** (step / 2) for step in range(-8, 5))
# Lengths at which the bounds are followed; the largest power of two among floats is not far beyond the last.
_POINTS, _LARGEST = 32, 990


@dataclass(frozen=True, eq=False)
class WorstInput:
    """The worst input found at one length."""

    n: int  # number of tokens
    tokens: Tensor  # the input (n, d)
    sigma: SpectralNorm  # its σ
    source: str  # the construction, or ``"ascent"``
    built: tuple[Construction, ...]  # every construction at this length
    ascent: Ascent | None  # the search, or None when there was none
    bounds: dict[str, float]  # upper bounds by name, for tokens as long as the longest of the set
    given: float | None = None  # σ at the user's own input of this length, or None


@dataclass(frozen=True, eq=False, repr=False)
class Growth(Shown):
    """Worst σ over lengths."""

    worst: tuple[WorstInput, ...]  # the worst input at every length
    domain: str  # the set in words
    radius: float  # R of the bounds

    @cached_property
    def fits(self) -> dict[str, GrowthFit]:
        """Power laws by curve, ``"worst"`` and every construction without a note; empty with fewer than three lengths."""
        curves, lengths = self.curves(), [w.n for w in self.worst]
        names = ["worst", *(c.name for c in self.worst[0].built if c.name in curves)] if len(lengths) > 2 else []
        return {name: fit_growth(lengths, curves[name]) for name in names if min(curves[name]) > 0}

    def __str__(self) -> str:
        return "\n".join([f"worst σ on {self.domain}", *(f"  n = {w.n}: {w.sigma.estimate:.4g}" for w in self.worst)])

    @property
    def fit(self) -> GrowthFit:
        """The power law of the worst σ."""
        if len(self.worst) < 3:
            raise ValueError(f"a fit needs at least three lengths, this study has {len(self.worst)}")
        if "worst" not in self.fits:
            flat = [w.n for w in self.worst if float(w.sigma.estimate) <= 0]
            raise ValueError(f"σ is 0 at n = {', '.join(map(str, flat))}, and no power law c·n^α passes through 0")
        return self.fits["worst"]

    def curves(self) -> dict[str, list[float]]:
        """σ by length: the worst, ascent, the constructions, the user's inputs, and the upper bounds.

        A construction in which another stands in (it has a note) is no curve of its own, and is left out.
        """
        lines: dict[str, list[float]] = {"worst": [float(w.sigma.estimate) for w in self.worst]}
        for same in zip(*(w.built for w in self.worst), strict=True):
            if not any(c.note for c in same):
                lines[same[0].name] = [float(c.sigma.estimate) for c in same]
        climbed = [float(w.ascent.sigma.estimate) for w in self.worst if w.ascent is not None]
        given = [w.given for w in self.worst if w.given is not None]
        lines |= {name: line for name, line in (("ascent", climbed), ("given", given)) if len(line) == len(self.worst)}
        return lines | {name: [w.bounds[name] for w in self.worst] for name in self.worst[0].bounds}

    def to_rows(self) -> list[Row]:
        """One row per length and source, with the columns of a scan: σ as an interval, the prediction, the least bound."""
        rows = []
        for w in self.worst:
            entries = [(c.name, c.tokens, c.sigma, c.predicted, c.note, 0) for c in w.built]
            if w.ascent is not None:
                origin = f"from {w.ascent.labels[w.ascent.best]}"
                entries.append(("ascent", w.ascent.tokens, w.ascent.sigma, None, origin, w.ascent.start_seed))
            # Set bounds hold on the whole set, as those of a scan do for every input of the model.
            known: Row = {"radius_norm": self.radius}
            for by in SOURCES:
                known[f"{by}_global"] = min((value for name, value in w.bounds.items() if name.startswith(by)), default=None)
            for name, tokens, sigma, predicted, note, seed in entries:
                row = sigma_row(sigma, kind=name, tokens=tokens, source=name, predicted=predicted, start_seed=seed)
                own = {"bound": min(w.bounds.values()), "worst": name == w.source, "set": self.domain, "note": note}
                rows.append(row | known | own)
        return rows


def growth(
    attention: Attention | Callable[[int], Attention],
    lengths: Sequence[int] = LENGTHS,
    *,
    radius: float | None = None,
    norm: Normalisation | None = None,
    method: Method = "construct",
    head: int | None = None,
    starts: Callable[[int], Tensor] | None = None,
    restarts: int = 16,
    steps: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
) -> Growth:
    """The worst σ found at every length, and its exponent.

    Args:
        attention: the layer, or a function that gives it for n tokens (when its mask or bias depends on n).
        lengths: numbers of tokens, each at least 2.
        radius: R, for tokens of norm at most R.
        norm: instead of a radius, a ``LayerNorm`` or ``RMSNorm``: tokens in its image.
        method: ``"construct"`` measures the constructions, ``"ascend"`` also climbs from them.
        head: build the constructions from this head only.
        starts: for ``"ascend"``, inputs (n, d) or (B, n, d) to start from as well, such as real activations.
        restarts: see ``maximise``.
        steps: see ``maximise``.
        seed: see ``maximise``.
        progress: called with (lengths done, lengths, what).

    Raises:
        ValueError: when a length is below 2, the method is unknown, or the set is not given.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> layer = lipscope.Attention(-3 * W, W, W, scale=1.0)
        >>> study = lipscope.studies.worst_case.growth(layer, [16, 32, 64], radius=1.4)    # n ≪ e^{2γR²} ≈ 10⁵: √n
        >>> 0.48 < study.fit.alpha < 0.53
        True
    """
    if method not in ("construct", "ascend"):
        raise ValueError(f"method must be 'construct' or 'ascend', got {method!r}")
    if not lengths:
        raise ValueError("lengths is empty: give numbers of tokens, each at least 2")
    if isinstance(attention, torch.nn.Module):
        raise TypeError("attention must be an Attention, or make one of a length: for a module, Attention.from_torch")
    at = attention if callable(attention) and not isinstance(attention, Attention) else lambda n: attention
    ordered = sorted(set(lengths))
    worst: list[WorstInput] = []
    for done, n in enumerate(ordered, start=1):
        layer = at(n)
        if not isinstance(layer, Attention):
            raise TypeError(f"attention must give an Attention for n = {n}, got {type(layer).__name__}")
        given = None if starts is None else starts(n).double()
        begin = {} if given is None else {"given": given}
        if worst:  # the worst input of the length before, its tokens repeated in turn
            begin["shorter"] = worst[-1].tokens[torch.arange(n) % worst[-1].n]
        built = construct(layer, n, radius=radius, norm=norm, head=head)
        ascent = None
        if method == "ascend":
            ascent = maximise(
                layer, n, radius=radius, norm=norm, restarts=restarts, steps=steps, seed=seed, built=built, starts=begin
            )  # fmt: skip
        largest = max(float(c.sigma.estimate) for c in built)
        # Where the general pair stands in for another construction, both have the same input: name the pair, which has no
        # note.
        equals = [c for c in built if float(c.sigma.estimate) >= largest * (1 - _SAME)]
        best = max(equals, key=lambda c: (not c.note, float(c.sigma.estimate)))
        found = (best.tokens, best.sigma, best.name)
        if ascent is not None and float(ascent.sigma.estimate) >= float(best.sigma.estimate):
            found = (ascent.tokens, ascent.sigma, "ascent")
        domain, real = domain_of(radius, norm, layer.width), None
        bounds = {bound.name: bound.value for bound in set_bounds(layer, domain.radius, n, SOURCES)}
        if given is not None:
            sigmas = local_lipschitz(layer.to(torch.float64), given, certificate=False).estimate
            real = float(torch.as_tensor(sigmas).max())
        worst.append(WorstInput(n, *found, built, ascent, bounds, real))
        if progress is not None:
            progress(done, len(ordered), f"n = {n}: σ ≥ {round_down(worst[-1].sigma.lower)}")
    return Growth(tuple(worst), str(domain), domain.radius)


def attack(
    target: str | os.PathLike[str] | Model | Attention,
    *,
    layer: int = 0,
    head: int | None = None,
    text: str | os.PathLike[str] = "python-docs",
    lengths: str | Sequence[int] = LENGTHS,
    radius: float | None = None,
    method: Method = "construct",
    restarts: int = 16,
    steps: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
) -> Growth:
    """The inputs at which a layer is least smooth: the worst σ found at every number of tokens, beside its bounds.

    Args:
        target: a model or its name, or an ``Attention`` layer.
        layer: of a model, which layer; negative ones count from the end.
        head: one head before W_O; the whole layer by default.
        text: of a model, where its masks and tokens come from: a name from ``lipscope corpora``, a file or a directory.
        lengths: numbers of tokens, each at least 2, or a string such as ``"2:97:log"``.
        radius: R, for all tokens of norm at most R; by default what comes out of the layer's own normalisation, or else
            the largest norm on the text. An ``Attention`` needs it.
        method: ``"construct"`` measures inputs with closed forms, ``"ascend"`` also climbs from them.
        restarts: see ``lipscope.studies.worst_case.maximise``.
        steps: see there.
        seed: of the search, and of where in the text the inputs lie.
        progress: a function of (lengths done, lengths, what).
        notice: called with what was chosen on the caller's behalf, in words.

    Returns:
        A ``Growth``: ``.worst`` has the worst input of every length, ``.fit`` the power law of its σ.

    Raises:
        ValueError: when a length is below 2, the layer has no weights to search by, or nothing says how long tokens are.

    Example:
        >>> import torch, lipscope
        >>> layer = lipscope.Attention(-3 * torch.eye(2), torch.eye(2), torch.eye(2), scale=1.0)
        >>> study = lipscope.attack(layer, lengths=[4, 8], radius=1.4)
        >>> study.worst[1].sigma.estimate > study.worst[0].sigma.estimate
        True
    """
    sizes = parse_lengths(lengths) if isinstance(lengths, str) else list(lengths)
    search: dict[str, Any] = {"method": method, "restarts": restarts, "steps": steps, "seed": seed, "progress": progress}
    if isinstance(target, Attention):
        if radius is None:
            raise ValueError("weights alone do not say how long tokens are: give a radius, the largest norm of a token")
        return growth(target if head is None else target.head(head), sizes, radius=radius, **search)
    say = notice or (lambda words: None)
    handle = target if isinstance(target, Model) else load(target)
    index = handle.layer(layer).index
    if head is not None:
        handle.check_heads(index, [head])
    if min(sizes, default=2) < 2:
        raise ValueError(f"lengths must be at least 2, got {min(sizes)}")
    documents = excerpt_for(read_text(os.fspath(text)), sizes, 1, seed)
    chunker = Chunker(documents, require_tokenizer(handle))
    extra = len(chunker.prefix) + len(chunker.suffix)
    if skipped := [n for n in sizes if n <= extra]:
        sizes = [n for n in sizes if n > extra]
        if not sizes:
            raise ValueError(f"lengths must be more than the {extra} special tokens of {handle.name}, got {skipped}")
        say(f"lengths {skipped} leave no room for text beside {extra} special tokens: left out")
    chunks = chunker.chunks(sizes, 1, seed)

    @cache
    def at(n: int) -> RecordedLayer:
        return handle.record(input_ids=torch.tensor(chunks[n][0]))[index]

    def attention(n: int) -> Attention:
        whole = at(n).weights().for_input(0).to(torch.float64)
        return whole if head is None else whole.head(head)

    def tokens(n: int) -> Tensor:
        return at(n).tokens()[0].double()

    where: dict[str, Any] = {"radius": radius}
    if radius is None:
        norm = at(sizes[-1]).norm
        if norm is not None:
            where = {"norm": norm}
            say(f"tokens lie in the image of the layer's own {type(norm).__name__}")
        else:
            where = {"radius": max(float(tokens(n).norm(dim=-1).max()) for n in sizes)}
            say(f"no normalisation comes before this layer: the radius is the largest token norm on {text}")
    return growth(attention, sizes, **where, starts=tokens, **search)


@dataclass(frozen=True, eq=False, repr=False)
class RegimeMap(Shown):
    """Where a head is in the (n, R) plane, and its worst σ over n at one set."""

    borders: tuple[tuple[float, Regime], ...]  # the radius of the scaled set with its borders in n, for every scale
    here: Regime  # the borders of the set itself
    lengths: tuple[int, ...]  # powers of two, past both borders of the set where floats reach that far
    lower: tuple[float, ...]  # at every length, what the supremum of σ over the set is at least
    upper: tuple[float, ...]  # what it is at most
    found: Growth  # constructions and ascent at the measured lengths

    def to_dict(self) -> dict[str, Any]:
        """Borders and bounds as plain values; rows of σ are those of ``found``."""
        borders = [{"radius": radius, **vars(regime)} for radius, regime in self.borders]
        return {"borders": borders, "bounds": self.to_rows()}

    def to_rows(self) -> list[dict[str, Any]]:
        """One per length: between what σ over the set is at its worst."""
        bounds = zip(map(float, self.lengths), self.lower, self.upper, strict=True)
        return [{"n": n, "lower": low, "upper": high} for n, low, high in bounds]

    def __str__(self) -> str:
        ends = interval(self.lower[-1], self.upper[-1])
        return f"worst σ of a head on {self.found.domain}: in {ends} at n = {self.lengths[-1]:g}"


def regime_map(
    attention: Attention,
    lengths: Sequence[int] = (2, 4, 8, 16, 32, 64),
    *,
    radius: float | None = None,
    norm: Normalisation | None = None,
    scales: Sequence[float] = SCALES,
    restarts: int = 4,
    steps: int = 30,
    progress: Progress | None = None,
) -> RegimeMap:
    """Draw the map of one head: borders in n for every radius, bounds and worst inputs for the set itself.

    Args:
        attention: one head, full or causal mask: ``layer.head(h)``.
        lengths: numbers of tokens at which constructions and ascent are measured.
        radius: R, for tokens of norm at most R.
        norm: instead of a radius, a ``LayerNorm`` or ``RMSNorm``: tokens in its image, with ε = 0 an ellipsoid.
        scales: by how much the set is scaled for the borders; gains and offset of a norm alike.
        restarts: of the ascent, see ``maximise``.
        steps: of the ascent.
        progress: called with (lengths done, lengths, what).

    Raises:
        ValueError: for several heads, and where ``lipscope.bounds.exponent.regimes`` has no borders.

    Example:
        >>> I = torch.eye(2, dtype=torch.float64)
        >>> found = regime_map(Attention(-I, I, I, scale=1.0), [2, 4, 8], radius=1.5, steps=2)
        >>> [found.here.at(n) for n in (8, 10**6)]
        ['√n growth', 'plateau']
        >>> all(low <= high for low, high in zip(found.lower, found.upper))
        True
    """
    if attention.heads != 1:
        raise ValueError(f"a map is of one head, got {attention.heads}: give attention.head(h)")
    domain = domain_of(radius, norm, attention.width)
    borders = []
    for scale in scales:
        larger = None if norm is None else replace(norm, weight=scale * norm.weight)
        if isinstance(larger, LayerNorm) and larger.bias is not None:
            larger = replace(larger, bias=scale * larger.bias)
        there = domain_of(None if radius is None else scale * radius, larger, attention.width)
        borders.append((there.radius, regimes(attention, there)[0]))
    (here,) = regimes(attention, domain)
    pairs = HeadPairs(attention.to(torch.float64), 0, domain)
    u, w = pairs.best
    image = attention.v.double() @ (u - w)
    image = image if attention.out is None else attention.out.double() @ image
    gain = float(torch.linalg.vector_norm(image) / torch.linalg.vector_norm(u - w).clamp_min(1e-300))
    gain = max(0.0, gain - layer_weights(attention).image[0].value_error)
    every = covering_exponent(attention, domain.radius, domain=domain)
    last = math.ceil(min(_LARGEST, max(here.log_plateau, math.log(max(lengths))) / math.log(2) + 4))
    turn = round(here.exponent / math.log(2))
    sizes = [2**k for k in sorted({*np.linspace(1, last, _POINTS).astype(int).tolist()})]
    lower: list[float] = []
    upper: list[float] = []
    for n in sizes:
        grown = 2 ** int(min(math.log2(n), here.log_growth / math.log(2)))
        # Groups of about n/e^E tokens gain most. Copies of a shorter input move together, so its value holds for n too.
        groups = {1, *(n >> shift for shift in range(max(1, turn - 6), turn + 7))} - {0}
        reached = (*(pairs.gain((u, w), n, m) for m in groups), math.sqrt(grown - 1) / 2 * gain, *lower[-1:])
        allowed = (least("refined", attention, domain.radius, n), None if every is None else every.value)
        lower.append(max(reached))
        upper.append(min(value for value in allowed if value is not None))
    found = growth(
        attention, lengths, radius=radius, norm=norm, method="ascend", restarts=restarts, steps=steps, progress=progress
    )
    return RegimeMap(tuple(borders), here, tuple(sizes), tuple(lower), tuple(upper), found)
