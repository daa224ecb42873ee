"""Masks as objects, strings and tensors say the same."""

from __future__ import annotations

import pytest
import torch

import cases
import lipscope
from lipscope.attention.scores import safe_softmax


@pytest.mark.parametrize(
    "text",
    [
        "full",
        "causal",
        "window:3",
        "window:3:both",
        "prefix:2",
        "pad-left:0,1",
        "pad-right:2",
        "packed:2,3",
        "packed:5:both",
    ],
)
def test_strings_round_trip(text):
    assert str(lipscope.masks.as_mask(text)) == text
    assert str(lipscope.masks.as_mask(f"causal&{text}")) == f"causal&{text}"


@pytest.mark.parametrize("name", list(cases.masks()))
def test_visible_entries_are_those_of_the_definition(name):
    mask, visible, additive = cases.masks()[name]
    parsed = lipscope.masks.as_mask(mask)
    allowed = parsed.allowed(5)
    assert torch.equal(
        torch.ones(()).bool().expand(visible.shape) if allowed is None else allowed.expand(visible.shape), visible
    )
    if isinstance(additive, torch.Tensor):
        assert torch.equal(parsed.additive(5).expand(additive.shape), additive)
    else:
        assert parsed.additive(5) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lowest", [float("-inf"), torch.finfo(torch.float32).min, "own"])
def test_additive_masks_may_write_hidden_as_the_lowest_number(dtype, lowest):
    # The lowest number of float32 is no bfloat16: the nearest one is -inf.
    value = torch.finfo(dtype).min if lowest == "own" else torch.tensor(lowest).to(dtype).item()
    hidden = torch.ones(4, 4).triu(1).bool()
    additive = torch.zeros(4, 4, dtype=dtype).masked_fill(hidden, value)
    mask = lipscope.masks.as_mask(additive)
    assert torch.equal(mask.allowed(4)[0, 0], ~hidden)
    assert (mask.additive(4) == 0).all()


def test_combination_intersects_and_adds():
    bias = cases.random(4, 4, seed=0)
    both = lipscope.masks.Causal() & bias & "window:2:both"
    assert torch.equal(both.allowed(4), lipscope.masks.Window(2).allowed(4))
    torch.testing.assert_close(both.additive(4)[0, 0], bias)


def test_safe_softmax():
    scores = torch.tensor([[0.0, 1.0], [float("-inf"), 2.0], [float("-inf"), float("-inf")]], dtype=torch.float64)
    P = safe_softmax(scores[None, None])[0, 0]
    torch.testing.assert_close(P[:2], torch.softmax(scores[:2], -1))
    assert (P[2] == 0).all()
    with_sink = safe_softmax(scores[None, None], torch.tensor([0.5], dtype=torch.float64))[0, 0]
    expected = torch.softmax(torch.cat([scores, torch.full((3, 1), 0.5)], 1).double(), -1)[:, :2]
    torch.testing.assert_close(with_sink, expected)
    huge = safe_softmax(torch.tensor([[1e300, 0.0]], dtype=torch.float64)[None, None])[0, 0]
    torch.testing.assert_close(huge, torch.tensor([[1.0, 0.0]], dtype=torch.float64))
