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
from lipscope.models.anatomy import Layer, is_linear
from lipscope.models.model import Model
from lipscope.models.recorded import Recorded, RecordedLayer
from lipscope.models.seam import CoreCall
from lipscope.spectral.solvers import Auto, Solver


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


class Projections:
    """The weight matrices inside an attention module that take its tokens, one below the other, and rows of them rescaled.

    ``q`` and ``k`` say for every row of W_Q and W_K which row it is, up to a positive factor; −1 for a row of zeros without
    a bias. Rows that look the same are told apart by trial: every candidate is multiplied by a factor of its own, the layer
    is described ``again``, and what a row was multiplied by says where it is. The trial is taken back. A row that is nowhere
    (adapters, parametrisations), or serves as a query and as a key, is refused.
    """

    def __init__(self, layer: Layer, plain: Attention, again: Callable[[], Attention | None]) -> None:
        label = f"layer {layer.index} ({layer.name})"
        self.matrices = list(_matrices(layer, plain.width))
        stored = torch.cat([torch.empty(0, plain.width + 1), *(_stored(*found) for found in self.matrices)]).double()
        self.rows = len(stored)
        wanted = _queries_and_keys(plain)
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
        factors, tried = torch.ones(self.rows, dtype=torch.float64), plain
        if count := int(doubtful.sum()):
            factors[doubtful] += torch.arange(count) / count
            with ExitStack() as trial:
                self._multiply(factors, trial)
                found = again()
            if found is None:
                raise ValueError(f"{label} is no plain attention when its rows are rescaled one by one")
            tried = found
        places = []
        for rows, moved, alike in zip(wanted, _queries_and_keys(tried), same, strict=True):
            ratio = (moved * rows).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
            misses = (factors - ratio).abs().masked_fill(~alike, torch.inf)
            places.append(misses.argmin(1).where(alike.any(1), -1))
        self.q, self.k = places
        both = torch.isin(self.q, self.k) & (self.q >= 0)
        if bool(both.any()):
            raise ValueError(
                f"{label}: what holds row {int(both.nonzero()[0])} of its W_Q gives a query and a key, so they cannot be "
                "rescaled apart"
            )

    def scale(self, q: Tensor, k: Tensor, undo: ExitStack) -> None:
        """Multiply the rows of W_Q and of W_K, and their biases, by a factor per head, until ``undo`` is closed."""
        factors = torch.ones(self.rows, dtype=torch.float64)
        for places, values in ((self.q, q), (self.k, k)):
            factors[places[places >= 0]] = values.repeat_interleave(len(places) // len(values))[places >= 0]
        self._multiply(factors, undo)

    def _multiply(self, factors: Tensor, undo: ExitStack) -> None:
        columns = factors.split([len(_stored(*found)) for found in self.matrices])
        for (weight, bias, transposed), column in zip(self.matrices, columns, strict=True):
            for parameter, by in ((weight, column if transposed else column[:, None]), (bias, column)):
                if parameter is not None and bool((column != 1).any()):
                    content = parameter.detach()
                    undo.callback(content.copy_, content.clone())
                    content.copy_(content.double() * by.to(content.device))


def _matrices(layer: Layer, width: int) -> Iterator[tuple[nn.Parameter, nn.Parameter | None, bool]]:
    """Weights inside the attention module that may hold projections: (weight, bias, stored transposed)."""
    for module in layer.host.modules():
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if module is not layer.out and is_linear(module) and isinstance(weight, nn.Parameter):
            transposed = type(module).__name__ == "Conv1D"
            if weight.shape[0 if transposed else 1] == width:
                yield weight, bias if isinstance(bias, nn.Parameter) else None, transposed


def _stored(weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    return _with_bias(weight.mT if transposed else weight, bias)


def _queries_and_keys(layer: Attention) -> tuple[Tensor, Tensor]:
    return _with_bias(layer.q, layer.q_bias), _with_bias(layer.k, layer.k_bias)


def _with_bias(matrix: Tensor, bias: Tensor | None) -> Tensor:
    """[W b]: a row of W may vanish and its bias not."""
    column = matrix.new_zeros(matrix.shape[0]) if bias is None else bias.detach().to(matrix)
    return torch.cat([matrix.detach(), column[:, None]], dim=1).double().cpu()


def _directions(rows: Tensor) -> Tensor:
    return nn.functional.normalize(rows, dim=1, eps=torch.finfo(rows.dtype).tiny)


def check_rescaled(before: Attention, after: Attention | None, q: Tensor, k: Tensor, where: str) -> None:
    """Refuse a rescaling that did not change queries and keys by their factors (per head), or changed the values."""
    if after is None:
        raise RuntimeError(f"{where} is no plain attention any more after the rescaling of W_Q and W_K")
    one = torch.ones(1)
    for name, factors in (("q", q), ("k", k), ("v", one), ("q_bias", q), ("k_bias", k), ("v_bias", one)):
        old, found = getattr(before, name), getattr(after, name)
        if old is None:
            continue
        each = factors.to(old).repeat_interleave(old.shape[0] // factors.shape[0])
        expected = old * (each[:, None] if old.ndim == 2 else each)
        if not torch.allclose(expected, found, rtol=1e-3, atol=1e-4 * float(expected.abs().max())):
            raise RuntimeError(f"{where}: rescaling the rows of W_Q and W_K did not rescale its queries and keys")


def refuse_unscalable(handle: Model, index: int) -> None:
    """Refuse layers whose scores W_Q and W_K do not scale, each with its reason."""
    layer = handle.layer(index)
    label = f"layer {layer.index} ({layer.name})"
    if sum(other.host is layer.host for other in handle.layers) > 1:
        raise ValueError(f"{label} shares its weights with other layers, so they cannot be rescaled one by one")
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


@dataclass(frozen=True, eq=False)
class Rescaler:
    """Brings heads below a target on given inputs, one layer after the other."""

    handle: Model
    inputs: dict[str, Any]
    by: str
    target: float
    solver: Solver = field(default_factory=Auto)

    def record(self) -> Recorded:
        """A pass with the weights as they are now."""
        return self.handle.record(self.inputs, fresh=True)

    def projections(self, layer: RecordedLayer) -> Projections:
        """Where W_Q and W_K of a layer are stored."""
        return Projections(layer.layer, layer.weights(), lambda: self.record()[layer.index].attention)

    def rescale(self, index: int, chosen: list[int], undo: ExitStack) -> Tensor:
        """Bring the chosen heads of one layer below the target; the factors of all its heads (H,)."""
        layer = self.record()[index]
        plain = layer.weights()
        if self.by == "max-logit":
            needed = factors_for_logits(layer.core(), self.target)
        else:
            needed = factors_for_sigma(plain, layer.tokens("head").contiguous(), self.target, self.solver)
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
        projections = self.projections(layer)
        for attempt in range(_ATTEMPTS):
            # Rounding of the rescaled weights may ask for a little less, from the same weights.
            tried = torch.where(gamma < 1, gamma * (1 - _MARGIN) ** attempt, gamma)
            q, k = split_factors(tried, plain.kv_heads)
            with ExitStack() as trial:
                projections.scale(q, k, trial)
                again = self.record()[index]
                check_rescaled(plain, again.attention, q, k, f"layer {index} ({layer.layer.name})")
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
