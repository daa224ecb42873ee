"""What others compute, and the kind of task that measures, one by one, what each difference from their scripts does to σ.

Every variant is measured on the same text as the reference: σ at scope ``attention``, the model's own mask, dropout off.
What is listed is listed because it was seen in the scripts' public revision; whether the published figures came from
exactly that revision is unknown.

The scripts take the first output of ``torch.func.jvp(f, (X,), (u,))``, which is f(X), where the tangent J·u was meant. Each
step of their power iteration then maps u to Jᵀf(X), and the value they report converges to √‖Jᵀf(X)‖, which is not the local
Lipschitz constant. The textbook loop,

    u ← Jᵀ(J u)/‖Jᵀ(J u)‖,   σ² ≈ ‖Jᵀ J u‖          torch.func.jvp and vjp, one input at a time

gives the time that the usual way would take, and shows what an absolute tolerance does to the number.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.masks import Causal, Full
from lipscope.doors import checked
from lipscope.measure.sigma import as_layer, check_tokens, local_lipschitz, working_dtype
from lipscope.models.anatomy import tokens_of
from lipscope.models.model import Model
from lipscope.models.recorded import Recorded, RecordedLayer
from lipscope.runs.kinds import COORDINATES, Text
from lipscope.runs.plan import Block
from lipscope.runs.registry import Pass, Row
from lipscope.runs.work import torch_threads
from lipscope.spectral.autodiff import TensorMap
from lipscope.spectral.solvers import Auto
from lipscope.studies.paper.cast import chosen_layers, weights_of

Map = Callable[[Tensor], Tensor]


@checked
def companion_estimator(map: Attention | TensorMap, X: Tensor) -> float | Tensor:
    """√‖Jᵀf(X)‖_F: what the companion scripts compute. **Not** the local Lipschitz constant.

    Args:
        map: an ``Attention`` layer (all of it, output bias included) or any torch callable.
        X: tokens (n, d) or (B, n, d).

    Returns:
        A number for (n, d), a tensor (B,) for a batch.
    """
    bare = X.ndim == 2
    measured = as_layer(map, bare=bare)
    tokens = check_tokens(X).to(working_dtype(measured, X))
    operator = measured.operator(tokens)
    layer = map.to(tokens.dtype, tokens.device) if isinstance(map, Attention) else map
    with torch.no_grad():
        f = layer(tokens[0])[None] if bare else layer(tokens)
    value: Tensor = torch.linalg.vector_norm(operator.rmatvec(f.flatten(1)), dim=-1).sqrt()
    return value.item() if bare else value


def companion_at(layer: RecordedLayer, scope: str = "attention") -> Tensor:
    """The same for a layer of a model at every recorded input, (B,)."""
    plain = layer.attention if scope == "attention" else None
    values = companion_estimator(plain or layer.map(scope), layer.tokens(scope).contiguous())
    assert isinstance(values, Tensor)
    return values


def plain_forward(layer: Attention, *, dropout: float = 0.0, seed: int = 0) -> Map:
    """The layer on one input (n, d), written out.

    ``dropout`` is the share of attention weights and of outputs set to zero, the others enlarged to match; ``seed`` says
    which, the same for every call, so that the map has a Jacobian.
    """
    if layer.softcap or layer.sinks is not None or layer.bias is not None or layer.kv_heads != layer.heads:
        raise ValueError("plain_forward takes a layer without soft-cap, sinks, score bias and grouped queries")
    if not isinstance(layer.mask, (Full, Causal)):
        raise ValueError(f"plain_forward takes a full or causal mask, got {layer.mask}")
    causal = isinstance(layer.mask, Causal)

    def function(X: Tensor) -> Tensor:
        q, k, v = layer.project(X[None])
        scores = q @ k.mT
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        generator = torch.Generator().manual_seed(seed)
        Y = layer.merge_heads(_drop(torch.softmax(scores, -1), dropout, generator) @ v)[0]
        return _drop(Y if layer.out_bias is None else Y + layer.out_bias.detach(), dropout, generator)

    return function


def power_loop(
    function: Map, X: Tensor, *, rtol: float = 1e-4, atol: float | None = None, steps: int = 100, seed: int = 0
) -> tuple[float, int]:
    """σ at one input (n, d) by power iteration with forward- and reverse-mode products, and the steps taken.

    It stops when σ² changes by less than the share ``rtol`` of itself, or by less than ``atol``, whatever its size.
    """
    u = torch.randn(X.shape, generator=torch.Generator().manual_seed(seed), dtype=X.dtype)
    squared, step = 0.0, 0
    while step < steps:
        step += 1
        u = u / u.norm()
        tangent = torch.func.jvp(function, (X,), (u,))[1]
        pullback: Any = torch.func.vjp(function, X)[1]
        (u,) = pullback(tangent)
        previous, squared = squared, float(u.norm())
        if abs(squared - previous) < (rtol * squared if atol is None else atol):
            break
    return squared**0.5, step


def textbook_seconds(samples: Sequence[tuple[Attention, Tensor]], points: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Time that ``power_loop`` would need for every point, from the time it needs for the samples.

    Work of a step is taken as 16·n·d² + 16·n²·d, as in ``lipscope.runs.tasks``. Counted is the processor's time on one
    thread, which does not depend on what else the machine does; tasks of a run count the time that passes, which is no
    less. ``points`` are (n, d) of every measured input.
    """
    spent, work, steps = 0.0, 0.0, []
    with torch_threads(1):
        for layer, X in samples:
            start = time.process_time()
            _, taken = power_loop(plain_forward(layer), X)
            spent += time.process_time() - start
            work += _work(*X.shape)
            steps.append(taken)
    total = sum(_work(n, d) for n, d in points)
    return {"seconds": spent * total / work, "samples": len(samples), "sample_seconds": spent, "sample_steps": steps}


