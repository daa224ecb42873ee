"""Layers, masks and operators that the laws are checked on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import lipscope
import reference
from lipscope.attention.core import Linearisation
from lipscope.attention.operators import AttentionOperator, BlockOperator, HeadOperator

N_TOKENS, WIDTH, BATCH = 5, 6, 3


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layer(
    *, heads=2, kv_heads=0, extras="", seed=0, dtype=torch.float64, d=WIDTH, dk=2, dv=3, d_out=4, n=N_TOKENS, sharp=1.0
) -> lipscope.Attention:
    """A random layer; ``extras`` lists optional parts: biases, softcap, bias, sinks, scale, no-out, rotary, turned."""
    kv = kv_heads or heads
    if "rotary" in extras or "turned" in extras:
        dk = 6
    options = {}
    if "biases" in extras:
        options |= {"q_bias": random(heads * dk, seed=seed + 10), "k_bias": random(kv * dk, seed=seed + 11)}
        options |= {"v_bias": random(kv * dv, seed=seed + 12)}
        if "no-out" not in extras:
            options["out_bias"] = random(d_out, seed=seed + 13)
    if "softcap" in extras:
        options["softcap"] = 1.5
    if "score-bias" in extras:
        options["bias"] = random(heads, n, n, seed=seed + 14)
    if "sinks" in extras:
        options["sinks"] = random(heads, seed=seed + 15)
    if "scale" in extras:
        options["scale"] = 0.3
    if "rotary" in extras:
        options["rotary"] = lipscope.Rotary.from_base(6, base=10.0, n=n + 2, dtype=torch.float64)
    if "turned" in extras:
        # Partial, interleaved, other positions for every input, and stretched as YaRN does.
        places = torch.arange(n) * torch.tensor([[1], [2], [-1]]) + torch.tensor([[0], [3], [5]])
        table = lipscope.Rotary.from_base(4, base=5.0, positions=places, interleaved=True, dtype=torch.float64)
        options["rotary"] = lipscope.Rotary(1.2 * table.cos, 1.2 * table.sin, interleaved=True)
    out = None if "no-out" in extras else random(d_out, heads * dv, seed=seed + 3)
    full = lipscope.Attention(
        sharp * random(heads * dk, d, seed=seed),
        random(kv * dk, d, seed=seed + 1),
        random(kv * dv, d, seed=seed + 2),
        out,
        heads,
        kv_heads,
        **options,
    )
    return full.to(dtype)


EXTRAS = {
    "plain": "",
    "biases": "biases",
    "softcap": "softcap biases",
    "score-bias": "score-bias",
    "sinks": "sinks",
    "everything": "biases softcap score-bias sinks scale",
    "no-out": "no-out biases",
    "rotary": "rotary biases",
    "turned": "turned biases softcap sinks",
}


def masks(n: int = N_TOKENS, batch: int = BATCH, heads: int = 2) -> dict[str, tuple[object, Tensor, Tensor | float]]:
    """Name → (mask as a user writes it, visible (batch, heads, n, n), additive likewise or 0), written independently."""
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    everything = torch.ones(n, n, dtype=torch.bool)
    per_head = torch.rand(batch, heads, n, n, generator=torch.Generator().manual_seed(5)) < 0.6
    per_input = per_head[:, 0]
    additive = random(n, n, seed=9).masked_fill(i < j, float("-inf"))
    pads = [0, 1, 2][:batch]
    right = torch.stack([(i < n - p) & (j < n - p) for p in pads])[:, None]
    left = torch.stack([(i >= p) & (j >= p) for p in pads])[:, None]
    document = torch.tensor([0] * 2 + [1] * (n - 2))
    same = document[:, None] == document[None, :]
    table = {
        "full": ("full", everything, 0.0),
        "causal": ("causal", j <= i, 0.0),
        "window": ("window:2", (j <= i) & (i - j < 2), 0.0),
        "window-both": ("window:2:both", (i - j).abs() < 2, 0.0),
        "prefix": ("prefix:2", (j <= i) | (j < 2), 0.0),
        "pad-right": (f"pad-right:{','.join(map(str, pads))}", right, 0.0),
        "pad-left-causal": (f"causal&pad-left:{','.join(map(str, pads))}", left & (j <= i), 0.0),
        "packed": (f"packed:2,{n - 2}", same & (j <= i), 0.0),
        "packed-both": (f"packed:2,{n - 2}:both", same, 0.0),
        "boolean-per-input": (per_input, per_input[:, None], 0.0),
        "boolean-per-head": (per_head, per_head, 0.0),
        "additive": (additive, j <= i, additive.masked_fill(i < j, 0.0)),
        "all-hidden-row": (everything & (i != 1), everything & (i != 1), 0.0),
    }
    full_shape = (batch, heads, n, n)
    return {
        name: (mask, visible.expand(full_shape), a.expand(full_shape) if isinstance(a, Tensor) else a)
        for name, (mask, visible, a) in table.items()
    }


@dataclass(frozen=True)
class Case:
    """An operator and the dense Jacobians (B, M, N) that the oracle gives for it."""

    operator: lipscope.Operator
    dense: Tensor


def attention_case(layer_: lipscope.Attention, mask_name: str, n=N_TOKENS, batch=BATCH, seed=50) -> Case:
    mask, visible, additive = masks(n, batch, layer_.heads)[mask_name]
    X = random(batch, n, layer_.width, seed=seed, dtype=layer_.dtype)
    exact = layer_.to(torch.float64)
    dense = torch.stack(
        [
            reference.jacobian(
                lambda x, b=b: reference.attention(exact, x, visible[b], _item(additive, b), b), X[b].double()
            )
            for b in range(batch)
        ]
    )
    return Case(AttentionOperator.at(layer_.with_mask(mask), X), dense)


def autodiff_case(layer_: lipscope.Attention, mask_name: str) -> Case:
    case = attention_case(layer_, mask_name)
    _, visible, additive = masks(heads=layer_.heads)[mask_name]
    X = random(BATCH, N_TOKENS, layer_.width, seed=50, dtype=layer_.dtype)

    def function(Y: Tensor) -> Tensor:
        return torch.stack([reference.attention(layer_, y, visible[b], _item(additive, b), b) for b, y in enumerate(Y)])

    return Case(lipscope.AutodiffOperator(function, X), case.dense)


def head_case(layer_: lipscope.Attention, mask_name: str) -> Case:
    """The oracle's Jacobian in token space, expressed in the operator's reduced coordinates."""
    mask, visible, additive = masks(heads=layer_.heads)[mask_name]
    X = random(BATCH, N_TOKENS, layer_.width, seed=50, dtype=layer_.dtype)
    exact = layer_.to(torch.float64)
    operator = HeadOperator.at(layer_.with_mask(mask), X)
    dense = []
    for b in range(BATCH):
        for h in range(layer_.heads):
            J = reference.jacobian(
                lambda x, b=b, h=h: reference.head(exact, h, x, visible[b], _item(additive, b), b), X[b].double()
            )
            lifted = torch.block_diag(*[operator.basis[h].double()] * N_TOKENS)
            dense.append(J @ lifted)
    return Case(operator, torch.stack(dense))


def block_case(layer_: lipscope.Attention, mask_name: str, *, diagonal: bool) -> Case:
    mask, visible, additive = masks(heads=layer_.heads)[mask_name]
    X = random(BATCH, N_TOKENS, layer_.width, seed=50, dtype=layer_.dtype)
    item = layer_.with_mask(mask).for_input(0)
    pairs = [(i, j) for i in range(N_TOKENS) for j in range(N_TOKENS) if (i == j) == diagonal]
    rows, columns = torch.tensor(pairs).T
    core = Linearisation.at(*item.project(X[:1]), item.score_rule(N_TOKENS, 1))
    operator = BlockOperator.at(item, core, rows, columns, diagonal=diagonal)
    exact = layer_.to(torch.float64)
    J = reference.jacobian(lambda x: reference.attention(exact, x, visible[0], _item(additive, 0)), X[0].double())
    J = J.reshape(N_TOKENS, -1, N_TOKENS, layer_.width)
    dense = J[rows, :, columns]
    if operator.input_shape[0] < layer_.width:
        dense = dense @ torch.linalg.qr(item.qkv.mT).Q.double()
    return Case(operator, dense)


def _item(additive: Tensor | float, b: int) -> Tensor | float:
    return additive[b] if isinstance(additive, Tensor) else additive
