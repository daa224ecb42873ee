"""Bad input is refused at the door: the message names the argument and what would be right."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cases
import lipscope

W = torch.eye(4, dtype=torch.float64)
LAYER = lipscope.Attention(W, W, W, W, heads=2)
X = torch.ones(3, 4, dtype=torch.float64)


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[1, 2] = float("nan")
    return tensor


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (with_nan(X), r"X holds 1 NaN or infinite values, the first at index \(1, 2\)"),
        (X * float("inf"), "X holds 12 NaN or infinite"),
        (X[:0], r"X is empty: shape \(0, 4\)"),
        (torch.ones(2, 0, 4), "X is empty"),
        (X[:, :3], "X has tokens of width 3, but the layer takes width 4"),
        (X[0], r"X must have shape \(n, d\) or \(B, n, d\), got \(4,\)"),
        (X.long(), "X must be floating point, got torch.int64"),
    ],
)
@pytest.mark.parametrize("verb", [lipscope.local_lipschitz, lipscope.influence])
def test_tokens(verb, tokens, message):
    with pytest.raises(ValueError, match=message):
        verb(LAYER, tokens)


def test_tokens_that_are_no_tensor():
    with pytest.raises(TypeError, match="X must be a torch tensor, got list"):
        lipscope.local_lipschitz(LAYER, [[1.0]])
    with pytest.raises(TypeError, match="map must be an Attention or a callable, got str"):
        lipscope.local_lipschitz("gpt2", X)


@pytest.mark.parametrize("scope", ["heads", "block"])
@pytest.mark.parametrize("verb", [lipscope.local_lipschitz, lipscope.influence])
def test_unknown_scope(verb, scope):
    with pytest.raises(ValueError, match=rf"unknown scope '{scope}'.*attention, head"):
        verb(LAYER, X, scope=scope)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("casual", "unknown mask 'casual'; masks are: full, causal, window"),
        ("window", "unknown mask 'window'"),
        ("window:x", "unknown mask 'window:x'"),
        ("causal:both", "unknown mask 'causal:both'"),
        ("window:0", "window width must be at least 1"),
        ("prefix:4", "prefix:4 is longer than the sequence, n = 3"),
        ("packed:2,2", "documents add up to 4 tokens but n = 3"),
        ("packed:0,3", "document lengths must be positive"),
        ("pad-left:3", "3 padding tokens but the sequence has n = 3"),
        ("pad-left:0,1", "is for 2 inputs and 1 heads, but there are 1 inputs and 2 heads"),
        (torch.ones(4, 4).bool(), "mask tensor is for n = 4 tokens but the input has n = 3"),
        (torch.ones(3, 4).bool(), r"mask tensor must be \(n, n\)"),
        (torch.ones(3, 3).long(), "boolean or floating"),
        (torch.full((3, 3), float("nan")), r"NaN or \+inf"),
        (torch.ones(5, 3, 3).bool(), "is for 5 inputs"),
    ],
)
def test_masks(mask, message):
    with pytest.raises(ValueError, match=message):
        lipscope.local_lipschitz(LAYER, X, mask=mask)


def test_mask_of_another_type():
    with pytest.raises(TypeError, match="mask must be a Mask, a string or a tensor, got int"):
        lipscope.local_lipschitz(LAYER, X, mask=3)
    with pytest.raises(ValueError, match="mask applies to Attention layers only"):
        lipscope.local_lipschitz(torch.tanh, X, mask="causal")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.ones(4, 5).double()}, "k takes tokens of width 5, but q takes width 4"),
        ({"k": torch.ones(6, 4).double()}, "k has 6 rows, but kv_heads × query width = 2 × 2 = 4"),
        ({"v": torch.ones(3, 4).double()}, "v has 3 rows, which 2 heads do not divide"),
        ({"out": torch.ones(4, 5).double()}, r"out has shape \(4, 5\), but the heads joined have width 4"),
        ({"q_bias": torch.ones(3).double()}, r"q_bias has shape \(3,\), but \(4,\) is needed"),
        ({"sinks": torch.ones(3).double()}, r"sinks has shape \(3,\), but \(2,\) is needed"),
        ({"heads": 3}, "q has 4 rows, which 3 heads do not divide"),
        ({"kv_heads": 3}, "kv_heads = 3 must be a positive divisor of heads = 2"),
        ({"q": W.float()}, "k is torch.float64 on cpu, but q is torch.float32"),
        ({"q": W.long()}, "q must be floating point"),
        ({"v": with_nan(W)}, "v holds NaN or infinite values"),
        ({"bias": torch.ones(3, 4).double()}, r"bias must be \(n, n\)"),
        ({"bias": torch.ones(5, 3, 3).double()}, "bias is for 5 heads, but the layer has heads = 2"),
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"scale": float("nan")}, "scale must be finite"),
        ({"q": torch.ones(4).double()}, "q must be a non-empty matrix"),
    ],
)
def test_layers(change, message):
    with pytest.raises(ValueError, match=message):
        lipscope.Attention(**({"q": W, "k": W, "v": W, "out": W, "heads": 2} | change))


def test_layer_is_immutable():
    with pytest.raises(AttributeError):
        LAYER.heads = 3
    with pytest.raises(ValueError, match="head must lie between 0 and 1, got 2"):
        LAYER.head(2)


def test_score_bias_of_the_wrong_length():
    layer = lipscope.Attention(W, W, W, bias=torch.zeros(4, 4).double())
    with pytest.raises(ValueError, match="bias is for n = 4 tokens but the input has n = 3"):
        lipscope.local_lipschitz(layer, X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kdim": 3, "vdim": 3}, "kdim and vdim"),
        ({"add_bias_kv": True}, "add_bias_kv"),
        ({"add_zero_attn": True}, "add_zero"),
    ],
)
def test_from_torch_refuses_what_is_not_plain_self_attention(options, message):
    with pytest.raises(ValueError, match=message):
        lipscope.Attention.from_torch(nn.MultiheadAttention(4, 2, **options))


def test_from_torch_refuses_dropout():
    with pytest.raises(ValueError, match=r"call \.eval\(\)"):
        lipscope.Attention.from_torch(nn.MultiheadAttention(4, 2, dropout=0.1))


def test_overflow_is_named():
    layer = lipscope.Attention(1e30 * W.float(), 1e30 * W.float(), W.float())
    with pytest.raises(FloatingPointError, match=r"scores overflow in torch\.float32.*float64"):
        lipscope.local_lipschitz(layer, X.float())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (x, x), "returned tuple, not a tensor"),
        (lambda x: x.detach(), "does not depend differentiably"),
        (lambda x: x.mean(), "batch items must come first"),
        (lambda x: x * float("nan"), "NaN or infinite"),
        (lambda x: x - x.mean(0), "mixes batch items"),
        (lambda x: x + torch.rand_like(x), "the map is random"),
    ],
)
def test_maps(function, message):
    with pytest.raises((ValueError, FloatingPointError), match=message):
        lipscope.local_lipschitz(function, cases.random(2, 3, 4, seed=0))


def test_a_map_without_second_derivative_is_named():
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, g):
            return 2 * g

    with pytest.raises(ValueError, match="cannot be differentiated twice"):
        lipscope.local_lipschitz(Once.apply, cases.random(2, 30, 40, seed=0))


def test_fully_hidden_rows_give_zero():
    hidden = torch.zeros(3, 3, dtype=torch.bool)
    result = lipscope.local_lipschitz(LAYER, X, mask=hidden)
    assert (result.lower, result.estimate, result.upper) == (0.0, 0.0, 0.0)
    assert (LAYER.with_mask(hidden)(X) == 0).all()


def test_influence_needs_tokens():
    with pytest.raises(ValueError, match="from tokens to tokens"):
        lipscope.influence(lambda x: x.sum(-1), cases.random(2, 3, 4, seed=0))