def _work(n: int, d: int) -> float:
    return 16.0 * n * d * d + 16.0 * n * n * d


def _drop(values: Tensor, share: float, generator: torch.Generator) -> Tensor:
    if share == 0.0:
        return values
    kept = torch.rand(values.shape, generator=generator) >= share
    return values * kept.to(values) / (1 - share)


KIND = "lipscope.studies.paper.differences:Differences"
ABSOLUTE_TOLERANCE = 1e-4
DROPOUT = 0.1
# Plain torch takes seconds per input: so many of them are enough for a ratio.
_SLOW_INPUTS = 3

VARIANTS = {
    "primal": "the first output of torch.func.jvp, which is f(X), is taken for J·u, so √‖Jᵀf(X)‖ is reported",
    "lost mask": "“masked” BERT is run without its mask",
    "residual and LayerNorm": "BERT's residual connection and LayerNorm are inside the map that is measured",
    "dropout": f"dropout ({DROPOUT:g}) stays on for random GPT-2; here each draw of what is dropped is held fixed",
    "token types": "token_type_ids = 0 is passed to GPT-2, which adds the embedding of token 0 at every position",
    "head slice": "rows of GPT-2's fused weights are sliced as heads, where heads are columns",
    "absolute tolerance": f"power iteration stops when σ² changes by less than {ABSOLUTE_TOLERANCE:g}, however large it is",
}


class Differences(Text):
    """σ with one difference at a time; options ``experiment`` and ``layers``."""

    coordinates = (*COORDINATES, "variant")

    def expand(self, block: Block, handle: Model) -> Iterator[Pass]:
        """A task per variant that means something for this model, at its middle layer."""
        layer = chosen_layers(len(handle.layers), block.options["layers"])[-1]
        settings = tuple(
            {"layer": layer, "scope": "head" if name == "head slice" else "attention", "variant": name, "heads": None}
            for name in VARIANTS
            if _applies(name, handle, layer)
        )
        for one in super().expand(dataclasses.replace(block, layers=(layer,)), handle):
            yield dataclasses.replace(one, settings=settings)

    def measure(self, handle: Model, recorded: Recorded, payload: dict[str, Any], task: dict[str, Any]) -> list[Row]:
        """A row per input: σ as it is, and as the difference makes it."""
        layer, variant = task["layer"], task["variant"]
        right, wrong = _MEASURES[variant](_Here(recorded[layer], payload["ids"], Auto(**task["solver"])))
        about = {"model": handle.name, "layer": layer, "head": 0 if variant == "head slice" else None, "n": task["n"],
                 "scope": task["scope"], "mask": handle.layer(layer).mask, "document": None, "variant": variant,
                 "experiment": task["options"]["experiment"], "notes": "; ".join(handle.notes)}  # fmt: skip
        return [
            about | {"input": payload["first"] + item, "reference": reference, "value": value}
            for item, (reference, value) in enumerate(zip(right.tolist(), wrong.tolist(), strict=True))
        ]


