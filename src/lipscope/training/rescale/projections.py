"""Where W_Q and W_K of every head are among a layer's parameters, and their rescaling.

Layouts differ (separate matrices, GPT-2's fused ``Conv1D``, NeoX's interleaved heads), but every row of W_Q and W_K, known
from probing the layer, is a row of one of its parameters up to the score scale. So rows are found by direction, not by name,
rows that share a direction by trial, and the result is checked: after the rescaling, queries and keys must have changed by
the factors asked for, and values not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from lipscope.attention.layer import Attention
from lipscope.models.anatomy import Layer, is_linear
from lipscope.models.model import Model


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
