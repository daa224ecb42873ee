"""Bad input is refused at the door: the message names the argument and what would be right."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import cases
import lipscope
from lipscope.cli.main import app

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
    with pytest.raises(TypeError, match="map must be an Attention or a callable, got 'gpt2'"):
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
    with pytest.raises(TypeError, match="mask must be a Mask, a string, a torch tensor or None, got 3"):
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
        (lambda x: x.cumsum(0), "mixes batch items"),
        (lambda x: x.flip(0).cumsum(0).flip(0), "mixes batch items"),
        (lambda x: x.mul_(2), "changes its input in place"),
        (lambda x: x @ torch.ones(4, 4), "give X in the map's dtype"),
        (torch.sign, "differentiated twice"),
        (lambda x: x + torch.rand_like(x), "the map is random"),
    ],
)
def test_maps(function, message):
    with pytest.raises((ValueError, FloatingPointError), match=message):
        lipscope.local_lipschitz(function, cases.random(2, 3, 4, seed=0))


def test_modules_with_a_better_way_in_say_so():
    with pytest.raises(ValueError, match="from_torch"):
        lipscope.local_lipschitz(nn.MultiheadAttention(4, 2).eval(), X.float())
    with pytest.raises(TypeError, match="module must be a MultiheadAttention, got Linear"):
        lipscope.Attention.from_torch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="scope 'head' needs an Attention layer"):
        lipscope.local_lipschitz(torch.tanh, X, scope="head")
    with pytest.raises(ValueError, match="dropout 1"):
        lipscope.local_lipschitz(nn.Dropout(1), X)


def test_types_are_named():
    with pytest.raises(TypeError, match="q must be a torch tensor, got list"):
        lipscope.Attention([[1.0]], W, W)
    with pytest.raises(TypeError, match=r"heads must be an integer, got 2\.0"):
        lipscope.Attention(W, W, W, heads=2.0)
    with pytest.raises(ValueError, match="are for 2 and 3 inputs"):
        lipscope.local_lipschitz(LAYER, X, mask="pad-left:1,2&pad-right:0,1,2")


def test_scores_without_digits_are_refused():
    """float32 scores of 1e8 have no correct digits: no interval could be honest."""
    layer = cases.layer(dtype=torch.float32)
    tokens = 1e4 * cases.random(5, 6, seed=0, dtype=torch.float32)
    with pytest.raises(FloatingPointError, match=r"leave no correct digits in torch\.float32: compute in float64"):
        lipscope.local_lipschitz(layer, tokens)
    assert lipscope.local_lipschitz(layer, tokens, dtype=torch.float64).estimate > 0


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


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_bounds_of_very_many_tokens_are_closed_forms(mask):
    """Nothing of n tokens is written out: at n = 10⁸ that would be hundreds of gigabytes."""
    layer = lipscope.Attention(W, W, W, mask=mask)
    few, many = (lipscope.bounds.table(layer, radius=1.0, n=n) for n in (1000, 10**8))
    assert [b.name for b in few.bounds if b.name not in ("lower.measured", "refined.visibility")] == [
        b.name for b in many.bounds
    ]
    for bound in many.bounds:
        assert bound.tokens is None
        if (
            bound.kind == "set"
            and bound.norm == "Frobenius"
            and bound.name in ("refined.unmasked", "refined.masked", "lower.groups")
        ):
            assert bound.value >= few[bound.name].value * (1 - 1e-12)
    least = min(b.value for b in many.bounds if b.side == "upper" and b.kind == "set" and b.norm == "Frobenius")
    assert max(b.value for b in many.bounds if b.name in ("lower.pair", "lower.groups", "lower.proposition34")) <= least


@pytest.mark.parametrize(
    ("mask", "radius", "n", "message"),
    [
        ("full", 1.0, 10**16, "n must lie between 1 and 1000000000000000"),
        ("full", 1.0, 0, "n must lie between 1 and"),
        ("window:3", 1.0, 10**8, "n must lie between 1 and 65536 for this layer, whose mask or positions"),
        ("full", float("inf"), 4, "radius must be finite and not negative, got inf"),
        ("full", -1.0, 4, "radius must be finite"),
    ],
)
def test_absurd_sets_of_inputs(mask, radius, n, message):
    layer = lipscope.Attention(W, W, W, mask=mask)
    with pytest.raises(ValueError, match=message):
        lipscope.bounds.table(layer, radius=radius, n=n)
    with pytest.raises(ValueError, match=message):
        lipscope.bounds.evaluate("refined.visibility", layer, radius=radius, n=n)


@pytest.mark.parametrize("lengths", ["1:1000000000000:1", "1:99999999999999999999:1", range(1, 10**12), range(1, 10**30)])
def test_lengths_are_counted_before_they_are_written_out(lengths):
    with pytest.raises(ValueError, match="lengths must be at most 10000 numbers: take larger steps"):
        lipscope.scan("gpt2-mini", "python-docs", lengths=lengths)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--inputs", "99999999999999999999"], "inputs must be at most 1000000, got 99999999999999999999"),
        (["--inputs", "1000000"], "1000000 disjoint inputs"),
        (["--lengths", "1:99999999999999999999:log"], "positive numbers of tokens, at most 1000000000"),
        (["--lengths", "1:1000000000000:1"], "lengths must be at most 10000 numbers"),
        (["--lengths", "1:9:0"], "lengths must look like"),
        (["--seed", "99999999999999999999"], "seed must be"),
    ],
)
def test_absurd_numbers_on_the_command_line(arguments, message):
    for command in (["scan", "gpt2-mini"], ["sweep", "--model", "gpt2-mini", "--text", "python-docs"]):
        done = CliRunner().invoke(app, [*command, *arguments])
        assert done.exit_code == 2
        assert message in done.output
