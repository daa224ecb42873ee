"""Where W_Q and W_K of every head are among a layer's parameters, by how much they must shrink, and their rescaling.

The scores of a head are s_ij = γ·τ q_i·k_j + B_ij (soft-capped before B_ij is added, where there is a cap), so with
r_ij = τ q_i·k_j the largest logit stays below t when γ r_ij ≤ c_ij for every visible pair, c_ij = t − B_ij: a closed form.
σ is no simple function of γ (at γ = 0 every token attends evenly, and W_V alone counts), so its γ is found by search from 1
downwards, and what was found is a value that was measured.

Layouts differ (separate matrices, GPT-2's fused ``Conv1D``, NeoX's interleaved heads), but every row of W_Q and W_K, known
from probing the layer, is a row of one of its parameters up to the score scale. So rows are found by direction, not by name,
rows that share a direction by trial, and the result is checked: after the rescaling, queries and keys must have changed by
the factors asked for, and values not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipscope.attention.layer import Attention
from lipscope.measure.sigma import sigma
from lipscope.models.affine import matrix_of
from lipscope.models.anatomy import Layer, is_linear
from lipscope.models.model import Model
from lipscope.models.recorded import Recorded, RecordedLayer
from lipscope.models.seam import CoreCall
from lipscope.spectral.solvers import Auto, Solver
from lipscope.training.attach import adapters


class Factors(NamedTuple):
    """What a head of a layer needs."""

    gamma: Tensor  # the factor of its scores, (H,); 0 where the target cannot be met
    lowest: Tensor  # the least value that was reached on the way, (H,)


def raw_scores(call: CoreCall) -> Tensor:
    """τ q_i·k_j (B, H, n, n) of one call of the attention core, one key head per query head."""
    return call.q @ call.k.repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1).mT


def largest_logits(call: CoreCall, gamma: Tensor | float = 1.0) -> Tensor:
    """The largest visible logit of every head (H,) when its scores are multiplied by ``gamma``."""
    raw = raw_scores(call).double()
    factor = gamma[:, None, None].to(raw) if isinstance(gamma, Tensor) else gamma
    return call.rule.scores(factor * raw)[0].amax((0, 2, 3))


def factors_for_logits(call: CoreCall, target: float) -> Factors:
    """The largest γ ≤ 1 per head with which no visible logit exceeds ``target``."""
    raw = raw_scores(call).double()
    visible = call.rule.scores(raw)[0] > -torch.inf
    headroom = torch.full_like(raw, target) - (0 if call.rule.additive is None else call.rule.additive)
    if call.rule.softcap is not None:
        capped = (headroom / call.rule.softcap).clamp(-1, 1)
        headroom = call.rule.softcap * torch.atanh(capped)
    limit = (headroom / raw).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    rising, falling = visible & (raw > 0), visible & (raw < 0)
    most = limit.masked_fill(~rising, torch.inf).amin((0, 2, 3)).clamp(max=1.0)
    least = limit.masked_fill(~falling, -torch.inf).amax((0, 2, 3))
    even = (visible & (raw == 0) & (headroom < 0)).amax((0, 2, 3))
    met = (most > 0) & (most >= least) & ~even
    # Where no factor is enough: the least value over a range of factors, each of which can be had.
    tried = [largest_logits(call, g) for g in (*_RANGE, 0.0)] if not bool(met.all()) else []
    lowest = torch.stack(tried).amin(0) if tried else torch.full_like(most, target)
    return Factors(torch.where(met, most, torch.zeros_like(most)), lowest)


def factors_for_sigma(layer: Attention, X: Tensor, target: float, solver: Solver) -> Factors:
    """A γ ≤ 1 per head with which the upper end of σ stays below ``target`` at all inputs X (B, n, d).

    From 1 downwards in steps of √2, then of 4 towards even attention (γ = 0); the first that is small enough, refined by
    bisection towards its predecessor.
    """
    heads = layer.heads
    lowest = torch.full((heads,), torch.inf, dtype=torch.float64)
    good, bad = torch.zeros(heads, dtype=torch.float64), torch.ones(heads, dtype=torch.float64)
    hopeful = good == 0
    for gamma in (*_RANGE, 0.0, *_BELOW):
        open_ = (good == 0) & hopeful
        if not bool(open_.any()):
            break
        values = head_sigma(layer, X, torch.full((heads,), gamma), solver)
        met = values <= target
        if gamma == 0 or gamma in _RANGE:
            lowest = torch.minimum(lowest, values)
        if gamma == 0:
            # Below the range: only where even attention meets the target there is something to find.
            hopeful = met
            continue
        good = torch.where(open_ & met, torch.full_like(good, gamma), good)
        bad = torch.where(open_ & ~met, torch.full_like(bad, gamma), bad)
    searching = (good > 0) & (good < 1)
    for _ in range(_BISECTIONS if bool(searching.any()) else 0):
        middle = torch.where(searching, (good * bad).sqrt(), good.clamp_min(_RANGE[-1]))
        met = head_sigma(layer, X, middle, solver) <= target
        good = torch.where(searching & met, middle, good)
        bad = torch.where(searching & ~met, middle, bad)
    return Factors(good, lowest)


def head_sigma(layer: Attention, X: Tensor, gamma: Tensor, solver: Solver) -> Tensor:
    """The upper end of σ of every head (H,) with its scores, hence its queries, times ``gamma``; the largest over X."""
    rows = gamma.to(layer.q).repeat_interleave(layer.head_width)
    bias = None if layer.q_bias is None else layer.q_bias * rows
    operator = replace(layer, q=layer.q * rows[:, None], q_bias=bias).operator(X, "head")
    upper: Tensor = sigma(operator, solver, scope="head", shape=(operator.batch // layer.heads, layer.heads)).upper
    return upper.amax(0).cpu()


# Factors that are tried: 1, 1/√2, … 1/256.
_RANGE = tuple(2.0 ** (-k / 2) for k in range(17))
# And those that are tried when scores are so large that these are not small enough: 1/1024, 1/4096, … 2⁻⁶⁰.
_BELOW = tuple(4.0**-k for k in range(5, 31))
_BISECTIONS = 6


def split_factors(gamma: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Factors of the queries (H,) and of the keys (Hkv,) that multiply the scores of head h by γ_h.

    Example:
        >>> split_factors(torch.tensor([0.25, 1.0]), 1)
        (tensor([0.2500, 1.0000]), tensor([1.]))
        >>> split_factors(torch.tensor([0.25, 1.0]), 2)
        (tensor([0.5000, 1.0000]), tensor([0.5000, 1.0000]))
    """
    k = gamma.reshape(kv_heads, -1).amax(1).sqrt()
    return gamma / k.repeat_interleave(gamma.shape[0] // kv_heads), k


class Matrix(NamedTuple):
    """A linear map inside an attention module: the map itself, and what is multiplied when its outputs are."""

    module: nn.Module
    parts: list[tuple[nn.Parameter, int]]  # parameters, each with the dimension that counts outputs

    def rows(self) -> Tensor:
        """[W b], adapters included: a row of W may vanish and its bias not."""
        return _with_bias(*matrix_of(self.module))


class Projections:
    """The weight matrices inside an attention module that take its tokens, one below the other, and rows of them rescaled.

    ``q`` and ``k`` say for every row of W_Q and W_K which row it is, up to a positive factor; −1 for a row of zeros without
    a bias. Rows that look the same are told apart by trial: every candidate is multiplied by a factor of its own, the layer
    is described ``again``, and what a row was multiplied by says where it is. Trials are taken back. A row that is nowhere
    (parametrisations), or serves as a query and as a key, is refused.
    """

    def __init__(self, found: RecordedLayer, again: Callable[[], Attention]) -> None:
        label = f"layer {found.index} ({found.layer.name})"
        self.matrices = list(_matrices(found.layer, width := found.tokens().shape[-1]))
        self.sizes = [len(matrix.rows()) for matrix in self.matrices]
        with ExitStack() as trial:
            stored = self._stored(width)
            weights, biases = float(stored[:, :-1].norm(dim=1).max()), float(stored[:, -1].abs().max())
            if small := 0 < weights < _LARGE_BIAS * biases:
                # W is probed as (W z + b) − b, in which a huge b leaves W no digits: for the search it is a small one.
                for parameter, _ in (part for matrix in self.matrices for part in matrix.parts if part[0].ndim == 1):
                    _multiply(parameter, torch.tensor(weights / biases), trial)
            self.q, self.k = self._places(label, again() if small else found.weights(), again)
        self.complete = bool((torch.cat([self.q, self.k]) >= 0).all())
        both = torch.isin(self.q, self.k) & (self.q >= 0)
        if bool(both.any()):
            raise ValueError(
                f"{label}: what holds row {int(both.nonzero()[0])} of its W_Q gives a query and a key, so they cannot be "
                "rescaled apart"
            )

    def _stored(self, width: int) -> Tensor:
        return torch.cat([torch.empty(0, width + 1).double(), *(matrix.rows() for matrix in self.matrices)])

    def _places(self, label: str, plain: Attention, again: Callable[[], Attention]) -> list[Tensor]:
        stored, wanted = self._stored(plain.width), _queries_and_keys(plain)
        same = [_directions(rows) @ _directions(stored).mT >= 1 - _SAME for rows in wanted]
        for what, rows, alike in zip(("W_Q", "W_K"), wanted, same, strict=True):
            # Rotations leave rounding noise in a row of zeros.
            noise = _NOISE * torch.finfo(plain.dtype).eps * float(rows.norm(dim=1).max())
            lost = (rows.norm(dim=1) > noise) & ~alike.any(1)
            if bool(lost.any()):
                raise ValueError(
                    f"{label}: row {int(lost.nonzero()[0])} of its {what} is in none of its weight matrices, so {what} "
                    "cannot be rescaled: merge adapters and remove parametrisations first"
                )
        doubtful = torch.cat([alike[alike.sum(1) > 1] for alike in same]).any(0)
        factors, tried = torch.ones(len(stored), dtype=torch.float64), plain
        if count := int(doubtful.sum()):
            factors[doubtful] += torch.arange(count) / count
            with ExitStack() as trial:
                self._multiply(factors, trial)
                tried = again()
        places = []
        for rows, moved, alike in zip(wanted, _queries_and_keys(tried), same, strict=True):
            ratio = (moved * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
            misses = (factors - ratio).abs().masked_fill(~alike, torch.inf)
            places.append(misses.argmin(1).where(alike.any(1), -1))
        return places

    def scale(self, q: Tensor, k: Tensor, undo: ExitStack) -> None:
        """Multiply the rows of W_Q and of W_K, and their biases, by a factor per head, until ``undo`` is closed."""
        factors = torch.ones(sum(self.sizes), dtype=torch.float64)
        for places, values in ((self.q, q), (self.k, k)):
            factors[places[places >= 0]] = values.repeat_interleave(len(places) // len(values))[places >= 0]
        self._multiply(factors, undo)

    def _multiply(self, factors: Tensor, undo: ExitStack) -> None:
        for matrix, column in zip(self.matrices, factors.split(self.sizes), strict=True):
            for parameter, dim in matrix.parts if bool((column != 1).any()) else ():
                _multiply(parameter, column if dim == parameter.ndim - 1 else column[:, None], undo)


def _multiply(parameter: nn.Parameter, by: Tensor, undo: ExitStack) -> None:
    content = parameter.detach()
    undo.callback(content.copy_, content.clone())
    content.copy_(content.double() * by.to(content.device))


def _matrices(layer: Layer, width: int) -> Iterator[Matrix]:
    """Linear maps in the attention module that may be projections. Of W x + s·B A x the rows of W and of B are scaled."""
    inside = {*layer.out.modules()}
    for module in layer.host.modules():
        weight = getattr(module, "weight", None)
        if module in inside or not is_linear(module) or not isinstance(weight, nn.Parameter):
            continue
        inside |= {*module.modules()}
        scaled = [getattr(module, "base_layer", module), *getattr(module, "lora_B", nn.ModuleDict()).values()]
        parts = [
            (parameter, int(type(part).__name__ == "Conv1D" and parameter.ndim == 2))
            for part in scaled for parameter in (part.weight, part.bias) if isinstance(parameter, nn.Parameter)
        ]  # fmt: skip
        if weight.shape[1 - parts[0][1]] == width:
            yield Matrix(module, parts)


def _queries_and_keys(layer: Attention) -> tuple[Tensor, Tensor]:
    return _with_bias(layer.q, layer.q_bias), _with_bias(layer.k, layer.k_bias)


def _with_bias(matrix: Tensor, bias: Tensor | None) -> Tensor:
    column = matrix.new_zeros(matrix.shape[0]) if bias is None else bias.detach().to(matrix)
    return torch.cat([matrix.detach(), column[:, None]], dim=1).double().cpu()


def _directions(rows: Tensor) -> Tensor:
    return nn.functional.normalize(rows, dim=1, eps=torch.finfo(rows.dtype).tiny)


def check_rescaled(before: CoreCall, after: CoreCall, q: Tensor, k: Tensor, where: str) -> None:
    """Refuse a rescaling that did not change queries and keys by their factors (per head), or changed the values."""
    for old, found, factors in ((before.q, after.q, q), (before.k, after.k, k), (before.v, after.v, torch.ones(1))):
        expected = old * factors.to(old)[:, None, None]
        sizes = expected.abs()
        # Beside what a coordinate may miss of itself: rounding, where large coordinates of its head are turned into it.
        rounding = _NOISE * torch.finfo(old.dtype).eps * sizes.amax((0, 2, 3), keepdim=True)
        allowed = 1e-3 * sizes + 1e-4 * sizes.amax((0, 2), keepdim=True) + rounding
        if not bool(((found - expected).abs() <= allowed).all()):
            raise ValueError(
                f"{where}: rescaling the rows of W_Q and W_K did not rescale its queries and keys (the magnitudes of DoRA, "
                "say, take the factor back)"
            )


def refuse_unscalable(handle: Model, index: int, *, base: bool = False) -> None:
    """Refuse layers whose scores W_Q and W_K do not scale, each with its reason; adapted ones unless ``base`` may change."""
    layer = handle.layer(index)
    label = f"layer {layer.index} ({layer.name})"
    if sum(other.host is layer.host for other in handle.layers) > 1:
        raise ValueError(f"{label} shares its weights with other layers, so they cannot be rescaled one by one")
    if not base and adapters(layer.host):
        raise ValueError(
            f"{label} has low-rank adapters: rescaling W + s·BA changes the base weights too, and adapters that are saved "
            "alone would not fit theirs any more. Merge them first, or take QKClip(…, base=True) and save the merged model"
        )
    if not layer.through_seam:
        raise ValueError(f"{label} keeps its own attention and does not show its queries and keys: clip-qk needs them")
    if handle.probe_recording[layer.index].attention is not None:
        return
    norms = [name for name, part in layer.host.named_modules() if "norm" in type(part).__name__.lower()]
    if norms:
        raise ValueError(
            f"{label} normalises its queries and keys ({', '.join(norms)}), so its scores do not change with the size "
            "of W_Q and W_K: clip-qk does not apply. The gain of that normalisation bounds the scores already"
        )
    raise ValueError(f"{label}: its queries and keys are no affine maps of its tokens, so clip-qk does not apply")


# Cosines this close are the same direction: projections are probed in the model's precision.
_SAME = 1e-5
# Rows this many times the precision of the largest one are zero.
_NOISE = 64
# Weights this much smaller than the largest bias lose digits that telling rows apart needs.
_LARGE_BIAS = 0.01


@dataclass(frozen=True, eq=False)
class Rescaler:
    """Brings heads below a target on given inputs, one layer after the other."""

    handle: Model
    inputs: dict[str, Any]
    by: str
    target: float
    solver: Solver = field(default_factory=Auto)
    known: dict[int, Projections] = field(default_factory=dict)  # by layer: where rows are stored does not change

    def record(self) -> Recorded:
        """A pass with the weights as they are now."""
        return self.handle.record(self.inputs, fresh=True)

    def projections(self, layer: RecordedLayer) -> Projections:
        """Where W_Q and W_K of a layer are stored."""
        found = self.known.get(layer.index) or Projections(layer, lambda: self.record()[layer.index].weights())
        if found.complete:
            self.known[layer.index] = found
        return found

    def scaled(self, layer: RecordedLayer, core: CoreCall, q: Tensor, k: Tensor, undo: ExitStack) -> RecordedLayer:
        """The layer with queries and keys multiplied by a factor per head, until ``undo`` is closed; ``core`` is before."""
        self.projections(layer).scale(q, k, undo)
        again = self.record()[layer.index]
        check_rescaled(core, again.core(), q, k, f"layer {layer.index} ({layer.layer.name})")
        return again

    def rescale(self, index: int, chosen: list[int], undo: ExitStack) -> Tensor:
        """Bring the chosen heads of one layer below the target; the factors of all its heads (H,)."""
        layer = self.record()[index]
        core = layer.core()
        if self.by == "max-logit":
            needed = factors_for_logits(core, self.target)
        else:
            needed = factors_for_sigma(layer.weights(), layer.tokens("head").contiguous(), self.target, self.solver)
        gamma = torch.ones(layer.heads, dtype=torch.float64)
        for h in chosen:
            if not float(needed.gamma[h]) > 0:
                raise ValueError(
                    f"target {self.target:g} cannot be reached: {self.by} of layer {layer.index}, head {h} gets as low as "
                    f"{float(needed.lowest[h]):.4g} on this text by rescaling W_Q and W_K, not lower. {_REST[self.by]}"
                )
            gamma[h] = float(needed.gamma[h])
        if bool((gamma == 1).all()):
            return gamma
        for attempt in range(_ATTEMPTS):
            # Rounding of the rescaled weights may ask for a little less, from the same weights.
            tried = torch.where(gamma < 1, gamma * (1 - _MARGIN) ** attempt, gamma)
            q, k = split_factors(tried, core.k.shape[1])
            with ExitStack() as trial:
                again = self.scaled(layer, core, q, k, trial)
                if bool((self._reached(again)[chosen] <= self.target).all()):
                    undo.push(trial.pop_all())
                    return tried
        raise ValueError(f"target {self.target:g} was missed by rounding in layer {layer.index}: use a model in float64")

    def _reached(self, layer: RecordedLayer) -> Tensor:
        if self.by == "max-logit":
            return largest_logits(layer.core())
        upper: Tensor = layer.sigma("head", solver=self.solver, certificate=False).upper
        return upper.amax(0).cpu()


_ATTEMPTS, _MARGIN = 8, 1e-5
_REST = {
    "max-logit": "What is left is the model's own position bias, which no factor of W_Q and W_K changes.",
    "sigma": "What is left comes from W_V: even attention that is spread evenly passes its values on.",
}