def _applies(variant: str, handle: Model, layer: int) -> bool:
    config: Any = getattr(handle.model, "config", None)
    family, causal = getattr(config, "model_type", None), handle.layer(layer).causal
    plain, bert, gpt2 = weights_of(handle, layer) is not None, family == "bert", family == "gpt2"
    return {
        "primal": True,
        "lost mask": bert and causal,
        "residual and LayerNorm": bert and not causal,
        "dropout": gpt2 and plain,
        "token types": gpt2,
        "head slice": gpt2 and plain,
        "absolute tolerance": plain and not (bert and causal),
    }[variant]


@dataclass(frozen=True, eq=False)
class _Here:
    """What every variant starts from: a layer at a text, its ids, and how σ is solved for."""

    layer: RecordedLayer
    ids: list[list[int]]
    solver: Auto

    def sigma(self, layer: RecordedLayer | None = None, scope: str = "attention") -> Tensor:
        """Estimates of σ, one per input."""
        values: Tensor = (layer or self.layer).sigma(scope, solver=self.solver, certificate=False).estimate
        return values

    def again(self, **inputs: Tensor) -> RecordedLayer:
        """The layer at another pass on the same ids."""
        model = self.layer.model
        return model.record(model.token_inputs(input_ids=torch.tensor(self.ids)) | inputs)[self.layer.index]

    def weights(self) -> Attention:
        """The layer's weights under its mask."""
        found = weights_of(self.layer.model, self.layer.index)
        assert found is not None
        return found


Pair = tuple[Tensor, Tensor]


def _lost_mask(here: _Here) -> Pair:
    config: Any = here.layer.model.model.config
    config.is_decoder = False  # BERT hides the future when its configuration says so
    try:
        return here.sigma(), here.sigma(here.again())
    finally:
        config.is_decoder = True


def _dropout(here: _Here) -> Pair:
    layer, wrong = here.weights(), []
    for item, ids in enumerate(here.ids[:_SLOW_INPUTS]):
        X = _tokens_under_dropout(here.layer.model, here.layer.index, ids, seed=item)
        dropped = plain_forward(layer, dropout=DROPOUT, seed=item)
        wrong.append(local_lipschitz(dropped, X, solver=here.solver, certificate=False).estimate)
    return here.sigma()[: len(wrong)], torch.tensor(wrong)


def _head_slice(here: _Here) -> Pair:
    layer, X = here.weights(), here.layer.tokens().contiguous()
    rows = {name: getattr(layer, name).mT[: layer.head_width].contiguous() for name in ("q", "k", "v")}
    heads = (layer.head(0), dataclasses.replace(layer.head(0), **rows))
    right, wrong = (local_lipschitz(one, X, solver=here.solver, certificate=False).estimate for one in heads)
    return right, wrong


def _tolerance(here: _Here) -> Pair:
    function = plain_forward(here.weights())
    wrong = [power_loop(function, X, atol=ABSOLUTE_TOLERANCE)[0] for X in here.layer.tokens()[:_SLOW_INPUTS]]
    return here.sigma()[: len(wrong)], torch.tensor(wrong)


_MEASURES: dict[str, Callable[[_Here], Pair]] = {
    "primal": lambda here: (here.sigma(), companion_at(here.layer)),
    "lost mask": _lost_mask, "dropout": _dropout, "head slice": _head_slice,
    "residual and LayerNorm": lambda here: (here.sigma(), here.sigma(scope="attention+residual")),
    "token types": lambda here: (here.sigma(), here.sigma(here.again(token_type_ids=torch.tensor(here.ids) * 0))),
    "absolute tolerance": _tolerance,
}  # fmt: skip


def _tokens_under_dropout(handle: Model, layer: int, ids: list[int], seed: int) -> Tensor:
    """What attention sees when the model runs in training mode, on its own attention."""
    seen: list[Any] = []
    host = handle.layer(layer).host
    hook = host.register_forward_pre_hook(lambda _, args, kwargs: seen.append(tokens_of(args, kwargs)), with_kwargs=True)
    with hook, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        try:
            handle.model.train()(input_ids=torch.tensor([ids]), use_cache=False)
        finally:
            handle.model.eval()
    found: Tensor = seen[0][0]
    return found
